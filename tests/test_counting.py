"""Parameters and FLOPs by formula: equal to real counts, and to published numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.model import ModelConfig, count_flops, count_parameters
from tests import checks_counting as proof

PRESETS = ModelConfig.presets()
each_preset = pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS)
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
}


@st.composite
def shapes(draw) -> ModelConfig:
    """Odd shapes of every kind."""
    heads = draw(st.integers(1, 6))
    head_width = draw(st.integers(1, 4)) * 2
    return ModelConfig(
        layers=draw(st.integers(1, 3)),
        width=heads * head_width,
        heads=heads,
        kv_heads=draw(st.sampled_from([None, *(d for d in range(1, heads + 1) if heads % d == 0)])),
        vocab=draw(st.integers(1, 50)),
        context=draw(st.integers(1, 16)),
        mlp_width=draw(st.none() | st.integers(1, 40)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        mlp=draw(st.sampled_from(["gelu", "swiglu"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@each_preset
def test_formulas_equal_the_real_counts_of_every_preset(config):
    proof.assert_parameters_are_counted(config)
    proof.assert_flops_are_counted(config, batch=2, sequence=17)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes(), st.integers(1, 3), st.data())
def test_formulas_equal_the_real_counts_of_any_shape(config, batch, data):
    proof.assert_parameters_are_counted(config)
    proof.assert_flops_are_counted(config, batch, data.draw(st.integers(1, config.context)))


@pytest.mark.parametrize("name, parameters", PUBLISHED.items())
def test_published_models_have_their_published_number_of_parameters(name, parameters):
    assert count_parameters(PRESETS[name])["total"] == parameters


def test_gpt3_has_175_billion_parameters():
    assert f"{count_parameters(PRESETS['gpt3-175b'])['total'] / 1e9:.1f}" == "174.6"


@pytest.mark.parametrize("name, percent", [("gpt2", 31.6), ("gpt3-175b", 0.4)])
def test_share_of_parameters_in_the_embeddings(name, percent):
    counts = count_parameters(PRESETS[name])
    share = (counts["embedding"] + counts["positions"]) / counts["total"]
    assert round(100 * share, 1) == percent


def test_components_add_up_to_the_totals():
    for config in PRESETS.values():
        counts = count_parameters(config)
        assert counts.pop("total") == sum(counts.values())
        flops = count_flops(config, 3, 5)
        parts = ("projections", "scores", "mlp", "head")
        assert flops["forward"] == sum(flops[part] for part in parts)
        assert flops["backward"] == 2 * flops["forward"]
        assert flops["total"] == flops["forward"] + flops["backward"]


@pytest.mark.trap("PR-01")
@pytest.mark.parametrize("convention, attention", [("full", 49_152), ("causal", 24_576)])
def test_a_small_model_has_6n_plus_attention_flops_a_token(convention, attention):
    proof.assert_small_model_has_the_flops_of_the_papers(convention, attention)


def test_causal_convention_halves_the_scores_alone():
    full, causal = (count_flops(PRESETS["gpt2"], 2, 1024, kind) for kind in ("full", "causal"))
    assert causal["scores"] * 2 == full["scores"]
    assert full["forward"] - causal["forward"] == causal["scores"]


def test_palms_formula_agrees_without_norms_biases_and_position_embeddings():
    config, sequence = PRESETS["llama-7b"], 2048
    counts = count_parameters(config)
    matrices = counts["attention"] + counts["mlp"] + counts["head"]
    palm = 6 * matrices + 12 * config.layers * config.width * sequence
    assert count_flops(config, 1, sequence)["total"] == palm * sequence


def test_unknown_convention_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match='"full" or "causal"'):
        count_flops(PRESETS["tiny"], 1, 8, "half")


def test_an_unknown_preset_is_answered_with_the_known_ones():
    with pytest.raises(KeyError, match=r"no preset 'gpt-2'; use one of tiny, .*gpt2, gpt2-medium"):
        PRESETS["gpt-2"]
