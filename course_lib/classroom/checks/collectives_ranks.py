"""Run a learner's collectives on ranks, quietly; say in words why ranks did not come to an end."""

import contextlib
import io
import re
from collections.abc import Callable

from ..launch import RankError, RankTimeout
from ..teaching import tidy
from .exercise import WrongAnswer, on_ranks, require_function

_OF_THE_CHECK = re.compile(r'^ *File "[^"]*classroom/checks/.*\n.*\n?', re.MULTILINE)
_LOOPS = (
    "no rank waits for another, but your code was still computing when the time was over. Does a "
    "loop never end?"
)


def run_together(
    answer: Callable, one_rank: Callable, ranks: int, *arguments,
    hang: str, disagree: str, timeout_s: float = 7.0,
) -> list:  # fmt: skip
    """Return what `one_rank(answer, *arguments)` returns on each rank.

    hang, disagree: what to say where ranks wait without end, or call what does not fit together.
    Raises WrongAnswer in these cases, and what the learner's code raises.
    """
    require_function(answer)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # gloo's last words
            return on_ranks(one_rank, ranks, answer, *arguments, timeout_s=timeout_s).values
    except RankTimeout as error:
        told = tidy(_OF_THE_CHECK.sub("", str(error)))
        why = hang if "waits in" in told or "wait in" in told else _LOOPS
        raise WrongAnswer(f"{why}\n{told}") from error
    except RankError as error:
        if error.type_name is None:  # gloo ends a process that gets another size than it expects
            raise WrongAnswer(disagree) from error
        if error.type_name in ("DisagreementError", "CollectiveError"):
            raise WrongAnswer(f"{disagree}\n{tidy(error.message)}") from error
        raise


def plain_number(value: object) -> float | None:
    """A number of Python, numpy or torch as a float; None for anything else."""
    if isinstance(value, (bool, str, bytes)) or getattr(value, "ndim", 0):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
