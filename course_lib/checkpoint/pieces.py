"""Pieces: every tensor is stored as rectangles, each with its place in the whole tensor.

So it does not matter how many ranks wrote a checkpoint, or how they had cut the model: a rank
that loads takes what it holds from whatever pieces overlap it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_lib.boxes import tiling_fault

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
