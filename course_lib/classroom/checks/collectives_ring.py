"""How "a reduce-scatter in a ring" is checked: what ranks return, and what they sent to whom."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from course_lib.collectives import count_traffic
from course_lib.collectives.cost import chunk_size

from .collectives_ranks import run_together
from .exercise import WrongAnswer

_RUNS = ((4, 8), (3, 7), (4, 3), (2, 5))  # ranks, elements: equal chunks, uneven ones, empty ones
_ELEMENTS = (101, 103, 107, 109, 113, 127, 131, 137)  # primes: a sum shows which elements are in it
_BASE = 1000  # rank r brings element x _BASE ** r: a sum also shows whose numbers are in it


def grade_reduce_scatter(answer: Callable) -> None:
    """Run the answer on real ranks, with chunks of equal, unequal and no elements."""
    for ranks, elements in _RUNS:
        where = f"{ranks} ranks, {elements} elements: "
        seen = run_together(
            answer, _try_out, ranks, elements, hang=where + _HANGS, disagree=where + _UNLIKE,
            timeout_s=6,
        )  # fmt: skip
        for rank, (given, kept, sent, messages, forgotten) in enumerate(seen):
            if forgotten:
                raise WrongAnswer(
                    where + f"rank {rank} starts {forgotten} exchanges and never waits for them. "
                    "What comes in is there only after exchange(…).wait()."
                )
            last = [m.numbers for other in seen for m in other.messages if m.destination == rank]
            _judge_chunk(where, given, sent, rank, ranks, elements, last[-1] if last else [])
            if not kept:
                raise WrongAnswer(
                    where + "right, but your function changes its argument: those are the "
                    "learner's gradients. Work on a copy (clone)."
                )
            _judge_messages(where, sent, messages, rank, ranks, elements)


_HANGS = (
    "the ranks wait for each other without end. All ranks need the same number of steps, and "
    "exchange() sends and receives at once."
)
_UNLIKE = (
    "a rank got a message of another length than it had room for. Receive into a tensor as long as "
    "the chunk that comes: torch.empty_like(chunks[coming])."
)
_OF_TORCH = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather",
    "all_gather_into_tensor", "all_gather_object", "broadcast", "all_to_all", "all_to_all_single",
    "gather", "scatter",
)  # fmt: skip


class _Message(NamedTuple):
    """What a rank sends by `exchange`."""

    destination: int
    numbers: list[float]


class _Seen(NamedTuple):
    """What a rank did."""

    given: object  # its numbers, the name of another type, or None
    kept: bool  # whether its argument is as before
    sent: list[tuple[str, int]]  # kind and bytes of each call
    messages: list[_Message]
    forgotten: int  # exchanges that were never waited for


def _try_out(answer: Callable, elements: int) -> _Seen:
    """On a rank: call the answer, and note what it does."""
    own = torch.tensor(_ELEMENTS[:elements], dtype=torch.float64) * _BASE ** dist.get_rank()
    tensor = own.clone()
    with ExitStack() as stack:
        traffic = stack.enter_context(count_traffic())
        called = stack.enter_context(_torchs_collectives())
        messages, started = stack.enter_context(_messages())
        given = answer(tensor, dist.group.WORLD)
    if isinstance(given, torch.Tensor):
        given = given.detach().double().flatten().tolist()
    elif given is not None:
        given = type(given).__name__
    sent = [(call.kind, call.payload_bytes) for call in traffic.calls]
    uncounted = [] if sent else [(f"torch's {name}", 0) for name in called]
    forgotten = len(started) - len(traffic.transfers) if started else 0
    return _Seen(given, torch.equal(tensor, own), sent + uncounted, messages, forgotten)


@contextmanager
def _messages() -> Iterator[tuple[list[_Message], list]]:
    """The messages that are sent by `exchange` inside, and the exchanges started."""
    messages: list[_Message] = []
    started: list = []
    start = dist.batch_isend_irecv

    def noting(operations: list) -> list:
        for one in operations:
            if one.op is dist.isend:
                messages.append(_Message(one.group_peer, one.tensor.flatten().tolist()))
        started.append(start(operations))  # kept: a handle that is dropped may end its message
        return started[-1]

    with mock.patch.object(dist, "batch_isend_irecv", noting):
        yield messages, started


@contextmanager
def _torchs_collectives() -> Iterator[list[str]]:
    """The names of those of torch's collectives that are called inside."""
    called: list[str] = []

    def noting(name: str) -> Callable:
        function = getattr(dist, name)

        def noted(*args, **options):
            called.append(name)
            return function(*args, **options)

        return noted

    with mock.patch.multiple(dist, **{name: noting(name) for name in _OF_TORCH}):
        yield called


def _judge_chunk(
    where: str, given, sent: list, rank: int, ranks: int, elements: int, last: list[float]
) -> None:
    """Raise what is wrong with the numbers that a rank returned; last: what came in last."""
    if given is None:
        raise WrongAnswer(where + "your function returns nothing. Return this rank's chunk.")
    if isinstance(given, str):
        raise WrongAnswer(where + f"return one tensor, this rank's chunk; yours: {given}.")
    chunks = [chunk.tolist() for chunk in torch.tensor(_ELEMENTS[:elements]).tensor_split(ranks)]
    once = sum(_BASE**r for r in range(ranks))
    sums = [[float(element * once) for element in chunk] for chunk in chunks]
    if given != sums[rank]:
        steps = sum(kind == "send" for kind, _ in sent)
        equal = elements % ranks == 0  # otherwise some steps have nothing to send
        told = _steps_mistake(steps, ranks) if equal else ""
        told = (
            told
            or _chunk_mistake(given, sums, rank)
            or _place_mistake(given, last, chunks, rank, ranks)
            or _sum_mistake(given, chunks[rank], rank, ranks)
        )
        raise WrongAnswer(where + told)


