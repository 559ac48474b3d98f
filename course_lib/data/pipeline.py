"""The steps of preparation, each of which a rerun takes up where the last run was interrupted.

    corpora -> chunks    read in order; cleaned and sketched by processes, one file a chunk
    chunks -> verdicts   duplicates found in the order of the corpora, in an index on disk
    chunks -> tokenizer  learned from a sample of the training text
    chunks -> parts      encoded by processes: one folder of token shards a chunk
    parts -> shards      joined

A chunk is a few megabytes of whole documents. Where it ends follows from the corpus alone, so any
number of processes, interrupted any number of times, writes the same files. Each of them gets its
name when it is complete, and what has its name is not made again. In memory lie a few chunks at a
time, never the corpus.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from course_lib.data import DataError, shards, tokenizer
from course_lib.data.cleaning import clean
from course_lib.data.config import DataConfig
from course_lib.data.corpora import Corpus, Document
from course_lib.data.deduplication import Deduplicator, Sketch, sketch
from course_lib.data.loading import DataWorkerDied, fetch_ahead

CHUNK = 1 << 22  # characters; the document that reaches it is the last one of its chunk
LESSONS = 1 << 25  # characters that a tokenizer learns from, about
WHOLE = 50  # held-out documents, at least, where small ones are drawn beside large ones
KINDS = ("new", "exact", "near")
SIDES = ("train", "held_out")
THRESHOLDS = {"none": None, "exact": None, "near": 0.8}

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """A preparation: its folder, which outlives interruptions, and what decides the result."""

    folder: Path
    config: DataConfig
    vocab: int

    def each(self, make: Callable[[T], None], tasks: Iterable[T]) -> None:
        """Do all tasks: in this process, or in `processes` that never import torch."""
        count = self.config.processes
        try:
            for _ in fetch_ahead(make, tasks, count if count > 1 else 0, "process", count + 1):
                pass
        except DataWorkerDied as problem:
            how = str(problem).partition(" while ")[0]
            raise DataWorkerDied(
                f"{how} while it prepared text. If nobody ended it, the machine ran out of memory: "
                "take fewer data.processes. What is finished is kept; run it again to go on."
            ) from None

    def chunk(self, name: str) -> Path:
        """The file of a chunk."""
        return self.folder / f"{name}.chunk"

    def load(self, name: str) -> "Chunk":
        """A chunk that was read, cleaned and sketched."""
        try:
            with np.load(self.chunk(name)) as arrays:
                return Chunk(**arrays)
        except ValueError as problem:  # as numpy says of anything that does not start like a zip
            raise zipfile.BadZipFile(f"{self.chunk(name)}: {problem}") from None

    def part(self, name: str, side: str = "") -> Path:
        """The folder of the token shards of a chunk, of both sides or of one."""
        return self.folder / f"{name}.part" / side


class Chunk(NamedTuple):
    """Documents that were cleaned, with what the later steps have to know of them."""

    read: np.ndarray  # (3,) int64: documents, those without text, bytes, before cleaning
    text: np.ndarray  # (bytes,) uint8, UTF-8, one document after the other
    ends: np.ndarray  # (documents,) int64, byte behind each
    draws: np.ndarray  # (documents,) uint64, a hash of each: decides which are held out
    names: np.ndarray  # (bytes,) uint8, JSON
    hashes: np.ndarray  # (documents, 16) uint8, equal for equal texts
    shingles: np.ndarray  # uint32, of all documents in a row
    shingle_ends: np.ndarray  # (documents,) int64
    bands: np.ndarray  # (all bands,) int64
    band_ends: np.ndarray  # (documents,) int64

    def texts(self) -> Iterator[str]:
        """The text of each document."""
        for row in _rows(self.text, self.ends):
            yield row.tobytes().decode()

    def sketches(self) -> Iterator[tuple[str, Sketch]]:
        """The name and the sketch of each document."""
        names, hashes = json.loads(self.names.tobytes()), (row.tobytes() for row in self.hashes)
        shingles = _rows(self.shingles, self.shingle_ends)
        bands = _rows(self.bands, self.band_ends)
        yield from zip(names, map(Sketch, hashes, shingles, bands))


# ------------------------------------------------------------------------------------ the steps


def read_chunks(work: Work, corpora: list[Corpus]) -> list[list[str]]:
    """Read, clean and sketch all documents; returns the names of each corpus's chunks."""
    finished = work.folder / "chunks.json"
    if not finished.is_file():
        names: list[list[str]] = [[] for _ in corpora]

        def missing() -> Iterator[tuple[str, list[Document]]]:
            for number, corpus in enumerate(corpora):
                for documents in _in_chunks(_shown(corpus, "documents", unit=" documents")):
                    names[number].append(f"{number}-{len(names[number]):05d}")
                    if not work.chunk(names[number][-1]).is_file():
                        yield names[number][-1], documents

        work.each(partial(_tidy, work), missing())
        with _named_when_complete(finished) as temporary:
            temporary.write_text(json.dumps(names))
    return json.loads(finished.read_bytes())


