"""The exercises of "Why doesn't it converge?": name six faults, repair them; judge two remedies."""

import math
import re
from collections.abc import Callable
from dataclasses import fields

from ..broken_runs import FAULTS, Curves, Setting, broken, repaired, run
from ..diagnosis import diagnose
from .convergence_remedies import grade_remedies
from .exercise import Exercise, WrongAnswer, require_function

NAMES = ("healthy", *FAULTS, "no clipping")
FRESH_SEED, REFERENCE_SEED = 2, 4  # the notebook shows others
REFERENCE = Setting(seed=REFERENCE_SEED)
SMALL = {"micro_batch": 3, "lr": 0.005}  # of a pair whose curves all jump more


def grade_diagnosis(answer: Callable[[Curves, Curves], str]) -> None:
    """Show the answer runs of seeds that it has not seen, sound ones among them."""
    require_function(answer)
    for title, (setting, reference) in questions().items():
        curves = run(setting)  # trained only now: an answer that stops early costs little
        truth, said = title.partition(":")[0], answer(curves, run(reference))
        if not isinstance(said, str) or said not in NAMES:
            raise WrongAnswer(f"return one of {', '.join(map(repr, NAMES))}; yours: {said!r}.")
        if said != truth:
            raise WrongAnswer(_misread(title, said, curves))


def questions() -> dict[str, tuple[Setting, Setting]]:
    """Runs to be named, each with a sound one to compare with; the notebook has the first."""
    asked = {
        "healthy: itself": (Setting(), Setting()),
        "healthy: small in both": (Setting(seed=1, **SMALL), Setting(seed=3, **SMALL)),
        "schedule runs on": (broken("schedule runs on", FRESH_SEED), REFERENCE),
        "healthy": (Setting(seed=FRESH_SEED), REFERENCE),
        "healthy: in fp16": (repaired("schedule runs on", FRESH_SEED), REFERENCE),
    }
    return asked | {fault: (broken(fault, FRESH_SEED), REFERENCE) for fault in FAULTS}


def _misread(title: str, said: str, run: Curves) -> str:
    """What the learner has overlooked in this run."""
    truth = title.partition(":")[0]
    told = f"a run of {truth!r} is called {said!r}. "
    if title == "healthy: itself":
        return told + "That is the healthy run of the notebook, compared with itself."
    if title == "healthy: small in both":
        return told + (
            "Both logs are of runs with 3 sequences an update and a lower rate, so both jump more. "
            "Compare with `healthy`, not with a fixed number."
        )
    if title == "healthy: in fp16":
        return told + (
            "It skips updates while its loss scale falls. That is what fp16 does; the schedule "
            "waits, so nothing is wrong."
        )
    if truth == "healthy":
        return told + "Its curves are those of the reference up to chance: widen your limits."
    if truth == "preprocessing":
        return told + (
            "Its training loss falls as it should. Only text that was not trained on looks bad: "
            "compare held_out[-1] with the training loss late in the run."
        )
    if truth == "schedule runs on":
        return told + (
            f"{run.skipped.sum()} updates were skipped, so its gradient overflowed in fp16 and "
            "nothing diverged. Look at what schedule does in the skipped steps."
        )
    if truth == "no warm-up" and said == "no clipping":
        return told + (
            "The gradient norm jumps right after the first update, and no batch is damaged there. "
            "Read schedule[0]."
        )
    if truth == "no warm-up":
        return told + "The norm jumps after the first update, and schedule[0] shows the cause."
    if truth == "high learning rate":
        return told + (
            "Its schedule warms up, yet the norm jumps after the first update, and the loss "
            "stays far above the reference, in training and on held-out text alike."
        )
    if truth == "small batch":
        return told + (
            "Its loss jumps from step to step several times as much as the reference's: look at "
            "the spread of np.diff(loss), not at its level."
        )
    return told + (
        f"Its gradient norm jumps once, just after the restart at step {run.resumed}: compare "
        "grad_norm[resumed + 1] with the steps before. Later nothing is seen."
    )


# What may be changed to repair a fault, and why the rest may not.
MAY_CHANGE = {
    "small batch": {"accumulate"},
    "high learning rate": {"lr"},
    "preprocessing": {"training_text", "held_out_text"},
    "no warm-up": {"warmup"},
    "moments lost": {"restored"},
    "schedule runs on": {"schedule_counts"},
}
_STAYS = {
    "micro_batch": "the memory holds no more sequences in one pass. Take more passes",
    "precision": "the device is fast in fp16 only, and skips there are normal",
    "loss_scale": "a scale can become too high again later. What then happens is what counts",
    "resume_at": "each long run is stopped some time. The restart must be complete",
    "clip_norm": "it is not the cause",
    "lr": "the rate is not the cause, and a lower one only makes the damage smaller",
}


