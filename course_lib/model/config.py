"""Shapes of decoders: what a GPT-2 or a Llama is, in numbers, and the published ones by name."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from course_lib.config import type_faults

LARGEST = 10_000_000  # of any size; beyond it stands a slip of the keyboard


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. The defaults are a tiny GPT-2."""

    layers: Annotated[int, "number of decoder blocks"] = 2
    width: Annotated[int, "size of the residual stream (the hidden size)"] = 64
    heads: Annotated[int, "number of query heads; divides width"] = 4
    kv_heads: Annotated[int | None, "number of key and value heads; none: as many as heads"] = None
    vocab: Annotated[int, "number of token ids"] = 512
    context: Annotated[int, "longest sequence, in tokens"] = 64
    mlp_width: Annotated[int | None, "inner size of the MLP; none: 4 x width"] = None
    norm: Annotated[Literal["layernorm", "rmsnorm"], "kind of normalisation"] = "layernorm"
    mlp: Annotated[Literal["gelu", "swiglu"], "kind of MLP: two matrices, or three with a gate"] = (
        "gelu"
    )
    positions: Annotated[Literal["learned", "rope"], "how positions enter"] = "learned"
    bias: Annotated[bool, "biases in linear layers and layer norms"] = True
    tie_embeddings: Annotated[bool, "the head shares the token embedding's weight"] = True
    dropout: Annotated[float, "probability that an element is dropped, at least 0, below 1"] = 0.0
    norm_eps: Annotated[float, "added to the variance inside a norm"] = 1e-5
    rope_base: Annotated[float, "base of the rotary wavelengths"] = 10_000.0

    @property
    def head_width(self) -> int:
        """Size of one attention head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads, with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inner_width(self) -> int:
        """Inner size of the MLP, with the default resolved."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    def faults(self) -> list[str]:
        """Everything that is wrong with this shape, each with what is allowed."""
        if wrong_types := type_faults(self):
            return wrong_types
        sizes = ("layers", "width", "heads", "kv_heads", "vocab", "context", "mlp_width")
        found = [
            f"{name} {getattr(self, name)} must be from 1 to {LARGEST:,}"
            for name in sizes
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= LARGEST
        ]
        if not 0 <= self.dropout < 1:
            found.append(f"dropout {self.dropout} must be at least 0 and below 1")
        for name in ("norm_eps", "rope_base"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"{name} {getattr(self, name)} must be positive and finite")
        return found + self._head_faults() + self._key_value_head_faults()

    def _head_faults(self) -> list[str]:
        if not (1 <= self.width <= LARGEST and self.heads >= 1):
            return []  # reported already
        pairs = self.positions == "rope"
        if pairs and self.width % 2:
            even = f"{self.width - 1} or {self.width + 1}" if self.width > 1 else "2"
            return [f"rotary positions turn pairs: width {self.width} must be even; use {even}"]
        choices = [d for d in _divisors(self.width) if not (pairs and self.width // d % 2)]
        if self.heads in choices:
            return []
        use = f"use {_nearest(choices, self.heads)} heads"
        if self.width % self.heads:
            return [f"{self.heads} heads do not divide width {self.width}; {use}"]
        ratio = f"width / heads = {self.width} / {self.heads}"
        return [f"rotary positions turn pairs: {ratio} must be even; {use}"]

    def _key_value_head_faults(self) -> list[str]:
        heads, shared = self.heads, self.key_value_heads
        if not 1 <= heads <= LARGEST or shared < 1 or heads % shared == 0:
            return []
        use = _nearest(_divisors(heads), shared)
        return [f"{shared} kv_heads do not divide {heads} heads; use {use}"]

    @classmethod
    def presets(cls) -> dict[str, "ModelConfig"]:
        """Published shapes, and small ones for a laptop, by name."""
        return _presets()


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(choices: list[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(choices, key=lambda d: abs(d - wanted))[:2])))


def _gpt(layers: int, width: int, heads: int, vocab: int = 50_257, context: int = 1024):
    return ModelConfig(layers, width, heads, vocab=vocab, context=context)


def _llama(layers: int, width: int, heads: int, mlp_width: int, vocab: int = 32_000,
           context: int = 2048, kv_heads: int | None = None):  # fmt: skip
    return ModelConfig(
        layers, width, heads, kv_heads, vocab, context, mlp_width, norm="rmsnorm", mlp="swiglu",
        positions="rope", bias=False, tie_embeddings=False, norm_eps=1e-6,
    )  # fmt: skip


class _Presets(dict):
    """Shapes by name; a name that is not there is answered with those that are."""

    def __missing__(self, name):
        raise KeyError(f"there is no preset {name!r}; use one of {', '.join(self)}")


def _presets() -> dict[str, ModelConfig]:
    return _Presets({
        "tiny": _gpt(2, 64, 4, vocab=512, context=64),
        "tiny-llama": _llama(2, 64, 4, 172, vocab=512, context=64, kv_heads=2),
        "playwright": _llama(4, 128, 4, 344, vocab=2048, context=128),
        "gpt2": _gpt(12, 768, 12),
        "gpt2-medium": _gpt(24, 1024, 16),
        "gpt2-large": _gpt(36, 1280, 20),
        "gpt2-xl": _gpt(48, 1600, 25),
        "gpt3-175b": _gpt(96, 12_288, 96, context=2048),
        "llama-7b": _llama(32, 4096, 32, 11_008),
        "llama-13b": _llama(40, 5120, 40, 13_824),
    })  # fmt: skip