def find_duplicates(work: Work, names: list[str]) -> None:
    """Decide for each document whether it repeats an earlier one; `verdicts` knows it then."""
    if work.config.deduplicate == "none":
        return
    with _index(work) as index:
        for name in _shown(names, "duplicates", unit=" chunks"):
            if index.noted(name) is None:
                kinds = [index.judge(*each).kind for each in work.load(name).sketches()]
                index.note(name, bytes(map(KINDS.index, kinds)))


def verdicts(work: Work, names: list[str]) -> Iterator[np.ndarray]:
    """For each chunk, the place in KINDS of each document: uint8, (documents,)."""
    if work.config.deduplicate == "none":
        for name in names:
            yield np.zeros(work.load(name).ends.size, np.uint8)
        return
    with _index(work) as index:
        for name in names:
            yield np.frombuffer(index.noted(name), np.uint8)


def count(work: Work, corpus: Corpus, names: list[str]) -> tuple[Counter, tuple[int, int]]:
    """What became of a corpus's documents, and bytes on either side if each is drawn whole."""
    counts = Counter()
    for name, kinds in zip(names, verdicts(work, names)):
        some = work.load(name)
        size = np.diff(some.ends, prepend=0)  # (documents,) bytes
        out = some.draws < _limit(work.config.held_out)  # (documents,)
        counts.update(dict(zip(("documents", "empty", "bytes_read"), some.read.tolist())))
        counts.update(KINDS[kind] for kind in kinds.tolist())
        counts["bytes_cleaned"] += int(size.sum())
        counts["bytes_kept"] += int(size[kinds == 0].sum())
        counts["bytes_out"] += int(size[(kinds == 0) & out].sum())
    if not counts["bytes_kept"]:
        left = " but repetitions" if counts["exact"] + counts["near"] else ""
        raise DataError(f"the corpus is empty: {corpus.name} holds no text{left}")
    counts["kept"], out = counts.pop("new"), counts.pop("bytes_out")
    return counts, (counts["bytes_kept"] - out, out)


def learn(work: Work, sources: list[tuple[list[str], "Split"]]) -> None:
    """Learn the tokenizer from training text, each source giving an equal part at most."""
    path = work.folder / "tokenizer.json"
    if not path.is_file():
        with _named_when_complete(path) as temporary:
            tokenizer.train_tokenizer(_lessons(work, sources), work.vocab).save(temporary)


def encode(work: Work, sources: list[tuple[list[str], "Split"]]) -> None:
    """Encode all chunks that are not encoded yet."""
    tasks = (
        (name, kinds, split)
        for names, split in sources
        for name, kinds in zip(_shown(names, "tokens", unit=" chunks"), verdicts(work, names))
        if not work.part(name).is_dir()
    )
    work.each(partial(_encode, work), tasks)


# ---------------------------------------------------------------- what is held out, and learned


class Split(NamedTuple):
    """Which text of a source is held out."""

    share: float  # of the text that is wanted
    cut_from: float  # bytes of a document whose end is held out; smaller ones are drawn whole
    train_bytes: float  # about so much is left for training

    def parts(self, text: str, draw: int) -> list[tuple[str, bool]]:
        """The text of a document, in one or two parts, each with whether it is held out."""
        if len(text.encode()) < self.cut_from:
            return [(text, draw < _limit(self.share))]
        wanted = int(len(text) * (1 - self.share))
        near = int(len(text) * min(self.share, 1 - self.share) / 2)
        cut = text.rfind("\n", wanted - near, wanted) + 1 or wanted
        return [(part, out) for part, out in ((text[:cut], False), (text[cut:], True)) if part]


def splits(share: float, sizes: list[tuple[int, int]]) -> list[Split]:
    """What is held out of each source.

    sizes: bytes on either side, of each source, if all documents are drawn whole, as they are, if
        they can be. Where that would hold out less than half or more than twice the share of a
        source, since it has few or very unequal documents, the end of each larger document is held
        out, from a line's start if one is near enough to give 1 to 1.5 times the share. Smaller
        ones are still drawn whole: `WHOLE` of them are what is wanted of the smallest source, or
        more, and so many are never far from their mean. What becomes of a text depends on the text
        alone: if two sources have it, it is on the same side in both.
    """
    totals = [train + out for train, out in sizes]
    shares = [out / total for (_, out), total in zip(sizes, totals)]
    even = all(share / 2 <= drawn_share <= min(2 * share, 0.9) for drawn_share in shares)
    cut_from = math.inf if even else min(share, 1 - share) * min(totals) / WHOLE
    return [Split(share, cut_from, total * (1 - share)) for total in totals]


