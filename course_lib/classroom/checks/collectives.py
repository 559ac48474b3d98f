"""The exercises of "Collectives and the network": a ring reduce-scatter; a collective's time."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from course_lib.collectives import LINKS, Link, count_traffic, time_of
from course_lib.collectives.cost import chunk_size

from .collectives_ranks import plain_number, run_together
from .exercise import Exercise, WrongAnswer, require_function

# --------------------------------------------------------------------------- ring reduce-scatter

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
        for rank, (given, kept, sent) in enumerate(seen):
            _judge_chunk(where, given, sent, rank, ranks, elements)
            if not kept:
                raise WrongAnswer(
                    where + "right, but your function changes its argument: those are the "
                    "learner's gradients. Work on a copy (clone)."
                )
            _judge_messages(where, sent, rank, ranks, elements)


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


def _try_out(answer: Callable, elements: int) -> tuple[object, bool, list[tuple[str, int]]]:
    """On a rank: what the answer returns, whether its argument was kept, and what it sent."""
    own = torch.tensor(_ELEMENTS[:elements], dtype=torch.float64) * _BASE ** dist.get_rank()
    tensor = own.clone()
    with count_traffic() as traffic, _torchs_collectives() as called:
        given = answer(tensor, dist.group.WORLD)
    if isinstance(given, torch.Tensor):
        given = given.detach().double().flatten().tolist()
    elif given is not None:
        given = type(given).__name__
    sent = [(call.kind, call.payload_bytes) for call in traffic.calls]
    uncounted = [] if sent else [(f"torch's {name}", 0) for name in called]
    return given, torch.equal(tensor, own), sent + uncounted


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


def _judge_chunk(where: str, given, sent: list, rank: int, ranks: int, elements: int) -> None:
    """Raise what is wrong with the numbers that a rank returned."""
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


def _judge_messages(where: str, sent: list, rank: int, ranks: int, elements: int) -> None:
    """Raise where the right numbers came by something else than a ring of chunks."""
    others = {kind for kind, _ in sent if kind not in ("send", "receive")}
    if others:
        raise WrongAnswer(
            where + f"the numbers are right, but you call {', '.join(sorted(others))}. Build it "
            "from messages: use exchange()."
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


# ------------------------------------------------------------------------------- alpha-beta time

_KINDS = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast")
_CASES = [
    (kind, payload, ranks, link)
    for link in (LINKS["100 GbE"], Link(1e-3, 2e6), Link(0.25, 8e9))
    for payload in (840, 36_000_000)
    for ranks in (2, 3, 6, 8)
    for kind in _KINDS
]


def grade_time(answer: Callable[[str, float, int, Link], float]) -> None:
    """Compare at several collectives, payloads, ranks and links; name the formula's mistake."""
    require_function(answer)
    given = [_seconds(answer, *case) for case in _CASES]
    right = [time_of(*case) for case in _CASES]
    wrong = [at for at, (a, b) in enumerate(zip(given, right)) if not _near(a, b)]
    if not wrong:
        return
    kind, payload, ranks, link = case = _CASES[wrong[0]]
    told = (
        f"{kind} of {payload:,} bytes over {ranks} ranks, latency {link.latency_s * 1e6:,.4g} µs, "
        f"{link.bytes_per_s / 1e6:,.4g} MB/s: {given[wrong[0]]:.4g} s, "
        f"expected {time_of(*case):.4g} s. "
    )
    raise WrongAnswer(told + _time_mistake(given, wrong))


def _seconds(answer: Callable, kind: str, payload: float, ranks: int, link: Link) -> float:
    given = answer(kind, payload, ranks, link)
    seconds = plain_number(given)
    if seconds is None:
        raise WrongAnswer(
            f"return a number of seconds; for {kind} yours is {type(given).__name__}."
        )
    return seconds


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _time_mistake(given: list[float], wrong: list[int]) -> str:
    """Name the mistake that explains every wrong number, and leaves the right ones right."""
    for words, formula in _TIME_MISTAKES:
        if all(_near(value, formula(*case)) for value, case in zip(given, _CASES)):
            return words
    kinds = {_CASES[at][0] for at in wrong}
    for words, formula in _TIME_MISTAKES:
        if all(_near(given[at], formula(*_CASES[at])) for at in wrong):
            return words
    for kind, words in _BY_KIND.items():
        if kinds == {kind}:
            return words
    return "Write down two numbers: how many messages follow one another, and a rank's bytes."


def _formula(
    steps: Callable = lambda rounds, n: rounds * (n - 1),
    share: Callable = lambda rounds, n: rounds * (n - 1) / n,
    tree_steps: Callable = lambda n: (n - 1).bit_length(),
    tree_share: Callable = lambda n: (n - 1).bit_length(),
    rounds: Callable = lambda kind: 2 if kind == "all_reduce" else 1,
    byte: float = 1.0,
) -> Callable:
    """The time of a collective with one mistake in it."""

    def seconds(kind: str, payload: float, ranks: int, link: Link) -> float:
        if kind == "broadcast":
            messages, moved = tree_steps(ranks), tree_share(ranks)
        else:
            messages, moved = steps(rounds(kind), ranks), share(rounds(kind), ranks)
        return messages * link.latency_s + moved * payload * byte / link.bytes_per_s

    return seconds


