"""The exercises of "Collectives and the network": a ring reduce-scatter; a collective's time."""

import math
from collections.abc import Callable

from course_lib.collectives import LINKS, Link, time_of

from .collectives_ranks import plain_number
from .collectives_ring import grade_reduce_scatter
from .exercise import Exercise, WrongAnswer, require_function

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
        helpers=("course_lib.collectives.rings:_pass_on", "course_lib.collectives.rings:_place"),
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
        helpers=tuple(
            f"course_lib.collectives.cost:{name}"
            for name in ("steps", "sent_bytes", "_rounds", "_children")
        ),
        grade=grade_time,
    ),
)
