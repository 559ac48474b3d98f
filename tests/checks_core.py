"""Checks of the core, shared by its tests and by its mutants (faults that are put back).

Each check takes the mesh of the ranks that it runs on, first; `on_ranks` starts them. A check fails
with AssertionError, at least on one rank.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.classroom.launch import run_ranks
from course_lib.collectives import count_traffic
from course_lib.data import Batch
from course_lib.gradients import finish_gradients
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, ParameterSpec, Transformer, declare
from course_lib.oracle import assert_same_training, random_batch, split
from course_lib.parameters import assert_replicas_agree, build_records
from course_lib.trainer.settings import ParallelConfig
from course_lib.trainer.step import TrainingState, parallelize, training_step
from course_lib.training import (
    IGNORE,
    TrainingConfig,
    accumulate,
    learning_rate,
    loss_sum,
    make_optimizer,
    weight_dtype,
)

TINY = ModelConfig(layers=1, width=8, heads=2, vocab=11, context=6)
TINY_LLAMA = ModelConfig(
    layers=2, width=12, heads=6, kv_heads=2, vocab=13, context=7, mlp_width=20,
    norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tie_embeddings=False,
)  # fmt: skip
ALONE = {"dp": 1}
TWO = {"dp": 2}

Put = Callable[[Any, str, Any], None]  # setattr, or pytest's, which undoes it


def on_ranks(
    check: Callable, sizes: Mapping[str, int], *args, fault: Callable[[Put], None] | None = None,
    timeout_s: float = 60.0,
) -> list:  # fmt: skip
    """Run check(mesh, *args) on as many real ranks as the mesh has; their return values.

    fault: puts a fault back into the library, in the ranks only.
    """
    return run_ranks(
        _on_rank, math.prod(sizes.values()), check, dict(sizes), args, fault, timeout_s=timeout_s
    )


def _on_rank(check, sizes, args, fault):
    if fault is not None:
        fault(setattr)
    return check(make_mesh(sizes), *args)


# ------------------------------------------------------------------------------ small materials


class Line(nn.Module):
    """Two scores, 0 and w * x, for a token x: at w = 0 the gradient of w is -x/2 for label 1."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, dtype=dtype))

    def forward(self, tokens, **_):
        score = F.linear(tokens[..., None].to(self.weight.dtype), self.weight)
        return torch.cat((torch.zeros_like(score), score), dim=-1)


class Table(nn.Module):
    """Scores of the next token looked up for the present one: weight[token]."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.weight = nn.Parameter(rows.clone())

    def forward(self, tokens, **_):
        return self.weight[tokens]


def batch_of(tokens, labels, step: int = 0) -> Batch:
    """A micro-batch of these rows, shorter rows of labels filled with IGNORE."""
    tokens = torch.tensor(tokens)
    filled = torch.full_like(tokens, IGNORE)
    for row, values in enumerate(labels):
        filled[row, : len(values)] = torch.tensor(values, dtype=torch.int64)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return Batch(tokens, filled, positions, torch.arange(len(tokens)), step)


def own_batches(
    mesh: Mesh, step: int, samples: int = 8, accumulation: int = 2, config: ModelConfig = TINY
) -> list[Batch]:
    """This rank's micro-batches of a random global batch."""
    batch = random_batch(config, samples, step)
    return split(batch, mesh.size("dp"), accumulation)[mesh.rank("dp")]


def bits(state: TrainingState) -> dict[str, Tensor]:
    """Copies of all parameters."""
    return {r.name: r.parameter.detach().clone() for r in state.records}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(got: float, want: float, tolerance: float = 1e-5) -> bool:
    return math.isclose(got, want, rel_tol=tolerance)


# ----------------------------------------------------------------------------------- the oracle


def check_training(mesh: Mesh, *cases: tuple[str, dict]) -> None:
    """Each case (a name, arguments of the oracle) trains as the plain model does."""
    for name, arguments in cases or (("default", {}),):
        try:
            assert_same_training(mesh, **arguments)
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from None


def check_one_step(mesh: Mesh, clip_norm: float = 0.0, config: ModelConfig = TINY) -> None:
    """One step, three micro-batches a rank, agrees with the plain model."""
    assert_same_training(mesh, config=config, steps=1, accumulation=3, clip_norm=clip_norm)


def check_clipped_step(mesh: Mesh) -> None:
    check_one_step(mesh, clip_norm=0.05)


def check_dropout(mesh: Mesh) -> None:
    check_one_step(mesh, config=replace(TINY, dropout=0.2))


# ------------------------------------------------------------------- loss and accumulation (ACC)


