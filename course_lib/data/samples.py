"""Samples: the sample at (step, index) is a pure function of the data and the seed.

Nothing is shuffled in memory and nothing is remembered. The n-th sample ever trained on,
n = step · global_batch + index, lies in epoch n // samples at position n % samples. Each epoch
has its own permutation, which is computed for one position at a time by a small Feistel
network (Luby and Rackoff, 1988; cycle walking after Black and Rogaway, 2002), with integers
only. So ranks, workers and resumed runs agree on the order without a word between them.
"""

import hashlib
from functools import lru_cache
from math import isqrt
from typing import Literal, NamedTuple

import numpy as np

from course_lib.data.errors import DataError
from course_lib.data.shards import TokenShards

NO_TARGET = -100  # the label of a position that has no target; the loss leaves it out
Packing = Literal["stream", "pad"]

_ROUNDS = 8
_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    """One window: tokens and labels, int64 (sequence,), and the number of real labels."""

    tokens: np.ndarray
    labels: np.ndarray
    valid: int


class TokenDataset:
    """Windows of tokens, in another order each epoch.

    Every token but the first is a target exactly once an epoch, whatever the packing:

    - ``stream``: windows over the concatenated documents; only the last one is padded.
    - ``pad``: a document, or a piece of one, a window; its last target is the token that opens
      the next document. The rest of the window is padded, so label counts are uneven.

    Args:
        shards: the tokens.
        sequence_length: tokens a window.
        packing: "stream" or "pad".
        seed: of the order of samples.
    Raises:
        DataError: too few tokens for a window.
    """

    def __init__(
        self, shards: TokenShards, sequence_length: int, packing: Packing = "stream", seed: int = 0
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length is {sequence_length}; use 1 or more")
        if packing not in ("stream", "pad"):
            raise ValueError(f"packing is {packing!r}; use 'stream' or 'pad'")
        needed = sequence_length + 1 if packing == "stream" else 2
        if len(shards) < needed:
            raise DataError(
                f"{shards.directory} holds {len(shards)} tokens; one window of {sequence_length} "
                f"needs {needed} (packing = {packing!r}). Use shorter windows or more text."
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.packing = packing
        self.seed = seed
        starts = shards.starts if packing == "pad" else np.zeros(1, np.int64)
        self._starts = np.asarray(starts, np.int64)  # (spans,) first token of each span
        self._ends = np.append(self._starts[1:], len(shards) - 1)  # (spans,) its last target
        if (self._ends < self._starts).any():
            raise DataError(f"{shards.directory}: the documents' bounds are not in order")
        counts = window_counts(self._ends - self._starts, sequence_length)
        self._windows = np.cumsum(counts)  # (spans,) windows up to the end of each span

    def __len__(self) -> int:
        """Windows, which is samples an epoch."""
        return int(self._windows[-1])

    @property
    def targets(self) -> int:
        """Targets an epoch: all tokens but the first."""
        return len(self.shards) - 1

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens, the unit of bits per byte."""
        return self.shards.text_bytes

    def locate(self, step: int, index: int, global_batch: int) -> tuple[int, int]:
        """The (epoch, window) of sample ``index`` of the global batch at a data step."""
        if step < 0 or not 0 <= index < global_batch:
            raise IndexError(
                f"there is no sample {index} at step {step}: steps start at 0 and a global batch "
                f"of {global_batch} has samples 0 to {global_batch - 1}"
            )
        epoch, position = divmod(step * global_batch + index, len(self))
        return epoch, permuted(position, len(self), self.seed, epoch)

    def sample(self, step: int, index: int, global_batch: int) -> Sample:
        """Sample ``index`` (0 … global_batch - 1) of the global batch at a data step."""
        return self.window(self.locate(step, index, global_batch)[1])

    def window(self, number: int) -> Sample:
        """Window ``number`` (0 … len - 1) in the order of the text."""
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

    A Feistel network permutes 0 … side² - 1, with side² just above ``count``; results that
    are too large go through it again until one is not, which keeps it a permutation.
    """
    side = isqrt(count - 1) + 1
    value = position
    while True:
        left, right = divmod(value, side)
        for key in round_keys(seed, epoch):
            left, right = right, (left + _mix(right ^ key)) % side
        value = left * side + right
        if value < count:
            return value


@lru_cache(maxsize=64)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key a round of the network."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _mix(x: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
