"""`check`, `hint` and `solution`: what a learner calls in a notebook. None of them ever raises."""

import inspect
import re
import traceback
from dataclasses import dataclass
from typing import Any

from .. import journal
from ..learner import learners_frame, learners_line
from ..teaching import show, tidy
from .exercise import Exercise, WrongAnswer, find
from .time_limit import LIMIT_S, TookTooLong, time_limit


@dataclass(frozen=True)
class Verdict:
    """What a check found. It is true when the exercise is passed.

    status: "passed", "library" (right, but it is the library's own object), "wrong", "crashed"
    (the learner's code raised), "not attempted", "unknown" (no such exercise) or "broken" (the
    check itself failed).
    """

    name: str
    status: str
    message: str

    def __bool__(self) -> bool:
        return self.status == "passed"

    def _ipython_display_(self) -> None:
        """Show nothing more when it is a cell's last line: `check` has already spoken."""


def check(name: str, answer: Any) -> Verdict:
    """Check an answer and print what is right or wrong with it, in words.

    Arguments:
        name: the exercise, "topic/number".
        answer: the function, class or value that the exercise asks for.
    Returns: a `Verdict` (true when passed). Never raises, so that "Run all" goes on.
    """
    try:
        exercise = find(name)
    except KeyError as error:
        return _say(Verdict(str(name), "unknown", error.args[0]))
    verdict = _say(judge(exercise, answer))
    if verdict.status in ("passed", "wrong", "crashed"):
        journal.note_exercise(exercise.name, passed=bool(verdict))
    return verdict


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Return the verdict on an answer without printing or recording anything."""
    if answer is None or answer is Ellipsis:
        return Verdict(exercise.name, "not attempted", _NOT_ATTEMPTED)
    try:
        with time_limit(LIMIT_S):
            exercise.grade(answer)
    except WrongAnswer as wrong:
        return Verdict(exercise.name, "wrong", str(wrong))
    except TookTooLong as error:
        return Verdict(exercise.name, "wrong", f"{error}\n{learners_line(error)}".rstrip())
    except KeyboardInterrupt as error:
        told = f"stopped by you before the check was done.\n{learners_line(error)}"
        return Verdict(exercise.name, "crashed", told.rstrip())
    except BaseException as error:  # a learner's code may raise anything, even SystemExit
        return _explain(exercise, error, answer)
    if _is_the_library(exercise, answer):
        return Verdict(
            exercise.name,
            "library",
            (
                "right, but this is the library's own object. It shows that the library works; "
                "write your own to pass."
            ),
        )
    return Verdict(exercise.name, "passed", "well done.")


def hint(name: str) -> None:
    """Print the next hint: each call gives a stronger one, up to the last.

    Arguments: name: the exercise, "topic/number".
    """
    try:
        exercise = find(name)
    except KeyError as error:
        print(error.args[0])
        return
    seen = journal.read()["exercises"].get(exercise.name, {}).get("hints", 0)
    number = min(seen + 1, len(exercise.hints))
    print(f"Hint {number} of {len(exercise.hints)}: {exercise.hints[number - 1]}")
    if number == len(exercise.hints):
        print(f'That was the strongest hint. solution("{exercise.name}") shows the library\'s way.')
    journal.note_exercise(exercise.name, hints=number)


def solution(name: str) -> None:
    """Show how the library does it: the library is the answer key.

    Arguments: name: the exercise, "topic/number".
    """
    try:
        exercise = find(name)
    except KeyError as error:
        print(error.args[0])
        return
    for thing in (exercise.library_object(), *exercise.library_helpers()):
        show(thing)
    journal.note_exercise(exercise.name, solution=True)


_NOT_ATTEMPTED = "replace `raise NotImplementedError` with your code, then run this cell again."

_HEADLINES = {
    "passed": "passed",
    "library": "the library's own answer",
    "wrong": "not yet",
    "crashed": "your code stopped with an error",
    "not attempted": "not attempted",
    "unknown": "unknown exercise",
    "broken": "the check itself failed",
}


def _say(verdict: Verdict) -> Verdict:
    print(f"{verdict.name} · {_HEADLINES[verdict.status]}: {verdict.message}")
    if verdict.status in ("wrong", "crashed"):
        print(f'Stuck? hint("{verdict.name}")')
    return verdict


def _explain(exercise: Exercise, error: BaseException, answer: Any) -> Verdict:
    """Tell a stub, a crash of the learner's code and a fault of the check apart."""
    if _is_stub(error):
        return Verdict(exercise.name, "not attempted", _NOT_ATTEMPTED)
    from_ranks = _from_ranks(error)
    if from_ranks or learners_frame(error) is not None:
        text = tidy(str(error))
        told = text if from_ranks else f"{type(error).__name__}: {text}\n{learners_line(error)}"
        return Verdict(exercise.name, "crashed", told.rstrip())
    name = re.escape(getattr(answer, "__name__", ""))
    if isinstance(error, TypeError) and re.search(rf"{name}(\.\w+)?\(", str(error)):
        # It failed at the call, before the learner's first line: no frame of theirs to show.
        told = f"it takes other arguments than the exercise says.\nTypeError: {tidy(str(error))}"
        return Verdict(exercise.name, "crashed", told)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{tidy(last.filename)}, line {last.lineno}"
    return Verdict(
        exercise.name,
        "broken",
        (
            f"{type(error).__name__}: {tidy(str(error))} ({where}). "
            "This is a fault of the course, not yours; please report it."
        ),
    )


def _is_stub(error: BaseException) -> bool:
    """Whether the learner's code still raises the NotImplementedError it came with."""
    if _from_ranks(error):
        return getattr(error, "type_name", None) == "NotImplementedError"
    if not isinstance(error, NotImplementedError):
        return False
    frame = learners_frame(error)
    return frame is not None and "NotImplementedError" in (frame.line or "NotImplementedError")


def _from_ranks(error: BaseException) -> bool:
    """Whether `run_ranks` raised it: its message already holds the learner's own line."""
    return type(error).__module__ == "course_lib.classroom.launch"


def _is_the_library(exercise: Exercise, answer: Any) -> bool:
    try:
        if answer is exercise.library_object():
            return True
    except (ImportError, AttributeError):
        return False
    module = getattr(inspect.unwrap(answer) if callable(answer) else answer, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] == "course_lib"