def check_uneven_micro_batches(mesh: Mesh) -> None:
    """ACC-01: one token of loss 9 and nine of loss 1 are 1.8 nats a token, not 5.0."""
    scores = [[0.0, math.log(math.expm1(9))], [0.0, math.log(math.expm1(1))]]
    rows = torch.tensor(scores, dtype=torch.float64)
    long, short = [1] * 9, [0] * 9
    whole = Table(rows)
    F.cross_entropy(whole.weight[[0] + [1] * 9], torch.zeros(10, dtype=torch.int64)).backward()
    model = Table(rows)
    parts = [batch_of([short], [[0]]), batch_of([long], [[0] * 9])]
    loss = accumulate(model, parts, sum(part.valid for part in parts), "fp64")
    assert close(float(loss), 1.8, 1e-12), f"loss {float(loss)}"
    assert torch.allclose(model.weight.grad, whole.weight.grad, rtol=1e-10, atol=0)


def check_accumulation_counts(mesh: Mesh) -> None:
    """ACC-03: twelve samples as 1 x 12, 2 x 6, 3 x 4, 12 x 1 give one loss and one norm."""
    seen = []
    for accumulation in (1, 2, 3, 12):
        state = parallelize(TINY, TrainingConfig(optimizer="sgd", lr=1.0), mesh)
        own = own_batches(mesh, 0, samples=12, accumulation=accumulation)
        result = training_step(state, own, 1.0, 0.0, "fp32")
        seen.append((result.loss, result.grad_norm))
    for loss, norm in seen:
        assert close(loss, seen[0][0]), seen
        assert close(norm, seen[0][1]), seen


