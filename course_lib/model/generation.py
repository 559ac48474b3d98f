"""Text out of a trained model: a KV cache, and sampling one token at a time."""

import torch
from torch import Tensor

from course_lib.model.config import ModelConfig


class KVCache:
    """Keys and values of the tokens seen so far, one pair of tensors a layer.

    Shapes: (batch, kv_heads, room, head_width). `length` counts the tokens that all layers hold;
    the model moves it once a forward pass, after its last layer.
    """

    def __init__(self, config: ModelConfig, batch: int, room: int, device=None, dtype=None):
        """room: tokens there is space for, at most the context. Raises ValueError if it is more."""
        if room > config.context:
            raise ValueError(f"room for {room} tokens exceeds the context of {config.context}")
        shape = (batch, config.key_value_heads, room, config.head_width)
        self.length, self.room = 0, room
        self.layers = [
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
            for _ in range(config.layers)
        ]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values of a layer; returns all of that layer, old and new.

        key, value: (batch, kv_heads, new, head_width). Raises ValueError where they do not fit.
        """
        batch = len(self.layers[layer][0])
        if len(key) != batch:
            raise ValueError(f"the cache is for a batch of {batch}, not {len(key)}")
        end = self.length + key.shape[2]
        if end > self.room:
            raise ValueError(f"the cache has room for {self.room} tokens, {end} are needed")
        for stored, new in zip(self.layers[layer], (key, value)):
            stored[:, :, self.length : end] = new
        keys, values = self.layers[layer]
        return keys[:, :, :end], values[:, :, :end]


@torch.no_grad()
def generate(
    model,
    tokens: Tensor,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue each row of tokens by sampling from the model.

    tokens: (batch, prompt) int64, at least one token; prompt + new_tokens at most the context.
    temperature: scores are divided by it; 0 takes the likeliest token (greedy).
    top_k: sample among the k likeliest only. generator: of the samples, on the tokens' device.
    use_cache: keep keys and values rather than recompute them; the result is the same.
    Returns (batch, prompt + new_tokens) int64. The model is left in the mode in which it came.
    Raises ValueError for sizes that do not fit.
    """
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        given = tuple(tokens.shape)
        raise ValueError(f"a prompt is (batch, prompt), with at least one token; got {given}")
    if new_tokens < 0:
        raise ValueError(f"new_tokens {new_tokens} must be at least 0")
    if temperature != 0 and not 1e-30 < temperature < float("inf"):
        raise ValueError(f"temperature {temperature} must be 0 (greedy), or positive and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k} must be at least 1, or None")
    room = tokens.shape[1] + new_tokens
    if room > model.config.context:
        raise ValueError(
            f"{tokens.shape[1]} + {new_tokens} tokens exceed the context of {model.config.context}"
        )
    weight = model.head.weight
    was_training = model.training
    model.eval()
    cache = (
        KVCache(model.config, len(tokens), room, weight.device, weight.dtype) if use_cache else None
    )
    fresh = tokens
    try:
        for _ in range(new_tokens):
            scores = model(fresh, cache=cache)[:, -1]  # (batch, vocab)
            chosen = _choose(scores, temperature, top_k, generator)
            tokens = torch.cat((tokens, chosen), dim=1)
            fresh = chosen if use_cache else tokens
    finally:
        model.train(was_training)
    return tokens


def _choose(scores: Tensor, temperature: float, top_k: int | None, generator) -> Tensor:
    """(batch, vocab) scores to (batch, 1) token ids."""
    if temperature == 0:
        return scores.argmax(-1, keepdim=True)
    likeliest = None
    if top_k is not None:
        scores, likeliest = scores.topk(min(top_k, scores.shape[-1]))
    scores = scores.float() - scores.float().amax(-1, keepdim=True)  # so that no division overflows
    chosen = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)
    return chosen if likeliest is None else likeliest.gather(-1, chosen)
