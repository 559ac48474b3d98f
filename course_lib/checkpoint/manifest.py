"""The manifest: what a checkpoint holds, where each piece lies, and how to know that it is whole.

    checkpoints/
        step_20/                       complete: a directory of this name appears by one rename
            manifest.json
            weights_00000.safetensors      the boxes that rank 0 owns, by global name
            optimizer_00000.safetensors    the optimizer's moments, of the same boxes
            weights_00001.safetensors      …
        .saving_step_30_5f2c8e1a/      a save that is running, or was killed: never read

The manifest lists every tensor by its name in the plain model with its global shape, and for each
box its place in the global tensor and in a file. So it does not matter which ranks wrote it.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_lib.checkpoint.boxes import Rectangle, tiling_fault
from course_lib.checkpoint.errors import CheckpointError, first_decides
from course_lib.checkpoint.files import file_fault
from course_lib.mesh import Mesh

MANIFEST = "manifest.json"
FORMAT = "one-gpu-to-many checkpoint"
VERSION = 1
WEIGHT = "weight"  # the kind of a parameter's own values; other kinds are the optimizer's
STEP = re.compile(r"step_(\d+)")
REPLACED = ".replaced_"  # prefix of a checkpoint that one of the same step is about to replace
PICKLES = {".pt", ".pth", ".bin", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: its place in the global tensor, and in which file it is."""

    file: str
    key: str  # in the file
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> Rectangle:
        """Its place in the global tensor."""
        return self.offset, self.size


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor in the checkpoint: a parameter, or one of the optimizer's moments of it."""

    name: str  # of the parameter, in the plain model
    kind: str  # "weight", or the optimizer's word: "exp_avg", "exp_avg_sq", …
    dtype: str
    shape: tuple[int, ...]
    tied: tuple[str, ...]  # other names of the same parameter
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """All that `manifest.json` says."""

    step: int
    mesh: dict[str, int]  # sizes of the axes that wrote it, for the reader's information
    optimizer: str | None  # class of the optimizer; None: weights only
    tensors: tuple[StoredTensor, ...]
    scalars: dict[str, dict[str, dict]]  # name -> e.g. {"step": {"value": 20.0, "dtype": …}}
    files: dict[str, dict]  # name -> {"bytes": …, "sha256": …}
    state: dict[str, Any]  # of the run: steps, loss scaler, fingerprints, configuration

    def to_json(self) -> str:
        """The manifest's text, with a hash of its own content."""
        content = asdict(self)
        outer = {"format": FORMAT, "version": VERSION, "sha256": _hash(content)}
        return json.dumps({**outer, "content": content})

    def kinds(self) -> set[str]:
        """What is stored of parameters besides their values."""
        return {tensor.kind for tensor in self.tensors} - {WEIGHT}


