"""The plain model: equal to transformers', causal, cached, tied, random by position."""

import hashlib
import shutil
from dataclasses import replace

import pytest
import torch

from course_lib.model import (
    KVCache,
    ModelConfig,
    Transformer,
    build,
    generate,
    parameter_spec,
)
from course_lib.model.decoder import attend
from course_lib.model.randomness import Noise
from tests import checks_model as proof
from tests import checks_randomness as chance
from tests.checks_model import GPT, LLAMA, MIXED, SHAPES, lively, random_tokens

FAMILIES = {"gpt": GPT, "llama": LLAMA, "mixed": MIXED}
PATHS = ("fused", "dropout", "documents", "cache")


def over(table):
    return [pytest.param(value, id=name) for name, value in table.items()]


each_shape = pytest.mark.parametrize("config", over(SHAPES))
each_family = pytest.mark.parametrize("config", over(FAMILIES))


# ------------------------------------------------------------------------------ against others


@pytest.mark.trap("ACC-10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@each_shape
def test_logits_loss_and_every_gradient_equal_those_of_transformers(config, dtype):
    pytest.importorskip("transformers", reason="transformers, to compare with, is not installed")
    proof.assert_equals_transformers(config, dtype)


@pytest.mark.trap("ACC-10")
def test_loss_scores_the_next_token_not_the_one_after():
    proof.assert_loss_scores_the_next_token()


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_loss_and_its_gradient_equal_their_definition(ignored):
    proof.assert_loss_and_its_gradient_are_exact(ignored)


@each_family
def test_model_has_no_buffers_and_no_state_besides_its_parameters(config):
    model = build(config)
    assert not list(model.buffers())
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys()


@pytest.mark.trap("DP-13")
@each_family
def test_model_from_the_meta_device_equals_one_built_directly(config):
    direct, tokens = lively(config), random_tokens(config)
    with torch.device("meta"):
        shell = Transformer(config)
    shell = shell.to(torch.float64).to_empty(device="cpu").tie()
    shell.load_state_dict(direct.state_dict())
    assert torch.equal(shell(tokens), direct(tokens))


# ------------------------------------------------------------------------------------- masks


@pytest.mark.trap("AT-01")
@pytest.mark.parametrize("path", PATHS)
@each_family
def test_changing_a_token_leaves_all_logits_before_it_bit_identical(config, path):
    proof.assert_no_token_sees_the_future(config, path)


@pytest.mark.trap("DA-04")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@each_family
def test_packed_documents_do_not_see_each_other(config, dropout):
    proof.assert_documents_are_isolated(config, dropout)


def test_one_document_for_all_equals_no_documents():
    model, tokens = lively(LLAMA), random_tokens(LLAMA)
    one = model(tokens, documents=torch.ones_like(tokens))
    torch.testing.assert_close(one, model(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (6, 1), (4, 4)])
def test_explicit_attention_equals_fused_attention(heads, kv_heads):
    proof.assert_explicit_attention_equals_fused(heads, kv_heads)


# ---------------------------------------------------------------------------------- KV cache


@pytest.mark.trap("CP-05")
@pytest.mark.parametrize("chunks", [(1,) * 11, (5, 1, 3, 1, 1), (11,), (1, 10), (4, 7)], ids=str)
@each_family
def test_logits_with_a_cache_equal_those_without(config, chunks):
    proof.assert_cache_changes_nothing(config, chunks)
    proof.assert_cache_changes_nothing(config, chunks, torch.float64)


@each_family
def test_greedy_text_is_the_same_with_and_without_a_cache(config):
    proof.assert_greedy_is_the_same_with_a_cache(config)


def test_cache_refuses_more_tokens_than_it_has_room_for():
    model, tokens = lively(GPT), random_tokens(GPT, sequence=4)
    cache = KVCache(GPT, 3, 6, dtype=torch.float64)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="room for 6 tokens, 8 are needed"):
        model(tokens, cache=cache)
    assert cache.length == 4
    with pytest.raises(ValueError, match="batch of 3, not 1"):
        model(tokens[:1, :1], cache=cache)


