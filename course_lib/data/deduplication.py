"""De-duplication: equal texts by their hash, nearly equal ones by MinHash, on disk.

Two texts are nearly equal if they share most of their shingles, runs of five words: if their
Jaccard similarity, shared shingles over all shingles of the two, reaches a threshold.

To compare each text with each other one would take for ever. So each gets a signature: for 128
hash functions, the least hash over its shingles. Two signatures agree in a place with a
probability that is the similarity (Broder, 1997). Signatures are cut into bands, and only texts
with an equal band are compared, by their shingles (locality-sensitive hashing: Leskovec, Rajaraman,
Ullman, Mining of Massive Datasets, chapter 3). A shared licence header makes candidates at most.

The index is a file, so memory does not grow with the corpus. Of equals, the first one is kept.
"""

import hashlib
import re
import sqlite3
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from course_lib.data.samples import mixed

WORDS = 5  # of a shingle, as in Lee et al., arXiv:2107.06499
HASHES = 128  # of a signature: an estimated similarity is off by about 0.04
CANDIDATES = 32  # of one band, the first ones; later texts with the same band are not noted in it

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
_BLOCK = 1 << 8  # shingles that are hashed at once
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, else arbitrary
_RANDOM = np.random.Generator(np.random.PCG64(2026)).integers(0, 2**32, (2, HASHES), np.uint32)
_FACTORS, _SHIFTS = _RANDOM | np.uint32(1)  # the same in every process: never change them
_TABLES = """
    PRAGMA journal_mode = WAL;
    PRAGMA synchronous = NORMAL;
    CREATE TABLE IF NOT EXISTS texts
        (number INTEGER PRIMARY KEY, name TEXT, hash BLOB UNIQUE, shingles BLOB);
    CREATE TABLE IF NOT EXISTS bands
        (band INTEGER, number INTEGER, PRIMARY KEY (band, number)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value BLOB);
"""


class Verdict(NamedTuple):
    """What a text is to those before it."""

    kind: Literal["new", "exact", "near"]
    of: str | None = None  # name of the first one, if the text repeats one
    similarity: float = 0.0  # Jaccard similarity with that one


class Sketch(NamedTuple):
    """All that de-duplication needs of a text; made in any process."""

    hash: bytes  # of the text
    shingles: np.ndarray  # (shingles,) uint32, sorted, each once
    bands: np.ndarray  # (bands,) int64


def shingles(text: str) -> np.ndarray:
    """The hashes of a text's shingles: uint32, (shingles,), sorted, each once.

    Case and punctuation do not count. Chinese and Japanese characters are words of their own. A
    text of fewer than `WORDS` words is one shingle.
    """
    words = _WORD.finditer(text.lower())
    hashes = np.fromiter((zlib.crc32(word[0].encode()) for word in words), np.uint64)
    if not hashes.size:
        return np.empty(0, np.uint32)
    runs = max(hashes.size - WORDS + 1, 1)
    found = np.zeros(runs, np.uint64)
    for place in range(min(WORDS, hashes.size)):
        found = found * _FACTOR + hashes[place : place + runs]
    return _unique((mixed(found) >> np.uint64(32)).astype(np.uint32))


def signature(text: str) -> np.ndarray:
    """The MinHash signature of a text: uint32, (HASHES,)."""
    return _least_hashes(shingles(text))


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """The Jaccard similarity of two texts as their signatures estimate it."""
    return float((one == other).mean())


def jaccard(one: str, other: str) -> float:
    """The Jaccard similarity of two texts: 0 for no common shingle, 1 for the same ones.

    Two texts without a word have the same ones: none. A `Deduplicator` keeps both all the same.
    """
    return _jaccard(shingles(one), shingles(other))


