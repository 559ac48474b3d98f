"""Ranks that call different collectives: find out before they exchange a byte.

All ranks of a group must call the same collectives in the same order. Where they don't, the
symptom is rarely an error. On gloo, two calls of the same size end normally with wrong numbers;
others hang until the time limit. Inside `check_agreement` every rank first tells the others what
it is about to call, so the mismatch is named. That costs a round trip a call and stops overlap, so
it is for looking for faults only. PyTorch has the same in TORCH_DISTRIBUTED_DEBUG=DETAIL; on GPUs,
NCCL's flight recorder tells it afterwards.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_WIDTH = 240  # bytes of a description
_numbers: list[Counter] = []  # calls so far by group, one Counter a block


class DisagreementError(RuntimeError):
    """Ranks of one group called different collectives."""


@contextmanager
def check_agreement() -> Iterator[None]:
    """Inside the block, each call first compares itself with the other ranks'; use on all ranks.

    Raises DisagreementError on all ranks of the group, naming what each one calls. A rank that
    calls nothing at all, or a collective of another group, still ends in a CollectiveError.
    """
    _numbers.append(Counter())
    try:
        yield
    finally:
        _numbers.pop()


def require_agreement(description: str, group) -> None:
    """Compare what this rank is about to call with the group's other ranks, where it is asked."""
    if not _numbers:
        return
    number = _numbers[-1][id(group)] = _numbers[-1][id(group)] + 1
    text = f"call {number}: {description}".encode()[:_WIDTH].ljust(_WIDTH)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    calls = [bytes(text.tolist()).decode(errors="replace").strip() for text in everyone]
    if len(set(calls)) > 1:
        ranks = dist.get_process_group_ranks(group)
        said = "\n".join(f"  rank {rank}: {call}" for rank, call in zip(ranks, calls))
        raise DisagreementError(f"the ranks of a group call different collectives\n{said}")
