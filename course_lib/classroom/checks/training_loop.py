"""The exercises of "The training loop": one accumulated gradient; a schedule; a loss scaler."""

import math
from collections.abc import Callable
from itertools import product
from operator import itemgetter

from course_lib.training import LossScaler, TrainingConfig, learning_rate

from ..learner import learners_line
from .exercise import Exercise, WrongAnswer, require_function
from .training_loop_gradient import grade_clipped_gradient

# ---------------------------------------------------------------------- warm-up and cosine decay

_SCHEDULES = (
    TrainingConfig(lr=2.0, min_lr=0.25, warmup=4, steps=20),
    TrainingConfig(lr=0.3, min_lr=0.0, warmup=10, steps=47),
    TrainingConfig(lr=0.3, min_lr=0.1, warmup=0, steps=12),
    TrainingConfig(lr=0.3, min_lr=0.1, warmup=1, steps=12),
)


def grade_learning_rate(answer: Callable[[TrainingConfig, int], float]) -> None:
    """Ask for every step, and for some past the end, under several configurations."""
    require_function(answer)
    for config in _SCHEDULES:
        steps = [*range(config.steps + 8), 2 * config.steps, 5 * config.steps + 1]
        got = [_rate(answer, config, step) for step in steps]
        want = [learning_rate(config, step) for step in steps]
        wrong = [at for at, (a, b) in enumerate(zip(got, want)) if not _near(a, b)]
        if wrong:
            raise WrongAnswer(_schedule_mistake(config, steps, got, want, wrong[0]))


def _rate(answer: Callable, config: TrainingConfig, step: int) -> float:
    try:
        rate = answer(config, step)
    except ZeroDivisionError as error:
        raise WrongAnswer(
            f"you divide by zero at step {step} with warmup = {config.warmup}. Without warm-up the "
            f"first rate is lr.\n{learners_line(error)}".rstrip()
        ) from error
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise WrongAnswer(f"return a number; at step {step} yours is {type(rate).__name__}.")
    return float(rate)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def _schedule_mistake(config, steps: list, got: list, want: list, first: int) -> str:
    where = (
        f"with lr {config.lr}, min_lr {config.min_lr}, warmup {config.warmup}, steps "
        f"{config.steps}, your rate at step {steps[first]} is {got[first]:.4g}; expected: "
        f"{want[first]:.4g}. "
    )
    if all(_near(config.lr * a, b) for a, b in zip(got, want)):
        return where + "The factor lr is missing: yours is a fraction of lr."
    for words, wrong in _mistaken_schedules():
        if all(_near(a, wrong(config, step)) for a, step in zip(got, steps)):
            return where + words
    if steps[first] == 0 and got[first] == 0:
        return where + _AT_ZERO
    if steps[first] < config.warmup:
        return where + "Look at the warm-up: step s has (s + 1) / warmup of lr."
    if not _near(got[config.steps], want[config.steps]):
        return where + (
            f"Look at the end of the decay: at step `steps`, {config.steps}, yours is "
            f"{got[config.steps]:.4g}; expected: min_lr × lr = {want[config.steps]:.4g}."
        )
    if steps[first] >= config.steps:
        return where + "Look at what happens after the end."
    return where + (
        "Warm-up and end are right. Look at the curve between them: from step warmup - 1 to "
        "`steps` the progress rises from 0 to 1 in equal parts, and (1 + cos(π × progress)) / 2 "
        "of it is left."
    )


def _peak(config: TrainingConfig) -> int:
    return max(config.warmup - 1, 0)


def _late(config: TrainingConfig) -> int:
    return config.warmup


