"""Checks of samples, batches and mixtures, shared by their tests and by their mutants."""

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib.data import (
    Mixture,
    TokenDataset,
    batch,
    evaluation_batches,
    fetch_ahead,
    to_batch,
)
from course_lib.model import ModelConfig, build
from tests.checks_data import counting, write_shards

SHAPES = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False,
              "kv_heads": 2, "tie_embeddings": False},
}  # fmt: skip


@contextmanager
def dataset_of(documents, sequence_length=16, packing="stream", seed=0, **options):
    """A data set of these documents, whose files last as long as the block."""
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder), documents, **options)
        yield TokenDataset(shards, sequence_length, packing, seed)


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


def check_documents_are_told_apart() -> None:
    """Positions restart and document numbers rise exactly where a document starts."""
    lengths = [1, 5, 16, 3, 2, 40, 1, 1, 9, 33]
    bounds = np.cumsum([0, *lengths])
    documents = [list(range(a, b)) for a, b in pairwise(bounds.tolist())]
    with dataset_of(documents, 16, "documents", tokens_per_shard=30) as data:
        seen = 0
        for number in range(len(data)):
            sample = data.window(number)
            for column in range(sample.valid):
                token = int(sample.tokens[column])
                start = max(int(bounds[bounds <= token].max()), number * 16)  # or of the window
                assert sample.positions[column] == token - start, "a position does not restart"
                before = sample.documents[column - 1] if column else 0
                opens = column > 0 and token in bounds
                assert sample.documents[column] == before + opens, "a document has a wrong number"
                seen += 1
        assert seen == bounds[-1] - 1


def check_documents_do_not_leak(shape: str, dropout: float) -> None:
    """Packed beside another text, a text has the scores that it has alone (DA-04).

    dropout: 0 for fused attention, else the explicit path. Weights are large enough that a model
    that sees the other text differs by more than 0.4: `check_a_leak_would_show`.
    """
    first, second = texts_of(0), texts_of(1)
    alone, packed, other = (scores(docs, shape, dropout) for docs in packings())
    size = len(second)
    assert torch.equal(packed[:, -size:], other[:, -size:]), "a text sees the one before it"
    if dropout < 1e-6:  # else the masks differ with the place in the window
        difference = (packed[:, -size:] - alone[:, :size]).abs().max()
        assert difference <= 1e-6, f"a text is not what it is alone: {difference:.2g}"
    assert (packed[:, : len(first)] - other[:, : len(first)]).abs().max() > 0.4


def texts_of(number: int) -> list[int]:
    """A text of small ids, opened by 0."""
    return [0, *np.random.default_rng(number).integers(1, 50, 8 + 3 * number).tolist()]


def packings() -> tuple:
    """The second text alone, after the first, and after another one of the same length."""
    first, second = texts_of(0), texts_of(1)
    changed = [0, *((np.array(first[1:]) + 17) % 49 + 1).tolist()]
    return [second, texts_of(2)], [first, second], [changed, second]