def _hash(content: Any) -> str:
    # Through JSON and back, so that it is the same for tuples and for the lists read back.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------- reading one


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of one checkpoint directory (`…/checkpoints/step_20`).

    Reads JSON only. Raises CheckpointError where it is not there, damaged, of a newer format, or
    something else than a checkpoint of this course.
    """
    path = Path(path)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(_not_a_checkpoint(path))
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(path, MANIFEST, f"cannot be read: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        found = outer.get("format") if isinstance(outer, dict) else None
        raise CheckpointError(
            f"{path / MANIFEST} is not of this course: its format is {found!r}, not {FORMAT!r}"
        )
    if outer.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format version {outer.get('version')!r}; this library reads "
            f"version {VERSION}: use the library that wrote it"
        )
    if _hash(outer.get("content")) != outer.get("sha256"):
        raise damaged(path, MANIFEST, "is altered: its content does not match its own sha256")
    try:
        return _from_content(outer["content"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, MANIFEST, f"is altered: {error!r}") from error


def _from_content(content: dict) -> Manifest:
    for name in content["files"]:
        if Path(name).name != name:  # "../x" must not lead out of the checkpoint
            raise ValueError(f"file name {name!r}")
    tensors = []
    for entry in content["tensors"]:
        pieces = [
            Piece(p["file"], p["key"], tuple(p["offset"]), tuple(p["size"]))
            for p in entry["pieces"]
        ]
        if unknown := {piece.file for piece in pieces} - content["files"].keys():
            raise ValueError(f"unlisted files {sorted(unknown)}")
        shapes = {"shape": tuple(entry["shape"]), "tied": tuple(entry["tied"])}
        tensors.append(StoredTensor(**{**entry, **shapes, "pieces": tuple(pieces)}))
    return Manifest(**{**content, "tensors": tuple(tensors)})


def holes(tensors: tuple[StoredTensor, ...]) -> list[str]:
    """Tensors whose boxes do not hold every element exactly once, each with what is wrong."""
    faults = []
    for tensor in tensors:
        fault = tiling_fault(tensor.shape, [piece.box for piece in tensor.pieces])
        if fault:
            faults.append(f"{tensor.kind} of {tensor.name} {list(tensor.shape)}: {fault}")
    return faults


def damaged(path: Path, file: str, fault: str) -> CheckpointError:
    """The error for a checkpoint that is not whole; it names the other ones that are."""
    return CheckpointError(f"checkpoint {path} is damaged: {file} {fault} ({_beside(path)})")


def _not_a_checkpoint(path: Path) -> str:
    never = "pickled files are never opened here, since they can run code"
    if path.is_file():
        what = f"; {never}" if path.suffix in PICKLES else ""
        return f"{path} is a file: a checkpoint is a directory step_N with {MANIFEST}{what}"
    if not path.is_dir():
        return f"there is no checkpoint {path} ({_beside(path)})"
    message = f"{path} holds no {MANIFEST}: it is not a checkpoint of this course"
    names = sorted(child.name for child in path.iterdir())
    if inside := complete(path):
        return f"{message}; did you mean {inside[-1]}?"
    if foreign := [n for n in names if Path(n).suffix in PICKLES or n == ".metadata"]:
        return f"{message}; {foreign[0]} looks like a pickle: {never}"
    return f"{message}; it holds {', '.join(names[:5]) or 'nothing'} ({_beside(path)})"


def _beside(path: Path) -> str:
    others = [other.name for other in complete(path.parent) if other != path]
    return f"complete ones beside it: {', '.join(others)}" if others else "none other is there"


# -------------------------------------------------------------------------------- finding them


def latest(directory: str | Path, mesh: Mesh | None = None) -> Path | None:
    """The newest complete checkpoint in a directory; None where there is none.

    The first rank looks and decides, the others get its answer: collective where a mesh is given.
    A checkpoint with a missing or truncated file is passed over, with a warning, for an older one.
    What a killed save left behind is never taken.
    Raises CheckpointError where there are only damaged ones: a run must not start again unasked.
    """
    passed_over: dict[Path, str] = {}

    def newest() -> Path | None:
        recover(Path(directory))
        found = complete(directory, passed_over)
        if passed_over and not found:
            faults = "; ".join(f"{path.name}: {fault}" for path, fault in passed_over.items())
            raise CheckpointError(
                f"{directory} holds only damaged checkpoints ({faults}); restore one, or move "
                "them away to start again"
            )
        return found[-1] if found else None

    path = first_decides(mesh or Mesh.single(), newest)
    for damaged_path, fault in passed_over.items():
        warnings.warn(f"checkpoint {damaged_path} is passed over: {fault}", stacklevel=2)
    return path


def complete(directory: str | Path, passed_over: dict[Path, str] | None = None) -> list[Path]:
    """All complete checkpoints in a directory, the newest last; sizes are checked, not hashes.

    passed_over: is filled with those that are not, and why.
    """
    directory, found = Path(directory), []
    if not directory.is_dir():
        return []
    for path in directory.iterdir():
        if not (STEP.fullmatch(path.name) and path.is_dir()):
            continue
        fault = _incomplete(path)
        if fault is None:
            found.append(path)
        elif passed_over is not None:
            passed_over[path] = fault
    return sorted(found, key=step_of)


def recover(directory: Path) -> None:
    """Put back what a save of the same step had moved aside, if it was killed before its commit."""
    for path in directory.glob(f"{REPLACED}step_*"):
        target = directory / path.name.removeprefix(REPLACED).rpartition("_")[0]
        if not target.exists() and _incomplete(path) is None:
            path.rename(target)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(STEP.fullmatch(path.name).group(1))


def _incomplete(path: Path) -> str | None:
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
        if outer["format"] != FORMAT:
            return f"its format is {outer['format']!r}"
        for name, expected in outer["content"]["files"].items():
            if fault := file_fault(path / name, expected, read=False):
                return f"{name} {fault}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    return None


# -------------------------------------------------------------------------------- comparing


def require_same(
    stored: str | Path | Mapping[str, Any], current: Mapping[str, Any], ignore: tuple[str, ...] = ()
) -> None:
    """Refuse to go on with other data, another model or another recipe than the stored run's.

    stored: the checkpoint, or its run state. current: the same keys of this run; keys that it does
    not have at its top level are not compared. ignore: dotted keys that may differ.
    Raises CheckpointError naming every key that differs, with both values.
    """
    where = "the checkpoint"
    if not isinstance(stored, Mapping):
        where, stored = f"checkpoint {stored}", read_manifest(stored).state
    old = _flat(json.loads(json.dumps({key: stored[key] for key in current if key in stored})))
    new = _flat(json.loads(json.dumps(current)))
    different = [
        f"{key} is {_shown(old, key)} there and {_shown(new, key)} here"
        for key in sorted({*old, *new})
        if key not in ignore and (key not in old or key not in new or old[key] != new[key])
    ]
    if different:
        raise CheckpointError(f"{where} is of another run: {'; '.join(different)}")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "absent"
