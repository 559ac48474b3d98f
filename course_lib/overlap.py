"""Overlap: communication while the processor computes.

Backward makes the gradients of the last layers first. So a bucket of them can travel while the
layers before are still being differentiated: a hook on every parameter notes that its gradient is
there, and the one that completes a bucket starts its transfer. What is waited for at the end is
only what compute did not cover: at least the last bucket, ready when backward ends.

No gradient can start in the forward pass, since none exists before backward. Three rules keep it
right: a bucket is sent when ALL its gradients are there, and only in the last micro-batch; all
ranks send in the same order; nothing touches a buffer between its start and its wait.

What stops overlap: a graph that differs between ranks (they wait for each other), whatever makes
the host wait for a GPU inside a step (a printed loss, `.item()`, `empty_cache`), and
`torch.compile` of the whole model, whose backward hands over all gradients at its end.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from course_lib.collectives import Handle, Link, time_of
from course_lib.data import Batch
from course_lib.data_parallel import (
    BUCKET_BYTES,
    Buckets,
    DataParallel,
    Records,
    adopt,
    plan_buckets,
)
from course_lib.mesh import Mesh


def data_parallelize(
    model: nn.Module, records: Records, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES
) -> DataParallel:
    """As `data_parallel.data_parallelize`, to the bit, but buckets leave during backward."""
    overlap = Overlap(Buckets(records, mesh, plan_buckets(records, mesh, bucket_bytes)))
    return DataParallel(model, overlap.reduce, overlap.watch)


@dataclass
class BucketTimes:
    """What happened to one bucket in a step, in seconds of `time.perf_counter`; as `Transfer`."""

    ready_s: float = math.nan  # its last gradient was there
    launched_s: float = math.nan  # it was handed over, behind the buckets before it
    started_s: float = math.nan  # all ranks had launched it and the wire was free
    finished_s: float = math.nan  # it was summed
    in_backward: bool = False  # launched by a hook, not at the end


class Overlap:
    """Hooks that send each bucket as soon as it is complete. One step: `watch`, then `reduce`."""

    def __init__(self, buckets: Buckets):
        """Hook all parameters of the buckets; they stay hooked as long as they live."""
        self.buckets = buckets
        self._side = SideStream(buckets.mesh.device)
        self._handles: list[Handle] = []  # launched, not waited for
        self._sending = False  # in the last micro-batch
        self._begin()
        for index, members in enumerate(buckets.members):
            for parameter, view in members:
                arrived = partial(self._arrived, index, view)
                parameter.register_post_accumulate_grad_hook(arrived)

    def watch(self, micro_batches: Iterable[Batch], count: int) -> Iterator[Batch]:
        """Pass on a step's micro-batches; buckets are sent in the backward pass of the last."""
        if self._handles:
            raise RuntimeError(
                "buckets of the last step are still on their way: reduce them first. If its "
                "backward pass failed, call reduce on all ranks, which clears them"
            )
        self._begin()
        try:
            for number, batch in enumerate(micro_batches, 1):
                self._sending = number == count
                yield batch
        finally:  # also where the caller leaves its loop early
            self._sending = False

    def reduce(self, records: Records, mesh: Mesh) -> None:
        """Send what backward did not complete (unused parameters), and wait for all, in order."""
        while len(self._handles) < len(self.buckets.plan):
            self._launch()
        handles, self._handles = self._handles, []
        for index, handle in enumerate(handles):
            self.buckets.complete(index, handle)
            if handle.transfer is not None:
                self.times[index].started_s = handle.transfer.started_s
                self.times[index].finished_s = handle.transfer.finished_s
        self.buckets.require(records)  # only now: nothing is left on its way where it raises
        self.buckets.require_views()

    def _begin(self) -> None:
        self.times = [BucketTimes() for _ in self.buckets.plan]  # of this step, or the last one
        self._missing = [{id(p) for p, _ in members} for members in self.buckets.members]

    def _arrived(self, index: int, view: Tensor, parameter: nn.Parameter) -> None:
        if index < len(self._handles):
            raise RuntimeError(
                "a gradient arrived after its bucket was sent; it would be lost. Differentiate "
                "each micro-batch once, and use checkpoints with use_reentrant=False"
            )
        adopt(parameter, view)
        if not self._sending:
            return
        self._missing[index].discard(id(parameter))
        if not self._missing[index]:
            self.times[index].ready_s = time.perf_counter()
        # In the order of the plan, on every rank: a bucket waits for those before it.
        while len(self._handles) < len(self._missing) and not self._missing[len(self._handles)]:
            self._launch(in_backward=True)

    def _launch(self, in_backward: bool = False) -> None:
        index = len(self._handles)
        self.times[index].launched_s = time.perf_counter()
        self.times[index].in_backward = in_backward
        self.buckets.collect(index)
        # Only buffers that stay are used beside compute, so no record_stream is needed.
        self._side.follow()
        with self._side.queue():
            self._handles.append(self.buckets.launch(index))


# ------------------------------------------------------------------------------ what is possible


def schedule(
    ready_s: Sequence[float], payload_bytes: Sequence[int], link: Link, ranks: int
) -> list[float]:
    """When each bucket is summed at the earliest: it waits to be ready, and for the wire.

    ready_s, payload_bytes: of the buckets, in the order in which they are sent.
    """
    finished, free = [], -math.inf
    for ready, size in zip(ready_s, payload_bytes):
        free = max(ready, free) + time_of("all_reduce", size, ranks, link)
        finished.append(free)
    return finished


# ------------------------------------------------------------------------------------ on a GPU


class SideStream:
    """A second queue of a GPU's work, beside the one that computes; does nothing on a CPU.

    Work in one queue runs in order, and queues run beside each other. Where one needs what the
    other makes, it must be told to wait: the host itself never does.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def queue(self) -> AbstractContextManager:
        """Inside, work goes into this queue."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def follow(self) -> None:
        """What is queued here from now on waits for what compute has been given so far."""
        if self._stream:
            self._stream.wait_event(torch.cuda.current_stream(self._stream.device).record_event())

    def lead(self, made_here: Iterable[Tensor] = ()) -> None:
        """What compute is given from now on waits for what has been queued here so far.

        made_here: tensors allocated in this queue that compute will use. Once freed, their memory
        may be given to new work in THIS queue; record_stream delays that until compute is done.
        """
        if self._stream:
            compute = torch.cuda.current_stream(self._stream.device)
            compute.wait_event(self._stream.record_event())
            for tensor in made_here:
                tensor.record_stream(compute)


def fetch_to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on a device; the next one is copied there while this one is computed on."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    side, ahead = SideStream(device), None
    for batch in batches:
        present, ahead = _arrival(side, ahead), _start_copy(side, batch, device)
        if present is not None:
            yield present
    if ahead is not None:
        yield _arrival(side, ahead)


def _start_copy(side: SideStream, batch: Batch, device: torch.device) -> Batch:
    with side.queue():  # only from pinned memory is a copy really asynchronous
        pinned = {name: t.pin_memory() for name, t in _tensors(batch).items() if t.is_cpu}
        return replace(batch, **pinned).to(device)


def _arrival(side: SideStream, batch: Batch | None) -> Batch | None:
    if batch is not None:
        side.lead(_tensors(batch).values())
    return batch


def _tensors(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
