"""Rectangles of a tensor, each an (offset, size) pair: what two share, and whether they tile it."""

import math
from collections.abc import Iterable, Sequence

Rectangle = tuple[Sequence[int], Sequence[int]]


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """The rectangle that two have in common; None where there is none, or it is empty."""
    starts = [max(x, y) for x, y in zip(a[0], b[0])]
    stops = [min(x + s, y + t) for x, s, y, t in zip(*a, *b)]
    if any(start >= stop for start, stop in zip(starts, stops)):
        return None
    return starts, [stop - start for start, stop in zip(starts, stops)]


def slices(box: Rectangle, inside: Sequence[int]) -> tuple[slice, ...]:
    """Where a rectangle lies in a tensor that begins at the global offset `inside`."""
    return tuple(slice(o - i, o - i + s) for o, s, i in zip(*box, inside))


def tiling_fault(shape: Sequence[int], boxes: Iterable[Rectangle]) -> str | None:
    """Why these rectangles do not hold every element of the shape exactly once; None if they do."""
    ordered = sorted(boxes, key=lambda box: tuple(box[0]))
    for offset, size in ordered:
        if any(o < 0 or o + s > n for o, s, n in zip(offset, size, shape)):
            return f"a box at {tuple(offset)} of size {tuple(size)} leaves the tensor"
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if shape and other[0][0] >= box[0][0] + box[1][0]:
                break  # sorted: this one and all later ones begin below the box
            if intersection(box, other):
                return f"boxes at {tuple(box[0])} and {tuple(other[0])} overlap"
    held = sum(math.prod(size) for _, size in ordered)
    if held != math.prod(shape):
        return f"{held:,} of {math.prod(shape):,} elements are there"
    return None
