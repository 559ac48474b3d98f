"""The manifest: what a checkpoint holds, where each piece lies, and how to know that it is whole.

On disk::

    checkpoints/
        step_20/                       complete: a directory of this name appears by one rename
            manifest.json
            weights_00000_000.safetensors      the boxes that rank 0 owns, by global name
            optimizer_00000_000.safetensors    what the optimizer keeps of them
            weights_00001_000.safetensors      … of rank 1
        .partial_step_30_5f2c8e1a/     a save that is running, or was killed: never read
"""

import hashlib
import json
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.checkpoint.errors import CheckpointError, first_decides
from course_lib.checkpoint.files import file_fault
from course_lib.checkpoint.pieces import Piece
from course_lib.mesh import Mesh

MANIFEST = "manifest.json"
FORMAT = "one-gpu-to-many checkpoint, version 1"
STEP_NAME = re.compile(r"step_\d+")
REPLACED = ".replaced_"  # prefix of a checkpoint that one of the same step is about to replace


@dataclass(frozen=True)
class Manifest:
    """All that `manifest.json` says."""

    step: int
    mesh: dict[str, int]  # sizes of the axes that wrote it, for the reader's information
    optimizer: str | None  # class of the optimizer; None: weights only
    pieces: tuple[Piece, ...]
    files: dict[str, dict]  # name -> {"bytes": …, "sha256": …}
    state: dict[str, Any]  # of the run: steps, loss scaler, fingerprints, configuration

    def to_json(self) -> str:
        """The manifest's text, with a hash of its own content."""
        content = asdict(self)
        return json.dumps({"format": FORMAT, "sha256": _hash(content), "content": content})


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of one checkpoint directory (`…/checkpoints/step_20`); reads JSON only.

    Raises CheckpointError where it is not there, damaged, of another version, not of this course,
    or under the name of another step.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        inside = complete(path)
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        never = "pickled files are never opened here"
        raise CheckpointError(f"{path} is no checkpoint, {MANIFEST} is missing; {never}{hint}")
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
        if outer["format"] != FORMAT:
            raise unusable(path, f"{MANIFEST} is of format {outer['format']!r}, not {FORMAT!r}")
        content = outer["content"]
        if _hash(content) != outer["sha256"]:
            raise unusable(path, f"{MANIFEST} is altered: its sha256 is not that of its content")
        content["pieces"] = tuple(Piece(**piece) for piece in content["pieces"])
        manifest = Manifest(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unusable(path, f"{MANIFEST} cannot be read: {error!r}") from error
    own_name = f"step_{manifest.step}"
    if STEP_NAME.fullmatch(path.name) and path.name != own_name:
        raise unusable(path, f"it was saved as {own_name} (rename it back)")
    return manifest


def unusable(path: Path, fault: str) -> CheckpointError:
    """The error for a damaged or foreign checkpoint."""
    advice = "move it away to use the newest complete one"
    return CheckpointError(f"checkpoint {path} cannot be loaded: {fault}; {advice}")


# -------------------------------------------------------------------------------- finding them


def latest(directory: str | Path, mesh: Mesh | None = None) -> Path | None:
    """The newest complete checkpoint in a directory; None where there is none.

    The first rank looks and decides, the others get its answer: collective where a mesh is given.
    A checkpoint with a missing or truncated file is passed over, with a warning, for an older one.
    Raises CheckpointError where there are only damaged ones: a run must not start again unasked.
    """
    mesh = mesh or Mesh.single()

    def look() -> tuple[Path | None, str]:
        recover(Path(directory))
        faults = _faults(directory)
        whole = [path for path, fault in faults.items() if fault is None]
        words = "; ".join(filter(None, faults.values()))
        if faults and not whole:
            raise CheckpointError(
                f"{directory} holds only damaged checkpoints ({words}); restore one, or move "
                "them away to start again"
            )
        return (whole[-1] if whole else None), words

    newest, damaged = first_decides(mesh, look)
    if damaged and mesh.is_first:
        warnings.warn(f"damaged checkpoints are passed over: {damaged}", stacklevel=2)
    return newest


def complete(directory: str | Path) -> list[Path]:
    """All complete checkpoints in a directory, the newest last; sizes are checked, not hashes."""
    return [path for path, fault in _faults(directory).items() if fault is None]


def _faults(directory: str | Path) -> dict[Path, str | None]:
    """What is missing or truncated in each checkpoint of a directory; the newest last."""
    found = [path for path in Path(directory).glob("step_*") if STEP_NAME.fullmatch(path.name)]
    ordered = sorted(found, key=lambda path: int(path.name.removeprefix("step_")))
    return {path: _incomplete(path) for path in ordered}


def _incomplete(path: Path) -> str | None:
    try:
        files = read_manifest(path).files
    except CheckpointError as error:
        return str(error)
    for name, expected in files.items():
        if fault := file_fault(path / name, expected, read=False):
            return f"{path.name}: {name} {fault}"
    return None


def recover(directory: Path) -> None:
    """Put back what a save of the same step had moved aside, if it was killed before its commit."""
    for path in directory.glob(f"{REPLACED}step_*"):
        target = directory / path.name.removeprefix(REPLACED).rpartition("_")[0]
        if not target.exists() and _incomplete(path) is None:
            path.rename(target)
