"""One device's part of a step: loss, accumulation, precision, learning rate, optimizer."""

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.mesh import Mesh
from course_lib.model import build
from course_lib.training import (
    IGNORE,
    LossScaler,
    TrainingConfig,
    accumulate,
    autocast,
    learning_rate,
    loss_sum,
    make_optimizer,
    weight_dtype,
)
from tests import checks_core as core
from tests import checks_training as proof
from tests.checks_core import TINY, TWO, close, on_ranks, own_batches, parallelize, training_step

ALONE = Mesh.single()

# ------------------------------------------------------------------------ loss and accumulation


@pytest.mark.trap("ACC-01")
def test_every_token_weighs_the_same_in_micro_batches_of_unequal_length():
    core.check_uneven_micro_batches(ALONE)


@pytest.mark.trap("ACC-03")
def test_loss_and_norm_do_not_depend_on_the_number_of_micro_batches():
    core.check_accumulation_counts(ALONE)


@pytest.mark.trap("ACC-01")
def test_gradients_of_1_2_3_and_8_micro_batches_are_those_of_the_undivided_batch():
    proof.check_accumulation()


@pytest.mark.trap("ACC-03")
def test_2048_sequences_in_32_micro_batches_are_one_large_batch():
    proof.check_accumulation(samples=2048, counts=(32,))


@pytest.mark.trap("ACC-04")
def test_a_step_does_not_depend_on_the_number_of_ranks():
    loss, change = core.parameter_changes(ALONE)
    for ranks in (2, 4):
        for other_loss, other in on_ranks(core.parameter_changes, {"dp": ranks}):
            assert close(other_loss, loss, 1e-12)
            for name in change:
                assert torch.allclose(other[name], change[name], rtol=1e-10, atol=1e-14), name


@pytest.mark.trap("ACC-09")
@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_micro_batches_and_ranks_add_nothing(ranks):
    if ranks == 1:
        core.check_masked_rank(ALONE)
    else:
        on_ranks(core.check_masked_rank, TWO)


@pytest.mark.trap("ACC-09")
def test_a_global_batch_without_targets_has_loss_zero_and_no_gradient():
    state = parallelize(TINY, TrainingConfig(weight_decay=0.0), ALONE)
    before = core.bits(state)
    own = [
        replace(batch, labels=torch.full_like(batch.labels, IGNORE), valid=0)
        for batch in own_batches(ALONE, 0)
    ]
    result = training_step(state, own, 1e-3, 1.0, "fp32")
    assert (result.loss, result.grad_norm, result.tokens) == (0.0, 0.0, 0)
    assert core.same(core.bits(state), before)


@pytest.mark.trap("DP-06")
def test_ranks_take_the_same_steps_when_one_has_a_masked_batch():
    on_ranks(core.check_masked_batch_keeps_ranks_together, TWO)


@pytest.mark.trap("ACC-10")
def test_labels_are_shifted_once():
    core.check_labels_shifted_once(ALONE)


@pytest.mark.trap("ACC-12")
def test_figures_hold_no_graph_and_memory_does_not_grow():
    core.check_nothing_kept(ALONE)


