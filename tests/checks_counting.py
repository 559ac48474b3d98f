"""Checks of the counting formulas, shared by the tests and by the mutants.

The counts are independent of the formulas: real tensors, and PyTorch's own FLOP counter, both on
the meta device, so that 175 billion parameters take no memory. On the meta device attention is
not fused and is counted in full; on a CPU the counter takes fused attention for nothing.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from course_lib import model
from course_lib.model import ModelConfig, Transformer

# Which component of a model's name is which component of the count.
COMPONENTS = {
    "embedding": "embedding",
    "position_embedding": "positions",
    "attention": "attention",
    "mlp": "mlp",
    "attention_norm": "norms",
    "mlp_norm": "norms",
    "norm": "norms",
    "head": "head",
}


def assert_parameters_are_counted(config: ModelConfig):
    """The formula equals the real count, by component and in all."""
    shell = _on_meta(config)
    found = model.count_parameters(config)
    real = dict.fromkeys(COMPONENTS.values(), 0)
    for name, parameter in shell.named_parameters():
        part = next(part for part in name.split(".") if part in COMPONENTS)
        real[COMPONENTS[part]] += parameter.numel()
    real["total"] = sum(parameter.numel() for parameter in shell.parameters())
    assert found == real, f"{found} is not {real}"


def assert_flops_are_counted(config: ModelConfig, batch: int, sequence: int):
    """The formula equals FlopCounterMode, forward and backward, with and without dropout."""
    shell = _on_meta(config)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as forward:
        logits = shell(tokens, samples=tokens[:, 0], step=0)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    found = model.count_flops(config, batch, sequence)
    assert found["forward"] == forward.get_total_flops(), "forward FLOPs differ"
    assert found["backward"] == backward.get_total_flops(), "backward FLOPs differ"


def assert_small_model_has_the_flops_of_the_papers(convention: str, attention: int):
    """6 FLOPs a token for each weight that multiplies it, which the input embedding does not."""
    config = ModelConfig(
        layers=2, width=64, heads=4, vocab=100, context=32, mlp_width=256, bias=False,
        tie_embeddings=False,
    )  # fmt: skip
    total = model.count_flops(config, 1, 32, convention)["total"]
    assert total / 32 == 6 * 104_704 + attention, f"{total / 32} FLOPs a token"


def _on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)
