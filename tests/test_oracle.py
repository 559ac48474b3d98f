"""The oracle: what it accepts, and how well it names what it does not."""

import math
from dataclasses import replace

import pytest
import torch

from course_lib import oracle
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig
from course_lib.oracle import (
    Snapshot,
    assert_same_training,
    compare,
    explain_ratio,
    random_batch,
    split,
)
from course_lib.trainer.step import training_step
from course_lib.training import IGNORE
from tests import checks_core as core
from tests.checks_core import TINY

ALONE = Mesh.single()


def snapshot(**changes) -> Snapshot:
    """A made-up step of two parameters, changed in one place."""
    gradients = {"first": torch.tensor([3.0]).double(), "second": torch.tensor([4.0]).double()}
    weights = {"first": torch.ones(2, 2).double(), "second": torch.ones(3).double()}
    right = Snapshot(2.0, 5.0, gradients, weights)
    for kind in ("gradients", "weights"):
        if kind in changes:
            changes[kind] = {**getattr(right, kind), **changes[kind]}
    return replace(right, **changes)


def failure(hints=None, dtype=torch.float64, **changes) -> str:
    with pytest.raises(AssertionError) as caught:
        compare(snapshot(**changes), snapshot(), dtype, "step 7", hints)
    return str(caught.value)


def test_equal_steps_pass_and_rounding_is_allowed():
    compare(snapshot(), snapshot(), torch.float64)
    compare(snapshot(loss=2.0 + 1e-11), snapshot(), torch.float64)
    compare(snapshot(loss=2.0 + 1e-6), snapshot(), torch.float32)


@pytest.mark.parametrize("seed", [24, 32])
def test_rounding_does_not_grow_from_one_fp32_step_to_the_next(seed):
    """These two differed by 1.04e-5 and 1.29e-5 in the third step when rounding could add up."""
    llama = ModelConfig(
        layers=2, width=24, heads=4, kv_heads=2, vocab=37, context=12, positions="rope",
        mlp="swiglu", norm="rmsnorm", tie_embeddings=False,
    )  # fmt: skip
    assert len(assert_same_training(ALONE, config=llama, dtype=torch.float32, seed=seed)) == 3


