"""Saving: every rank writes what it owns, and one rename makes it a checkpoint.

A save that is killed at any moment leaves the previous checkpoints as they were, and a directory
`.partial_…` that is never read and that the next save removes.
"""

import json
import secrets
import shutil
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.boxes import whole
from course_lib.checkpoint.errors import CheckpointError, first_decides, listed, together
from course_lib.checkpoint.files import file_fault, sync, write_tensors
from course_lib.checkpoint.manifest import MANIFEST, REPLACED, Manifest, complete, recover
from course_lib.checkpoint.pieces import WEIGHT, Piece, holes
from course_lib.mesh import Mesh
from course_lib.parameters import ParameterRecord

PARTIAL = ".partial_"  # prefix of a checkpoint that is being written or deleted
FILE_BYTES = 2**30  # a file ends after this: what a rank copies to CPU memory at once


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
    try:
        temporary = first_decides(mesh, lambda: _prepare(directory, target.name))
        parts = together(mesh, lambda: _write_part(temporary, records, optimizer, mesh, state))
        kind = None if optimizer is None else type(optimizer).__name__
        manifest = Manifest(step, dict(mesh.sizes), kind, *_joined(parts))
        first_decides(mesh, lambda: _commit(temporary, target, manifest))
    except CheckpointError as error:
        if mesh.is_first:  # every rank has stopped writing
            with suppress(OSError):  # the next save or `latest` tries it again
                _clean(directory)
        raise CheckpointError(f"{target} was not saved: {error}") from error
    if mesh.is_first:
        _remove_old(directory, target, keep)
    return target


def _prepare(directory: Path, name: str) -> Path:
    """Remove what killed saves left, and make the directory that this one writes to."""
    directory.mkdir(parents=True, exist_ok=True)
    _clean(directory)
    temporary = _aside(directory / name, PARTIAL)
    temporary.mkdir()
    return temporary


def _aside(path: Path, prefix: str) -> Path:
    """A name of its own: ranks of a killed run that still write cannot write into this one."""
    return path.with_name(f"{prefix}{path.name}_{secrets.token_hex(4)}")


def _clean(directory: Path) -> None:
    """Remove what is half written, half deleted or replaced."""
    recover(directory)
    for prefix in (PARTIAL, REPLACED):
        for leftover in directory.glob(f"{prefix}step_*"):
            shutil.rmtree(leftover)


def _write_part(
    folder: Path, records: list[ParameterRecord], optimizer, mesh: Mesh, state: Mapping
) -> tuple[list[Piece], dict[str, dict], str]:
    """Write this rank's files; returns what the manifest must say: pieces, files, run state."""
    rank = dist.get_rank(mesh.world) if mesh.world is not None else 0
    pieces: list[Piece] = []
    content: dict[str, dict[str, Tensor]] = {}  # file -> key -> a view, so nothing is copied yet
    size_bytes = Counter()
    for piece, tensor in _owned(records, optimizer):
        part = "weights" if piece.kind == WEIGHT else "optimizer"
        file = f"{part}_{rank:05d}_{size_bytes[part] // FILE_BYTES:03d}.safetensors"
        size_bytes[part] += tensor.nbytes
        content.setdefault(file, {})[piece.key] = tensor
        pieces.append(replace(piece, file=file))
    files = {file: write_tensors(folder / file, tensors) for file, tensors in content.items()}
    sync(folder)
    return pieces, files, json.dumps(state, sort_keys=True)


def _owned(records: list[ParameterRecord], optimizer) -> Iterator[tuple[Piece, Tensor]]:
    """What this rank writes: each box, as the manifest will describe it, and its values."""
    for record in (record for record in records if record.owner):
        for kind, value in _values(record, optimizer).items():
            shape, boxes = record.shape, record.boxes
            if value.dim() == 0:  # one number for the whole parameter, with the first element
                first = any(box.elements and not any(box.offset) for box in boxes)
                shape, boxes = (), (whole(()),) if first else ()
            dtype = str(value.dtype).removeprefix("torch.")
            for box in (box for box in boxes if box.elements):
                place = (shape, box.offset, box.size)
                yield Piece(record.name, record.tied, kind, dtype, *place, ""), value[box.local]


def _values(record: ParameterRecord, optimizer) -> dict[str, Tensor]:
    """A parameter, and what the optimizer keeps of each element, or once, such as Adam's step."""
    kept = {} if optimizer is None else optimizer.state.get(record.parameter, {})
    kept = {kind: value for kind, value in kept.items() if value is not None}
    for kind, value in kept.items():
        if getattr(value, "shape", None) not in (record.parameter.shape, ()):
            raise CheckpointError(
                f"cannot save the optimizer's {kind} of {record.name}: only tensors of the "
                "parameter's shape, or of one number, have boxes"
            )
    return {WEIGHT: record.parameter, **kept}


def _joined(parts: list[tuple]) -> tuple[tuple[Piece, ...], dict[str, dict], dict]:
    """What all ranks wrote, if it makes whole tensors: all pieces, all files, the run state."""
    if len({state for _, _, state in parts}) > 1:
        raise CheckpointError("the ranks do not agree on the run state that is to be saved")
    pieces = tuple(piece for found, _, _ in parts for piece in found)
    if faults := holes(pieces):
        raise CheckpointError(f"the ranks' boxes do not make whole tensors: {listed(faults)}")
    files = {name: entry for _, found, _ in parts for name, entry in found.items()}
    return pieces, files, json.loads(parts[0][2])


def _commit(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the directory its final name."""
    for name, entry in manifest.files.items():
        if fault := file_fault(temporary / name, entry, read=False):
            raise CheckpointError(f"{name} {fault}; do all ranks see one file system?")
    (temporary / MANIFEST).write_text(manifest.to_json())
    sync(temporary / MANIFEST)
    sync(temporary)
    if target.exists():  # put aside, not deleted: a kill between the renames loses nothing
        target.rename(_aside(target, REPLACED))
    temporary.rename(target)
    sync(target.parent)


def _remove_old(directory: Path, newest: Path, keep: int | None) -> None:
    """Delete the oldest checkpoints: renamed first, so that none is ever half there."""
    others = [path for path in reversed(complete(directory)) if path != newest]
    try:
        for path in [] if keep is None else others[max(keep - 1, 0) :]:
            path.rename(_aside(path, PARTIAL))
        _clean(directory)
    except OSError as error:  # the checkpoint is saved: training goes on
        warnings.warn(f"an old checkpoint was not removed: {error}", stacklevel=3)
