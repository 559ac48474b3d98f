"""Finishing gradients: sum, unscale, norm, clip, in this order and once."""

import math

import pytest
import torch

from course_lib.mesh import Mesh
from course_lib.model import build
from course_lib.parameters import build_records
from course_lib.trainer import step
from tests import checks_core as core
from tests import checks_records as records
from tests.checks_core import TINY, TWO, on_ranks

ALONE = Mesh.single()


def test_gradients_are_summed_over_the_axes_that_the_record_names():
    on_ranks(records.check_sums, records.DP_TP)


def test_a_missing_gradient_counts_as_zero():
    on_ranks(records.check_missing_gradients_become_zeros, TWO)


@pytest.mark.trap("COM-02")
def test_strided_gradients_are_summed():
    on_ranks(records.check_strided_gradients_are_summed, TWO)


def test_frozen_parameters_are_left_alone():
    model = build(TINY)
    model.embedding.weight.requires_grad_(False)
    found = build_records(model, ALONE)
    done = core.finish_gradients(found, ALONE, clip_norm=1.0)
    assert done == core.finish_gradients(found, ALONE)
    assert model.embedding.weight.grad is None
    assert done.norm == 0


def check_nothing_trainable_on_one_rank(mesh: Mesh) -> None:
    """As a pipeline stage whose layers are frozen: it joins the collectives all the same."""
    model = build(TINY)
    model.requires_grad_(mesh.rank("dp") == 0)
    found = build_records(model, mesh)
    for record in found:
        record.parameter.grad = torch.ones_like(record.parameter)
    done = core.finish_gradients(found, mesh, 1.0, 2.0, reduce=lambda records, mesh: None)
    assert done.finite
    assert done.norm > 1


def test_a_rank_that_trains_nothing_unscales_and_clips_nothing():
    on_ranks(check_nothing_trainable_on_one_rank, TWO)


@pytest.mark.trap("CLIP-01")
def test_norm_counts_replicated_parameters_once():
    on_ranks(records.check_replicated_and_sharded_norm, records.TP)


@pytest.mark.trap("CLIP-01")
def test_norm_of_cut_gradients_is_the_norm_of_the_whole():
    on_ranks(records.check_each_element_counted_once, records.DP_TP)


@pytest.mark.trap("CLIP-06")
def test_gradients_are_unscaled_before_they_are_clipped():
    core.check_unscaled_before_clipping(ALONE)


@pytest.mark.trap("CLIP-09")
def test_accumulated_gradients_are_clipped_once():
    core.check_clipped_once(ALONE)


@pytest.mark.trap("CLIP-09")
def test_a_step_finishes_its_gradients_once(monkeypatch):
    right, calls = step.finish_gradients, []

    def finish_gradients(*arguments, **named):
        calls.append(arguments)
        return right(*arguments, **named)

    monkeypatch.setattr(step, "finish_gradients", finish_gradients)
    core.check_one_step(ALONE)
    assert len(calls) == 1


def test_small_gradients_are_not_enlarged_and_clipping_can_be_off():
    for clip_norm in (None, 100.0):
        done, left = core.finish(ALONE, [3.0, 4.0], clip_norm=clip_norm)
        assert (done.norm, left.tolist()) == (5.0, [3.0, 4.0])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_reported_and_not_clipped(bad):
    done, left = core.finish(ALONE, [3.0, bad], clip_norm=1.0)
    assert not done.finite
    assert left[0] == 3.0


def test_a_reduction_of_ones_own_replaces_the_sum():
    model = build(TINY)
    found = build_records(model, ALONE)

    def ones(records, mesh):
        for record in records:
            record.parameter.grad.fill_(1.0)

    done = core.finish_gradients(found, ALONE, reduce=ones)
    elements = sum(p.numel() for p in model.parameters())
    assert math.isclose(done.norm, math.sqrt(elements), rel_tol=1e-6)


@pytest.mark.trap("CLIP-08")
@pytest.mark.trap("MP-04")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_on_one_rank_is_skipped_by_all_alike(ranks):
    if ranks == 1:
        core.check_overflow_skipped_together(ALONE)
    else:
        on_ranks(core.check_overflow_skipped_together, TWO)


def step_figures(mesh: Mesh) -> tuple[float, float]:
    """CLIP-02: the norm is one number, to the bit, on every rank."""
    state = core.parallelize(TINY, core.TrainingConfig(), mesh)
    result = core.training_step(state, core.own_batches(mesh, 0), 1e-3, 0.1, "fp32")
    return result.grad_norm, result.loss


@pytest.mark.trap("CLIP-02")
def test_loss_and_norm_are_the_same_bits_on_every_rank():
    found = on_ranks(step_figures, {"dp": 3})
    assert len(set(found)) == 1
