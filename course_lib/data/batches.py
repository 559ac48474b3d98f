"""Batches: samples stacked into tensors, fetched ahead, and the batches of an evaluation."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from course_lib.data.samples import NO_TARGET, Sample, TokenDataset

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch.

    Attributes:
        tokens: (batch, sequence) int64.
        labels: (batch, sequence) int64, already shifted: the token that follows; -100 = none.
        positions: (batch, sequence) int64, place of each token in its context.
        samples: (batch,) int64, index of each sample in the global batch; keys dropout.
        step: the data step; keys dropout.
        documents: (batch, sequence) int64, number of each token's document, or None.
        valid: number of labels that are not -100, known without asking the device. Counted
            from the labels when it is not given.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    step: int
    documents: Tensor | None = None
    valid: int = -1

    def __post_init__(self) -> None:
        if self.valid < 0:
            object.__setattr__(self, "valid", int((self.labels != NO_TARGET).sum()))

    def inputs(self) -> dict[str, Tensor | int | None]:
        """What the model takes: ``model(**batch.inputs())``."""
        names = ("tokens", "positions", "samples", "step", "documents")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        names = ("tokens", "labels", "positions", "samples", "documents")
        moved = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return replace(self, **{n: t.to(device, non_blocking=True) for n, t in moved.items()})


def batch(dataset: TokenDataset, step: int, indices: Sequence[int], global_batch: int) -> Batch:
    """Samples ``indices`` (each 0 … global_batch - 1) of the global batch at a data step."""
    return _stack([dataset.sample(step, i, global_batch) for i in indices], indices, step)


def evaluation_batches(
    dataset: TokenDataset, rank: int, world_size: int, batch_size: int
) -> Iterator[Batch]:
    """This rank's batches of an evaluation in which each target counts exactly once.

    Ranks get equally many batches of equal shapes, so that all take part in every collective.
    Rows that are left over have no labels. Sum nats over batches and ranks; then bits per byte =
    nats / ln 2 / ``dataset.text_bytes``, the same for every number of ranks. No mean of means.
    """
    empty = np.zeros(dataset.sequence_length, np.int64)
    no_labels = np.full(dataset.sequence_length, NO_TARGET, np.int64)
    for numbers in evaluation_windows(len(dataset), rank, world_size, batch_size):
        rows = [
            dataset.window(n) if n < len(dataset) else Sample(empty, no_labels, 0) for n in numbers
        ]
        yield _stack(rows, numbers, step=0)


def evaluation_windows(
    windows: int, rank: int, world_size: int, batch_size: int
) -> Iterator[range]:
    """Window numbers of each batch of a rank; numbers >= ``windows`` stand for empty rows."""
    if not 0 <= rank < world_size or batch_size < 1:
        raise ValueError(f"rank {rank} of {world_size} with batches of {batch_size} is impossible")
    for first in range(0, windows, world_size * batch_size):
        start = first + rank * batch_size
        yield range(start, start + batch_size)


def prefetch(items: Iterable[T], depth: int = 2) -> Iterator[T]:
    """Yield ``items`` in order while a thread makes up to ``depth`` of them ahead.

    An exception in the thread is raised here, in its place. Closing the generator, or leaving
    the loop and dropping it, stops the thread.
    """
    if depth < 1:
        raise ValueError(f"prefetch depth is {depth}; use 1 or more")
    ready: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(kind: str, value: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def fill() -> None:
        try:
            if all(put("item", item) for item in items):
                put("end", None)
        except BaseException as problem:
            put("error", problem)

    thread = threading.Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join(timeout=5)


def _stack(rows: Sequence[Sample], indices: Sequence[int], step: int) -> Batch:
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))  # (batch, sequence)
    return Batch(
        tokens=tokens,
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        positions=torch.arange(tokens.shape[1]).repeat(len(rows), 1),
        samples=torch.tensor(list(indices), dtype=torch.int64),
        step=step,
        valid=sum(row.valid for row in rows),
    )