def _ring_broadcast(n: int) -> int:
    return n - 1


_BITS = (
    "bytes_per_s counts bytes already. Eight bits are one byte; convert once, where bits come in."
)
_TREE = (
    "A broadcast doubles the ranks that have the tensor in each step: log2 n steps, rounded up, "
    "each with the whole payload."
)
_TIME_MISTAKES = (
    ("That is in milliseconds: return seconds.", lambda *case: 1e3 * time_of(*case)),
    ("That is in microseconds: return seconds.", lambda *case: 1e6 * time_of(*case)),
    (_BITS, _formula(byte=8)),
    (_BITS, _formula(byte=1 / 8)),
    (
        "You use n where the ring has n - 1: a rank's own chunk does not travel.",
        _formula(lambda r, n: r * n, lambda r, n: r),
    ),
    (
        "The number of steps is right, but a rank sends only (n - 1) / n of the payload in each "
        "pass: its own chunk does not travel.",
        _formula(share=lambda r, n: r),
    ),
    (
        "The bytes are right, but n ranks in a ring need n - 1 steps, not n.",
        _formula(steps=lambda r, n: r * n),
    ),
    (
        "The latency is missing. Each step waits for the one before, so each costs its latency.",
        _formula(lambda r, n: 0, tree_steps=lambda n: 0),
    ),
    (
        "You count the latency once. Each step waits for the one before, so each costs its own.",
        _formula(lambda r, n: 1, tree_steps=lambda n: 1),
    ),
    (
        "An all-reduce is a reduce-scatter and then an all-gather: count both.",
        _formula(rounds=lambda kind: 1),
    ),
    (
        "You count two passes for each kind. Only an all-reduce has two.",
        _formula(rounds=lambda kind: 2),
    ),
    (
        "Payload means the whole tensor. In each step a rank sends one chunk, 1 / n of it.",
        _formula(share=lambda r, n: r * (n - 1)),
    ),
    (_TREE, _formula(tree_steps=_ring_broadcast, tree_share=_ring_broadcast)),
    (_TREE, _formula(tree_steps=_ring_broadcast, tree_share=lambda n: (n - 1) / n)),
    (
        "log2 n must be rounded up: 3 ranks need 2 steps.",
        _formula(tree_steps=math.log2, tree_share=math.log2),
    ),
    (
        "log2 n must be rounded up, not down: 3 ranks need 2 steps.",
        _formula(tree_steps=lambda n: n.bit_length() - 1, tree_share=lambda n: n.bit_length() - 1),
    ),
    (
        "Each step of a broadcast sends the whole payload, so its bytes count once a step.",
        _formula(tree_share=lambda n: 1),
    ),
    (
        "Each step of a broadcast sends the whole payload, not a chunk of it.",
        _formula(tree_share=lambda n: (n - 1) / n),
    ),
)
_BY_KIND = {
    "broadcast": _TREE,
    "all_reduce": "Only the all-reduce is wrong. It is a reduce-scatter, then an all-gather.",
}


EXERCISES = (
    Exercise(
        name="collectives/1",
        title="a reduce-scatter in a ring",
        difficulty=2,
        minutes=20,
        hints=(
            "Cut a copy of the tensor with tensor_split. In each of n - 1 steps, one chunk goes to "
            "the right and one comes from the left. Add what comes to your own chunk.",
            "In the next step, pass on the chunk to which you have just added. The chunk that "
            "comes last must be your own. So in step s you receive chunk rank - s - 2, modulo n.",
            "In step s: send chunks[(rank - s - 1) % n], receive into torch.empty_like of "
            "chunks[(rank - s - 2) % n], then add that to it. After n - 1 steps return "
            "chunks[rank].",
        ),
        solution="course_lib.collectives.rings:reduce_scatter",
        grade=grade_reduce_scatter,
    ),
    Exercise(
        name="collectives/2",
        title="predict the time of any collective",
        difficulty=2,
        minutes=15,
        hints=(
            "Two numbers decide: how many messages follow one another, and how many bytes a rank "
            "sends in all of them. Latency belongs to the first, bandwidth to the second.",
            "One pass around the ring has n - 1 steps, each with 1 / n of the payload. A broadcast "
            "has log2 n steps, rounded up, each with the whole payload.",
            "An all-reduce is two passes. (ranks - 1).bit_length() is log2, rounded up. The time "
            "is steps × latency_s + bytes / bytes_per_s.",
        ),
        solution="course_lib.collectives.cost:time_of",
        grade=grade_time,
    ),
)