def test_documents_with_a_cache_are_refused_from_the_first_chunk():
    tokens = random_tokens(GPT)
    cache = KVCache(GPT, 3, GPT.context)
    with pytest.raises(ValueError, match="documents and a KV cache cannot be combined"):
        build(GPT)(tokens, documents=torch.zeros_like(tokens), cache=cache)


# -------------------------------------------------------------------------------- generation


def test_sampling_is_repeated_by_its_generator():
    model, prompt = lively(LLAMA), random_tokens(LLAMA, sequence=2)

    def sample(seed, **more):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, 12, generator=generator, **more)

    assert torch.equal(sample(1), sample(1))
    assert torch.equal(sample(1), sample(1, use_cache=False))
    assert not torch.equal(sample(1), sample(2))


def test_top_k_and_temperature_shape_the_choice():
    model, prompt = lively(GPT), random_tokens(GPT, batch=1, sequence=2).expand(400, -1)
    scores = model(prompt[:1])[0, -1]
    greedy = scores.argmax()
    assert (generate(model, prompt, 1, top_k=1)[:, -1] == greedy).all()
    assert (generate(model, prompt, 1, temperature=1e-9)[:, -1] == greedy).all()
    drawn = generate(model, prompt, 1, temperature=5.0, top_k=3)[:, -1]
    assert set(drawn.tolist()) == set(scores.topk(3).indices.tolist())
    hot = generate(model, prompt, 1, temperature=100.0)[:, -1].unique().numel()
    cool = generate(model, prompt, 1, temperature=0.3)[:, -1].unique().numel()
    assert cool < hot > GPT.vocab * 0.8


def test_top_k_keeps_k_tokens_where_scores_are_equal():
    model = lively(GPT)
    torch.nn.init.zeros_(model.norm.weight)
    torch.nn.init.zeros_(model.norm.bias)  # all scores are 0
    drawn = generate(model, torch.zeros(200, 1, dtype=torch.int64), 1, top_k=2)[:, -1]
    assert drawn.unique().numel() == 2


def test_sampling_follows_the_probabilities():
    model, prompt = lively(GPT), random_tokens(GPT, batch=1, sequence=3)
    generator = torch.Generator().manual_seed(0)
    count = 4000
    drawn = generate(model, prompt.expand(count, -1), 1, generator=generator)[:, -1]
    wanted = model(prompt)[0, -1].softmax(-1)
    found = drawn.bincount(minlength=GPT.vocab) / count
    assert ((found - wanted).abs() < 5 * (wanted / count).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    "prompt, new, more, message",
    [
        (0, 3, {}, "at least one token"),
        (10, 8, {}, r"10 \+ 8 tokens exceed the context of 17"),
        (3, -1, {}, "new_tokens -1"),
        (3, 2, {"temperature": -0.5}, "temperature -0.5"),
        (3, 2, {"temperature": float("nan")}, "temperature nan"),
        (3, 2, {"temperature": 1e-46}, "temperature 1e-46"),
        (3, 2, {"top_k": 0}, "top_k 0"),
    ],
)
def test_generation_refuses_what_cannot_be(prompt, new, more, message):
    tokens = torch.zeros(1, prompt, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        generate(build(GPT), tokens, new, **more)


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_mode_as_it_was_even_after_an_error(training):
    model = build(replace(GPT, dropout=0.1)).train(training)
    generate(model, torch.zeros(1, 2, dtype=torch.int64), 2)
    assert model.training is training
    with pytest.raises(ValueError, match="token ids from 99 to 99"):
        generate(model, torch.full((1, 2), 99), 2)
    assert model.training is training


def test_generation_of_nothing_returns_the_prompt_and_of_everything_fills_the_context():
    model, prompt = build(GPT), random_tokens(GPT, sequence=2)
    assert torch.equal(generate(model, prompt, 0), prompt)
    assert generate(model, prompt, GPT.context - 2).shape == (3, GPT.context)


# --------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "tokens, more, message",
    [
        ([[0, 41]], {}, "token ids from 0 to 41 are out of range; allowed are 0 to 40"),
        ([[-1, 3]], {}, "token ids from -1 to 3 are out of range"),
        ([[1, 3]], {"positions": torch.tensor([[0, 17]])}, "positions from 0 to 17 .* 0 to 16"),
        ([[1] * 18], {}, "18 tokens exceed the context of 17"),
        ([1, 2], {}, r"tokens of shape \(2,\) and torch.int64 must be \(batch, sequence\)"),
        ([[]], {}, r"tokens of shape \(1, 0\)"),
        ([[1.0]], {}, "torch.float32 must be"),
    ],
)
def test_forward_names_what_is_out_of_range(tokens, more, message):
    with pytest.raises(ValueError, match=message):
        build(GPT)(torch.tensor(tokens), **more)


