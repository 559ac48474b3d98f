"""The check of "data-parallelism/2": ranks with different numbers of batches stay in step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from course_lib.collectives import all_reduce, check_agreement
from course_lib.data import Batch
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig
from course_lib.oracle import random_batch
from course_lib.training import IGNORE

from ..launch import RankError
from .collectives_ranks import run_together
from .exercise import WrongAnswer

SHAPE = ModelConfig(layers=1, width=8, heads=2, vocab=17, context=6)
MASKED = (1, 1)  # rank and step of a batch without any target
COUNTS = ((2, 4, 1), (0, 2))  # steps that each rank has, in two runs
BLANK = 9  # a step that no rank has


def grade_keep_in_step(answer: Callable) -> None:
    """Loop over the answer on ranks with different numbers of steps; one batch has no target."""
    for counts in COUNTS:
        steps = [[_micro_batches(r, s) for s in range(n)] for r, n in enumerate(counts)]
        try:
            found = run_together(
                answer, _looped, len(counts), steps, hang=_SOME_LEFT, disagree=_NOT_ALIKE
            )
        except RankError as error:
            if error.type_name != "NotStepsError":
                raise
            raise WrongAnswer(error.message) from error
        if not all(kept for _, kept in found):
            raise WrongAnswer(
                "your function changes `blank`, which is the caller's: a batch that is trained on "
                "would lose its targets. Make a new one: `without_targets(blank)`."
            )
        found = [log for log, _ in found]
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


def _looped(answer: Callable, steps: list) -> tuple[list[tuple[list[int], int, int]], bool]:
    """One rank's training loop: of each step its samples, its tokens and those of all ranks.

    And whether `blank` is what it was.
    """
    mesh = make_mesh({"dp": len(steps)})
    blank, log = _micro_batches(mesh.rank("dp"), BLANK)[0], []
    labels = blank.labels.clone()
    with check_agreement():
        for own in _lists(answer(iter(steps[mesh.rank("dp")]), mesh, blank)):
            counts = [int((b.labels != IGNORE).sum()) for b in own]
            if counts != [b.valid for b in own] and torch.equal(blank.labels, labels):
                raise NotStepsError(
                    f"you yield {sum(counts)} targets, but `valid` says "
                    f"{sum(b.valid for b in own)}. "
                    "Use `without_targets(blank)`, which sets both."
                )
            tokens = all_reduce(torch.tensor(sum(counts)), mesh.group("dp"), "token count").wait()
            log.append(([int(b.samples[0]) for b in own], sum(counts), int(tokens)))
            if len(log) > 2 * max(map(len, steps)):
                break
    return log, torch.equal(blank.labels, labels)


def _lists(made) -> Iterator[list[Batch]]:
    """What the answer yields, as long as it has the right form."""
    if not hasattr(made, "__iter__"):
        raise NotStepsError(f"your function returned {type(made).__name__}{_FORM}")
    for own in made:
        if not isinstance(own, (list, tuple)) or not all(isinstance(b, Batch) for b in own):
            raise NotStepsError(f"you yield {type(own).__name__}{_FORM}")
        yield own


_FORM = ": yield lists of micro-batches."


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
            if not samples:
                raise WrongAnswer(
                    f"at step {step}, rank {rank} yields an empty list. It would run no forward "
                    "and no backward, and so miss the collectives in them. Yield a list with "
                    "`without_targets(blank)`."
                )
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


_SOME_LEFT = (
    "it hangs: a rank without batches leaves the loop, and the others wait for it. What a rank "
    "finds alone, the others do not know: before each step, ask `agree(I still have one, mesh)`."
)
_NOT_ALIKE = (
    "the ranks are not at the same place of the loop: some take a step while others ask whether to "
    "go on, or leave. Every rank must ask equally often, once before each step, also a rank whose "
    "batch has no targets."
)
