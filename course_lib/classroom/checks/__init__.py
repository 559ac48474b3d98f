"""The exercises: what they ask, their hints, and checks that answer in words.

One file a topic (`checks/<topic>.py`) holds the exercises of a chapter in `EXERCISES`. A check runs
the learner's code at sizes that the notebook does not show, against the library, and recognises
the mistakes that learners really make; each of them is tested in tests/exercise_cases/.
"""

from .exercise import (
    Exercise,
    WrongAnswer,
    card,
    exercises_of,
    find,
    on_ranks,
)
from .grading import Verdict, check, hint, solution

__all__ = [
    "Exercise",
    "Verdict",
    "WrongAnswer",
    "card",
    "check",
    "exercises_of",
    "find",
    "hint",
    "on_ranks",
    "solution",
]
