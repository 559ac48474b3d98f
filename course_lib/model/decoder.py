"""The decoder itself: attention, MLP, block, Transformer.

No buffers are kept: rotary angles are computed from the positions in each forward pass, so nothing
can be left empty after materialising from the meta device.

Papers: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama, arXiv 2302.13971); Su et al. 2021
(rotary positions, 2104.09864); Ainslie et al. 2023 (grouped-query attention, 2305.13245).
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.model.config import ModelConfig
from course_lib.model.randomness import (
    Noise,
    ParameterSpec,
    declare,
    dropout,
    initial_rows,
    parameter_spec,
)

INITIAL_STD = 0.02  # GPT-2 §2.3; projections that end in the residual divide it by sqrt(2 layers)


def build(config: ModelConfig, seed: int = 0, device="cpu", dtype=torch.float32) -> "Transformer":
    """A whole plain model with its initial weights, ready for use on one device.

    Equal seeds give equal weights on every device: each parameter is drawn by its name.
    """
    with torch.device("meta"):
        model = Transformer(config, seed)
    model.to_empty(device=device).to(dtype).tie()
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        spec = parameter_spec(model, name)
        with torch.no_grad():
            parameter.copy_(initial_rows(name, spec, parameter.shape, 0, len(parameter), seed))
    return model


class Transformer(nn.Module):
    """A decoder: token ids in, one score for every next token out."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        """Build the modules. Values are whatever the device gives: see `build` and `initialise`.

        seed: of the dropout masks.
        Raises ValueError where the shape is impossible.
        """
        super().__init__()
        if faults := config.faults():
            raise ValueError("; ".join(faults))
        self.config, self.seed = config, seed
        self.sequence_offset = 0  # global index of the first position held here
        self.embedding = _embedding(config.vocab, config.width)
        if config.positions == "learned":
            self.position_embedding = _embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = _norm(config)
        self.head = _linear(config.width, config.vocab, bias=False)
        self.tie()

    def tie(self) -> "Transformer":
        """Make the head share the embedding's weight, where the configuration says so.

        A part of the model may lack one of them; a head alone is still declared to be tied.
        """
        embedding, head = (getattr(self, part, None) for part in ("embedding", "head"))
        if self.config.tie_embeddings and hasattr(head, "weight"):
            tied = replace(parameter_spec(head, "weight"), tied_to="embedding.weight")
            declare(head, weight=tied)
            if hasattr(embedding, "weight"):
                head.weight = embedding.weight
        return self

    def forward(self, tokens, positions=None, samples=None, step=None, documents=None, cache=None):
        """Scores of the next token at every position.

        tokens: (batch, sequence) int64.
        positions: (batch, sequence) int64, position of each token in its text; default 0, 1, 2 …
            (after what the cache holds).
        samples, step: (batch,) int64 index in the global batch, and the training step; needed
            only for dropout in training mode.
        documents: (batch, sequence) int64; tokens attend only within equal values.
        cache: a `KVCache` to read and extend.
        Returns (batch, sequence, vocab) in the weights' dtype (or autocast's).
        Raises ValueError for a sequence longer than the context, dropout without samples/step,
        documents with a cache, and on the CPU for token ids out of range.
        """
        if tokens.dim() != 2 or tokens.numel() == 0 or tokens.dtype != torch.int64:
            given = f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype}"
            raise ValueError(f"{given} must be (batch, sequence), at least 1 x 1, and torch.int64")
        if documents is not None and cache is not None:
            raise ValueError("documents and a KV cache cannot be combined; use one of them")
        past = 0 if cache is None else cache.length
        index = self._index(tokens, past)
        if positions is None:
            positions = index.expand_as(tokens)
        noise = self._noise(samples, step, index, len(tokens))
        mask = _attention_mask(tokens, documents, past)
        x = _look_up(self.embedding, tokens, self.config.vocab, "token ids")
        rotation = None  # x is (batch, sequence, width) from here on
        if self.config.positions == "learned":
            x = x + _look_up(self.position_embedding, positions, self.config.context, "positions")
        else:
            rotation = _rotation(positions, self.config, x.dtype)
        x = dropout(x, noise, site=0)
        for block in self.blocks:
            x = block(x, rotation, mask, noise, cache)
        if cache is not None:
            cache.length = past + tokens.shape[1]
        return self.head(self.norm(x))

    def _index(self, tokens, past: int) -> Tensor:
        """(sequence,) int64: where each column of tokens lies in its sample."""
        first = self.sequence_offset + past
        last = first + tokens.shape[1]
        if last > self.config.context:
            raise ValueError(f"{last} tokens exceed the context of {self.config.context}")
        return torch.arange(first, last, device=tokens.device)

    def _noise(self, samples, step, index, batch: int):
        if not self.training or self.config.dropout == 0:
            return None
        if samples is None or step is None:
            raise ValueError("dropout in training needs `samples` and `step` (or call eval())")
        if samples.shape != (batch,):
            raise ValueError(f"samples of shape {tuple(samples.shape)} must be ({batch},)")
        return Noise(self.config.dropout, self.seed, step, samples, index)


class Block(nn.Module):
    """Attention, then the MLP, each normalised before and added to the residual after."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.site = 3 * layer + 1  # three dropout sites a block; 0 is the embedding's

    def forward(self, x, rotation, mask, noise, cache):
        """x: (batch, sequence, width); returns the same shape."""
        x = x + dropout(
            self.attention(self.attention_norm(x), rotation, mask, noise, cache),
            noise, site=self.site + 1,
        )  # fmt: skip
        return x + dropout(self.mlp(self.mlp_norm(x)), noise, site=self.site + 2)


