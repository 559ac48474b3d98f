"""Finishing gradients, in the one order that is right.

Every replica's gradient is a part of a sum, since each micro-batch's loss was already divided by
the number of valid tokens in the whole global batch. So the ranks' parts are SUMMED, and nothing
is divided again. Then: unscale (fp16), norm, clip. Clipping before the sum, or before unscaling,
gives another step; so does counting a replicated parameter more than once in the norm.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib import collectives, data_parallel
from course_lib.mesh import Mesh
from course_lib.parameters import ParameterRecord

Records = Iterable[ParameterRecord]


@dataclass(frozen=True)
class Finished:
    """What is known once gradients are finished; equal on all ranks."""

    norm: float  # of the whole gradient, unscaled, before clipping
    finite: bool  # if not, the step must be skipped (by all ranks alike)


def finish_gradients(
    records: Records,
    mesh: Mesh,
    clip_norm: float | None = None,
    loss_scale: float = 1.0,
    reduce: Callable[[Records, Mesh], None] | None = None,
) -> Finished:
    """Turn accumulated local gradients into the global batch's gradient, clipped. Collective.

    clip_norm: largest norm left; None leaves the gradient as it is.
    loss_scale: factor that the loss was multiplied by (fp16).
    reduce: what sums gradients over ranks; default `data_parallel.sum_flattened`.
    Gradients change in place; a parameter without one gets zeros, so that no rank skips a
    collective. Where the norm is not finite, nothing is clipped and `finite` is False.
    """
    records = [record for record in records if record.parameter.requires_grad]
    for record in records:
        if record.parameter.grad is None:
            record.parameter.grad = torch.zeros_like(record.parameter)
    (reduce or data_parallel.sum_flattened)(records, mesh)
    gradients = [record.parameter.grad for record in records]
    _multiply(gradients, 1 / loss_scale)
    norm = gradient_norm(records, mesh)
    if clip_norm is not None and math.isfinite(norm):
        # As torch's clip_grad_norm_, so that results compare.
        _multiply(gradients, min(clip_norm / (norm + 1e-6), 1.0))
    return Finished(norm, math.isfinite(norm))


def _multiply(gradients: list[Tensor], factor: float) -> None:
    if gradients and factor != 1:  # a stage may hold frozen parameters only
        torch._foreach_mul_(gradients, factor)


def gradient_norm(records: Records, mesh: Mesh) -> float:
    """The 2-norm of the whole gradient: every element counted once, by its owner. Collective.

    The same number on every rank, to the bit, so all ranks clip and skip alike.
    """
    owned = [
        record.parameter.grad[box.local]
        for record in records
        if record.owner
        for box in record.boxes
    ]
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if owned:
        norms = torch.stack(torch._foreach_norm(owned))
        square = norms.double().square().sum()
    return math.sqrt(collectives.all_reduce(square, mesh.world, "gradient norm").wait().item())