def grade_repair(answer: Callable[[str, Setting], Setting]) -> None:
    """Let the answer repair each fault, and really train what it returns."""
    require_function(answer)
    for fault in FAULTS:
        given = broken(fault, FRESH_SEED)
        try:
            got = answer(fault, given)
        except TypeError as error:
            raise _unknown_field(error) or error from None
        if not isinstance(got, Setting):
            raise WrongAnswer(
                "return a Setting, made by replace(setting, …); yours is "
                f"{type(got).__name__}: {got!r}."
            )
        _require_repair(fault, given, got)


def _unknown_field(error: TypeError) -> WrongAnswer | None:
    """What to say where replace was called with a name that Setting does not have."""
    found = re.search(r"Setting.*unexpected keyword argument '(\w+)'", str(error))
    if found is None:
        return None
    names = ", ".join(field.name for field in fields(Setting))
    return WrongAnswer(f"a Setting has no {found[1]!r}. It has {names}.")


def _require_repair(fault: str, given: Setting, got: Setting) -> None:
    names = [field.name for field in fields(Setting)]
    changed = {name for name in names if getattr(given, name) != getattr(got, name)}
    if not changed:
        raise WrongAnswer(f"the setting with {fault!r} comes back as it was.")
    for name in names:
        if name in changed - MAY_CHANGE[fault]:
            why = _STAYS.get(name, "it is not the cause")
            if name == "loss_scale" and got.schedule_counts == "updates":
                why = "the schedule waits for skipped updates now, so no scale can move it"
            raise WrongAnswer(f"to repair {fault!r} you change {name}: {why}.")
    _require_known_values(fault, given, got)
    try:
        curves, sound = run(got), run(REFERENCE)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise WrongAnswer(f"your setting for {fault!r} can't be trained: {error}") from error
    said = diagnose(curves, sound)
    if said != "healthy" or not curves.final < sound.final + 0.25:
        new = ", ".join(f"{name} {getattr(got, name)!r}" for name in sorted(changed))
        raise WrongAnswer(
            f"your repair of {fault!r}, with {new}, ends at {curves.final:.1f} bits per byte "
            f"(a sound run at {sound.final:.1f}), and its log reads {said!r}."
        )


def _require_known_values(fault: str, given: Setting, got: Setting) -> None:
    """Refuse a repair that trains well enough, but does not undo what was done."""
    sequences, healthy = got.micro_batch * got.accumulate, Setting().micro_batch
    if fault == "small batch" and sequences != healthy:
        raise WrongAnswer(
            f"your repair of {fault!r} reads {got.micro_batch} × {got.accumulate} = {sequences} "
            f"sequences an update, with accumulate {got.accumulate}; a healthy run reads {healthy}."
        )
    if fault == "high learning rate" and not math.isclose(got.lr, given.lr / 20):
        raise WrongAnswer(
            f"your repair of {fault!r} is lr {got.lr:.4g}. The rate was 20 × too high: "
            f"{given.lr:.4g} / {given.lr / got.lr:.3g} is not {given.lr:.4g} / 20."
        )


EXERCISES = (
    Exercise(
        name="convergence/1",
        title="diagnose six runs",
        difficulty=2,
        minutes=15,
        hints=(
            "Follow the decision table from top to bottom: it asks first for what only one fault "
            "can do. For each line, compute one number from the curves.",
            "Five numbers suffice: does schedule change after a skipped step; held_out[-1] minus "
            "the late training loss; the spread of np.diff(loss); grad_norm after the first "
            "applied update over the one before; grad_norm[resumed + 1] over the median before "
            "the restart.",
            "Limits that work: any change; 0.4; 1.8 × healthy; 2 ×; 1.5 ×. Between “no warm-up” "
            "and “high learning rate”, schedule[0] == 1 decides. Leave skipped steps out with "
            "~run.skipped before you look for the first update.",
        ),
        solution="course_lib.classroom.diagnosis:diagnose",
        grade=grade_diagnosis,
    ),
    Exercise(
        name="convergence/2",
        title="judge two remedies by experiment",
        difficulty=2,
        minutes=15,
        hints=(
            "How many cells has the experiment, and how often must each be filled? Which two runs "
            "differ only in warm-up?",
            "For each seed, take the loss without the remedy minus the loss with it, as a mean "
            "over the other remedy on and off. That is one number a seed.",
            "The standard error of n numbers is statistics.stdev(numbers) / n ** 0.5. If their "
            "mean is within 3 standard errors of 0, nothing is shown. n is the number of seeds.",
        ),
        solution="course_lib.classroom.diagnosis:judge_remedies",
        grade=grade_remedies,
    ),
    Exercise(
        name="convergence/3",
        title="repair six runs",
        difficulty=1,
        minutes=10,
        hints=(
            "replace(setting, warmup=10) gives a copy with one other value. Which value of the "
            "setting is the cause of each fault?",
            "The healthy values are the defaults of Setting: Setting().lr, for example. A small "
            "batch is the exception: micro_batch × accumulate must be 16 sequences.",
        ),
        solution="course_lib.classroom.diagnosis:repair",
        grade=grade_repair,
    ),
)
