"""Preparation: a corpus becomes a tokenizer and token shards, once, and is found again after.

The result is kept under a key made of the corpus's content and the settings. It is written to
a temporary folder that one rename puts in place: it is complete or absent. Documents that are
held out for evaluation are drawn by their content, so equal texts fall on the same side, and
the tokenizer learns from training text only.
"""

import contextlib
import hashlib
import os.path
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from course_lib.data import DataError, corpora
from course_lib.data.config import DataConfig
from course_lib.data.corpora import Corpus, Document
from course_lib.data.samples import TokenDataset
from course_lib.data.shards import FORMAT, ShardWriter, TokenShards, digest
from course_lib.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Prepared:
    """Where prepared data lies."""

    corpus: str  # name of the corpus that was really used
    directory: Path  # folder of all that follows
    train: Path  # folder of token shards
    held_out: Path | None  # folder of token shards; None with held_out = 0
    tokenizer: Path  # tokenizer.json
    vocab: int  # the vocabulary that the ids fit
    fingerprint: str  # of all that decides which sample comes when: equal for equal samples


def prepare(config: DataConfig, vocab: int, fallback: str | None = None) -> Prepared:
    """Tokenize a corpus into training and held-out shards, or find them in the cache.

    vocab: the model's vocabulary; "bpe" learns that many entries.
    fallback: corpus to take, with a warning, where `config.corpus` is unavailable.
    Any number of processes may call it at once: one does the work, the others wait for it. Only
    a corpus that is not in the cache yet is downloaded by each of them, and may fail in each.
    Raises ValueError for impossible settings, DataError for a damaged or unusable cache,
    otherwise as `load_corpus` and `load_tokenizer`.
    """
    if faults := config.faults():
        raise ValueError("\n".join(f"[data] {fault}" for fault in faults))
    cache = Path(os.path.expanduser(config.cache or corpora.default_cache()))
    corpus = corpora.load_corpus(config.corpus, cache, fallback)
    own = os.path.expanduser(config.tokenizer)
    given = None if config.tokenizer == "bpe" else load_tokenizer(own, vocab)
    made_of = [corpus.sha256, given and given.sha256, vocab, config.held_out, config.seed]
    directory = cache / "prepared" / f"{corpus.name[:40]}-{digest([FORMAT, *made_of])[:16]}"
    with corpora.plain_errors(cache):
        if not directory.is_dir():
            _fill_once(directory, partial(_build, corpus, given, vocab, config))
        return _describe(directory, corpus.name, vocab, config)


def open_datasets(
    prepared: Prepared, config: DataConfig
) -> tuple[TokenDataset, TokenDataset | None]:
    """The training and the held-out data set (None without one), their files verified.

    Held-out text that is too short for a window of the stream is read with packing "pad".
    """
    length, packing = config.sequence_length, config.packing
    train = TokenShards(prepared.train, prepared.vocab)
    train_data = TokenDataset(train, length, packing, config.seed)
    if prepared.held_out is None:
        return train_data, None
    held_out = TokenShards(prepared.held_out, prepared.vocab)
    packing = packing if len(held_out) > length else "pad"
    return train_data, TokenDataset(held_out, length, packing, config.seed)


def _build(
    corpus: Corpus, given: TextTokenizer | None, vocab: int, config: DataConfig, folder: Path
) -> None:
    """Three passes over the corpus: choose the held-out text, learn, encode."""
    split = Split(corpus, config.held_out, config.seed)
    texts = (text for text, out in split.parts("tokenizer") if not out)
    tokenizer = given or train_tokenizer(texts, vocab)
    tokenizer.save(folder / "tokenizer.json")
    writers = [
        ShardWriter(folder / name, vocab, tokenizer.sha256) for name in ("train", "held_out")
    ]
    with writers[0], writers[1]:
        for text, out in split.parts("tokens"):
            writers[out].add(tokenizer.encode_document(text), len(text.encode()))


def _describe(directory: Path, corpus: str, vocab: int, config: DataConfig) -> Prepared:
    train, tokenizer = directory / "train", directory / "tokenizer.json"
    held_out = directory / "held_out" if config.held_out else None
    shards = [TokenShards(folder, verify=False) for folder in (train, held_out) if folder]
    sha256 = load_tokenizer(tokenizer, vocab).sha256
    for index in [s.directory / "index.json" for s in shards if s.tokenizer_sha256 != sha256]:
        raise DataError(f"{tokenizer} is not what {index} was made with. Delete {directory}.")
    tokens = [*(s.sha256 for s in shards), sha256]
    fingerprint = digest([tokens, vocab, config.sequence_length, config.packing, config.seed])
    return Prepared(corpus, directory, train, held_out, tokenizer, vocab, fingerprint)


class Split:
    """The text of a corpus, part by part, each with whether it is held out; read many times.

    Documents are drawn whole. Where that would hold out less than half or more than twice the
    share, since there are few or very unequal documents, the end of each one is held out, from
    a line's start if one is near enough to give 1 to 1.5 times the share.
    """

    def __init__(self, corpus: Corpus, share: float, seed: int) -> None:
        self.corpus, self.share, self.seed = corpus, share, seed
        self.whole = True  # documents, until the first pass has shown what that gives
        self.characters = None
        sizes = [0, 0]
        for text, out in self.parts("documents"):
            sizes[out] += len(text)
        self.characters = sum(sizes)
        if self.characters == 0:
            raise DataError(f"the corpus is empty: {corpus.name} holds no text")
        self.whole = share / 2 <= sizes[True] / self.characters <= min(2 * share, 0.9)

    def parts(self, what: str) -> Iterator[tuple[str, bool]]:
        """One pass, with a progress bar named `what` once it has taken two seconds."""
        options = {"unit": " characters", "unit_scale": True, "leave": False, "disable": None}
        with tqdm(total=self.characters, desc=what, delay=2.0, **options) as bar:
            for document in self.corpus:
                if document.text.strip():
                    yield from self._divide(document)
                bar.update(len(document.text))

    def _divide(self, document: Document) -> Iterator[tuple[str, bool]]:
        if self.whole:
            yield document.text, drawn(document, self.share, self.seed)
        else:
            wanted = int(len(document.text) * (1 - self.share))
            near = int(len(document.text) * min(self.share, 1 - self.share) / 2)
            cut = document.text.rfind("\n", wanted - near, wanted) + 1 or wanted
            yield document.text[:cut], False
            yield document.text[cut:], True


def drawn(document: Document, share: float, seed: int) -> bool:
    """Whether a document is held out: by the hash of its text, so that copies stay together."""
    hashed = hashlib.blake2b(document.text.encode(), digest_size=8, key=str(seed).encode())
    return int.from_bytes(hashed.digest()) < share * 2**64


def _fill_once(directory: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder that becomes complete or stays absent; other processes wait meanwhile."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{directory.name}.partial-"
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        with contextlib.suppress(ImportError, OSError):  # some file systems have no locks
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in directory.parent.iterdir():
                if left.name.startswith(prefix):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
        if directory.is_dir():
            return
        with tempfile.TemporaryDirectory(prefix=prefix, dir=directory.parent) as temporary:
            folder = Path(temporary, "complete")
            folder.mkdir()
            fill(folder)
            with contextlib.suppress(OSError):  # without a lock, another may have been first
                folder.rename(directory)
