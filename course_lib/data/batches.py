"""Batches: samples as tensors, for training and for an evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from course_lib.data.samples import NO_TARGET, Sample, Windows


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
        ahead = torch.device(device).type == "cuda"  # from a GPU, the host must wait for the copy
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **{n: t.to(device, non_blocking=ahead) for n, t in tensors.items()})


def batch(dataset: Windows, step: int, indices: Sequence[int], global_batch: int) -> Batch:
    """Samples `indices` (each 0 … global_batch - 1) of the global batch at a data step."""
    return to_batch(dataset.samples(step, indices, global_batch), indices, step)


def to_batch(rows: Sample, indices: Sequence[int], step: int) -> Batch:
    """Stacked samples as a batch; its tensors are the arrays' own memory."""
    tokens, labels, positions = map(torch.from_numpy, (rows.tokens, rows.labels, rows.positions))
    documents = None if rows.documents is None else torch.from_numpy(rows.documents)
    samples = torch.tensor(list(indices))
    return Batch(tokens, labels, positions, samples, step, documents, int(rows.valid.sum()))


def micro_batches(rows: Sample, indices: Sequence[int], step: int, size: int) -> list[Batch]:
    """The same, cut into batches of `size` rows."""
    parts = []
    for at in range(0, len(indices), size):
        own = slice(at, at + size)
        cut = Sample(*(field if field is None else field[own] for field in rows))
        parts.append(to_batch(cut, indices[own], step))
    return parts


def evaluation_batches(
    dataset: Windows, rank: int, world_size: int, batch_size: int
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


def _with_empty_rows(rows: Sample, count: int) -> Sample:
    """Samples with `count` rows more that have no labels."""

    def longer(part: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([part, np.full((count, *part.shape[1:]), fill, part.dtype)])

    fills = Sample(0, NO_TARGET, 0, 0, 0)
    return Sample(*(None if p is None else longer(p, f) for p, f in zip(rows, fills)))
