"""Faults put back into the training loop: the checks that its tests use must find each one."""

import math
from collections.abc import Callable

import pytest
import torch

from course_lib import training
from tests import checks_training as proof
from tests.checks_training import Put

# ------------------------------------------------------------------------------------ optimizer


def adamw(put: Put, **mistakes) -> None:
    """AdamW with one mistake; see `wrong_adamw`."""
    put(training, "adamw_update", lambda *arguments: wrong_adamw(*arguments, **mistakes))


@torch.no_grad()
def wrong_adamw(
    parameter, gradient, mean, square, config, step, lr, decays,
    coupled=False, corrected=True, first=1, eps_inside=False, everything=False, late_decay=False,
):  # fmt: skip
    decay = config.weight_decay * (decays or everything)
    if coupled:
        gradient = gradient + decay * parameter
    elif not late_decay:
        parameter *= 1 - lr * decay
    mean.mul_(config.beta1).add_((1 - config.beta1) * gradient)
    square.mul_(config.beta2).add_((1 - config.beta2) * gradient**2)
    updates = (step + first) if corrected else math.inf
    square = square / (1 - config.beta2**updates)
    size = (square + config.eps).sqrt() if eps_inside else square.sqrt() + config.eps
    parameter -= lr * mean / (1 - config.beta1**updates) / size
    if late_decay:
        parameter *= 1 - lr * decay


def decay_in_the_gradient(put: Put) -> None:
    adamw(put, coupled=True)


def moments_not_corrected(put: Put) -> None:
    adamw(put, corrected=False)


def updates_counted_one_too_far(put: Put) -> None:
    adamw(put, first=2)


def eps_inside_the_root(put: Put) -> None:
    adamw(put, eps_inside=True)


def biases_decay_in_ours(put: Put) -> None:
    adamw(put, everything=True)


def decay_after_the_step(put: Put) -> None:
    adamw(put, late_decay=True)


def sgd_without_decay(put: Put) -> None:
    right = training.make_optimizer
    put(training, "make_optimizer", lambda c, pairs: right(c, [(p, False) for p, _ in pairs]))


def one_group(put: Put) -> None:
    right = training.make_optimizer
    put(training, "make_optimizer", lambda c, pairs: right(c, [(p, True) for p, _ in pairs]))


# -------------------------------------------------------------------------------- learning rate


def rate(put: Put, schedule: str, wrong: Callable) -> None:
    """Replace the fall of one schedule after the warm-up."""
    right = training.learning_rate

    def learning_rate(config, step):
        if config.schedule != schedule or step < config.warmup:
            return right(config, step)
        return config.lr * (1 - (1 - config.min_lr) * wrong(config, step))

    put(training, "learning_rate", learning_rate)


def cosine(progress: float) -> float:
    return (1 - math.cos(math.pi * progress)) / 2


def warm_up_from_zero(put: Put) -> None:
    right = training.learning_rate
    put(training, "learning_rate", lambda config, step: right(config, max(step - 1, 0)))


def cosine_rises_again(put: Put) -> None:
    rate(put, "cosine", lambda c, s: cosine((s - c.warmup + 1) / (c.steps - c.warmup + 1)))


def cosine_starts_one_late(put: Put) -> None:
    rate(put, "cosine", lambda c, s: cosine(min((s - c.warmup) / (c.steps - c.warmup), 1)))


def cosine_over_all_steps(put: Put) -> None:
    rate(put, "cosine", lambda c, s: cosine(min(s / c.steps, 1)))


def linear_falls_below_its_end(put: Put) -> None:
    rate(put, "linear", lambda c, s: (s - c.warmup + 1) / (c.steps - c.warmup + 1))


def wsd_never_decays(put: Put) -> None:
    rate(put, "wsd", lambda c, s: 0.0)


def wsd_decays_from_its_peak(put: Put) -> None:
    rate(put, "wsd", lambda c, s: min((s - c.warmup + 1) / (c.steps - c.warmup + 1), 1))


def wsd_decays_one_step_late(put: Put) -> None:
    def wrong(config, step):
        length = round(config.decay * config.steps)
        return min(max(step - 1 - (config.steps - length), 0) / length, 1)

    rate(put, "wsd", wrong)


def wsd_share_of_what_follows_the_warm_up(put: Put) -> None:
    def wrong(config, step):
        length = round(config.decay * (config.steps - config.warmup))
        return min(max(step - (config.steps - length), 0) / length, 1)

    rate(put, "wsd", wrong)


def wsd_rounds_its_length_down(put: Put) -> None:
    def wrong(config, step):
        length = int(config.decay * config.steps)
        return min(max(step - (config.steps - length), 0) / length, 1)

    rate(put, "wsd", wrong)


