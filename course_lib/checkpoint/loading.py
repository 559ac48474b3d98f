"""Loading: what a rank holds is cut from whatever pieces were written, by any number of ranks.

Everything is checked before anything is changed: the manifest, the model's names, shapes and
dtypes, the size and sha256 of each file. All ranks agree after each stage, so either all of them
hold the checkpoint, or all raise the same error.
"""

from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from course_lib.boxes import intersection, whole
from course_lib.checkpoint.errors import CheckpointError, first_decides, listed, together
from course_lib.checkpoint.files import file_fault
from course_lib.checkpoint.manifest import Manifest, read_manifest, unusable
from course_lib.checkpoint.pieces import WEIGHT, Piece
from course_lib.mesh import Mesh
from course_lib.parameters import ParameterRecord


def load(
    path: str | Path,
    records: Iterable[ParameterRecord],
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
) -> dict[str, Any]:
    """Fill this rank's parameters and optimizer from a checkpoint of any layout. Collective.

    path: of one checkpoint (`…/step_20`; see `latest`).
    records: this rank's parameters, which change in place; local padding becomes zero.
    optimizer: of the same class as the saved one, fresh or used: its state is replaced. Learning
        rate and the like stay as they are. None: weights only.
    Returns the run state that was saved. Values are the saved bits. Raises CheckpointError on all
    ranks alike for damage (naming the file), for another model or optimizer (naming the first
    differences), and for what is not a checkpoint of this course; then nothing was changed.
    """
    path, records = Path(path), list(records)
    manifest = first_decides(mesh, lambda: read_manifest(path))
    _require_model(together(mesh, lambda: _described(records)), manifest)
    stored = _Stored(path, manifest)
    together(mesh, lambda: _require_optimizer(optimizer, records, manifest, stored))
    together(mesh, lambda: _verify(path, manifest, optimizer is None, mesh))
    together(mesh, lambda: _require_ties(records, stored))
    together(mesh, lambda: _fill(records, optimizer, stored))
    return manifest.state


def _described(records: list[ParameterRecord]) -> dict[str, str]:
    """Shape and dtype of this rank's parameters; a tied one under each of its names."""
    return {
        name: f"{list(record.shape)} {str(record.parameter.dtype).removeprefix('torch.')}"
        for record in records
        for name in (record.name, *record.tied)
    }


def _require_model(models: list[dict[str, str]], manifest: Manifest) -> None:
    """Compare all ranks' parameters with the stored ones."""
    here = {name: words for model in models for name, words in model.items()}
    there = {
        name: f"{list(piece.shape)} {piece.dtype}"
        for piece in manifest.pieces
        if piece.kind == WEIGHT
        for name in (piece.name, *piece.tied)
    }
    different = [
        f"{name} is {there.get(name, 'absent')} in the checkpoint, {here.get(name, 'absent')} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if different:
        raise CheckpointError(f"the checkpoint is of another model: {listed(different)}")


def _require_optimizer(optimizer, records, manifest: Manifest, stored: "_Stored") -> None:
    """The saved state must be of this optimizer, and of each parameter that it updates."""
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    if manifest.optimizer != kind:
        raise CheckpointError(
            f"the checkpoint holds state of {manifest.optimizer or 'no optimizer'}, this run uses "
            f"{kind}; load it with the same optimizer, or weights only (optimizer=None)"
        )
    updated = _groups(optimizer)
    bare = [r.name for r in records if r.parameter in updated and len(stored.kinds[r.name]) == 1]
    if bare and any(piece.kind != WEIGHT for piece in manifest.pieces):
        raise CheckpointError(f"the checkpoint holds no {kind} state of {bare[0]}")


def _verify(path: Path, manifest: Manifest, weights_only: bool, mesh: Mesh) -> None:
    """Check the files that will be read: each size on every rank, each hash on one of them."""
    rank = dist.get_rank(mesh.world) if mesh.world is not None else 0
    used = {p.file for p in manifest.pieces if p.kind == WEIGHT or not weights_only}
    for index, name in enumerate(sorted(used)):
        mine = index % mesh.world_size == rank
        if fault := file_fault(path / name, manifest.files[name], read=mine):
            raise unusable(path, f"{name} {fault}")


def _require_ties(records: list[ParameterRecord], stored: "_Stored") -> None:
    """What is one tensor here, and was saved as several (on other stages), must have been equal."""
    for record in records:
        for name in record.tied:
            copies = [stored.read(record, n, WEIGHT) for n in (record.name, name)]
            if not torch.equal(*copies):
                raise CheckpointError(
                    f"the checkpoint is of another model: {record.name} and {name} differ in it, "
                    "here they are tied"
                )


@torch.no_grad()
def _fill(records: list[ParameterRecord], optimizer, stored: "_Stored") -> None:
    """Replace parameters, and the optimizer's state of those that it updates."""
    groups = _groups(optimizer)
    if optimizer is not None:
        optimizer.state.clear()
    for record in records:
        parameter, group = record.parameter, groups.get(record.parameter)
        parameter.copy_(stored.read(record, record.name, WEIGHT))
        if group is None:
            continue
        near = group.get("fused") or group.get("capturable")  # Adam's step: beside it, or not
        for kind in stored.kinds[record.name]:
            if kind != WEIGHT:
                value = stored.read(record, record.name, kind)
                device = parameter.device if value.dim() or near else "cpu"
                optimizer.state[parameter][kind] = value.to(device)


def _groups(optimizer) -> dict[Tensor, dict]:
    """Each parameter that the optimizer updates, and its group."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {parameter: group for group in groups for parameter in group["params"]}


class _Stored:
    """The values in a checkpoint, by the parameter's name or tied name."""

    def __init__(self, path: Path, manifest: Manifest):
        self.open_file = cache(lambda name: safe_open(path / name, "pt"))
        self.kinds: dict[str, dict[str, list[Piece]]] = {}  # name -> kind -> pieces
        for piece in manifest.pieces:
            for name in (piece.name, *piece.tied):
                self.kinds.setdefault(name, {}).setdefault(piece.kind, []).append(piece)

    def read(self, record: ParameterRecord, name: str, kind: str) -> Tensor:
        """The local tensor, on the CPU, that holds this rank's boxes; what no box covers is 0."""
        pieces = self.kinds[name][kind]
        shape, boxes = record.parameter.shape, record.boxes
        if not pieces[0].shape:  # one number for the whole parameter
            shape, boxes = (), (whole(()),)
        local = torch.zeros(shape, dtype=getattr(torch, pieces[0].dtype))
        for box, piece in product(boxes, pieces):
            if shared := intersection(box, piece):
                begin = [o - i for o, i in zip(box.offset, box.local_offset)]
                there = self.open_file(piece.file).get_slice(piece.key)
                local[_slices(shared, begin)] = there[_slices(shared, piece.offset)]
        return local


def _slices(shared: tuple[list[int], list[int]], begin: Iterable[int]) -> tuple[slice, ...]:
    """Where a rectangle lies in a tensor whose first element is at this global place."""
    return tuple(slice(start - b, stop - b) for start, stop, b in zip(*shared, begin))