_AT_ZERO = (
    "The first update does nothing: its rate is 0. Steps count from 0, so step s has s + 1 parts "
    "of the warm-up."
)
# The parts of a schedule; in each the right way comes first, then mistakes and their words.
_RISE = (("", 1), (_AT_ZERO, 0))  # parts of the warm-up that step 0 has
_BEGIN = (
    ("", _peak),
    (
        "Off by one where warm-up and decay meet: the highest rate is used twice. The last step "
        "of the warm-up, warmup - 1, is already the first of the decay.",
        _late,
    ),
    (
        "The decay counts its progress from step 0, so the rate jumps where the warm-up ends.",
        lambda config: 0,
    ),
)
_END = (
    ("", 0),
    (
        "It ends one step early. The lowest rate is reached at `steps`, the first step after the "
        "end.",
        1,
    ),
)
_LIMIT = (
    ("", lambda progress: min(progress, 1.0)),
    (
        "After the end it rises again, as a cosine does. Limit the progress to 1: the rate stays "
        "at min_lr × lr.",
        lambda progress: progress,
    ),
)
_FORM = (
    ("", lambda progress: (1 + math.cos(math.pi * progress)) / 2),
    (
        "That is a straight line. Cosine: (1 + cos(π × progress)) / 2.",
        lambda progress: 1 - progress,
    ),
    (
        "That is a quarter of a cosine wave. Half a wave falls to its end without a corner: "
        "(1 + cos(π × progress)) / 2.",
        lambda progress: math.cos(math.pi / 2 * progress),
    ),
    (
        "The factor π is missing: cos takes radians, and half a wave is π.",
        lambda progress: (1 + math.cos(progress)) / 2,
    ),
    (
        "You give degrees to cos, which takes radians: half a wave is π, not 180.",
        lambda progress: (1 + math.cos(180 * progress)) / 2,
    ),
    (
        "1 + cos falls from 2 to 0: divide it by 2.",
        lambda progress: 1 + math.cos(math.pi * progress),
    ),
    (
        "cos falls from 1 to -1: (1 + cos(π × progress)) / 2 falls from 1 to 0.",
        lambda progress: math.cos(math.pi * progress),
    ),
)
_FLOOR = (
    ("", lambda c, left: c.lr * (c.min_lr + (1 - c.min_lr) * left)),
    ("The rate goes to 0. It must end at min_lr × lr.", lambda c, left: c.lr * left),
    (
        "min_lr is a fraction of lr, not a rate: the end is min_lr × lr.",
        lambda c, left: c.min_lr + (c.lr - c.min_lr) * left,
    ),
    (
        "The lowest rate is set with max(), so the curve has a corner. Put it into the formula: "
        "what falls is lr - min_lr × lr.",
        lambda c, left: max(c.lr * left, c.lr * c.min_lr),
    ),
    (
        "The lowest rate is added to a curve that falls from lr to 0. What falls is lr - min_lr × "
        "lr.",
        lambda c, left: c.lr * (c.min_lr + left),
    ),
    (
        "In the decay the factor lr is missing.",
        lambda c, left: c.min_lr + (1 - c.min_lr) * left,
    ),
)


def _mistaken_schedules() -> list[tuple[str, Callable]]:
    """Every schedule with one or more of the mistakes, and its words; the fewest first."""
    made = []
    for parts in product(_RISE, _BEGIN, _END, _LIMIT, _FORM, _FLOOR):
        words = [told for told, _ in parts if told]
        if _AT_ZERO in words and parts[1][1] is _late:
            words.remove(parts[1][0])  # both mistakes together join without a step
        made.append((len(words), " ".join(words), _schedule(*(part for _, part in parts))))
    return [(words, rate) for _, words, rate in sorted(made[1:], key=itemgetter(0))]


def _schedule(first, start, end, limit, form, floor) -> Callable[[TrainingConfig, int], float]:
    def rate(config: TrainingConfig, step: int) -> float:
        if step < config.warmup:
            return config.lr * (step + first) / config.warmup
        begin = start(config)
        progress = (step - begin) / max(config.steps - end - begin, 1)
        return floor(config, form(limit(progress)))

    return rate


# --------------------------------------------------------------------------------- loss scaling

_FINITE = [bool(int(digit)) for digit in "1110111110110001111111011111111"]  # 0: an overflow


def grade_loss_scaler(answer: Callable[[float, int], LossScaler]) -> None:
    """Follow the scale through good steps and overflows; compare with the library's."""
    require_function(answer, "class")
    for scale, interval in ((1024.0, 3), (64.0, 4)):
        scaler = answer(scale, interval)
        if not hasattr(scaler, "scale") or not hasattr(scaler, "update"):
            raise WrongAnswer(
                "the scaler needs an attribute `scale` and a method `update(finite)`."
            )
        if _scale_of(scaler) != scale:
            raise WrongAnswer(
                f"your scaler starts at scale {scaler.scale}; expected: the given {scale:g}."
            )
        got = [_scale_after(scaler, finite) for finite in _FINITE]
        want = _follow(_right, scale, interval)
        if got != want:
            raise WrongAnswer(_scale_mistake(got, want, scale, interval))


def _scale_after(scaler, finite: bool) -> float:
    scaler.update(finite)
    return _scale_of(scaler)


def _scale_of(scaler) -> float:
    """A number of its own: a tensor could change later, in place."""
    try:
        return float(scaler.scale)
    except (TypeError, ValueError) as error:
        raise WrongAnswer(f"`scale` must be a number; yours is {scaler.scale!r}.") from error


def _follow(rule: Callable, scale: float, interval: int) -> list[float]:
    """The scale after each step under a rule: (scale, good steps, finite, interval) -> both."""
    good, seen = 0, []
    for finite in _FINITE:
        scale, good = rule(scale, good, finite, interval)
        seen.append(scale)
    return seen


