"""Samples: the sample at (step, index) is a pure function of the data and the seed.

Nothing is shuffled in memory and nothing is remembered. The n-th sample ever trained on,
n = step · global_batch + index, lies in epoch n // samples at position n % samples. Each epoch
has its own permutation, which is computed for one position at a time, with integers only. So
ranks, workers and resumed runs agree on the order without a word between them.
"""

import hashlib
from math import isqrt
from typing import Literal, NamedTuple, get_args

import numpy as np

from course_lib.data import DataError
from course_lib.data.shards import TokenShards

NO_TARGET = -100  # the label of a position that has no target; the loss leaves it out
Packing = Literal["stream", "pad"]


class Sample(NamedTuple):
    """One window of tokens."""

    tokens: np.ndarray  # (sequence,) int64
    labels: np.ndarray  # (sequence,) int64, the token that follows, or NO_TARGET
    valid: int  # number of real tokens, which come first; as many labels are not NO_TARGET


class TokenDataset:
    """Windows of tokens, in another order each epoch.

    sequence_length: tokens a window.
    packing: "stream", windows over all documents in a row, of which only the last is padded; or
        "pad", a window for each document or piece of one, so that label counts are uneven.
    Every token but the first is a target exactly once an epoch, whatever the packing; with "pad",
    a document's last target is the token that opens the next one. Raises DataError for too few
    tokens for a window.
    """

    def __init__(
        self, shards: TokenShards, sequence_length: int, packing: Packing = "stream", seed: int = 0
    ) -> None:
        if packing not in get_args(Packing):
            raise ValueError(f"packing is {packing!r}; use one of {', '.join(get_args(Packing))}")
        needed = sequence_length + 1 if packing == "stream" else 2
        if len(shards) < needed:
            raise DataError(
                f"{shards.directory} holds {len(shards)} tokens; one window of {sequence_length} "
                f"needs {needed} (packing = {packing!r}). Use shorter windows or more text."
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.seed = seed
        self.text_bytes = shards.text_bytes  # in UTF-8, the unit of bits per byte
        starts = shards.starts if packing == "pad" else [0]
        self._starts = np.asarray(starts, np.int64)  # (spans,) first token of each span
        self._ends = np.append(self._starts[1:], len(shards) - 1)  # (spans,) its last target
        counts = window_counts(self._ends - self._starts, sequence_length)
        self._windows = np.cumsum(counts)  # (spans,) windows up to the end of each span

    def __len__(self) -> int:
        return int(self._windows[-1])  # samples an epoch

    def locate(self, step: int, index: int, global_batch: int) -> tuple[int, int]:
        """The (epoch, window) of sample `index` of the global batch at a data step."""
        if step < 0 or not 0 <= index < global_batch:
            raise IndexError(f"no sample {index} at step {step}: a global batch has {global_batch}")
        epoch, position = divmod(step * global_batch + index, len(self))
        return epoch, permuted(position, len(self), self.seed, epoch)

    def sample(self, step: int, index: int, global_batch: int) -> Sample:
        """Sample `index` (0 … global_batch - 1) of the global batch at a data step."""
        return self.window(self.locate(step, index, global_batch)[1])

    def window(self, number: int) -> Sample:
        """Window `number` (0 … len - 1) in the order of the text."""
        if not 0 <= number < len(self):
            raise IndexError(f"window {number} is outside 0 to {len(self) - 1}")
        span = int(np.searchsorted(self._windows, number, side="right"))
        before = int(self._windows[span - 1]) if span else 0
        begin = int(self._starts[span]) + (number - before) * self.sequence_length
        valid = min(self.sequence_length, int(self._ends[span]) - begin)
        row = self.shards.read(begin, begin + valid + 1)  # (valid + 1,)
        tokens = np.zeros(self.sequence_length, np.int64)
        labels = np.full(self.sequence_length, NO_TARGET, np.int64)
        tokens[:valid] = row[:-1]
        labels[:valid] = row[1:]
        return Sample(tokens, labels, valid)


def window_counts(targets: np.ndarray, sequence_length: int) -> np.ndarray:
    """Windows that cover spans of so many targets, the last of each partly filled: (spans,)."""
    return -(-targets // sequence_length)


def permuted(position: int, count: int, seed: int, epoch: int) -> int:
    """Where a permutation of 0 … count - 1, chosen by (seed, epoch), takes a position.

    A Feistel network (Luby and Rackoff, 1988) permutes 0 … side² - 1, with side² just above
    `count`. A result that is too large goes through it again until one is not, which keeps it a
    permutation (Black and Rogaway, 2002).
    """
    side = isqrt(count - 1) + 1
    left, right = divmod(position, side)
    for key in range(8):
        left, right = right, (left + scrambled(right, key, seed, epoch)) % side
    value = left * side + right
    return value if value < count else permuted(value, count, seed, epoch)


def scrambled(*numbers: int) -> int:
    """A hash of whole numbers: 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())