def drawn(text: str, seed: int) -> int:
    """A hash of 64 bits, by which documents are drawn, so that copies stay together."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode())
    return int.from_bytes(hashed.digest())


def _limit(share: float) -> int:
    return int(share * 2**64)


def _lessons(work: Work, sources: list[tuple[list[str], Split]]) -> Iterator[str]:
    """Training text: all of it, or pieces that are drawn by their content."""
    for names, split in sources:
        share = LESSONS / len(sources) / split.train_bytes
        for name, kinds in zip(_shown(names, "tokenizer", unit=" chunks"), verdicts(work, names)):
            for text, out in _kept(work, name, kinds, split):
                for piece in [] if out else tokenizer.pieces_of(text, tokenizer.LESSON):
                    # Not the hash that decides what is held out: all of these are above its limit.
                    draw = drawn(f"lesson {piece}", work.config.seed)
                    if share >= 1 or draw < _limit(share):
                        yield piece


def _kept(work: Work, name: str, kinds: np.ndarray, split: Split) -> Iterator[tuple[str, bool]]:
    some = work.load(name)
    for text, draw, kind in zip(some.texts(), some.draws.tolist(), kinds.tolist()):
        if kind == 0:
            yield from split.parts(text, draw)


# ----------------------------------------------------------------------- what one process does


def _in_chunks(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    documents, size = [], 0
    for document in corpus:
        documents.append(document)
        size += len(document.text)
        if size >= CHUNK:
            yield documents
            documents, size = [], 0
    if documents:
        yield documents


def _tidy(work: Work, task: tuple[str, list[Document]]) -> None:
    """Clean and sketch the documents of a chunk."""
    name, documents = task
    read_bytes = sum(len(document.text.encode()) for document in documents)
    tidy = [Document(d.name, clean(d.text)) for d in documents] if work.config.clean else documents
    full = [document for document in tidy if document.text.strip()]
    data = [document.text.encode() for document in full]
    compared = full if work.config.deduplicate != "none" else []
    sketches = [sketch(d.text, THRESHOLDS[work.config.deduplicate]) for d in compared]
    chunk = Chunk(
        read=np.array([len(documents), len(documents) - len(full), read_bytes]),
        text=np.frombuffer(b"".join(data), np.uint8),
        ends=_ends(data),
        draws=np.array([drawn(d.text, work.config.seed) for d in full], np.uint64),
        names=np.frombuffer(json.dumps([d.name for d in compared]).encode(), np.uint8),
        hashes=np.frombuffer(b"".join(s.hash for s in sketches), np.uint8).reshape(-1, 16),
        shingles=np.concatenate([np.empty(0, np.uint32), *(s.shingles for s in sketches)]),
        shingle_ends=_ends([s.shingles for s in sketches]),
        bands=np.concatenate([np.empty(0, np.int64), *(s.bands for s in sketches)]),
        band_ends=_ends([s.bands for s in sketches]),
    )
    with _named_when_complete(work.chunk(name)) as temporary, temporary.open("wb") as file:
        np.savez(file, **chunk._asdict())


def _encode(work: Work, task: tuple[str, np.ndarray, Split]) -> None:
    """Write the token shards of a chunk; one process in a crew uses one thread."""
    name, kinds, split = task
    path = work.folder / "tokenizer.json"
    spoken = _spoken(path, path.stat().st_mtime_ns, work.vocab)
    temporary = _temporary(work.part(name))
    at_once = 1 if work.config.processes > 1 else 16
    train, held_out = (
        shards.ShardWriter(temporary / side, work.vocab, spoken.sha256) for side in SIDES
    )
    with train, held_out:
        for text, out in _kept(work, name, kinds, split):
            side = held_out if out else train
            side.add(spoken.encode_document(text, at_once), len(text.encode()))
    try:
        temporary.rename(work.part(name))
    except OSError:
        if not work.part(name).is_dir():
            raise
        shutil.rmtree(temporary)  # a process that outlived its run was first, with the same


@lru_cache(1)  # each one that is loaded leaves megabytes behind in the library, until the end
def _spoken(path: Path, written: int, vocab: int) -> tokenizer.TextTokenizer:
    return tokenizer.load_tokenizer(path, vocab)


def _index(work: Work) -> Deduplicator:
    return Deduplicator(work.folder / "duplicates.sqlite", THRESHOLDS[work.config.deduplicate])


def _rows(values: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
    """The part of each document."""
    return (values[start:stop] for start, stop in pairwise([0, *ends.tolist()]))


def _ends(parts: list) -> np.ndarray:
    return np.cumsum([len(part) for part in parts], dtype=np.int64)


def _shown(items: Iterable[T], what: str, **options: object) -> Iterator[T]:
    """The items, with a progress bar once it has taken two seconds."""
    return tqdm(items, what, delay=2.0, leave=False, disable=None, **options)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")


@contextlib.contextmanager
def _named_when_complete(path: Path) -> Iterator[Path]:
    """Where to write a file that gets its name at the end, and not after an error."""
    yield _temporary(path)
    _temporary(path).replace(path)
