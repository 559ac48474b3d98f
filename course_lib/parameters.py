"""One record for every parameter: what it is in the plain model, and which part this rank holds.

Reductions, the gradient norm, clipping, weight decay, initial values, checkpoints and tied weights
all read this record; nobody infers anything from names or shapes. A parallel transform writes a
`Layout` on the module whose parameter it cuts; a parameter without one is held whole.

The part that a rank holds is a set of boxes: a rectangle of the true global tensor, and where it
lies in the local one. The ranks tell each other their boxes; from these follows who holds the same
part, which of them owns it, and whose gradients are summed.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import collectives
from course_lib.boxes import Box, tiling_fault, whole
from course_lib.mesh import Mesh
from course_lib.model import ParameterSpec, initial_rows, parameter_spec

# Names that wrappers (DDP, torch.compile, activation checkpointing) put between the real ones.
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Layout:
    """What a parallel transform did to one parameter; written on the module with `lay_out`.

    Any two ranks hold equal boxes (then they are replicas), or boxes that share nothing. Examples,
    on rank t of four along "tp":

    Column-parallel weight (8, 6), two of its rows on each rank; the gradient is complete::

        Layout((8, 6), (Box((2 * t, 0), (2, 6), (0, 0)),))

    Norm weight, whole on every rank, each of which normalises other positions (sequence
    parallelism), so that the gradients are parts of a sum::

        Layout((6,), (whole((6,)),), partial_over=("tp",))

    Two KV heads of 4 rows each: ranks 0 and 1 hold the first, 2 and 3 the second. A rank sees only
    what its own query heads do with it. Equal boxes are summed: 0 with 1, and 2 with 3::

        Layout((8, 6), (Box((t // 2 * 4, 0), (4, 6), (0, 0)),), partial_over=("tp",))

    Embedding on the first stage, tied head on the last: no layout, since neither is cut. The head
    is declared in the plain model, `ParameterSpec(tied_to="embedding.weight")`, so both are one
    parameter of that name, and the stages between have no record of it.
    """

    shape: tuple[int, ...]  # of the whole parameter, without padding
    boxes: tuple[Box, ...]  # held by this rank
    partial_over: tuple[str, ...] = ()  # axes whose ranks each see only a part of the gradient


def lay_out(module: nn.Module, **layouts: Layout) -> nn.Module:
    """Write on a module how its parameters are laid out; returns the module."""
    module.parameter_layouts = {**getattr(module, "parameter_layouts", {}), **layouts}
    return module


@dataclass(frozen=True)
class ParameterRecord:
    """Everything that anyone needs to know of one parameter on this rank."""

    name: str  # in the plain model; of a tied one, that which it is tied to
    shape: tuple[int, ...]  # of the whole parameter, without padding
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]  # ranks with the same boxes, this one too
    owner: bool  # of all replicas, the one that counts and writes the boxes
    summed_over: Mapping[str, dist.ProcessGroup]  # axis -> replicas along it, to sum gradients
    tied: tuple[str, ...]  # other names of the same tensor, on any rank
    spec: ParameterSpec
    parameter: nn.Parameter


@dataclass(frozen=True)
class _Held:
    """What a rank tells the others of one parameter."""

    names: tuple[str, ...]  # several where it is tied on this rank
    spec: ParameterSpec
    layout: Layout
    local_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """By which all ranks know it."""
        return self.spec.tied_to or self.names[0]

    @property
    def part(self) -> tuple:
        """Equal where two local tensors can be added element by element."""
        return self.layout.boxes, self.local_shape

    @property
    def common(self) -> tuple:
        """What all ranks must agree on."""
        return self.layout.shape, self.layout.partial_over, replace(self.spec, tied_to="")


def build_records(
    model: nn.Module, mesh: Mesh, expected: Iterable[str] = ()
) -> list[ParameterRecord]:
    """The records of a materialised model, tied parameters once. Collective.

    expected: names that some rank must hold, such as all of the plain model.
    Ranks that share parameters have them in the same order; wrappers do not change the names.
    A gradient is summed over replicas along "dp" (they see other samples), along the axes that the
    layout calls partial, and along "pp" (stages use a tied parameter for different things).
    Raises ValueError for a parameter without a specification, and on all ranks alike for one of
    which they hold too little, too much, or different things.
    """
    paths: dict[nn.Parameter, list[str]] = {}  # several where it is tied
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(parameter, []).append(path)
    own = {parameter: _held(model, parameter, names) for parameter, names in paths.items()}
    parameters = {held.name: parameter for parameter, held in own.items()}
    everywhere = _holders(_from_all(mesh, list(own.values())), expected)
    records = []
    # The same loop on all ranks, also for what this one does not hold: it makes groups.
    for number, (name, holders) in enumerate(everywhere.items()):
        _require_one_whole(name, holders)
        groups = _sum_groups(mesh, holders)
        if name in parameters:
            records.append(_record(name, number, holders, groups, mesh, parameters[name]))
    return records


def plain_name(path: str) -> str:
    """The name in the plain model of a parameter found inside wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _held(model: nn.Module, parameter: nn.Parameter, paths: list[str]) -> _Held:
    layouts = set()
    for path in paths:
        holder, _, part = path.rpartition(".")
        layouts.add(getattr(model.get_submodule(holder), "parameter_layouts", {}).get(part))
    names, shape = tuple(map(plain_name, paths)), tuple(parameter.shape)
    layout, *others = layouts - {None} or {Layout(shape, (whole(shape),))}
    if others:
        raise ValueError(f"{' and '.join(names)} are one tensor, but have several layouts")
    return _Held(names, parameter_spec(model, paths[0]), layout, shape)


def _holders(everyone: list[list[_Held]], expected: Iterable[str]) -> dict[str, dict[int, _Held]]:
    """Of each parameter, the ranks that hold it and what they hold."""
    found: dict[str, dict[int, _Held]] = {}
    names = set()
    for rank, part in enumerate(everyone):
        for held in part:
            if rank in found.setdefault(held.name, {}):
                raise ValueError(f"rank {rank} holds {held.name} in several tensors; tie them")
            found[held.name][rank] = held
            names.update(held.names)
    if missing := sorted({*expected, *found} - names):
        raise ValueError(f"no rank holds {', '.join(missing)}; give each parameter to a stage")
    return found


def _require_one_whole(name: str, holders: Mapping[int, _Held]) -> None:
    """All ranks say the same of a parameter, and their boxes make one whole, or several."""
    (first, one), *others = holders.items()
    for rank, other in others:
        if other.common != one.common:
            raise ValueError(
                f"{name} is {one.common} on rank {first}, but {other.common} on rank {rank}"
            )
    parts = {held.part: held.layout.boxes for held in holders.values()}
    if fault := tiling_fault(one.layout.shape, chain.from_iterable(parts.values())):
        raise ValueError(
            f"{name} {list(one.layout.shape)}: {fault}; ranks must hold all of it, in boxes that "
            "are equal (also in their places in local tensors of one shape) or share nothing"
        )


def _sum_groups(mesh: Mesh, holders: Mapping[int, _Held]) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis over which its part's gradient is summed. Collective."""
    groups, partial = {}, next(iter(holders.values())).layout.partial_over
    for axis in ("dp", *partial, "pp"):
        for line in mesh.lines(axis):
            alike: dict[tuple, list[int]] = {}
            for rank in line:
                if rank in holders:
                    alike.setdefault(holders[rank].part, []).append(rank)
            for ranks in alike.values():
                if len(ranks) > 1:
                    group = mesh.group_of(axis, ranks)
                    if mesh.world_rank in ranks:
                        groups[axis] = group
    return groups


def _record(
    name: str, number: int, holders: Mapping[int, _Held], groups: Mapping[str, dist.ProcessGroup],
    mesh: Mesh, parameter: nn.Parameter,
) -> ParameterRecord:  # fmt: skip
    own = holders[mesh.world_rank]
    replicas = tuple(rank for rank, held in holders.items() if held.part == own.part)
    names = dict.fromkeys(other for held in holders.values() for other in held.names)
    return ParameterRecord(
        name=name,
        shape=own.layout.shape,
        boxes=own.layout.boxes,
        replicas=replicas,
        owner=replicas[number % len(replicas)] == mesh.world_rank,  # in turns: they share the work
        summed_over=groups,
        tied=tuple(other for other in names if other != name),
        spec=own.spec,
        parameter=parameter,
    )


def _from_all(mesh: Mesh, own) -> list:
    """What each rank has, in the order of the ranks. Collective."""
    everyone = [own]
    if mesh.world is not None:
        everyone = [None] * mesh.world_size
        dist.all_gather_object(everyone, own, group=mesh.world)
    return everyone


def materialise(
    model: nn.Module, mesh: Mesh, seed: int, dtype=torch.float32, expected: Iterable[str] = ()
) -> list[ParameterRecord]:
    """Give a model built on the meta device its memory and its initial weights. Collective.

    `to_empty` makes new parameters and breaks ties, so the ties are made again and the records
    are built only now. The weights depend on (seed, name) alone: no rank needs a broadcast.
    """
    model.to_empty(device=mesh.device).to(dtype)
    model.tie()
    records = build_records(model, mesh, expected)
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
            rows, *rest = box.place or [slice(0, 1)]  # one number is a row of its own
            shape = record.shape or (1,)
            drawn = initial_rows(record.name, record.spec, shape, rows.start, rows.stop, seed)
            values = drawn[(slice(None), *rest)].view(box.size)
            record.parameter[box.local] = values.to(record.parameter)


def assert_replicas_agree(records: Iterable[ParameterRecord], mesh: Mesh) -> None:
    """Check that ranks which hold the same boxes hold the same bits. Collective.

    Raises RuntimeError naming the first parameter that differs, and the ranks.
    """
    own = {(r.name, r.boxes): _digest(r.parameter) for r in records}
    seen: dict = {}
    for rank, digests in enumerate(_from_all(mesh, own)):
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
    kinds = {name: kind for part in _from_all(mesh, kinds) for name, kind in part.items()}
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