def _steps_mistake(steps: int, ranks: int) -> str:
    """Name a wrong number of steps, where they were counted."""
    if steps == ranks - 2:
        return (
            f"one step short: you make {steps} steps. Each chunk must visit all {ranks} ranks, "
            f"which takes {ranks - 1}."
        )
    return ""


def _chunk_mistake(given: list, sums: list[list[float]], rank: int) -> str:
    """Name a chunk that is not this rank's, or has another length."""
    own = sums[rank]
    for other, chunk in enumerate(sums):
        if other != rank and chunk and given == chunk:
            return (
                f"rank {rank} returns chunk {other}, and its sum is right. Rank {rank} must own "
                f"chunk {rank}. Which chunk do you send first? Begin one chunk earlier."
            )
    if len(given) == sum(map(len, sums)) != len(own):
        return (
            f"rank {rank} returns all {len(given)} elements. It owns only chunk {rank}, with "
            f"{len(own)} of them."
        )
    if len(given) != len(own):
        return (
            f"rank {rank} returns {len(given)} elements, its chunk has {len(own)}. The tail of "
            "the tensor must not be dropped: tensor_split gives the first chunks one more."
        )
    if all(value * len(sums) == wanted for value, wanted in zip(given, own)):
        return "that is the average. Reduce means the sum; nothing is divided here."
    return ""


def _place_mistake(given: list, last: list, chunks: list[list], rank: int, ranks: int) -> str:
    """Name a chunk that is summed up on another rank than the one that must own it."""
    if given != [float(element * _BASE**rank) for element in chunks[rank]]:
        return ""  # not just the rank's own numbers
    others = [r for r in range(ranks) if r != rank]
    for number, chunk in enumerate(chunks):
        complete = [float(element * sum(_BASE**r for r in others)) for element in chunk]
        if chunk and number != rank and last == complete:
            return (
                f"rank {rank} returns its own numbers only, because the sum that is completed on "
                f"it is that of chunk {number}, not chunk {rank}: the one it receives last. Begin "
                f"one chunk earlier: rank {rank} sends chunk {(rank - 1) % ranks} first."
            )
    return ""


def _sum_mistake(given: list, owned: list, rank: int, ranks: int) -> str:
    """Name whose numbers are missing from a chunk, come twice, or belong to another chunk."""
    at = next(i for i, e in enumerate(owned) if given[i] != e * sum(_BASE**r for r in range(ranks)))
    parts = [int(given[at]) // _BASE**r % _BASE for r in range(ranks)]
    if any(part % owned[at] for part in parts):
        return (
            f"in the chunk of rank {rank}, numbers of different chunks were added. What comes in "
            "is the chunk that the left neighbor sends: one number lower than the one you send."
        )
    counts = [part // owned[at] for part in parts]
    if max(counts) > 1:
        twice = counts.index(max(counts))
        return (
            f"in the chunk of rank {rank}, the numbers of rank {twice} are counted {counts[twice]} "
            "times. Each message must bring new ones."
        )
    if sum(counts) == 1 and counts[rank]:
        return f"rank {rank} returns its own numbers only. Add what comes in to them."
    if sum(counts) == 1:
        return (
            f"rank {rank} returns only the numbers of rank {counts.index(1)}. What comes in must "
            "be added to your own chunk; you overwrite it."
        )
    return (
        f"rank {rank} returns a sum over {sum(counts)} of {ranks} ranks. In each step, pass on "
        "the chunk to which you have just added, not your original one."
    )


def _judge_messages(
    where: str, sent: list, messages: list[_Message], rank: int, ranks: int, elements: int
) -> None:
    """Raise where the right numbers came by something else than a ring of chunks."""
    others = {kind for kind, _ in sent if kind not in ("send", "receive")}
    if others:
        raise WrongAnswer(
            where + f"the numbers are right, but you call {', '.join(sorted(others))}. Build it "
            "from messages: use exchange()."
        )
    right, to = (rank + 1) % ranks, sorted({message.destination for message in messages})
    if to and to != [right]:
        raise WrongAnswer(
            where + f"the numbers are right, but rank {rank} sends to rank"
            f"{'s' * (len(to) > 1)} {', '.join(map(str, to))}. In this ring it sends only to its "
            f"right neighbor, rank {right}, and receives from its left one."
        )
    total = sum(size for kind, size in sent if kind == "send")
    most = 8 * (elements - chunk_size(elements, ranks, rank))
    if total == 8 * elements and len(sent) == ranks:
        raise WrongAnswer(
            where + f"the numbers are right, but you make {ranks} steps. The last one brings "
            f"nothing that rank {rank} keeps: a ring needs {ranks - 1}."
        )
    if total > most:
        raise WrongAnswer(
            where
            + f"the numbers are right, but rank {rank} sends {total} bytes. A ring sends each "
            f"chunk but its own once: {most} bytes."
        )
