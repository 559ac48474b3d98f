"""Saving: every rank writes what it owns, and one rename makes it a checkpoint.

A save that is killed at any moment leaves the previous checkpoints as they were, and a directory
`.saving_…` that is never read and that the next save removes. A rank that cannot write (disk full)
makes all ranks raise the same error.
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checkpoint.errors import CheckpointError, first_decides, together
from course_lib.checkpoint.files import sync_directory, write_tensors
from course_lib.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    WEIGHT,
    Manifest,
    Piece,
    StoredTensor,
    complete,
    holes,
    recover,
    step_of,
)
from course_lib.mesh import Mesh
from course_lib.parameters import Box, ParameterRecord

SAVING = ".saving_"  # prefix of a checkpoint that is not complete yet
REMOVING = ".removing_"  # prefix of one that is being deleted


def save(
    directory: str | Path,
    step: int,
    records: Iterable[ParameterRecord],
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    state: Mapping[str, Any],
    keep: int | None = None,
) -> Path:
    """Write the checkpoint `directory/step_N`, complete or not at all. Collective.

    records: this rank's parameters; each box is written by the rank that owns it.
    optimizer: its moments are saved with the same boxes; None saves weights only.
    state: what else the run needs to go on (steps, loss scaler, configuration, data fingerprint),
        as JSON allows it; the same on all ranks.
    keep: complete checkpoints that remain, the newest ones and always this one; None: all.
    An older checkpoint of the same step is replaced. All ranks must see one file system.
    Returns the path. Raises CheckpointError on all ranks alike, naming the rank, the file and the
    cause; then nothing is left of this save, and all earlier checkpoints are as they were.
    """
    directory, records = Path(directory), list(records)
    target = directory / f"step_{step}"
    temporary = first_decides(mesh, lambda: _prepare(directory, target.name))
    try:
        parts = together(mesh, lambda: _write_part(temporary, records, optimizer, mesh, state))
        first_decides(mesh, lambda: _commit(temporary, target, step, parts, optimizer, mesh, state))
    except CheckpointError as error:
        if mesh.is_first:  # every rank has stopped writing
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # the next save or `latest` tries it again
                recover(directory)
        raise CheckpointError(f"{target} was not saved: {error}") from error
    if mesh.is_first:
        _tidy(directory, target, keep)
    return target


def _prepare(directory: Path, name: str) -> Path:
    """Remove what killed saves left, and make the directory that this one writes to."""
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory)
    for prefix in (SAVING, REMOVING, REPLACED):
        for leftover in directory.glob(f"{prefix}step_*"):
            shutil.rmtree(leftover)
    # A name of its own: ranks of a killed run that still write cannot write into this one.
    temporary = directory / f"{SAVING}{name}_{secrets.token_hex(4)}"
    temporary.mkdir()
    return temporary


# -------------------------------------------------------------------------------- one rank's part


def _write_part(folder: Path, records, optimizer, mesh: Mesh, state: Mapping) -> dict:
    """Write this rank's files; returns what the manifest must say of them."""
    rank = dist.get_rank(mesh.world) if mesh.world is not None else 0
    files, tensors = {}, []
    for part, kinds in (("weights", _weights), ("optimizer", _moments)):
        name = f"{part}_{rank:05d}.safetensors"
        content: dict[str, Tensor] = {}
        for record in (record for record in records if record.owner):
            for kind, tensor in kinds(record, optimizer):
                pieces = []
                for box in record.boxes:
                    if box.elements:
                        key = _key(record, kind, box)
                        content[key] = tensor[box.local]
                        pieces.append(Piece(name, key, box.offset, box.size))
                dtype = str(tensor.dtype).removeprefix("torch.")
                tensors.append(
                    StoredTensor(record.name, kind, dtype, record.shape, record.tied, tuple(pieces))
                )
        if content:
            files[name] = _write_file(folder / name, content)
    sync_directory(folder)
    scalars = {record.name: _scalars(record, optimizer) for record in records}
    text = json.dumps(state, sort_keys=True)
    return {"files": files, "tensors": tensors, "scalars": scalars, "state": text}


def _write_file(path: Path, content: Mapping[str, Tensor]) -> dict:
    try:
        return write_tensors(path, content)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _key(record: ParameterRecord, kind: str, box: Box) -> str:
    """Name of a piece inside its file: the parameter's own name wherever it is whole."""
    name = record.name if kind == WEIGHT else f"{record.name}:{kind}"
    if box.size == record.shape:
        return name
    place = ",".join(f"{o}:{o + s}" for o, s in zip(box.offset, box.size))
    return f"{name}[{place}]"


