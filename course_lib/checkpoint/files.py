"""Files: tensors in the safetensors format, with a size and a hash by which damage is found.

Only this format is read. It is a table and bytes, so reading it cannot run code, which a pickle
can. Format and library: https://huggingface.co/docs/safetensors
"""

import errno
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from course_lib.checkpoint.errors import CheckpointError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict:
    """Write a safetensors file, and wait until the disk has it.

    tensors: of any device and strides; of a view, only the elements that it shows are written.
    Returns {"bytes": size, "sha256": hash} of the file. Raises CheckpointError (disk full, …).
    """
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        path.touch(exist_ok=False)
        mode = path.stat().st_mode
        save_file(dense, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors 0.8 makes files that only their owner can read
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": _hash(path)}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def file_fault(path: Path, expected: Mapping, read: bool = True) -> str | None:
    """What is wrong with a file, in words; None where it is what `write_tensors` wrote.

    expected: what `write_tensors` returned. read: False compares only the size.
    """
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        verb = "truncated" if size < expected["bytes"] else "altered"
        return f"is {verb}: {size:,} bytes, {expected['bytes']:,} were written"
    if read and _hash(path) != expected["sha256"]:
        return "is altered: its sha256 is not the one in the manifest"
    return None


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a directory (renames need both)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)
