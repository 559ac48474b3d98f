"""One device's part of a training step: precision, accumulation, learning rate, optimizer.

The loss is a SUM of token losses. The one divisor is the number of valid tokens in the whole
global batch, over all micro-batches and all ranks, known before the first backward pass; so
neither accumulation nor more ranks change the gradient, and fp16 never sees raw sums.

bf16 and fp16 mean: weights, gradients and optimizer state in fp32, matrix products in 16 bits
under autocast. fp64 is for proofs.

Papers: Loshchilov & Hutter 2019 (AdamW, arXiv 1711.05101; cosine, 1608.03983); Hu et al. 2024
(warm-up, stable, decay; 2404.06395); Micikevicius et al. 2018 (mixed precision and loss scaling,
1710.03740).
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib.config import type_faults

IGNORE = -100  # label of a position that has no target


@dataclass(frozen=True)
class TrainingConfig:
    """How a model is trained."""

    steps: Annotated[int, "optimizer steps"] = 100
    global_batch_tokens: Annotated[int, "tokens of one step, over all micro-batches and ranks"] = (
        4096
    )
    micro_batch: Annotated[int, "sequences of one forward pass on one rank"] = 8
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"],
        "of the matrix products; weights are fp32 (fp64 for proofs)",
    ] = "fp32"
    optimizer: Annotated[Literal["adamw", "sgd"], "sgd has no momentum: it is for proofs"] = "adamw"
    lr: Annotated[float, "highest learning rate"] = 3e-3
    min_lr: Annotated[float, "what the schedule reaches at `steps`, as a fraction of lr"] = 0.1
    warmup: Annotated[int, "steps until the highest learning rate is used"] = 10
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        "decay after warm-up; wsd: constant, then a linear decay at the end",
    ] = "cosine"
    decay: Annotated[float, "share of the steps in which wsd decays, the last ones"] = 0.2
    weight_decay: Annotated[float, "decoupled, for matrices and embeddings only"] = 0.1
    beta1: Annotated[float, "AdamW's decay of the mean of gradients"] = 0.9
    beta2: Annotated[float, "AdamW's decay of the mean of squares"] = 0.95
    eps: Annotated[float, "AdamW's addend to the root of the mean of squares"] = 1e-8
    clip_norm: Annotated[float, "largest gradient norm applied; 0: no clipping"] = 1.0
    max_skipped: Annotated[int, "stop after this many non-finite steps in a row"] = 10
    seed: Annotated[int, "of initial weights and dropout"] = 0

    def faults(self) -> list[str]:
        """Everything that is wrong with these values, each with what is allowed."""
        if wrong_types := type_faults(self):
            return wrong_types
        found = [
            f"{name} {getattr(self, name)} must be at least {least}"
            for name, least in (
                ("steps", 1), ("global_batch_tokens", 1), ("micro_batch", 1), ("warmup", 0),
                ("max_skipped", 1), ("seed", 0),
            )
            if not getattr(self, name) >= least
        ]  # fmt: skip
        if self.seed >= 2**63:
            found.append(f"seed {self.seed} must be below 2**63")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                found.append(f"{name} {getattr(self, name)} must be positive and finite")
        for name in ("weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                found.append(f"{name} {getattr(self, name)} must be at least 0 and finite")
        if not 0 <= self.min_lr <= 1:
            found.append(f"min_lr {self.min_lr} is a fraction of lr: from 0 to 1")
        if not 0 < self.decay <= 1:
            found.append(f"decay {self.decay} is a share of the steps: above 0, at most 1")
        if self.warmup > self.steps:
            found.append(f"warmup {self.warmup} exceeds the {self.steps} steps of the run")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} {getattr(self, name)} must be at least 0 and below 1")
        return found


def loss_sum(logits: Tensor, labels: Tensor, in_place: bool = False) -> Tensor:
    """Sum of the token losses in nats, in fp32 or wider; 0 where every label is ignored.

    logits: (batch, sequence, vocab); labels: (batch, sequence) int64, already shifted, IGNORE
    where there is no target.
    in_place: the logits' memory may be used for their gradient; their values are lost. It saves
    two tensors of their size, and allows one backward pass only. 16-bit logits always are
    converted first, and the copy is used so.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    ours = in_place or wide is not logits  # a converted copy is nobody else's
    rows = wide.flatten(0, 1).contiguous()
    return _CrossEntropySum.apply(rows, labels.flatten(), ours)


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy whose backward makes the logits' gradient at once: softmax - target.

    PyTorch's makes log-probabilities, their gradient, and the logits' gradient. Tensors of the
    vocabulary's width are the largest of a step: here all of it can happen in the logits' memory.
    """

    @staticmethod
    def forward(ctx, logits, labels, in_place):  # (tokens, vocab), (tokens,), bool
        valid = labels != IGNORE
        targets = labels * valid  # an index that exists, also where it will not count
        chosen = logits.gather(1, targets[:, None]).squeeze(1)  # (tokens,)
        peak = logits.amax(-1, keepdim=True)
        # detach() shares the version counter: autograd notices if anyone needed the old values.
        exponentials = (logits.detach().sub_(peak) if in_place else logits - peak).exp_()
        total = exponentials.sum(-1)  # (tokens,)
        ctx.save_for_backward(exponentials, total, targets, valid)
        ctx.in_place = in_place
        losses = total.log() + peak.squeeze(1) - chosen
        return torch.where(valid, losses, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # ()
        gradient, total, targets, valid = ctx.saved_tensors
        scale = torch.where(valid, upstream, 0).to(gradient.dtype)  # (tokens,)
        share = (scale / total)[:, None]
        gradient = gradient.mul_(share) if ctx.in_place else gradient * share
        rows = torch.arange(len(targets), device=targets.device)
        gradient[rows, targets] -= scale
        return gradient, None, None


def accumulate(
    model: nn.Module,
    micro_batches: Iterable,
    divisor: int,
    precision: str = "fp32",
    loss_scale: float = 1.0,
) -> Tensor:
    """Forward and backward over this rank's micro-batches; gradients add up in `.grad`.

    micro_batches: data.Batch, already on the model's device.
    divisor: valid tokens of the whole global batch, all ranks; 0 counts as 1.
    loss_scale: factor on the loss before backward (fp16), removed by `finish_gradients`.
    Returns this rank's part of the mean loss in nats a token, () fp64, without a graph: the sum
    over ranks is the global batch's loss.
    Raises: ValueError for a negative divisor.
    """
    if divisor < 0:
        raise ValueError(f"divisor {divisor} is a number of tokens: at least 0")
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    divisor = max(divisor, 1)
    for batch in micro_batches:
        nats = _micro_batch_loss(model, batch, device, precision)
        (nats * (loss_scale / divisor)).backward()
        total += nats.detach()
    return total / divisor


def _micro_batch_loss(model: nn.Module, batch, device, precision: str) -> Tensor:
    """The loss sum of one micro-batch, its logits already overwritten."""
    with autocast(device, precision):
        logits = model(**batch.inputs())
    return loss_sum(logits, batch.labels, in_place=True)


def autocast(device: torch.device, precision: str) -> AbstractContextManager:
    """The context in which a forward pass runs at this precision."""
    _, dtype = _dtypes(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def weight_dtype(precision: str) -> torch.dtype:
    """The dtype in which weights, gradients and optimizer state are kept."""
    return _dtypes(precision)[0]


_DTYPES = {  # of the weights, and of matrix products where it is another
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


def _dtypes(precision: str) -> tuple[torch.dtype, torch.dtype | None]:
    if precision not in _DTYPES:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[precision]


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of the update number `step`, counted from 0; a pure function.

    Warm-up rises linearly and reaches `lr` at its last step, so the first update is never 0.
    From there, or from where wsd begins to decay, it falls to min_lr x lr at `steps`, and stays.
    Raises: ValueError for a step below 0 and for an unknown schedule.
    """
    if step < 0:
        raise ValueError(f"step {step}: steps are counted from 0")
    if config.schedule not in _FALLS:
        raise ValueError(f"schedule {config.schedule!r} is not one of {', '.join(_FALLS)}")
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    start = max(config.warmup - 1, 0)
    if config.schedule == "wsd":
        start = max(start, config.steps - max(round(config.decay * config.steps), 1))
    progress = min(max(step - start, 0) / max(config.steps - start, 1), 1.0)
    return config.lr * (1 - (1 - config.min_lr) * _FALLS[config.schedule](progress))


