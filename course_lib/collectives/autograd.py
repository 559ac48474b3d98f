"""Collectives with their derivatives, for models that are spread over ranks.

Autograd does not see torch's collectives. Which backward is right depends on what the ranks do
with the result, so each operation here names its case. There are three ways for ranks to share a
tensor: whole (the same on every rank, and so is its gradient), in parts along a dimension, or as
terms of a sum. A loss is whole: every rank computes the same one.

    function         forward             backward            from      to
    copy_to          nothing             all-reduce          whole     whole, used differently
    reduce_from      all-reduce          nothing             terms     whole
    split_to         own part            all-gather          whole     parts
    gather_from      all-gather          own part            parts     whole
    all_gather       all-gather          reduce-scatter      parts     whole, used differently
    reduce_scatter   reduce-scatter      all-gather          terms     parts
    all_to_all       all-to-all          all-to-all          parts     parts, redistributed

"Used differently": each rank feeds it to its own weights, so each has one term of its gradient.
The first four are the conjugate pairs f, g of Megatron-LM (arXiv:1909.08053), the next two those
of its sequence parallelism (arXiv:2205.05198). An all-reduce whose backward is another all-reduce,
as in torch.distributed.nn, is right where each rank has a loss of its own and the sum is meant; on
a loss that is whole it multiplies gradients by the number of ranks.

Gradients may come in with any strides (that of a sum is expanded) and are never changed in place.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives import operations


def copy_to(tensor: Tensor, group, purpose: str) -> Tensor:
    """A whole tensor that each rank uses in its own way: gradients are summed."""
    return _apply(tensor, group, purpose, _same, _sum)


def reduce_from(tensor: Tensor, group, purpose: str) -> Tensor:
    """The sum of each rank's term, whole."""
    return _apply(tensor, group, purpose, _sum, _same)


def split_to(tensor: Tensor, group, purpose: str, dim: int = -1) -> Tensor:
    """This rank's part of a whole tensor along a dimension, which the ranks must divide."""
    return _apply(tensor, group, purpose, partial(_part, dim=dim), partial(_join, dim=dim))


def gather_from(tensor: Tensor, group, purpose: str, dim: int = -1) -> Tensor:
    """The whole of all parts, with which every rank then does the same."""
    return _apply(tensor, group, purpose, partial(_join, dim=dim), partial(_part, dim=dim))


def all_gather(tensor: Tensor, group, purpose: str, dim: int = 0) -> Tensor:
    """The whole of all parts, which each rank uses in its own way: gradients are summed."""
    return _apply(tensor, group, purpose, partial(_join, dim=dim), partial(_sum_part, dim=dim))


def reduce_scatter(tensor: Tensor, group, purpose: str, dim: int = 0) -> Tensor:
    """This rank's part of the sum of each rank's term."""
    return _apply(tensor, group, purpose, partial(_sum_part, dim=dim), partial(_join, dim=dim))


def all_to_all(
    tensor: Tensor, group, purpose: str,
    sent_rows: Sequence[int] | None = None, received_rows: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Rows to the ranks that they belong to (`operations.all_to_all`); their gradients go back."""
    there = partial(_redistribute, sent=sent_rows, received=received_rows)
    back = partial(_redistribute, sent=received_rows, received=sent_rows)
    return _apply(tensor, group, purpose, there, back)


class _Pair(torch.autograd.Function):
    """One communication forward, another one backward."""

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.run = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable  # what is sent in backward has no derivative of its own: refuse, not guess
    def backward(ctx, gradient: Tensor):
        return ctx.run(gradient), None, None


def _apply(tensor, group, purpose, forward, backward) -> Tensor:
    if group is None:
        return tensor
    return _Pair.apply(
        tensor,
        partial(forward, group=group, purpose=purpose),
        partial(backward, group=group, purpose=purpose),
    )


def _same(tensor: Tensor, group, purpose: str) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group, purpose: str) -> Tensor:
    own = tensor.clone(memory_format=torch.contiguous_format)
    return operations.all_reduce(own, group, purpose).wait()


def _part(tensor: Tensor, group, purpose: str, dim: int) -> Tensor:
    return _parts(tensor, group, dim)[dist.get_rank(group)].contiguous()


def _join(tensor: Tensor, group, purpose: str, dim: int) -> Tensor:
    parts = operations.all_gather(tensor.contiguous(), group, purpose).wait()
    return torch.cat(parts.unbind(), dim)


def _sum_part(tensor: Tensor, group, purpose: str, dim: int) -> Tensor:
    parts = torch.stack(_parts(tensor, group, dim))
    return operations.reduce_scatter(parts, group, purpose).wait()


def _redistribute(tensor: Tensor, group, purpose: str, sent, received) -> Tensor:
    return operations.all_to_all(tensor.contiguous(), group, purpose, sent, received).wait()


def _parts(tensor: Tensor, group, dim: int) -> Sequence[Tensor]:
    ranks = dist.get_world_size(group)
    if tensor.shape[dim] % ranks:
        raise ValueError(
            f"dimension {dim} of shape {tuple(tensor.shape)} does not divide over {ranks} ranks"
        )
    return tensor.tensor_split(ranks, dim)