def test_the_loss_is_a_sum_in_fp32_or_wider():
    labels = torch.tensor([[1, IGNORE, 0]])
    for dtype, wide in (
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
        (torch.float32, torch.float32), (torch.float64, torch.float64),
    ):  # fmt: skip
        loss = loss_sum(torch.zeros(1, 3, 4, dtype=dtype), labels)
        assert loss.dtype == wide
        assert close(float(loss), 2 * math.log(4), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_loss_and_its_gradient_equal_pytorchs(dtype, in_place):
    logits = 30 * torch.randn(2, 5, 7, dtype=torch.float64)
    logits[0, 0] += 1e4  # exp overflows without the largest being taken off
    labels = torch.randint(7, (2, 5))
    labels[0, 1] = labels[1] = IGNORE
    theirs = logits.to(dtype).requires_grad_()
    wide = theirs.double() if dtype == torch.float64 else theirs.float()
    wanted = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    (3 * wanted).backward()
    ours = logits.to(dtype).requires_grad_()
    found = loss_sum(ours * 1, labels, in_place)
    (3 * found).backward()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(found, wanted, rtol=bound)
    assert torch.allclose(ours.grad, theirs.grad, rtol=bound, atol=bound)
    assert ours.grad[1].abs().max() == 0


def test_only_an_in_place_loss_overwrites_the_logits():
    labels = torch.tensor([[1, IGNORE, 0]])
    for in_place in (False, True):
        logits = torch.randn(1, 3, 4, requires_grad=True) * 1
        before, places = logits.detach().clone(), []
        logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
        loss_sum(logits, labels, in_place).backward()
        assert (places == [logits.data_ptr()]) is in_place
        assert torch.equal(logits, before) is not in_place


def test_an_in_place_loss_is_refused_where_the_logits_are_still_needed():
    labels = torch.tensor([[1, IGNORE, 0]])
    capped = torch.randn(1, 3, 4, requires_grad=True).tanh()  # tanh's backward reads its output
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_sum(capped, labels, in_place=True).backward()
    twice = loss_sum(torch.randn(1, 3, 4, requires_grad=True) * 1, labels, in_place=True)
    twice.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twice.backward()


def test_gradients_add_to_those_that_are_there():
    model = build(TINY)
    own = own_batches(ALONE, 0)
    accumulate(model, own, 10)
    once = [p.grad.clone() for p in model.parameters()]
    accumulate(model, own, 10)
    assert all(torch.allclose(p.grad, 2 * g) for p, g in zip(model.parameters(), once))


# ------------------------------------------------------------------------------ mixed precision


@pytest.mark.trap("MP-01")
def test_small_updates_are_not_lost_under_bf16():
    core.check_small_updates_arrive(ALONE)


@pytest.mark.trap("MP-02")
def test_small_micro_gradients_are_not_lost_under_bf16():
    core.check_small_gradients_add_up(ALONE)


@pytest.mark.trap("MP-01")
def test_weights_gradients_and_moments_are_fp32_under_16_bits():
    core.check_state_is_fp32(ALONE)
    assert weight_dtype("fp64") == torch.float64


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_steps_are_near_those_in_fp32(precision):
    figures = {}
    for kind in ("fp32", precision):
        state = parallelize(TINY, TrainingConfig(precision=kind), ALONE)
        results = [training_step(state, own_batches(ALONE, i), 1e-2, 1.0, kind) for i in range(3)]
        figures[kind] = [x for r in results for x in (r.loss, r.grad_norm)]
    assert all(close(a, b, 0.03) for a, b in zip(figures["fp32"], figures[precision]))
    assert figures["fp32"] != figures[precision]


@pytest.mark.trap("MP-04")
def test_an_overflow_leaves_weights_rate_and_step_and_halves_the_scale():
    core.check_overflow_skipped_together(ALONE)


@pytest.mark.trap("MP-04")
def test_a_loss_scale_that_is_too_large_costs_steps_but_no_update():
    """Nothing is injected: real gradients overflow until the scale is small enough."""
    config = TrainingConfig(precision="fp16")
    state = parallelize(TINY, config, ALONE)
    state.scaler = LossScaler(scale=2.0**24, growth_interval=2)
    applied, scales, before = [], [], core.bits(state)
    for step in range(16):
        rate = learning_rate(config, state.optimizer_step)
        applied.append(training_step(state, own_batches(ALONE, step), rate, 1.0, "fp16").applied)
        scales.append(math.log2(state.scaler.scale))
        if not any(applied):
            assert core.same(core.bits(state), before)
    first = applied.index(True)
    assert first > 0, "the scale did not overflow"
    assert scales[:first] == [24 - skipped for skipped in range(1, first + 1)]
    assert False in applied[first:], "it never grew too large again"
    assert state.optimizer_step == sum(applied)
    assert state.skipped == applied.count(False)


@pytest.mark.trap("MP-04")
def test_the_loss_scale_moves_as_that_of_torch():
    proof.check_scale_moves_as_torchs()


@pytest.mark.trap("MP-04")
def test_an_overflow_above_the_loss_reaches_the_logits():
    proof.check_overflow_reaches_the_logits()


def test_the_loss_scale_grows_after_enough_good_steps_in_a_row():
    scaler = LossScaler(scale=8.0, growth_interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, True, True):
        scaler.update(finite)
        seen.append(scaler.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_only_fp16_has_a_loss_scale():
    assert LossScaler.for_precision("fp16") == LossScaler(2.0**16)
    assert [LossScaler.for_precision(p) for p in ("fp32", "bf16", "fp64")] == [None] * 3


# -------------------------------------------------------------------------------- learning rate


@pytest.mark.trap("LR-01")
def test_the_first_update_is_not_zero():
    core.check_first_update_moves(ALONE)
    config = TrainingConfig(warmup=4)
    state = parallelize(TINY, config, ALONE)
    before = core.bits(state)
    training_step(state, own_batches(ALONE, 0), learning_rate(config, 0), 1.0, "fp32")
    assert not any(torch.equal(after, before[name]) for name, after in core.bits(state).items())


@pytest.mark.trap("LR-03")
def test_the_rate_stays_at_its_lowest_after_the_end():
    core.check_decay_ends(ALONE)


@pytest.mark.trap("LR-03")
def test_every_schedule_at_its_start_its_joints_its_end_and_past_it():
    proof.check_schedules()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 4, 20])
