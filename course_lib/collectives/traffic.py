"""What was sent: each call's kind, group, purpose and bytes, and when it was on the wire."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Call:
    """One collective, or one message, as seen by one rank.

    payload_bytes: of the whole tensor that is reduced, gathered (all pieces), scattered (all
    pieces), exchanged (all that this rank gives) or broadcast, or of the one message.
    sent_bytes: what the busiest rank sends for it by the ring or the tree (`cost.sent_bytes`).
    """

    kind: str
    purpose: str
    ranks: int
    payload_bytes: int
    group: str = field(default="", compare=False)  # axis of the mesh ("dp"), or "world"
    sent_bytes: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Transfer:
    """When a call was on its way, in seconds of `time.perf_counter`, which ranks here share.

    On an emulated link these are the times of the wire. Elsewhere nobody tells when a transfer
    starts and ends: started_s is the launch, finished_s the end of the wait for it.
    """

    call: Call
    launched_s: float
    started_s: float
    finished_s: float


@dataclass
class Traffic:
    """What was sent while `count_traffic` was active."""

    calls: list[Call] = field(default_factory=list)
    waiting_s: float = 0.0  # time spent in Handle.wait; on GPUs the host hardly waits
    transfers: list[Transfer] = field(default_factory=list)  # in the order of the waits

    def payload_bytes(
        self, purpose: str | None = None, kind: str | None = None, group: str | None = None
    ) -> int:
        """Sum of payloads, of all calls or of one purpose, kind or group."""
        return sum(call.payload_bytes for call in self.select(purpose, kind, group))

    def sent_bytes(
        self, purpose: str | None = None, kind: str | None = None, group: str | None = None
    ) -> float:
        """Bytes that the busiest rank sends for these calls, by the ring or the tree."""
        return sum(call.sent_bytes for call in self.select(purpose, kind, group))

    def select(
        self, purpose: str | None = None, kind: str | None = None, group: str | None = None
    ) -> list[Call]:
        """All calls, or those of one purpose, kind or group, in order."""
        return [
            call
            for call in self.calls
            if purpose in (None, call.purpose)
            and kind in (None, call.kind)
            and group in (None, call.group)
        ]


_counters: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives of this process inside the block; blocks may be nested."""
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        # By identity: two counters that saw the same calls compare equal.
        _counters[:] = [counter for counter in _counters if counter is not traffic]


def count_call(call: Call) -> None:
    """Note a call that starts."""
    for counter in _counters:
        counter.calls.append(call)


def count_wait(transfer: Transfer, waiting_s: float) -> None:
    """Note a transfer that was waited for."""
    for counter in _counters:
        counter.transfers.append(transfer)
        counter.waiting_s += waiting_s
