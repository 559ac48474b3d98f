"""Data parallelism: every rank sees other samples, and all take the same step.

Each rank's gradient is a part of one sum, since each micro-batch's loss was already divided by the
number of valid tokens in the whole global batch. So the parts are SUMMED over ranks and nothing is
divided again: an average of the ranks' averages is wrong as soon as one has more valid tokens.

How to sum them is told three times, each better than the one before, all with one contract,
`reduce(records, mesh)`: `sum_each` sends a message for every parameter, `sum_flattened` one message
for all of them, `Buckets.sum` a few, from buffers that stay. Only buckets can be sent while
backward still runs: that is `overlap`. Paper: Li et al. 2020, PyTorch Distributed (2006.15704).

No weights are broadcast at the start: they are drawn by name, so all ranks have them already.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from course_lib import collectives
from course_lib.collectives import Handle
from course_lib.data import Batch
from course_lib.mesh import Mesh
from course_lib.parameters import ParameterRecord
from course_lib.training import IGNORE

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # small: it is ready soon, and the wire should not stand idle

Records = Sequence[ParameterRecord]  # trainable parameters, each with a gradient


@dataclass(frozen=True)
class DataParallel:
    """What a training step needs to know of data parallelism; made by a `data_parallelize`.

    model: what the forward pass calls; its parameters are the records'.
    reduce: sums the gradients over ranks; None: `sum_flattened`.
    watch: passes on a step's micro-batches, so many of them, and knows when the last one's forward
        begins. Nothing is sent before, so that accumulation costs no communication.
    """

    model: nn.Module
    reduce: Callable[[Records, Mesh], None] | None = None
    watch: Callable[[Iterable[Batch], int], Iterator[Batch]] = lambda batches, count: iter(batches)


def data_parallelize(
    model: nn.Module, records: Records, mesh: Mesh, bucket_bytes: int = BUCKET_BYTES
) -> DataParallel:
    """Sum gradients in buckets after backward. Parameters frozen by now are left out for good."""
    return DataParallel(
        model, Buckets(records, mesh, plan_buckets(records, mesh, bucket_bytes)).sum
    )


# --------------------------------------------------------------------------- naive and flattened


def sum_each(records: Records, mesh: Mesh) -> None:
    """Naive: one message a parameter. Each costs a latency, and small ones cost little else."""
    for record in records:
        gradient = record.parameter.grad
        dense = gradient.contiguous()  # a gradient may be strided; what is sent may not
        for group in record.summed_over.values():
            collectives.all_reduce(dense, group, "gradients").wait()
        if dense is not gradient:
            gradient.copy_(dense)


def sum_flattened(records: Records, mesh: Mesh) -> None:
    """All gradients that are summed by the same ranks in one message; copied there and back."""
    alike: dict[tuple, list[Tensor]] = {}
    for record in records:
        key = (*record.summed_over.values(),), record.parameter.grad.dtype
        alike.setdefault(key, []).append(record.parameter.grad)
    for (groups, _), gradients in alike.items():
        if not groups:
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for group in groups:
            collectives.all_reduce(flat, group, "gradients").wait()
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces):
            gradient.copy_(piece.view_as(gradient))


# --------------------------------------------------------------------------------------- buckets


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel in one message, in the order in which backward makes them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # elements of each
    dtype: torch.dtype
    groups: tuple[ProcessGroup, ...]  # summed over these, one after the other

    @property
    def payload_bytes(self) -> int:
        """Bytes of all its gradients."""
        return sum(self.sizes) * self.dtype.itemsize

    def __str__(self) -> str:
        ends = self.names[0] if len(self.names) == 1 else f"{self.names[0]} … {self.names[-1]}"
        count = f"{len(self.names)} gradient{'s' * (len(self.names) > 1)}"
        return f"{self.payload_bytes / 1e6:.2f} MB, {count}: {ends}"


def plan_buckets(
    records: Records,
    mesh: Mesh,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[Bucket]:
    """Divide the trainable parameters into buckets, in the reverse of the order of their use.

    Backward goes through the model from its end, so a bucket's gradients are ready at about the
    same time; a tied embedding, used first and last, is ready last. All ranks plan alike, since all
    have the same records.

    A bucket is closed by the gradient that fills it to `bucket_bytes` or more (the first one:
    `first_bytes`), as PyTorch's DDP does. Closed before that gradient it would not be bounded
    either, since a large gradient travels whole, and small ones between large ones would travel
    alone: 65 of Llama-7B's 291 messages would then have less than 1 MiB.
    """
    closed: list[list[ParameterRecord]] = []
    filling: dict[tuple, list[ParameterRecord]] = {}
    order = {record.name: place for place, record in enumerate(reversed(_trainable(records)))}
    for record in reversed(_trainable(records)):
        key = (*record.summed_over.values(),), record.parameter.dtype
        members = filling.setdefault(key, [])
        members.append(record)
        limit = bucket_bytes if closed else min(first_bytes, bucket_bytes)
        if sum(r.parameter.nbytes for r in members) >= limit:
            closed.append(filling.pop(key))
    complete = sorted([*closed, *filling.values()], key=lambda members: order[members[-1].name])
    return [_bucket(members) for members in complete]


def _trainable(records: Records) -> list[ParameterRecord]:
    return [record for record in records if record.parameter.requires_grad]


def _bucket(members: Sequence[ParameterRecord]) -> Bucket:
    names = tuple(record.name for record in members)
    sizes = tuple(record.parameter.numel() for record in members)
    return Bucket(names, sizes, members[0].parameter.dtype, (*members[0].summed_over.values(),))


class Buckets:
    """Flat buffers that stay, one a bucket. After `sum` every gradient is a view into its buffer.

    So nothing is copied back: norm, clipping and the optimizer read the buffers themselves. Where
    the optimizer set gradients to None before the step, backward's new gradient is copied in once
    (cheaper than to zero the buffer and add to it); where it zeroed them, they still are the
    views, and backward adds in place.
    """

    def __init__(self, records: Records, mesh: Mesh, plan: Sequence[Bucket]):
        self.plan, self.mesh = tuple(plan), mesh
        parameters = {record.name: record.parameter for record in records}
        self.names = {parameters[name]: name for bucket in self.plan for name in bucket.names}
        self.flats = [
            torch.zeros(sum(b.sizes), dtype=b.dtype, device=mesh.device) for b in self.plan
        ]
        self.members = [  # of each bucket: parameter and the view that is its gradient
            [
                (parameters[name], part.view_as(parameters[name]))
                for name, part in zip(bucket.names, flat.split(bucket.sizes))
            ]
            for bucket, flat in zip(self.plan, self.flats)
        ]

    def sum(self, records: Records, mesh: Mesh) -> None:
        """Send all buckets, one behind the other, then wait for them in the same order."""
        self.require(records)
        handles = [self.launch(index) for index in range(len(self.plan))]
        for index, handle in enumerate(handles):
            self.complete(index, handle)

    def collect(self, index: int) -> None:
        """Make every gradient of a bucket a view into its buffer."""
        for parameter, view in self.members[index]:
            adopt(parameter, view)

    def launch(self, index: int) -> Handle:
        """Start summing a bucket all of whose gradients are there. Collective."""
        self.collect(index)
        first = next(iter(self.plan[index].groups), None)
        return collectives.all_reduce(self.flats[index], first, "gradients")

    def complete(self, index: int, handle: Handle) -> None:
        """Wait for a bucket, then sum over its other groups. The buffer must rest until then."""
        handle.wait()
        for group in self.plan[index].groups[1:]:
            collectives.all_reduce(self.flats[index], group, "gradients").wait()

    def require(self, records: Records) -> None:
        """Raise ValueError unless the buckets hold exactly these parameters."""
        given = {record.parameter: record.name for record in records}
        if wrong := self.names.keys() ^ given.keys():
            names = sorted({(self.names | given)[parameter] for parameter in wrong})
            raise ValueError(
                f"{names} were frozen, thawed or replaced after the buckets were planned; do so "
                "before data_parallelize, or build the model and its buckets again on all ranks"
            )

    def require_views(self) -> None:
        """Raise RuntimeError where a gradient is not what was sent and summed (or None)."""
        for parameter, view in chain.from_iterable(self.members):
            if parameter.grad is not None and parameter.grad is not view:
                raise RuntimeError(
                    f"the gradient of {self.names[parameter]} was replaced while its bucket "
                    "travelled, so it is not summed; change gradients after reduce, and call "
                    "data_parallelize once"
                )


def adopt(parameter: nn.Parameter, view: Tensor) -> None:
    """Make `view` the parameter's gradient, with the values of the one that it has; none is 0."""
    if parameter.grad is view:
        return
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad)
    parameter.grad = view


