"""Pieces: every tensor is stored as rectangles, each with its place in the whole tensor.

So it does not matter how many ranks wrote a checkpoint, or how they had cut the model: a rank
that loads takes what it holds from whatever pieces overlap it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.parameters import Box

WEIGHT = "weight"  # the kind of a parameter's own values; other kinds are the optimizer's


@dataclass(frozen=True)
class Piece:
    """A rectangle of a parameter, or of what the optimizer keeps of it, and the file it is in."""

    name: str  # of the parameter, in the plain model
    tied: Sequence[str]  # its other names
    kind: str  # "weight", or the optimizer's word: "exp_avg", "exp_avg_sq", "step", …
    dtype: str
    shape: Sequence[int]  # of the whole tensor
    offset: Sequence[int]  # of the rectangle, in the whole tensor
    size: Sequence[int]
    file: str

    @property
    def key(self) -> str:
        """Its name in the file: the parameter's own name for weights that are whole."""
        name = self.name if self.kind == WEIGHT else f"{self.name}:{self.kind}"
        place = ",".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size))
        return name if self.size == self.shape else f"{name}[{place}]"


Rectangle = Box | Piece  # both have an offset and a size


def intersection(a: Rectangle, b: Rectangle) -> tuple[list[int], list[int]] | None:
    """Where what two rectangles share begins and ends; None where they share nothing."""
    starts = [max(x, y) for x, y in zip(a.offset, b.offset)]
    stops = [min(x + s, y + t) for x, s, y, t in zip(a.offset, a.size, b.offset, b.size)]
    return (starts, stops) if all(i < j for i, j in zip(starts, stops)) else None


def holes(pieces: Iterable[Piece]) -> list[str]:
    """Tensors whose pieces do not hold every element exactly once, each with what is wrong."""
    tensors: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        key = (piece.kind, piece.name, tuple(piece.shape), piece.dtype)
        tensors.setdefault(key, []).append(piece)
    return [
        f"{kind} of {name} {list(shape)} {dtype}: {fault}"
        for (kind, name, shape, dtype), found in tensors.items()
        if (fault := tiling_fault(shape, found))
    ]


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
