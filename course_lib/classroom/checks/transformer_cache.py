"""How the exercise "one attention layer with a KV cache" is checked, and its model answer."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.model import Attention, ModelConfig, attend, build, rotate

from ..learner import learners_frame, learners_line
from ..teaching import tidy
from .exercise import WrongAnswer


def attend_with_cache(layer: Attention, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    """Attention of new tokens over all tokens so far; keys and values of old ones are kept.

    x: (batch, new, width); cache: {} at first, then "keys" and "values", each
    (batch, kv_heads, seen, head_width). Returns (batch, new, width) and extends the cache.

    The library does the same in three places: `Transformer.forward` (positions and mask),
    `Attention.forward` (rotation, then the cache), `KVCache.extend`.
    """
    past, new = cache["keys"].shape[2] if cache else 0, x.shape[1]
    query, key, value = _projected(layer, x)
    turn = _angles(torch.arange(past, past + new), layer.head_width)
    query, key = rotate(query, *turn), rotate(key, *turn)  # keys once, before they are kept
    if cache:
        key = torch.cat((cache["keys"], key), dim=2)
        value = torch.cat((cache["values"], value), dim=2)
    cache.update(keys=key, values=value)
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)  # aligned bottom-right
    mixed = attend(query, key, value, mask, None, 0)  # (batch, heads, new, head_width)
    return layer.output(mixed.transpose(1, 2).flatten(2))


def _projected(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x, each (batch, its heads, new, head_width)."""
    split = (*x.shape[:2], -1, layer.head_width)
    parts = (project(x).view(split) for project in (layer.query, layer.key, layer.value))
    return tuple(part.transpose(1, 2) for part in parts)


