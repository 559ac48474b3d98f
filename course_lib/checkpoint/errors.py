"""The one error of this package, and how all ranks come to raise the same one.

A rank that fails alone would leave the others waiting in the next collective. So work that can
fail runs between two agreements: all ranks go on, or all raise the same error.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from course_lib.mesh import Mesh

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or must not be used; says which file and why."""


def together(mesh: Mesh, work: Callable[[], Result]) -> list[Result]:
    """Run work on every rank; returns all results in rank order, on every rank. Collective.

    Raises the same CheckpointError on all ranks where one of them fails, with its rank and cause.
    """
    result, error = _attempt(work)
    if mesh.world is None:
        outcomes = [(result, error and _words(error))]
    else:
        outcomes = [None] * mesh.world_size
        dist.all_gather_object(outcomes, (result, error and _words(error)), group=mesh.world)
    failures = {rank: words for rank, (_, words) in enumerate(outcomes) if words}
    if failures:
        raise CheckpointError(_summary(failures, len(outcomes))) from error
    return [result for result, _ in outcomes]


def first_decides(mesh: Mesh, work: Callable[[], Result]) -> Result:
    """Run work on the first rank alone; every rank gets its result. Collective.

    Raises the same CheckpointError on all ranks where it fails.
    """
    result, error = _attempt(work) if mesh.is_first else (None, None)
    outcome = [(result, error and _words(error))]
    if mesh.world is not None:
        dist.broadcast_object_list(outcome, src=0, group=mesh.world)
    result, words = outcome[0]
    if words:
        raise CheckpointError(words) from error
    return result


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return None, error


def _words(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _summary(failures: dict[int, str], ranks: int) -> str:
    if len(failures) == ranks and len(set(failures.values())) == 1:
        return failures[0]
    return "; ".join(f"rank {rank}: {words}" for rank, words in failures.items())
