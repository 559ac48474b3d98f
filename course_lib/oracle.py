"""The single-device truth: every parallel method is proved against the plain model.

The reference trains the undivided model on the undivided global batch with nothing but PyTorch:
mean loss over valid tokens, backward, `clip_grad_norm_`, SGD. The candidate trains the same model
through the library's own path. Losses, gradient norms, every gradient and every weight must agree
at every step. SGD, because Adam hides constant factors; uneven masks, because equal counts hide
averages of averages; clipping off and on, because clipping hides factors too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.data import Batch
from course_lib.data_parallel import DataParallel
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig, ParameterSpec, Transformer, build, initial_rows
from course_lib.parameters import ParameterRecord, gather_full, materialise
from course_lib.trainer.step import TrainingState, training_step
from course_lib.training import IGNORE, TrainingConfig, make_optimizer

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# Some gradients, such as a key bias's, are zero in exact arithmetic: what is left is rounding, so
# it is measured against this share of the whole gradient. In fp32, 1e-5 x 1e-3 would be smaller
# than one rounding (6e-8).
FLOOR = {torch.float64: 1e-3, torch.float32: 1e-2}
LEARNING_RATE = 0.1
SMALL = ModelConfig(layers=2, width=24, heads=4, vocab=37, context=12)

Step = Callable[[TrainingState, Sequence[Batch], float], tuple[float, float]]
Replicate = Callable[[nn.Module, Sequence[ParameterRecord], Mesh], DataParallel]
Change = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Snapshot:
    """One step of a training run: what the oracle compares."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]  # whole, after clipping, by plain name
    weights: dict[str, Tensor]  # whole, after the update


def assert_same_training(
    mesh: Mesh,
    transform: Callable[[nn.Module, Mesh], nn.Module] | None = None,
    *,
    config: ModelConfig = SMALL,
    steps: int = 3,
    accumulation: int = 2,
    micro_batch: int = 2,
    clip_norm: float = 0.0,
    dtype: torch.dtype = torch.float64,
    step: Step | None = None,
    replicate: Replicate | None = None,
    change: Change | None = None,
    seed: int = 0,
) -> list[Snapshot]:
    """Train the plain model and the parallel one on the same global batches, and compare.

    Collective: every rank of the mesh calls it with the same arguments, and each trains the whole
    reference by itself.
    transform: what makes the plain (meta-device) model parallel; default nothing, which leaves
        plain data parallelism over "dp".
    clip_norm: 0 is off; something small makes clipping bind.
    step: replaces the library's `training_step` (to prove a learner's own one); takes the state,
        this rank's micro-batches and the learning rate; returns the loss and the gradient norm.
    replicate: makes the candidate data-parallel; default one message after backward.
    change: done to the plain model on both sides before it is used, such as freezing a part.
    In fp32 every step starts from the reference's weights; in fp64 the two runs are left alone.
    Returns the reference's snapshots. Raises AssertionError naming the first thing that differs,
    the ratio to the reference and what such a ratio usually means.
    """
    ranks = mesh.size("dp")
    batches = [
        random_batch(config, ranks * accumulation * micro_batch, index, seed)
        for index in range(steps)
    ]
    reference = train_plain(config, batches, clip_norm, dtype, seed, change)
    state = prepare(config, mesh, transform, dtype, seed, replicate, change)
    step = step or _library_step(clip_norm)
    for index, batch in enumerate(batches):
        own = split(batch, ranks, accumulation)[mesh.rank("dp")]
        loss, norm = step(state, own, LEARNING_RATE)
        snapshot = take_snapshot(state, loss, norm)
        hints = {"dp": ranks, "tp": mesh.size("tp"), "pp": mesh.size("pp"), "acc": accumulation}
        compare(snapshot, reference[index], dtype, f"step {index}", hints)
        if dtype == torch.float32:  # else the rounding of one step grows in the next
            _set_weights(state.records, reference[index].weights)
    return reference


