"""The exercises of "Data parallelism": gradients summed in buckets; ranks that stay in step.

Both run the learner's code on real ranks, inside `check_agreement`, so that ranks that call
different collectives are named at once. A rank that never comes is named after HANG_S seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from course_lib.collectives import all_reduce, check_agreement, count_traffic
from course_lib.data import Batch
from course_lib.data_parallel import Buckets, plan_buckets
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, ParameterSpec, build, declare
from course_lib.oracle import random_batch, split
from course_lib.parameters import build_records
from course_lib.training import IGNORE, accumulate

from ..launch import RankError, RankTimeout
from ..teaching import tidy
from .exercise import Exercise, WrongAnswer, on_ranks

HANG_S = 7.0
SHAPE = ModelConfig(layers=2, width=12, heads=2, vocab=17, context=6)


def _run(answer: Callable, ranks: int, one_rank: Callable, *arguments, disagree: str, hang: str):
    """Run on ranks; turn a disagreement or a hang into words, with what the ranks did."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    try:
        return on_ranks(one_rank, ranks, answer, *arguments, timeout_s=HANG_S).values
    except RankTimeout as error:
        raise WrongAnswer(f"{hang}\n{tidy(str(error))}") from error
    except RankError as error:
        # gloo ends a process that gets another size than it expects: then there is no type.
        if error.type_name in ("DisagreementError", "CollectiveError", None):
            raise WrongAnswer(f"{disagree}\n{tidy(str(error))}") from error
        if error.type_name == "NotStepsError":
            raise WrongAnswer(f"{error.message}: yield lists of micro-batches.") from error
        raise


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


def grade_backward_in_buckets(answer: Callable) -> None:
    """Two ranks with uneven masks; one parameter is frozen, one is used by rank 0 only."""
    found = _run(
        answer, RANKS, _summed, hang=_WAITS_FOR_FEWER, disagree=_LEFT_OUT
    )  # fmt: skip
    local = [_local_gradients(rank) for rank in range(RANKS)]  # [rank][micro-batch][name]
    for rank, got in enumerate(found):
        _require_sums(got.gradients, local, rank)
    _require_few_messages(found[0].sent, local)


def _summed(answer: Callable) -> Summed:
    """One rank's part."""
    mesh = make_mesh({"dp": RANKS})
    batch, model = _batch(), _model(mesh.rank("dp"))
    own = split(batch, RANKS, MICRO_BATCHES)[mesh.rank("dp")]
    with check_agreement(), count_traffic() as traffic:
        answer(model, own, batch.valid, BUCKET_BYTES, mesh)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Summed(gradients, [call.payload_bytes for call in traffic.calls])


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
    if missing:
        raise WrongAnswer(f"on rank {rank}, {', '.join(missing)} has no gradient (None). {_ZEROS}")
    want = {name: sum(part[name] for parts in local for part in parts) for name in names}
    wrong = [name for name in names if not _close(got[name], want[name])]
    if not wrong:
        return
    for words, candidate in _sum_mistakes(local, rank):
        if all(_close(got[name], candidate[name]) for name in names):
            raise WrongAnswer(words)
    ratio = (got[wrong[0]] * want[wrong[0]]).sum() / want[wrong[0]].square().sum()
    raise WrongAnswer(
        f"on rank {rank}, {len(wrong)} of {len(names)} gradients are wrong; the first is "
        f"{wrong[0]}, {ratio:.3f} x the right one. Do the pieces of a bucket go back to the "
        "gradients that they came from, in the same order?"
    )


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
    valid = [sum(b.valid for b in own) for own in split(batch, RANKS, MICRO_BATCHES)]
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
        f"every gradient is {RANKS} times too large in its first micro-batches: you sum over "
        "ranks after each micro-batch, and `.grad` still holds what was summed before.",
        total(lambda r, m: float(RANKS ** (last - m))),
    )
    yield (
        f"only the last of the {MICRO_BATCHES} micro-batches is in the gradients: set them to None "
        "before the first one only. `backward` adds.",
        total(lambda r, m: float(m == last)),
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
            f"{counted}That is one message a parameter; each costs a latency. Fill buckets of up "
            f"to {BUCKET_BYTES:,} bytes."
        )
    too_large = [size for size in sent if size > max(BUCKET_BYTES, *gradients.values())]
    if too_large:
        raise WrongAnswer(
            f"{counted}One message has {max(too_large):,} bytes, more than bucket_bytes = "
            f"{BUCKET_BYTES:,}. Close a bucket before a gradient that would make it larger."
        )


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

# -------------------------------------------------------------------------- uneven batches

MASKED = (1, 1)  # rank and step of a batch without any target
COUNTS = ((2, 4, 1), (0, 2))  # steps that each rank has, in two runs
BLANK = 9  # a step that no rank has


