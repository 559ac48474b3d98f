"""The record of an exercise, and where the records are found."""

import contextlib
import difflib
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from .. import syllabus


class WrongAnswer(Exception):
    """Raised by a check: what is wrong with the answer and where to look, in words."""


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    name        "topic/number", as in `check("transformer/1", …)`
    title       what the learner builds
    difficulty  1 to 3, shown as ●○○
    minutes     measured with a learner
    hints       one to three, each stronger than the one before
    solution    where the library does it: "course_lib.model:count_parameters"
    grade       called with the answer; returns if it is right, else raises WrongAnswer. An
                exception from the learner's own code may pass through: its line is shown.
    helpers     functions of the library without which the solution says little, shown below it
    """

    name: str
    title: str
    difficulty: int
    minutes: int
    hints: tuple[str, ...]
    solution: str
    grade: Callable[[Any], None]
    helpers: tuple[str, ...] = ()

    def __post_init__(self):
        faults = []
        if not 1 <= self.difficulty <= 3:
            faults.append(f"difficulty {self.difficulty} is not 1, 2 or 3")
        if not 1 <= len(self.hints) <= 3:
            faults.append(f"{len(self.hints)} hints; give one to three")
        if ":" not in self.solution:
            faults.append(f"solution {self.solution!r} is not of the form module:name")
        if not self.name.rpartition("/")[2].isdigit():
            faults.append("its name is not of the form topic/number")
        if faults:
            raise ValueError(f"exercise {self.name!r}: " + "; ".join(faults))

    @property
    def topic(self) -> str:
        """The chapter that it belongs to."""
        return self.name.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Its number within the chapter."""
        return int(self.name.rpartition("/")[2])

    def library_object(self) -> Any:
        """Import and return the library's own answer."""
        return _imported(self.solution)

    def library_helpers(self) -> list[Any]:
        """Import and return what the library's own answer calls."""
        return [_imported(name) for name in self.helpers]


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    return attrgetter(path)(import_module(module))


def require_function(answer: object, what: str = "function") -> None:
    """Refuse an answer that was called instead of handed over."""
    if not callable(answer):
        raise WrongAnswer(f"give the {what} itself: write its name without calling it.")


def card(exercise: Exercise) -> str:
    """Return the Markdown card that stands above the exercise in its notebook."""
    dots = "●" * exercise.difficulty + "○" * (3 - exercise.difficulty)
    return (
        f"### Exercise {exercise.number}: {exercise.title}\n\n"
        f"{dots} · {exercise.minutes} minutes · `{exercise.name}`"
    )


def exercises_of(topic: str) -> tuple[Exercise, ...]:
    """Return a chapter's exercises in order; () if it has none (yet)."""
    module = f"{__package__}.{topic.replace('-', '_')}"
    if not topic.replace("-", "_").isidentifier() or find_spec(module) is None:
        return ()
    return tuple(getattr(import_module(module), "EXERCISES", ()))


def find(name: str) -> Exercise:
    """Return the exercise "topic/number"; raise KeyError that offers the nearest names."""
    for exercise in exercises_of(str(name).rpartition("/")[0]):
        if exercise.name == name:
            return exercise
    known = [e.name for chapter in syllabus.load().chapters for e in exercises_of(chapter.topic)]
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.3) or known
    raise KeyError(f'there is no exercise "{name}"; did you mean {", ".join(near)}?')


@dataclass(frozen=True)
class RankRun:
    """What came back from the ranks: return values in rank order, and what they printed."""

    values: list
    printed: str


def on_ranks(answer: Callable, world_size: int, *args, timeout_s: float = 20) -> RankRun:
    """Run the learner's function on real ranks, quietly; for use inside a check.

    Arguments: as `run_ranks`. Returns: a `RankRun`. Raises: what `run_ranks` raises.
    """
    from .. import run_ranks

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        values = run_ranks(answer, world_size, *args, timeout_s=timeout_s)
    return RankRun(values, printed.getvalue())