def _library_step(clip_norm: float) -> Step:
    def step(state, micro_batches, lr):
        result = training_step(state, micro_batches, lr, clip_norm, precision="fp32")
        return result.loss, result.grad_norm

    return step


# ------------------------------------------------------------------------------- the two runs


def random_batch(config: ModelConfig, samples: int, step: int, seed: int = 0) -> Batch:
    """A global batch of random tokens with uneven masks: (samples, context).

    Sample i keeps about i/samples of its labels, so the first ones have none at all.
    """
    generator = torch.Generator().manual_seed(1_000 * seed + step)
    shape = (samples, config.context)
    tokens = torch.randint(config.vocab, (samples, config.context + 1), generator=generator)
    keep = torch.rand(shape, generator=generator) < torch.arange(samples)[:, None] / samples
    keep[-1, -1] = True  # a mean over no tokens at all would be NaN
    labels = tokens[:, 1:].masked_fill(~keep, IGNORE)
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=labels,
        positions=torch.arange(config.context).expand(shape).contiguous(),
        samples=torch.arange(samples),
        step=step,
        documents=None,
        valid=int(keep.sum()),
    )


def split(batch: Batch, ranks: int, accumulation: int) -> list[list[Batch]]:
    """A global batch as [rank][micro-batch], in contiguous pieces of its samples."""
    pieces = [
        replace(
            batch,
            tokens=batch.tokens[part],
            labels=batch.labels[part],
            positions=batch.positions[part],
            samples=batch.samples[part],
            valid=int((batch.labels[part] != IGNORE).sum()),
        )
        for part in torch.arange(len(batch.tokens)).chunk(ranks * accumulation)
    ]
    return [pieces[rank * accumulation : (rank + 1) * accumulation] for rank in range(ranks)]


def train_plain(
    config: ModelConfig,
    batches: Sequence[Batch],
    clip_norm: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    change: Change | None = None,
) -> list[Snapshot]:
    """The reference: undivided batches, one process, PyTorch's own functions only."""
    model = build(config, seed, dtype=dtype)
    if change is not None:
        change(model)
    for name, parameter in model.named_parameters():
        parameter.data.add_(_offset(name, parameter.shape, seed).to(dtype))
    snapshots = []
    for batch in batches:
        model.zero_grad()
        logits = model(**batch.inputs())
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="mean"
        )
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        with torch.no_grad():
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(LEARNING_RATE * gradient)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        snapshots.append(Snapshot(loss.item(), norm.item(), gradients, weights))
    return snapshots


def prepare(
    config, mesh: Mesh, transform=None, dtype=torch.float64, seed: int = 0, replicate=None,
    change=None,
) -> TrainingState:  # fmt: skip
    """The candidate: the model under test with the reference's weights, and SGD."""
    with torch.device("meta"):
        model = Transformer(config, seed)
        if change is not None:
            change(model)
    if transform is not None:
        model = transform(model, mesh)
    records = materialise(model, mesh, seed, dtype)
    _add_offsets(records, seed)
    sgd = TrainingConfig(optimizer="sgd", weight_decay=0.0)
    optimizer = make_optimizer(sgd, [(r.parameter, r.spec.decay) for r in records])
    replicas = replicate(model, records, mesh) if replicate is not None else None
    return TrainingState(model.train(), records, mesh, optimizer, scaler=None, replicas=replicas)


def _offset(name: str, shape, seed: int) -> Tensor:
    # Biases of 0 and norm weights of 1 would hide a bias added twice or a norm left out.
    return initial_rows(name, ParameterSpec(std=0.3), shape, 0, shape[0], seed + 1)


def _add_offsets(records: Sequence[ParameterRecord], seed: int) -> None:
    with torch.no_grad():
        for record in records:
            offset = _offset(record.name, record.shape, seed).to(record.parameter)
            for box in record.boxes:
                record.parameter[box.local] += offset[box.place]


