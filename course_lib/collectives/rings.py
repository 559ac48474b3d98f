"""Collectives built from messages between two ranks: what happens inside an all-reduce.

The ring. Cut the tensor into as many chunks as there are ranks. In each step every rank sends one
chunk to its right neighbor while another one comes from its left neighbor, which it adds to its
own (reduce-scatter) or keeps (all-gather). After n - 1 steps each chunk has passed all ranks. An
all-reduce is one after the other: 2 (n - 1) steps, in each of which a rank sends 1 / n of the
tensor, so the bytes hardly grow with n. (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.)

The tree. In a broadcast the number of ranks that have the tensor doubles with each step.

Here tensors go in and out; the argument stays as it is, and need not be contiguous. Every chunk of
a sum is added up in one order and then copied, so all ranks end with the same bits. The library
itself uses torch's collectives, which do the same faster.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.cost import chunk_size
from course_lib.collectives.operations import exchange

Watch = Callable[[Sequence[Tensor]], None]  # shown all chunks of this rank after each step


def all_reduce(tensor: Tensor, group, watch: Watch | None = None) -> Tensor:
    """Every rank gets the sum over the group's ranks, in the shape of the tensor."""
    chunk = reduce_scatter(tensor, group, watch)
    return all_gather(chunk, group, tensor.numel(), watch).view(tensor.shape)


def reduce_scatter(tensor: Tensor, group, watch: Watch | None = None) -> Tensor:
    """Rank r gets the sum of chunk r: (elements,), the first chunks longer by one if need be."""
    rank, ranks = _place(group)
    chunks = tensor.flatten().clone().tensor_split(ranks)
    arriving = torch.empty_like(chunks[0])  # no chunk is longer
    for step in range(ranks - 1):
        outgoing = chunks[(rank - step - 1) % ranks]
        summed = chunks[(rank - step - 2) % ranks]
        incoming = arriving[: len(summed)]
        _pass_on(outgoing, incoming, group)
        summed += incoming
        if watch is not None:
            watch(chunks)
    return chunks[rank]


def all_gather(
    chunk: Tensor, group, elements: int | None = None, watch: Watch | None = None
) -> Tensor:
    """Every rank gets all chunks, joined: (elements,), in rank order.

    elements: of all chunks together, cut as reduce_scatter does; by default all are equal.
    """
    rank, ranks = _place(group)
    elements = ranks * len(chunk) if elements is None else elements
    if chunk.dim() != 1 or len(chunk) != chunk_size(elements, ranks, rank):
        raise ValueError(
            f"chunk {rank} of {elements} elements over {ranks} ranks has "
            f"{chunk_size(elements, ranks, rank)} elements; got shape {tuple(chunk.shape)}"
        )
    gathered = chunk.new_zeros(elements)
    chunks = gathered.tensor_split(ranks)
    chunks[rank].copy_(chunk)
    for step in range(ranks - 1):
        _pass_on(chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks], group)
        if watch is not None:
            watch(chunks)
    return gathered


def broadcast(tensor: Tensor, group, source: int = 0) -> Tensor:
    """Every rank gets the tensor of rank `source`; shapes must be equal."""
    rank, ranks = _place(group)
    place = (rank - source) % ranks
    result = tensor.clone(memory_format=torch.contiguous_format)
    reach = 1  # places 0 to reach - 1 have it
    while reach < ranks:
        sends, receives = place < min(reach, ranks - reach), reach <= place < 2 * reach
        exchange(
            result if sends else None, (rank + reach) % ranks,
            result if receives else None, (rank - reach) % ranks, group, "tree",
        ).wait()  # fmt: skip
        reach *= 2
    return result


def all_to_all(
    pieces: Sequence[Tensor], group, lengths: Sequence[int] | None = None
) -> list[Tensor]:
    """Rank r gets the r-th piece of every rank, in rank order; pieces: (elements,) each.

    lengths: of the pieces that come, by default those of the ones that go.
    """
    rank, ranks = _place(group)
    lengths = [len(piece) for piece in pieces] if lengths is None else lengths
    received = [pieces[rank].new_empty(length) for length in lengths]
    received[rank].copy_(pieces[rank])
    for step in range(1, ranks):  # to the right by 1, 2, ...: no two ranks send to the same one
        right, left = (rank + step) % ranks, (rank - step) % ranks
        exchange(pieces[right].contiguous(), right, received[left], left, group, "ring").wait()
    return received


def _pass_on(outgoing: Tensor, incoming: Tensor, group) -> None:
    """Send to the right neighbor and receive from the left one."""
    rank, ranks = _place(group)
    exchange(outgoing, (rank + 1) % ranks, incoming, (rank - 1) % ranks, group, "ring").wait()


def _place(group) -> tuple[int, int]:
    """This rank in the group, and the group's size; a group of None is one rank alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
