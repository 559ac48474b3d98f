"""Token shards: token ids in plain files, mapped into memory, with an index that guards them.

A folder of shards holds `tokens-00000.bin` … (little-endian ids, nothing else), the position of
each document's first token in `documents.bin` (int64), and `index.json`, written last: without
it a folder is unfinished. The index has the sha256 of every block of 1 MiB, so the place of any
damage is known, and its own sha256, which therefore stands for all that the folder holds.

Ids take 2 bytes up to a vocabulary of 65,536 and 4 beyond. A plain `astype` would wrap larger
ids silently (huggingface/transformers#2825), so ids are checked when written and when opened.
"""

import hashlib
import json
import shutil
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np

from course_lib.data import DataError

FORMAT = 6  # counts up whenever the same text and settings give other files
BLOCK_BYTES = 1 << 20
_POSITION = np.dtype("<i8")


def token_dtype(vocab: int) -> np.dtype:
    """The smallest unsigned type for ids below `vocab`: uint16 up to 65,536, else uint32."""
    return np.dtype("<u2") if vocab <= 1 << 16 else np.dtype("<u4")


def checked_ids(ids: Sequence[int] | np.ndarray, vocab: int) -> np.ndarray:
    """Ids (tokens,) as `token_dtype(vocab)`; ValueError if any is outside 0 … vocab - 1."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return np.empty(0, token_dtype(vocab))
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be a list of integers, not {ids.dtype} {ids.shape}")
    for extreme in (ids.min(), ids.max()):
        if not 0 <= extreme < vocab:
            raise ValueError(f"token id {extreme} is outside the vocabulary, 0 to {vocab - 1}")
    return ids.astype(token_dtype(vocab))


@dataclass
class ShardWriter(AbstractContextManager):
    """Writes documents as token shards; to be used in a `with` block.

    Each file gets its name when it is complete, the index when all are; after an error there is
    no index, and `TokenShards` refuses the folder.
    """

    directory: str | Path  # made if absent
    vocab: int  # ids are below it; others are refused with ValueError
    tokenizer_sha256: str = ""
    tokens_per_shard: int = 1 << 28  # at most; a document may go on in the next file

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= 1 << 32:
            raise ValueError(f"vocab {self.vocab} must be 1 to {1 << 32}")
        self.directory = Path(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.tokens = self.text_bytes = 0
        self._starts = array("q")
        self._entries: list[dict] = []
        self._file: BinaryIO | None = None

    def add(self, ids: Sequence[int] | np.ndarray, text_bytes: int) -> None:
        """Append one document: its token ids (tokens,) and the UTF-8 bytes of its text."""
        ids = checked_ids(ids, self.vocab)
        self._starts.append(self.tokens)
        self.text_bytes += text_bytes
        while ids.size:
            if self._file is None:
                name = f"tokens-{len(self._entries):05d}.bin.partial"
                self._file = (self.directory / name).open("wb")
            part = ids[: self.tokens_per_shard - self.tokens % self.tokens_per_shard]
            self._file.write(part)
            self.tokens += part.size
            ids = ids[part.size :]
            if self.tokens % self.tokens_per_shard == 0:
                self._finish_shard()

    def close(self) -> None:
        """Complete the last file and write the index."""
        self._finish_shard()
        with (self.directory / "documents.bin.partial").open("wb") as starts:
            starts.write(np.array(self._starts, _POSITION))
        _write_index(
            self.directory, self._entries, self.vocab, self.text_bytes, self.tokenizer_sha256
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _finish_shard(self) -> None:
        if self._file is not None:
            self._entries.append(_finish(self._file))
            self._file = None


class TokenShards:
    """The tokens of a folder of shards as one long row, read through memory maps.

    directory: folder that a `ShardWriter` wrote.
    vocab: the model's vocabulary, if the ids are to be held against it too.
    verify: False checks sizes only, for a second look at files that were checked before.
    Opening reads every file once, at the speed of the disk: sizes, sha256, and that every id is
    below the vocabulary. Raises DataError for damaged or unfitting files, with file and byte.
    """

    def __init__(self, directory: str | Path, vocab: int | None = None, verify: bool = True):
        self.directory = Path(directory)
        index = _read_index(self.directory / "index.json")
        self.vocab: int = index["vocab"]
        self.dtype = token_dtype(self.vocab)
        self.text_bytes: int = index["text_bytes"]
        self.tokenizer_sha256: str = index["tokenizer_sha256"]
        self.sha256: str = index["sha256"]  # identifies the tokens and the documents' bounds
        self._shards = [_map(self.directory, entry, self.dtype) for entry in index["shards"]]
        self._begins = [0, *accumulate(len(shard) for shard in self._shards)]
        self.starts = _map(self.directory, index["starts"], _POSITION)  # (documents,) first tokens
        self.documents = len(self.starts)
        if verify:
            limit = min(vocab or self.vocab, self.vocab)
            for entry in index["shards"]:
                _verify(self.directory, entry, self.dtype, limit)
            _verify(self.directory, index["starts"], _POSITION, len(self) + 1)

    def __len__(self) -> int:
        return self._begins[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """A copy of tokens start … stop - 1: int64, (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} are not all in 0 to {len(self)}")
        first, last = bisect_right(self._begins, start) - 1, bisect_left(self._begins, stop)
        parts = [
            self._shards[i][max(start - self._begins[i], 0) : stop - self._begins[i]]
            for i in range(first, last)
        ]
        if len(parts) == 1:
            return parts[0].astype(np.int64)
        return np.concatenate([np.empty(0, np.int64), *parts])

    def __reduce__(self) -> tuple:
        return TokenShards, (self.directory, None, False)  # another process maps the same files