def test_the_rate_rises_to_its_peak_and_never_again(schedule, warmup):
    config = TrainingConfig(lr=2.0, min_lr=0.25, warmup=warmup, steps=20, schedule=schedule)
    rates = [learning_rate(config, step) for step in range(40)]
    peak = max(warmup - 1, 0)
    assert rates[peak] == max(rates) == 2.0
    assert all(b > a for a, b in pairwise(rates[: peak + 1]))
    after = rates[peak:21]  # no jump and no plateau where warm-up and decay meet
    if schedule != "constant":
        falls = rates[max(peak, 16) : 21] if schedule == "wsd" else after
        assert all(b < a for a, b in pairwise(falls))
        assert all(b <= a for a, b in pairwise(after))
        assert all(math.isclose(rate, 0.5, abs_tol=1e-12) for rate in rates[20:])
    else:
        assert set(rates[peak:]) == {2.0}


def test_a_linear_decay_is_a_straight_line():
    config = TrainingConfig(lr=1.0, min_lr=0.0, warmup=0, steps=4, schedule="linear")
    assert [learning_rate(config, step) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]


def test_the_decay_starts_where_the_warm_up_ends():
    shape = {"lr": 1.0, "min_lr": 0.0, "warmup": 4, "steps": 11}
    warmup = [0.25, 0.5, 0.75, 1]
    linear = TrainingConfig(**shape, schedule="linear")
    falling = [0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0]
    assert [learning_rate(linear, step) for step in range(13)] == warmup + falling
    cosine = TrainingConfig(**shape, schedule="cosine")
    quarters = [learning_rate(cosine, step) for step in (3, 5, 7, 9, 11)]
    bend = math.sqrt(0.5) / 2
    assert quarters == pytest.approx([1, 0.5 + bend, 0.5, 0.5 - bend, 0], abs=1e-12)


def test_wsd_is_constant_before_its_decay_and_linear_where_it_decays_in_all_steps():
    def rates(steps, **changed):
        config = TrainingConfig(warmup=5, steps=steps, **changed)
        return [learning_rate(config, step) for step in range(steps + 5)]

    assert rates(50, schedule="wsd", decay=1.0) == rates(50, schedule="linear")
    assert rates(50, schedule="wsd", decay=0.5)[:25] == rates(50, schedule="constant")[:25]


@pytest.mark.trap("LR-04")
def test_a_wsd_run_can_be_made_longer_before_its_decay():
    """The rates so far do not depend on the end, as those of cosine do: a branch can go on."""
    short, long = (TrainingConfig(schedule="wsd", steps=n, decay=20 / n) for n in (100, 400))
    assert all(learning_rate(short, step) == learning_rate(long, step) for step in range(80))
    assert learning_rate(short, 81) < learning_rate(long, 81)


def test_a_decay_shorter_than_a_step_takes_one():
    config = TrainingConfig(lr=1.0, min_lr=0.0, warmup=0, steps=4, schedule="wsd", decay=1e-9)
    assert [learning_rate(config, step) for step in range(6)] == [1, 1, 1, 1, 0, 0]


