"""A model's shape in transformers' config.json and in ours, for GPT-2 and Llama.

What our model cannot represent (scaled rotary positions, another activation, …) is refused, all of
it at once: weights that load into another computation would be wrong without a sign.
"""

from collections.abc import Mapping
from typing import Any

from course_lib.checkpoint.errors import CheckpointError
from course_lib.model import ModelConfig

TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three names of our GELU


def family_of(config: ModelConfig) -> str:
    """Which of transformers' models has this shape: "GPT-2" or "Llama".

    Raises CheckpointError naming, for both, what does not fit.
    """
    needs = {
        "GPT-2": {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True,
                  "key_value_heads": config.heads},
        "Llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"},
    }  # fmt: skip
    misfits = {
        name: [
            f"{key} = {value}, not {getattr(config, key)}"
            for key, value in wanted.items()
            if getattr(config, key) != value
        ]
        for name, wanted in needs.items()
    }
    for name, faults in misfits.items():
        if not faults:
            return name
    raise CheckpointError(
        "transformers has no model of this shape: "
        + "; ".join(f"its {name} has {', '.join(words)}" for name, words in misfits.items())
    )


def config_from_hugging_face(table: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of the model that a config.json describes.

    Where transformers has three dropouts (GPT-2), they must be equal. Raises CheckpointError
    naming everything that our model cannot represent.
    """
    readers = {"gpt2": _from_gpt2, "llama": _from_llama}
    kind = table.get("model_type")
    if kind not in readers:
        raise CheckpointError(f"model_type {kind!r} is not known here; known are gpt2 and llama")
    reader = _Reader(table)
    if table.get("quantization_config"):
        reader.refuse("quantization_config: weights must be plain numbers")
    config = readers[kind](reader)
    if not reader.faults:
        reader.faults = config.faults()
    if reader.faults:
        raise CheckpointError(
            f"config.json of a {kind} that our model cannot represent: {'; '.join(reader.faults)}"
        )
    return config


class _Reader:
    """Reads a config.json and collects all that is wrong with it."""

    def __init__(self, table: Mapping[str, Any]):
        self.table, self.faults = table, []

    def refuse(self, fault: str) -> None:
        self.faults.append(fault)

    def whole(self, key: str, default: int | None = 0) -> int | None:
        """A whole number; default None makes the key optional."""
        value = self.table.get(key)
        if value is None and default is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(f"{key} = {value!r} must be a whole number")
            return 1
        return value

    def number(self, key: str, default: float, table: Mapping[str, Any] | None = None) -> float:
        value = (self.table if table is None else table).get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(f"{key} = {value!r} must be a number")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.table.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} = {value!r} must be true or false")
            return default
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse other values than the ones that our model computes; the first is the default."""
        value = self.table.get(key, allowed[0])
        if value not in allowed:
            self.refuse(f"{key} = {value!r}, only {' or '.join(map(str, allowed))}")


def _from_gpt2(read: _Reader) -> ModelConfig:
    read.only("activation_function", *TANH_GELU)
    read.only("scale_attn_weights", True)
    read.only("scale_attn_by_inverse_layer_idx", False)
    read.only("add_cross_attention", False)
    dropouts = {key: read.number(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(dropouts.values())) > 1:
        read.refuse(f"dropouts {dropouts}: ours are all equal, so set them alike in config.json")
    return ModelConfig(
        layers=read.whole("n_layer"),
        width=read.whole("n_embd"),
        heads=read.whole("n_head"),
        vocab=read.whole("vocab_size"),
        context=read.whole("n_positions"),
        mlp_width=read.whole("n_inner", None),
        tie_embeddings=read.flag("tie_word_embeddings", True),
        dropout=dropouts["embd_pdrop"],
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
    )


def _from_llama(read: _Reader) -> ModelConfig:
    read.only("hidden_act", "silu", "swish")
    read.only("attention_dropout", 0.0, None)
    bias = read.flag("attention_bias", False)
    if bias != read.flag("mlp_bias", False):
        read.refuse("attention_bias differs from mlp_bias: ours are one switch")
    width, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    head_width = read.whole("head_dim", None)
    if head_width is not None and head_width * heads != width:
        read.refuse(f"head_dim = {head_width} must be hidden_size / num_attention_heads")
    return ModelConfig(
        layers=read.whole("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=read.whole("num_key_value_heads", None),
        vocab=read.whole("vocab_size"),
        context=read.whole("max_position_embeddings"),
        mlp_width=read.whole("intermediate_size"),
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        bias=bias,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope_base=_rope_base(read),
    )


def _rope_base(read: _Reader) -> float:
    """Base of the rotary wavelengths: `rope_parameters` (transformers 5), or `rope_theta`."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table = read.table.get(key) or {}
        if not isinstance(table, dict):
            read.refuse(f"{key} = {table!r} must be an object")
        else:
            rope.update(table)
    kind = rope.get("rope_type", rope.get("type", "default"))
    others = rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind != "default" or others or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        read.refuse(f"rotary positions {rope}: only the default kind, without scaling")
    return read.number("rope_theta", read.number("rope_theta", 10_000.0), rope)


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The config.json by which transformers builds this model.

    Llama's dropout is not carried over: transformers' Llama has none in the residual stream.
    Raises CheckpointError where transformers has no such model.
    """
    family = family_of(config)
    common = {
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # ids of special tokens are the tokenizer's, not the model's
        "eos_token_id": None,
    }
    if family == "GPT-2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_positions": config.context,
            "n_inner": config.mlp_width,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            **common,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "intermediate_size": config.inner_width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
        **common,
    }
