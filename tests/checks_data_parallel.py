"""Checks of data parallelism and overlap, shared by their tests and by their mutants."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib import collectives, data_parallel, overlap
from course_lib.collectives import count_traffic
from course_lib.data_parallel import (
    Buckets,
    DataParallel,
    broadcast_weights,
    keep_in_step,
    plan_buckets,
    sum_each,
    sum_flattened,
    without_targets,
)
from course_lib.engines import pytorch
from course_lib.gradients import finish_gradients
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig, ParameterSpec, declare
from course_lib.oracle import assert_same_training, random_batch
from course_lib.overlap import Overlap
from course_lib.parameters import assert_replicas_agree, build_records
from course_lib.trainer.settings import ParallelConfig
from course_lib.trainer.step import TrainingState, parallelize, training_step
from course_lib.training import TrainingConfig, accumulate
from tests import checks_records as records
from tests.checks_core import TINY, bits, close, overflow, own_batches, require_replicas, same

SMALL_BUCKETS = 600  # bytes: TINY's 20 parameters fill several
SGD = TrainingConfig(optimizer="sgd", weight_decay=0.0, precision="fp64")
TIED = ModelConfig(layers=2, width=8, heads=2, vocab=11, context=6)


def with_reduction(reduce, model, records, mesh) -> DataParallel:
    return DataParallel(model, reduce)


METHODS = {
    "each": partial(with_reduction, sum_each),
    "flat": partial(with_reduction, sum_flattened),
    "buckets, one a parameter": partial(data_parallel.data_parallelize, bucket_bytes=1),
    "buckets, several": partial(data_parallel.data_parallelize, bucket_bytes=SMALL_BUCKETS),
    "buckets, one": data_parallel.data_parallelize,
    "overlap, one a parameter": partial(overlap.data_parallelize, bucket_bytes=1),
    "overlap, several": partial(overlap.data_parallelize, bucket_bytes=SMALL_BUCKETS),
    "overlap, one": overlap.data_parallelize,
    "pytorch": partial(pytorch.data_parallelize, bucket_bytes=SMALL_BUCKETS),
}
OURS = [name for name in METHODS if name != "pytorch"]


def freeze_some(model: nn.Module) -> None:
    """The embedding, which may be tied, and one matrix in the middle."""
    model.embedding.weight.requires_grad_(False)
    model.blocks[0].mlp.up.weight.requires_grad_(False)


def add_unused(model: nn.Module) -> None:
    """A parameter that the forward pass never sees, in the middle of the others."""
    model.blocks[0].attention.extra = nn.Module()
    weight = nn.Parameter(torch.ones(3, 2, dtype=model.embedding.weight.dtype))
    model.blocks[0].attention.extra.register_parameter("weight", weight)
    declare(model.blocks[0].attention.extra, weight=ParameterSpec(fill=1.0))


def check_method(mesh: Mesh, name: str, **arguments) -> None:
    """The oracle passes with one way of summing."""
    try:
        assert_same_training(mesh, replicate=METHODS[name], **arguments)
    except AssertionError as error:
        raise AssertionError(f"{name}, {arguments}: {error}") from None


def check_buckets_train(mesh: Mesh) -> None:
    """One step in buckets, three micro-batches a rank, tied weights."""
    check_method(mesh, "buckets, several", config=TIED, steps=2, accumulation=3)


def check_overlap_trains(mesh: Mesh) -> None:
    check_method(mesh, "overlap, several", config=TIED, steps=2, accumulation=3)


def check_unused_trains(mesh: Mesh) -> None:
    for name in ("buckets, several", "overlap, several"):
        check_method(mesh, name, config=TINY, steps=2, change=add_unused)


def check_pytorch_trains(mesh: Mesh) -> None:
    check_method(mesh, "pytorch", config=TIED, steps=2, accumulation=3)


# ---------------------------------------------------------------------------- what is sent, when


def made(mesh: Mesh, **parallel) -> TrainingState:
    """TINY, ready to train as the configuration says, with several buckets."""
    return parallelize(TINY, SGD, mesh, ParallelConfig(bucket_bytes=SMALL_BUCKETS, **parallel))


def check_one_message_a_bucket(mesh: Mesh) -> None:
    """DP-01: three micro-batches, yet each bucket is summed once a step, with every backend."""
    for parallel in ({"overlap": False}, {"overlap": True}, {"backend": "pytorch"}):
        state, sent = made(mesh, **parallel), []
        for step in range(3):  # DDP plans its buckets anew after the first
            with count_traffic() as traffic:
                training_step(state, own_batches(mesh, step, 6, 3), 0.1, 0.0, "fp64")
            calls = [call for call in traffic.calls if call.purpose == "gradients"]
            whole = sum(r.parameter.nbytes for r in state.records)
            got = sum(call.payload_bytes for call in calls)
            assert got == whole, f"{parallel}: {got} bytes of gradients were sent, not {whole}"
            sent.append(len(calls))
        assert min(sent[1:]) > 3, sent
        if "backend" not in parallel:
            plan = plan_buckets(state.records, mesh, SMALL_BUCKETS)
            assert set(sent) == {len(plan)}, f"{sent} messages for {len(plan)} buckets"


def overlapped(mesh: Mesh, change=None) -> tuple[TrainingState, Overlap]:
    """TINY with hooks, and the object behind them."""
    state = parallelize(TINY, SGD, mesh)
    for parameter in state.model.parameters():
        parameter._post_accumulate_grad_hooks = None  # only this function's hooks
    if change is not None:
        change(state.model)
        state.records = build_records(state.model, mesh)
    plan = plan_buckets(state.records, mesh, SMALL_BUCKETS)
    hooks = Overlap(Buckets(state.records, mesh, plan))
    state.replicas = DataParallel(state.model, hooks.reduce, hooks.watch)
    return state, hooks


@contextmanager
def watched(log: list) -> Iterator[None]:
    """Note the payload of each message of gradients, and each end of a backward pass."""
    reduce, backward = collectives.all_reduce, torch.Tensor.backward

    def all_reduce(tensor, group, purpose, *rest, **named):
        if purpose == "gradients":
            log.append(tensor)
        return reduce(tensor, group, purpose, *rest, **named)

    def noted(self, *arguments, **named):
        log.append("backward begins")
        backward(self, *arguments, **named)
        log.append("backward ends")

    collectives.all_reduce, torch.Tensor.backward = all_reduce, noted
    try:
        yield
    finally:
        collectives.all_reduce, torch.Tensor.backward = reduce, backward


def check_transfers_begin_in_backward(mesh: Mesh) -> None:
    """All buckets leave in the last backward pass, in the order of the plan, each complete."""
    state, hooks = overlapped(mesh)
    log: list = []
    with watched(log):
        training_step(state, own_batches(mesh, 0, 6, 3), 0.1, 0.0, "fp64")
    plain = ["backward begins", "backward ends"]
    assert log[:5] == [*plain, *plain, "backward begins"], f"sent too early: {log[:5]}"
    assert log[-1] == "backward ends", f"{len(log)} events; the last was not in backward"
    sent = log[5:-1]
    assert [id(t) for t in sent] == [id(flat) for flat in hooks.buckets.flats]
    times = hooks.times
    assert all(t.in_backward for t in times)
    assert all(t.ready_s <= t.launched_s <= t.started_s <= t.finished_s for t in times), times
    launched = [t.launched_s for t in times]
    assert launched == sorted(launched)


def check_leave_one_by_one(mesh: Mesh) -> None:
    """All but the last bucket leave before backward has made its last gradient."""
    state, hooks = overlapped(mesh)
    training_step(state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
    *launched, _ = [t.launched_s for t in hooks.times]
    assert len(launched) > 3
    early = sum(time_s < hooks.times[-1].ready_s for time_s in launched)
    assert early == len(launched), f"only {early} of {len(launched)} left inside backward"


def check_sent_when_complete(mesh: Mesh) -> None:
    """When a bucket is sent, all its gradients have their last values."""
    state, hooks = overlapped(mesh)
    launch, early = hooks.buckets.launch, []

    def launch_and_copy(index):
        early.append([p.grad.clone() for p, _ in hooks.buckets.members[index]])
        return launch(index)

    hooks.buckets.launch = launch_and_copy
    own = own_batches(mesh, 0, 6, 3)
    training_step(state, own, 0.0, 0.0, "fp64")
    alone = parallelize(TINY, SGD, Mesh.single())
    accumulate(alone.model, own, random_batch(TINY, 6, 0).valid, "fp64")
    want = {r.name: r.parameter.grad for r in alone.records}
    for bucket, gradients in zip(hooks.buckets.plan, early):
        for name, gradient in zip(bucket.names, gradients):
            assert torch.allclose(gradient, want[name], rtol=1e-9), f"{name} was sent too early"


def check_unused_keeps_the_order(mesh: Mesh) -> None:
    """A gradient that never comes holds back its bucket and those behind, alike on all ranks."""
    state, hooks = overlapped(mesh, change=add_unused)
    log: list = []
    with watched(log):
        training_step(state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
    unused = "blocks.0.attention.extra.weight"
    (place,) = (i for i, bucket in enumerate(hooks.buckets.plan) if unused in bucket.names)
    assert 0 < place < len(hooks.times) - 1
    assert [t.in_backward for t in hooks.times] == [i < place for i in range(len(hooks.times))]
    sent = [id(event) for event in log if not isinstance(event, str)]
    assert sent == [id(flat) for flat in hooks.buckets.flats], "sent in another order"
    require_replicas(state, mesh)


def check_rank_dependent_graph(mesh: Mesh) -> None:
    """A parameter that only one rank uses: its gradient arrives everywhere, nobody hangs."""
    state, _ = overlapped(mesh, change=add_unused)
    extra = state.model.blocks[0].attention.extra.weight
    if mesh.rank("dp") == 0:
        state.model.register_forward_hook(lambda m, i, out: out + extra.sum() * out.sigmoid())
    training_step(state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
    assert float(extra.grad.abs().min()) > 0, "the gradient of one rank did not arrive"
    require_replicas(state, mesh)


def late(all_reduce: Callable) -> Callable:
    """An all-reduce that does its work only when it is waited for."""

    class Late:
        transfer = None

        def __init__(self, arguments):
            self.arguments = arguments

        def wait(self):
            if self.arguments:
                self.result, self.arguments = all_reduce(*self.arguments).wait(), None
            return self.result

    def start(tensor, group, purpose, op="sum"):
        if purpose == "gradients":
            return Late((tensor, group, purpose, op))
        return all_reduce(tensor, group, purpose, op)

    return start


def check_buffers_rest_until_waited_for(mesh: Mesh) -> None:
    """With transfers that take until their wait, the results are the same bits."""
    want = trained(mesh, overlap=False)
    right = collectives.all_reduce
    collectives.all_reduce = late(right)
    try:
        for parallel in ({"overlap": False}, {"overlap": True}):
            assert same(trained(mesh, **parallel), want), f"{parallel}: read before the wait"
    finally:
        collectives.all_reduce = right


def trained(mesh: Mesh, steps: int = 3, **parallel) -> dict:
    """Weights after some steps."""
    state = made(mesh, **parallel)
    for step in range(steps):
        training_step(state, own_batches(mesh, step), 0.5, 0.05, "fp64")
    return bits(state)


def check_overlap_changes_no_bit(mesh: Mesh) -> None:
    """On and off, for the same buckets, weights are the same bits after some steps."""
    assert same(trained(mesh, overlap=True), trained(mesh, overlap=False))


# -------------------------------------------------------------------- gradients before and after


def check_gradients_are_views(mesh: Mesh) -> None:
    """Set to None or zeroed between steps, the result is the same and lies in the buffer."""
    found = []
    for to_none in (True, False):
        state, hooks = overlapped(mesh)
        zero = state.optimizer.zero_grad
        state.optimizer.zero_grad = lambda set_to_none, zero=zero, kind=to_none: zero(kind)
        for step in range(3):
            training_step(state, own_batches(mesh, step), 0.5, 0.05, "fp64")
        for flat, members in zip(hooks.buckets.flats, hooks.buckets.members):
            inside = range(flat.data_ptr(), flat.data_ptr() + flat.nbytes)
            assert all(p.grad is view for p, view in members)
            assert all(p.grad.data_ptr() in inside for p, _ in members)
        found.append(bits(state))
    assert same(*found)


def check_gradients_of_one_rank(mesh: Mesh) -> None:
    """Each rank uses another parameter at every step; nothing of the step before is left."""
    names = ("first", "second")
    for name in OURS:
        model = declare(
            nn.ParameterDict({n: torch.zeros(2) for n in names}),
            **{n: ParameterSpec() for n in names},
        )
        rows = build_records(model, mesh)
        replicas = METHODS[name](model, rows, mesh)
        for step in range(3):
            used = names[(mesh.rank("dp") + step) % 2]
            model.zero_grad(set_to_none=True)
            model[used].grad = torch.full((2,), 1.0 + step + 10 * mesh.rank("dp"))
            finish_gradients(rows, mesh, reduce=replicas.reduce)
            for place, n in enumerate(names):
                rank = (place - step) % 2
                want = 1.0 + step + 10 * rank
                got = model[n].grad.tolist()
                assert got == [want, want], f"{name}, step {step}: {n} is {got}, not {want}"


def check_strided_gradients(mesh: Mesh) -> None:
    """COM-02: gradients with other strides than their parameters, summed in every way."""
    for name in OURS:
        _, rows = records.made(mesh)
        replicas = METHODS[name](nn.Module(), rows, mesh)
        parts = [records.random_whole(seed=rank) for rank in range(mesh.size("dp"))]
        for record in rows:
            gradient = parts[mesh.rank("dp")][record.name].clone()
            strided = gradient.dim() == 2 and mesh.rank("dp") == 0
            record.parameter.grad = gradient.t().contiguous().t() if strided else gradient
        replicas.reduce(rows, mesh)
        for record in rows:
            want = sum(part[record.name] for part in parts)
            assert torch.allclose(record.parameter.grad, want), f"{name}: {record.name}"


def check_sums(mesh: Mesh) -> None:
    """Gradients are summed over "dp", and over the axes of which each rank sees only a part."""
    for name in OURS:
        _, rows = records.made(mesh, partial_over=("tp",))
        replicas = METHODS[name](nn.Module(), rows, mesh)
        for record in rows:
            place = 1 + mesh.rank("dp") + 10 * mesh.rank("tp")
            record.parameter.grad = torch.full_like(record.parameter, place)
        replicas.reduce(rows, mesh)
        dp = range(mesh.size("dp"))
        over_dp = sum(1 + d + 10 * mesh.rank("tp") for d in dp)
        over_both = sum(1 + d + 10 * t for d in dp for t in range(mesh.size("tp")))
        for record in rows:
            want = over_both if record.name == "layer.constant" else over_dp
            got = record.parameter.grad.unique().tolist()
            assert got == [want], f"{name}: {record.name}: {got}, not {want}"


# ------------------------------------------------------------------------------- ranks in step


def check_uneven_batches(mesh: Mesh) -> None:
    """DP-02: ranks with 3, 5, … steps all take as many, as one process with all samples does."""
    ranks, rank = mesh.size("dp"), mesh.rank("dp")
    counts = [3 + 2 * r for r in range(ranks)]
    batches = [[random_batch(TINY, 2, step, seed=r) for step in range(counts[r])]
               for r in range(ranks)]  # fmt: skip
    for parallel in ({"overlap": False}, {"overlap": True}, {"backend": "pytorch"}):
        state = made(mesh, **parallel)
        steps = [[b, without_targets(b)] for b in batches[rank]]
        losses = [
            training_step(state, own, 0.5, 0.0, "fp64").loss
            for own in keep_in_step(steps, mesh, blank=batches[rank][0])
        ]
        assert len(losses) == max(counts), f"{len(losses)} steps, not {max(counts)}"
        alone = parallelize(TINY, SGD, Mesh.single())
        for step, loss in enumerate(losses):
            all_of_them = [own[step] for own in batches if step < len(own)]
            want = training_step(alone, all_of_them, 0.5, 0.0, "fp64").loss
            assert close(loss, want, 1e-10), f"step {step}: loss {loss}, not {want}"
        require_replicas(state, mesh)


def check_decisions_are_agreed(mesh: Mesh) -> list[bool]:
    """DP-04: one rank finds its loss better, the other worse; both take the same branch."""
    local = [1.0, 3.0][min(mesh.rank("dp"), 1)]
    return [data_parallel.agree(local < 2.0, mesh), data_parallel.agree(local < 0.5, mesh)]


def check_seeds(mesh: Mesh) -> None:
    """Other seeds on each rank are found before training; a broadcast would have hidden them."""
    torch.manual_seed(mesh.rank("dp"))  # not used: weights are drawn by name
    state = parallelize(TINY, SGD, mesh)
    with torch.no_grad():
        state.records[0].parameter.add_(mesh.rank("dp"))
    message = records.failure(assert_replicas_agree, state.records, mesh)
    assert "ranks 0 and 1 hold different values of embedding.weight" in message, message
    broadcast_weights(state.records, mesh)
    assert_replicas_agree(state.records, mesh)
    message = records.failure(parallelize, TINY, TrainingConfig(seed=mesh.rank("dp")), mesh)
    assert "hold different values" in message, message


def check_late_gradient_is_refused(mesh: Mesh) -> None:
    """DP-07: what a second backward pass adds after a bucket was sent would be lost."""
    state, hooks = overlapped(mesh)
    (batch,) = own_batches(mesh, 0, accumulation=1)
    for fetched in hooks.watch([batch], 1):
        loss = state.model(**fetched.inputs()).square().sum()
        loss.backward(retain_graph=True)
        message = records.failure(loss.backward)
    assert "arrived after its bucket was sent" in message, message
    message = records.failure(next, hooks.watch([batch], 1))
    assert "still on their way" in message, message
    hooks.reduce(state.records, mesh)


def check_thawed_parameter_is_refused(mesh: Mesh) -> None:
    """A parameter frozen when the buckets were planned cannot silently train on each rank alone."""
    for parallel in ({"overlap": False}, {"overlap": True}):
        state = made(mesh, **parallel)
        state.records[0].parameter.requires_grad_(False)
        message = records.failure(training_step, state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
        assert "embedding.weight" in message, message
        assert "frozen, thawed or replaced" in message, message


def check_replaced_parameter_is_refused(mesh: Mesh) -> None:
    """Buckets know parameters, not names: another one of the same name is not summed silently."""
    for parallel in ({"overlap": False}, {"overlap": True}):
        state = made(mesh, **parallel)
        state.model.norm.weight = nn.Parameter(state.model.norm.weight.detach().clone())
        state.records = build_records(state.model, mesh)
        message = records.failure(training_step, state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
        assert "['norm.weight'] were frozen, thawed or replaced" in message, message


def check_after_a_failed_backward(mesh: Mesh) -> None:
    """Buckets that were sent before a failure are cleared by `reduce`; then steps go on."""
    state, hooks = overlapped(mesh)
    batches = own_batches(mesh, 0, accumulation=1)

    def fail(_):
        raise RuntimeError("in backward")

    failing = state.model.blocks[0].attention.query.weight.register_hook(fail)
    message = records.failure(training_step, state, batches, 0.1, 0.0, "fp64")
    assert "in backward" in message, message
    failing.remove()
    message = records.failure(training_step, state, batches, 0.1, 0.0, "fp64")
    assert "call reduce on all ranks" in message, message
    hooks.reduce(state.records, mesh)
    assert training_step(state, batches, 0.1, 0.0, "fp64").applied
    assert_replicas_agree(state.records, mesh)


def check_a_loop_left_early(mesh: Mesh) -> None:
    """After a `break` behind the last micro-batch, a backward pass outside a step sends nothing."""
    state, hooks = overlapped(mesh)
    (batch,) = own_batches(mesh, 0, accumulation=1)

    def backward() -> None:
        state.model(**batch.inputs()).square().sum().backward()

    for _ in hooks.watch([batch], 1):
        backward()
        break
    hooks.reduce(state.records, mesh)
    with count_traffic() as traffic:
        backward()
    assert not traffic.calls


def check_the_switch_of_overlap(mesh: Mesh) -> None:
    """`parallel.overlap` really decides whether buckets leave inside the backward pass."""
    for on in (False, True):
        state, log = made(mesh, overlap=on), []
        with watched(log):
            training_step(state, own_batches(mesh, 0), 0.1, 0.0, "fp64")
        end = len(log) - 1 - log[::-1].index("backward ends")
        early = [entry for entry in log[:end] if not isinstance(entry, str)]
        assert bool(early) == on, f"overlap {on}: {len(early)} buckets left in backward"


def check_decisions_reach_all(mesh: Mesh) -> None:
    """A decision of one rank counts for all axes, not only along its own."""
    assert data_parallel.agree(mesh.rank("dp") == mesh.rank("tp") == 0, mesh)


def check_hidden_wait_is_not_counted(mesh: Mesh) -> tuple[float, float]:
    """Waiting in collectives while rank 0's peer is late, with and without time to hide it."""
    waits = []
    for pause in (0.0, 0.3):
        with count_traffic() as traffic:
            time.sleep(0.3 * mesh.rank("dp"))
            handle = collectives.all_reduce(torch.zeros(4), mesh.world, "gradients")
            time.sleep(pause)
            handle.wait()
        waits.append(traffic.waiting_s)
    return tuple(waits)


