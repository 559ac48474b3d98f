"""Token shards: token ids in plain files, mapped into memory, with an index that guards them.

A folder of shards holds ``tokens-00000.bin`` … (little-endian ids, nothing else), the position
of each document's first token in ``documents.bin`` (int64), and ``index.json``, written last:
without it a folder is unfinished. Ids take 2 bytes up to a vocabulary of 65,536 and 4 beyond.
A plain ``astype`` would wrap larger ids silently (huggingface/transformers#2825), so ids are
checked when written and when opened.
"""

import hashlib
import json
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np

from course_lib.data.errors import DataError

FORMAT = 1
BLOCK_BYTES = 1 << 20  # one checksum a block tells where a file was altered
_DTYPES = ("uint16", "uint32")
_READ_BYTES = 1 << 22

_verified: set[tuple] = set()  # (path, size, time of change, vocab) that this process has checked


def token_dtype(vocab: int) -> np.dtype:
    """The smallest unsigned type for ids below ``vocab``: uint16 up to 65,536, else uint32."""
    if not 1 <= vocab <= 1 << 32:
        raise ValueError(f"a vocabulary of {vocab} entries is impossible; use 1 to {1 << 32}")
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def checked_ids(ids: Iterable[int] | np.ndarray, vocab: int) -> np.ndarray:
    """Ids as an array of ``token_dtype(vocab)``, or ValueError for any id outside 0 … vocab - 1."""
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if ids.size == 0:
        return np.empty(0, token_dtype(vocab))
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be a list of integers, not {ids.dtype} of {ids.shape}")
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab:
            raise ValueError(f"token id {extreme} is outside the vocabulary, 0 to {vocab - 1}")
    return ids.astype(token_dtype(vocab))


class ShardWriter:
    """Write documents as token shards; use it in a ``with`` block.

    Each file gets its final name when it is complete, the index when all are. After an error
    there is no index, and ``TokenShards`` refuses the folder.

    Args:
        directory: folder to write to; made if absent.
        vocab: size of the vocabulary; larger ids are refused with ValueError.
        tokenizer_sha256: hash of the tokenizer, kept in the index.
        tokens_per_shard: tokens a file holds at most. Documents may go on in the next file.
    """

    def __init__(
        self,
        directory: str | Path,
        vocab: int,
        tokenizer_sha256: str = "",
        tokens_per_shard: int = 1 << 28,
    ) -> None:
        if tokens_per_shard < 1:
            raise ValueError(f"tokens_per_shard is {tokens_per_shard}; use 1 or more")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.vocab = vocab
        self.dtype = token_dtype(vocab)
        self.tokens = 0
        self._text_bytes = 0
        self._tokenizer_sha256 = tokenizer_sha256
        self._shard_bytes = tokens_per_shard * self.dtype.itemsize
        self._starts = array("q")
        self._entries: list[dict] = []
        self._file: _HashedFile | None = None

    def add(self, ids: Iterable[int] | np.ndarray, text_bytes: int) -> None:
        """Append one document: its token ids (tokens,) and the UTF-8 bytes of its text."""
        data = memoryview(checked_ids(ids, self.vocab).tobytes())
        self._starts.append(self.tokens)
        self._text_bytes += text_bytes
        self.tokens += len(data) // self.dtype.itemsize
        while data:
            if self._file is None:
                name = f"tokens-{len(self._entries):05d}.bin"
                self._file = _HashedFile(self.directory / name)
            room = self._shard_bytes - self._file.bytes
            self._file.write(data[:room])
            data = data[room:]
            if self._file.bytes == self._shard_bytes:
                self._finish_shard()

    def close(self) -> None:
        """Complete the last file and write the index."""
        if self._file is not None:
            self._finish_shard()
        starts = _HashedFile(self.directory / "documents.bin")
        starts.write(memoryview(np.frombuffer(self._starts, "q").astype("<i8").tobytes()))
        index = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "vocab": self.vocab,
            "tokens": self.tokens,
            "documents": len(self._starts),
            "text_bytes": self._text_bytes,
            "tokenizer_sha256": self._tokenizer_sha256,
            "shards": self._entries,
            "starts": starts.finish(),
        }
        partial = self.directory / "index.json.partial"
        partial.write_text(json.dumps(index, indent=1) + "\n")
        partial.replace(self.directory / "index.json")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.abandon()

    def _finish_shard(self) -> None:
        self._entries.append(self._file.finish())
        self._file = None