def _weights(record: ParameterRecord, optimizer) -> Iterator[tuple[str, Tensor]]:
    yield WEIGHT, record.parameter


def _moments(record: ParameterRecord, optimizer) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps of each element."""
    for kind, value in _optimizer_state(record, optimizer).items():
        if isinstance(value, Tensor) and value.shape == record.parameter.shape:
            yield kind, value


def _scalars(record: ParameterRecord, optimizer) -> dict[str, dict]:
    """What the optimizer keeps once a parameter, such as Adam's step."""
    found, moments = {}, dict(_moments(record, optimizer))
    for kind, value in _optimizer_state(record, optimizer).items():
        if kind in moments:
            continue
        if isinstance(value, Tensor) and value.dim() == 0:
            dtype = str(value.dtype).removeprefix("torch.")
            found[kind] = {"value": value.item(), "dtype": dtype}
        elif isinstance(value, bool | int | float):
            found[kind] = {"value": value, "dtype": None}
        else:
            raise CheckpointError(
                f"cannot save {kind} of {record.name}, which {type(optimizer).__name__} keeps: "
                "only tensors of the parameter's shape and single numbers have boxes"
            )
    return found


def _optimizer_state(record: ParameterRecord, optimizer) -> dict[str, Any]:
    state = {} if optimizer is None else optimizer.state.get(record.parameter, {})
    return {kind: value for kind, value in state.items() if value is not None}


# -------------------------------------------------------------------------------- the first rank's


def _commit(temporary: Path, target: Path, step: int, parts, optimizer, mesh: Mesh, state) -> None:
    """Write the manifest of all ranks' files, and give the directory its final name."""
    if len({part["state"] for part in parts}) > 1:
        raise CheckpointError("the ranks do not agree on the run state that is to be saved")
    manifest = Manifest(
        step=step,
        mesh=dict(mesh.sizes),
        optimizer=type(optimizer).__name__ if optimizer is not None else None,
        tensors=_join_tensors(parts),
        scalars=_join_scalars(parts),
        files={name: entry for part in parts for name, entry in part["files"].items()},
        state=json.loads(parts[0]["state"]),
    )
    if faults := holes(manifest.tensors):
        raise CheckpointError(f"the ranks' boxes do not make whole tensors: {'; '.join(faults)}")
    for name, entry in manifest.files.items():
        found = (temporary / name).stat().st_size if (temporary / name).exists() else None
        if found != entry["bytes"]:
            raise CheckpointError(
                f"{temporary / name} is not as it was written; do all ranks see one file system?"
            )
    with open(temporary / MANIFEST, "x") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    sync_directory(temporary)
    if target.exists():  # put aside, not deleted: a kill between the renames loses nothing
        target.rename(target.parent / f"{REPLACED}{target.name}_{secrets.token_hex(4)}")
    temporary.rename(target)
    sync_directory(target.parent)


def _join_tensors(parts: list[dict]) -> tuple[StoredTensor, ...]:
    """One entry a tensor, with the pieces of all ranks."""
    joined: dict[tuple, StoredTensor] = {}
    for part in parts:
        for tensor in part["tensors"]:
            key = (tensor.name, tensor.kind)
            first = joined.setdefault(key, tensor)
            if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"the ranks do not agree on {tensor.name}: {first.kind} {list(first.shape)} "
                    f"{first.dtype} on one, {list(tensor.shape)} {tensor.dtype} on another"
                )
            if tensor is not first:
                joined[key] = replace(first, pieces=first.pieces + tensor.pieces)
    return tuple(joined.values())


def _join_scalars(parts: list[dict]) -> dict[str, dict]:
    joined: dict[str, dict] = {}
    for part in parts:
        for name, scalars in part["scalars"].items():
            if scalars and joined.setdefault(name, scalars) != scalars:
                raise CheckpointError(
                    f"the ranks do not agree on the optimizer's state of {name}: "
                    f"{joined[name]} and {scalars}"
                )
    return joined


def _tidy(directory: Path, newest: Path, keep: int | None) -> None:
    """Delete what was replaced, and the oldest checkpoints: renamed first, so never half there."""
    others = sorted((p for p in complete(directory) if p != newest), key=step_of)
    excess = 0 if keep is None else max(len(others) - max(keep - 1, 0), 0)
    try:
        for path in others[:excess]:
            path.rename(directory / f"{REMOVING}{path.name}_{secrets.token_hex(4)}")
        for prefix in (REPLACED, REMOVING):
            for leftover in directory.glob(f"{prefix}step_*"):
                shutil.rmtree(leftover)
    except OSError as error:  # the checkpoint is saved: training goes on
        warnings.warn(f"an old checkpoint was not removed: {error}", stacklevel=3)
