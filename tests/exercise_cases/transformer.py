"""Answers to the exercises of "The Transformer on one device"."""

import math

import torch

from course_lib.model import ModelConfig, rotate

from . import Cases, Wrong

# transformer/1: the learner's count is written out; a mistake changes one line of it.


def count_stub(config):
    raise NotImplementedError


def count(config: ModelConfig, mistake: str = "") -> dict[str, int]:
    c, w = config, config.width
    kv = w if mistake == "kv at full width" else c.key_value_heads * c.head_width
    if mistake == "one key head":
        kv = c.head_width
    bias = 0 if mistake == "no biases" else int(c.bias or mistake == "always biases")
    matrices = [w * w, w * kv, w * kv, w * w]
    biases = [w, kv, kv, w]
    if mistake == "kv biases at full width":
        biases = [w] * 4
    if mistake == "no output projection":
        matrices, biases = matrices[:3], biases[:3]
    attention = sum(matrices) + bias * sum(biases)
    ups = 2 if c.mlp == "swiglu" else 1
    ups = {"two matrices": 1, "three matrices": 2}.get(mistake, ups)
    inner = 4 * w if mistake == "inner width ignored" else c.inner_width
    mlp = (ups + 1) * w * inner
    if mistake != "no biases in the mlp":
        both = {
            "no bias of down": ups * inner,
            "only the bias of down": w,
            "gate without bias": inner + w,
            "down's bias too wide": (ups + 1) * inner,
            "all MLP biases of width": (ups + 1) * w,
        }
        mlp += bias * both.get(mistake, ups * inner + w)
    if mistake == "8 × width²":
        mlp = 8 * w * w + bias * (ups * inner + w)
    norm = 2 * w if c.norm == "layernorm" and c.bias else w
    norm = {"norm without bias": w, "norm always with bias": 2 * w}.get(mistake, norm)
    norms = {"no norms": 0, "no last norm": 2 * c.layers, "one norm a block": c.layers + 1}
    layers = 1 if mistake == "one block" else c.layers
    tied = c.tie_embeddings and mistake != "tied head twice"
    counts = {
        "embedding": c.vocab * w * (2 if mistake == "embedding twice" else 1),
        "positions": c.context * w,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norms": norms.get(mistake, 2 * c.layers + 1) * norm,
        "head": 0 if tied or mistake == "no head" else c.vocab * w,
    }
    if c.positions == "rope" and mistake != "positions for rope":
        counts["positions"] = 0
    if mistake == "no positions":
        counts["positions"] = 0
    if mistake == "text":
        counts["mlp"] = str(counts["mlp"])
    counts["total"] = sum(counts.values()) if mistake != "text" else 0
    if mistake == "total is None":
        counts["total"] = None
    if mistake == "total without positions":
        counts["total"] -= counts["positions"]
    return counts


def counting(mistake: str):
    return lambda config: count(config, mistake)


def uses_real_mlp_width(config):
    return count(config) | {"unused": config.width * config.mlp_width}


def uses_kv_heads(config):
    return count(config) | {"unused": config.kv_heads * config.head_width}


def only_the_total(config):
    return count(config)["total"]


def without_norms_key(config):
    return {name: number for name, number in count(config).items() if name != "norms"}


# transformer/2: an answer by hand, so that it shares nothing with the check or its key.


def cache_stub(layer, x, cache):
    raise NotImplementedError


def angles(positions, head_width):
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    turn = positions[:, None] * frequency
    return turn.cos(), turn.sin()


