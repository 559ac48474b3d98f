"""The check of "overlap/2": choose bucket sizes for a model and a link, judged by `schedule`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from course_lib.collectives import Link, time_of
from course_lib.overlap import schedule

from .collectives_ranks import plain_number
from .exercise import WrongAnswer

TOLERANCE = 1.1  # × the least time that any pair of sizes leaves exposed


@dataclass(frozen=True)
class Case:
    """Gradients in the order in which backward makes them, and the wire that sums them."""

    told: str
    sizes: tuple[int, ...]  # bytes of each
    ready_s: tuple[float, ...]
    link: Link
    ranks: int

    def exposed_s(self, first_bytes: float, bucket_bytes: float) -> float:
        """Seconds from the end of backward to the last sum."""
        ends = _ends(self.sizes, first_bytes, bucket_bytes)
        starts = [0, *ends[:-1]]
        payloads = [sum(self.sizes[a:b]) for a, b in zip(starts, ends)]
        ready = [self.ready_s[end - 1] for end in ends]
        return schedule(ready, payloads, self.link, self.ranks)[-1] - self.ready_s[-1]


def choose_bucket_sizes(
    sizes: Sequence[int], ready_s: Sequence[float], link: Link, ranks: int
) -> tuple[float, float]:
    """The sizes of the first and of the other buckets (bytes) that leave the least time exposed.

    Tries them all: from the smallest gradient to all gradients, each 1.2 × the one before.
    """
    case = Case("", tuple(sizes), tuple(ready_s), link, ranks)
    tried = [float(min(sizes))]
    while tried[-1] < sum(sizes):
        tried.append(tried[-1] * 1.2)
    pairs = [(first, size) for size in tried for first in tried if first <= size]
    return min(pairs, key=lambda pair: case.exposed_s(*pair))


def grade_bucket_sizes(answer: Callable) -> None:
    """Compare what the answer leaves exposed with the least possible, for models and links."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    for case in CASES:
        given = answer(list(case.sizes), list(case.ready_s), case.link, case.ranks)
        first_bytes, bucket_bytes = _two_numbers(given)
        best = case.exposed_s(*choose_bucket_sizes(*_asked(case)))
        if case.exposed_s(first_bytes, bucket_bytes) > TOLERANCE * best:
            raise WrongAnswer(_diagnose(case, first_bytes, bucket_bytes, best))


def _asked(case: Case) -> tuple:
    return case.sizes, case.ready_s, case.link, case.ranks


def _two_numbers(given) -> tuple[float, float]:
    numbers = [plain_number(n) for n in given] if isinstance(given, (tuple, list)) else []
    if len(numbers) != 2 or not all(n is not None and n > 0 for n in numbers):
        raise WrongAnswer(
            "return two positive numbers, (first_bytes, bucket_bytes); yours returned "
            f"{'nothing' if given is None else repr(given)}."
        )
    return numbers[0], numbers[1]


def _diagnose(case: Case, first: float, size: float, best: float) -> str:
    """Name the mistake: what repairs this answer?"""
    exposed, good = case.exposed_s(first, size), TOLERANCE * best
    ends = _ends(case.sizes, first, size)
    told = (
        f"{case.told}: ({first:,.0f}, {size:,.0f}) bytes make {len(ends)} bucket(s) and leave "
        f"{exposed * 1e3:.2f} ms exposed; {best * 1e3:.2f} ms is possible. "
    )
    if max(first, size) < min(case.sizes) and case.exposed_s(first * 1e6, size * 1e6) <= good:
        return told + "Give the sizes in bytes, not in MB."
    if len(ends) == 1:
        return told + "One bucket is ready when backward ends, so nothing is hidden."
    if case.exposed_s(size, first) <= good:
        return told + "The first bucket's size comes first: you return them the other way round."
    latency_s = len(ends) * time_of("all_reduce", 0, case.ranks, case.link)
    free = replace(case, link=Link(0.0, case.link.bytes_per_s))
    if latency_s > best and free.exposed_s(first, size) <= good:
        return told + (
            f"The latencies alone take {latency_s * 1e3:.2f} ms. Fewer, larger buckets pay less."
        )
    sizes = [float(sum(case.sizes[:count])) for count in range(1, len(case.sizes) + 1)]
    if min(case.exposed_s(other, size) for other in sizes) <= good:
        if sizes[ends[0] - 1] < choose_bucket_sizes(*_asked(case))[0]:
            return told + "The first bucket is too small: it pays a latency for few bytes."
        return told + (
            f"The first bucket is late: it leaves at {case.ready_s[ends[0] - 1] * 1e3:.2f} ms, and "
            "the wire is idle until then. A smaller first bucket starts it sooner."
        )
    if size > choose_bucket_sizes(*_asked(case))[1]:
        return told + (
            "The last bucket is too large: it is ready when backward ends, and nothing covers it."
        )
    return told + "Try sizes over the whole range, and let `schedule` judge them."


def _ends(sizes: Sequence[int], first_bytes: float, bucket_bytes: float) -> list[int]:
    """Where each bucket ends: behind the gradient that fills it to its limit, or the last one."""
    ends, filled = [], 0
    for place, size in enumerate(sizes, 1):
        filled += size
        if filled >= (bucket_bytes if ends else first_bytes) or place == len(sizes):
            ends.append(place)
            filled = 0
    return ends


def _case(told: str, sizes: Sequence[int], backward_s: float, link: Link, ranks: int) -> Case:
    """Each gradient takes its share of backward, in proportion to its bytes."""
    total, ready_s, sum_bytes = sum(sizes), [], 0
    for size in sizes:
        sum_bytes += size
        ready_s.append(backward_s * sum_bytes / total)
    return Case(told, tuple(sizes), tuple(ready_s), link, ranks)


CASES = (
    _case("100 layers of 26 kB, a wire slower than backward", [26_000] * 100, 0.001,
          Link(20e-6, 2.4e9), 8),
    _case("40 layers of 1 MB, a fast wire", [1_000_000] * 40, 0.05, Link(20e-6, 3e9), 4),
    _case("24 layers of 0.5 MB and an embedding, high latency", [500_000] * 24 + [4_000_000], 0.03,
          Link(200e-6, 1e9), 8),
)  # fmt: skip
