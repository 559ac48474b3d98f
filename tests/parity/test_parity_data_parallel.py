"""Data parallelism against the oracle: 1 to 4 ranks, every way of summing, every shape.

One start of the ranks runs all cases of a world size. With plain summing the full product runs on
1 rank, most of it on 2, a chosen set on 3 (which divides little) and 4; then every method on
2, 3 and 4 ranks, with unused, frozen and tied parameters.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from course_lib.mesh import Mesh
from course_lib.model import ModelConfig
from tests.checks_core import TINY, TINY_LLAMA, check_training, on_ranks
from tests.checks_data_parallel import METHODS, TIED, add_unused, check_method, freeze_some

GPT2 = ModelConfig(layers=2, width=20, heads=4, vocab=29, context=9)  # tied, with biases
SHAPES = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tie_embeddings=False, mlp_width=33),
    "llama": TINY_LLAMA,  # grouped keys, no biases, untied
    "llama-biased-tied": replace(TINY_LLAMA, bias=True, tie_embeddings=True, kv_heads=1),
    "one-layer": ModelConfig(layers=1, width=6, heads=1, vocab=7, context=3),
    "dropout": replace(GPT2, dropout=0.2),
}


def case(shape: str, accumulation: int, clip_norm: float, dtype=torch.float64, **rest):
    """Name and oracle's arguments of one case; clip_norm 0.05 binds at every step."""
    clipped = "clipped" if clip_norm else "unclipped"
    name = f"{shape}, {accumulation} micro-batches, {clipped}, {dtype}, {rest}"
    arguments = dict(
        config=SHAPES[shape], accumulation=accumulation, clip_norm=clip_norm, dtype=dtype, **rest
    )
    return name, arguments


FULL = [
    *(case(*parts) for parts in product(SHAPES, (1, 2, 3), (0.0, 0.05))),
    *(case(shape, 3, 0.05, torch.float32) for shape in SHAPES),
]
MOST = [
    *(case(*parts) for parts in product(SHAPES, (1, 3), (0.0, 0.05))),
    *(case(shape, 2, 0.05, torch.float32) for shape in SHAPES),
    case("gpt2", 1, 0.0, micro_batch=1),
    case("llama", 3, 0.0, micro_batch=1),
    case("gpt2", 2, 0.0, micro_batch=5, seed=1),
]
CHOSEN = [
    case("gpt2", 3, 0.0),
    case("llama", 1, 0.05),
    case("dropout", 2, 0.05),
    case("gpt2-untied", 2, 0.05, torch.float32),
    case("llama-biased-tied", 1, 0.0, micro_batch=1),
]


@pytest.mark.trap("ACC-01")
@pytest.mark.trap("ACC-04")
@pytest.mark.trap("CLIP-09")
@pytest.mark.parametrize("ranks, cases", [(1, FULL), (2, MOST), (3, CHOSEN), (4, CHOSEN)])
def test_data_parallel_training_equals_the_plain_model(ranks, cases):
    if ranks == 1:
        check_training(Mesh.single(), *cases)
    else:
        on_ranks(check_training, {"dp": ranks}, *cases)


FEW = ["each", "flat", "buckets, several", "overlap, several", "pytorch"]


def check_methods(mesh: Mesh, few: bool) -> None:
    """Each way of summing: accumulation x clipping, tied and untied, fp32, unused and frozen.

    With one sample a micro-batch the first rank's labels are all masked (see random_batch).
    few: only what may differ between numbers of ranks.
    """
    check = partial(check_method, mesh, steps=3)
    untied = replace(TINY, tie_embeddings=False)
    for name in FEW if few else METHODS:
        check(name, config=TIED, accumulation=3, clip_norm=0.05)
        check(name, config=untied, accumulation=1, micro_batch=1)
        check(name, config=TINY, change=freeze_some if name == "pytorch" else freeze_and_add)
        if few:
            continue
        check(name, config=TIED, accumulation=1, clip_norm=0.05)
        check(name, config=TINY, accumulation=3)
        check(name, config=TINY, clip_norm=0.05, dtype=torch.float32)


def freeze_and_add(model) -> None:
    """Frozen and unused parameters in one model."""
    freeze_some(model)
    add_unused(model)


@pytest.mark.trap("ACC-04")
@pytest.mark.trap("ACC-09")
@pytest.mark.trap("CLIP-02")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_way_of_summing_equals_the_plain_model(ranks):
    on_ranks(check_methods, {"dp": ranks}, ranks > 2, timeout_s=120)
