"""One record for every parameter: what it is in the plain model, and which part this rank holds.

Reductions, the gradient norm, clipping, weight decay, initial values, checkpoints and tied weights
all read this record; nobody infers anything from names or shapes. A parallel transform writes a
`Layout` on the module whose parameter it cuts; a parameter without one is held whole.

The part that a rank holds is a set of boxes: a rectangle of the true global tensor, and where it
lies in the local one. That is enough for uneven shards (boxes of different sizes), padding (local
rows that no box covers) and interleaved pieces (several boxes).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import collectives
from course_lib.mesh import AXES, Mesh
from course_lib.model import ParameterSpec, initial_rows, parameter_spec

# Names that wrappers (DDP, torch.compile, activation checkpointing) put between the real ones.
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor that a rank holds, and where it begins locally."""

    offset: tuple[int, ...]  # in the global tensor
    size: tuple[int, ...]
    local_offset: tuple[int, ...]  # in this rank's tensor

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def place(self) -> tuple[slice, ...]:
        """Where the box lies in the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size))

    @property
    def local(self) -> tuple[slice, ...]:
        """Where the box lies in the local tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.local_offset, self.size))


def whole(shape: Iterable[int]) -> Box:
    """The box of a tensor that is held undivided."""
    shape = tuple(shape)
    zeros = (0,) * len(shape)
    return Box(zeros, shape, zeros)


@dataclass(frozen=True)
class Layout:
    """What a parallel transform did to one parameter; written on the module with `lay_out`."""

    shape: tuple[int, ...]  # of the whole parameter, without padding
    boxes: tuple[Box, ...]  # held by this rank
    sharded_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()  # axes whose ranks each see only a part of the gradient


def lay_out(module: nn.Module, **layouts: Layout) -> nn.Module:
    """Write on a module how its parameters are laid out; returns the module."""
    module.parameter_layouts = {**getattr(module, "parameter_layouts", {}), **layouts}
    return module


@dataclass(frozen=True)
class ParameterRecord:
    """Everything that anyone needs to know of one parameter on this rank."""

    name: str  # in the plain model
    shape: tuple[int, ...]  # of the whole parameter, without padding
    boxes: tuple[Box, ...]
    sharded_over: tuple[str, ...]
    replicated_over: tuple[str, ...]
    summed_over: tuple[str, ...]  # axes over which its gradient is summed
    owner: bool  # of all ranks with the same boxes, the one that counts and writes them
    tied: tuple[str, ...]  # other names of the same tensor
    spec: ParameterSpec
    parameter: nn.Parameter


def build_records(model: nn.Module, mesh: Mesh) -> list[ParameterRecord]:
    """The records of a materialised model, in the order of its parameters, tied ones once.

    Wrappers around the model or inside it do not change the names. Raises ValueError for a
    parameter without a specification (see `model.declare`).
    """
    paths: dict[nn.Parameter, list[str]] = {}  # several where it is tied
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(parameter, []).append(path)
    return [
        _record(model, parameter, found, mesh, number)
        for number, (parameter, found) in enumerate(paths.items())
    ]


def plain_name(path: str) -> str:
    """The name in the plain model of a parameter found inside wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _record(
    model: nn.Module, parameter: nn.Parameter, paths: list[str], mesh: Mesh, number: int
) -> ParameterRecord:
    name, *tied = map(plain_name, paths)
    holder, _, part = paths[0].rpartition(".")
    layouts = getattr(model.get_submodule(holder), "parameter_layouts", {})
    layout = layouts.get(part) or Layout(tuple(parameter.shape), (whole(parameter.shape),))
    replicated = tuple(axis for axis in AXES if axis not in layout.sharded_over)
    return ParameterRecord(
        name=name,
        shape=layout.shape,
        boxes=layout.boxes,
        sharded_over=layout.sharded_over,
        replicated_over=replicated,
        summed_over=("dp", *layout.partial_over),
        owner=_is_owner(mesh, replicated, number),
        tied=tuple(tied),
        spec=parameter_spec(model, paths[0]),
        parameter=parameter,
    )


def _is_owner(mesh: Mesh, replicated: tuple[str, ...], number: int) -> bool:
    """Replicas take turns by the parameter's number, so that they share the work of owners."""
    place, replicas = 0, 1
    for axis in replicated:
        place = place * mesh.size(axis) + mesh.rank(axis)
        replicas *= mesh.size(axis)
    return number % replicas == place


def materialise(
    model: nn.Module, mesh: Mesh, seed: int, dtype=torch.float32
) -> list[ParameterRecord]:
    """Give a model built on the meta device its memory and its initial weights.

    `to_empty` makes new parameters and breaks ties, so the ties are made again and the records
    are built only now. The weights depend on (seed, name) alone: no rank needs a broadcast.
    """
    model.to_empty(device=mesh.device).to(dtype)
    model.tie()
    records = build_records(model, mesh)
    initialise(records, seed)
    return records


@torch.no_grad()
def initialise(records: Iterable[ParameterRecord], seed: int) -> None:
    """Fill this rank's boxes with their initial values; padding becomes zero."""
    for record in records:
        record.parameter.zero_()
        for box in record.boxes:
            if box.elements == 0:  # an empty shard lies in no block of rows
                continue
            first, last = box.place[0].start, box.place[0].stop
            rows = initial_rows(record.name, record.spec, record.shape, first, last, seed)
            record.parameter[box.local] = rows[(slice(None), *box.place[1:])].to(record.parameter)


def assert_replicas_agree(records: Iterable[ParameterRecord], mesh: Mesh) -> None:
    """Check that ranks which hold the same boxes hold the same bits. Collective.

    Raises RuntimeError naming the first parameter that differs, and the ranks.
    """
    if mesh.world is None:
        return
    own = {(r.name, r.boxes): _digest(r.parameter) for r in records}
    everyone: list = [None] * mesh.world_size
    dist.all_gather_object(everyone, own, group=mesh.world)
    seen: dict = {}
    for rank, digests in enumerate(everyone):
        for key, digest in digests.items():
            first, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                raise RuntimeError(f"ranks {first} and {rank} hold different values of {key[0]}")


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(flat).hexdigest()


def gather_full(
    records: Iterable[ParameterRecord], tensors: Mapping[str, Tensor], mesh: Mesh
) -> dict[str, Tensor]:
    """Whole tensors by name from every rank's parts, on every rank. Collective; for proofs.

    tensors: local tensors (parameters, gradients or moments) by parameter name. Each owner puts
    its boxes into zeros, and a sum over all ranks joins them: no assumption on the layout.
    """
    held = {r.name: r for r in records}
    kinds = {name: (record.shape, tensors[name].dtype) for name, record in held.items()}
    if mesh.world is not None:
        everyone: list = [None] * mesh.world_size
        dist.all_gather_object(everyone, kinds, group=mesh.world)
        kinds = {name: kind for part in everyone for name, kind in part.items()}
    widest = reduce(torch.promote_types, (dtype for _, dtype in kinds.values()), torch.uint8)
    sizes = [math.prod(shape) for shape, _ in kinds.values()]
    joined = torch.zeros(sum(sizes), dtype=widest, device=mesh.device)
    full = {name: part.view(kinds[name][0]) for name, part in zip(kinds, joined.split(sizes))}
    for name, record in held.items():
        if record.owner:
            for box in record.boxes:
                full[name][box.place] = tensors[name][box.local]
    collectives.all_reduce(joined, mesh.world, "proof").wait()
    return {name: tensor.to(kinds[name][1]) for name, tensor in full.items()}