# ------------------------------------------------------------------------------ ranks in step


def agree(condition: bool, mesh: Mesh) -> bool:
    """Whether a condition holds on any rank: all ranks get the same answer. Collective.

    What a rank decides by itself (to stop, to save, to skip) it decides alone, and the others
    then wait in a collective that it never enters.
    """
    flag = torch.tensor(int(condition), device=mesh.device)
    return bool(collectives.all_reduce(flag, mesh.world, "agreement", op="max").wait())


def keep_in_step(
    steps: Iterable[Sequence[Batch]], mesh: Mesh, blank: Batch
) -> Iterator[Sequence[Batch]]:
    """This rank's micro-batches of every step, for as long as any rank has some. Collective.

    The policy for uneven numbers of batches: nothing is dropped. A rank that has run out goes on
    with `blank` without its targets, which adds zero to each sum and joins each collective; the
    divisor counts targets, so the last steps have their right weight.
    """
    steps = iter(steps)
    while True:
        own = next(steps, None)
        if not agree(own is not None, mesh):
            return
        yield [without_targets(blank)] if own is None else own


def without_targets(batch: Batch) -> Batch:
    """The same tokens, from which nothing is learned."""
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE), valid=0)


@torch.no_grad()
def broadcast_weights(records: Records, mesh: Mesh, source: int = 0) -> None:
    """Give every replica the weights of one. Not needed here; shown for its cost. Collective."""
    for record in records:
        dense = record.parameter.detach().contiguous()
        collectives.broadcast(dense, mesh.group("dp"), "weights", source).wait()
        record.parameter.copy_(dense)
