"""A slow wire on one machine: transfers take at least as long as an emulated link would need.

Between processes of one machine communication is almost free, so nothing about networks could be
felt. Inside `with EmulatedLink(latency_s, bytes_per_s)` each collective ends no sooner than the
formula of `cost.time_of` says, counted from the moment at which the last rank has arrived and
this rank's wire has nothing left from before: one wire, one queue. The payload is really sent, by
gloo; `Handle.wait` sleeps for the rest of the time, so whatever is computed before it hides it.

How do ranks know when the last one came? All ranks run on one machine and read one clock; in
front of each payload they agree on the latest launch by an all-reduce of one number.

It is an emulation. gloo must be much faster than the wire, so a link above half of gloo's
bandwidth is refused; show such a link in scale (`scaled`). gloo also uses processor time, which a
network card would not. Only tensors of the CPU and ranks of one machine are meant.
"""

import math
import time
from functools import lru_cache

import torch
import torch.distributed as dist

from course_lib.collectives.cost import Link, sent_bytes, steps
from course_lib.collectives.traffic import Call

_active: list["EmulatedLink"] = []


class EmulatedLink:
    """While active, collectives of this process take what this link would; enter on all ranks.

    latency_s, bytes_per_s: of the wire, in one direction.
    gloo_bytes_per_s: gloo's own speed; measured at the first entry where it is not given.
    scale: how many times slower the link is than the one it stands for (`scaled`).
    """

    def __init__(
        self, latency_s: float, bytes_per_s: float, gloo_bytes_per_s: float | None = None,
        scale: float = 1.0,
    ):  # fmt: skip
        self.link, self.scale = Link(latency_s, bytes_per_s), scale
        self._gloo_bytes_per_s = gloo_bytes_per_s
        self._queue: list[Pending] = []  # collectives whose time on the wire isn't known yet
        self._free_s = 0.0  # when the wire is done with all those that are known

    def __str__(self):
        text = f"emulated link of {_readable(self.link)}"
        if self.scale == 1:
            return text
        real = Link(self.link.latency_s / self.scale, self.link.bytes_per_s * self.scale)
        return f"{text}: {_readable(real)} at scale 1 : {self.scale:,.0f}"

    def __enter__(self) -> "EmulatedLink":
        gloo = measure_gloo() if self._gloo_bytes_per_s is None else self._gloo_bytes_per_s
        if self.link.bytes_per_s > gloo / 2:
            raise ValueError(
                f"a link of {self.link.bytes_per_s / 1e6:,.1f} MB/s is faster than half of gloo's "
                f"{gloo / 1e6:,.1f} MB/s here, so gloo would be felt, not the link; use a slower "
                "one, or scaled(link, cpu_flops, gpu_flops)"
            )
        _active.append(self)
        return self

    def __exit__(self, *_):
        _active.remove(self)

    def occupy(self, ready_s: float, seconds: float) -> tuple[float, float]:
        """Start and end on the wire of what is ready at ready_s and takes so many seconds."""
        started_s = max(ready_s, self._free_s)
        self._free_s = started_s + seconds
        return started_s, self._free_s

    def settle(self, last: "Pending | None" = None) -> None:
        """Give collectives their time on the wire in the order of launch, up to the last one.

        One of another group for which a rank is still missing doesn't hold up the wire.
        """
        end = self._queue.index(last) + 1 if last else len(self._queue)
        for pending in self._queue[:end]:
            if (last and pending.group is last.group) or pending.works[0].is_completed():
                self._queue.remove(pending)
                pending.settle()