def _set_weights(records: Sequence[ParameterRecord], weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for record in records:
            for box in record.boxes:
                record.parameter[box.local] = weights[record.name][box.place].to(record.parameter)


def take_snapshot(state: TrainingState, loss: float, grad_norm: float) -> Snapshot:
    """Whole gradients and weights of a state, on every rank. Collective."""
    trained = [r for r in state.records if r.parameter.requires_grad]
    gradients = {r.name: r.parameter.grad for r in trained}
    weights = {r.name: r.parameter.detach() for r in state.records}
    return Snapshot(
        loss,
        grad_norm,
        gather_full(trained, gradients, state.mesh),
        gather_full(state.records, weights, state.mesh),
    )


# ------------------------------------------------------------------------------ the comparison


def compare(
    got: Snapshot, want: Snapshot, dtype: torch.dtype, where: str = "", hints: dict | None = None
) -> None:
    """Raise AssertionError at the first difference: loss, gradients, their norm, weights.

    The message names the first parameter that differs, the ratio, and how many differ.
    A tensor passes if ||got - want|| <= tolerance x max(||want||, floor x the gradient's norm),
    with the tolerance and floor of the dtype that was trained in.
    hints: sizes of mesh axes and the accumulation count, to explain a ratio.
    """
    tolerance = TOLERANCE[dtype]
    floor = FLOOR[dtype] * math.sqrt(
        sum(float(g.double().norm()) ** 2 for g in want.gradients.values())
    )
    loss = _difference("loss", got.loss, want.loss, tolerance, 0.0, hints)
    if loss:
        raise AssertionError(f"{where}: {loss}")
    norm = _difference("gradient norm", got.grad_norm, want.grad_norm, tolerance, 0.0, hints)
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        if missing := theirs.keys() ^ ours.keys():
            raise AssertionError(f"{where}: {kind} of {sorted(missing)} are on one side only")
        found = [
            _difference(f"{kind[:-1]} of {name}", ours[name], theirs[name], tolerance, floor, hints)
            for name in theirs
        ]
        found = [text for text in found if text]
        if found:
            also = f"\n{norm}" if norm and kind == "gradients" else ""
            raise AssertionError(
                f"{where}: {found[0]}\n{len(found)} of {len(theirs)} {kind} differ{also}"
            )
        if norm:
            raise AssertionError(f"{where}: {norm}")


def _difference(label: str, got, want, tolerance: float, floor: float, hints) -> str | None:
    got, want = (torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (got, want))
    if got.shape != want.shape:
        return f"{label} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    difference = float((got - want).norm())
    if difference <= tolerance * max(float(want.norm()), floor):
        return None
    ratio = float((got * want).sum() / (want * want).sum().clamp_min(1e-300))
    return (
        f"{label} differs: {ratio:.4g} x the reference, relative difference "
        f"{difference / max(float(want.norm()), floor, 1e-300):.2e} (allowed {tolerance:.0e})"
        f"{explain_ratio(ratio, hints or {})}"
    )


def explain_ratio(ratio: float, sizes: dict[str, int]) -> str:
    """What a ratio to the reference usually means; an empty text where it is not a known one.

    sizes: of the mesh axes, and "acc" for the number of micro-batches.
    """
    words = {
        "dp": ("averaged over ranks and divided again", "summed without a common divisor"),
        "tp": ("divided by the tensor-parallel size", "counted on every tensor-parallel rank"),
        "pp": ("divided by the stages", "counted on every stage"),
        "acc": ("averaged over micro-batches and divided again", "not divided by the accumulation"),
    }
    found = []
    for axis, (small, large) in words.items():
        size = sizes.get(axis, 1)
        if size > 1 and math.isclose(ratio, 1 / size, rel_tol=1e-3):
            found.append(f"1/{size}: {small} ({axis} = {size})?")
        if size > 1 and math.isclose(ratio, size, rel_tol=1e-3):
            found.append(f"{size}: {large} ({axis} = {size})?")
    if math.isclose(ratio, 0, abs_tol=1e-9):
        found.append("0: no gradient arrives here?")
    return ". " + " Or ".join(found) if found else ""
