"""The runs of "Why doesn't it converge?": every fault shows its symptom, every repair removes it.

The limits were checked once with other seeds, and with the corpus that is used without a network.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from exercise_cases.convergence import experiment, healthy_values, read, spoils

from course_lib.classroom.broken_runs import (
    FAULTS,
    Setting,
    broken,
    micro_batches,
    repaired,
    run,
    run_all,
    text_bytes,
)
from course_lib.classroom.checks import find
from course_lib.classroom.checks.convergence import FRESH_SEED, REFERENCE, questions
from course_lib.classroom.checks.grading import judge
from course_lib.classroom.diagnosis import diagnose, symptoms, verdict

LATE = slice(-20, None)


@pytest.fixture(scope="module")
def runs():
    others = {
        "never stopped": Setting(seed=FRESH_SEED, resume_at=None),
        "small batch, repaired": repaired("small batch", FRESH_SEED),
        "reference": REFERENCE,
    }
    return run_all({name: setting for name, (setting, _) in questions().items()} | others)


def test_a_healthy_run_starts_at_8_bits_and_learns(runs):
    healthy = runs["healthy"]
    assert abs(healthy.loss[0] - 8) < 0.2  # log2 of 256 bytes
    assert healthy.final < 4.1
    assert healthy.final < healthy.loss[LATE].mean() + 0.3
    assert not healthy.skipped.any()


def test_every_fault_is_named_and_no_sound_run_is_accused(runs):
    for fault in FAULTS:
        assert diagnose(runs[fault], runs["reference"]) == fault
    for sound in ("healthy", "healthy: in fp16", "small batch, repaired"):
        assert diagnose(runs[sound], runs["reference"]) == "healthy"


def test_a_small_batch_is_noisy_and_falls_behind(runs):
    run, healthy = runs["small batch"], runs["healthy"]
    assert symptoms(run, healthy)["noise"] > 2
    assert np.median(run.grad_norm[LATE]) > 1.5 * np.median(healthy.grad_norm[LATE])
    assert run.final > healthy.final + 0.3


def test_accumulated_small_batches_train_as_the_large_one(runs):
    repaired, healthy = runs["small batch, repaired"], runs["healthy"]
    assert np.allclose(repaired.loss[:10], healthy.loss[:10], atol=1e-4)
    assert abs(repaired.final - healthy.final) < 0.1


def test_a_high_learning_rate_never_recovers(runs):
    run, healthy = runs["high learning rate"], runs["healthy"]
    assert run.grad_norm[1] > 2 * run.grad_norm[0]
    assert run.loss[5:15].mean() > healthy.loss[5:15].mean() + 0.5
    assert run.final > healthy.final + 0.4
    assert np.median(run.grad_norm[LATE]) < 0.8 * np.median(healthy.grad_norm[LATE])


def test_other_preprocessing_shows_only_on_held_out_text(runs):
    run, healthy = runs["preprocessing"], runs["healthy"]
    assert run.loss[LATE].mean() < healthy.loss[LATE].mean() + 0.2
    assert run.final > run.loss[LATE].mean() + 1
    assert 0.5 < run.grad_norm[LATE].mean() / healthy.grad_norm[LATE].mean() < 1.5


def test_without_warm_up_the_norm_jumps_after_the_first_update(runs):
    assert symptoms(runs["no warm-up"], runs["healthy"])["first jump"] > 2
    assert symptoms(runs["healthy"], runs["healthy"])["first jump"] < 1.6


@pytest.mark.trap("CK-05")
def test_lost_moments_show_one_spike_at_the_restart(runs):
    run, healthy = runs["moments lost"], runs["healthy"]
    at = run.resumed
    assert np.array_equal(run.loss[: at + 1], healthy.loss[: at + 1])
    assert run.loss[at + 1] > healthy.loss[at + 1] + 0.2
    assert run.grad_norm[at + 1] > 1.5 * np.median(healthy.grad_norm[at - 10 : at])
    assert abs(run.final - healthy.final) < 0.3


@pytest.mark.trap("CK-05")
def test_a_complete_restart_leaves_no_trace(runs):
    for curve in ("loss", "grad_norm", "held_out"):
        stopped, never = (getattr(runs[name], curve) for name in ("healthy", "never stopped"))
        assert np.array_equal(stopped, never)


@pytest.mark.trap("MP-04")
def test_a_schedule_that_counts_skipped_steps_loses_its_warm_up(runs):
    run = runs["schedule runs on"]
    applied = int(np.argmin(run.skipped))  # the first
    assert applied + 1 >= Setting().warmup
    assert not np.isfinite(run.grad_norm[:applied]).any()
    assert np.ptp(run.loss[: applied + 1]) < 0.1  # nothing was learned, nothing diverged
    assert run.schedule[applied] > 0.9


@pytest.mark.trap("MP-04")
def test_a_schedule_that_waits_makes_the_same_updates(runs):
    repaired, healthy = runs["healthy: in fp16"], runs["healthy"]
    rates = repaired.schedule[~repaired.skipped]
    assert np.array_equal(rates, healthy.schedule[: len(rates)])
    assert abs(repaired.final - healthy.final) < 0.2


@pytest.mark.parametrize("fault", ["high learning rate", "preprocessing", "no warm-up"])
def test_the_repair_of_a_wrong_choice_is_the_healthy_setting(fault):
    assert repaired(fault) == Setting() != broken(fault)


@pytest.mark.trap("ACC-03")
def test_an_update_reads_the_same_sequences_however_they_are_divided():
    text = text_bytes("as it is")[0]
    whole = micro_batches(text, 3, Setting(micro_batch=16))
    parts = micro_batches(text, 3, Setting(micro_batch=4, accumulate=4))
    assert torch.equal(whole[0].tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole[0].tokens[:, 1:], whole[0].labels[:, :-1])


def test_a_run_is_a_pure_function_of_its_setting():
    short = Setting(steps=10, warmup=2, resume_at=None, outliers=(5,))
    first, again = run(short), run.__wrapped__(short)  # without the memory of earlier runs
    assert np.array_equal(first.loss, again.loss)
    assert first.loss[5] > first.loss[4] + 1  # random bytes
    assert not np.array_equal(first.loss, run(replace(short, seed=1)).loss)


def test_a_verdict_needs_an_effect_beyond_chance():
    assert verdict([0.2, 0.3, 0.25, 0.2]) == "helps"
    assert verdict([-0.2, -0.3, -0.25, -0.2]) == "hurts"
    assert verdict([0.5, -0.1, 0.1, 0.0]) == "not shown"


def test_right_answers_of_another_style_pass():
    assert judge(find("convergence/1"), read).status == "passed"
    assert judge(find("convergence/3"), healthy_values).status == "passed"


@pytest.mark.parametrize(
    "seeds", [range(4), range(7, 12), (0, 2, 4, 6), (1, 3, 5, 7, 9), range(0, 20, 2), range(40)]
)
def test_an_experiment_passes_with_any_seeds(seeds):
    verdict = judge(find("convergence/2"), lambda train: experiment(train, "", seeds))
    assert verdict.status == "passed", verdict.message


@pytest.mark.parametrize("seeds", [range(4), range(10, 14), (0, 2, 4, 6), (11, 23, 35, 47)])
def test_no_fixed_limit_stands_for_the_spread(seeds):
    verdict = judge(find("convergence/2"), lambda train: experiment(train, "a fixed limit", seeds))
    assert verdict.status == "wrong"


def test_an_answer_cannot_spoil_the_log_for_others():
    assert judge(find("convergence/1"), spoils).status == "crashed"
    assert run(Setting()).loss[0] > 7