def scores(documents: list[list[int]], shape: str, dropout: float, packing="documents"):
    """What a model says on the first window, made of two documents: (1, sequence, vocab)."""
    length = sum(map(len, documents))
    config = ModelConfig(vocab=50, width=32, heads=4, dropout=dropout, **SHAPES[shape])
    model = build(config, seed=3, dtype=torch.float64).train(dropout > 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
        with dataset_of([*documents, [0]], length, packing, vocab=50) as data:
            return model(**to_batch(data.windows([0]), [0], step=0).inputs())


def check_evaluation_keeps_documents_apart() -> None:
    """Evaluated in shared windows, texts cost what they cost each in its own."""
    documents = [texts_of(number)[:8] for number in range(6)]
    model = build(ModelConfig(vocab=50, width=32, heads=4), dtype=torch.float64).eval()

    def nats(packing: str, length: int) -> float:
        with dataset_of(documents, length, packing, vocab=50) as data, torch.no_grad():
            total = 0.0
            for part in evaluation_batches(data, 0, 1, 2):
                loss = torch.nn.functional.cross_entropy
                total += float(loss(model(**part.inputs()).flatten(0, 1), part.labels.flatten(),
                                    reduction="sum"))  # fmt: skip
            return total

    assert nats("documents", 24) == pytest.approx(nats("pad", 8), rel=1e-12)
    assert nats("stream", 24) != pytest.approx(nats("pad", 8), rel=1e-4)


def check_shares(weights: list[float], seed: int = 0) -> None:
    """Each source gets its share of every stretch, within the stated bound, in its own order."""
    exact = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    with dataset_of(counting(50)) as data:
        mixture = Mixture([data] * len(weights), weights, seed)
    bound = max(len(weights) - 1, 1e-9)
    given = [0] * len(weights)
    for number in range(400):
        source, before = mixture.place(number)
        assert before == given[source], "a source skips or repeats a sample"
        given[source] += 1
        assert mixture.drawn(number + 1) == given, "`drawn` does not count what was given"
        for count, share in zip(given, exact):
            assert abs(count - (number + 1) * share) < bound, "a source is off its share"
    for far in (10**6, 10**12 + 7):
        for count, share in zip(mixture.drawn(far), exact):
            assert abs(count - far * share) < bound, "a source is off its share far out"


def check_mixture_is_pure() -> None:
    """What a mixture gives at a step does not depend on what it gave before."""
    with dataset_of(counting(90)) as one, dataset_of(counting(400)) as two:
        used, fresh = Mixture([one, two], [3, 1]), Mixture([one, two], [3, 1])
        forwards = [used.sample(step, i, 5).tokens for step in range(20) for i in range(5)]
        for number in reversed(range(100)):
            again = fresh.sample(*divmod(number, 5), 5).tokens
            assert (again == forwards[number]).all(), "a mixture remembers"


def check_sources_have_their_own_epochs() -> None:
    """Each source's samples are permutations of its windows, one after another."""
    with dataset_of(counting(90)) as one, dataset_of(counting(400)) as two:
        mixture, given = Mixture([one, two], [3, 1]), ([], [])
        for step in range(60):
            _, number = mixture.locate(step, 0, 1)
            given[number >= len(one)].append(number - len(one) * (number >= len(one)))
    for data, windows in zip((one, two), given):
        size = len(data)
        epochs = [windows[at : at + size] for at in range(0, len(windows) - size + 1, size)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(size)), "an epoch of a source is no permutation"
        assert len(set(map(tuple, epochs))) == len(epochs), "a source repeats its order"
    assert len(given[0]) == 45  # of 6 windows: 7 epochs and a half


GLOBAL_BATCH = 12


def consume(data, ranks: int, workers: int, first: int, last: int, kind="thread") -> np.ndarray:
    """Tokens of steps first … last - 1 as so many ranks see them: (steps, global batch, sequence).

    Each rank reads ahead past the end, and is then stopped, as in training.
    """
    each, parts = GLOBAL_BATCH // ranks, []
    for rank in range(ranks):
        own = range(rank * each, (rank + 1) * each)
        make = partial(data.samples, indices=own, global_batch=GLOBAL_BATCH)
        ahead = fetch_ahead(make, range(first, 10**9), workers, kind, 3)
        parts.append(np.stack([rows.tokens for rows in islice(ahead, last - first)]))
        ahead.close()
    return np.concatenate(parts, axis=1)


def check_resume(data, before: tuple[int, int], after: tuple[int, int], stop: int, **kind) -> None:
    """Stopped and resumed under other (ranks, workers), every step has its very samples."""
    start = consume(data, *before, 0, stop, **kind)
    rest = consume(data, *after, stop, stop + 4, **kind)
    for step, rows in enumerate(np.concatenate([start, rest])):
        expected = data.samples(step, range(GLOBAL_BATCH), GLOBAL_BATCH).tokens
        assert (rows == expected).all(), f"step {step} has other samples"


def order(dataset: TokenDataset, epoch: int) -> list[int]:
    """The windows of an epoch, in order."""
    places = [divmod(epoch * len(dataset) + n, 4) for n in range(len(dataset))]
    located = [dataset.locate(step, index, 4) for step, index in places]
    assert {epoch for epoch, _ in located} == {epoch}
    return [window for _, window in located]
