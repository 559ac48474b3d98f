"""Reading runs: which fault a log shows, how it is repaired, what several seeds have shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, stdev

import numpy as np

from course_lib.classroom.broken_runs import FAULTS, Curves, Setting

LATE = 20  # steps at the end that stand for "late in the run"


def symptoms(run: Curves, healthy: Curves) -> dict[str, float]:
    """The five numbers that tell the six faults apart.

    run: a log of a run that was stopped and started again once.
    healthy: a sound run to compare with; it may have another seed.
    Returns: moved, the largest change of the schedule after a skipped update; gap, held-out minus
    training loss at the end (bits per byte); noise, how much the loss jumps from step to step
    (healthy = 1); first jump, gradient norm after the first update over the one before it;
    restart, gradient norm after the first update that follows the restart, over the median before.
    """
    first, second = np.flatnonzero(~run.skipped)[:2]
    before = np.median(run.grad_norm[run.resumed - 10 : run.resumed])
    after = run.grad_norm[run.resumed + 1 :]
    moves = np.abs(np.diff(run.schedule))[run.skipped[:-1]]
    return {
        "moved": float(moves.max(initial=0.0)),
        "gap": float(run.final - run.loss[-LATE:].mean()),
        "noise": _jumpiness(run) / _jumpiness(healthy),
        "first jump": float(run.grad_norm[second] / run.grad_norm[first]),
        "restart": float(after[np.isfinite(after)][0] / before),
    }


def _jumpiness(run: Curves) -> float:
    return float(np.diff(run.loss[-2 * LATE :]).std())


def diagnose(run: Curves, healthy: Curves) -> str:
    """Name the fault of a run: one of `FAULTS`, or "healthy".

    The order matters: what is certain comes first, and a symptom that several faults share is
    asked for only after those that it does not name have been ruled out.
    """
    seen = symptoms(run, healthy)
    if seen["moved"] > 0:  # a sound schedule waits for the skipped update
        return "schedule runs on"
    if seen["gap"] > 0.4:  # it learns, but not what it is tested on
        return "preprocessing"
    if seen["noise"] > 1.8:
        return "small batch"
    if seen["first jump"] > 2:
        return "no warm-up" if run.schedule[0] == 1 else "high learning rate"
    if seen["restart"] > 1.5:
        return "moments lost"
    return "healthy"


def repair(fault: str, setting: Setting) -> Setting:
    """The setting with this fault repaired, and nothing else changed."""
    return replace(setting, **FAULTS[fault].repaired)


def judge_remedies(
    train: Callable[[bool, bool, int], float], seeds: Sequence[int] = range(8)
) -> dict[str, str]:
    """Find out which of two remedies helps, in a 2 × 2 experiment repeated over seeds.

    train: train(warm_up, clipping, seed) runs once and returns the held-out loss.
    Returns: for "warm-up" and "clipping" each "helps", "hurts" or "not shown". An effect counts as
    shown if its mean is more than 3 standard errors from 0.
    """
    loss = {(w, c, s): train(w, c, s) for w in (True, False) for c in (True, False) for s in seeds}
    # How much lower the loss is with the remedy, for the same seed, the other one on and off.
    effects = {
        "warm-up": [mean(loss[False, c, s] - loss[True, c, s] for c in (True, False))
                    for s in seeds],
        "clipping": [mean(loss[w, False, s] - loss[w, True, s] for w in (True, False))
                     for s in seeds],
    }  # fmt: skip
    return {remedy: verdict(by_seed) for remedy, by_seed in effects.items()}


def verdict(effects: Sequence[float]) -> str:
    """What paired differences, one a seed, show: "helps" where they are positive beyond chance."""
    error = stdev(effects) / len(effects) ** 0.5
    if abs(mean(effects)) <= 3 * error:
        return "not shown"
    return "helps" if mean(effects) > 0 else "hurts"