def band_rows(threshold: float) -> int:
    """Hashes a band: the most with which 85 % of the pairs at the threshold share a band."""
    rows = [r for r in (32, 16, 8, 4, 2) if 1 - (1 - threshold**r) ** (HASHES // r) >= 0.85]
    return [*rows, 1][0]


def sketch(text: str, threshold: float | None = 0.8) -> Sketch:
    """What a `Deduplicator` of this threshold has to know of a text (None: equal texts only)."""
    hashed = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if threshold is None:
        return Sketch(hashed, np.empty(0, np.uint32), np.empty(0, np.int64))
    found = shingles(text)
    rows = _least_hashes(found).reshape(-1, band_rows(threshold))  # (bands, rows)
    powers = _FACTOR ** np.arange(rows.shape[1], dtype=np.uint64)
    keys = (rows * powers).sum(1, dtype=np.uint64) + np.arange(len(rows), dtype=np.uint64)
    return Sketch(hashed, found, mixed(keys).view(np.int64)[: len(rows) if found.size else 0])


@dataclass
class Deduplicator(AbstractContextManager):
    """An index of texts on disk; to be used in a `with` block, and again later.

    Shows each text in the order of the corpus. What `look` learned lies in the file once `note`
    was called or the block was left; what came after is forgotten if the process dies. Raises
    ValueError for an index of another threshold, sqlite3.Error for what is no index.
    """

    path: str | Path  # of the index, which is made or gone on with
    threshold: float | None = 0.8  # Jaccard similarity of near duplicates; None: only equal texts

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold} must be above 0 and at most 1")
        try:
            # One thread at a time uses it, but the tokenizers library reads texts in its own.
            self._rows = sqlite3.connect(self.path, check_same_thread=False)
            self._rows.executescript(_TABLES)
        except sqlite3.Error as problem:
            raise type(problem)(f"{self.path}: {problem}") from None
        own = str(self.threshold and float(self.threshold)).encode()
        noted = self.noted("threshold")
        if noted is None:
            self.note("threshold", own)
        elif noted != own:
            self._rows.close()
            raise ValueError(f"{self.path} was made with the threshold {noted.decode()}")

    def look(self, name: str, text: str) -> Verdict:
        """Whether a text is new, which enters it in the index, or what it repeats."""
        return self.judge(name, sketch(text, self.threshold))

    def judge(self, name: str, made: Sketch) -> Verdict:
        """As `look`, of a sketch that was made elsewhere with the same threshold."""
        if same := self._one("SELECT name FROM texts WHERE hash = ?", made.hash):
            return Verdict("exact", same[0], 1.0)
        if near := self._nearest(made):
            return near
        self._enter(name, made)
        return Verdict("new")

    def note(self, name: str, value: bytes) -> None:
        """Keep a note with all that was learned so far: both are in the file, or neither."""
        self._rows.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))
        self._rows.commit()

    def noted(self, name: str) -> bytes | None:
        """A note that was kept under this name."""
        return (self._one("SELECT value FROM notes WHERE name = ?", name) or [None])[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._rows.commit()
        self._rows.close()

    def _nearest(self, made: Sketch) -> Verdict | None:
        """The first of the texts that share a band and are similar enough."""
        sharing = set()
        for band in made.bands.tolist():
            found = "SELECT number FROM bands WHERE band = ? LIMIT ?"
            sharing.update(self._rows.execute(found, (band, CANDIDATES)))
        for (number,) in sorted(sharing):
            name, stored = self._one("SELECT name, shingles FROM texts WHERE number = ?", number)
            if (alike := _jaccard(made.shingles, np.frombuffer(stored, "<u4"))) >= self.threshold:
                return Verdict("near", name, alike)
        return None

    def _enter(self, name: str, made: Sketch) -> None:
        row = (name, made.hash, made.shingles.tobytes())
        number = self._rows.execute(
            "INSERT INTO texts (name, hash, shingles) VALUES (?, ?, ?)", row
        ).lastrowid
        self._rows.executemany(
            "INSERT INTO bands SELECT ?1, ?2 WHERE"
            " (SELECT COUNT(*) FROM (SELECT 1 FROM bands WHERE band = ?1 LIMIT ?3)) < ?3",
            [(band, number, CANDIDATES) for band in made.bands.tolist()],
        )

    def _one(self, question: str, value: object) -> tuple | None:
        return self._rows.execute(question, (value,)).fetchone()


def _least_hashes(found: np.ndarray) -> np.ndarray:
    least = np.full(HASHES, 2**32 - 1, np.uint32)
    for start in range(0, found.size, _BLOCK):
        block = found[start : start + _BLOCK, None]  # (shingles, 1)
        np.minimum(least, (block * _FACTORS + _SHIFTS).min(0), out=least)
    return least


def _unique(values: np.ndarray) -> np.ndarray:
    values.sort()
    first = np.ones(values.size, bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Of arrays without repeated values; two empty ones are equal."""
    shared = np.intersect1d(one, other, assume_unique=True).size
    either = one.size + other.size - shared
    return shared / either if either else 1.0
