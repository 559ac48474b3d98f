"""Preparation: a corpus becomes a tokenizer and token shards, once, and is found again after.

The result is kept under a key made of the corpus's content and the settings. It is written to
a temporary folder that one rename puts in place: it is complete or absent. Documents that are
held out for evaluation are chosen by their content, so equal texts fall on the same side, and
the tokenizer learns from training text only.
"""

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tqdm import tqdm

from course_lib.data.corpora import CORPORA, Corpus, Document, default_cache, load_corpus
from course_lib.data.errors import DataError
from course_lib.data.samples import TokenDataset
from course_lib.data.shards import ShardWriter, TokenShards
from course_lib.data.tokenizer import (
    SMALLEST_VOCAB,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

_FORMAT = 1  # counts up whenever the same corpus and settings give other files


@dataclass(frozen=True)
class DataConfig:
    """The [data] section. The vocabulary is the model's: ``model.vocab``."""

    corpus: Annotated[
        str, "text to train on: 'shakespeare', 'python-docs', or a folder or file of .txt or .md"
    ] = "shakespeare"
    tokenizer: Annotated[
        str, "'bpe' (byte-level, learned from the corpus) or the path of a tokenizer.json"
    ] = "bpe"
    sequence_length: Annotated[int, "tokens in a sample"] = 256
    packing: Annotated[
        Literal["stream", "pad"],
        "'stream': windows over all documents in a row; 'pad': a document or a piece a sample",
    ] = "stream"
    held_out: Annotated[float, "share of the text kept for evaluation, 0 to below 1"] = 0.05
    seed: Annotated[int, "decides the held-out documents and the order of samples"] = 0
    cache: Annotated[
        str | None, "folder for downloads and token files (default: ~/.cache/one-gpu-to-many)"
    ] = None

    def faults(self) -> list[str]:
        """Everything that is wrong with these values, each with the nearest valid choice."""
        faults = []
        if self.corpus not in CORPORA and not Path(self.corpus).expanduser().exists():
            near = difflib.get_close_matches(self.corpus, CORPORA, 1) or ["shakespeare"]
            faults.append(
                f"corpus = {self.corpus!r} is neither a corpus nor a path that exists; "
                f"nearest: {near[0]!r} (corpora: {', '.join(CORPORA)})"
            )
        if self.tokenizer != "bpe" and not Path(self.tokenizer).expanduser().is_file():
            faults.append(
                f"tokenizer = {self.tokenizer!r} is neither 'bpe' nor a file; nearest: 'bpe'"
            )
        if self.sequence_length < 1:
            faults.append(f"sequence_length = {self.sequence_length} must be at least 1")
        if self.packing not in ("stream", "pad"):
            near = difflib.get_close_matches(str(self.packing), ("stream", "pad"), 1) or ["stream"]
            faults.append(f"packing = {self.packing!r} is unknown; nearest: {near[0]!r}")
        if not 0 <= self.held_out < 1:
            nearest = 0.0 if self.held_out < 0 else 0.5
            faults.append(
                f"held_out = {self.held_out} must be 0 or more and below 1; nearest: {nearest}"
            )
        return faults


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies.

    Attributes:
        corpus: name of the corpus that was really used.
        directory: folder of all that follows.
        train, held_out: folders of token shards; ``held_out`` is None with held_out = 0.
        tokenizer: path of tokenizer.json.
        vocab: the vocabulary that the ids fit.
        fingerprint: sha256 over the tokens, the tokenizer and all settings that decide which
            sample comes when. Two runs with the same one see the same samples.
    """

    corpus: str
    directory: Path
    train: Path
    held_out: Path | None
    tokenizer: Path
    vocab: int
    fingerprint: str


def prepare(config: DataConfig, vocab: int, fallback: str | None = None) -> Prepared:
    """Tokenize a corpus into training and held-out shards, or find them in the cache.

    Any number of processes may call it at once: one does the work, the others wait for it.

    Args:
        config: the [data] section.
        vocab: the model's vocabulary; "bpe" learns that many entries.
        fallback: corpus to take, with a warning, where ``config.corpus`` is unavailable.
    Raises:
        CorpusUnavailable: no network.
        DataError: an empty corpus, text that is not UTF-8, an unfitting tokenizer.
        ValueError: impossible settings.
    """
    faults = [f"[data] {fault}" for fault in config.faults()]
    if config.tokenizer == "bpe" and vocab < SMALLEST_VOCAB:
        faults.append(f"[model] vocab = {vocab} is too small for bytes; nearest: {SMALLEST_VOCAB}")
    if faults:
        raise ValueError("\n".join(faults))
    cache = Path(config.cache).expanduser() if config.cache else default_cache()
    corpus = load_corpus(config.corpus, cache, fallback)
    given = None
    if config.tokenizer != "bpe":
        given = load_tokenizer(Path(config.tokenizer).expanduser(), vocab)
    made_of = {
        "format": _FORMAT,
        "corpus": corpus.sha256,
        "tokenizer": given.sha256 if given else "bpe",
        "vocab": vocab,
        "held_out": config.held_out,
        "seed": config.seed,
    }
    directory = cache / "prepared" / f"{corpus.name}-{_digest(made_of)[:16]}"
    if not directory.is_dir():
        with _alone(directory):
            if not directory.is_dir():
                _build(directory, corpus, given, config, vocab)
    return _describe(directory, corpus.name, config, vocab)


def open_datasets(
    prepared: Prepared, config: DataConfig
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training and the held-out data set (None without one), their files verified.

    Held-out text that is too short for a window of the stream is read with packing "pad".
    """
    length, packing = config.sequence_length, config.packing
    shards = TokenShards(prepared.train, prepared.vocab)
    train = TokenDataset(shards, length, packing, config.seed)
    if prepared.held_out is None:
        return train, None
    shards = TokenShards(prepared.held_out, prepared.vocab)
    if len(shards) <= length:
        packing = "pad"
    return train, TokenDataset(shards, length, packing, config.seed)


def _describe(directory: Path, corpus: str, config: DataConfig, vocab: int) -> Prepared:
    train, held_out = directory / "train", directory / "held_out"
    tokenizer = directory / "tokenizer.json"
    present = [part for part in (train, held_out) if part.is_dir()]
    made = {
        "tokens": [TokenShards(part, verify=False).sha256 for part in present],
        "tokenizer": load_tokenizer(tokenizer, vocab).sha256,
        "vocab": vocab,
        "sequence_length": config.sequence_length,
        "packing": config.packing,
        "seed": config.seed,
    }
    return Prepared(
        corpus=corpus,
        directory=directory,
        train=train,
        held_out=held_out if held_out in present else None,
        tokenizer=tokenizer,
        vocab=vocab,
        fingerprint=_digest(made),
    )


def _build(
    directory: Path, corpus: Corpus, given: TextTokenizer | None, config: DataConfig, vocab: int
) -> None:
    """Three passes over the corpus: choose the held-out documents, learn, encode."""
    partial = directory.with_name(f"{directory.name}.partial-{uuid.uuid4().hex[:8]}")
    split = _Split(corpus, config.held_out, config.seed)
    try:
        partial.mkdir(parents=True)
        tokenizer = given
        if tokenizer is None:
            texts = (document.text for document, out in split if not out)
            tokenizer = train_tokenizer(_shown(texts, split.bytes, "tokenizer"), vocab)
        tokenizer.save(partial / "tokenizer.json")
        with contextlib.ExitStack() as stack:
            writers = {
                out: stack.enter_context(ShardWriter(partial / name, vocab, tokenizer.sha256))
                for out, name in ((False, "train"), (True, "held_out"))
                if not out or config.held_out > 0
            }
            sides = iter(split)
            for document, out in _shown(sides, split.bytes, "tokens", lambda item: item[0].text):
                size = len(document.text.encode())
                writers[out].add(tokenizer.encode_document(document.text), size)
        os.rename(partial, directory)
    except OSError:
        if not directory.is_dir():  # unless another process was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Split:
    """The documents of a corpus, each with whether it is held out; to be read many times.

    Texts are taken in an order drawn from the seed while they fit into the share; if none
    does, the shortest is taken. A corpus of one text is cut in two, at the end of a line.
    """

    def __init__(self, corpus: Corpus, share: float, seed: int) -> None:
        self.corpus = corpus
        self.cut_share = 0.0
        self.out: set[bytes] = set()
        sizes: dict[bytes, int] = {}
        self.bytes = 0
        for document in self._documents():
            size = len(document.text.encode())
            self.bytes += size
            sizes[_key(document)] = sizes.get(_key(document), 0) + size
        if not sizes:
            raise DataError(f"the corpus is empty: {corpus.name} holds no text")
        if share == 0:
            return
        if len(sizes) == 1:
            self.cut_share = share
            self.out = {_key(document) for document in list(self._documents())[1::2]}
            return
        room = share * self.bytes
        for key in sorted(
            sizes, key=lambda key: hashlib.sha256(f"{seed}/".encode() + key).digest()
        ):
            if sizes[key] <= room:
                room -= sizes[key]
                self.out.add(key)
        self.out = self.out or {min(sizes, key=lambda key: (sizes[key], key))}

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        for document in self._documents():
            yield document, _key(document) in self.out

    def _documents(self) -> Iterator[Document]:
        for document in self.corpus:
            if not document.text.strip():
                continue
            if not self.cut_share:
                yield document
                continue
            wanted = min(
                max(1, round(len(document.text) * (1 - self.cut_share))), len(document.text) - 1
            )
            cut = document.text.rfind("\n", 0, wanted) + 1 or wanted
            yield Document(document.name, document.text[:cut])
            yield Document(f"{document.name} (end)", document.text[cut:])


def _key(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shown(items: Iterable, total: int, what: str, text: Callable[[Any], str] = str) -> Iterator:
    """The items, with a progress bar in bytes of text once it takes more than two seconds."""
    options = {"unit": "B", "unit_scale": True, "delay": 2.0, "leave": False, "disable": None}
    with tqdm(total=total, desc=what, **options) as bar:
        for item in items:
            yield item
            bar.update(len(text(item).encode()))


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a lock beside a folder, where the file system has locks; a rename decides elsewhere."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            for left in directory.parent.glob(f"{directory.name}.partial-*"):
                shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
        except (ImportError, OSError):
            pass
        yield