def _angles(positions: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of RoPE's angles (base 10,000), each (sequence, head_width / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angle = positions[:, None] * frequency
    return angle.cos(), angle.sin()


_ATTENTION_SHAPES = (  # (width, heads, kv_heads), and the pieces in which the tokens arrive
    ((32, 4, 4), (5, 1, 1)),
    ((48, 6, 2), (1, 3, 1, 4)),
)

_ONLY_NEW_KEYS = (
    "Each piece attends only to its own keys. Join the cached keys and values in front of the new "
    "ones."
)

_CACHE_MISTAKES = {
    "top-left mask": "The causal mask is aligned top-left, so a later piece sees only the first "
    "keys. New token i may see past + i + 1 keys: use tril(past). `is_causal=True` aligns "
    "top-left too.",
    "positions restart": "Positions restart at 0 in every piece. The first new token stands at "
    "position past.",
    "keys rotated twice": "Keys that were already rotated are rotated again. Rotate only the new "
    "keys before they enter the cache, or keep unrotated keys.",
    "no mask": "No mask: tokens see later tokens of the same piece.",
    "cache never filled": "The cache is not kept: every piece looks like the first one. Store "
    "all keys and values in `cache` before you return.",
    "queries not rotated": "Queries are not rotated. RoPE turns queries and keys.",
    "keys not rotated": "Keys are not rotated. RoPE turns queries and keys.",
    "nothing rotated": "Neither queries nor keys are rotated, so the order of tokens is lost.",
    "values rotated": "Values are rotated too. RoPE turns queries and keys only.",
    "heads repeated": "Query heads meet the wrong keys: with 6 heads and 2 kv_heads, query heads "
    "0, 1, 2 share the first. Use repeat_interleave, not repeat, or enable_gqa=True.",
    "no scale": "The scores are not divided by the square root of head_width.",
    "scale by width": "The scores are divided by the square root of the whole width. Each head "
    "works alone: use the square root of layer.head_width.",
    "scale without root": "The scores are divided by head_width: its square root is right. "
    "`attend` divides already, so do not divide before it.",
    "inverted mask": "The mask is inverted: tokens see exactly what they must not see. True means "
    "“may attend” in `attend`; in masked_fill, True means “hide”.",
    "mask one short": "The mask is off by one: a new token does not see itself. New token i may "
    "see past + i + 1 keys: use tril(past).",
    "mask one far": "The mask is off by one: a new token sees the next one. New token i may see "
    "past + i + 1 keys: use tril(past).",
    "new before old": "New keys or values stand before the old ones. Join them in the order of "
    "the tokens: torch.cat((old, new), dim=2), for both.",
    "keys and values swapped": "Keys and values are exchanged somewhere. Queries meet keys; the "
    "weights then sum values. Look at the order in which you compute, keep and pass them.",
    "softmax axis": "The softmax runs over the wrong dimension. The weights of one query over all "
    "keys must sum to 1: use softmax(-1).",
    "mask after softmax": "The mask comes after the softmax, so the weights of a query no longer "
    "sum to 1. Set hidden scores to minus infinity before the softmax.",
    "no output": "The output projection is missing: return layer.output(…).",
    "input added": "You add x to the result. That is the work of the block; return layer.output(…) "
    "alone.",
    "heads not joined": "The heads are joined in the wrong order. After attention the tensor is "
    "(batch, heads, new, head_width): put the tokens first with transpose(1, 2), and only then "
    "join the last two dimensions.",
    "heads cut wrongly": "Heads and tokens are mixed where keys or values are cut into heads. "
    "First view(batch, new, heads, head_width), then transpose(1, 2), as the stub for the queries.",
    "one position": "All new tokens of a piece get the same position. They stand at positions past "
    "… past + new - 1.",
    "numbers as mask": "The mask is made of numbers, and a mask of numbers is added to the scores. "
    "Make it of True and False: dtype=torch.bool.",
}


def grade_attention_with_cache(answer: Callable[[Attention, Tensor, dict], Tensor]) -> None:
    """Feed the tokens in pieces, in fp64; the whole sequence at once must give the same."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    for shape, pieces in _ATTENTION_SHAPES:
        layer, x = _layer_and_input(*shape, length=sum(pieces))
        with torch.no_grad():
            right = attend_with_cache(layer, x, {})  # one piece: nothing comes from a cache
            cache: dict[str, Tensor] = {}
            given = [_fed(answer, layer, piece, cache) for piece in x.split(pieces, dim=1)]
            _compare(layer, x, pieces, given, right, cache)


def _fed(answer: Callable, layer: Attention, piece: Tensor, cache: dict) -> Tensor:
    """Feed one piece; say in words where the answer reads another name than it has stored."""
    held = list(cache)
    past = cache["keys"].shape[2] if isinstance(cache.get("keys"), Tensor) else 0
    try:
        return answer(layer, piece, cache)
    except RuntimeError as error:
        if learners_frame(error) is None or not re.search("size|shape", str(error)):
            raise
        raise WrongAnswer(_shapes_told(layer, piece, past, error)) from error
    except KeyError as error:
        name = error.args[0] if error.args else None
        if learners_frame(error) is None or not isinstance(name, str) or name in held:
            raise
        stored = ", ".join(f'"{key}"' for key in held) or "nothing"
        advice = (
            'Use the names "keys" and "values" both where you store and where you read.'
            if held
            else "In the first piece the cache is still {}: ask `if cache` first."
        )
        told = f'you read cache["{name}"], but the cache holds {stored}. {advice}'
        raise WrongAnswer(f"{told}\n{learners_line(error)}") from error


def _shapes_told(layer: Attention, piece: Tensor, past: int, error: RuntimeError) -> str:
    """Which shapes belong together in this piece, beside what torch says about them."""
    batch, new, width = piece.shape
    kv_heads, each = layer.key.out_features // layer.head_width, layer.head_width
    return (
        f"two shapes do not fit ({new} new after {past}): {tidy(str(error)).splitlines()[0]}\n"
        f"{learners_line(error)}\n"
        f"Expected: queries {(batch, width // each, new, each)}; keys and values, all so far, "
        f"{(batch, kv_heads, past + new, each)}; mask {(new, past + new)}; into layer.output "
        f"{(batch, new, width)}. Print yours before that line."
    )


def _layer_and_input(width: int, heads: int, kv_heads: int, length: int):
    config = ModelConfig(1, width, heads, kv_heads, positions="rope", bias=False)
    layer = build(config, dtype=torch.float64).blocks[0].attention
    with torch.no_grad():
        for parameter in layer.parameters():  # initial weights give scores near 0: all masks alike
            parameter.mul_(0.4 / parameter.std())
    generator = torch.Generator().manual_seed(1)
    return layer, torch.randn(2, length, width, dtype=torch.float64, generator=generator)


def _compare(layer, x, pieces, given: list, right: Tensor, cache: dict) -> None:
    """Raise WrongAnswer where a piece differs from the same tokens of the whole sequence."""
    seen = 0
    for number, (got, wanted) in enumerate(zip(given, right.split(pieces, dim=1)), 1):
        new = f"{wanted.shape[1]} new token{'s' if wanted.shape[1] > 1 else ''}"
        where = f"piece {number} ({new} after {seen}): "
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            what = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise WrongAnswer(f"{where}return a tensor of {tuple(wanted.shape)}; yours: {what}.")
        error = (got - wanted).abs().max().item()
        if not error < 1e-9:
            if error < 1e-5:
                raise WrongAnswer(
                    f"{where}off by {error:.0e}: right, but rounded to float32 on the way. Keep "
                    "the dtype of x."
                )
            raise WrongAnswer(where + _cache_mistake(layer, x, pieces, given, cache, error, seen))
        seen += wanted.shape[1]
    kept = cache.get("keys")
    key_value = layer.key.out_features // layer.head_width
    if isinstance(kept, Tensor) and kept.shape[1] != key_value:
        raise WrongAnswer(
            f"right numbers, but the cache keeps {kept.shape[1]} heads, and there are "
            f"{key_value} kv_heads. Repeat heads after the cache, or the memory is not saved."
        )
    if not cache:
        raise WrongAnswer("right numbers, but `cache` is empty: where are the keys kept?")
    if missing := [name for name in ("keys", "values") if name not in cache]:
        raise WrongAnswer(
            f"right numbers, but the cache has no {' and no '.join(missing)}; it holds "
            f'{", ".join(map(str, cache))}. Name them "keys" and "values".'
        )


def _cache_mistake(layer, x, pieces, given: list, cache: dict, error: float, seen: int) -> str:
    for mistake, told in _CACHE_MISTAKES.items():
        for variant in (mistake, *(f"{mistake}, {turn}" for turn in ("again", "third", "fourth"))):
            state: dict[str, Tensor] = {}
            wrong = [_attend_wrongly(layer, piece, state, variant) for piece in x.split(pieces, 1)]
            if all(_alike(a, b) for a, b in zip(given, wrong)):
                # RoPE is relative, so the numbers are the same with and without an unread cache.
                return _ONLY_NEW_KEYS if mistake == "cache never filled" and cache else told
    if error != error:
        return (
            "the output holds NaN. A row of the mask that allows no key gives NaN in the softmax: "
            "each token must at least see itself."
        )
    told = f"the output differs by up to {error:.2g} from that of the whole sequence. "
    heads, kv_heads = (p.out_features // layer.head_width for p in (layer.query, layer.key))
    if kv_heads < heads:  # the second shape: the first one was right
        return told + (
            f"With as many kv_heads as heads yours was right. Two things are new here: {heads} "
            f"query heads share {kv_heads} key heads, and a later piece has several tokens."
        )
    if seen:
        return told + (
            "The first piece was right. So look at what only a later piece does: its positions, "
            "the join with the cache, the mask."
        )
    return told + (
        "The first piece is wrong already, so the cache is not the reason. Go through the steps of "
        "the stub and print the shape after each; `show(attend)` shows what the library expects."
    )


def _alike(given: Tensor, wrong: Tensor) -> bool:
    """Whether two outputs agree; a query that sees no key is NaN by hand, zero in fused code."""
    if not isinstance(given, Tensor) or given.shape != wrong.shape:
        return False
    return bool((given.nan_to_num(0.0) - wrong.nan_to_num(0.0)).abs().max() < 1e-6)


_WRONGLY_CUT = {
    "heads cut wrongly": "key and value",
    "heads cut wrongly, again": "query, key and value",
    "heads cut wrongly, third": "key",
    "heads cut wrongly, fourth": "value",
}


def _attend_wrongly(layer: Attention, x: Tensor, state: dict, mistake: str) -> Tensor:
    """`attend_with_cache` with one mistake in it, by hand: to recognise the learner's."""
    past, new = state.get("seen", 0), x.shape[1]
    query, key, value = _projected(layer, x)
    if mistake == "keys and values swapped":  # where they are computed
        key, value = value, key
    wrongly_cut = _WRONGLY_CUT.get(mistake, "")
    if "query" in wrongly_cut:
        query = layer.query(x).view(query.shape)
    if "key" in wrongly_cut:
        key = layer.key(x).view(key.shape)
    if "value" in wrongly_cut:
        value = layer.value(x).view(value.shape)

    def turned(tensor: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tensor.shape[2])
        if mistake == "one position":
            positions = torch.full_like(positions, first)
        return rotate(tensor, *_angles(positions, layer.head_width))

    first = 0 if mistake.startswith("positions restart") else past
    if mistake not in ("queries not rotated", "nothing rotated"):
        query = turned(query, first)
    if mistake not in ("keys not rotated", "nothing rotated", "keys rotated twice, again"):
        key = turned(key, first)
    if mistake == "values rotated":
        value = turned(value, first)
    if past:
        key, value = (
            torch.cat((new_part, old) if turned_round else (old, new_part), dim=2)
            for old, new_part, turned_round in (
                (state["keys"], key, mistake in ("new before old", "new before old, again")),
                (state["values"], value, mistake in ("new before old", "new before old, third")),
            )
        )
    kept = key
    if mistake == "keys rotated twice":  # the cache holds rotated keys; all are rotated again
        key = turned(key, 0)
    if mistake == "keys rotated twice, again":  # and here the result goes back into the cache
        kept = key = turned(key, 0)
    if mistake != "cache never filled":
        state.update(seen=past + new, keys=kept, values=value)
    if mistake == "keys and values swapped, again":  # where they are kept
        state.update(keys=value, values=key)
    if mistake == "keys and values swapped, third":  # where they are used
        key, value = value, key
    top_left = mistake in ("top-left mask", "positions restart, again")
    visible = torch.ones(new, key.shape[2], dtype=torch.bool)
    if mistake != "no mask":
        shift = {"mask one short": -1, "mask one far": 1}.get(mistake, 0)
        top_left = top_left or mistake == "inverted mask, again"
        visible = visible.tril(shift + (0 if top_left else key.shape[2] - new))
    if mistake.startswith("inverted mask"):
        visible = ~visible
    groups = query.shape[1] // key.shape[1]
    if mistake == "heads repeated":
        key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    else:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query @ key.transpose(-2, -1)
    width = {"scale by width": layer.query.out_features, "scale without root": layer.head_width**2}
    if mistake != "no scale":
        scores = scores / width.get(mistake, layer.head_width) ** 0.5
    axis = {"softmax axis": -2, "softmax axis, again": 1, "softmax axis, third": 0}.get(mistake, -1)
    if mistake == "mask after softmax":
        mixed = scores.softmax(-1).masked_fill(~visible, 0) @ value
    elif mistake == "numbers as mask":
        mixed = (scores + visible.to(scores.dtype)).softmax(-1) @ value
    else:
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(axis) @ value
    joined = {
        "heads not joined": mixed,
        "heads not joined, again": mixed.transpose(1, 3),
        "heads not joined, third": mixed.permute(0, 2, 3, 1),
    }.get(mistake, mixed.transpose(1, 2))
    mixed = joined.reshape(x.shape)
    if mistake == "input added":
        return x + layer.output(mixed)
    return mixed if mistake == "no output" else layer.output(mixed)
