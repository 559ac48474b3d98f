"""Collectives, counted: every byte that a run sends is known by kind, group size and purpose.

Each function starts the operation and returns a `Handle`; `handle.wait()` gives the result. The
handle keeps the buffers alive until then. A group of None is one rank alone: nothing is sent.

Two rules are enforced here. Tensors must be contiguous: gloo reads the memory behind a strided
tensor as if it were dense, and corrupts it silently. Reductions are sums (or a maximum), never
averages: the one division of a step happens before backward.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# Newer names first: PyTorch 2.13 warns at the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Call:
    """One collective as seen by one rank.

    payload_bytes: of the whole tensor that is reduced, gathered (all pieces), scattered (all
    pieces) or broadcast; what the wire carries for it depends on the algorithm.
    """

    kind: str
    purpose: str
    ranks: int
    payload_bytes: int


@dataclass
class Traffic:
    """What was sent while `count_traffic` was active."""

    calls: list[Call] = field(default_factory=list)
    waiting_s: float = 0.0  # time spent in Handle.wait; on GPUs the host hardly waits

    def payload_bytes(self, purpose: str | None = None, kind: str | None = None) -> int:
        """Sum of payloads, of all calls or of one purpose or kind."""
        return sum(
            call.payload_bytes
            for call in self.calls
            if purpose in (None, call.purpose) and kind in (None, call.kind)
        )


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


class CollectiveError(RuntimeError):
    """A collective that did not end: a peer died, hung, or called another one."""

    def __init__(self, call: Call, rank: int):
        super().__init__(
            f"{call.kind} of {call.payload_bytes} bytes for {call.purpose!r} over {call.ranks} "
            f"ranks failed on rank {rank}: a peer died, hangs, or is in another collective"
        )


class Handle:
    """A collective on its way. `wait` returns its result; the buffers live as long as this."""

    def __init__(self, result: Tensor, work=None, call: Call | None = None, source=None):
        self._result, self._work, self._call, self._source = result, work, call, source

    def wait(self) -> Tensor:
        """Block until the result is there (on a GPU: make the current stream wait for it)."""
        if self._work is not None:
            start = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise CollectiveError(self._call, dist.get_rank()) from error
            for counter in _counters:
                counter.waiting_s += time.perf_counter() - start
            self._work = self._source = None
        return self._result


def all_reduce(tensor: Tensor, group, purpose: str, op: str = "sum") -> Handle:
    """Every rank gets the elementwise sum (or "max") over the group; tensor changes in place."""
    if group is None:
        return Handle(tensor)
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    call = _count("all_reduce", purpose, group, tensor)
    return Handle(tensor, dist.all_reduce(tensor, operation, group, async_op=True), call)


def all_gather(tensor: Tensor, group, purpose: str) -> Handle:
    """Every rank gets all ranks' tensors: (ranks, *shape), in rank order. Shapes must be equal."""
    if group is None:
        return Handle(tensor[None])
    ranks = dist.get_world_size(group)
    gathered = tensor.new_empty((ranks, *tensor.shape))
    _require_contiguous(tensor)
    call = _count("all_gather", purpose, group, gathered)
    work = _gather(gathered.view(-1), tensor.view(-1), group, async_op=True)
    return Handle(gathered, work, call, tensor)


def reduce_scatter(tensor: Tensor, group, purpose: str) -> Handle:
    """Rank r gets the sum over ranks of tensor[r]; tensor: (ranks, *shape), result: shape."""
    if group is None:
        return Handle(tensor[0])
    ranks = dist.get_world_size(group)
    if tensor.shape[0] != ranks:
        raise ValueError(f"reduce_scatter over {ranks} ranks needs {ranks} pieces in dimension 0")
    call = _count("reduce_scatter", purpose, group, tensor)
    own = torch.empty_like(tensor[0])
    work = _scatter(own.view(-1), tensor.view(-1), group=group, async_op=True)
    return Handle(own, work, call, tensor)


def broadcast(tensor: Tensor, group, purpose: str, source: int = 0) -> Handle:
    """Every rank gets the tensor of the group's rank `source`; tensor changes in place."""
    if group is None:
        return Handle(tensor)
    call = _count("broadcast", purpose, group, tensor)
    root = dist.get_global_rank(group, source)
    return Handle(tensor, dist.broadcast(tensor, root, group, async_op=True), call)


def _count(kind: str, purpose: str, group, tensor: Tensor) -> Call:
    _require_contiguous(tensor)
    call = Call(kind, purpose, dist.get_world_size(group), tensor.nbytes)
    for counter in _counters:
        counter.calls.append(call)
    return call


def _require_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a collective needs a contiguous tensor; got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous() first"
        )