class Attention(nn.Module):
    """Causal self-attention; several query heads may share one key and value head."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.head_width, self.layer = config.head_width, layer
        self.head_offset = 0  # global number of the first query head held here
        key_value = config.key_value_heads * config.head_width
        self.query = _linear(config.width, config.width, config.bias)
        self.key = _linear(config.width, key_value, config.bias)
        self.value = _linear(config.width, key_value, config.bias)
        self.output = _linear(config.width, config.width, config.bias, _residual_std(config))

    def forward(self, x, rotation, mask, noise, cache):
        """x: (batch, sequence, width); returns the same shape."""
        split = (*x.shape[:2], -1, self.head_width)
        query = self.query(x).view(split).transpose(1, 2)  # (batch, heads, sequence, head_width)
        key = self.key(x).view(split).transpose(1, 2)
        value = self.value(x).view(split).transpose(1, 2)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        mixed = attend(query, key, value, mask, noise, 3 * self.layer + 1, self.head_offset)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices around GELU, or three with a SiLU gate (SwiGLU, Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = _linear(config.width, config.inner_width, config.bias)
        if self.gated:
            self.gate = _linear(config.width, config.inner_width, config.bias)
        self.down = _linear(config.inner_width, config.width, config.bias, _residual_std(config))

    def forward(self, x):
        """x: (batch, sequence, width); returns the same shape."""
        if self.gated:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def attend(query, key, value, mask, noise, site: int, head_offset: int = 0) -> Tensor:
    """Attention of (batch, heads, sequence, head_width) queries over keys and values.

    mask: None for plain causal (equal lengths), or (batch or 1, 1, queries, keys) bool, True = may
    attend. Without dropout PyTorch's fused attention runs; with it an explicit path, since only
    that can drop probabilities by position.
    """
    grouped = query.shape[1] != key.shape[1]
    if noise is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if mask is None:
        mask = _causal_mask(query.shape[2], 0, query.device)
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # fp16 ends at 65,504
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=_wide(scores.dtype))
    return noise.drop_attention(weights, site, head_offset).to(value.dtype) @ value


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _causal_mask(queries: int, past: int, device) -> Tensor:
    """(queries, past + queries) bool: query i sees keys up to past + i (aligned bottom-right)."""
    return torch.ones(queries, past + queries, dtype=torch.bool, device=device).tril(past)


def _attention_mask(tokens, documents, past: int) -> Tensor | None:
    """None where PyTorch's own causal mask is right: equal numbers of queries and keys."""
    if documents is not None:
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & _causal_mask(tokens.shape[1], 0, tokens.device)
    # is_causal aligns the mask top-left, which is wrong as soon as keys outnumber queries.
    return _causal_mask(tokens.shape[1], past, tokens.device) if past else None


def _look_up(embedding: nn.Module, ids: Tensor, rows: int, what: str) -> Tensor:
    """Rows of an embedding. The CPU notices an id out of range by itself; here it gets its name.

    Nothing is checked beforehand, since that would make a GPU wait.
    """
    try:
        return embedding(ids)
    except IndexError:
        given = f"{what} from {int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{given} are out of range; allowed are 0 to {rows - 1}") from None


def _rotation(positions, config: ModelConfig, dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each (batch, 1, sequence, head_width / 2)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, config.head_width, 2, device=positions.device, dtype=exact)
    frequency = config.rope_base ** (-pairs / config.head_width)
    angle = positions[:, None, :, None].to(exact) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_width / 2]) by their angles; x: (batch, heads, seq, hw)."""
    first, second = x.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _linear(inputs: int, outputs: int, bias: bool, std: float = INITIAL_STD) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    return declare(layer, weight=ParameterSpec(std=std, decay=True), bias=ParameterSpec())


def _embedding(rows: int, width: int) -> nn.Embedding:
    return declare(nn.Embedding(rows, width), weight=ParameterSpec(std=INITIAL_STD, decay=True))


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        layer = nn.RMSNorm(config.width, config.norm_eps)
    else:
        layer = nn.LayerNorm(config.width, config.norm_eps, bias=config.bias)
    return declare(layer, weight=ParameterSpec(fill=1.0), bias=ParameterSpec())


def _residual_std(config: ModelConfig) -> float:
    return INITIAL_STD / math.sqrt(2 * config.layers)