@pytest.mark.parametrize("dtype, change", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_differences_above_the_tolerance_of_the_dtype_are_found(dtype, change):
    assert "loss differs" in failure(dtype=dtype, loss=2 + 2 * change)
    assert "gradient norm differs" in failure(dtype=dtype, grad_norm=5 + 5 * change)
    for kind in ("gradients", "weights"):
        changed = {"second": getattr(snapshot(), kind)["second"] * (1 + change)}
        assert f"{kind[:-1]} of second differs" in failure(dtype=dtype, **{kind: changed})


def test_a_failure_names_step_parameter_ratio_count_and_meaning():
    half = {"second": torch.tensor([2.0])}
    message = failure({"dp": 2, "acc": 3}, gradients=half, grad_norm=math.sqrt(13))
    assert message.splitlines() == [
        "step 7: gradient of second differs: 0.5 x the reference, relative difference 5.00e-01 "
        "(allowed 1e-10). 1/2: averaged over ranks and divided again (dp = 2)?",
        "1 of 2 gradients differ",
        "gradient norm differs: 0.7211 x the reference, relative difference 2.79e-01 "
        "(allowed 1e-10)",
    ]


def test_a_tiny_gradient_is_measured_against_the_whole():
    small = {"first": torch.tensor([1e-13]).double()}
    want = snapshot(gradients={"first": torch.zeros(1).double()})
    compare(snapshot(gradients=small), want, torch.float64)
    with pytest.raises(AssertionError, match="gradient of first"):
        compare(snapshot(gradients={"first": torch.tensor([1e-9])}), want, torch.float64)


def test_numbers_that_are_not_finite_never_agree():
    assert "loss differs" in failure(loss=math.nan)
    assert "gradient of first" in failure(gradients={"first": torch.tensor([math.nan])})
    with pytest.raises(AssertionError, match="loss"):
        compare(snapshot(loss=math.nan), snapshot(loss=math.nan), torch.float64)


def test_missing_parameters_and_wrong_shapes_are_named():
    less = replace(snapshot(), gradients={"first": torch.tensor([3.0])})
    with pytest.raises(AssertionError, match=r"gradients of \['second'\] are on one side only"):
        compare(less, snapshot(), torch.float64)
    message = failure(weights={"first": torch.ones(4)})
    assert "weight of first has shape (4,), not (2, 2)" in message


@pytest.mark.parametrize(
    "ratio, meaning",
    [
        (1 / 4, "1/4: averaged over ranks and divided again (dp = 4)?"),
        (4, "4: summed without a common divisor (dp = 4)?"),
        (2, "2: counted on every tensor-parallel rank (tp = 2)?"),
        (1 / 3, "1/3: averaged over micro-batches and divided again (acc = 3)?"),
        (0, "0: no gradient arrives here?"),
        (1.1, ""),
    ],
)
def test_known_ratios_are_explained(ratio, meaning):
    assert explain_ratio(ratio, {"dp": 4, "tp": 2, "acc": 3}).removeprefix(". ") == meaning


def test_a_ratio_with_two_meanings_gets_both():
    text = explain_ratio(0.5, {"dp": 2, "acc": 2})
    assert "over ranks" in text
    assert " Or 1/2: averaged over micro-batches" in text


# ---------------------------------------------------------------------------- its own materials


def test_masks_are_uneven_and_some_samples_have_no_target():
    batch = random_batch(TINY, 8, step=3)
    counts = (batch.labels != IGNORE).sum(1).tolist()
    assert counts[0] == 0
    assert counts[-1] > 0
    assert len(set(counts)) > 3
    assert batch.valid == sum(counts)
    known = batch.labels[:, :-1] != IGNORE
    assert torch.equal(batch.labels[:, :-1][known], batch.tokens[:, 1:][known])


def test_a_global_batch_of_one_sample_has_a_target():
    assert all(random_batch(TINY, 1, step).valid >= 1 for step in range(20))


def test_pieces_hold_every_sample_once_in_order():
    batch = random_batch(TINY, 12, step=0)
    pieces = split(batch, ranks=3, accumulation=2)
    assert [len(own) for own in pieces] == [2, 2, 2]
    flat = [piece for own in pieces for piece in own]
    for name in ("tokens", "labels", "positions", "samples"):
        assert torch.equal(torch.cat([getattr(p, name) for p in flat]), getattr(batch, name))
    assert sum(piece.valid for piece in flat) == batch.valid


def test_biases_and_norm_weights_of_the_reference_are_not_constant():
    (first,) = oracle.train_plain(TINY, [random_batch(TINY, 4, 0)])
    for name, weight in first.weights.items():
        assert weight.flatten().unique().numel() > weight.numel() // 2, name


def test_steps_differ_and_clipping_binds_where_it_is_asked_for():
    batches = [random_batch(TINY, 4, step) for step in range(3)]
    off, on = oracle.train_plain(TINY, batches), oracle.train_plain(TINY, batches, 0.05)
    assert len({s.loss for s in off}) == 3
    for a, b in zip(off, on):
        assert b.grad_norm > 0.05
        total = math.sqrt(sum(float(g.square().sum()) for g in b.gradients.values()))
        assert math.isclose(total, 0.05, rel_tol=1e-4)
        assert a.gradients.keys() == b.gradients.keys() == a.weights.keys()


# ------------------------------------------------------------------------ a step of one's own


def test_a_learners_own_step_can_be_proved():
    def own(state, micro_batches, lr):
        result = training_step(state, micro_batches, lr, 0.0, "fp32")
        return result.loss, result.grad_norm

    assert_same_training(ALONE, config=TINY, step=own)


def test_a_learners_wrong_step_is_explained():
    def forgets_a_bias(state, micro_batches, lr):
        result = training_step(state, micro_batches, 0.0, 0.0, "fp32")
        by_name = {record.name: record.parameter for record in state.records}
        by_name["blocks.0.mlp.up.bias"].grad.zero_()
        with torch.no_grad():
            for parameter in by_name.values():
                parameter -= lr * parameter.grad
        return result.loss, result.grad_norm

    with pytest.raises(AssertionError) as caught:
        assert_same_training(ALONE, config=TINY, step=forgets_a_bias)
    message = str(caught.value)
    assert message.startswith("step 0: gradient of blocks.0.mlp.up.bias differs: 0 x the reference")
    assert "no gradient arrives here" in message
    assert "1 of 20 gradients differ" in message


def test_a_transform_that_changes_a_weight_is_found():
    def transform(model, mesh):
        model.blocks[0].attention.output.register_forward_hook(lambda m, i, out: 1.001 * out)
        return model

    with pytest.raises(AssertionError, match="step 0: loss differs"):
        assert_same_training(ALONE, transform, config=TINY)


def test_the_reference_is_returned():
    reference = assert_same_training(ALONE, config=TINY, steps=2, accumulation=1, micro_batch=1)
    assert len(reference) == 2
    plain = oracle.train_plain(TINY, [random_batch(TINY, 1, step) for step in range(2)])
    assert core.same(reference[1].gradients, plain[1].gradients)
