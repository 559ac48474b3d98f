"""De-duplication: exact and near repetitions, told apart, in the order of the corpus."""

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import Deduplicator, jaccard, signature, similarity
from course_lib.data import deduplication as module
from tests import checks_text as checks

ROOT = Path(__file__).parents[1]


def test_exact_near_and_related_texts_are_told_apart(tmp_path):
    checks.check_verdicts(tmp_path)


def test_of_repeated_documents_the_first_is_kept(tmp_path):
    checks.check_first_is_kept(tmp_path)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.lists(st.sampled_from("abc"), max_size=30))
@settings(deadline=None)
def test_jaccard_is_shared_over_all_shingles(one, other):
    def runs(words: list[str]) -> set[tuple]:
        size = min(module.WORDS, len(words))
        return (
            {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} if words else set()
        )

    together = runs(one) | runs(other)
    expected = len(runs(one) & runs(other)) / len(together) if together else 1.0
    assert jaccard(" ".join(one), ", ".join(other).upper()) == pytest.approx(expected)


def test_signatures_estimate_the_similarity_as_well_as_they_can():
    """For a similarity s, the error of 128 hashes is √(s (1 - s) / 128): 0.03 to 0.044 here."""
    errors = []
    for seed in range(150):
        one = checks.words(300, seed)
        other = checks.nearly(one, 30 + seed)
        texts = " ".join(one), " ".join(other)
        true = jaccard(*texts)
        estimated = similarity(signature(texts[0]), signature(texts[1]))
        errors.append((estimated - true) / (true * (1 - true) / module.HASHES) ** 0.5)
    assert abs(np.mean(errors)) < 0.4  # no bias: 0 ± 0.08
    assert 0.8 < np.std(errors) < 1.25


def test_a_signature_is_the_same_in_every_process():
    """Known values: an index on disk would be worthless if they changed."""
    assert signature("to be or not to be that is the question")[:3].tolist() == KNOWN
    code = "import sys; from course_lib.data import signature; print(signature(sys.argv[1]).sum())"
    text = "to be or not to be that is the question"
    result = subprocess.run([sys.executable, "-c", code, text], cwd=ROOT, capture_output=True)
    assert int(result.stdout) == signature(text).sum()


KNOWN = [741410039, 749968540, 922422514]


def test_long_texts_are_hashed_block_by_block_without_a_difference(monkeypatch):
    text = " ".join(checks.words(2_000, 0))
    whole = signature(text)
    monkeypatch.setattr(module, "_BLOCK", 7)
    assert (signature(text) == whole).all()


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_near_copies_above_the_threshold_are_found_and_others_are_not(tmp_path, threshold):
    """Every candidate is verified, so nothing below the threshold is ever called near."""
    found = {True: [], False: []}
    with Deduplicator(tmp_path / "index", threshold) as index:
        for seed in range(150):
            one = checks.words(200, seed)
            other = checks.nearly(one, random.Random(seed).randrange(1, 110))
            index.look(f"{seed}", " ".join(one))
            verdict = index.look(f"{seed} again", " ".join(other))
            true = jaccard(" ".join(one), " ".join(other))
            found[true >= threshold].append(verdict.kind == "near")
            if verdict.kind == "near":
                assert (verdict.of, verdict.similarity) == (f"{seed}", pytest.approx(true))
    assert not any(found[False])
    assert len(found[True]) >= 5
    assert np.mean(found[True]) > 0.9


def test_chinese_and_japanese_are_compared_character_by_character():
    one = "春眠不觉晓处处闻啼鸟夜来风雨声花落知多少" * 2
    assert 0.6 < jaccard(one, one.replace("春眠", "冬日", 1)) < 1
    assert jaccard(one, one[::-1]) < 0.1


def test_texts_without_a_word_are_near_nothing(tmp_path):
    with Deduplicator(tmp_path / "index") as index:
        kinds = [index.look(text, text).kind for text in ("!!!", "???", "!!!", "word", "Word")]
    assert kinds == ["new", "new", "exact", "new", "near"]


def test_only_equal_texts_without_a_threshold(tmp_path):
    text = " ".join(checks.words(50, 0))
    with Deduplicator(tmp_path / "index", threshold=None) as index:
        assert [index.look("", t).kind for t in (text, text.upper(), text)] == [
            "new",
            "new",
            "exact",
        ]
    for threshold in (0, 1.1, -1):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            Deduplicator(tmp_path / "other", threshold)


def test_an_index_is_gone_on_with_where_its_last_note_was_made(tmp_path):
    """What a killed process learned after its last note is as if it had never been."""
    texts = [" ".join(checks.words(50, seed)) for seed in range(3)]
    code = (
        "import os, sys; from course_lib.data import Deduplicator\n"
        "index = Deduplicator(sys.argv[1]); index.look('0', sys.argv[2]); index.note('a', b'1')\n"
        "index.look('1', sys.argv[3]); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "index"), *texts[:2]]
    assert subprocess.run(command, cwd=ROOT).returncode == -9
    with Deduplicator(tmp_path / "index") as index:
        assert (index.noted("a"), index.noted("b")) == (b"1", None)
        kinds = [index.look(f"{i} again", text).kind for i, text in enumerate(texts)]
    assert kinds == ["exact", "new", "new"]


def test_an_index_keeps_its_threshold(tmp_path):
    for threshold in (0.8, 0.8):
        with Deduplicator(tmp_path / "index", threshold) as index:
            index.look("a", "some text")
    for threshold in (0.5, None):
        with pytest.raises(ValueError, match=r"index was made with the threshold 0\.8"):
            Deduplicator(tmp_path / "index", threshold)


def test_what_is_no_index_is_named(tmp_path):
    (tmp_path / "junk").write_text("no index " * 100)
    with pytest.raises(sqlite3.DatabaseError, match="junk: file is not a database"):
        Deduplicator(tmp_path / "junk")
    with pytest.raises(sqlite3.OperationalError, match="nowhere/index: unable to open"):
        Deduplicator(tmp_path / "nowhere" / "index")


def test_of_several_near_texts_the_first_is_named_and_the_threshold_itself_counts(tmp_path):
    base, end = checks.words(200, 1), checks.words(100, 2)
    with Deduplicator(tmp_path / "several", 0.4) as index:
        assert index.look("base", " ".join(base)).kind == "new"
        assert index.look("other", " ".join(base[:100] + end)).kind == "new"
        assert index.look("between", " ".join(base[:130] + end[30:]))[:2] == ("near", "base")
    one, other = "a b c d e f g", "a b c d e f x"
    assert jaccard(one, other) == 0.5
    with Deduplicator(tmp_path / "equal", 0.5) as index:
        assert [index.look(text, text).kind for text in (one, other)] == ["new", "near"]


def test_a_band_that_many_texts_share_is_noted_for_a_few_only(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CANDIDATES", 3)
    with Deduplicator(tmp_path / "index", threshold=0.99) as index:
        for i in range(20):
            index.look(f"{i}", " ".join(checks.nearly(checks.words(100, 0), 5)) + f" end{i}")
    rows = sqlite3.connect(tmp_path / "index").execute("SELECT COUNT(*) FROM bands GROUP BY band")
    assert max(row[0] for row in rows) == 3
