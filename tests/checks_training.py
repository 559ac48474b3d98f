"""Checks of one device's part of a step, shared by its tests and by its mutants.

The references are PyTorch's own: the mean loss of the undivided batch, AdamW, GradScaler.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib import training
from course_lib.model import ModelConfig, build
from course_lib.oracle import random_batch, split
from course_lib.training import IGNORE, LossScaler, TrainingConfig

SHAPE = ModelConfig(layers=1, width=8, heads=2, vocab=11, context=6)

Put = Callable[[Any, str, Any], None]  # setattr, or pytest's, which undoes it


def relative(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative difference of a pair, floored as in the oracle."""
    got, want = [t.detach() for t in got], [t.detach() for t in want]
    floor = 1e-3 * math.sqrt(sum(float(w.norm()) ** 2 for w in want))
    return max(float((g - w).norm()) / max(float(w.norm()), floor) for g, w in zip(got, want))


# --------------------------------------------------------------------------------- accumulation


def undivided(batch) -> tuple[float, list[Tensor]]:
    """Mean loss and gradients of a whole global batch, by PyTorch alone."""
    model = build(SHAPE, dtype=torch.float64)
    logits = model(**batch.inputs()).flatten(0, 1)
    loss = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def check_accumulation(samples: int = 24, counts: Sequence[int] = (1, 2, 3, 8)) -> None:
    """ACC-01, ACC-03: any number of micro-batches with uneven masks is the undivided batch."""
    batch = random_batch(SHAPE, samples, 0)  # the first samples have no labels, the last have all
    loss, gradients = undivided(batch)
    for count in counts:
        model = build(SHAPE, dtype=torch.float64)
        parts = split(batch, 1, count)[0]
        assert len(parts) == count
        got = training.accumulate(model, parts, batch.valid, "fp64")
        assert math.isclose(float(got), loss, rel_tol=1e-12), f"{count} parts: loss {float(got)}"
        error = relative([p.grad for p in model.parameters()], gradients)
        assert error < 1e-10, f"{count} parts: gradients differ by {error:.1e}"


# ------------------------------------------------------------------------------------ optimizer


def check_adamw(steps: int = 50) -> None:
    """Our AdamW, the fused one and torch's plainest take the same steps, in two decay groups."""
    config = TrainingConfig(lr=0.02, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3, steps=steps)
    models = [Rows(), Rows(), Rows()]
    fused = training.make_optimizer(config, [(models[1].matrix, True), (models[1].bias, False)])
    groups = [
        {"params": [models[2].matrix], "weight_decay": 0.3},
        {"params": [models[2].bias], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3, foreach=False, fused=False)
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in models[0].parameters()]
    for step in range(steps):
        rate = training.learning_rate(config, step)
        for model in models:
            model.make_gradients(step)
        for parameter, (mean, square) in zip(models[0].parameters(), moments):
            training.adamw_update(
                parameter, parameter.grad, mean, square, config, step, rate, parameter.dim() == 2
            )
        for optimizer in (fused, torchs):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for name, other in (("ours", models[0]), ("the fused one", models[1])):
            error = relative([*other.parameters()], [*models[2].parameters()])
            assert error < 1e-13, f"{name} differs by {error:.1e} after {step + 1} steps"


class Rows(nn.Module):
    """Least squares with a matrix, which decays, and a bias, which does not; fp64."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3))
        self.bias = nn.Parameter(torch.full((5,), 0.5, dtype=torch.float64))

    def make_gradients(self, step: int) -> None:
        """Gradients of another batch at each step, as the weights now are."""
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, 3 + 5, generator=generator, dtype=torch.float64).split((3, 5), dim=1)
        self.zero_grad()
        F.mse_loss(F.linear(x, self.matrix, self.bias), y).backward()


# -------------------------------------------------------------------------------- learning rate


SHAPES = {  # lr 1 to 0.2, 4 steps of warm-up, 20 steps: rates at chosen steps
    "cosine": {11.5: 0.6, 20: 0.2},
    "linear": {7.25: 0.8, 11.5: 0.6, 20: 0.2},
    "wsd": {4: 1.0, 10: 1.0, 15: 1.0, 16: 0.84, 17: 0.68, 19: 0.36, 20: 0.2},
    "constant": {4: 1.0, 19: 1.0, 20: 1.0, 1000: 1.0},
}


def check_schedules() -> None:
    """LR-01, LR-03: each schedule at step 0, at its joints, at its end and past it."""
    for schedule, wanted in SHAPES.items():
        config = TrainingConfig(
            lr=1.0, min_lr=0.2, warmup=4, steps=20, schedule=schedule, decay=0.25
        )
        end = 1.0 if schedule == "constant" else 0.2
        wanted = {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, **wanted, 21: end, 40: end, 10**6: end}
        for step, rate in wanted.items():
            got = training.learning_rate(config, step)
            assert math.isclose(got, rate, rel_tol=1e-12), (
                f"{schedule} at {step}: {got}, not {rate}"
            )
    config = TrainingConfig(warmup=0, steps=100, schedule="wsd", decay=0.29)
    rates = [training.learning_rate(config, step) / config.lr for step in range(101)]
    falls = next(step for step, rate in enumerate(rates) if rate < 1)
    assert falls == 72, f"29 steps of 100 decay, so step 72 is the first below lr, not {falls}"
    assert math.isclose(rates[100], 0.1), f"by default the rate ends at 0.1 of lr, not {rates[100]}"


# -------------------------------------------------------------------------------- loss scaling


def check_overflow_reaches_the_logits() -> None:
    """MP-04: what is not finite above the loss must not be made finite in its backward pass."""
    for upstream in (math.inf, math.nan):
        logits = torch.zeros(1, 1, 4, requires_grad=True)
        (training.loss_sum(logits, torch.tensor([[1]])) * upstream).backward()
        left = int(logits.grad.isfinite().sum())
        assert left == 0, f"{left} of 4 gradients are finite under a gradient of {upstream}"


def check_scale_moves_as_torchs() -> None:
    """MP-04: through good steps and overflows, our scale equals that of torch's GradScaler."""
    finite = [True, True, True, True, False, True, False, False, True, True, True, True, True, True]
    ours = LossScaler(scale=64.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.1)
    for step, good in enumerate(finite):
        ours.update(good)
        weight.grad = torch.full_like(weight, 1.0 if good else math.inf)
        theirs.scale(torch.ones(1))  # makes its scale, at the first step
        theirs.step(sgd)
        theirs.update()
        assert ours.scale == theirs.get_scale(), f"step {step}: {ours.scale}"
    assert ours.scale == 64.0  # down three times, and up three times
    ours = LossScaler(scale=1.0)
    ours.update(False)
    assert ours.scale == 0.5, f"{ours.scale} after an overflow at 1.0"


def check_sgd() -> None:
    """SGD takes lr x (gradient + weight decay x weight), where the weight decays."""
    pair = [nn.Parameter(torch.full((1,), 2.0)) for _ in range(2)]
    config = TrainingConfig(optimizer="sgd", lr=0.5, weight_decay=0.25)
    optimizer = training.make_optimizer(config, zip(pair, (True, False)))
    for weight in pair:
        weight.grad = torch.ones(1)
    optimizer.step()
    assert [weight.item() for weight in pair] == [1.25, 1.5], [weight.item() for weight in pair]