def grade_keep_in_step(answer: Callable) -> None:
    """Loop over the answer on ranks with different numbers of steps; one batch has no target."""
    for counts in COUNTS:
        steps = [[_micro_batches(r, s) for s in range(n)] for r, n in enumerate(counts)]
        found = _run(
            answer, len(counts), _looped, steps, hang=_some_left, disagree=_NOT_ALIKE
        )  # fmt: skip
        _require_all_used(found, steps)
        _require_blanks(found, steps)


def _micro_batches(rank: int, step: int) -> list[Batch]:
    """One micro-batch that can be told from all others by its sample number."""
    batch = replace(
        random_batch(SHAPE, 1, step, seed=rank), samples=torch.tensor([10 * rank + step])
    )
    if (rank, step) == MASKED:
        batch = replace(batch, labels=torch.full_like(batch.labels, IGNORE), valid=0)
    return [batch]


def _looped(answer: Callable, steps: list) -> list[tuple[list[int], int, int]]:
    """One rank's training loop: of each step its samples, its tokens and those of all ranks."""
    mesh = make_mesh({"dp": len(steps)})
    blank, log = _micro_batches(mesh.rank("dp"), BLANK)[0], []
    with check_agreement():
        for own in _lists(answer(iter(steps[mesh.rank("dp")]), mesh, blank)):
            counts = [int((b.labels != IGNORE).sum()) for b in own]
            tokens = all_reduce(torch.tensor(sum(counts)), mesh.group("dp"), "token count").wait()
            log.append(([int(b.samples[0]) for b in own], sum(counts), int(tokens)))
            if len(log) > 2 * max(map(len, steps)):
                break
    return log


def _lists(made) -> Iterator[list[Batch]]:
    """What the answer yields, as long as it has the right form."""
    if not hasattr(made, "__iter__"):
        raise NotStepsError(f"your function returned {type(made).__name__}")
    for own in made:
        if not isinstance(own, (list, tuple)) or not all(isinstance(b, Batch) for b in own):
            raise NotStepsError(f"you yield {type(own).__name__}")
        yield own


class NotStepsError(TypeError):
    """The answer is no generator of lists of micro-batches."""


def _require_all_used(found: list, steps: list) -> None:
    longest = max(map(len, steps))
    told = f"with {_listed([len(own) for own in steps])} batches on the ranks, "
    for rank, (log, own) in enumerate(zip(found, steps)):
        used = [sample for samples, _, _ in log for sample in samples]
        lost = [step for step in range(len(own)) if 10 * rank + step not in used]
        if lost == [MASKED[1]] and rank == MASKED[0]:
            raise WrongAnswer(
                f"{told}rank {rank} skips its batch {lost[0]}, which has no targets. No other rank "
                "knows: from there on, rank batches are combined that do not belong together, or "
                "ranks wait for each other. Train on it: it adds zero."
            )
        if lost:
            raise WrongAnswer(
                f"{told}the loop ends after {len(log)} steps; batch {lost[0]} of rank {rank} is "
                "never used. Go on while ANY rank has a batch."
            )
        if len(log) > longest:
            raise WrongAnswer(
                f"{told}the loop takes more than {longest} steps: at last no rank has a batch. "
                "Stop when none has one."
            )


def _require_blanks(found: list, steps: list) -> None:
    for rank, (log, own) in enumerate(zip(found, steps)):
        for step, (samples, valid, tokens) in enumerate(log):
            right = sum(b.valid for others in steps for b in (others[step:] or [[]])[0])
            if step >= len(own) and valid:
                again = "uses `blank` with its targets" if samples[0] % 10 == BLANK else (
                    "repeats a batch"
                )  # fmt: skip
                raise WrongAnswer(
                    f"rank {rank} has no batch left at step {step} and {again}: the step has "
                    f"{tokens} targets, not {right}, so the tail gets a wrong weight. Take the "
                    "targets out: `without_targets(blank)`."
                )
            if step < len(own) and samples != [int(b.samples[0]) for b in own[step]]:
                raise WrongAnswer(f"at step {step}, rank {rank} does not use its own next batch.")


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:-1])) + f" and {counts[-1]}"


_some_left = (
    "it hangs: a rank without batches leaves the loop, and the others wait for it. What a rank "
    "finds alone, the others do not know: before each step, ask `agree(I still have one, mesh)`."
)
_NOT_ALIKE = (
    "the ranks are not at the same place of the loop: some take a step while others ask whether to "
    "go on, or leave. Every rank must ask equally often, once before each step, also a rank whose "
    "batch has no targets."
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
            "that is None becomes torch.zeros_like(parameter). Close a bucket before a gradient "
            "that would make it larger than bucket_bytes.",
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
