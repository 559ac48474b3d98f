"""Loading: what a rank holds is cut from whatever boxes were written, by any number of ranks.

Everything is checked before anything is changed: the manifest, the model's names, shapes and
dtypes, the size and sha256 of each file. All ranks agree after each stage, so either all of them
hold the checkpoint, or all raise the same error.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from course_lib.checkpoint.boxes import intersection, slices
from course_lib.checkpoint.errors import CheckpointError, first_decides, together
from course_lib.checkpoint.files import file_fault
from course_lib.checkpoint.manifest import (
    WEIGHT,
    Manifest,
    StoredTensor,
    damaged,
    holes,
    read_manifest,
)
from course_lib.mesh import Mesh
from course_lib.parameters import Box, ParameterRecord

NAMED = 5  # differences that an error names


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
    ranks alike for damage (naming the file, and the other complete checkpoints), for another
    model or optimizer (naming the first differences), and for what is not a checkpoint of this
    course; then nothing was changed.
    """
    path, records = Path(path), list(records)
    manifest = first_decides(mesh, lambda: read_manifest(path))
    if faults := holes(manifest.tensors):
        raise damaged(path, "manifest.json", f"lacks {faults[0]}")
    models = together(mesh, lambda: _described(records))
    _require_model({name: entry for model in models for name, entry in model.items()}, manifest)
    stored = _by_name(manifest)
    together(mesh, lambda: _require_optimizer(optimizer, records, manifest, stored))
    together(mesh, lambda: _verify(path, manifest, optimizer is None, mesh))
    together(mesh, lambda: _require_ties(path, records, stored))
    together(mesh, lambda: _fill_all(path, records, optimizer, manifest, stored))
    return manifest.state


# -------------------------------------------------------------------------------- the checks


def _described(records: list[ParameterRecord]) -> dict[str, tuple]:
    """This rank's parameters: name -> (shape, dtype, other names)."""
    return {r.name: (r.shape, _dtype_name(r.parameter.dtype), r.tied) for r in records}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_model(model: Mapping[str, tuple], manifest: Manifest) -> None:
    """Compare all ranks' parameters with the stored ones; a tied one counts under each name."""
    here = {
        alias: f"{list(shape)} {dtype}"
        for name, (shape, dtype, tied) in model.items()
        for alias in (name, *tied)
    }
    there = {
        alias: f"{list(tensor.shape)} {tensor.dtype}"
        for tensor in manifest.tensors
        if tensor.kind == WEIGHT
        for alias in (tensor.name, *tensor.tied)
    }
    different = [
        f"{name} is {there.get(name, 'absent')} in the checkpoint, {here.get(name, 'absent')} here"
        for name in (*there, *(n for n in here if n not in there))
        if there.get(name) != here.get(name)
    ]
    if different:
        shown = "; ".join(different[:NAMED])
        more = f"; and {len(different) - NAMED} more" if len(different) > NAMED else ""
        raise CheckpointError(f"the checkpoint is of another model: {shown}{more}")


def _by_name(manifest: Manifest) -> dict[str, dict[str, StoredTensor]]:
    """name or tied name -> kind -> the stored tensor."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in manifest.tensors:
        for name in (tensor.name, *tensor.tied):
            found.setdefault(name, {}).setdefault(tensor.kind, tensor)
    return found


def _require_optimizer(optimizer, records, manifest: Manifest, stored) -> None:
    """The saved state must be of this optimizer, and of each parameter that it updates."""
    if optimizer is None:
        return
    kind = type(optimizer).__name__
    if manifest.optimizer != kind:
        raise CheckpointError(
            f"the checkpoint holds state of {manifest.optimizer or 'no optimizer'}, this run uses "
            f"{kind}; load it with the same optimizer, or weights only (optimizer=None)"
        )
    if not manifest.kinds():
        return
    updated = _parameters(optimizer)
    for record in records:
        if record.parameter in updated and len(stored[record.name]) == 1:
            raise CheckpointError(f"the checkpoint holds no {kind} state of {record.name}")


def _parameters(optimizer) -> dict[Tensor, dict]:
    """The optimizer's parameters, and the group of each."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def _verify(path: Path, manifest: Manifest, weights_only: bool, mesh: Mesh) -> None:
    """Check the files that will be read: each size on every rank, each hash on one of them."""
    kinds = {WEIGHT} if weights_only else manifest.kinds() | {WEIGHT}
    used = {p.file for t in manifest.tensors if t.kind in kinds for p in t.pieces}
    rank, ranks = 0, 1
    if mesh.world is not None:
        rank, ranks = dist.get_rank(mesh.world), mesh.world_size
    for index, name in enumerate(sorted(used)):
        fault = file_fault(path / name, manifest.files[name], read=index % ranks == rank)
        if fault:
            raise damaged(path, name, fault)


