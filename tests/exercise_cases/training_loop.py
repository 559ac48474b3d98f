"""Answers to the exercises of "The training loop"."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from . import Cases, Wrong

# training-loop/1: the learner's answer is written out; a mistake changes one line of it.


def gradient_stub(model, micro_batches, clip_norm):
    raise NotImplementedError


def gradient(model, micro_batches, clip_norm, mistake: str = ""):
    counted = {"counts all positions": [b.labels.numel() for b in micro_batches]}
    tokens = sum(counted.get(mistake, [b.valid for b in micro_batches]))
    total = losses = 0.0
    if mistake != "forgets to zero":
        model.zero_grad()
    for batch in micro_batches:
        if mistake == "only the last":
            model.zero_grad()
        logits = model(**batch.inputs()).flatten(0, 1)
        nats = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        share = {
            "mean of means": nats / max(batch.valid, 1) / len(micro_batches),
            "sum of means": nats / max(batch.valid, 1),
            "no division": nats,
            "clips the sum": nats,
            "divided twice": nats / tokens / len(micro_batches),
            "divided by micro-batches": nats / len(micro_batches),
            "half": nats / tokens / 2,
        }.get(mistake, nats / tokens)
        if mistake == "loss is a mean of nothing":
            nats = F.cross_entropy(logits, batch.labels.flatten()) * batch.valid
            share = nats / tokens
        if mistake == "gradient is a mean of nothing":
            share = masked_mean(logits, batch.labels.flatten()) * (batch.valid / tokens)
        share.backward()
        if mistake == "clips every micro-batch":
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        total = total + (nats if mistake == "keeps the graph" else nats.item())
        losses = losses + nats.item() / max(batch.valid, 1)
        last = nats.item()
    norm = clip(model, clip_norm, tokens, mistake)
    loss = {
        "loss is a sum": total,
        "loss is a mean of means": losses / len(micro_batches),
        "loss of the last": last / tokens,
        "loss is one": 1.0,
    }.get(mistake, total / tokens)
    if mistake == "steps":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    if mistake == "half a norm":
        return loss, norm / 2
    if mistake == "norm first":
        return norm, loss
    return loss if mistake == "returns the loss only" else (loss, norm)


def masked_mean(logits, labels):
    valid = labels != -100
    of_token = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return -(of_token * valid).sum() / valid.sum()


def clip(model, clip_norm, tokens, mistake):
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters]).item()
    if mistake == "clips each tensor":
        for parameter in parameters:
            nn.utils.clip_grad_norm_(parameter, clip_norm)
    elif mistake == "clips elements":
        nn.utils.clip_grad_value_(parameters, clip_norm)
    elif mistake == "always scales":
        for parameter in parameters:
            parameter.grad *= clip_norm / norm
    elif mistake != "does not clip":
        nn.utils.clip_grad_norm_(parameters, clip_norm)
    if mistake == "clips the sum":
        for parameter in parameters:
            parameter.grad /= tokens
    if mistake == "norm after clipping":
        return nn.utils.get_total_norm([p.grad for p in parameters]).item()
    return norm


def making_gradient(mistake: str):
    return lambda model, parts, clip_norm: gradient(model, parts, clip_norm, mistake)


def in_one_pass(model, micro_batches, clip_norm):
    tokens, labels = (
        torch.cat([getattr(b, n) for b in micro_batches]) for n in ("tokens", "labels")
    )
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()


def no_numbers(model, micro_batches, clip_norm):
    gradient(model, micro_batches, clip_norm)
    return None, None


def no_backward(model, micro_batches, clip_norm):
    return 1.0, 1.0


def other_direction(model, micro_batches, clip_norm):
    gradient(model, micro_batches, clip_norm)
    model.head.weight.grad.zero_()
    return 1.0, 1.0


# training-loop/2


def rate_stub(config, step):
    raise NotImplementedError


def rate(config, step, mistake: str = ""):
    peak = max(config.warmup - 1, 0)
    late = mistake in ("zero at step 0", "off by one at the joint", "rises again, off by one")
    start = config.warmup if late else 0 if mistake == "progress from step 0" else peak
    if step < config.warmup:
        first = 0 if mistake.startswith("zero at step 0") else 1
        ramp = (step + first) / (config.warmup + (mistake == "slow warm-up"))
        return ramp if mistake == "no lr anywhere" else ramp * config.lr
    progress = (step - start) / (config.steps - start - (mistake == "one step early"))
    if not mistake.startswith("rises again"):
        progress = min(progress, 1)
    left = {
        "linear": 1 - progress,
        "quarter wave": math.cos(math.pi / 2 * progress),
        "squared": (1 - progress) ** 2,
        "no pi": (1 + math.cos(progress)) / 2,
        "degrees": (1 + math.cos(180 * progress)) / 2,
        "not halved": 1 + math.cos(math.pi * progress),
        "cos alone": math.cos(math.pi * progress),
        "ends above": (2 + math.cos(math.pi * progress)) / 3,
        "no pi, falls to 0": (1 + math.cos(progress)) / 2,
    }.get(mistake, (1 + math.cos(math.pi * progress)) / 2)
    if mistake == "0 after the end" and step > config.steps:
        return 0.0
    if mistake in ("no lr", "no lr anywhere"):
        return config.min_lr + (1 - config.min_lr) * left
    if mistake == "lowest rate added":
        return config.lr * (config.min_lr + left)
    lowest = {"falls to 0": 0.0, "no pi, falls to 0": 0.0, "min_lr as a rate": config.min_lr}.get(
        mistake, config.lr * config.min_lr
    )
    if mistake == "max()":
        return max(config.lr * left, lowest)
    return lowest + (config.lr - lowest) * left


def rating(mistake: str):
    return lambda config, step: rate(config, step, mistake)


def divides_by_warmup(config, step):
    ramp = (step + 1) / config.warmup
    return config.lr * ramp if ramp < 1 else rate(config, step)


def rounded_to_a_text(config, step):
    return f"{rate(config, step):.3f}"


# training-loop/3


class ScalerStub:
    def __init__(self, scale, growth_interval):
        raise NotImplementedError


class Scaler:
    """Right; a subclass changes one line."""

    grow_at, shrink, overflow_restarts, growth_restarts = 0, 0.5, True, True

    def __init__(self, scale, growth_interval):
        self.scale, self.interval, self.good = scale, growth_interval, 0

    def update(self, finite):
        if not self.good_step(finite):
            self.scale *= self.shrink
            self.good = 0 if self.overflow_restarts else self.good
            return
        self.good += 1
        if self.good >= self.interval + self.grow_at:
            self.scale *= 2
            self.good = 0 if self.growth_restarts else self.good

    def good_step(self, finite):
        return finite


class CountsAll(Scaler):
    overflow_restarts = False


class GrowsOn(Scaler):
    growth_restarts = False


class Late(Scaler):
    grow_at = 1


class NeverGrows(Scaler):
    grow_at = 10**9


class NeverShrinks(Scaler):
    shrink = 1


class DoublesAtOverflow(Scaler):
    shrink = 2


class DoublesAlways(Scaler):
    grow_at = -(10**9)


class Quarters(Scaler):
    shrink = 0.25


class WrongWayRound(Scaler):
    def good_step(self, finite):
        return not finite


class StartsElsewhere(Scaler):
    def __init__(self, scale, growth_interval):
        super().__init__(65536.0, growth_interval)


class InPlace(Scaler):
    """Right: a tensor that is changed in place."""

    def __init__(self, scale, growth_interval):
        super().__init__(torch.tensor(scale), growth_interval)


class Word(Scaler):
    def __init__(self, scale, growth_interval):
        super().__init__("high", growth_interval)


class Nameless:
    def __init__(self, scale, growth_interval):
        self.factor = scale


CASES = {
    "training-loop/1": Cases(
        gradient_stub,
        (
            Wrong("mean of means", making_gradient("mean of means"), "a mean of means: each"),
            Wrong("sum of means", making_gradient("sum of means"), "the sum of their means"),
            Wrong("no division", making_gradient("no division"), "division is missing"),
            Wrong("divided twice", making_gradient("divided twice"), "divided twice"),
            Wrong("by micro-batches", making_gradient("divided by micro-batches"), "of tokens."),
            Wrong("counts all positions", making_gradient("counts all positions"), "batch.valid"),
            Wrong("only the last", making_gradient("only the last"), "inside the loop"),
            Wrong("clips every micro-batch", making_gradient("clips every micro-batch"),
                  "you clip after every micro-batch"),
            Wrong("clips the sum", making_gradient("clips the sum"), "you clip the undivided sum"),
            Wrong("clips each tensor", making_gradient("clips each tensor"), "each tensor by its"),
            Wrong("clips elements", making_gradient("clips elements"), "cut each element"),
            Wrong("does not clip", making_gradient("does not clip"), "is not clipped"),
            Wrong("always scales", making_gradient("always scales"), "at most 1"),
            Wrong("all in one pass", in_one_pass, "8 sequences at once"),
            Wrong("no numbers", no_numbers, "must be two numbers"),
            Wrong("0 / 0 tokens", making_gradient("gradient is a mean of nothing"), "not finite"),
            Wrong("loss of 0 tokens", making_gradient("loss is a mean of nothing"), "loss is nan"),
            Wrong("half", making_gradient("half"), "0.5 × the right one"),
            Wrong("another direction", other_direction, "another direction"),
            Wrong("no backward", no_backward, "no gradient is in"),
            Wrong("keeps the graph", making_gradient("keeps the graph"), "holds the graph"),
            Wrong("loss is a sum", making_gradient("loss is a sum"), "Your loss is the sum"),
            Wrong("loss: mean of means", making_gradient("loss is a mean of means"), "weigh each"),
            Wrong("loss of the last", making_gradient("loss of the last"), "add up all of them"),
            Wrong("loss is one", making_gradient("loss is one"), "Your loss is 1; expected"),
            Wrong("norm after clipping", making_gradient("norm after clipping"), "the one before"),
            Wrong("norm first", making_gradient("norm first"), "you return (norm, loss)"),
            Wrong("forgets to zero", making_gradient("forgets to zero"), "called a second time"),
            Wrong("half a norm", making_gradient("half a norm"), "Your norm is"),
            Wrong("steps", making_gradient("steps"), "you changed the weights"),
            Wrong("returns the loss only", making_gradient("returns the loss only"), "the pair"),
            Wrong("gives a value, not a function", 1.8, "without calling it"),
        ),
    ),
    "training-loop/2": Cases(
        rate_stub,
        (
            Wrong("zero at step 0", rating("zero at step 0"), "The first update does nothing"),
            Wrong("zero at step 0, joined", rating("zero at step 0, right joint"), "rate is 0"),
            Wrong("rises again", rating("rises again"), "After the end it rises again"),
            Wrong("rises again, off by one", rating("rises again, off by one"), "decay. After the"),
            Wrong("off by one at the joint", rating("off by one at the joint"), "Off by one where"),
            Wrong("progress from step 0", rating("progress from step 0"), "jumps where"),
            Wrong("falls to 0", rating("falls to 0"), "The rate goes to 0"),
            Wrong("min_lr as a rate", rating("min_lr as a rate"), "not a rate"),
            Wrong("max()", rating("max()"), "with max()"),
            Wrong("one step early", rating("one step early"), "one step early"),
            Wrong("linear", rating("linear"), "straight line"),
            Wrong("quarter wave", rating("quarter wave"), "quarter of a cosine"),
            Wrong("another curve", rating("squared"), "Look at the curve between"),
            Wrong("no pi", rating("no pi"), "The factor π is missing"),
            Wrong("degrees", rating("degrees"), "You give degrees"),
            Wrong("not halved", rating("not halved"), "divide it by 2"),
            Wrong("cos alone", rating("cos alone"), "from 1 to -1"),
            Wrong("ends above", rating("ends above"), "Look at the end of the decay"),
            Wrong("no lr in the decay", rating("no lr"), "In the decay the factor lr"),
            Wrong("no lr", rating("no lr anywhere"), "a fraction of lr."),
            Wrong("lowest rate added", rating("lowest rate added"), "is added to a curve"),
            Wrong("two mistakes", rating("no pi, falls to 0"), "is π. The rate goes to 0"),
            Wrong("slow warm-up", rating("slow warm-up"), "Look at the warm-up"),
            Wrong("0 after the end", rating("0 after the end"), "Look at what happens after"),
            Wrong("divides by warmup", divides_by_warmup, "you divide by zero"),
            Wrong("returns a text", rounded_to_a_text, "return a number"),
            Wrong("gives a value, not a function", 0.3, "write its name without"),
        ),
    ),
    "training-loop/3": Cases(
        ScalerStub,
        (
            Wrong("counts all good steps", CountsAll, "must be in a row"),
            Wrong("goes on growing", GrowsOn, "After the first growth"),
            Wrong("grows one step late", Late, "one step late"),
            Wrong("never grows", NeverGrows, "never grows"),
            Wrong("never shrinks", NeverShrinks, "never shrinks"),
            Wrong("doubles at an overflow", DoublesAtOverflow, "It doubles at an overflow"),
            Wrong("doubles always", DoublesAlways, "after every good step"),
            Wrong("quarters", Quarters, "Halve at an overflow; double after"),
            Wrong("the wrong way round", WrongWayRound, "wrong way round"),
            Wrong("starts elsewhere", StartsElsewhere, "your scaler starts at scale"),
            Wrong("a word as scale", Word, "must be a number"),
            Wrong("other names", Nameless, "attribute `scale`"),
            Wrong("gives an object, not the class", Scaler(8.0, 3), "give the class itself"),
        ),
    ),
}  # fmt: skip
