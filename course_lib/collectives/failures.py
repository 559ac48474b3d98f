"""Collectives that fail: a rank that dies, hangs, or calls another collective than its peers.

All ranks of a group must call the same collectives in the same order. Where they don't, an error
is the exception. What gloo does (two ranks, torch 2.13):

    all_reduce of "a" on one rank, of "b" on the other, equal sizes    wrong numbers, no error
    float32 with int32; a sum with a maximum; all_to_all rows expected
    that nobody sends                                                  wrong numbers, no error
    all_reduce with all_gather or broadcast; a rank that never comes   hangs until the time limit
    unequal sizes                                                      the process is aborted
    all_reduce with reduce_scatter, equal sizes                        right, by chance

Inside `check_agreement` every rank first tells the others what it is about to call, so that a
mismatch is named before a byte of it is sent. That costs a round trip a call and stops overlap: it
is for finding faults. TORCH_DISTRIBUTED_DEBUG=DETAIL does much the same in PyTorch; for GPUs,
NCCL's flight recorder keeps the last calls of every rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from course_lib.collectives.traffic import Call

_WIDTH = 256  # bytes in which a rank says what it calls
_numbers: list[Counter] = []  # calls so far by group, one Counter a block


class CollectiveError(RuntimeError):
    """A collective that did not end: a peer died, hung, or called another one."""

    @classmethod
    def of(cls, call: Call, error: RuntimeError) -> "CollectiveError":
        """The error of a call on this rank, from what torch said."""
        lost = any(word in str(error) for word in ("Connection", "Broken pipe", "closed"))
        cause = "a peer died, or gave up waiting" if lost else "a peer died, hangs, or never came"
        return cls(
            f"{call.kind} of {call.payload_bytes} bytes for {call.purpose!r} over {call.ranks} "
            f"ranks failed on rank {dist.get_rank()}: {cause}, or is in another collective "
            "(check_agreement() finds out)"
        )


class DisagreementError(CollectiveError):
    """Ranks of one group called different collectives."""


@contextmanager
def check_agreement() -> Iterator[None]:
    """Inside the block, each call is first compared with the other ranks'; enter on all ranks.

    Then a mismatch raises DisagreementError on all ranks of the group, with what each one calls. A
    rank that calls nothing, or calls in another group, still ends in a CollectiveError; messages
    between two ranks (`exchange`) are not compared.
    """
    _numbers.append(Counter())
    try:
        yield
    finally:
        _numbers.pop()


def require_agreement(what: str, group, rows: Sequence[int] = ()) -> None:
    """Compare a call with the group's other ranks', inside check_agreement.

    rows: of an all_to_all, those sent to each rank, then those received from each.
    """
    if not _numbers:
        return
    _numbers[-1][id(group)] += 1
    text = f"call {_numbers[-1][id(group)]}: {what}".encode()[:_WIDTH].ljust(_WIDTH)
    texts = _gather(torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
    calls = [bytes(text.tolist()).decode(errors="replace").strip() for text in texts]
    agreed = len(set(calls)) == 1
    if agreed and rows:
        sent, received = _gather(torch.tensor(rows), group).chunk(2, dim=1)  # (ranks, ranks) each
        agreed = torch.equal(sent, received.t())
        calls = [
            f"{call}, sends {s.tolist()} rows, receives {r.tolist()}"
            for call, s, r in zip(calls, sent, received)
        ]
    if not agreed:
        ranks = dist.get_process_group_ranks(group)
        said = "".join(f"\n  rank {rank}, {call}" for rank, call in zip(ranks, calls))
        raise DisagreementError(f"the ranks of a group call different collectives:{said}")


def _gather(own: torch.Tensor, group) -> torch.Tensor:
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group)
    return torch.stack(everyone)