def check_overflow_in_buckets(mesh: Mesh) -> None:
    """CLIP-08: inf on one rank only, in one of several buckets: all ranks skip the same step."""
    for parallel in ({"overlap": False}, {"overlap": True}, {"backend": "pytorch"}):
        state, norms = made(mesh, **parallel), []
        for step in range(3):
            before = bits(state)
            with overflow(state, active=step == 1 and mesh.rank("dp") == mesh.size("dp") - 1):
                result = training_step(state, own_batches(mesh, step), 0.1, 0.05, "fp64")
            assert result.applied != (step == 1), f"step {step}: applied {result.applied}"
            assert same(bits(state), before) != result.applied
            norms.append(torch.tensor(result.grad_norm, dtype=torch.float64))
            require_replicas(state, mesh)
        alike = collectives.all_gather(torch.stack(norms), mesh.world, "proof").wait()
        assert torch.equal(alike.nan_to_num(), alike[:1].nan_to_num().expand_as(alike)), alike
        assert (state.skipped, state.optimizer_step) == (1, 2)


class Twice(nn.Module):
    """One block used twice, each time under an activation checkpoint, and an unused head."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.block, self.unused = nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 1)
        self.reentrant = reentrant
        with torch.no_grad():
            self.block.weight.copy_(torch.arange(9.0).view(3, 3) / 9)
            self.block.bias.fill_(0.1)
        for layer in (self.block, self.unused):
            declare(layer, weight=ParameterSpec(std=1.0), bias=ParameterSpec())

    def forward(self, x):
        for _ in range(2):
            if self.reentrant is None:
                x = self.block(x).tanh()
            else:
                x = checkpoint(lambda y: self.block(y).tanh(), x, use_reentrant=self.reentrant)
        return x


def check_checkpointed_block_used_twice(mesh: Mesh) -> None:
    """DP-07: with use_reentrant=False gradients are those without checkpoints, sent once."""
    found = []
    for reentrant in (None, False):
        model = Twice(reentrant)
        rows = build_records(model, mesh)
        hooks = Overlap(Buckets(rows, mesh, plan_buckets(rows, mesh, 1)))
        x = torch.full((2, 3), 1.0 + mesh.rank("dp"), dtype=torch.float64, requires_grad=True)
        with count_traffic() as traffic:
            for own in hooks.watch([x], 1):
                model(own).sum().backward()
            hooks.reduce(rows, mesh)
        assert len(traffic.calls) == 4
        found.append([r.parameter.grad.clone() for r in rows])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert float(found[0][0].abs().min()) > 0
