"""Tensors in safetensors files: written one at a time, hashed on the way, read by rectangles.

The format is 8 bytes for the header's length, a JSON header (dtype, shape and byte range of each
tensor), then the bytes. Writing it here takes a few lines. It needs memory for one tensor only,
makes the hash without reading the file again, and never writes more than the part asked for.
Reading uses the safetensors library. Neither way can run code, which a pickle can.

Format: https://huggingface.co/docs/safetensors
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

# Names of dtypes in the file format.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict:
    """Write a new safetensors file and wait until the disk has it.

    tensors: of any device and any strides; of a view, only the elements it shows are written.
    Returns {"bytes": size, "sha256": hash} of the file. Raises OSError (disk full, file exists).
    """
    # The widest elements first: then every tensor begins at a multiple of its element size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for block in _blocks(ordered):
            digest.update(block)
            file.write(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator:
    """The file's content: the header, then each tensor's bytes."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for key, tensor in tensors.items():
        place = [start, start + tensor.nbytes]
        shape = list(tensor.shape)
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": place}
        start += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        dense = tensor.detach().cpu().contiguous().view(-1)
        yield memoryview(dense.view(torch.uint8).numpy())


def file_fault(path: Path, expected: Mapping, read: bool = True) -> str | None:
    """What is wrong with a file, in words; None where it is what was written.

    expected: {"bytes": …, "sha256": …} as `write_tensors` returned it.
    read: False compares only the size.
    """
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            verb = "truncated" if size < expected["bytes"] else "altered"
            return f"is {verb}: {size:,} bytes, {expected['bytes']:,} were written"
        if read:
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return "is altered: its sha256 is not the one in the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory (a rename is only safe after this)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)
