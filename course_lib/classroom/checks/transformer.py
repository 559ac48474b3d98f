"""The exercises of "The Transformer on one device": count parameters; attend with a KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from course_lib.model import Attention, ModelConfig, Transformer, attend, build, rotate

from ..learner import learners_frame, learners_line
from .exercise import Exercise, WrongAnswer

# Exercise 1: parameters by component

COMPONENTS = ("embedding", "positions", "attention", "mlp", "norms", "head")

_SHAPES = (
    ModelConfig(3, 48, 6, 2, 101, 20, 130, norm="rmsnorm", mlp="swiglu", positions="rope",
                bias=False, tie_embeddings=False),
    ModelConfig(2, 40, 5, vocab=97, context=33),
    ModelConfig(4, 32, 8, 4, 53, 12, 72, mlp="swiglu"),
    ModelConfig(5, 24, 4, 1, 61, 16, 50, norm="rmsnorm", positions="rope"),
    ModelConfig(1, 16, 2, vocab=29, context=8, bias=False, tie_embeddings=False),
)  # fmt: skip


def grade_parameter_count(answer: Callable[[ModelConfig], dict[str, int]]) -> None:
    """Compare the answer with the parameters of real models on the meta device."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    for config in _SHAPES:
        counts, right = _counted(answer, config), _really_there(config)
        if not isinstance(counts, dict):
            raise WrongAnswer(
                f"return a dict with the keys {', '.join(COMPONENTS)} and total; yours returned "
                f"{'nothing' if counts is None else type(counts).__name__}."
            )
        if missing := [name for name in (*COMPONENTS, "total") if name not in counts]:
            raise WrongAnswer(f"your dict has no key {', '.join(missing)}.")
        for name in COMPONENTS:
            if not isinstance(counts[name], (int, float)):
                raise WrongAnswer(f"{name} must be a number; yours: {type(counts[name]).__name__}.")
            if counts[name] != right[name]:
                raise WrongAnswer(_miscounted(config, name, counts[name], right[name]))
        if counts["total"] != sum(right.values()):
            raise WrongAnswer(
                f"every component is right, but total is {counts['total']:,} and their sum is "
                f"{sum(right.values()):,}."
            )


def _counted(answer: Callable, config: ModelConfig) -> dict[str, int]:
    """Ask the answer; say so where it computes with a size of the config that is None."""
    try:
        return answer(config)
    except TypeError as error:
        used = _names_used(error) & {"kv_heads", "mlp_width"}
        unset = [name for name in ("kv_heads", "mlp_width") if getattr(config, name) is None]
        found = [name for name in unset if name in used]
        if "NoneType" not in str(error) or not found:
            raise
        instead = {"kv_heads": "key_value_heads", "mlp_width": "inner_width"}
        told = " ".join(
            f"config.{name} may be None, which means its default; use config.{instead[name]}."
            for name in found
        )
        raise WrongAnswer(f"{told}\n{learners_line(error)}".rstrip()) from error


def _names_used(error: BaseException) -> set[str]:
    """Every name in the code of the functions that an error passed through."""
    names: set[str] = set()
    step = error.__traceback__.tb_next  # the first is this module's own function
    while step is not None:
        names |= set(step.tb_frame.f_code.co_names)
        step = step.tb_next
    return names


def _really_there(config: ModelConfig) -> dict[str, int]:
    """Count the tensors of a real model; a tied weight comes once, under its first name."""
    with torch.device("meta"):
        model = Transformer(config)
    counts = dict.fromkeys(COMPONENTS, 0)
    kinds = {"position_embedding": "positions", "norm": "norms", "attention_norm": "norms",
             "mlp_norm": "norms"}  # fmt: skip
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        part = parts[2] if parts[0] == "blocks" else parts[0]
        counts[kinds.get(part, part)] += parameter.numel()
    return counts


def _miscounted(config: ModelConfig, name: str, given, right: int) -> str:
    """Name the mistake behind a wrong count of one component."""
    told = f"{name}: you count {given:,}, the model has {right:,} ({_words(config)}). "
    return told + dict(reversed(_mistakes(config)[name])).get(
        given, "Write down the shape of each tensor in it, and multiply."
    )


