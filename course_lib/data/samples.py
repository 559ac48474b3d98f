"""Samples: the sample at (step, index) is a pure function of the data and the seed.

Nothing is shuffled in memory and nothing is remembered. The n-th sample ever trained on,
n = step · global_batch + index, lies in epoch n // samples at position n % samples. Each epoch
has its own permutation, which is computed for any positions alone, with integers only. So
ranks, workers and resumed runs agree on the order without a word between them.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import isqrt
from typing import Literal, NamedTuple, get_args

import numpy as np

from course_lib.data import DataError
from course_lib.data.shards import TokenShards

ORDER = 2  # counts up whenever equal data and seeds give samples in another order
NO_TARGET = -100  # the label of a position that has no target; the loss leaves it out
Packing = Literal["stream", "documents", "pad"]


class Sample(NamedTuple):
    """One window of tokens; or several, with a first axis of rows in every field."""

    tokens: np.ndarray  # (sequence,) int64
    labels: np.ndarray  # (sequence,) int64, the token that follows, or NO_TARGET
    valid: int | np.ndarray  # real tokens, which come first; as many labels are not NO_TARGET
    positions: np.ndarray  # (sequence,) int64, place of each token in what it may attend to
    documents: np.ndarray | None  # (sequence,) int64, its document: 0, 1, … in this window


class Windows:
    """What can be drawn from anything that has `locate`, `windows` and a length."""

    def sample(self, step: int, index: int, global_batch: int) -> Sample:
        """Sample `index` (0 … global_batch - 1) of the global batch at a data step."""
        return self.window(self.locate(step, index, global_batch)[1])

    def samples(self, step: int, indices: Iterable[int], global_batch: int) -> Sample:
        """Several samples of one global batch, stacked."""
        return self.windows([self.locate(step, i, global_batch)[1] for i in indices])

    def window(self, number: int) -> Sample:
        """Window `number` (0 … len - 1) in the order of the text."""
        return Sample(*(part if part is None else part[0] for part in self.windows([number])))

    def checked(self, numbers: Sequence[int]) -> np.ndarray:
        """Window numbers as an array (numbers,); IndexError if one is outside 0 … len - 1."""
        numbers = np.asarray(numbers)
        if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
            raise TypeError(f"windows have whole numbers, not {numbers}")
        numbers = numbers.astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"windows {numbers} are not all in 0 to {len(self) - 1}")
        return numbers


class TokenDataset(Windows):
    """Windows of tokens, in another order each epoch.

    sequence_length: tokens a window.
    packing: "stream", windows over all documents in a row, of which only the last is padded;
        "documents", the same windows, but no document leaks into another: positions restart at
        0 in each, and `documents` tells attention which tokens belong together;
        or "pad", a window for each document or piece of one, so that label counts are uneven.
    Every token but the first is a target exactly once an epoch, whatever the packing. A document's
    last target is the token that opens the next one. This is the same for all documents, so it
    says "the text ends here" and nothing of the next text, whose first token is predicted from
    its own opening token. Raises DataError for too few tokens for a window.
    """

    def __init__(
        self, shards: TokenShards, sequence_length: int, packing: Packing = "stream", seed: int = 0
    ) -> None:
        if packing not in get_args(Packing):
            raise ValueError(f"packing is {packing!r}; use one of {', '.join(get_args(Packing))}")
        if sequence_length < 1:
            raise ValueError(f"windows of {sequence_length} tokens; use 1 or more")
        needed = 2 if packing == "pad" else sequence_length + 1
        if len(shards) < needed:
            raise DataError(
                f"{shards.directory} holds {len(shards)} tokens; one window of {sequence_length} "
                f"needs {needed} (packing = {packing!r}). Use shorter windows or more text."
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.packing = packing
        self.seed = seed
        self.text_bytes = shards.text_bytes  # in UTF-8, the unit of bits per byte
        starts = shards.starts if packing == "pad" else [0]
        self._starts = np.asarray(starts, np.int64)  # (spans,) first token of each span
        self._ends = np.append(self._starts[1:], len(shards) - 1)  # (spans,) its last target
        counts = window_counts(self._ends - self._starts, sequence_length)
        self._windows = np.cumsum(counts)  # (spans,) windows up to the end of each span
        self._before = self._windows - counts  # (spans,) and up to its start

    def __len__(self) -> int:
        return int(self._windows[-1])  # samples an epoch

    def locate(self, step: int, index: int, global_batch: int) -> tuple[int, int]:
        """The (epoch, window) of sample `index` of the global batch at a data step."""
        epoch, position = divmod(ordinal(step, index, global_batch), len(self))
        return epoch, permuted(position, len(self), self.seed, epoch)

    def windows(self, numbers: Sequence[int]) -> Sample:
        """Several windows, stacked."""
        numbers = self.checked(numbers)
        spans = self._windows.searchsorted(numbers, side="right")
        begins = self._starts[spans] + (numbers - self._before[spans]) * self.sequence_length
        valid = np.minimum(self._ends[spans] - begins, self.sequence_length)  # (rows,)
        tokens = np.zeros((len(numbers), self.sequence_length), np.int64)
        labels = np.full_like(tokens, NO_TARGET)
        for row, (begin, count) in enumerate(zip(begins.tolist(), valid.tolist())):
            ids = self.shards.read(begin, begin + count + 1)  # (count + 1,)
            tokens[row, :count] = ids[:-1]
            labels[row, :count] = ids[1:]
        return Sample(tokens, labels, valid, *self._places(begins, valid))

    def _places(self, begins: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, ...]:
        """Positions and, if documents are kept apart, their numbers: (rows, sequence) each."""
        positions = np.empty((len(begins), self.sequence_length), np.int64)
        positions[:] = np.arange(self.sequence_length)
        if self.packing != "documents":
            return positions, None
        opens = np.zeros_like(positions)  # 1 where a document starts within the window
        first = self.shards.starts.searchsorted(begins, side="right")
        last = self.shards.starts.searchsorted(begins + valid)
        for row in np.flatnonzero(first < last).tolist():
            opens[row, self.shards.starts[first[row] : last[row]] - begins[row]] = 1
        begun = np.maximum.accumulate(opens * positions, axis=1)  # where each token's document is
        return positions - begun, np.cumsum(opens, axis=1)

    def __reduce__(self) -> tuple:
        return TokenDataset, (self.shards, self.sequence_length, self.packing, self.seed)


def ordinal(step: int, index: int, global_batch: int) -> int:
    """How many samples come before this one in the whole of training."""
    if step < 0 or not 0 <= index < global_batch:
        raise IndexError(f"no sample {index} at step {step}: a global batch has {global_batch}")
    return step * global_batch + index


def window_counts(targets: np.ndarray, sequence_length: int) -> np.ndarray:
    """Windows that cover spans of so many targets, the last of each partly filled: (spans,)."""
    return -(-targets // sequence_length)


def permuted(position: int, count: int, seed: int, epoch: int) -> int:
    """Where a permutation of 0 … count - 1, chosen by (seed, epoch), takes a position."""
    block, place = divmod(position, _BLOCK)
    return int(_permuted_block(block, count, seed, epoch)[place])


_BLOCK = 1024  # positions that are permuted together, since numpy takes its time for each call


@lru_cache(maxsize=64)
def _permuted_block(block: int, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation takes positions block · _BLOCK and on: int64, at most (_BLOCK,)."""
    keys = [np.uint64(scrambled(number, seed, epoch)) for number in range(8)]
    first, last = block * _BLOCK, min((block + 1) * _BLOCK, count)
    return _feistel(np.arange(first, last, dtype=np.uint64), count, keys).astype(np.int64)


def _feistel(values: np.ndarray, count: int, keys: list[np.uint64]) -> np.ndarray:
    """A permutation of 0 … count - 1, applied to some of them: uint64, (values,).

    A Feistel network (Luby and Rackoff, 1988) permutes 0 … side² - 1, with side² just above
    `count`. Results that are too large go through it again until none is, which keeps it a
    permutation (Black and Rogaway, 2002).
    """
    side = np.uint64(isqrt(count - 1) + 1)
    left, right = values // side, values % side
    for key in keys:
        left, right = right, (left + mixed(right ^ key) % side) % side
    values = left * side + right
    again = values >= count
    if again.any():
        values[again] = _feistel(values[again], count, keys)
    return values


def scrambled(*numbers: int) -> int:
    """A hash of whole numbers: 64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())


def mixed(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which each input bit moves each output bit.

    It is the end of splitmix64 (Steele et al., 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