class Pending:
    """A call on an emulated wire. Its times are known once all its ranks have come."""

    def __init__(self, wire: EmulatedLink, call: Call, group):
        self.wire, self.call, self.group = wire, call, group
        self.launched_s = time.perf_counter()
        self.seconds = call.sent_bytes / wire.link.bytes_per_s
        self.seconds += steps(call.kind, call.ranks) * wire.link.latency_s
        self.stamp = torch.tensor(self.launched_s, dtype=torch.float64)
        self.works = []
        self.started_s = self.finished_s = None

    def agree(self) -> None:
        """Ask for the launch of the last rank. Before the payload, in the same order everywhere."""
        self.works = [dist.all_reduce(self.stamp, dist.ReduceOp.MAX, self.group, async_op=True)]
        self.wire._queue.append(self)

    def wait(self) -> None:
        """Sleep until the wire is done."""
        self.know()
        while (left_s := self.finished_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def know(self) -> None:
        """Wait until the end is known, that is for the last rank."""
        if self.finished_s is None:
            self.wire.settle(self)

    def settle(self) -> None:
        """Take the next place on the wire; waits for the last rank."""
        for work in self.works:
            work.wait()
        self.started_s, self.finished_s = self.wire.occupy(self.stamp.item(), self.seconds)


class PendingMessage(Pending):
    """A message: its sender's wire decides, and tells the receiver when it will be there."""

    def tell(self, destination: int | None, source: int | None) -> None:
        """Send the end of our message to its receiver and ask for that of the one that comes.

        destination, source: ranks in the group; None where nothing goes out, or comes in.
        """
        self.wire.settle()
        self.started_s, self.own_end_s = self.launched_s, self.launched_s
        if destination is not None:
            self.started_s, self.own_end_s = self.wire.occupy(self.launched_s, self.seconds)
            self.sent = torch.tensor(self.own_end_s, dtype=torch.float64)
            self.works.append(dist.isend(self.sent, group=self.group, group_dst=destination))
        self.stamp.zero_()
        if source is not None:
            self.works.append(dist.irecv(self.stamp, group=self.group, group_src=source))

    def know(self) -> None:
        """Wait until it is known when both messages are there."""
        for work in self.works:
            work.wait()
        self.finished_s = max(self.own_end_s, self.stamp.item())


def launch(call: Call, group) -> Pending | None:
    """Put a collective on the active link's queue, if there is one, before its payload starts."""
    if not _active:
        return None
    pending = Pending(_active[-1], call, group)
    pending.agree()
    return pending


def launch_message(call: Call, group, destination, source) -> Pending | None:
    """Put a message on the active link, if there is one."""
    if not _active:
        return None
    pending = PendingMessage(_active[-1], call, group)
    pending.tell(destination, source)
    return pending


def scaled(
    link: Link, cpu_flops: float, gpu_flops: float, gloo_bytes_per_s: float | None = None
) -> EmulatedLink:
    """The link as a GPU of gpu_flops would feel it, for a rank here that computes cpu_flops.

    Both latency and transfer are slower by gpu_flops / cpu_flops (FLOP/s, sustained, of one rank),
    so the ratio of communication to compute is that of the real machine.
    """
    scale = gpu_flops / cpu_flops
    return EmulatedLink(link.latency_s * scale, link.bytes_per_s / scale, gloo_bytes_per_s, scale)


def measure_gloo(payload_bytes: int = 4 << 20, trials: int = 5) -> float:
    """Bytes/s that gloo moves here in an all-reduce, counted as the ring's; measured once.

    Collective over all ranks, which get the same figure: the best trial of the slowest rank.
    """
    return _measured(dist.group.WORLD, payload_bytes, trials)


@lru_cache(1)  # of this world: a process that is kept may join another one
def _measured(world, payload_bytes: int, trials: int) -> float:
    payload = torch.zeros(payload_bytes // 4)
    best_s = math.inf
    for _ in range(trials + 1):  # the first opens connections
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(payload)
        best_s = min(best_s, time.perf_counter() - start)
    slowest_s = torch.tensor(best_s, dtype=torch.float64)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    return sent_bytes("all_reduce", payload_bytes, dist.get_world_size()) / slowest_s.item()


def _readable(link: Link) -> str:
    figures = [link.bytes_per_s / 1e6, link.latency_s * 1e6]
    speed, latency = (f"{x:,.0f}" if x >= 1000 else f"{x:.4g}" for x in figures)
    return f"{speed} MB/s and {latency} \u00b5s"
