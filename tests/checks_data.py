"""Checks of the data path, shared by its tests and by its mutants (faults that are put back)."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from course_lib.data import (
    DataConfig,
    DataError,
    ShardWriter,
    TokenDataset,
    TokenShards,
    batch,
    evaluation_batches,
    load_tokenizer,
    open_datasets,
    prepare,
)


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


def check_every_token_is_a_target_once(dataset: TokenDataset) -> None:
    """Every token but the first is a target exactly once, after the tokens before it."""
    assert len(dataset) > 0
    targets: Counter[int] = Counter()
    for number in range(len(dataset)):
        tokens, labels, valid, *_ = dataset.window(number)
        real = labels != -100
        assert valid == real.sum()
        assert real[:valid].all(), "labels are left out before the padding"
        assert tokens.shape == labels.shape == (dataset.sequence_length,)
        assert tokens.dtype == labels.dtype == np.int64
        assert (labels[real] == tokens[real] + 1).all(), "a label is not the next token"
        targets.update(labels[real].tolist())
    assert targets == Counter(range(1, len(dataset.shards))), "targets are missing or repeated"


def check_order(dataset: TokenDataset) -> None:
    """Each epoch is a permutation of all windows, and no two epochs are alike."""
    epochs = [order(dataset, epoch) for epoch in range(4)]
    for windows in epochs:
        assert sorted(windows) == list(range(len(dataset)))
    assert len({tuple(windows) for windows in epochs}) == len(epochs), "epochs repeat their order"


def check_ranks_share(make: Callable[[int], TokenDataset], world_size: int) -> None:
    """Ranks read disjoint samples, which together are the epoch, and the same global batches."""
    datasets = [make(rank) for rank in range(world_size)]
    per_rank, seen = 2, []
    global_batch = world_size * per_rank
    steps = len(datasets[0]) // global_batch
    for step in range(steps):
        for rank, dataset in enumerate(datasets):
            for index in range(rank * per_rank, (rank + 1) * per_rank):
                seen.append(dataset.locate(step, index, global_batch)[1])
    assert len(set(seen)) == len(seen), "ranks overlap"
    assert len(seen) == steps * global_batch
    alone = make(0)
    assert seen == [alone.locate(0, i, len(seen))[1] for i in range(len(seen))]


def check_sample_is_pure(make: Callable[[], TokenDataset]) -> None:
    """A sample does not depend on what was read before: resume and workers are exact."""
    used, fresh, global_batch = make(), make(), 6
    forwards = [used.sample(s, i, global_batch) for s in range(5) for i in range(global_batch)]
    for step in reversed(range(5)):
        for index in reversed(range(global_batch)):
            again = fresh.sample(step, index, global_batch)
            assert (again.tokens == forwards[step * global_batch + index].tokens).all()
            assert (again.labels == forwards[step * global_batch + index].labels).all()
    part = batch(make(), 3, range(2, 5), global_batch)
    whole = batch(make(), 3, range(global_batch), global_batch)
    assert (part.tokens == whole.tokens[2:5]).all()
    assert part.samples.tolist() == [2, 3, 4]


def check_evaluation(dataset: TokenDataset, world_size: int, batch_size: int) -> None:
    """Each target counts once over all ranks, in equally many batches of equal shape."""
    targets: Counter[int] = Counter()
    counts, shapes = set(), set()
    for rank in range(world_size):
        batches = list(evaluation_batches(dataset, rank, world_size, batch_size))
        counts.add(len(batches))
        for part in batches:
            shapes.add(tuple(part.tokens.shape))
            assert part.valid == int((part.labels != -100).sum())
            targets.update(part.labels[part.labels != -100].tolist())
    assert len(counts) == 1, "ranks have different numbers of batches, so a collective would hang"
    assert shapes == {(batch_size, dataset.sequence_length)}
    assert targets == Counter(range(1, len(dataset.shards))), "targets are missing or repeated"


def check_bits_per_byte(dataset: TokenDataset) -> None:
    """The metric is the same for every number of ranks."""

    def bits(world_size: int) -> float:
        nats = 0.0
        for rank in range(world_size):
            for part in evaluation_batches(dataset, rank, world_size, batch_size=1):
                real = part.labels[part.labels != -100]
                nats += float((1 + 0.01 * real.double()).sum())  # each target costs its own price
        return nats / math.log(2) / dataset.text_bytes

    for world_size in (2, 3, 4, 7):
        assert bits(world_size) == pytest.approx(bits(1), rel=1e-12)


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


def documents(shards: TokenShards, tokenizer) -> list[str]:
    """The texts in shards."""
    bounds = [*shards.starts.tolist(), len(shards)]
    texts = []
    for start, stop in pairwise(bounds):
        ids = shards.read(start, stop).tolist()
        assert ids.pop(0) == tokenizer.end
        texts.append(tokenizer.decode(ids))
    return texts


def order(dataset: TokenDataset, epoch: int) -> list[int]:
    """The windows of an epoch, in order."""
    places = [divmod(epoch * len(dataset) + n, 4) for n in range(len(dataset))]
    located = [dataset.locate(step, index, 4) for step, index in places]
    assert {epoch for epoch, _ in located} == {epoch}
    return [window for _, window in located]


def _raises(kind: type[Exception], action: Callable[[], object]) -> str:
    """The message of an expected exception, or "" if there is none."""
    try:
        action()
    except kind as problem:
        return str(problem)
    return ""
