"""Faults of the plain model: how to put each back, and the check that must see it.

`put(object, name, value)` is setattr, undone after the test.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from course_lib import training
from course_lib.model import KVCache, Transformer, decoder
from course_lib.model.decoder import Block
from tests import checks_model as proof
from tests.checks_model import GPT, LLAMA

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Fault:
    """A fault, the check that must fail on it, and the trap that it stands for, if any."""

    put_back: Callable[[Put], None]
    check: Callable[[], None]
    trap: str | None = None

    @property
    def name(self) -> str:
        """What is wrong, and where it is looked for."""
        check = getattr(self.check, "func", self.check).__name__
        return f"{self.put_back.__name__}-{check.removeprefix('assert_')}"


def change_functions(put: Put, **changed) -> None:
    """Replace functions of torch.nn.functional, for our decoder only."""
    put(decoder, "F", SimpleNamespace(**{**vars(F), **changed}))


# ------------------------------------------------------------------------------------- masks


def mask_inverted(put: Put) -> None:
    right = decoder._causal_mask
    put(decoder, "_causal_mask", lambda *a: ~right(*a) | torch.eye(a[0], a[0] + a[1]).bool())


def mask_one_too_wide(put: Put) -> None:
    def wide(queries, past, device):
        return torch.ones(queries, past + queries, dtype=torch.bool).tril(past + 1)

    put(decoder, "_causal_mask", wide)


def fused_attention_not_causal(put: Put) -> None:
    def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=enable_gqa)

    change_functions(put, scaled_dot_product_attention=attention)


def documents_by_position_only(put: Put) -> None:
    right = decoder._attention_mask
    put(decoder, "_attention_mask", lambda tokens, documents, past: right(tokens, None, past))


def documents_not_causal(put: Put) -> None:
    right = decoder._attention_mask

    def mask(tokens, documents, past):
        if documents is None:
            return right(tokens, None, past)
        return documents[:, None, :, None] == documents[:, None, None, :]

    put(decoder, "_attention_mask", mask)


def mask_top_left_with_cache(put: Put) -> None:
    def top_left(queries, past, device):
        return torch.ones(queries, past + queries, dtype=torch.bool).tril()

    put(decoder, "_causal_mask", top_left)


def is_causal_with_cache(put: Put) -> None:
    put(decoder, "_attention_mask", lambda *_: None)


# ---------------------------------------------------------------------------------- KV cache


def positions_restart_with_cache(put: Put) -> None:
    def index(self, tokens, past):
        return torch.arange(tokens.shape[1])

    put(Transformer, "_index", index)


def keys_rotated_twice_with_cache(put: Put) -> None:
    right = KVCache.extend

    def extend(self, layer, key, value):
        keys, values = right(self, layer, key, value)
        rotation = decoder._rotation(torch.arange(keys.shape[2])[None], LLAMA, keys.dtype)
        return decoder.rotate(keys, *rotation), values

    put(KVCache, "extend", extend)


def cache_overwritten_from_its_start(put: Put) -> None:
    right = KVCache.extend

    def extend(self, layer, key, value):
        keys, values = right(self, layer, key, value)
        keys[:, :, : key.shape[2]] = key
        return keys, values

    put(KVCache, "extend", extend)


# ------------------------------------------------------------------------- parts of the model


def keys_and_queries_rotated_twice(put: Put) -> None:
    right = decoder.rotate
    put(decoder, "rotate", lambda x, *angles: right(right(x, *angles), *angles))


def rotary_pairs_are_neighbours(put: Put) -> None:
    def rotate(x, cosine, sine):
        first, second = x[..., ::2], x[..., 1::2]
        turned = first * cosine - second * sine, second * cosine + first * sine
        return torch.stack(turned, -1).flatten(-2)

    put(decoder, "rotate", rotate)


def rotary_base_ignored(put: Put) -> None:
    right = decoder._rotation
    put(decoder, "_rotation", lambda p, c, t: right(p, replace(c, rope_base=10_000.0), t))


def values_rotated_too(put: Put) -> None:
    right = decoder.attend

    def attend(query, key, value, *rest):
        rotation = decoder._rotation(torch.arange(value.shape[2])[None], LLAMA, value.dtype)
        return right(query, key, decoder.rotate(value, *rotation), *rest)

    put(decoder, "attend", attend)


def heads_repeated_in_turn(put: Put) -> None:
    def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)

    change_functions(put, scaled_dot_product_attention=attention)


def heads_repeated_in_turn_with_dropout(put: Put) -> None:
    def in_turn(self, repeats, dim):
        return self.repeat(*(repeats if d == dim else 1 for d in range(self.dim())))

    put(torch.Tensor, "repeat_interleave", in_turn)


def scores_not_scaled(put: Put) -> None:
    def attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        more = {"is_causal": is_causal, "enable_gqa": enable_gqa, "scale": 1.0}
        return F.scaled_dot_product_attention(q, k, v, attn_mask, **more)

    change_functions(put, scaled_dot_product_attention=attention)


def scores_not_scaled_with_dropout(put: Put) -> None:
    put(decoder, "math", SimpleNamespace(sqrt=lambda _: 1.0))


def norm_eps_outside_the_root(put: Put) -> None:
    right = decoder._norm

    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            scale = x.var(-1, unbiased=False, keepdim=True).sqrt() + self.eps
            return (x - x.mean(-1, keepdim=True)) / scale * self.weight + self.bias

    class RMSNorm(nn.RMSNorm):
        def forward(self, x):
            return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    def norm(config):
        layer = right(config)
        layer.__class__ = RMSNorm if config.norm == "rmsnorm" else LayerNorm
        return layer

    put(decoder, "_norm", norm)


def norm_eps_ignored(put: Put) -> None:
    right = decoder._norm
    put(decoder, "_norm", lambda config: right(replace(config, norm_eps=1e-6)))


def last_norm_left_out(put: Put) -> None:
    right = Transformer.__init__

    def init(self, config, seed=0):
        right(self, config, seed)
        self.norm.forward = lambda x: x

    put(Transformer, "__init__", init)


def gelu_exact(put: Put) -> None:
    change_functions(put, gelu=lambda x, approximate: F.gelu(x))


def gate_and_up_exchanged(put: Put) -> None:
    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.gate(x))

    put(decoder.MLP, "forward", forward)


def residual_of_the_mlp_left_out(put: Put) -> None:
    def forward(self, x, *rest):
        x = x + self.attention(self.attention_norm(x), *rest)
        return self.mlp(self.mlp_norm(x))

    put(Block, "forward", forward)


def residual_taken_after_the_norm(put: Put) -> None:
    def forward(self, x, *rest):
        x = self.attention_norm(x)
        x = x + self.attention(x, *rest)
        return x + self.mlp(self.mlp_norm(x))

    put(Block, "forward", forward)


def head_never_tied(put: Put) -> None:
    put(Transformer, "tie", lambda self: self)


def head_always_tied(put: Put) -> None:
    def tie(self):
        self.head.weight = self.embedding.weight
        return self

    put(Transformer, "tie", tie)


def labels_shifted_twice(put: Put) -> None:
    right = training.loss_sum
    put(training, "loss_sum", lambda logits, labels, *_, **__: right(logits[:, :-1], labels[:, 1:]))


def change_loss_backward(put: Put, change: Callable) -> None:
    right = training._CrossEntropySum.backward

    def backward(ctx, upstream):
        gradient, *rest = right(ctx, upstream)
        return change(gradient, upstream, *ctx.saved_tensors), *rest

    put(training._CrossEntropySum, "backward", staticmethod(backward))


def ignored_labels_have_a_gradient(put: Put) -> None:
    def change(gradient, upstream, exponentials, total, targets, valid):
        return torch.where(valid[:, None], gradient, exponentials / total[:, None] * upstream)

    change_loss_backward(put, change)


def scale_of_the_loss_forgotten(put: Put) -> None:
    change_loss_backward(put, lambda gradient, upstream, *_: gradient / upstream)


# ---------------------------------------------------------------------------------- the table

gpt = partial(proof.assert_equals_transformers, GPT)
llama = partial(proof.assert_equals_transformers, LLAMA)


def sees(path: str, config=GPT) -> Callable:
    return partial(proof.assert_no_token_sees_the_future, config, path)


def cached(config) -> Callable:
    return partial(proof.assert_cache_changes_nothing, config)


FAULTS = [
    Fault(mask_inverted, sees("dropout"), "AT-01"),
    Fault(mask_inverted, sees("documents"), "AT-01"),
    Fault(mask_inverted, sees("cache"), "AT-01"),
    Fault(mask_one_too_wide, sees("dropout"), "AT-01"),
    Fault(mask_one_too_wide, sees("cache"), "AT-01"),
    Fault(fused_attention_not_causal, sees("fused"), "AT-01"),
    Fault(fused_attention_not_causal, gpt, "AT-01"),
    Fault(documents_not_causal, sees("documents"), "AT-01"),
    Fault(documents_by_position_only, partial(proof.assert_documents_are_isolated, GPT), "DA-04"),
    Fault(documents_by_position_only, partial(proof.assert_documents_are_isolated, LLAMA, 0.2),
          "DA-04"),
    Fault(mask_top_left_with_cache, cached(GPT), "CP-05"),
    Fault(is_causal_with_cache, cached(LLAMA), "CP-05"),
    Fault(positions_restart_with_cache, cached(GPT)),
    Fault(positions_restart_with_cache, cached(LLAMA)),
    Fault(keys_rotated_twice_with_cache, cached(LLAMA)),
    Fault(keys_rotated_twice_with_cache,
          partial(proof.assert_greedy_is_the_same_with_a_cache, LLAMA)),
    Fault(cache_overwritten_from_its_start, cached(GPT)),
    Fault(keys_and_queries_rotated_twice, llama),
    Fault(rotary_pairs_are_neighbours, llama),
    Fault(rotary_base_ignored, llama),
    Fault(values_rotated_too, llama),
    Fault(heads_repeated_in_turn, llama),
    Fault(heads_repeated_in_turn, proof.assert_explicit_attention_equals_fused),
    Fault(heads_repeated_in_turn_with_dropout, proof.assert_explicit_attention_equals_fused),
    Fault(scores_not_scaled, gpt),
    Fault(scores_not_scaled_with_dropout, proof.assert_explicit_attention_equals_fused),
    Fault(norm_eps_outside_the_root, gpt),
    Fault(norm_eps_outside_the_root, llama),
    Fault(norm_eps_ignored, gpt),
    Fault(last_norm_left_out, gpt),
    Fault(gelu_exact, gpt),
    Fault(gate_and_up_exchanged, llama),
    Fault(residual_of_the_mlp_left_out, gpt),
    Fault(residual_taken_after_the_norm, gpt),
    Fault(head_never_tied, partial(proof.assert_tied, GPT)),
    Fault(head_always_tied, partial(proof.assert_tied, LLAMA)),
    Fault(labels_shifted_twice, proof.assert_loss_scores_the_next_token, "ACC-10"),
    Fault(labels_shifted_twice, gpt, "ACC-10"),
    Fault(ignored_labels_have_a_gradient, proof.assert_loss_and_its_gradient_are_exact),
    Fault(scale_of_the_loss_forgotten, proof.assert_loss_and_its_gradient_are_exact),
    Fault(scale_of_the_loss_forgotten, gpt),
]  # fmt: skip
