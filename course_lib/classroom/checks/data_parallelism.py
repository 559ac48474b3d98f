"""The exercises of "Data parallelism": gradients summed in buckets; ranks that stay in step.

Both run the learner's code on real ranks, inside `check_agreement`, so that ranks that call
different collectives are named at once. A rank that never comes is named after HANG_S seconds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as accumulate_sums

import torch
from torch import Tensor

from course_lib.collectives import check_agreement, count_traffic
from course_lib.data import Batch
from course_lib.data_parallel import Buckets, plan_buckets
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, ParameterSpec, build, declare
from course_lib.oracle import random_batch, split
from course_lib.parameters import build_records
from course_lib.training import accumulate

from .collectives_ranks import run_together
from .data_parallelism_steps import grade_keep_in_step
from .exercise import Exercise, WrongAnswer

SHAPE = ModelConfig(layers=2, width=12, heads=2, vocab=17, context=6)

# ---------------------------------------------------------------------------- sums in buckets

RANKS, MICRO_BATCHES, BUCKET_BYTES = 2, 3, 5000
FROZEN = "position_embedding.weight"


def backward_in_buckets(
    model: torch.nn.Module, micro_batches: Sequence[Batch], tokens: int, bucket_bytes: int,
    mesh: Mesh,
) -> None:  # fmt: skip
    """Leave in `.grad` the global batch's gradient, communicating once, in buckets. Collective.

    tokens: valid tokens of the whole global batch. A trainable parameter that this rank did not
    use brings zeros; `plan_buckets` and `Buckets` are in course_lib.data_parallel.
    """
    accumulate(model, micro_batches, tokens, "fp64")
    records = [r for r in build_records(model, mesh) if r.parameter.requires_grad]
    Buckets(records, mesh, plan_buckets(records, mesh, bucket_bytes)).sum(records, mesh)


@dataclass(frozen=True)
class Summed:
    """What one rank had after the answer ran: gradients by name, and bytes of each message."""

    gradients: dict[str, Tensor | None]
    sent: list[int]
    changed: str  # what the answer should have left alone


def grade_backward_in_buckets(answer: Callable) -> None:
    """Two ranks with uneven masks; one parameter is frozen, one is used by rank 0 only."""
    found = run_together(answer, _summed, RANKS, hang=_WAITS_FOR_FEWER, disagree=_LEFT_OUT)
    local = [_local_gradients(rank) for rank in range(RANKS)]  # [rank][micro-batch][name]
    for rank, got in enumerate(found):
        if got.changed:
            raise WrongAnswer(f"your function changes {got.changed}. It only fills `.grad`.")
        _require_sums(got.gradients, local, rank)
    _require_few_messages(found[0].sent, local)


def _summed(answer: Callable) -> Summed:
    """One rank's part."""
    mesh = make_mesh({"dp": RANKS})
    batch, model = _batch(), _model(mesh.rank("dp"))
    own = split(batch, RANKS, MICRO_BATCHES)[mesh.rank("dp")]
    given, weights = list(own), [p.detach().clone() for p in model.parameters()]
    with check_agreement(), count_traffic() as traffic:
        answer(model, given, batch.valid, BUCKET_BYTES, mesh)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    changed = "" if [id(b) for b in given] == [id(b) for b in own] else "the list `micro_batches`"
    if not all(torch.equal(p, before) for p, before in zip(model.parameters(), weights)):
        changed = "the weights"
    return Summed(gradients, [call.payload_bytes for call in traffic.calls], changed)


def _batch() -> Batch:
    return random_batch(SHAPE, RANKS * MICRO_BATCHES * 2, step=0)


def _model(rank: int) -> torch.nn.Module:
    """A model with a frozen parameter, and one that only rank 0 uses (as experts may be)."""
    model = build(SHAPE, dtype=torch.float64)
    model.get_parameter(FROZEN).requires_grad_(False)
    model.extra = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
    declare(model.extra, weight=ParameterSpec(fill=0.5))
    torch.nn.init.constant_(model.extra.weight, 0.5)
    if rank == 0:
        model.register_forward_hook(lambda _, __, out: out + model.extra.weight.sum() * out.sin())
    return model


