"""How the exercise "the clipped gradient of a global batch" is checked, and its model answer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.data import Batch
from course_lib.model import ModelConfig, build
from course_lib.oracle import random_batch, split
from course_lib.training import IGNORE, accumulate, loss_sum

from .exercise import WrongAnswer, require_function


def clipped_gradient(
    model: nn.Module, micro_batches: Sequence[Batch], clip_norm: float
) -> tuple[float, float]:
    """Leave the clipped gradient of the whole global batch in `.grad`.

    Returns its loss (nats a token) and its gradient norm before clipping. The trainer does the
    same in two places: `accumulate`, then `finish_gradients`, which also sums over ranks.
    """
    model.zero_grad()  # what an earlier step left
    tokens = sum(batch.valid for batch in micro_batches)  # known before the first backward pass
    loss = accumulate(model, micro_batches, tokens)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return loss.item(), norm.item()


_SHAPE = ModelConfig(layers=1, width=12, heads=2, vocab=17, context=7)
_SAMPLES, _PARTS = 10, 5  # the first samples have few labels: micro-batch 0 has the fewest


def grade_clipped_gradient(answer: Callable) -> None:
    """Compare with the undivided batch, in fp64: without clipping, clipped, one part masked."""
    require_function(answer)
    parts = split(random_batch(_SHAPE, _SAMPLES, 0), 1, _PARTS)[0]
    masked = replace(parts[1], labels=torch.full_like(parts[1].labels, IGNORE), valid=0)
    for where, given, clip_norm in (
        ("without clipping", parts[1:], 1e9),
        ("clipped to 0.05", parts[1:], 0.05),
        ("with one micro-batch that has no label", [masked, *parts[2:]], 1e9),
    ):
        _compare_gradient(answer, given, clip_norm, where)
    _call_again(answer, parts[1:])


def _compare_gradient(answer: Callable, parts: list[Batch], clip_norm: float, where: str) -> None:
    model, right = _model(), _model()
    loss, norm = _undivided(right, parts, clip_norm)
    passes = []
    model.register_forward_pre_hook(
        lambda module, given, named: passes.append(len((*given, *named.values())[0])),
        with_kwargs=True,
    )
    returned = answer(model, parts, clip_norm)
    _require_weights(model)
    if max(passes, default=0) > max(len(part.tokens) for part in parts):
        raise WrongAnswer(
            f"you pass {max(passes)} sequences at once: the memory holds one micro-batch of "
            f"{len(parts[0].tokens)}. Call the model once for each."
        )
    got, want = _flat(model), _flat(right)
    if got is None:
        raise WrongAnswer(f"{where}: no gradient is in `.grad`; call backward on each loss.")
    if not got.isfinite().all():
        raise WrongAnswer(
            f"{where}: the gradient is not finite. The mean over no tokens is 0 / 0: sum the token "
            "losses, and divide by the tokens of all micro-batches."
        )
    if not _same(got, want):
        raise WrongAnswer(f"{where}: {_gradient_mistake(got, want, parts, clip_norm)}")
    _require_figures(returned, loss, norm, clip_norm, parts, where)


def _call_again(answer: Callable, parts: list[Batch]) -> None:
    """The second step of a training: what the first one left must not count."""
    model, right = _model(), _model()
    _undivided(right, parts, 1e9)
    for _ in range(2):
        answer(model, parts, 1e9)
    if not _same(_flat(model), _flat(right)):
        raise WrongAnswer(
            "called a second time with the same model, you leave another gradient: `.grad` still "
            "holds that of the first call. Set the gradients to zero once, before the loop."
        )


def _model() -> nn.Module:
    return build(_SHAPE, dtype=torch.float64)


def _undivided(model: nn.Module, parts: list[Batch], clip_norm: float) -> tuple[float, float]:
    """Loss and norm of all samples in one pass, by PyTorch alone; leaves the clipped gradient."""
    logits = model(torch.cat([part.tokens for part in parts])).flatten(0, 1)
    labels = torch.cat([part.labels for part in parts]).flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)
    loss.backward()
    return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item()


def _require_weights(model: nn.Module) -> None:
    if any(not torch.equal(a, b) for a, b in zip(model.parameters(), _model().parameters())):
        raise WrongAnswer("you changed the weights; the gradient alone is asked for, no step.")


def _flat(model: nn.Module) -> Tensor | None:
    gradients = [p.grad for p in model.parameters()]
    return None if None in gradients else torch.cat([g.flatten() for g in gradients])


def _same(got: Tensor, want: Tensor) -> bool:
    # Clipping by hand may leave out the 1e-6 that PyTorch adds to the norm.
    return bool((got - want).norm() <= 1e-5 * want.norm())


def _gradient_mistake(got: Tensor, want: Tensor, parts: list[Batch], clip_norm: float) -> str:
    """Say what a wrong gradient comes from: make each mistake and compare."""
    for wrong, words in _GRADIENT_MISTAKES.items():
        model = _model()
        wrong(model, parts, clip_norm)
        if _same(got, _flat(model)):
            return words
    ratio = float(got @ want / (want @ want))
    if _same(got, ratio * want):
        return f"your gradient is {ratio:.4g} × the right one."
    return "your gradient has another direction than that of the undivided batch."


def _backward(model: nn.Module, parts: list[Batch], divide: Callable, after=None) -> None:
    """Accumulate with one mistake: how the sum of a part is divided, and what follows each part."""
    for part in parts:
        nats = loss_sum(model(part.tokens), part.labels)
        (nats / divide(part)).backward()
        if after is not None:
            after()


def _clip(model: nn.Module, clip_norm: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)


def _clipped_after(divide: Callable) -> Callable:
    """An accumulation that clips correctly, but divides as `divide(parts)(part)` says."""

    def wrong(model, parts, clip_norm):
        _backward(model, parts, divide(parts))
        _clip(model, clip_norm)

    return wrong


def _valid(parts: list[Batch]) -> int:
    return sum(part.valid for part in parts)


def _clips_each(model, parts, clip_norm):
    _backward(model, parts, lambda _: _valid(parts), lambda: _clip(model, clip_norm))


def _clips_the_sum(model, parts, clip_norm):
    _backward(model, parts, lambda _: 1)
    _clip(model, clip_norm)
    for parameter in model.parameters():
        parameter.grad /= _valid(parts)


def _clips_tensors(model, parts, clip_norm):
    _backward(model, parts, lambda _: _valid(parts))
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], clip_norm)


def _clips_elements(model, parts, clip_norm):
    _backward(model, parts, lambda _: _valid(parts))
    nn.utils.clip_grad_value_(model.parameters(), clip_norm)


def _does_not_clip(model, parts, clip_norm):
    _backward(model, parts, lambda _: _valid(parts))


def _always_scales(model, parts, clip_norm):
    _backward(model, parts, lambda _: _valid(parts))
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    for parameter in parameters:
        parameter.grad *= clip_norm / norm


def _keeps_the_last(model, parts, clip_norm):
    _backward(model, parts[-1:], lambda _: _valid(parts))
    _clip(model, clip_norm)


def _clips_each_and_all(model, parts, clip_norm):
    _clips_each(model, parts, clip_norm)
    _clip(model, clip_norm)


_CLIPS_EACH = (
    "you clip after every micro-batch. That changes the direction of the sum: clip once, when all "
    "gradients have been added."
)
_CLIPS_THE_SUM = (
    "you clip the undivided sum, and divide afterwards. Divide first: the limit is for the mean."
)
_GRADIENT_MISTAKES = {
    _clipped_after(lambda parts: lambda part: max(part.valid, 1) * len(parts)): (
        "a mean of means: each micro-batch is divided by its own tokens, then by the number of "
        "micro-batches. Short ones get too much weight."
    ),
    _clipped_after(lambda parts: lambda part: part.valid or 1): (
        "each micro-batch is divided by its own tokens, so the sum of their means is left. Divide "
        "by the tokens of all micro-batches."
    ),
    _clipped_after(lambda parts: lambda part: 1): (
        "the division is missing: your gradient is that of the summed loss. Divide each "
        "micro-batch's sum by the tokens of all."
    ),
    _clipped_after(lambda parts: lambda part: _valid(parts) * len(parts)): (
        "divided twice: by the tokens of all micro-batches, and by their number again."
    ),
    _clipped_after(lambda parts: lambda part: len(parts)): (
        "the sums are divided by the number of micro-batches. Divide by the number of tokens."
    ),
    _clipped_after(lambda parts: lambda part: sum(p.labels.numel() for p in parts)): (
        "positions without a label are counted too. Divide by the valid tokens: `batch.valid`."
    ),
    _keeps_the_last: (
        "only the last micro-batch is left. Do not set the gradients to zero inside the loop."
    ),
    _clips_each: _CLIPS_EACH,
    _clips_each_and_all: _CLIPS_EACH,
    _clips_the_sum: _CLIPS_THE_SUM,
    _clips_tensors: (
        "you clip each tensor by its own norm. There is one norm, of all gradients together."
    ),
    _clips_elements: (
        "you cut each element at the limit. Scale all gradients by one factor: `clip_grad_norm_`."
    ),
    _does_not_clip: "the gradient is not clipped.",
    _always_scales: (
        "you scale the gradient to the limit even where it is shorter. Clipping makes a gradient "
        "shorter, never longer: the factor is at most 1."
    ),
}


def _require_figures(returned, loss: float, norm: float, clip_norm: float, parts, where: str):
    """Check what the answer returned, once the gradient is right."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise WrongAnswer(f"{where}: the gradient is right; now return the pair (loss, norm).")
    if any(isinstance(value, Tensor) and value.requires_grad for value in returned):
        raise WrongAnswer(
            "the gradient is right, but what you return still holds the graph. Memory grows at "
            "each step: use `.item()` or `.detach()`."
        )
    try:
        got_loss, got_norm = map(float, returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongAnswer(
            f"{where}: the gradient is right. Loss and norm must be two numbers; you return "
            f"{returned!r}."
        ) from error
    if all(math.isclose(*pair, rel_tol=1e-6) for pair in ((got_loss, norm), (got_norm, loss))):
        raise WrongAnswer(
            f"{where}: the gradient is right, but you return (norm, loss). Return (loss, norm)."
        )
    if not math.isclose(got_loss, loss, rel_tol=1e-6):
        raise WrongAnswer(f"{where}: the gradient is right. {_loss_mistake(got_loss, loss, parts)}")
    if not math.isclose(got_norm, norm, rel_tol=1e-6):
        if math.isclose(got_norm, norm * _valid(parts), rel_tol=1e-6):
            raise WrongAnswer(f"{where}: {_CLIPS_THE_SUM}")
        clipped = math.isclose(got_norm, min(norm, clip_norm), rel_tol=1e-3)
        told = " It is the norm after clipping; return the one before." if clipped else ""
        raise WrongAnswer(
            f"{where}: the gradient is right. Your norm is {got_norm:.4g}; expected: {norm:.4g}."
            f"{told}"
        )


def _loss_mistake(got: float, want: float, parts: list[Batch]) -> str:
    if math.isclose(got, want * _valid(parts), rel_tol=1e-6):
        return "Your loss is the sum; divide it by the tokens of all micro-batches."
    if not math.isfinite(got):
        return f"Your loss is {got}: one micro-batch has no tokens to average over."
    model = _model()
    with torch.no_grad():
        sums = [float(loss_sum(model(part.tokens), part.labels)) for part in parts]
    means = [nats / max(part.valid, 1) for nats, part in zip(sums, parts)]
    if math.isclose(got, sum(means) / len(means), rel_tol=1e-6):
        return "Your loss is a mean of means; weigh each token alike."
    if any(math.isclose(got, last, rel_tol=1e-6) for last in (means[-1], sums[-1] / _valid(parts))):
        return "Your loss is that of the last micro-batch; add up all of them."
    return f"Your loss is {got:.4g}; expected: {want:.4g}."
