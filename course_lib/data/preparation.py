"""Preparation: corpora become a tokenizer and token shards, once, and are found again after.

The result is kept under a key made of the corpora's content and the settings. It is made in a
folder for work, which outlives interruptions, and one rename puts it in place: it is complete or
absent. Documents that are held out for evaluation are drawn by their content, so equal texts fall
on the same side, in all sources, and the tokenizer learns from training text only. The steps are
in `pipeline`.
"""

import contextlib
import json
import os.path
import shutil
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from course_lib.data import DataError, corpora, pipeline
from course_lib.data.config import DataConfig
from course_lib.data.corpora import Corpus
from course_lib.data.samples import ORDER
from course_lib.data.shards import FORMAT, TokenShards, digest, join_shards
from course_lib.data.tokenizer import SMALLEST_VOCAB, TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class Source:
    """One corpus of a preparation."""

    name: str  # of the corpus that was really used
    weight: float  # its share of the samples of training, in any unit
    train: Path  # folder of token shards
    held_out: Path | None  # folder of token shards; None with held_out = 0


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies, and what it was made of."""

    sources: tuple[Source, ...]  # one, or those of the mixture in its order
    directory: Path  # folder of all that follows
    tokenizer: Path  # tokenizer.json, one for all sources
    vocab: int  # the vocabulary that the ids fit
    fingerprint: str  # of all that decides which sample comes when: equal for equal samples
    counts: dict[str, int]  # see `COUNTS`


COUNTS = {
    "documents": "that were read",
    "empty": "of these without any text, so left out",
    "exact": "left out as equal to an earlier one",
    "near": "left out as nearly equal to an earlier one",
    "kept": "the others",
    "bytes_read": "of text, in UTF-8",
    "bytes_cleaned": "of text after cleaning",
    "bytes_kept": "of the documents that were kept",
    "tokens": "of training and held-out text, with those that open documents",
}

# What a damaged file in the folder for work raises when it is read.
_DAMAGE = (
    json.JSONDecodeError,
    UnicodeDecodeError,
    zipfile.BadZipFile,
    EOFError,
    sqlite3.DatabaseError,
)


def prepare(config: DataConfig, vocab: int, fallback: str | None = None) -> Prepared:
    """Tokenize corpora into training and held-out shards, or find them in the cache.

    vocab: the model's vocabulary; "bpe" learns that many entries.
    fallback: corpus to take, with a warning, where a wanted one is unavailable.
    Any number of processes may call it at once: one does the work, the others wait for it. Only
    a corpus that is not in the cache yet is downloaded by each of them, and may fail in each.
    After an interruption, even by SIGKILL, the next call goes on with what is finished; the files
    are the same to the byte. The work takes about three times the text on the disk of the cache.
    Raises ValueError for impossible settings, DataError for text that is not as it must be and
    for a damaged or unusable cache, DataWorkerDied, otherwise as `load_corpus` and
    `load_tokenizer`.
    """
    if faults := config.faults():
        raise ValueError("\n".join(f"[data] {fault}" for fault in faults))
    cache = Path(os.path.expanduser(config.cache or corpora.default_cache()))
    weights = config.mixture or {config.corpus: 1.0}
    found = [corpora.load_corpus(name, cache, fallback) for name in weights]
    own = os.path.expanduser(config.tokenizer)
    given = None if config.tokenizer == "bpe" else load_tokenizer(own, vocab)
    if vocab < SMALLEST_VOCAB:
        raise DataError(f"vocab {vocab} is too small for all bytes; use >= {SMALLEST_VOCAB}")
    made_of = [[corpus.sha256 for corpus in found], given and given.sha256, vocab]
    made_of += [config.held_out, config.seed, config.clean, config.deduplicate]
    name = "+".join(corpus.name for corpus in found)
    directory = cache / "prepared" / f"{name[:40]}-{digest([FORMAT, *made_of])[:16]}"
    with corpora.plain_errors(cache):
        work = directory.with_name(f"{directory.name}.work")
        if work.exists() or not directory.is_dir():
            _fill_once(directory, work, partial(_build, found, given, vocab, config))
        return _describe(directory, dict(zip(_folders(found), weights.values())), vocab, config)


def _build(
    found: list[Corpus], given: TextTokenizer | None, vocab: int, config: DataConfig, folder: Path
) -> Path:
    """All steps; returns the folder that holds the result."""
    work = pipeline.Work(folder, config, vocab)
    chunks = pipeline.read_chunks(work, found)
    pipeline.find_duplicates(work, [name for names in chunks for name in names])
    totals, sizes = Counter(dict.fromkeys(COUNTS, 0)), []
    for corpus, names in zip(found, chunks):
        counts, size = pipeline.count(work, corpus, names)
        totals.update(counts)
        sizes.append(size)
    sources = list(zip(chunks, pipeline.splits(config.held_out, sizes)))
    if given:
        given.save(folder / "tokenizer.json")
    pipeline.learn(work, sources)
    pipeline.encode(work, sources)
    result = folder / "result"
    shutil.rmtree(result, ignore_errors=True)  # if it is there, it was interrupted
    for place, (names, _) in zip(_folders(found), sources):
        for side in pipeline.SIDES:
            target = result / place / side
            join_shards([work.part(name, side) for name in names], target)
            totals["tokens"] += len(TokenShards(target, verify=False))
    shutil.copyfile(folder / "tokenizer.json", result / "tokenizer.json")
    (result / "counts.json").write_text(json.dumps(totals, indent=1))
    return result


def _describe(
    directory: Path, weights: dict[str, float], vocab: int, config: DataConfig
) -> Prepared:
    tokenizer = directory / "tokenizer.json"
    sha256 = load_tokenizer(tokenizer, vocab).sha256
    sources, made_of = [], []
    for place, weight in weights.items():
        train, held_out = (directory / place / side for side in pipeline.SIDES)
        sources.append(
            Source(place.partition("-")[2], weight, train, held_out if config.held_out else None)
        )
        for shards in (TokenShards(folder, verify=False) for folder in (train, held_out)):
            if shards.tokenizer_sha256 != sha256:
                index = shards.directory / "index.json"
                raise DataError(
                    f"{tokenizer} is not what {index} was made with. Delete {directory}."
                )
            made_of.append(shards.sha256)
    total = sum(map(Fraction, weights.values()))
    made_of += [str(Fraction(weights[place]) / total) for place in weights]
    made_of += [ORDER, sha256, vocab, config.sequence_length, config.packing, config.seed]
    try:
        counts = dict(json.loads((directory / "counts.json").read_bytes()))
    except (TypeError, ValueError) as problem:
        raise DataError(f"counts.json is damaged: {problem}. Delete {directory}.") from None
    return Prepared(tuple(sources), directory, tokenizer, vocab, digest(made_of), counts)


def _folders(found: list[Corpus]) -> list[str]:
    """Of each corpus, in the result."""
    return [f"{number}-{corpus.name[:40]}" for number, corpus in enumerate(found)]


def _fill_once(directory: Path, work: Path, fill: Callable[[Path], Path]) -> None:
    """Fill a folder that becomes complete or stays absent; other processes wait meanwhile."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        with contextlib.suppress(ImportError, OSError):  # some file systems have no locks
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.is_dir():
            work.mkdir(exist_ok=True)
            try:
                result = fill(work)
            except DataError:  # what was read is not what it will be
                shutil.rmtree(work, ignore_errors=True)
                raise
            except sqlite3.OperationalError:  # such as a full disk
                raise
            except _DAMAGE as problem:
                shutil.rmtree(work, ignore_errors=True)
                raise DataError(
                    f"{work}, left by an interrupted run, was damaged: {problem}. It is deleted "
                    "now; run it again."
                ) from None
            try:
                result.rename(directory)
            except OSError:
                if not directory.is_dir():  # without a lock, another may have been first
                    raise
        shutil.rmtree(work, ignore_errors=True)