def _local_gradients(rank: int) -> list[dict[str, Tensor]]:
    """What each micro-batch adds on one rank, with the right divisor."""
    batch, parts = _batch(), []
    for own in split(batch, RANKS, MICRO_BATCHES)[rank]:
        model = _model(rank)
        accumulate(model, [own], batch.valid, "fp64")
        parts.append({
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
            if p.requires_grad
        })  # fmt: skip
    return parts


def _require_sums(got: dict, local: list, rank: int) -> None:
    names = list(local[0][0])
    missing = [name for name in names if got[name] is None]
    if missing == names:
        raise WrongAnswer(
            "no parameter has a gradient. Did you call `backward` for each micro-batch? Gradients "
            "belong into `.grad`."
        )
    if missing:
        raise WrongAnswer(f"on rank {rank}, {_few(missing)}: no gradient (None). {_ZEROS}")
    want = {name: sum(part[name] for parts in local for part in parts) for name in names}
    wrong = [name for name in names if not _close(got[name], want[name])]
    if not wrong:
        return
    for words, candidate in _sum_mistakes(local, rank):
        if all(_close(got[name], candidate[name]) for name in names):
            raise WrongAnswer(words)
    told = f"on rank {rank}, {len(wrong)} of {len(names)} gradients are wrong: {_few(wrong)}. "
    raise WrongAnswer(told + _why_wrong(got, want, wrong, local, rank))


def _why_wrong(got: dict, want: dict, wrong: list[str], local: list, rank: int) -> str:
    """Say what the wrong gradients hold."""
    if unlike := [name for name in wrong if got[name].shape != want[name].shape]:
        return f"{unlike[0]} has not the shape of its parameter: use `view_as`."
    if all(_close(got[name], sum(part[name] for part in local[rank])) for name in wrong):
        return (
            "They still hold this rank's own part. Was their bucket never sent, for example the "
            "last one, which is not full?"
        )
    if all(not got[name].any() for name in wrong):
        return "They are zero. Are the sums copied back into them?"
    if not all(got[name].isfinite().all() for name in wrong):
        return "They are not finite. Do you divide by a count of tokens that may be 0?"
    ratios = [float((got[n] * want[n]).sum() / want[n].square().sum()) for n in wrong]
    if all(_close(got[name], want[name] * ratios[0]) for name in wrong):
        return f"They are {ratios[0]:.3g} x the right ones. What treats these unlike the others?"
    if weights := _weights(got, local):
        return (
            "They hold the right parts with wrong weights. Each micro-batch should count 1.00; it "
            f"counts {weights}. By what is its loss divided, and how often is it added?"
        )
    return (
        f"{wrong[0]} is {ratios[0]:.3f} x the right one, the others differ too. Do the pieces of "
        "a bucket go back to the gradients that they came from, in the same order?"
    )


def _weights(got: dict, local: list) -> str:
    """How much each micro-batch counts in the gradients; "" if they are no sum of the parts."""

    def flat(gradients: dict) -> Tensor:
        return torch.cat([gradients[name].flatten() for name in local[0][0]])

    parts = torch.stack([flat(part) for own in local for part in own], dim=1)
    used = parts.any(dim=0)  # one without targets adds nothing, whatever its weight
    fit = torch.linalg.lstsq(parts[:, used], flat(got)[:, None]).solution
    if not _close(parts[:, used] @ fit, flat(got)[:, None]):
        return ""
    weights = torch.full((len(used),), math.nan, dtype=torch.float64)
    weights[used] = fit[:, 0]
    told = [
        ", ".join("any" if w.isnan() else f"{w:.2f}" for w in own)
        for own in weights.split(MICRO_BATCHES)
    ]
    return "; ".join(f"{own} on rank {rank}" for rank, own in enumerate(told))


