"""For each exercise: its stub, and wrong answers that learners really give.

One file a topic, with `CASES = {"topic/1": Cases(...)}`. tests/test_exercises.py proves for every
exercise that the stub is "not attempted", that the library's own answer passes, and that each wrong
answer is rejected with its own message. Add at least three, each with the words that the message
must hold; the lint of the notebooks looks for the exercise's name here.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Wrong:
    """A wrong answer: the mistake in words, the answer, and what the message must say."""

    mistake: str
    answer: Any
    says: str


@dataclass(frozen=True)
class Cases:
    """What the tests give to the check of one exercise."""

    stub: Any
    wrong: tuple[Wrong, ...]


def all_cases() -> dict[str, Cases]:
    """Collect the cases of every file in this folder."""
    cases: dict[str, Cases] = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        cases.update(import_module(f"{__name__}.{path.stem}").CASES)
    return cases