@pytest.mark.trap("LR-04")
def test_a_resumed_run_goes_on_with_the_same_rates():
    """The rate is a function of the step, so nothing but the step is needed to go on."""
    config = TrainingConfig(steps=100, warmup=10)
    unbroken = [learning_rate(config, step) for step in range(100)]
    resumed = [learning_rate(TrainingConfig(steps=100, warmup=10), s) for s in range(45, 100)]
    assert resumed == unbroken[45:]
    state = parallelize(TINY, config, ALONE)
    saved = deepcopy(state.optimizer.state_dict())  # holds the rate that was last used
    training_step(state, own_batches(ALONE, 0), 0.5, 1.0, "fp32")
    state.optimizer.load_state_dict(saved)
    training_step(state, own_batches(ALONE, 0), 0.125, 1.0, "fp32")
    assert {group["lr"] for group in state.optimizer.param_groups} == {0.125}


# ------------------------------------------------------------------------------------ optimizer


@pytest.mark.trap("LR-07")
def test_matrices_decay_and_norms_and_biases_do_not():
    core.check_decay_groups(ALONE)


@pytest.mark.trap("LR-07")
def test_adamw_from_scratch_the_fused_one_and_torchs_plainest_agree_over_50_steps():
    proof.check_adamw()


def test_the_trainers_optimizer_is_fused():
    optimizer = make_optimizer(TrainingConfig(), [(nn.Parameter(torch.ones(2)), True)])
    assert optimizer.defaults["fused"]


@pytest.mark.trap("CK-05")
def test_a_saved_optimizer_goes_on_with_its_moments():
    config = TrainingConfig(lr=0.1, weight_decay=0.0, beta2=0.999)
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = make_optimizer(config, [(weight, False)])
    for update in range(11):
        if update == 10:
            saved, before = deepcopy(optimizer.state_dict()), weight.item()
            optimizer = make_optimizer(config, [(weight, False)])
            optimizer.load_state_dict(saved)
        weight.grad = torch.full_like(weight, 1.0 if update % 2 == 0 else -0.5)
        optimizer.step()
    assert math.isclose(weight.item() - before, -0.0401035, abs_tol=5e-8)


def test_sgd_is_plain():
    weight = nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(
        TrainingConfig(optimizer="sgd", lr=0.5, weight_decay=0.0), [(weight, True)]
    )
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    assert weight.tolist() == [0.0, 3.0]


def test_sgd_decays_what_is_declared_to_decay():
    proof.check_sgd()


def test_frozen_parameters_are_in_no_group():
    frozen, free = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(TrainingConfig(), [(frozen, True), (free, False)])
    assert [group["params"] for group in optimizer.param_groups] == [[free]]


def test_all_faults_of_a_training_section_are_found_at_once():
    assert TrainingConfig().faults() == []
    wrong = TrainingConfig(
        steps=0, micro_batch=0, lr=0.0, min_lr=2.0, warmup=5, beta2=1.0, clip_norm=-1.0,
        max_skipped=0, eps=math.nan, weight_decay=math.nan, decay=0.0,
    )  # fmt: skip
    found = wrong.faults()
    for name in ("steps", "micro_batch", "lr", "min_lr", "warmup", "beta2", "clip_norm",
                 "max_skipped", "eps", "weight_decay", "decay"):  # fmt: skip
        assert any(fault.startswith(f"{name} ") for fault in found), name
    assert len(found) == 11


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "clip_norm"])
def test_an_infinite_value_is_a_fault(name):
    assert any(
        fault.startswith(f"{name} ") for fault in TrainingConfig(**{name: math.inf}).faults()
    )


def test_a_seed_fits_64_bits():
    assert TrainingConfig(seed=2**63 - 1).faults() == []
    assert TrainingConfig(seed=2**63).faults() == [f"seed {2**63} must be below 2**63"]


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: autocast(torch.device("cpu"), "bfloat16"), "fp64, fp32, bf16, fp16"),
        (lambda: weight_dtype("fp46"), "fp64, fp32, bf16, fp16"),
        (lambda: learning_rate(TrainingConfig(schedule="Cosine"), 50), "one of cosine, linear"),
        (lambda: learning_rate(TrainingConfig(warmup=0), -1), "counted from 0"),
        (lambda: accumulate(nn.Linear(1, 1), [], divisor=-5), "at least 0"),
        (lambda: LossScaler(growth_interval=0), "at least 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_allowed(call, says):
    with pytest.raises(ValueError, match=says):
        call()
