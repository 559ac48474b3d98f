"""The exercises of "The Transformer on one device": count parameters; attend with a KV cache."""

from collections.abc import Callable

import torch

from course_lib.model import ModelConfig, Transformer

from ..learner import learners_line
from .exercise import Exercise, WrongAnswer
from .transformer_cache import grade_attention_with_cache

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
                f"every component is right, but your total is {counts['total']!r} and their sum is "
                f"{sum(right.values())}."
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
        solution="course_lib.classroom.checks.transformer_cache:attend_with_cache",
        grade=grade_attention_with_cache,
    ),
)
