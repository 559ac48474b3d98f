"""Answers to the exercises of "Why doesn't it converge?"."""

import math
from dataclasses import replace
from statistics import mean, stdev

import numpy as np

from course_lib.classroom.broken_runs import Setting

from . import Cases, Wrong


def diagnosis_stub(run, healthy):
    raise NotImplementedError


def read(run, healthy, mistake=""):
    """A learner's decision tree, with limits of their own; right unless there is a mistake."""
    late, applied = run.loss[-15:].mean(), run.grad_norm[~run.skipped]
    if mistake == "overflow is divergence" and not np.isfinite(run.grad_norm).all():
        return "high learning rate"
    if mistake == "every skip is a fault" and run.skipped.any():
        return "schedule runs on"
    steps = zip(run.skipped, run.schedule, run.schedule[1:])
    if any(skipped and now != after for skipped, now, after in steps):
        return "schedule runs on"
    if run.held_out[-1] > late + 0.5 and mistake != "no look at the gap":
        return "preprocessing"
    usual = 0.15 if mistake == "a fixed limit" else np.diff(healthy.loss[40:]).std()
    if np.diff(run.loss[40:]).std() > 2 * usual:
        return "high learning rate" if mistake == "noise is a high rate" else "small batch"
    if applied[1] > 1.9 * applied[0]:
        if mistake == "every first jump is warm-up":
            return "no warm-up"
        warm = run.schedule[0] < 0.5
        other = {"warm-up is clipping": "no clipping", "warm-up is the rate": "high learning rate"}
        return "high learning rate" if warm else other.get(mistake, "no warm-up")
    if mistake == "every restart is a fault":
        return "moments lost"
    spike = run.grad_norm[run.resumed + 1] > 1.4 * np.median(run.grad_norm[15 : run.resumed])
    if mistake == "no look at the gap" and run.held_out[-1] > healthy.held_out[-1] + 0.4:
        return "high learning rate"
    return "moments lost" if spike and mistake != "only the end" else "healthy"


def reading(mistake):
    return lambda run, healthy: read(run, healthy, mistake)


def remedies_stub(train):
    raise NotImplementedError


def experiment(train, mistake="", seeds=range(6)):
    """A learner's experiment with a limit of 2.5 standard errors; right unless mistaken."""
    said = {}
    for remedy in ("warm-up", "clipping"):
        gains = []
        for seed in seeds:
            for other in (True, False):
                cells = [(False, other), (True, other)]
                if remedy == "clipping":
                    cells = [(other, False), (other, True)]
                if mistake == "both at once":
                    cells = [(False, False), (True, True)]
                without, used = (train(*cell, seed) for cell in cells)
                gains.append((without, used))
        if mistake.startswith("unpaired"):
            low, high = ([pair[i] for pair in gains] for i in (1, 0))
            gain = mean(high) - mean(low)
            error = (stdev(low) ** 2 / len(low) + stdev(high) ** 2 / len(high)) ** 0.5
        elif mistake == "one seed counts twice":
            gain = mean(a - b for a, b in gains)
            error = stdev(a - b for a, b in gains) / len(gains) ** 0.5
        else:
            by_seed = [mean(a - b for a, b in gains[i : i + 2]) for i in range(0, len(gains), 2)]
            gain = mean(by_seed)
            error = stdev(by_seed) / len(by_seed) ** 0.5 if len(by_seed) > 1 else 0
        limits = {"no spread": 0, "too strict": 200, "two errors": 2, "unpaired, 3 errors": 3,
                  "one seed counts twice": 3}  # fmt: skip
        limit = limits.get(mistake, 2.5) * error
        limit = 0.1 if mistake == "a fixed limit" else limit
        if mistake == "same sign":
            limit = 0 if len({a > b for a, b in gains}) == 1 else math.inf
        words = ("hurts", "helps") if mistake == "sign" else ("helps", "hurts")
        said[remedy] = "not shown" if abs(gain) <= limit else words[gain < 0]
    return said


def spoils(run, healthy):
    run.loss *= 0
    return "healthy"


def one_cell(train):
    gains = [train(False, False, seed) - train(True, False, seed) for seed in range(6)]
    return {"warm-up": "helps" if mean(gains) > 0.1 else "not shown", "clipping": "not shown"}


def repair_stub(fault, setting):
    raise NotImplementedError