def test_dropout_in_training_needs_samples_and_step():
    model = build(replace(GPT, dropout=0.1))
    with pytest.raises(ValueError, match="needs `samples` and `step`"):
        model(random_tokens(GPT), samples=torch.arange(3))


@pytest.mark.parametrize(
    "change, faults",
    [
        (
            {"layers": 0, "vocab": -3, "dropout": 1.0, "norm_eps": 0.0, "heads": 7},
            ["layers 0 must", "vocab -3 must", "dropout 1.0 must", "norm_eps 0.0 must",
             "7 heads do not divide width 30; use 5 or 6 heads"],
        ),
        ({"kv_heads": 3}, ["3 kv_heads do not divide 5 heads; use 1 or 5"]),
        ({"kv_heads": 0, "mlp_width": 0}, ["kv_heads 0 must", "mlp_width 0 must"]),
        ({"width": 0}, ["width 0 must"]),
        ({"heads": 40}, ["40 heads do not divide width 30; use 15 or 30 heads"]),
        ({"positions": "rope", "heads": 6}, ["30 / 6 must be even; use 3 or 5 heads"]),
        ({"positions": "rope", "width": 35}, ["width 35 must be even; use 34 or 36"]),
        ({"rope_base": float("nan"), "dropout": float("nan")}, ["dropout nan", "rope_base nan"]),
        ({"norm_eps": float("inf")}, ["norm_eps inf must be positive and finite"]),
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused_with_all_faults_at_once(change, faults):
    config = replace(GPT, **change)
    found = config.faults()
    assert len(found) == len(faults)
    for part in faults:
        assert any(part in fault for fault in found), f"{part!r} is not in {found}"
    with pytest.raises(ValueError) as error:
        Transformer(config)
    assert all(fault in str(error.value) for fault in found)


def test_published_shapes_and_the_tests_own_are_possible():
    for config in (*ModelConfig.presets().values(), *SHAPES.values(), MIXED):
        assert config.faults() == []


# -------------------------------------------------------------------------- ties, recompute


@each_shape
def test_head_is_tied_exactly_where_the_configuration_says(config):
    proof.assert_tied(config)


@pytest.mark.trap("AC-01")
@each_family
def test_recompute_in_backward_gives_the_same_gradients_to_the_bit(config):
    proof.assert_recompute_changes_nothing(config)


# ----------------------------------------------------------------------- dropout by position


@pytest.mark.trap("TP-17")
@each_family
def test_masks_follow_the_sample_whatever_the_micro_batches(config):
    chance.assert_masks_follow_the_sample(config)


@pytest.mark.trap("TP-17")
@each_family
def test_masks_differ_between_samples_steps_and_seeds(config):
    chance.assert_masks_differ(config)


@each_family
def test_evaluation_has_no_dropout(config):
    chance.assert_no_dropout_in_evaluation(config)


@pytest.mark.trap("TP-17")
@each_family
def test_shards_of_heads_draw_the_masks_of_their_heads(config):
    chance.assert_head_shards_sum_to_the_whole(config)


@pytest.mark.trap("TP-17")
def test_shards_of_heads_positions_and_samples_hold_parts_of_the_whole_mask():
    chance.assert_offsets_cut_the_same_masks()


@each_family
def test_a_shard_of_the_sequence_that_knows_its_offset_is_a_part_of_the_whole(config):
    chance.assert_sequence_shards_are_parts_of_the_whole(config)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_compiled_dropout_draws_the_same_masks():
    chance.assert_compiled_masks_are_the_same()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_has_the_right_rate_and_scale(p):
    chance.assert_rate_and_scale(p)


def test_attention_with_dropout_does_not_overflow_in_fp16():
    heads = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)  # q · k = 102,400; / 8 = 12,800
    nothing = Noise(0.0, 0, 0, torch.arange(1), torch.arange(4))
    assert attend(heads, heads, heads, None, nothing, 0).isfinite().all()


def test_masks_are_independent_along_every_axis():
    chance.assert_masks_are_independent()


@each_family
def test_every_site_of_every_layer_draws_its_own_mask(config):
    chance.assert_every_site_is_its_own(config)


def test_masks_stay_the_same_from_version_to_version():
    drawn = chance.masks(0.5, seed=7, step=3, samples=(2, 9), site=4, positions=16)
    digest = hashlib.sha256(drawn.bool().numpy().tobytes()).hexdigest()
    assert digest[:16] == "2a31d3a4ed7f5e4e"


# ------------------------------------------------------------------------------ initial values


def test_rows_drawn_apart_equal_the_whole():
    chance.assert_parts_equal_the_whole()


def test_initial_values_depend_on_seed_and_name_alone():
    chance.assert_initial_values_depend_on_names_alone()


@pytest.mark.trap("TP-15")
@each_family
def test_initial_spread_is_that_of_gpt2_with_scaled_residual_projections(config):
    kv_heads = None if config.kv_heads is None else 4
    chance.assert_initial_spread(
        replace(
            config, width=512, heads=8, kv_heads=kv_heads, vocab=600, context=256, mlp_width=512
        )
    )


@each_shape
def test_every_parameter_is_declared_and_only_matrices_decay(config):
    chance.assert_specs_say_what_decays(config)


def test_a_parameter_that_nobody_declared_is_named():
    model = build(GPT)
    model.blocks[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"blocks\.0\.extra\.weight has no specification"):
        parameter_spec(model, "blocks.0.extra.weight")


def test_initial_weights_stay_the_same_from_version_to_version():
    model = build(ModelConfig.presets()["tiny-llama"], seed=3)
    pinned = {
        "embedding.weight": "363ce5b767d899cb",
        "blocks.1.mlp.down.weight": "a1b011726a0c6ca2",
        "blocks.0.attention.key.weight": "bf8c90a443e91543",
    }
    for name, wanted in pinned.items():
        data = model.get_parameter(name).detach().numpy().tobytes()
        assert hashlib.sha256(data).hexdigest()[:16] == wanted, f"{name} starts otherwise"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"mlp": "SwiGLU"}, "did you mean swiglu"),
        ({"norm": "RMSNorm"}, "did you mean rmsnorm"),
        ({"positions": "alibi"}, "must be one of learned, rope"),
        ({"heads": "4"}, "heads '4' must be a whole number"),
        ({"width": 64.0}, "width 64.0 must be a whole number"),
        ({"bias": "no"}, "bias 'no' must be true or false"),
    ],
)
def test_a_shape_of_the_wrong_type_or_an_unknown_choice_is_refused(given, expected):
    with pytest.raises(ValueError, match=expected):
        Transformer(ModelConfig(**given))


def test_samples_must_be_one_for_each_sequence():
    model = build(ModelConfig(dropout=0.1)).train()
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"samples of shape \(1,\) must be \(2,\)"):
        model(tokens, samples=torch.zeros(1, dtype=torch.int64), step=0)
