"""PyTorch's own parts behind the course's functions: `parallel.backend = "pytorch"`.

DistributedDataParallel (DDP) averages over ranks unless a communication hook says otherwise; ours
sums, as everything in the course does. It arms its own hooks in the forward pass, so `no_sync`
must enclose forward and backward of a micro-batch: with forward outside, every micro-batch is
sent, the result is right, and only a counter shows it.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.collectives import Handle, all_reduce
from course_lib.data import Batch
from course_lib.data_parallel import BUCKET_BYTES, DataParallel, Records, sum_flattened
from course_lib.mesh import Mesh
from course_lib.parameters import ParameterRecord


def data_parallelize(
    model: nn.Module,
    records: Records,
    mesh: Mesh,
    bucket_bytes: int = BUCKET_BYTES,
    find_unused: bool = False,
) -> DataParallel:
    """As `overlap.data_parallelize`, by DDP. Collective.

    find_unused: look for parameters without a gradient before every backward pass. Otherwise a
        step that leaves one out is refused (RuntimeError), as is one whose parameters were frozen,
        thawed or replaced meanwhile: DDP itself would notice a step later, or never.
    """
    group = mesh.group("dp")
    trained = [record for record in records if record.parameter.requires_grad]
    if group is None or not trained:
        return DataParallel(model)
    if cut := [record.name for record in trained if record.summed_over.get("dp") is not group]:
        raise ValueError(f'DDP sums over all of "dp", where {cut[0]} is cut; use backend "course"')
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_bytes / 2**20,
        gradient_as_bucket_view=True, find_unused_parameters=find_unused,
        init_sync=False,  # weights are equal by construction
    )  # fmt: skip
    handles: list[Handle] = []

    def send(_, bucket) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket. DDP is told that it is done; it is waited for in `reduce`, as ours are.

        The gradients are views into the bucket, so nobody reads them before.
        """
        handles.append(all_reduce(bucket.buffer(), group, "gradients"))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def watch(micro_batches: Iterable[Batch], count: int) -> Iterator[Batch]:
        for number, batch in enumerate(micro_batches, 1):
            with wrapped.no_sync() if number < count else nullcontext():
                yield batch  # forward and backward happen here

    def reduce(records: Records, mesh: Mesh) -> None:
        sent_bytes = sum(handle.wait().nbytes for handle in handles)
        handles.clear()
        wanted_bytes = sum(record.parameter.grad.nbytes for record in records)
        if sent_bytes < wanted_bytes:
            raise RuntimeError(
                f"DDP summed {sent_bytes} of {wanted_bytes} bytes of gradients: a "
                "parameter is unused (find_unused=True), or was frozen, thawed or replaced after "
                "data_parallelize (build the model again), or fewer micro-batches came than were "
                "announced"
            )
        sum_flattened([_without_dp(record) for record in records], mesh)

    wrapped.register_comm_hook(None, send)
    return DataParallel(wrapped, reduce, watch)


def _without_dp(record: ParameterRecord) -> ParameterRecord:
    """Only the sums that DDP, which knows one group, leaves out."""
    groups = {axis: group for axis, group in record.summed_over.items() if axis != "dp"}
    return replace(record, summed_over=groups)