def healthy_values(fault, setting):
    """A learner's repair: the default of the value that is the cause."""
    if fault == "small batch":
        return replace(setting, accumulate=16 // setting.micro_batch)
    name = {
        "high learning rate": "lr", "preprocessing": "training_text", "no warm-up": "warmup",
        "moments lost": "restored", "schedule runs on": "schedule_counts",
    }[fault]  # fmt: skip
    return replace(setting, **{name: getattr(Setting(), name)})


def repairing(faulty, **values):
    """Right, but for one fault."""

    def repair(fault, setting):
        return replace(setting, **values) if fault == faulty else healthy_values(fault, setting)

    return repair


def experimenting(mistake, seeds=range(6)):
    return lambda train: experiment(train, mistake, seeds)


CASES = {
    "convergence/1": Cases(
        diagnosis_stub,
        (
            Wrong("data fault called learning rate", reading("no look at the gap"), "Only text"),
            Wrong("missing warm-up called missing clipping", reading("warm-up is clipping"),
                  "no batch is damaged"),
            Wrong("overflow called divergence", reading("overflow is divergence"),
                  "nothing diverged"),
            Wrong("sound fp16 called a fault", reading("every skip is a fault"), "what fp16 does"),
            Wrong("sound restart called a fault", reading("every restart is a fault"),
                  "compared with itself"),
            Wrong("noise called learning rate", reading("noise is a high rate"), "np.diff(loss)"),
            Wrong("missing warm-up called learning rate", reading("warm-up is the rate"),
                  "schedule[0] shows the cause"),
            Wrong("learning rate called missing warm-up", reading("every first jump is warm-up"),
                  "Its schedule warms up"),
            Wrong("spike overlooked", reading("only the end"), "Later nothing is seen"),
            Wrong("a fixed limit of noise", reading("a fixed limit"), "not with a fixed number"),
            Wrong("an array", lambda run, healthy: run.loss, "return one of 'healthy'"),
            Wrong("another word", lambda run, healthy: "divergence", "yours: 'divergence'"),
            Wrong("a value, not a function", "healthy", "without calling it"),
        ),
    ),
    "convergence/2": Cases(
        remedies_stub,
        (
            Wrong("one seed taken as proof", experimenting("", range(1)), "you ran one seed"),
            Wrong("two seeds", experimenting("", range(2)), "no idea of the spread"),
            Wrong("conclusions from noise", experimenting("no spread"), "compared with its spread"),
            Wrong("unpaired", experimenting("unpaired"), "then the seed's own level drops out"),
            Wrong("unpaired, with the limit of the chapter",
                  experimenting("unpaired, 3 errors", range(4)), "Seeds differ more from each"),
            Wrong("one sign with four seeds", experimenting("same sign", range(4)),
                  "once in 8 times"),
            Wrong("one sign with five seeds", experimenting("same sign", range(5)),
                  "once in 16 times"),
            Wrong("two differences a seed", experimenting("one seed counts twice", range(4)),
                  "do not count twice"),
            Wrong("two standard errors", experimenting("two errors"), "within 3 it may be chance"),
            Wrong("both remedies at once", experimenting("both at once"), "both remedies together"),
            Wrong("sign", experimenting("sign"), "LOWER with it"),
            Wrong("too strict", experimenting("too strict"), "far beyond chance"),
            Wrong("a fixed limit", experimenting("a fixed limit"), "divided by the root"),
            Wrong("clipping never on", one_cell, "differ in clipping alone"),
            Wrong("no run at all", lambda train: {"warm-up": "helps", "clipping": "helps"},
                  "without a single run"),
            Wrong("one word", lambda train: "clipping", 'return {"warm-up"'),
            Wrong("a value, not a function", {"warm-up": "helps"}, "without calling it"),
        ),
    ),
    "convergence/3": Cases(
        repair_stub,
        (
            Wrong("the batch in one pass", repairing("small batch", micro_batch=16), "no more seq"),
            Wrong("too little accumulation", repairing("small batch", accumulate=2),
                  "accumulate 2"),
            Wrong("too much accumulation", repairing("small batch", accumulate=16),
                  "2 × 16 = 32 sequences"),
            Wrong("half the rate", repairing("high learning rate", lr=0.15), "0.3 / 2 is not"),
            Wrong("a hundredth of the rate", repairing("high learning rate", lr=0.003),
                  "0.3 / 100 is not"),
            Wrong("no such field", repairing("small batch", accumulation=8),
                  "has no 'accumulation'. It has seed, steps, micro_batch, accumulate,"),
            Wrong("no warm-up to speak of", repairing("no warm-up", warmup=1), "with warmup 1"),
            Wrong("clips instead", repairing("no warm-up", clip_norm=0.1), "change clip_norm"),
            Wrong("another precision", repairing("schedule runs on", precision="fp32"),
                  "fp16 only"),
            Wrong("a lower scale", repairing("schedule runs on", loss_scale=2.0**16), "high again"),
            Wrong("a lower scale with the repair", repairing("schedule runs on",
                  loss_scale=2.0**16, schedule_counts="updates"), "no scale can move it"),
            Wrong("no restart", repairing("moments lost", resume_at=None), "must be complete"),
            Wrong("both forms swapped", repairing("preprocessing", training_text="as it is",
                  held_out_text="spaces marked"), "held_out_text 'spaces marked'"),
            Wrong("nothing is changed", repairing("no warm-up", warmup=0), "comes back as"),
            Wrong("a dictionary", lambda fault, setting: {"lr": 0.015}, "yours is dict"),
            Wrong("a value, not a function", Setting(), "without calling it"),
        ),
    ),
}  # fmt: skip
