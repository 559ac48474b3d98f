"""How many parameters and how many FLOPs a shape has, by closed formula.

One multiply-add counts as two FLOPs. Only matrix products are counted, as is usual: norms,
activations, softmax and the embedding's look-up are left out. The backward pass of a product costs
two products, so a training step costs three forward passes (Kaplan et al. 2020, arXiv 2001.08361).
"""

from course_lib.model.config import ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Number of parameters by component, and their "total".

    Components: embedding, positions, attention, mlp, norms, head. A head tied to the embedding
    adds nothing.
    """
    width, inner = config.width, config.inner_width
    key_value = config.key_value_heads * config.head_width
    bias = int(config.bias)
    attention = 2 * width * width + 2 * width * key_value + bias * (2 * width + 2 * key_value)
    matrices = 3 if config.mlp == "swiglu" else 2
    mlp = matrices * width * inner + bias * ((matrices - 1) * inner + width)
    norm = width * (2 if config.norm == "layernorm" and config.bias else 1)
    counts = {
        "embedding": config.vocab * width,
        "positions": config.context * width if config.positions == "learned" else 0,
        "attention": config.layers * attention,
        "mlp": config.layers * mlp,
        "norms": (2 * config.layers + 1) * norm,
        "head": 0 if config.tie_embeddings else config.vocab * width,
    }
    return counts | {"total": sum(counts.values())}


def count_flops(
    config: ModelConfig, batch: int, sequence: int, attention: str = "full"
) -> dict[str, int]:
    """FLOPs of the matrix products of one forward and one backward pass.

    batch, sequence: number of sequences, and of tokens in each.
    attention: "full" counts all sequence x sequence scores, as FlopCounterMode and PaLM's MFU do;
        "causal" counts half of them, the part that a causal kernel needs.
    Returns forward FLOPs by component (projections, scores, mlp, head), and "forward",
    "backward", "total". Raises ValueError for another convention.
    Source of the full convention: PaLM (arXiv 2204.02311), appendix B.
    """
    if attention not in ("full", "causal"):
        raise ValueError(f'attention {attention!r} is not a convention; use "full" or "causal"')
    tokens, width = batch * sequence, config.width
    key_value = config.key_value_heads * config.head_width
    matrices = 3 if config.mlp == "swiglu" else 2
    scores = 2 * 2 * tokens * sequence * width * config.layers  # queries x keys, weights x values
    flops = {
        "projections": 2 * tokens * config.layers * (2 * width * width + 2 * width * key_value),
        "scores": scores if attention == "full" else scores // 2,
        "mlp": 2 * tokens * config.layers * matrices * width * config.inner_width,
        "head": 2 * tokens * width * config.vocab,
    }
    forward = sum(flops.values())
    return flops | {"forward": forward, "backward": 2 * forward, "total": 3 * forward}