def join_shards(parts: Sequence[str | Path], directory: str | Path) -> None:
    """Make one folder of token shards, `directory`, of those in several folders, in their order.

    The files are not copied where links to them can be made, and not read again: what is known
    of them is in the indexes of the parts. Raises ValueError without parts, and for parts of
    unlike vocabularies or tokenizers.
    """
    indexes = [_read_index(Path(part) / "index.json") for part in parts]
    made_with = {(index["vocab"], index["tokenizer_sha256"]) for index in indexes}
    if len(made_with) != 1:
        raise ValueError(f"{len(parts)} parts with {len(made_with)} vocabularies or tokenizers")
    ((vocab, tokenizer_sha256),) = made_with
    directory = Path(directory)
    directory.mkdir(parents=True)
    entries, tokens = [], 0
    with (directory / "documents.bin.partial").open("wb") as starts:
        for part, index in zip(map(Path, parts), indexes):
            starts.write(_map(part, index["starts"], _POSITION) + tokens)
            for entry in index["shards"]:
                name = f"tokens-{len(entries):05d}.bin"
                _link(part / entry["file"], directory / name)
                entries.append(entry | {"file": name})
                tokens += entry["bytes"] // token_dtype(vocab).itemsize
    text_bytes = sum(index["text_bytes"] for index in indexes)
    _write_index(directory, entries, vocab, text_bytes, tokenizer_sha256)


def digest(value: object) -> str:
    """The sha256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_index(
    directory: Path, entries: list[dict], vocab: int, text_bytes: int, tokenizer_sha256: str
) -> None:
    """Finish documents.bin and write the index of the folder, last."""
    index = {
        "format": FORMAT,
        "dtype": token_dtype(vocab).name,
        "vocab": vocab,
        "text_bytes": text_bytes,
        "tokenizer_sha256": tokenizer_sha256,
        "shards": entries,
        "starts": _finish((directory / "documents.bin.partial").open("rb")),
    }
    with (directory / "index.json.partial").open("wb") as file:
        file.write(json.dumps(index | {"sha256": digest(index)}, indent=1).encode())
    _finish(file)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def _finish(file: BinaryIO) -> dict:
    """Give a file that was written as NAME.partial its name; returns its entry in the index."""
    file.close()
    path = Path(file.name).rename(Path(file.name).with_suffix(""))
    hashes = [hashlib.sha256(block).hexdigest() for block in _blocks(path)]
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": hashes}


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _damage(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}. Delete the folder and prepare the data again.")


def _read_index(path: Path) -> dict:
    if not path.is_file():
        raise _damage(path, "is missing: the folder holds no finished token shards")
    try:
        index = dict(json.loads(path.read_bytes()))
    except (TypeError, ValueError) as problem:
        raise _damage(path, f"is damaged: {problem}") from None
    if index.get("format") != FORMAT:
        raise _damage(path, f"has format {index.get('format')}; this version reads {FORMAT}")
    sha256 = index.pop("sha256", None)
    if sha256 != digest(index):
        raise _damage(path, "was altered: its own sha256 does not fit")
    dtype = token_dtype(index["vocab"]).name
    if index["dtype"] != dtype:
        raise _damage(path, f"has dtype {index['dtype']!r}; ids of its vocabulary are {dtype}")
    return index | {"sha256": sha256}


def _map(directory: Path, entry: dict, dtype: np.dtype) -> np.ndarray:
    """A file of the index as an array, if it has the size that the index says."""
    path, expected = directory / entry["file"], entry["bytes"]
    if Path(entry["file"]).name != entry["file"]:
        raise _damage(directory / "index.json", f"names a file outside: {entry['file']!r}")
    if not path.is_file():
        raise _damage(path, "is missing")
    size = path.stat().st_size
    if size != expected:
        how = f"is cut off at byte {size}" if size < expected else f"goes on after byte {expected}"
        raise _damage(path, f"{how}: it has {size} bytes, {expected} of {dtype} were written")
    return np.asarray(np.memmap(path, dtype, mode="r")) if size else np.empty(0, dtype)


def _verify(directory: Path, entry: dict, dtype: np.dtype, limit: int) -> None:
    """Check that a file is as it was written, and that all its values are below a limit."""
    path = directory / entry["file"]
    for number, (block, expected) in enumerate(zip(_blocks(path), entry["sha256"])):
        at = number * BLOCK_BYTES
        if hashlib.sha256(block).hexdigest() != expected:
            raise _damage(path, f"was altered between byte {at} and byte {at + len(block)}")
        values = np.frombuffer(block, dtype)
        if values.max() >= limit:
            place = int(np.argmax(values >= limit))
            byte = at + place * dtype.itemsize
            raise DataError(f"{path}: id {values[place]} at byte {byte} is not below vocab {limit}")