def _right(scale, good, finite, interval):
    if not finite:
        return scale / 2, 0
    return (scale * 2, 0) if good + 1 == interval else (scale, good + 1)


def _count_kept(scale, good, finite, interval):
    if not finite:
        return scale / 2, good
    return (scale * 2, 0) if good + 1 >= interval else (scale, good + 1)


def _count_not_restarted(scale, good, finite, interval):
    if not finite:
        return scale / 2, 0
    return (scale * 2 if good + 1 >= interval else scale), good + 1


def _one_step_late(scale, good, finite, interval):
    if not finite:
        return scale / 2, 0
    return (scale * 2, 0) if good == interval else (scale, good + 1)


def _never_grows(scale, good, finite, interval):
    return (scale if finite else scale / 2), 0


def _never_shrinks(scale, good, finite, interval):
    return _right(scale, good, True, interval) if finite else (scale, 0)


def _wrong_way_round(scale, good, finite, interval):
    return _right(scale, good, not finite, interval)


def _doubles_at_overflow(scale, good, finite, interval):
    return _right(scale, good, True, interval) if finite else (scale * 2, 0)


def _doubles_always(scale, good, finite, interval):
    return (scale * 2 if finite else scale / 2), 0


_SCALE_MISTAKES = {
    _never_grows: "It never grows. After growth_interval good steps in a row, double it.",
    _never_shrinks: "It never shrinks. Halve it at an overflow.",
    _count_kept: "Good steps must be in a row: an overflow starts the count again.",
    _count_not_restarted: "After the first growth it grows at every step: start the count again.",
    _one_step_late: "It grows one step late: the step that completes the interval counts.",
    _wrong_way_round: "It does both the wrong way round: it must shrink at an overflow.",
    _doubles_at_overflow: "It doubles at an overflow. Gradients that are too large need a smaller "
    "scale.",
    _doubles_always: "It doubles after every good step. Wait for growth_interval of them in a row.",
}


def _scale_mistake(got: list, want: list, scale: float, interval: int) -> str:
    first = next(at for at, (a, b) in enumerate(zip(got, want)) if a != b)
    seen = "".join("." if finite else "X" for finite in _FINITE[: first + 1])
    where = (
        f"after the steps {seen} (X: overflow), with growth_interval {interval}, your scale is "
        f"{got[first]:g}; expected: {want[first]:g}. "
    )
    for rule, words in _SCALE_MISTAKES.items():
        if got == _follow(rule, scale, interval):
            return where + words
    return where + "Halve at an overflow; double after growth_interval good steps in a row."


EXERCISES = (
    Exercise(
        name="training-loop/1",
        title="the clipped gradient of a global batch",
        difficulty=2,
        minutes=15,
        hints=(
            "Every token of the global batch must weigh the same. So there is one divisor, and it "
            "is known before the first backward pass: each batch carries its count, `batch.valid`.",
            "For each micro-batch: logits = model(**batch.inputs()); nats = loss_sum(logits, "
            "batch.labels); (nats / tokens).backward(). `backward` adds to `.grad` by itself.",
            "After the loop, once: norm = torch.nn.utils.clip_grad_norm_(model.parameters(), "
            "clip_norm). It returns the norm before clipping. Return (total nats / tokens, norm) "
            "as numbers.",
        ),
        solution="course_lib.classroom.checks.training_loop_gradient:clipped_gradient",
        grade=grade_clipped_gradient,
    ),
    Exercise(
        name="training-loop/2",
        title="warm-up and cosine decay",
        difficulty=2,
        minutes=15,
        hints=(
            "Write two cases: step < warmup, and the rest. In the warm-up, the first update is "
            "step 0 and must move; step warmup - 1 has the highest rate.",
            "The decay counts its progress from step warmup - 1 (or 0 without warm-up) to `steps`, "
            "from 0 to 1, and never more than 1.",
            "left = (1 + cos(π × progress)) / 2 falls from 1 to 0. The rate is lr × (min_lr + "
            "(1 - min_lr) × left).",
        ),
        solution="course_lib.training:learning_rate",
        grade=grade_learning_rate,
    ),
    Exercise(
        name="training-loop/3",
        title="a loss scaler (optional)",
        difficulty=1,
        minutes=10,
        hints=(
            "Keep two numbers: the scale, and how many good steps have come in a row.",
            "An overflow halves the scale and sets the count to 0. A good step adds 1 to the "
            "count. When the count reaches growth_interval: double the scale, set the count to 0.",
        ),
        solution="course_lib.training:LossScaler",
        grade=grade_loss_scaler,
    ),
)
