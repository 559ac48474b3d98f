"""Weights to and from transformers: the same logits there, and nothing lost or made up here."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from course_lib.checkpoint import CheckpointError, hugging_face
from course_lib.checkpoint.hugging_face_config import config_from_hugging_face
from course_lib.model import ModelConfig, build
from tests import checks_checkpoint as checks
from tests import ranks_checkpoint as ranks

GPT = ModelConfig(layers=2, width=24, heads=4, vocab=37, context=12)
LLAMA = ModelConfig(
    layers=2, width=24, heads=4, kv_heads=2, vocab=37, context=12, mlp_width=40, norm="rmsnorm",
    mlp="swiglu", positions="rope", bias=False, tie_embeddings=False, norm_eps=1e-6,
    rope_base=5000.0,
)  # fmt: skip
GPT_JSON = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 4, "vocab_size": 37,
            "n_positions": 12}  # fmt: skip
LLAMA_JSON = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 24, "vocab_size": 37,
              "num_attention_heads": 4, "intermediate_size": 40,
              "max_position_embeddings": 12}  # fmt: skip
SHAPES = {
    "gpt2": GPT,
    "gpt2 untied": replace(GPT, tie_embeddings=False, dropout=0.1, mlp_width=40),
    "llama": LLAMA,
    "llama with biases, tied": replace(LLAMA, bias=True, tie_embeddings=True, norm_eps=1e-5),
}


@pytest.fixture(params=SHAPES)
def config(request):
    return SHAPES[request.param]


@pytest.mark.trap("CK-10")
def test_transformers_gives_the_same_logits(tmp_path, config):
    pytest.importorskip("transformers", reason="needs assets/requirements-peers.txt")
    checks.check_transformers_agrees(tmp_path, config)


def test_export_and_import_give_the_same_bits(tmp_path, config):
    model = checks.randomised(config)
    hugging_face.export_model(tmp_path, model.state_dict(), config)
    found, weights = hugging_face.import_model(tmp_path)
    assert found == replace(config, kv_heads=found.kv_heads, mlp_width=found.mlp_width)
    assert (found.key_value_heads, found.inner_width) == (
        config.key_value_heads,
        config.inner_width,
    )
    fresh = build(found, seed=9)
    fresh.load_state_dict(weights)  # strict: every name, and no other
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))
    assert sorted(child.name for child in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_what_transformers_writes_is_read(tmp_path, config):
    transformers = pytest.importorskip("transformers", reason="needs assets/requirements-peers.txt")
    model = checks.randomised(config)
    hugging_face.export_model(tmp_path / "ours", model.state_dict(), config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    for source in (tmp_path / "sharded", theirs.state_dict(), tmp_path / "ours/model.safetensors"):
        weights = hugging_face.import_weights(source, config)
        assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    found, _ = hugging_face.import_model(tmp_path / "sharded")
    assert found.inner_width == config.inner_width
    (shard := sorted((tmp_path / "sharded").glob("*.safetensors"))[1]).unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        hugging_face.import_model(tmp_path / "sharded")


def test_names_of_bare_models_wrappers_and_old_buffers_are_understood():
    model = checks.randomised(GPT)
    theirs = hugging_face.export_weights(model.state_dict(), GPT)
    mask = torch.ones(1, 1, 12, 12)
    old = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}
    old |= {"h.0.attn.bias": mask, "h.0.attn.masked_bias": mask[0, 0, 0, 0]}  # as on the hub
    tied = {**theirs, "lm_head.weight": theirs["transformer.wte.weight"]}
    for source in (old, tied):
        weights = hugging_face.import_weights(source, GPT)
        assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    ours = {f"_orig_mod.module.{n}": t for n, t in model.state_dict().items()}
    assert hugging_face.export_weights(ours, GPT).keys() == theirs.keys()


def test_heads_of_another_width_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs assets/requirements-peers.txt")
    shape = {k: v for k, v in LLAMA_JSON.items() if k != "model_type"}
    config = transformers.LlamaConfig(**shape, head_dim=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = ranks.error_of(hugging_face.import_model, tmp_path)
    assert "head_dim = 8, only hidden_size / heads = 6" in words
    ours = config_from_hugging_face({**LLAMA_JSON, "head_dim": 6})
    words = ranks.error_of(hugging_face.import_weights, tmp_path, ours)
    assert "model.layers.0.self_attn.q_proj.weight has shape [32, 24], not [24, 24]" in words


@pytest.mark.trap("CK-10")
def test_missing_unexpected_and_misshapen_weights_are_named():
    theirs = hugging_face.export_weights(checks.randomised(LLAMA).state_dict(), LLAMA)
    theirs["model.layers.0.extra.weight"] = theirs.pop("model.layers.1.mlp.gate_proj.weight")
    theirs["model.norm.weight"] = torch.ones(23)
    words = ranks.error_of(hugging_face.import_weights, theirs, LLAMA)
    assert "model.layers.1.mlp.gate_proj.weight is missing" in words
    assert "model.layers.0.extra.weight is unexpected" in words
    assert "model.norm.weight has shape [23], not [24]" in words
    ours = checks.randomised(LLAMA).state_dict()
    ours["blocks.0.mlp.gate.bias"] = ours.pop("head.weight")
    words = ranks.error_of(hugging_face.export_weights, ours, LLAMA)
    assert "head.weight is missing" in words
    assert "blocks.0.mlp.gate.bias is unexpected" in words


def test_a_tied_head_that_differs_is_refused():
    theirs = hugging_face.export_weights(checks.randomised(GPT).state_dict(), GPT)
    theirs["lm_head.weight"] = theirs["transformer.wte.weight"] + 1
    assert "differ" in ranks.error_of(hugging_face.import_weights, theirs, GPT)


def test_shapes_that_transformers_does_not_have_are_refused():
    words = ranks.error_of(hugging_face.export_weights, {}, replace(GPT, positions="rope"))
    assert "gpt2 has positions = learned, not rope" in words
    assert "llama has norm = rmsnorm, not layernorm; llama has mlp = swiglu, not gelu" in words


@pytest.mark.parametrize(
    "table, words",
    [
        ({**GPT_JSON, "model_type": "mistral"}, "known are gpt2 and llama"),
        (
            {**LLAMA_JSON, "head_dim": 12, "hidden_act": "relu"},
            "hidden_act = 'relu', only silu or swish; head_dim = 12, only hidden_size / heads = 6",
        ),
        (
            {**GPT_JSON, "activation_function": "gelu"},
            "activation_function = 'gelu', only gelu_new",
        ),
        ({**GPT_JSON, "attn_pdrop": 0.2}, "attn_pdrop = 0.2, not 0.1: ours is one dropout"),
        ({**GPT_JSON, "scale_attn_by_inverse_layer_idx": True}, "only False"),
        ({**GPT_JSON, "n_head": 5}, "5 heads do not divide width 24"),
        ({**GPT_JSON, "n_head": 0}, "heads 0 must be from 1"),
        ({**GPT_JSON, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA_JSON, "attention_bias": True}, "mlp_bias = False, not True: ours is one bias"),
        ({**LLAMA_JSON, "hidden_act": "relu"}, "hidden_act = 'relu', only silu"),
        ({**LLAMA_JSON, "attention_dropout": 0.1}, "attention_dropout"),
        ({**LLAMA_JSON, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({**LLAMA_JSON, "rope_parameters": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
    ],
)
def test_what_our_model_cannot_represent_is_refused(table, words):
    assert words in ranks.error_of(config_from_hugging_face, table)


def test_all_faults_of_a_config_are_named_at_once():
    table = {**LLAMA_JSON, "hidden_act": "relu", "mlp_bias": True, "vocab_size": None}
    words = ranks.error_of(config_from_hugging_face, table)
    assert all(part in words for part in ("hidden_act", "mlp_bias", "vocab_size"))


def test_rotary_bases_of_both_generations_are_read():
    assert config_from_hugging_face(LLAMA_JSON).rope_base == 10_000
    assert config_from_hugging_face({**LLAMA_JSON, "rope_theta": 5e5}).rope_base == 5e5
    new = {**LLAMA_JSON, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
    assert config_from_hugging_face(new).rope_base == 7e5
    old = {**LLAMA_JSON, "rope_theta": 5e5, "rope_scaling": None}
    assert config_from_hugging_face(old).rope_base == 5e5


def test_broken_directories_are_refused(tmp_path):
    assert "config.json cannot be read" in ranks.error_of(hugging_face.import_model, tmp_path)
    hugging_face.export_model(tmp_path, checks.randomised(GPT).state_dict(), GPT)
    (whole := tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    words = ranks.error_of(hugging_face.import_model, tmp_path)
    assert "model.safetensors cannot be read" in words
    assert "pickles are never opened" in words
    (tmp_path / "model.safetensors.index.json").write_text('{"weights": {}}')
    words = ranks.error_of(hugging_face.import_model, tmp_path)
    assert "index.json cannot be read: KeyError('weight_map')" in words
    shutil.copy(tmp_path / "part.safetensors", whole)
    whole.write_bytes(whole.read_bytes()[:-5])
    assert "cannot be read" in ranks.error_of(hugging_face.import_model, tmp_path)


def test_a_failed_export_leaves_the_old_files(tmp_path):
    hugging_face.export_model(tmp_path, checks.randomised(GPT).state_dict(), GPT)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(tensors, path, **keywords):
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    faults = {"checkpoint.files:save_file": full}
    words = ranks.with_fault(
        faults, ranks.error_of, hugging_face.export_model, tmp_path,
        checks.randomised(GPT, seed=2).state_dict(), GPT,
    )  # fmt: skip
    assert "No space left" in words
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_half_precision_files_keep_their_dtype(tmp_path):
    model = checks.randomised(GPT).to(torch.bfloat16)
    hugging_face.export_model(tmp_path, model.state_dict(), GPT)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    _, weights = hugging_face.import_model(tmp_path)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert "is missing" in ranks.error_of(hugging_face.import_model, tmp_path)