class TokenShards:
    """The tokens of a folder of shards as one long row, read through memory maps.

    Opening checks every file once in a process: size, sha256, and that every id is below the
    vocabulary. It reads in pieces, at the speed of the disk.

    Args:
        directory: folder that a ``ShardWriter`` wrote.
        vocab: the model's vocabulary, if it is to be held against the ids.
        verify: False checks sizes only: for a second look at files that were checked before.
    Attributes:
        vocab, documents, text_bytes, tokenizer_sha256: as in the index.
        starts: position of each document's first token, int64 (documents,).
        sha256: identifies the tokens and the documents' bounds.
    Raises:
        DataError: damaged, foreign or unfitting files, with the name and, if known, the byte.
    """

    def __init__(
        self, directory: str | Path, vocab: int | None = None, verify: bool = True
    ) -> None:
        self.directory = Path(directory)
        index = _read_index(self.directory)
        self.vocab: int = index["vocab"]
        self.documents: int = index["documents"]
        self.text_bytes: int = index["text_bytes"]
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self._arguments = (self.directory, vocab, verify)
        self._tokens: int = index["tokens"]
        limit = self.vocab if vocab is None else min(vocab, self.vocab)
        for entry in index["shards"]:
            _check_file(self.directory, entry, self.dtype, limit if verify else None)
        _check_file(
            self.directory, index["starts"], np.dtype("<i8"), self._tokens + 1 if verify else None
        )
        self.starts = self._map(index["starts"], np.dtype("<i8"))
        self._shards = [self._map(entry, self.dtype) for entry in index["shards"]]
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        identity = [entry["sha256"] for entry in (*index["shards"], index["starts"])]
        self.sha256 = hashlib.sha256(" ".join([index["dtype"], *identity]).encode()).hexdigest()

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens start … stop - 1: int64, (stop - start,)."""
        if not 0 <= start <= stop <= self._tokens:
            raise IndexError(f"tokens {start} to {stop} are outside 0 to {self._tokens}")
        out = np.empty(stop - start, np.int64)
        position, shard = start, bisect_right(self._ends, start)
        while position < stop:
            begin = self._ends[shard] - len(self._shards[shard])
            end = min(stop, self._ends[shard])
            out[position - start : end - start] = self._shards[shard][
                position - begin : end - begin
            ]
            position, shard = end, shard + 1
        return out

    def __reduce__(self) -> tuple:
        return TokenShards, self._arguments  # another process maps the files, no copy is sent

    def _map(self, entry: dict, dtype: np.dtype) -> np.ndarray:
        if entry["bytes"] == 0:
            return np.empty(0, dtype)
        return np.memmap(self.directory / entry["file"], dtype, mode="r")


class _HashedFile:
    """A file under a temporary name, hashed while it is written, renamed when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._partial = path.with_name(path.name + ".partial")
        self._file = self._partial.open("wb")
        self._buffer = bytearray()
        self._sha256 = hashlib.sha256()
        self._crc32: list[int] = []

    def write(self, data: memoryview) -> None:
        self.bytes += len(data)
        self._buffer += data
        while len(self._buffer) >= BLOCK_BYTES:
            self._flush_block()

    def finish(self) -> dict:
        """Rename the file; return its entry in the index."""
        if self._buffer:
            self._flush_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        return {
            "file": self.path.name,
            "bytes": self.bytes,
            "sha256": self._sha256.hexdigest(),
            "crc32": self._crc32,
        }

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _flush_block(self) -> None:
        block = bytes(self._buffer[:BLOCK_BYTES])
        del self._buffer[:BLOCK_BYTES]
        self._file.write(block)
        self._sha256.update(block)
        self._crc32.append(zlib.crc32(block))


