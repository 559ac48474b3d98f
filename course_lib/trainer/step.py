"""The whole of parallel training in two functions: what is done to the model, and one step.

`parallelize` fixes the order of the transformations. `training_step` is the only place where
gradients are made, finished and applied; the oracle that proves every layout calls it too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from course_lib import collectives, data_parallel, overlap
from course_lib.data_parallel import DataParallel
from course_lib.engines import pytorch
from course_lib.gradients import finish_gradients
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig, Transformer
from course_lib.overlap import fetch_to_device
from course_lib.parameters import ParameterRecord, assert_replicas_agree, materialise
from course_lib.trainer.settings import ParallelConfig
from course_lib.training import LossScaler, TrainingConfig, accumulate, make_optimizer, weight_dtype


@dataclass
class TrainingState:
    """Everything that one rank needs to train, and all that a checkpoint must hold of it."""

    model: nn.Module
    records: list[ParameterRecord]
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    replicas: DataParallel | None = None  # None: all gradients in one message after backward
    data_step: int = 0  # batches drawn: always advances
    optimizer_step: int = 0  # updates applied: sets the learning rate
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on all ranks."""

    loss: float  # nats a token, mean over the global batch's valid tokens
    grad_norm: float  # before clipping
    applied: bool  # False where the gradient was not finite
    tokens: int  # valid tokens in the global batch


def parallelize(
    model_config: ModelConfig,
    training: TrainingConfig,
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
) -> TrainingState:
    """Make this rank's part of the model, ready to train. Collective.

    The order matters: nothing may hold a parameter before `materialise`, which makes new ones.
    """
    parallel = parallel or ParallelConfig()
    with torch.device("meta"):
        model = Transformer(model_config, training.seed)
    names = [name for name, _ in model.named_parameters()]  # none may be lost on the way
    if parallel.compile:
        model.compile()  # in place: the parameters keep their names
    records = materialise(model, mesh, training.seed, weight_dtype(training.precision), names)
    assert_replicas_agree(records, mesh)  # equal by construction; a broadcast would hide faults
    replicas = replicate(model, records, mesh, parallel)
    optimizer = make_optimizer(training, [(r.parameter, r.spec.decay) for r in records])
    scaler = LossScaler.for_precision(training.precision)
    return TrainingState(model.train(), records, mesh, optimizer, scaler, replicas)


def replicate(
    model: nn.Module, records: list[ParameterRecord], mesh: Mesh, parallel: ParallelConfig
) -> DataParallel | None:
    """Data parallelism as the configuration wants it; None for one rank, which sums nothing."""
    if mesh.group("dp") is None:
        return None
    own = overlap if parallel.overlap else data_parallel
    chosen = {"course": own, "pytorch": pytorch}[parallel.backend]
    return chosen.data_parallelize(model, records, mesh, parallel.bucket_bytes)


def training_step(
    state: TrainingState, micro_batches: Sequence, lr: float, clip_norm: float, precision: str
) -> StepResult:
    """One optimizer step on this rank's micro-batches of the global batch. Collective.

    micro_batches: data.Batch, at least one; a rank that has none left brings one without targets
        (`data_parallel.keep_in_step`).
    lr: learning rate of this update. clip_norm: 0 switches clipping off.
    A step whose gradient norm is not finite is skipped by all ranks alike, and counted.
    """
    mesh, dp = state.mesh, state.mesh.group("dp")
    replicas = state.replicas or DataParallel(state.model)
    valid = torch.tensor(sum(batch.valid for batch in micro_batches), device=mesh.device)
    tokens = int(collectives.all_reduce(valid, dp, "token count").wait())
    scale = state.scaler.scale if state.scaler else 1.0

    state.optimizer.zero_grad(set_to_none=True)
    fetched = fetch_to_device(micro_batches, mesh.device)
    watched = replicas.watch(fetched, len(micro_batches))
    loss = accumulate(replicas.model, watched, tokens, precision, scale)
    finished = finish_gradients(state.records, mesh, clip_norm or None, scale, replicas.reduce)
    loss = float(collectives.all_reduce(loss, dp, "loss").wait())

    if finished.finite:
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        state.optimizer.step()
    _count_step(state, finished.finite)
    return StepResult(loss, finished.norm, finished.finite, tokens)


def _count_step(state: TrainingState, applied: bool) -> None:
    state.data_step += 1
    state.optimizer_step += applied
    state.skipped += not applied
    state.skipped_in_a_row = 0 if applied else state.skipped_in_a_row + 1
    if state.scaler:
        state.scaler.update(applied)
