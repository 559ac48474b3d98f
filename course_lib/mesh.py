"""Who talks to whom: ranks arranged along named axes, with one process group an axis.

Axes, outermost first: "pp" (pipeline stages), "dp" (replicas that see other data), "tp" (shards of
one layer). Neighbouring ranks differ in the innermost axis, so tensor parallelism, which sends the
most, stays inside a node. The mesh is passed to whoever needs it; nothing here is global.

Groups are made by torch's DeviceMesh. An axis of size 1 has no group: collectives skip it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along named axes, seen from one of them."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    groups: Mapping[str, dist.ProcessGroup]  # only axes larger than 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parts: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)  # by `group_of`

    @classmethod
    def single(cls, device="cpu") -> "Mesh":
        """The mesh of one process alone."""
        return cls(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0), {}, torch.device(device))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None when there is only one."""
        return dist.group.WORLD if self.world_size > 1 else None

    @property
    def world_rank(self) -> int:
        """This rank's number among all ranks."""
        return dist.get_rank(self.world) if self.world is not None else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes for all."""
        return not any(self.coordinates.values())

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """This rank's place along an axis, from 0."""
        return self.coordinates[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in this axis only; None when it has size 1."""
        return self.groups.get(axis)

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks of each group along an axis: this rank's group, and all others."""
        ranks = np.arange(self.world_size).reshape([self.sizes[each] for each in AXES])
        along = np.moveaxis(ranks, AXES.index(axis), -1).reshape(-1, self.size(axis))
        return [tuple(line) for line in along.tolist()]

    def group_of(self, axis: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """The group of some ranks of a line along an axis, made once; useless to other ranks.

        Collective: all ranks of the world ask for the same groups in the same order.
        """
        if len(ranks) == self.size(axis):
            return self.groups[axis]
        if tuple(ranks) not in self.parts:
            self.parts[tuple(ranks)] = dist.new_group(list(ranks))
        return self.parts[tuple(ranks)]


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Place of a global rank along every axis; the last axis varies fastest."""
    places = {}
    for axis in reversed(AXES):
        rank, places[axis] = divmod(rank, sizes[axis])
    return {axis: places[axis] for axis in AXES}


def make_mesh(sizes: Mapping[str, int], device="cpu") -> Mesh:
    """Arrange all ranks of the initialised process group; axes not named have size 1.

    Collective: every rank calls it with the same sizes. Raises ValueError for an unknown axis, or
    sizes whose product is not the world size.
    """
    if unknown := set(sizes) - set(AXES):
        raise ValueError(f"unknown mesh axis {sorted(unknown)}; axes are {', '.join(AXES)}")
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if math.prod(sizes.values()) != world_size:
        asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {asked} does not match a world of {world_size} ranks")
    device, groups = torch.device(device), {}
    wide = [axis for axis in AXES if sizes[axis] > 1]
    if wide:
        shape = tuple(sizes[axis] for axis in wide)
        device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(wide))
        groups = {axis: device_mesh.get_group(axis) for axis in wide}
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Mesh(sizes, coordinates_of(rank, sizes), groups, device)