def _read_index(directory: Path) -> dict:
    path = directory / "index.json"
    try:
        index = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"{directory} holds no finished token shards: there is no index.json. It is another "
            "folder, or writing it was interrupted; prepare the data again."
        ) from None
    except ValueError as problem:
        raise DataError(f"{path} is damaged: {problem}. Prepare the data again.") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else None
        raise DataError(f"{path} has format {found!r}; this version reads format {FORMAT}")
    fields = {
        "dtype": str, "vocab": int, "tokens": int, "documents": int, "text_bytes": int,
        "tokenizer_sha256": str, "shards": list, "starts": dict,
    }  # fmt: skip
    for name, kind in fields.items():
        if not isinstance(index.get(name), kind):
            raise DataError(
                f"{path} is damaged: {name!r} is {index.get(name)!r}, not {kind.__name__}"
            )
    for entry in (*index["shards"], index["starts"]):
        if not isinstance(entry, dict) or not {"file", "bytes", "sha256", "crc32"} <= set(entry):
            raise DataError(f"{path} is damaged: a file's entry is {entry!r}")
        if not isinstance(entry["bytes"], int):
            raise DataError(f"{path} is damaged: a file has {entry['bytes']!r} bytes")
    if index["dtype"] not in _DTYPES:
        raise DataError(
            f"{path}: dtype is {index['dtype']!r}; token shards are {' or '.join(_DTYPES)}"
        )
    if index["vocab"] - 1 > np.iinfo(index["dtype"]).max:
        raise DataError(f"{path}: {index['dtype']} cannot hold ids up to {index['vocab'] - 1}")
    width = np.dtype(index["dtype"]).itemsize
    sizes = [entry["bytes"] for entry in index["shards"]]
    if sum(sizes) != width * index["tokens"] or any(size % width for size in sizes):
        raise DataError(
            f"{path} contradicts itself: {index['tokens']} tokens of {width} bytes are not "
            f"{sum(sizes)} bytes"
        )
    if index["starts"]["bytes"] != 8 * index["documents"]:
        raise DataError(f"{path} contradicts itself about the number of documents")
    return index


def _check_file(directory: Path, entry: dict, dtype: np.dtype, limit: int | None) -> None:
    """Check a file's size and, with a limit, its bytes and that all its values are below it."""
    path = directory / entry["file"]
    advice = f"Delete {directory.parent} and prepare the data again."
    try:
        state = path.stat()
    except FileNotFoundError:
        raise DataError(f"{path} is missing. {advice}") from None
    if state.st_size < entry["bytes"]:
        raise DataError(
            f"{path} is cut off at byte {state.st_size}; its index has {entry['bytes']}. {advice}"
        )
    if state.st_size > entry["bytes"]:
        raise DataError(
            f"{path} has {state.st_size} bytes, from byte {entry['bytes']} on more than its index "
            f"expects: something was appended, or its ids are not {dtype.name}. {advice}"
        )
    key = (str(path.resolve()), state.st_size, state.st_mtime_ns, entry["sha256"], limit)
    if limit is None or key in _verified:
        return
    digest, offset, too_large = hashlib.sha256(), 0, None
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            values = np.frombuffer(data, dtype)
            if too_large is None and values.max() >= limit:
                first = int(np.argmax(values >= limit))
                too_large = (int(values[first]), offset + first * dtype.itemsize)
            offset += len(data)
    if digest.hexdigest() != entry["sha256"]:
        raise DataError(f"{path} was altered: {_altered_bytes(path, entry['crc32'])}. {advice}")
    if too_large is not None:
        kind = "id" if dtype.kind == "u" else "position"
        raise DataError(
            f"{path}: {kind} {too_large[0]} at byte {too_large[1]} is not below {limit}. These "
            "shards were written for another tokenizer or model, or by another tool."
        )
    _verified.add(key)


def _altered_bytes(path: Path, crc32: list[int]) -> str:
    """Where a file differs from its index, to a block."""
    with path.open("rb") as file:
        for block, expected in enumerate(crc32):
            data = file.read(BLOCK_BYTES)
            if zlib.crc32(data) != expected:
                start = block * BLOCK_BYTES
                return (
                    f"between byte {start} and byte {start + len(data)} it is not what was written"
                )
    return "its sha256 is not the one in its index"
