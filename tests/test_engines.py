"""Engines: PyTorch's own parts give what the course's do."""

import gc
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from course_lib.collectives import Handle
from course_lib.data_parallel import sum_flattened
from course_lib.engines import pytorch
from course_lib.mesh import Mesh
from course_lib.oracle import random_batch
from course_lib.trainer.settings import ParallelConfig
from course_lib.trainer.step import parallelize, training_step
from course_lib.training import TrainingConfig
from tests import checks_core as core
from tests import checks_data_parallel as checks
from tests import checks_records as records
from tests import checks_replicas as replicas
from tests.checks_core import TINY, TWO, on_ranks


def losses_and_gradients(mesh: Mesh, precision: str, **parallel) -> tuple[list, dict]:
    """Losses of three steps of AdamW, and the last step's gradients."""
    config = TrainingConfig(precision=precision)
    state = parallelize(
        TINY, config, mesh, ParallelConfig(bucket_bytes=checks.SMALL_BUCKETS, **parallel)
    )
    losses = [
        training_step(state, core.own_batches(mesh, step), 1e-2, 1.0, precision).loss
        for step in range(3)
    ]
    return losses, {r.name: r.parameter.grad.clone() for r in state.records}


def check_backends_agree(mesh: Mesh) -> None:
    for precision, tolerance in (("fp32", 1e-6), ("fp64", 1e-10)):
        losses, gradients = losses_and_gradients(mesh, precision)
        theirs, their_gradients = losses_and_gradients(mesh, precision, backend="pytorch")
        assert all(core.close(a, b, tolerance) for a, b in zip(losses, theirs)), (losses, theirs)
        whole = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
        for name, gradient in gradients.items():
            apart = float((gradient - their_gradients[name]).norm())
            assert apart <= tolerance * max(float(gradient.norm()), 1e-2 * whole), name


def test_the_backends_give_the_same_losses_and_gradients():
    on_ranks(check_backends_agree, TWO)


def check_ddp_is_used(mesh: Mesh) -> None:
    """The step runs through DDP; records, checkpoints and evaluation keep the plain model."""
    state = checks.made(mesh, backend="pytorch")
    assert isinstance(state.replicas.model, DistributedDataParallel)
    assert state.replicas.model.module is state.model
    assert not isinstance(state.model, DistributedDataParallel)
    assert state.model.head.weight is state.model.embedding.weight


def test_pytorch_means_ddp_around_the_plain_model():
    on_ranks(check_ddp_is_used, TWO)


def check_unused(mesh: Mesh) -> None:
    """An unused parameter is refused by DDP, or looked for where asked."""
    model = checks.parallelize(TINY, checks.SGD, Mesh.single()).model
    checks.add_unused(model)
    rows = checks.build_records(model, mesh)
    batch = random_batch(TINY, 2, mesh.rank("dp"))
    replicas = pytorch.data_parallelize(model, rows, mesh, find_unused=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        for fetched in replicas.watch([batch, batch], 2):
            replicas.model(**fetched.inputs()).square().sum().backward()
        done = core.finish_gradients(rows, mesh, reduce=replicas.reduce)
    got = {r.name: r.parameter.grad.clone() for r in rows}
    model.zero_grad(set_to_none=True)
    for _ in range(2):
        model(**batch.inputs()).square().sum().backward()
    want = core.finish_gradients(rows, mesh, reduce=sum_flattened)
    assert core.close(done.norm, want.norm, 1e-12)
    for record in rows:
        assert torch.allclose(got[record.name], record.parameter.grad, rtol=1e-9), record.name


def test_ddp_finds_unused_parameters_where_asked():
    on_ranks(check_unused, TWO)


def leave(model) -> None:
    """No change."""


def check_unsummed_is_refused(mesh: Mesh) -> None:
    """A step that DDP left unsummed, in whole or in part, is never applied."""
    for before, after in (
        (leave, checks.freeze_some),
        (checks.freeze_some, lambda model: model.requires_grad_(True)),
        (checks.add_unused, leave),
    ):
        model = checks.parallelize(TINY, checks.SGD, Mesh.single()).model
        before(model)
        rows = checks.build_records(model, mesh)
        replicas = pytorch.data_parallelize(model, rows, mesh)
        after(model)
        batch = random_batch(TINY, 2, mesh.rank("dp"))
        for fetched in replicas.watch([batch], 1):
            replicas.model(**fetched.inputs()).square().sum().backward()
        reduce = partial(core.finish_gradients, rows, mesh, reduce=replicas.reduce)
        message = checks.records.failure(reduce)
        assert "bytes of gradients: a parameter is unused" in message, message


def test_gradients_that_ddp_did_not_sum_are_refused():
    on_ranks(check_unsummed_is_refused, TWO)


@pytest.mark.trap("TP-14")
def test_ddp_sums_partial_gradients_over_their_other_axes_too():
    on_ranks(replicas.check_ddp_sums_partial_gradients, records.DP_TP)


def test_ddp_refuses_parameters_that_are_cut_over_its_replicas():
    on_ranks(replicas.check_ddp_refuses_cut_replicas, TWO)


def check_no_handle_is_left(mesh: Mesh) -> None:
    """ACC-12: nothing of a step outlives it."""
    state, counts = checks.made(mesh, backend="pytorch"), []
    for step in range(6):
        training_step(state, core.own_batches(mesh, step), 0.1, 0.0, "fp64")
        gc.collect()
        counts.append(sum(isinstance(each, Handle) for each in gc.get_objects()))
    assert counts[2] == counts[-1], counts


@pytest.mark.trap("ACC-12")
def test_no_handle_outlives_its_step():
    on_ranks(check_no_handle_is_left, TWO)


def test_one_rank_alone_is_not_wrapped():
    state = parallelize(TINY, checks.SGD, Mesh.single(), ParallelConfig(backend="pytorch"))
    assert state.replicas is None
    assert pytorch.data_parallelize(state.model, state.records, Mesh.single()).model is state.model


@pytest.mark.parametrize("value, fault", [("0", "bucket_bytes 0 must be at least 1")])
def test_impossible_bucket_sizes_are_refused(value, fault):
    assert ParallelConfig(bucket_bytes=int(value)).faults() == [fault]