def _require_ties(path: Path, records, stored) -> None:
    """What is one tensor here, and was saved as several (on other stages), must have been equal."""
    for record in records:
        copies = {id(stored[name][WEIGHT]): name for name in (record.name, *record.tied)}
        if len(copies) == 1:
            continue
        with ExitStack() as stack:
            read = [torch.empty_like(record.parameter) for _ in copies]
            for local, name in zip(read, copies.values()):
                _fill(local, record.boxes, stored[name][WEIGHT], path, {}, stack)
        for name, copy in zip(copies.values(), read):
            if not torch.equal(copy, read[0]):
                raise CheckpointError(
                    f"the checkpoint is of another model: {record.name} and {name} differ in it, "
                    "here they are tied"
                )


# -------------------------------------------------------------------------------- the values


@torch.no_grad()
def _fill_all(path: Path, records, optimizer, manifest: Manifest, stored) -> None:
    groups = {} if optimizer is None else _parameters(optimizer)
    if optimizer is not None:
        optimizer.state.clear()
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for record in records:
            kinds = stored[record.name]
            _fill(record.parameter, record.boxes, kinds[WEIGHT], path, files, stack)
            if record.parameter not in groups or len(kinds) == 1:
                continue
            scalars = manifest.scalars.get(kinds[WEIGHT].name, {})
            optimizer.state[record.parameter] = _scalar_state(
                scalars, record.parameter, groups[record.parameter]
            )
            for kind, tensor in kinds.items():
                if kind != WEIGHT:
                    dtype = getattr(torch, tensor.dtype)
                    moment = torch.empty_like(record.parameter, dtype=dtype)
                    _fill(moment, record.boxes, tensor, path, files, stack)
                    optimizer.state[record.parameter][kind] = moment


def _scalar_state(scalars: Mapping, parameter: Tensor, group: Mapping) -> dict[str, Any]:
    """Adam's step and the like. Fused and capturable optimizers keep them beside the parameter."""
    near = group.get("fused") or group.get("capturable")
    device = parameter.device if near else "cpu"
    return {
        kind: entry["value"]
        if entry["dtype"] is None
        else torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]), device=device)
        for kind, entry in scalars.items()
    }


def _fill(
    local: Tensor, boxes: tuple[Box, ...], stored: StoredTensor, path: Path, files, stack
) -> None:
    """Copy into a local tensor what its boxes share with the stored ones; the rest becomes 0."""
    local.zero_()
    for box in boxes:
        for piece in stored.pieces:
            shared = intersection((box.offset, box.size), piece.box)
            if shared is None:
                continue
            if piece.file not in files:
                files[piece.file] = stack.enter_context(safe_open(path / piece.file, "pt"))
            here = slices(shared, [o - i for o, i in zip(box.offset, box.local_offset)])
            local[here] = _read(files[piece.file], piece.key, slices(shared, piece.offset)).to(
                local.device
            )


def _read(file, key: str, place: tuple[slice, ...]) -> Tensor:
    return file.get_slice(key)[place] if place else file.get_tensor(key)