_FALLS = {  # how far the rate has fallen, from 0 to 1, where this much of the decay is done
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: progress,
    "constant": lambda progress: 0.0,
    "wsd": lambda progress: progress,
}


@torch.no_grad()
def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    config: TrainingConfig,
    step: int,
    lr: float,
    decays: bool = True,
) -> None:
    """AdamW's update number `step`, counted from 0, in its plainest form; changes all in place.

    mean, square: the moments, shaped as the parameter; zeros before the first update. They start
    too small, and dividing by 1 - beta ** updates corrects that.
    The trainer's fused optimizer does the same (Loshchilov & Hutter, algorithm 2).
    """
    if decays:
        parameter *= 1 - lr * config.weight_decay  # decoupled: not part of the gradient
    mean += (1 - config.beta1) * (gradient - mean)
    square += (1 - config.beta2) * (gradient**2 - square)
    updates = step + 1
    size = (square / (1 - config.beta2**updates)).sqrt() + config.eps
    parameter -= lr * mean / (1 - config.beta1**updates) / size


def make_optimizer(
    config: TrainingConfig, parameters: Iterable[tuple[nn.Parameter, bool]]
) -> torch.optim.Optimizer:
    """AdamW (fused) or SGD over (parameter, whether it decays) pairs, in two groups.

    The learning rate is set by the trainer before each update.
    """
    pairs = [pair for pair in parameters if pair[0].requires_grad]
    groups = [
        {"params": [p for p, decays in pairs if decays], "weight_decay": config.weight_decay},
        {"params": [p for p, decays in pairs if not decays], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


@dataclass
class LossScaler:
    """The factor that keeps fp16 gradients above the smallest fp16 number.

    Halved when a step overflows, doubled after `growth_interval` steps without an overflow.
    Whether a step overflowed is decided from the global gradient norm, so all ranks agree.
    """

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def __post_init__(self):
        if not (0 < self.scale < math.inf and self.growth_interval >= 1):
            raise ValueError(f"{self}: the scale is positive and finite, the interval at least 1")

    @classmethod
    def for_precision(cls, precision: str) -> "LossScaler | None":
        """A scaler for fp16; None for every other precision."""
        return cls() if precision == "fp16" else None

    def update(self, finite: bool) -> None:
        """Learn from one step: whether its gradient norm was finite."""
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