def falls_to_zero_by_default(put: Put) -> None:
    right = training.TrainingConfig
    put(proof, "TrainingConfig", lambda **given: right(**{"min_lr": 0.0} | given))


# --------------------------------------------------------------------- accumulation, loss scale


def divided_by_all_positions(put: Put) -> None:
    right = training.accumulate

    def accumulate(model, parts, divisor, *rest):
        return right(model, parts, sum(part.labels.numel() for part in parts), *rest)

    put(training, "accumulate", accumulate)


def only_the_last_micro_batch(put: Put) -> None:
    right = training.accumulate

    def accumulate(model, parts, *rest):
        loss = 0.0
        for part in parts:
            model.zero_grad()
            loss = loss + right(model, [part], *rest)
        return loss

    put(training, "accumulate", accumulate)


def mean_of_micro_batches(put: Put) -> None:
    right = training.accumulate

    def accumulate(model, parts, divisor, *rest):
        return sum(right(model, [p], max(p.valid, 1) * len(parts), *rest) for p in parts)

    put(training, "accumulate", accumulate)


def scaler(put: Put, wrong: Callable) -> None:
    put(training.LossScaler, "update", wrong)


def growth_counts_all_good_steps(put: Put) -> None:
    def update(self, finite):
        self.scale *= 1 if finite else 0.5
        self.good_steps += finite
        if finite and self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    scaler(put, update)


def grows_at_every_step_after_the_first_growth(put: Put) -> None:
    def update(self, finite):
        self.good_steps = self.good_steps + 1 if finite else 0
        self.scale *= (2 if self.good_steps >= self.growth_interval else 1) if finite else 0.5

    scaler(put, update)


def doubles_on_overflow(put: Put) -> None:
    right = training.LossScaler.update
    scaler(put, lambda self, finite: right(self, not finite))


def stops_falling_at_1(put: Put) -> None:
    right = training.LossScaler.update

    def update(self, finite):
        right(self, finite)
        self.scale = max(self.scale, 1.0)

    scaler(put, update)


def hides_what_is_not_finite(put: Put) -> None:
    right = training._CrossEntropySum.backward
    put(
        training._CrossEntropySum, "backward",
        staticmethod(lambda ctx, upstream: right(ctx, upstream.nan_to_num())),
    )  # fmt: skip


def large_batch() -> None:
    proof.check_accumulation(2048, (32,))


FAULTS = [
    *((fault, proof.check_adamw, None) for fault in (
        decay_in_the_gradient, moments_not_corrected, updates_counted_one_too_far,
        eps_inside_the_root, decay_after_the_step,
    )),
    *((fault, proof.check_adamw, "LR-07") for fault in (biases_decay_in_ours, one_group)),
    (warm_up_from_zero, proof.check_schedules, "LR-01"),
    *((fault, proof.check_schedules, "LR-03") for fault in (
        cosine_rises_again, cosine_over_all_steps, linear_falls_below_its_end, wsd_never_decays,
    )),
    *((fault, proof.check_schedules, None) for fault in (
        cosine_starts_one_late, wsd_decays_from_its_peak, wsd_decays_one_step_late,
        wsd_share_of_what_follows_the_warm_up, wsd_rounds_its_length_down,
        falls_to_zero_by_default,
    )),
    (sgd_without_decay, proof.check_sgd, None),
    (hides_what_is_not_finite, proof.check_overflow_reaches_the_logits, "MP-04"),
    *((fault, check, "ACC-01") for check in (proof.check_accumulation, large_batch) for fault in (
        divided_by_all_positions, only_the_last_micro_batch, mean_of_micro_batches,
    )),
    *((fault, proof.check_scale_moves_as_torchs, "MP-04") for fault in (
        growth_counts_all_good_steps, grows_at_every_step_after_the_first_growth,
        doubles_on_overflow, stops_falling_at_1,
    )),
]  # fmt: skip

ROWS = [
    pytest.param(
        fault, check, id=f"{fault.__name__}-{check.__name__.removeprefix('check_')}",
        marks=[pytest.mark.trap(trap)] if trap else [],
    )
    for fault, check, trap in FAULTS
]  # fmt: skip


@pytest.mark.parametrize("fault, check", ROWS)
def test_a_check_fails_on(fault, check, monkeypatch):
    fault(monkeypatch.setattr)
    with pytest.raises(AssertionError, match=r"\d"):  # the message says what differs
        check()


def test_all_checks_pass_without_a_fault():
    """Else a check that always fails would seem to notice everything."""
    for check in dict.fromkeys(check for _, check, _ in FAULTS):
        check()
