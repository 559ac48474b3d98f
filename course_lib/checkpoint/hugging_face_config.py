"""A model's shape in transformers' config.json and in ours, for GPT-2 and Llama, as tables.

What our model cannot represent (scaled rotary positions, another activation, …) is refused, all of
it at once: weights that load into another computation would be wrong without a sign.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.checkpoint.errors import CheckpointError
from course_lib.model import ModelConfig


@dataclass(frozen=True)
class Family:
    """One kind of model in transformers."""

    architecture: str
    shape: Mapping[str, Any]  # what our configuration must say
    fields: Mapping[str, str]  # their key -> ours
    defaults: Mapping[str, Any]  # what transformers takes where config.json says nothing
    only: Mapping[str, tuple]  # what our model computes; the first is transformers' default


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        shape={"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True},
        fields={
            "n_layer": "layers", "n_embd": "width", "n_head": "heads", "vocab_size": "vocab",
            "n_positions": "context", "n_inner": "mlp_width", "layer_norm_epsilon": "norm_eps",
            "tie_word_embeddings": "tie_embeddings", "embd_pdrop": "dropout",
            "attn_pdrop": "dropout", "resid_pdrop": "dropout",
        },
        defaults={
            "n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,), "quantization_config": (None,),
        },
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        shape={"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope"},
        fields={
            "num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads",
            "num_key_value_heads": "kv_heads", "vocab_size": "vocab", "rope_theta": "rope_base",
            "max_position_embeddings": "context", "intermediate_size": "mlp_width",
            "rms_norm_eps": "norm_eps", "attention_bias": "bias", "mlp_bias": "bias",
            "tie_word_embeddings": "tie_embeddings",
        },
        defaults={
            "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
        },
        only={
            "hidden_act": ("silu", "swish"), "attention_dropout": (0.0,),
            "rope_type": ("default",), "partial_rotary_factor": (1.0,),
            "quantization_config": (None,),
        },
    ),
}  # fmt: skip


def family_of(config: ModelConfig) -> str:
    """Which of transformers' models has this shape: "gpt2" or "llama".

    Raises CheckpointError naming, for both, what does not fit.
    """
    faults = []
    for name, family in FAMILIES.items():
        grouped = "kv_heads" in family.fields.values()
        needs = family.shape | ({} if grouped else {"key_value_heads": config.heads})
        misfits = {key: value for key, value in needs.items() if getattr(config, key) != value}
        if not misfits:
            return name
        faults += [f"{name} has {k} = {v}, not {getattr(config, k)}" for k, v in misfits.items()]
    raise CheckpointError(f"transformers has no model of this shape: {'; '.join(faults)}")


def config_from_hugging_face(table: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of the model that a config.json describes.

    Raises CheckpointError naming everything that our model cannot represent.
    """
    kind = table.get("model_type")
    if kind not in FAMILIES:
        known = " and ".join(FAMILIES)
        raise CheckpointError(f"model_type {kind!r} is not known here; known are {known}")
    family = FAMILIES[kind]
    rope = table.get("rope_parameters") or table.get("rope_scaling") or {}  # transformers 5, 4
    given = {"rope_type": rope.get("type", "default"), **table, **rope}
    given = {**family.defaults, **{key: value for key, value in given.items() if value is not None}}
    faults = [
        f"{key} = {given[key]!r}, only {' or '.join(map(str, allowed))}"
        for key, allowed in family.only.items()
        if given.get(key, allowed[0]) not in allowed
    ]
    values = {}
    for theirs, ours in family.fields.items():
        if theirs not in given:
            faults.append(f"{theirs} is missing")
        elif values.setdefault(ours, given[theirs]) != given[theirs]:
            faults.append(f"{theirs} = {given[theirs]}, not {values[ours]}: ours is one {ours}")
    width, heads = values.get("width"), values.get("heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        ours = width // heads
        if given.get("head_dim", ours) != ours:
            faults.append(f"head_dim = {given['head_dim']}, only hidden_size / heads = {ours}")
    config = None if faults else ModelConfig(**family.shape, **values)
    if faults := faults or config.faults():
        raise CheckpointError(f"a {kind} that our model cannot represent: {'; '.join(faults)}")
    return config


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The config.json by which transformers builds this model.

    Llama's dropout is not carried over: transformers' Llama has none in the residual stream.
    Raises CheckpointError where transformers has no such model.
    """
    kind = family_of(config)
    resolved = {"mlp_width": config.inner_width, "kv_heads": config.key_value_heads}
    return {
        "model_type": kind,
        "architectures": [FAMILIES[kind].architecture],
        "bos_token_id": None,  # ids of special tokens are the tokenizer's, not the model's
        "eos_token_id": None,
        **{
            theirs: resolved.get(ours, getattr(config, ours))
            for theirs, ours in FAMILIES[kind].fields.items()
        },
    }