def _mistakes(config: ModelConfig) -> dict[str, list[tuple[int, str]]]:
    """Typical wrong counts of each component, the likeliest first, and what to say to each."""
    c, w, inner, layers = config, config.width, config.inner_width, config.layers
    narrow, bias = c.key_value_heads * c.head_width, int(c.bias)
    attention = 2 * w * w + 2 * w * narrow + bias * (2 * w + 2 * narrow)
    matrices = 3 if c.mlp == "swiglu" else 2
    mlp = matrices * w * inner + bias * ((matrices - 1) * inner + w)
    other = 5 - matrices
    norm = w * (2 if c.norm == "layernorm" and c.bias else 1)
    rest = "The mistake is a factor of the layers: every block has its own."
    return {
        "embedding": [
            (2 * c.vocab * w, "Count the head under head, and only if it is not tied."),
            (c.context * w, "That is the position table. The embedding has one row per token id."),
            ((c.vocab + c.context) * w, "Count the position table under positions."),
        ],
        "positions": [
            (c.context * w, "RoPE turns queries and keys by angles. It has no parameters."),
            (0, "Learned positions are a table: one row of width numbers per position."),
        ],
        "attention": [
            (layers * (4 * w * w + bias * 4 * w),
             "You count keys and values at full width. With grouped heads their matrices have "
             "only kv_heads × head_width columns."),
            (layers * (4 * w * w + bias * (2 * w + 2 * narrow)),
             "You count the matrices of keys and values at full width; their biases are right."),
            (layers * (2 * w * w + 2 * w * narrow),
             "The biases are missing: one number per output of each of the four matrices."),
            (layers * (attention - 2 * w * narrow + 2 * w * c.head_width),
             "Keys and values have kv_heads × head_width columns, not one head's."),
            (layers * (attention - w * w - bias * w),
             "The output projection is missing: it mixes the heads again."),
            (layers * (attention + bias * 2 * (w - narrow)),
             "The biases of keys and values are as narrow as their matrices."),
            (layers * (2 * w * w + 2 * w * narrow + 2 * w + 2 * narrow),
             "You count biases, but bias is False here."),
            (attention, rest),
        ],
        "mlp": [
            (layers * (2 * w * inner + bias * (inner + w)),
             "You count two matrices. SwiGLU has three: gate, up and down."),
            (layers * (3 * w * inner + bias * (2 * inner + w)),
             "You count three matrices. The GELU MLP has two: up and down."),
            (layers * matrices * w * inner,
             "The biases are missing: up (and gate) have inner_width of them, down has width."),
            (layers * (matrices * w * 4 * w + bias * ((matrices - 1) * 4 * w + w)),
             "You use 4 × width, but this config sets mlp_width. Use config.inner_width."),
            (layers * (other * w * inner + bias * ((other - 1) * inner + w)),
             "The number of matrices does not fit the kind of MLP."),
            *_mlp_bias_mistakes(c, matrices),
            (mlp, rest),
            *((layers * (8 * w * w + biases),
               "You count 8 × width². That holds for two matrices and inner_width = 4 × width. "
               "Use config.inner_width.")
              for biases in {0, bias * ((matrices - 1) * inner + w), bias * 5 * w}),
        ],
        "norms": [
            (0, "The norms are missing. They are small, but each one has a weight."),
            (2 * layers * norm, "The last norm, before the head, is missing."),
            ((layers + 1) * norm, "A block has two norms: before attention and before the MLP."),
            ((2 * layers + 1) * w, "LayerNorm has a weight and, with bias, also a bias."),
            ((2 * layers + 1) * 2 * w,
             "RMSNorm has only a weight." if c.norm == "rmsnorm"
             else "LayerNorm has no bias where bias is False."),
            (3 * norm, rest),
        ],
        "head": [
            (c.vocab * w,
             "You count the tied head twice: it is the embedding's own tensor, so it adds 0."),
            (0, "This head is not tied: it is a second matrix of vocab × width."),
            ((c.vocab + 1) * w, "The head has no bias."),
            (c.vocab * w + c.vocab, "The head has no bias."),
        ],
    }  # fmt: skip