def attend(layer, x, cache, mistake: str = ""):
    batch, new, _ = x.shape
    width = layer.head_width
    past = cache["keys"].shape[2] if cache else 0
    positions = torch.arange(new) + (0 if mistake == "positions restart" else past)
    if mistake == "one position":
        positions = torch.full((new,), past)
    turn = angles(positions, width)
    if mistake == "float32":
        turn = tuple(part.float() for part in turn)
    q, k, v = (
        part(x).reshape(batch, new, -1, width).transpose(1, 2)
        for part in (layer.query, layer.key, layer.value)
    )
    if mistake == "heads never transposed":
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if mistake in ("all heads cut wrongly", "keys cut wrongly", "values cut wrongly"):
        k = k if mistake == "values cut wrongly" else layer.key(x).reshape(batch, -1, new, width)
        v = v if mistake == "keys cut wrongly" else layer.value(x).reshape(batch, -1, new, width)
    if mistake == "all heads cut wrongly":
        q = layer.query(x).reshape(batch, -1, new, width)
    if mistake == "swapped when computed":
        k, v = v, k
    if mistake != "queries not rotated":
        q = rotate(q, *turn)
    if mistake not in ("keys not rotated", "cache of unrotated keys", "rotated again and again"):
        k = rotate(k, *turn)
    if mistake == "values rotated":
        v = rotate(v, *turn)
    groups = q.shape[1] // k.shape[1]
    if mistake == "cache at full width":
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if cache and mistake == "new before old":
        k, v = torch.cat((k, cache["keys"]), 2), torch.cat((v, cache["values"]), 2)
    elif cache and mistake == "new keys before old":
        k, v = torch.cat((k, cache["keys"]), 2), torch.cat((cache["values"], v), 2)
    elif cache and mistake != "only new keys":
        k, v = torch.cat((cache["keys"], k), 2), torch.cat((cache["values"], v), 2)
    kept = k, v
    if mistake == "only new keys" and cache:
        kept = torch.cat((cache["keys"], k), 2), torch.cat((cache["values"], v), 2)
    if mistake in ("keys rotated twice", "cache of unrotated keys", "rotated again and again"):
        k = rotate(k, *angles(torch.arange(k.shape[2]), width))
    if mistake == "rotated again and again":
        kept = k, v
    if mistake != "cache not kept":
        names = ("k", "v") if mistake == "other names" else ("keys", "values")
        cache.update(zip(names, reversed(kept) if mistake == "swapped when kept" else kept))
    if mistake == "swapped when used":
        k, v = v, k
    groups = q.shape[1] // k.shape[1]
    if mistake == "repeat":
        k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    else:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT
    if mistake != "no scale":
        wrong = {"scaled by width": layer.query.out_features, "scaled twice": width**2}
        scores /= math.sqrt(wrong.get(mistake, width))
    sees = torch.arange(k.shape[2])[None] <= torch.arange(new)[:, None] + k.shape[2] - new
    if mistake == "top-left":
        sees = torch.arange(k.shape[2])[None] <= torch.arange(new)[:, None]
    if mistake in ("one short", "one far"):
        shift = k.shape[2] - new + (1 if mistake == "one far" else -1)
        sees = torch.arange(k.shape[2])[None] <= torch.arange(new)[:, None] + shift
    if mistake == "inverted":
        sees = ~sees
    if mistake == "inverted top-left":
        sees = torch.ones(new, k.shape[2], dtype=torch.bool).triu(1)
    if mistake not in ("no mask", "masks weights"):
        scores = scores.masked_fill(~sees, -torch.inf)
    axes = {"softmax over queries": -2, "softmax over heads": 1}
    if mistake == "numbers as mask":
        scores = q @ k.mT / math.sqrt(width) + sees.double()
    if mistake == "scores doubled":
        scores = 2 * scores
    if mistake == "last scores doubled" and past:
        scores = 2 * scores
    if mistake == "grouped scores doubled" and groups > 1:
        scores = 2 * scores
    if mistake == "mask without the past":
        scores = scores.masked_fill(~torch.ones(new, new, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(axes.get(mistake, -1))
    if mistake == "masks weights":
        weights = weights * sees
    mixed = (weights @ v).transpose(1, 2).reshape(batch, new, -1)
    if mistake == "no transpose at the end":
        mixed = (weights @ v).reshape(batch, new, -1)
    if mistake == "wrong transpose at the end":
        mixed = (weights @ v).transpose(1, 3).reshape(batch, new, -1)
    if mistake == "heads and width turned round":
        mixed = (weights @ v).permute(0, 2, 3, 1).reshape(batch, new, -1)
    if mistake == "last token only":
        mixed = mixed[:, -1]
    if mistake == "adds x":
        return x + layer.output(mixed)
    return mixed if mistake == "no output projection" else layer.output(mixed)


def attending(mistake: str):
    return lambda layer, x, cache: attend(layer, x, cache, mistake)


def with_own_names(layer, x, cache):
    """Right, but what it keeps is called k and v."""
    renamed = {"keys": cache.get("k"), "values": cache.get("v")} if cache else {}
    output = attend(layer, x, renamed)
    cache.update(k=renamed["keys"], v=renamed["values"])
    return output


CASES = {
    "transformer/1": Cases(
        count_stub,
        (
            Wrong("counts the tied head twice", counting("tied head twice"), "tied head twice"),
            Wrong("keys and values at full width", counting("kv at full width"), "at full width. "),
            Wrong("two matrices in SwiGLU", counting("two matrices"), "SwiGLU has three"),
            Wrong("three matrices in GELU", counting("three matrices"), "GELU MLP has two"),
            Wrong("forgets all biases", counting("no biases"), "of each of the four matrices"),
            Wrong("forgets MLP biases", counting("no biases in the mlp"), "up (and gate) have"),
            Wrong("biases where there are none", counting("always biases"), "bias is False here"),
            Wrong("forgets the norms", counting("no norms"), "norms are missing"),
            Wrong("forgets the last norm", counting("no last norm"), "before the head, is missing"),
            Wrong("one norm a block", counting("one norm a block"), "two norms"),
            Wrong("no bias in LayerNorm", counting("norm without bias"), "also a bias"),
            Wrong("bias in RMSNorm", counting("norm always with bias"), "only a weight"),
            Wrong("a position table for RoPE", counting("positions for rope"), "no parameters"),
            Wrong("no learned positions", counting("no positions"), "a table"),
            Wrong("one key head whatever kv_heads", counting("one key head"), "not one head's"),
            Wrong("biases of k, v too wide", counting("kv biases at full width"), "as narrow as"),
            Wrong("no output projection", counting("no output projection"), "mixes the heads"),
            Wrong("one block", counting("one block"), "every block has its own"),
            Wrong("4 × width always", counting("inner width ignored"), "config.inner_width"),
            Wrong("no untied head", counting("no head"), "second matrix"),
            Wrong("head under embedding", counting("embedding twice"), "under head"),
            Wrong("a sum without positions", counting("total without positions"), "their sum is"),
            Wrong("no bias of down", counting("no bias of down"), "bias of down is missing"),
            Wrong("only down has one", counting("only the bias of down"), "Only the bias of down"),
            Wrong("gate without bias", counting("gate without bias"), "One of the two biases"),
            Wrong("down's bias too wide", counting("down's bias too wide"), "not inner_width"),
            Wrong("biases of width", counting("all MLP biases of width"), "width biases for each"),
            Wrong("8 × width² always", counting("8 × width²"), "8 × width²"),
            Wrong("uses kv_heads", uses_kv_heads, "use config.key_value_heads"),
            Wrong("uses mlp_width", uses_real_mlp_width, "use config.inner_width"),
            Wrong("returns the total only", only_the_total, "return a dict"),
            Wrong("forgets a key", without_norms_key, "no key norms"),
            Wrong("returns text", counting("text"), "must be a number"),
            Wrong("no total", counting("total is None"), "your total is None and their sum is"),
            Wrong("gives a value, not a function", 124_439_808, "without calling it"),
        ),
    ),
    "transformer/2": Cases(
        cache_stub,
        (
            Wrong("mask aligned top-left", attending("top-left"), "aligned top-left"),
            Wrong("positions restart", attending("positions restart"), "Positions restart"),
            Wrong("keys rotated twice", attending("keys rotated twice"), "rotated again"),
            Wrong(
                "cached keys rotated in each piece",
                attending("rotated again and again"),
                "Rotate only the new keys",
            ),
            Wrong("no mask", attending("no mask"), "No mask"),
            Wrong("forgets to fill the cache", attending("cache not kept"), "cache is not kept"),
            Wrong("attends to new keys only", attending("only new keys"), "only to its own keys"),
            Wrong("queries not rotated", attending("queries not rotated"), "Queries are not"),
            Wrong("keys not rotated", attending("keys not rotated"), "Keys are not rotated"),
            Wrong("values rotated", attending("values rotated"), "Values are rotated"),
            Wrong("repeats heads in the wrong order", attending("repeat"), "repeat_interleave"),
            Wrong("no scale", attending("no scale"), "square root"),
            Wrong("no output projection", attending("no output projection"), "layer.output"),
            Wrong("scaled by width", attending("scaled by width"), "root of the whole width"),
            Wrong("scaled twice", attending("scaled twice"), "do not divide before"),
            Wrong("inverted mask", attending("inverted"), "mask is inverted"),
            Wrong("inverted, top-left", attending("inverted top-left"), "must not see"),
            Wrong("mask one short", attending("one short"), "does not see itself"),
            Wrong("mask one far", attending("one far"), "sees the next one"),
            Wrong("new before old", attending("new before old"), "before the old ones"),
            Wrong("only keys turned round", attending("new keys before old"), "(old, new)"),
            Wrong("swapped when computed", attending("swapped when computed"), "are exchanged"),
            Wrong("swapped when kept", attending("swapped when kept"), "Keys and values are exch"),
            Wrong("swapped when used", attending("swapped when used"), "Queries meet keys"),
            Wrong("softmax over queries", attending("softmax over queries"), "wrong dimension"),
            Wrong("softmax over heads", attending("softmax over heads"), "softmax(-1)"),
            Wrong("masks the weights", attending("masks weights"), "after the softmax"),
            Wrong("joins without transpose", attending("no transpose at the end"), "joined in the"),
            Wrong("other transpose", attending("wrong transpose at the end"), "tokens first with"),
            Wrong("heads last", attending("heads and width turned round"), "and only then join"),
            Wrong("cuts all wrongly", attending("all heads cut wrongly"), "Heads and tokens are"),
            Wrong("cuts keys wrongly", attending("keys cut wrongly"), "keys or values are cut"),
            Wrong("cuts values wrongly", attending("values cut wrongly"), "First view(batch, new,"),
            Wrong("one position a piece", attending("one position"), "get the same position"),
            Wrong("numbers as mask", attending("numbers as mask"), "added to the scores"),
            Wrong("adds x", attending("adds x"), "You add x to the result"),
            Wrong("never transposes", attending("heads never transposed"), "two shapes do not"),
            Wrong("square mask", attending("mask without the past"), "mask (3, 4); into layer"),
            Wrong("another scale", attending("scores doubled"), "the cache is not the reason"),
            Wrong("later another", attending("last scores doubled"), "only a later piece does"),
            Wrong("grouped another", attending("grouped scores doubled"), "6 query heads share 2"),
            Wrong("other cache names", attending("other names"), 'cache holds "k", "v"'),
            Wrong("own cache names", with_own_names, "right numbers, but the cache has no keys"),
            Wrong("caches repeated heads", attending("cache at full width"), "kv_heads"),
            Wrong("rounds to float32", attending("float32"), "rounded to float32"),
            Wrong("returns the last token only", attending("last token only"), "a tensor of"),
            Wrong("gives a value, not a function", torch.zeros(2), "without calling it"),
        ),
    ),
}
