"""Boxes: rectangles of a tensor, each with its place in the whole one.

With them any cut can be written down, whatever made it: uneven parts (boxes of different sizes),
padding (local rows that no box covers), interleaved pieces (several boxes).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor that a rank holds, and where it begins locally."""

    offset: tuple[int, ...]  # in the global tensor
    size: tuple[int, ...]
    local_offset: tuple[int, ...]  # in this rank's tensor

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def place(self) -> tuple[slice, ...]:
        """Where the box lies in the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size))

    @property
    def local(self) -> tuple[slice, ...]:
        """Where the box lies in the local tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.local_offset, self.size))


def whole(shape: Iterable[int]) -> Box:
    """The box of a tensor that is held undivided."""
    shape = tuple(shape)
    zeros = (0,) * len(shape)
    return Box(zeros, shape, zeros)


class Rectangle(Protocol):
    """What has a place in a whole tensor: a box, or a piece of a checkpoint."""

    offset: Sequence[int]
    size: Sequence[int]


def intersection(a: Rectangle, b: Rectangle) -> tuple[list[int], list[int]] | None:
    """Where what two rectangles share begins and ends; None where they share nothing."""
    starts = [max(x, y) for x, y in zip(a.offset, b.offset)]
    stops = [min(x + s, y + t) for x, s, y, t in zip(a.offset, a.size, b.offset, b.size)]
    return (starts, stops) if all(i < j for i, j in zip(starts, stops)) else None


def tiling_fault(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Why these rectangles do not hold every element of the shape exactly once; None if they do."""
    ordered = sorted(rectangles, key=lambda box: box.offset)
    for index, box in enumerate(ordered):
        if any(o < 0 or o + s > n for o, s, n in zip(box.offset, box.size, shape)):
            return f"a box at {tuple(box.offset)} of size {tuple(box.size)} leaves the tensor"
        for other in ordered[index + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.size[0]:
                break  # sorted: this one and all later ones begin below the box
            if intersection(box, other):
                return f"boxes at {tuple(box.offset)} and {tuple(other.offset)} overlap"
    held = sum(math.prod(box.size) for box in ordered)
    if held != math.prod(shape):
        return f"{held:,} of {math.prod(shape):,} elements are there"
    return None
