"""The one error of this package, and how all ranks come to raise the same one.

A rank that fails alone would leave the others waiting in the next collective. So work that can
fail ends with an agreement: all ranks go on, or all raise the same error.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from course_lib.mesh import Mesh


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or must not be used; says which file and why."""


def listed(faults: list[str], most: int = 8) -> str:
    """The first faults in words, and how many more there are."""
    more = [f"and {len(faults) - most} more"] if len(faults) > most else []
    return "; ".join(faults[:most] + more)


def together(mesh: Mesh, work: Callable[[], Any]) -> list:
    """Run work on every rank; returns all results in rank order, on every rank. Collective.

    Raises the same CheckpointError on all ranks where one of them fails, with its rank and cause.
    """
    result, words, cause = None, None, None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        known, cause = isinstance(error, CheckpointError), error
        words = str(error) if known else f"{type(error).__name__}: {error}"
    outcomes = [(result, words)] * mesh.world_size
    if mesh.world is not None:
        dist.all_gather_object(outcomes, (result, words), group=mesh.world)
    failures = [words for _, words in outcomes]
    if len(set(failures)) > 1:  # not all alike: say whose it is
        failures = [f"rank {rank}: {words}" for rank, words in enumerate(failures) if words]
    if failures[0]:
        raise CheckpointError("; ".join(dict.fromkeys(failures))) from cause
    return [result for result, _ in outcomes]


def first_decides(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """Run work on the first rank alone; every rank gets its result, or its error. Collective."""
    return together(mesh, lambda: work() if mesh.is_first else None)[0]
