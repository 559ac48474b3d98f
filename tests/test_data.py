"""The tokenizer, and token shards on disk."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from course_lib.data import (
    DataError,
    ShardWriter,
    TokenDataset,
    TokenShards,
    join_shards,
    load_tokenizer,
    prepare,
    token_dtype,
    train_tokenizer,
)
from course_lib.data import tokenizer as tokenizer_module
from course_lib.data.shards import digest
from tests import checks_data as checks
from tests import checks_text
from tests.checks_text import configure

ROOT = Path(__file__).parents[1]
TEXTS = [
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind\n" * 20,
    "Übung macht den Meister — 练习 🎭\n\n\n   spaces\tand tabs \n" * 20,
]


@pytest.fixture
def texts(tmp_path):
    return checks_text.small_corpus(tmp_path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


# Tokenizer


@given(st.text())
@settings(deadline=None)
def test_decode_undoes_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_document(text)) == text


def test_text_cannot_forge_the_opening_token(tokenizer):
    text = "an <|endoftext|> in the text"
    assert tokenizer.end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_file(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "one.json")
    code = (
        "import json, sys; from course_lib.data import train_tokenizer;"
        "train_tokenizer(json.loads(sys.argv[2]), 400).save(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "two.json"), json.dumps(TEXTS)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert load_tokenizer(tmp_path / "one.json").sha256 == tokenizer.sha256


def test_a_long_document_is_encoded_in_pieces_without_a_difference(tokenizer, monkeypatch):
    text = "".join(TEXTS) * 3 + "\n \n\n x\n\n" + TEXTS[0].replace("\n", " ")
    whole = tokenizer.encode(text)
    monkeypatch.setattr(tokenizer_module, "_PIECE", 50)
    assert len(list(tokenizer_module.pieces_of(text, 50))) > 50
    assert tokenizer.encode(text) == whole
    monkeypatch.setattr(tokenizer_module, "LESSON", 50)
    assert train_tokenizer(TEXTS, 400).sha256 == tokenizer.sha256


def test_text_without_any_break_is_still_cut_into_pieces(tokenizer, monkeypatch):
    endless = "abcdefghij" * 100
    assert max(map(len, tokenizer_module.pieces_of(endless, 50))) == 100
    monkeypatch.setattr(tokenizer_module, "_PIECE", 50)
    assert tokenizer.decode(tokenizer.encode(endless)) == endless
    assert train_tokenizer([*TEXTS, endless], 400).sha256 == tokenizer.sha256  # not learned from


def test_ids_that_the_tokenizer_lacks_decode_to_nothing(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("fool"), 9_999]) == "fool"


def test_a_vocabulary_smaller_than_the_bytes_is_refused(texts):
    with pytest.raises(DataError, match="vocab 100 is too small for all bytes; use >= 257"):
        prepare(configure(texts), 100)
    assert not list((texts.parent / "cache" / "prepared").glob("*/"))


def test_a_tokenizer_file_is_used_and_checked(texts, tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    prepared = prepare(configure(texts, tokenizer=str(path)), 1_000)
    assert load_tokenizer(prepared.tokenizer).sha256 == tokenizer.sha256
    with pytest.raises(DataError, match=f"use model.vocab >= {tokenizer.vocab}"):
        prepare(configure(texts, tokenizer=str(path)), tokenizer.vocab - 1)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        prepare(configure(texts, tokenizer=str(path)), 1_000)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(DataError, match=r"has no token '<.endoftext.>'"):
        load_tokenizer(path)


# Shards


@pytest.mark.trap("DA-01")
def test_ids_never_wrap(tmp_path):
    checks.check_ids_survive(tmp_path)


def test_ids_take_two_bytes_up_to_65536_entries():
    assert [token_dtype(v).name for v in (65_536, 65_537)] == ["uint16", "uint32"]


def test_ids_that_are_no_whole_numbers_are_refused(tmp_path):
    for ids in ([0.5], [[1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="must be a list of integers"):
            checks.write_shards(tmp_path, [ids])


@given(
    st.lists(st.lists(st.integers(0, 299), max_size=30), min_size=1, max_size=6),
    st.integers(1, 40),
)
@settings(deadline=None, max_examples=30)
def test_documents_come_back_over_any_shards(tmp_path_factory, documents, per_shard):
    folder = tmp_path_factory.mktemp("shards")
    shards = checks.write_shards(folder, documents, 300, tokens_per_shard=per_shard)
    flat = [token for ids in documents for token in ids]
    assert len(shards) == len(flat)
    assert len(list(folder.glob("tokens-*.bin"))) == -(-len(flat) // per_shard)
    for start in range(0, len(flat) + 1, 7):
        assert shards.read(start, len(flat)).tolist() == flat[start:]
        assert shards.read(0, start).tolist() == flat[:start]
    lengths = np.diff([*shards.starts.tolist(), len(flat)]).tolist()
    assert lengths == [len(ids) for ids in documents]
    assert (shards.documents, shards.text_bytes) == (len(documents), len(flat))


def test_an_altered_shard_is_refused_with_file_and_offset(tmp_path):
    checks.check_damage_is_found(tmp_path)


def test_an_id_beyond_the_vocabulary_is_refused_with_file_and_offset(tmp_path):
    checks.check_foreign_ids_are_refused(tmp_path)


def test_a_truncated_or_missing_or_longer_shard_is_refused(tmp_path):
    checks.write_shards(tmp_path, checks.counting(100), tokens_per_shard=40)
    path = tmp_path / "tokens-00001.bin"
    data = path.read_bytes()
    path.write_bytes(data[:101])
    with pytest.raises(DataError, match=r"tokens-00001\.bin is cut off at byte 101: .* 160 of"):
        TokenShards(tmp_path)
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match=r"tokens-00001\.bin goes on after byte 160: .* 161 bytes"):
        TokenShards(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"tokens-00001\.bin is missing"):
        TokenShards(tmp_path)
    path.write_bytes(data)
    assert len(TokenShards(tmp_path)) == 100


def test_altered_document_bounds_are_refused(tmp_path):
    checks.write_shards(tmp_path, checks.counting(100, documents=3))
    path = tmp_path / "documents.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"documents\.bin was altered"):
        TokenShards(tmp_path)


def test_tokens_that_are_not_there_are_refused(tmp_path):
    tokens = checks.write_shards(tmp_path, checks.counting(100))
    for start, stop in ((-2, 2), (5, 4), (90, 101)):
        with pytest.raises(IndexError, match=f"tokens {start} to {stop} are not all in 0 to 100"):
            tokens.read(start, stop)
    for vocab in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match=f"vocab {vocab} must be 1 to"):
            ShardWriter(tmp_path, vocab)
    for length in (0, -1):
        with pytest.raises(ValueError, match=f"windows of {length} tokens"):
            TokenDataset(tokens, length)
    for number in (1.5, "1", None):
        with pytest.raises(TypeError, match="windows have whole numbers"):
            TokenDataset(tokens, 8).window(number)


def test_shards_are_joined_with_all_that_they_hold(tmp_path):
    for name, vocab, ids in (("a", 300, [1, 2, 3]), ("b", 300, [4, 5]), ("c", 70_000, [6])):
        checks.write_shards(tmp_path / name, [ids], vocab)
    join_shards([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    both = TokenShards(tmp_path / "both")
    assert both.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert (both.text_bytes, both.starts.tolist()) == (5, [0, 3])
    for parts, message in ((["a", "c"], "2 parts with 2 vocab"), ([], "0 parts with 0 vocab")):
        with pytest.raises(ValueError, match=message):
            join_shards([tmp_path / part for part in parts], tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "has format 9; this version reads 6"),
        ({"vocab": 500}, "was altered"),
        ({"text_bytes": 1}, "was altered"),
        ({"shards": []}, "was altered"),
        ({"sha256": None}, "was altered"),
    ],
)
def test_an_altered_index_is_refused(tmp_path, change, message):
    checks.write_shards(tmp_path, checks.counting(100))
    path = tmp_path / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=rf"index\.json {message}"):
        TokenShards(tmp_path)
    for content in ("{", "7", "[]"):
        path.write_text(content)
        with pytest.raises(DataError, match=r"index\.json (is damaged|has format None)"):
            TokenShards(tmp_path)


@pytest.mark.parametrize("name", ["../tokens-00000.bin", "/etc/passwd", "a/b", "..", ""])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    checks.write_shards(tmp_path / "shards", checks.counting(100))
    path = tmp_path / "shards" / "index.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    index["shards"][0]["file"] = name
    path.write_text(json.dumps(index | {"sha256": digest(index)}))
    message = r"index\.json names a file outside" if "/" in name else "is missing"
    with pytest.raises(DataError, match=message):
        TokenShards(path.parent)


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int64"])
def test_shards_of_another_dtype_are_refused(tmp_path, dtype):
    checks.write_shards(tmp_path, checks.counting(100))  # ids below 70,000: uint32
    path = tmp_path / "index.json"
    index = json.loads(path.read_text()) | {"dtype": dtype}
    del index["sha256"]
    path.write_text(json.dumps(index | {"sha256": digest(index)}))
    with pytest.raises(DataError, match=f"index.json has dtype '{dtype}'; .* are uint32"):
        TokenShards(tmp_path)


def test_an_interrupted_write_leaves_nothing_that_opens(tmp_path):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        checks.write_shards(tmp_path, [[1, 2, 3], [300]], vocab=300)
    assert not list(tmp_path.glob("*.bin"))
    with pytest.raises(DataError, match="no finished token shards"):
        TokenShards(tmp_path)


def test_shards_travel_to_another_process_by_name_not_by_copy(tmp_path):
    shards = checks.write_shards(tmp_path, checks.counting(50_000))
    dataset = TokenDataset(shards, 16)
    sent = pickle.dumps(dataset)
    assert len(sent) < 2_000
    assert (pickle.loads(sent).window(5).tokens == dataset.window(5).tokens).all()
