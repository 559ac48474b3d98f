"""Timings on a machine that may do other work too: their spread, and a sign of disturbance.

One timing proves nothing where other programs use the same cores. So repeat it, look at the middle
half of the values, and ask how long the computing thread really had a processor. That is what a
thread's own clock tells: it stands still while other work runs, and also while the thread sleeps.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles

QUIET = 0.15  # share of computing time that may be lost before a measurement is called disturbed


@dataclass(frozen=True)
class Spread:
    """What repeated measurements say: their median, and the two ends of their middle half."""

    middle: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Median and middle half, each in this format: f"{spread:.2f}" gives "0.50 (0.48–0.53)"."""
        return f"{self.middle:{spec}} ({self.low:{spec}}–{self.high:{spec}})"


def spread(values: Iterable[float]) -> Spread:
    """Return the median and the middle half of measurements; raises ValueError for none."""
    values = list(values)
    if not values:
        raise ValueError("no measurement to take the spread of; repeat it a few times")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


class Computing:
    """`with Computing() as computing:` around work that only computes, in this thread.

    seconds: how long it took.
    lost: the share of it, 0 to 1, in which this thread had no processor.
    """

    def __enter__(self) -> "Computing":
        self._begin_s, self._own_s = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, *_) -> None:
        own_s = time.thread_time() - self._own_s
        self.seconds = time.perf_counter() - self._begin_s
        self.lost = max(0.0, 1 - own_s / self.seconds) if self.seconds else 0.0


def disturbance(lost: Iterable[float]) -> str:
    """Say whether other work disturbed a measurement, and what to do then.

    lost: of each repeat, on its worst rank: `Computing.lost`. Their median is judged.
    """
    share = spread(lost).middle
    told = f"Other work took the processor for {share:.0%} of the computing time: "
    if share <= QUIET:
        return told + "quiet enough."
    return told + (
        "DISTURBED. These numbers may mislead. Stop other programs, then run this cell again."
    )