def parameter_changes(mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
    """ACC-04: loss, and what one step of SGD at rate 1 without clipping adds to the weights."""
    sgd = TrainingConfig(optimizer="sgd", weight_decay=0.0, precision="fp64")
    state = parallelize(TINY, sgd, mesh)
    before = bits(state)
    result = training_step(state, own_batches(mesh, 0, accumulation=1), 1.0, 0.0, "fp64")
    return result.loss, {name: after - before[name] for name, after in bits(state).items()}


def check_masked_rank(mesh: Mesh) -> None:
    """ACC-09: a rank without one target changes nothing, and no collective is left out."""
    state = parallelize(TINY, TrainingConfig(optimizer="sgd", precision="fp64"), mesh)
    batch = random_batch(TINY, 4, 0)
    masked = replace(batch, labels=torch.full_like(batch.labels, IGNORE), valid=0)
    own = [batch, masked] if mesh.rank("dp") == 0 else [masked, masked]
    with count_traffic() as traffic:
        result = training_step(state, own, 0.1, 0.0, "fp64")
    alone = parallelize(TINY, TrainingConfig(optimizer="sgd", precision="fp64"), Mesh.single())
    expected = training_step(alone, [batch], 0.1, 0.0, "fp64")
    assert math.isfinite(result.loss), f"loss {result.loss}"
    assert close(result.loss, expected.loss, 1e-12)
    assert result.applied
    for record, reference in zip(state.records, alone.records):
        assert torch.allclose(record.parameter, reference.parameter, rtol=1e-12, atol=1e-15)
    if mesh.world_size > 1:
        purposes = [call.purpose for call in traffic.calls]
        assert purposes == ["token count", "gradients", "gradient norm", "loss"], purposes


def check_masked_batch_keeps_ranks_together(mesh: Mesh) -> None:
    """DP-06: rank 0's third batch is masked; all ranks take the same five steps."""
    state = parallelize(TINY, TrainingConfig(), mesh)
    for step in range(5):
        own = own_batches(mesh, step)
        if step == 2 and mesh.rank("dp") == 0:
            own = [replace(b, labels=torch.full_like(b.labels, IGNORE), valid=0) for b in own]
        training_step(state, own, 1e-2, 1.0, "fp32")
    assert state.optimizer_step == state.data_step == 5
    require_replicas(state, mesh)


def require_replicas(state: TrainingState, mesh: Mesh) -> None:
    try:
        assert_replicas_agree(state.records, mesh)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None


def check_labels_shifted_once(mesh: Mesh) -> None:
    """ACC-10: scores that are sure of the true next token have no loss."""
    tokens = torch.arange(9).remainder(5)[None]  # 0 1 2 3 4 0 1 2 3
    logits = 30.0 * F.one_hot((tokens[:, :-1] + 1) % 5, 5).float()
    assert float(loss_sum(logits, tokens[:, 1:])) < 1e-4


def check_nothing_kept(mesh: Mesh) -> None:
    """ACC-12: no figure holds a graph, and the number of live tensors does not grow."""
    state = parallelize(TINY, TrainingConfig(), mesh)
    figures, live = [], {}
    gc.collect()
    gc.freeze()  # what is there now is not looked at again
    for step in range(100):
        own = own_batches(mesh, step, samples=2)
        if step % 30 == 0:
            figures.append(accumulate(state.model, own, 1))
        figures.extend(vars(training_step(state, own, 1e-3, 1.0, "fp32")).values())
        if step % 30 == 9:
            del own
            gc.collect()
            found = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
            live[step] = sum(1 for _ in found) - sum(isinstance(f, Tensor) for f in figures)
    gc.unfreeze()
    for figure in figures:
        assert not isinstance(figure, Tensor) or figure.grad_fn is None, figure
    assert len(set(live.values())) == 1, f"live tensors by step: {live}"


# ------------------------------------------------------------------- norm, clip, skip (CLIP, MP)


def finish(mesh: Mesh, gradients: Sequence[float], scale: float = 1.0, clip_norm=None):
    """Finish one parameter's gradient; returns what was found, and the gradient left."""
    model = declared(nn.ParameterDict({"weight": torch.zeros(len(gradients))}))
    model["weight"].grad = torch.tensor(gradients) * scale
    done = finish_gradients(build_records(model, mesh), mesh, clip_norm, loss_scale=scale)
    return done, model["weight"].grad


def declared(module: nn.Module, decay: bool = False) -> nn.Module:
    """A module all of whose parameters are declared."""
    names = dict(module.named_parameters(recurse=False))
    return declare(module, **{name: ParameterSpec(std=0.02, decay=decay) for name in names})


def check_unscaled_before_clipping(mesh: Mesh) -> None:
    """CLIP-06: gradient (3, 4), scaled by 1024, clipped to 1: norm 5 reported, 1 left."""
    done, left = finish(mesh, [3.0, 4.0], scale=1024.0, clip_norm=1.0)
    assert close(done.norm, 5.0), f"reported norm {done.norm}"
    assert close(float(left.norm()), 1.0), f"norm left {float(left.norm())}"


def check_clipped_once(mesh: Mesh) -> None:
    """CLIP-09: micro-gradients (10, 0) and (0, 10), halved and summed, clipped to 1: (.7, .7).

    With a Line a token x gives x/2, so the tokens are 20; the first weight sees the first one.
    """
    model = Pair()
    record = build_records(model, mesh)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState(model, record, mesh, optimizer, scaler=None)
    own = [batch_of([[20, 0]], [[1]]), batch_of([[0, 20]], [[1]])]
    result = training_step(state, own, 1.0, 1.0, "fp32")
    left = model.weight.detach().flatten()
    assert close(result.grad_norm, math.hypot(5, 5)), result
    assert torch.allclose(left, torch.full((2,), 0.5**0.5), rtol=1e-5), left


class Pair(nn.Module):
    """Two scores, 0 and w . (both tokens of the row), at the first position only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2))
        declared(self)

    def forward(self, tokens, **_):
        score = F.linear(tokens.float(), self.weight)[:, None]  # (batch, 1, 1)
        score = torch.cat((torch.zeros_like(score), score), dim=-1)
        return score.expand(-1, tokens.shape[1], -1)


def check_overflow_skipped_together(mesh: Mesh) -> None:
    """CLIP-08, MP-04: inf in one gradient of the last rank at the second of three steps."""
    config = TrainingConfig(precision="fp16", warmup=4, steps=10)
    state = parallelize(TINY, config, mesh)
    applied, rates = [], []
    for step in range(3):
        before, moments = bits(state), repr(state.optimizer.state_dict())
        scale = state.scaler.scale
        rates.append(learning_rate(config, state.optimizer_step))
        with overflow(state, active=step == 1 and mesh.rank("dp") == mesh.size("dp") - 1):
            result = training_step(state, own_batches(mesh, step), rates[-1], 1.0, "fp16")
        applied.append(result.applied)
        assert result.applied != (step == 1), f"step {step}: applied {result.applied}"
        assert same(bits(state), before) != result.applied
        if step == 1:
            assert repr(state.optimizer.state_dict()) == moments
            assert state.scaler.scale == scale / 2
            assert not math.isfinite(result.grad_norm)
            assert state.skipped_in_a_row == 1
        require_replicas(state, mesh)
    assert rates[1] == rates[2], f"the skipped step moved the learning rate: {rates}"
    assert (state.data_step, state.optimizer_step) == (3, 2)
    assert (state.skipped, state.skipped_in_a_row) == (1, 0)


class overflow:
    """While inside, one gradient of the model is infinite."""

    def __init__(self, state: TrainingState, active: bool):
        self.parameter, self.active = state.records[-1].parameter, active

    def __enter__(self):
        if self.active:
            self.hook = self.parameter.register_hook(lambda g: torch.full_like(g, math.inf))

    def __exit__(self, *_):
        if self.active:
            self.hook.remove()


# ------------------------------------------------------------------------- mixed precision (MP)


def check_small_updates_arrive(mesh: Mesh) -> None:
    """MP-01: under bf16, 100 AdamW updates of 1e-3 move a weight from 1 to 0.9."""
    weight = nn.Parameter(torch.ones(1, dtype=weight_dtype("bf16")))
    config = TrainingConfig(lr=1e-3, weight_decay=0.0, precision="bf16")
    optimizer = make_optimizer(config, [(weight, True)])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert close(weight.item(), 0.9, 1e-4), f"weight {weight.item()}"


def check_small_gradients_add_up(mesh: Mesh) -> None:
    """MP-02: under bf16, micro-gradients 256 and 1 make 257, and 1000 of 1 make 1000."""
    for gradients in ((256, 1), (1,) * 1000):
        model = Line(weight_dtype("bf16"))
        parts = [batch_of([[2 * g]], [[1]]) for g in gradients]
        accumulate(model, parts, 1, "bf16")
        assert -float(model.weight.grad) == sum(gradients), float(model.weight.grad)


def check_state_is_fp32(mesh: Mesh) -> None:
    """Weights, gradients and AdamW's moments are fp32 under 16-bit precision; outputs are not."""
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        state = parallelize(TINY, TrainingConfig(precision=precision), mesh)
        seen = []
        hook = state.model.head.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
        training_step(state, own_batches(mesh, 0), 1e-3, 1.0, precision)
        hook.remove()
        assert set(seen) == {dtype}, seen
        for record in state.records:
            moments = state.optimizer.state[record.parameter]
            kept = [record.parameter, record.parameter.grad]
            kept += [moments["exp_avg"], moments["exp_avg_sq"]]
            assert {tensor.dtype for tensor in kept} == {torch.float32}, record.name


# --------------------------------------------------------------------- learning rate, decay (LR)


def check_first_update_moves(mesh: Mesh) -> None:
    """LR-01: the first update has a quarter of the rate after a warm-up of four, and moves."""
    config = TrainingConfig(lr=1.0, warmup=4, steps=100)
    rates = [learning_rate(config, step) for step in range(4)]
    assert rates == [0.25, 0.5, 0.75, 1.0], rates


def check_decay_ends(mesh: Mesh) -> None:
    """LR-03: cosine over 10 steps from 1 to 0.1, and 0.1 for ever after."""
    config = TrainingConfig(lr=1.0, min_lr=0.1, warmup=0, steps=10)
    rates = [learning_rate(config, step) for step in (0, 5, 10, 15, 20)]
    assert all(map(close, rates, [1, 0.55, 0.1, 0.1, 0.1])), rates


def check_decay_groups(mesh: Mesh) -> None:
    """LR-07: no gradient, lr 0.1, decay 0.1: matrices x 0.99, norms and biases unchanged."""
    for config in (TINY, TINY_LLAMA):
        state = parallelize(config, TrainingConfig(weight_decay=0.1, precision="fp64"), mesh)
        in_groups = [p for group in state.optimizer.param_groups for p in group["params"]]
        assert len({id(p) for p in in_groups}) == len(in_groups) == len(state.records)
        with torch.no_grad():
            for record in state.records:  # zeros and ones would hide a decay
                record.parameter.add_(0.5)
        before = bits(state)
        for group in state.optimizer.param_groups:
            group["lr"] = 0.1
        for record in state.records:
            record.parameter.grad = torch.zeros_like(record.parameter)
        state.optimizer.step()
        for name, after in bits(state).items():
            factor = 0.99 if before[name].dim() == 2 else 1.0
            assert torch.allclose(after, before[name] * factor, rtol=1e-12), name


# ------------------------------------------------------------------------------- materialising


def check_materialised(mesh: Mesh, compiled: bool = False) -> None:
    """DP-13: nothing holds old parameters, ties are made again, all buffers are as built."""
    for config in (TINY, TINY_LLAMA):
        state = parallelize(config, TrainingConfig(), mesh, ParallelConfig(compile=compiled))
        parameters = dict(state.model.named_parameters())
        assert not any(p.is_meta for p in parameters.values())
        head, embedding = state.model.head.weight, state.model.embedding.weight
        assert (head is embedding) == config.tie_embeddings
        by_record = {r.name: r.parameter for r in state.records}
        assert by_record.keys() == parameters.keys()
        assert all(by_record[name] is parameters[name] for name in parameters)
        updated = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
        assert updated == {id(p) for p in parameters.values()}
        eager = Transformer(config)
        buffers = dict(state.model.named_buffers())
        assert same(buffers, dict(eager.named_buffers()))
