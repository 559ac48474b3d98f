"""Batches: samples stacked into tensors, fetched ahead, and the batches of an evaluation."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from course_lib.data.samples import NO_TARGET, Sample, TokenDataset

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch."""

    tokens: Tensor  # (batch, sequence) int64
    labels: Tensor  # (batch, sequence) int64, already shifted: the token that follows; -100 = none
    positions: Tensor  # (batch, sequence) int64, place of each token in its context
    samples: Tensor  # (batch,) int64, index of each sample in the global batch; keys dropout
    step: int  # the data step; keys dropout
    documents: Tensor | None = None  # (batch, sequence) int64, number of each token's document
    valid: int = -1  # labels that are not -100, known without asking the device; -1: count them

    def __post_init__(self) -> None:
        if self.valid < 0:
            object.__setattr__(self, "valid", int((self.labels != NO_TARGET).sum()))

    def inputs(self) -> dict[str, Tensor | int | None]:
        """What the model takes: `model(**batch.inputs())`."""
        names = ("tokens", "positions", "samples", "step", "documents")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **{n: t.to(device, non_blocking=True) for n, t in tensors.items()})


def batch(dataset: TokenDataset, step: int, indices: Sequence[int], global_batch: int) -> Batch:
    """Samples `indices` (each 0 … global_batch - 1) of the global batch at a data step."""
    return to_batch(dataset.samples(step, indices, global_batch), indices, step)


def to_batch(rows: Sample, indices: Sequence[int], step: int) -> Batch:
    """Stacked samples as a batch; its tensors are the arrays' own memory."""
    tokens, labels, positions = map(torch.from_numpy, (rows.tokens, rows.labels, rows.positions))
    documents = None if rows.documents is None else torch.from_numpy(rows.documents)
    samples = torch.tensor(list(indices))
    return Batch(tokens, labels, positions, samples, step, documents, int(rows.valid.sum()))


def evaluation_batches(
    dataset: TokenDataset, rank: int, world_size: int, batch_size: int
) -> Iterator[Batch]:
    """This rank's batches of an evaluation in which each target counts exactly once.

    Ranks get equally many batches of equal shapes, so that all take part in every collective;
    rows that are left over have no labels. Summed over batches and ranks, nats / ln 2 /
    `dataset.text_bytes` are bits per byte, the same for every number of ranks. No mean of means.
    """
    for numbers in evaluation_windows(len(dataset), rank, world_size, batch_size):
        real = [n for n in numbers if n < len(dataset)]
        rows = _with_empty_rows(dataset.windows(real), len(numbers) - len(real))
        yield to_batch(rows, numbers, step=0)


def evaluation_windows(count: int, rank: int, world_size: int, batch_size: int) -> Iterator[range]:
    """Window numbers of each batch of a rank; numbers >= `count` stand for empty rows."""
    for first in range(0, count, world_size * batch_size):
        start = first + rank * batch_size
        yield range(start, start + batch_size)


def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """Yield `items` in order while a thread makes `depth` (1 or more) of them ahead.

    An exception in the thread is raised here, in its place. Leaving the loop stops the thread.
    """
    source, end = iter(items), object()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(pool.submit(next, source, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(pool.submit(next, source, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)


def _with_empty_rows(rows: Sample, count: int) -> Sample:
    """Samples with `count` rows more that have no labels."""

    def longer(part: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([part, np.full((count, *part.shape[1:]), fill, part.dtype)])

    fills = Sample(0, NO_TARGET, 0, 0, 0)
    return Sample(*(None if p is None else longer(p, f) for p, f in zip(rows, fills)))
