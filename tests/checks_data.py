"""Checks of the data path, shared by its tests and by its mutants (faults that are put back)."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from course_lib.data import (
    DataConfig,
    DataError,
    ShardWriter,
    TokenShards,
    load_tokenizer,
    open_datasets,
    prepare,
)
from tests.checks_text import documents


def write_shards(folder: Path, documents: list[list[int]], vocab: int = 70_000, **options):
    """Token shards of these documents, opened; one byte of text a token."""
    with ShardWriter(folder, vocab, **options) as writer:
        for ids in documents:
            writer.add(ids, len(ids))
    return TokenShards(folder)


def counting(tokens: int, documents: int = 1) -> list[list[int]]:
    """Documents of the tokens 0, 1, 2, …, so that each token is its own position."""
    return [part.tolist() for part in np.array_split(np.arange(tokens), documents)]


def check_ids_survive(folder: Path) -> None:
    """Ids come back as they went in, or are refused; they never wrap."""
    for vocab, ids in ((65_536, [0, 65_535]), (100_277, [65_535, 65_536, 70_000, 100_276])):
        shards = write_shards(folder / str(vocab), [ids], vocab)
        assert shards.read(0, len(ids)).tolist() == ids
    for vocab, ids in ((65_536, [65_536]), (65_536, [70_000]), (100_277, [100_277]), (10, [-1])):
        assert _raises(ValueError, lambda: write_shards(folder / "bad", [ids], vocab))


def check_damage_is_found(folder: Path) -> None:
    """One changed byte is found, with its file and place."""
    write_shards(folder, [list(range(1_000_000))], vocab=1_000_000)  # 4 MB, four blocks
    path = folder / "tokens-00000.bin"
    data = bytearray(path.read_bytes())
    data[2_500_000] ^= 1
    path.write_bytes(data)
    message = _raises(DataError, lambda: TokenShards(folder))
    assert message, "an altered shard was opened"
    assert str(path) in message
    assert "between byte 2097152 and byte 3145728" in message


def check_foreign_ids_are_refused(folder: Path) -> None:
    """Ids beyond the model's vocabulary are refused with file and offset."""
    write_shards(folder, [[1, 2, 3, 4, 99, 5]], vocab=100)
    message = _raises(DataError, lambda: TokenShards(folder, vocab=50))
    assert message, "an id beyond the vocabulary was accepted"
    assert "tokens-00000.bin: id 99 at byte 8 is not below vocab 50" in message


def check_split(folder: Path) -> None:
    """Held-out documents are whole, never in training, and both sides are the corpus."""
    texts = folder / "texts"
    texts.mkdir()
    originals = {f"{i}.txt": f"Document {i} says {i * i}. " * (5 + i) for i in range(12)}
    originals["copy.txt"] = originals["3.txt"]
    for name, text in originals.items():
        (texts / name).write_text(text)
    config = DataConfig(
        str(texts), sequence_length=8, held_out=0.4, seed=1, cache=str(folder / "cache")
    )
    prepared = prepare(config, 300)
    tokenizer = load_tokenizer(prepared.tokenizer)
    train, held_out = (
        documents(data.shards, tokenizer) for data in open_datasets(prepared, config)
    )
    assert train
    assert held_out
    assert not set(train) & set(held_out), "a text is in training and held out"
    assert Counter(train + held_out) == Counter(originals.values())


def _raises(kind: type[Exception], action: Callable[[], object]) -> str:
    """The message of an expected exception, or "" if there is none."""
    try:
        action()
    except kind as problem:
        return str(problem)
    return ""