def _mlp_bias_mistakes(config: ModelConfig, matrices: int) -> list[tuple[int, str]]:
    """Wrong biases of the MLP, beside the right matrices."""
    w, inner, ups = config.width, config.inner_width, matrices - 1
    up = "up and gate have" if ups == 2 else "up has"
    rule = f"Each linear layer has one bias per output: {up} inner_width, down has width."
    told = [
        (ups * inner, f"The bias of down is missing. {rule}"),
        (w, f"Only the bias of down is counted. {rule}"),
        (inner + w, f"One of the two biases of width inner_width is missing. {rule}"),
        (ups * inner + inner, f"The bias of down has width numbers, not inner_width. {rule}"),
        (ups * w + w, f"You count width biases for each layer. {rule}"),
        (ups * w + inner, f"The biases are exchanged. {rule}"),
        (3 * inner + w, f"You count three biases of inner_width. {rule}"),
        (2 * inner + w, f"You count two biases of inner_width. {rule}"),
        (ups * 4 * w + w, f"You use 4 × width for the biases. {rule}"),
        (1, f"You count one bias per layer. {rule}"),
        (matrices, f"You count one number as the bias of each linear layer. {rule}"),
    ]
    if not config.bias:
        told = [(biases, "You count biases, but bias is False here.") for biases, _ in
                [(ups * inner + w, ""), *told]]  # fmt: skip
    return [(config.layers * (matrices * w * inner + biases), words) for biases, words in told]


def _words(config: ModelConfig) -> str:
    heads = f"{config.heads} heads, {config.key_value_heads} kv_heads"
    tied = "tied" if config.tie_embeddings else "untied"
    bias = "with bias" if config.bias else "no bias"
    return (
        f"layers {config.layers}, width {config.width}, {heads}, {config.mlp}, {config.norm}, "
        f"{config.positions}, {bias}, {tied}"
    )


# Exercise 2: one attention layer with a KV cache


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
    try:
        return answer(layer, piece, cache)
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
            raise WrongAnswer(where + _cache_mistake(layer, x, pieces, given, cache, error))
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


def _cache_mistake(layer, x, pieces, given: list, cache: dict, error: float) -> str:
    for mistake, told in _CACHE_MISTAKES.items():
        for variant in (mistake, f"{mistake}, again", f"{mistake}, third"):
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
    return (
        f"the output differs by up to {error:.2g} from that of the whole sequence. Compare "
        "positions, keys and mask of this piece with those of the same tokens in one piece."
    )


def _alike(given: Tensor, wrong: Tensor) -> bool:
    """Whether two outputs agree; a query that sees no key is NaN by hand, zero in fused code."""
    if not isinstance(given, Tensor) or given.shape != wrong.shape:
        return False
    return bool((given.nan_to_num(0.0) - wrong.nan_to_num(0.0)).abs().max() < 1e-6)


def _attend_wrongly(layer: Attention, x: Tensor, state: dict, mistake: str) -> Tensor:
    """`attend_with_cache` with one mistake in it, by hand: to recognise the learner's."""
    past, new = state.get("seen", 0), x.shape[1]
    query, key, value = _projected(layer, x)
    if mistake == "keys and values swapped":  # where they are computed
        key, value = value, key

    def turned(tensor: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + tensor.shape[2])
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
    else:
        mixed = scores.masked_fill(~visible, -torch.inf).softmax(axis) @ value
    mixed = mixed.transpose(1, 2).flatten(2)
    return mixed if mistake == "no output" else layer.output(mixed)


EXERCISES = (
    Exercise(
        name="transformer/1",
        title="count the parameters of any decoder",
        difficulty=2,
        minutes=15,
        hints=(
            "Go through the parts of `Transformer` one by one. For each tensor write its shape: "
            "a linear layer from a to b has a × b weights, and b biases if config.bias.",
            "Keys and values have config.key_value_heads × config.head_width columns. SwiGLU has "
            "three matrices of width × inner_width. There are 2 × layers + 1 norms.",
            "A tied head adds 0. RoPE adds 0. RMSNorm has one vector; LayerNorm has two with "
            "bias. Biases per block: 2 × width + 2 × kv_width in attention; inner_width for up "
            "(and gate) and width for down in the MLP.",
        ),
        solution="course_lib.model:count_parameters",
        grade=grade_parameter_count,
    ),
    Exercise(
        name="transformer/2",
        title="one attention layer with a KV cache",
        difficulty=3,
        minutes=20,
        hints=(
            "Let past be the number of tokens in the cache. Which positions do the new tokens "
            "have? How many keys may each of them see?",
            "Rotate the new queries and the new keys at positions past … past + new - 1. Then "
            "join old and new keys along dimension 2, and keep the result.",
            "The mask has `new` rows and `past + new` columns: torch.ones(new, past + new, "
            "dtype=torch.bool).tril(past). `attend(query, key, value, mask, None, 0)` does the "
            "rest, also with grouped heads.",
        ),
        solution="course_lib.classroom.checks.transformer:attend_with_cache",
        grade=grade_attention_with_cache,
    ),
)