def _few(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" … {names[-1]}" if len(names) > 2 else "")


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).norm() <= 1e-9 * want.norm() + 1e-12)


def _sum_mistakes(local: list, rank: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Wrong results that say which mistake was made: words, and gradients by name."""
    names = list(local[0][0])

    def total(weight: Callable[[int, int], float]) -> dict[str, Tensor]:
        return {
            name: sum(
                weight(r, m) * part[name]
                for r, parts in enumerate(local)
                for m, part in enumerate(parts)
            )
            for name in names
        }

    batch = _batch()
    counts = [[b.valid for b in own] for own in split(batch, RANKS, MICRO_BATCHES)]
    valid = [sum(own) for own in counts]
    last = MICRO_BATCHES - 1
    yield (
        f"every gradient is 1/{RANKS} of the right one: that is an average. Each loss was already "
        "divided by the tokens of all ranks, so the parts are summed and nothing is divided again.",
        total(lambda r, m: 1 / RANKS),
    )
    yield (
        "every rank divides by its own tokens and averages. A rank with few tokens then counts as "
        "much as one with many. Divide by `tokens`, that of the global batch, and sum.",
        total(lambda r, m: batch.valid / max(valid[r], 1) / RANKS),
    )
    yield (
        "every rank divides by its own tokens. A rank with few tokens then counts for too much. "
        "Divide by `tokens`, that of the global batch.",
        total(lambda r, m: batch.valid / max(valid[r], 1)),
    )
    for share in (1, 1 / RANKS, 1 / MICRO_BATCHES, 1 / RANKS / MICRO_BATCHES):
        averaged = "" if share == 1 else ", and these means are averaged"
        yield (
            f"every micro-batch is divided by its own tokens{averaged}. One with few tokens then "
            "counts for too much. Divide each by `tokens`, that of the global batch.",
            total(lambda r, m, share=share: share * batch.valid / max(counts[r][m], 1)),
        )
    yield (
        f"every gradient is {RANKS} times too large in its first micro-batches: you sum over "
        "ranks after each micro-batch, and `.grad` still holds what was summed before.",
        total(lambda r, m: float(RANKS ** (last - m))),
    )
    yield (
        f"only the last of the {MICRO_BATCHES} micro-batches is in the gradients: set them to None "
        "before the first one only. `backward` adds.",
        total(lambda r, m: float(m == last)),
    )
    for first in range(1, last):
        yield (
            f"micro-batches {first + 1} to {MICRO_BATCHES} are in the gradients, those before are "
            "lost. Is `.grad` emptied between micro-batches? `backward` adds: leave it.",
            total(lambda r, m, first=first: float(m >= first)),
        )
    yield (
        f"only the first of the {MICRO_BATCHES} micro-batches is in the gradients: you sum over "
        "ranks, or copy, before the others have run backward.",
        total(lambda r, m: float(m == 0)),
    )
    yield (
        f"rank {rank} still has its own gradients: nothing was summed, or the sums were not copied "
        "back from the buckets.",
        total(lambda r, m: float(r == rank)),
    )
    yield (
        "the losses were not divided at all: divide each micro-batch's loss sum by `tokens`.",
        total(lambda r, m: float(batch.valid)),
    )


def _require_few_messages(sent: list[int], local: list) -> None:
    """The gradients are right: look at what was sent for them."""
    gradients = {name: g.nbytes for name, g in local[0][0].items()}
    needed = sum(gradients.values())
    frozen = _model(0).get_parameter(FROZEN).nbytes
    if not sent:
        raise WrongAnswer(
            "the gradients are right, but no message was counted. Use `all_reduce` of "
            "course_lib.collectives, which counts."
        )
    counted = f"the gradients are right, but the counter shows {sum(sent):,} bytes in "
    counted += f"{len(sent)} messages. The model has {needed:,} bytes of gradients. "
    if sum(sent) == MICRO_BATCHES * needed:
        raise WrongAnswer(
            f"{counted}You communicate in each of the {MICRO_BATCHES} micro-batches. Add up "
            "gradients locally first; only the last one communicates."
        )
    if sum(sent) == needed + frozen:
        raise WrongAnswer(f"{counted}The frozen parameter ({FROZEN}) travels too: leave it out.")
    if sum(sent) != needed:
        raise WrongAnswer(f"{counted}Send each gradient once.")
    if len(sent) == len(gradients):
        raise WrongAnswer(
            f"{counted}That is one message a parameter; each costs a latency. Fill buckets of "
            f"{BUCKET_BYTES:,} bytes."
        )
    sizes = list(gradients.values())
    if _cut(sizes, sent) and not _cut(sizes[::-1], sent):
        raise WrongAnswer(
            f"{counted}The first parameters of the model travel first. Backward makes their "
            "gradients last: begin with the last parameters."
        )
    enough = _buckets_needed(sizes[::-1])
    if len(sent) > enough + 4:  # more where a bucket is closed before the gradient: as good
        raise WrongAnswer(
            f"{counted}Buckets of {BUCKET_BYTES:,} bytes need {enough}: close a bucket only with "
            "the gradient that fills it."
        )
    if max(sent) >= BUCKET_BYTES + max(gradients.values()):
        raise WrongAnswer(
            f"{counted}One message has {max(sent):,} bytes, far more than bucket_bytes = "
            f"{BUCKET_BYTES:,}. Close a bucket with the gradient that fills it."
        )


def _cut(sizes: list[int], sent: list[int]) -> bool:
    """Whether the messages hold gradients of these sizes, in this order."""
    ends = set(accumulate_sums(sizes))
    return set(accumulate_sums(sent)) <= ends


def _buckets_needed(sizes: list[int]) -> int:
    count, filled = 0, BUCKET_BYTES
    for size in sizes:
        if filled >= BUCKET_BYTES:
            count, filled = count + 1, 0
        filled += size
    return count


_ZEROS = "A trainable parameter that a rank did not use counts as zeros there."
_LEFT_OUT = (
    "the ranks call different collectives. One parameter is used by rank 0 only; on rank 1 its "
    f"gradient is None, and your code leaves it out there. {_ZEROS} So all ranks send the same "
    "buckets."
)
_WAITS_FOR_FEWER = (
    "it hangs: one rank waits for a message that another never sends. Do all ranks send equally "
    f"many buckets? One parameter is used by rank 0 only. {_ZEROS}"
)

EXERCISES = (
    Exercise(
        name="data-parallelism/1",
        title="sum gradients in buckets",
        difficulty=3,
        minutes=25,
        hints=(
            "First all micro-batches: (loss_sum(model(**batch.inputs()), batch.labels) / "
            "tokens).backward(). `.grad` adds up by itself, and nothing is sent yet.",
            "Go through reversed(list(model.parameters())), without the frozen ones. A gradient "
            "that is None becomes torch.zeros_like(parameter). Close a bucket with the gradient "
            "that fills it to bucket_bytes.",
            "For each bucket: flat = torch.cat([p.grad.flatten() for p in bucket]); "
            'all_reduce(flat, mesh.group("dp"), "gradients").wait(); then p.grad.copy_(piece.'
            "view_as(p)) for the pieces of flat.split([p.numel() for p in bucket]).",
        ),
        solution="course_lib.classroom.checks.data_parallelism:backward_in_buckets",
        grade=grade_backward_in_buckets,
    ),
    Exercise(
        name="data-parallelism/2",
        title="uneven numbers of batches",
        difficulty=2,
        minutes=15,
        hints=(
            "A rank must not decide alone when to stop. `agree(condition, mesh)` tells every rank "
            "whether the condition holds on any of them; it is collective.",
            "own = next(steps, None) gives None at the end. Ask before each step: does any rank "
            "have a batch? If none has one, return.",
            "A rank that has none, while another has one, yields [without_targets(blank)]. It adds "
            "zero to every sum and joins every collective.",
        ),
        solution="course_lib.data_parallel:keep_in_step",
        grade=grade_keep_in_step,
    ),
)
