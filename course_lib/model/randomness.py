"""Everything random about a model, as a function of names and positions, never of history.

* Initial values depend on (seed, parameter name, block of rows): `initial_rows`.
* Dropout depends on (seed, step, sample, site, position, channel): `Noise`.

So every layout, device and precision starts from the same weights and draws the same masks, and
a recomputation or a resumed run repeats them. Counter-based generators: Salmon et al. 2011
("Parallel random numbers: as easy as 1, 2, 3"); the mixing function ends splitmix64 (Steele 2014).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

BLOCK_ROWS = 64  # rows that one generator fills; a rank draws only the blocks it holds


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is in the plain model: its initial distribution, and whether it decays."""

    std: float = 0.0  # normal with mean 0, where positive; else the constant `fill`
    fill: float = 0.0
    decay: bool = False
    tied_to: str = ""  # full name of the parameter whose tensor it shares, where that comes first


def declare(module: nn.Module, **specs: ParameterSpec) -> nn.Module:
    """Write on a module what its parameters are; returns the module."""
    module.parameter_specs = {**getattr(module, "parameter_specs", {}), **specs}
    return module


def parameter_spec(model: nn.Module, name: str) -> ParameterSpec:
    """What the parameter of this name is. Raises ValueError where nobody declared it."""
    path, _, part = name.rpartition(".")
    specs = getattr(model.get_submodule(path), "parameter_specs", {})
    if part not in specs:
        raise ValueError(f"parameter {name} has no specification; use declare(module, {part}=…)")
    return specs[part]


def initial_rows(name: str, spec: ParameterSpec, shape, first: int, last: int, seed: int) -> Tensor:
    """Rows first … last - 1 of a parameter's initial value: fp32, on the CPU.

    Each block of rows has its own counter-based generator (Philox), keyed by (seed, name, block),
    so that any part can be drawn alone and every device and layout starts from the same numbers.
    """
    row = int(np.prod(shape[1:], dtype=np.int64))
    if spec.std == 0 or first == last:
        return torch.full((last - first, *shape[1:]), spec.fill)
    blocks = []
    for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        rows = min(BLOCK_ROWS, shape[0] - block * BLOCK_ROWS)
        blocks.append(generator.standard_normal((rows, row), dtype=np.float32))
    start = first - first // BLOCK_ROWS * BLOCK_ROWS
    drawn = np.concatenate(blocks)[start : start + last - first] * np.float32(spec.std)
    return torch.from_numpy(drawn).view(last - first, *shape[1:])


class Noise:
    """Dropout masks of one micro-batch, each element a hash of what it is, not of history.

    Two ranks, a recomputation or a resumed run that hold the same element draw the same bit.
    """

    def __init__(self, p: float, seed: int, step, samples: Tensor, index: Tensor):
        """samples: (batch,) int64 in the global batch; index: (sequence,) int64 in the sample."""
        self.p = p
        self.rows = _row_keys(seed, torch.as_tensor(step, device=samples.device), samples, index)

    def drop(self, x: Tensor, site: int) -> Tensor:
        """x: (batch, sequence, channels)."""
        channels = torch.arange(x.shape[-1], device=x.device)
        return self._apply(x, self.rows[..., None], site, channels)

    def drop_attention(self, x: Tensor, site: int, head_offset: int) -> Tensor:
        """x: (batch, heads, queries, keys); head_offset: global number of the first head."""
        heads = head_offset + torch.arange(x.shape[1], device=x.device)[:, None, None]
        cells = (heads << 24) + torch.arange(x.shape[-1], device=x.device)
        return self._apply(x, self.rows[:, None, :, None], site, cells)

    def _apply(self, x: Tensor, rows: Tensor, site: int, cells: Tensor) -> Tensor:
        return x * (_draw(rows, site, cells) >= round(self.p * 2**24)) / (1 - self.p)


# The two hashes rely on int64 that wraps around. A compiler must not see them: in the C++ that
# torch.compile writes, overflow of signed integers is undefined, and masks came out different.


@torch.library.custom_op("course_lib::row_keys", mutates_args=())
def _row_keys(seed: int, step: Tensor, samples: Tensor, index: Tensor) -> Tensor:
    """One int64 for each position of each sample: (batch, sequence)."""
    start = _mix(samples.new_full((), seed) * _FACTORS[0] + step)
    sample = _mix(start + samples[:, None] * _FACTORS[1])  # (batch, 1)
    return _mix(sample + index * _FACTORS[2])


@torch.library.custom_op("course_lib::draw", mutates_args=())
def _draw(rows: Tensor, site: int, cells: Tensor) -> Tensor:
    """24 random bits for each cell of each row, int64; rows and cells broadcast."""
    return _mix(rows + (site << 40) + cells * _FACTORS[3]) & 0xFFFFFF


@_row_keys.register_fake
def _(seed, step, samples, index):
    return samples[:, None] + index


@_draw.register_fake
def _(rows, site, cells):
    return rows + cells


_FACTORS = (0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x27BB2EE687B0B0FD)  # odd


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which every input bit moves every output bit (splitmix64's end)."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def dropout(x: Tensor, noise: Noise | None, site: int) -> Tensor:
    """x with elements dropped at this site of the model, or x itself where there is no noise."""
    return x if noise is None else noise.drop(x, site)
