"""Small training runs, one healthy and six broken on purpose, with the curves that they leave.

A run is the trainer's own `training_step` on a byte-level model of 74,000 parameters: less than a
second on one thread. A fault is data: a few values of `Setting` that differ from a healthy run.
One byte is one token here, so a loss of x nats a token is x / ln 2 bits per byte.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from course_lib.data import Batch, load_corpus, permuted
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig
from course_lib.trainer.step import TrainingState, parallelize, training_step
from course_lib.training import LossScaler, TrainingConfig, learning_rate, loss_sum

MODEL = ModelConfig(
    layers=1, width=64, heads=4, vocab=256, context=32, mlp_width=128, norm="rmsnorm",
    mlp="swiglu", positions="rope", bias=False, tie_embeddings=False,
)  # fmt: skip
TEXT_BYTES = 1_000_000  # of the corpus; the last tenth is held out
HELD_OUT_WINDOWS = 40  # read by an evaluation, each as long as the context
EVALUATE_EVERY = 20  # steps

TextForm = Literal["as it is", "spaces marked"]  # marked: each space becomes "_"


@dataclass(frozen=True)
class Setting:
    """Everything that makes a run; the defaults are those of a healthy one."""

    seed: int = 0  # of the weights and of the order of the text
    steps: int = 80
    micro_batch: int = 16  # sequences of one forward pass
    accumulate: int = 1  # micro-batches of one update
    lr: float = 0.015  # the highest
    warmup: int = 10  # steps
    clip_norm: float = 1.0  # 0: no clipping
    training_text: TextForm = "as it is"
    held_out_text: TextForm = "as it is"
    resume_at: int | None = 30  # step before which the run is stopped and started again
    restored: Literal["weights and moments", "weights"] = "weights and moments"
    precision: Literal["fp32", "fp16"] = "fp32"
    loss_scale: float = 2.0**27  # the first one of an fp16 run; too high, as often
    schedule_counts: Literal["updates", "batches"] = "updates"
    outliers: tuple[int, ...] = ()  # steps whose batch is random bytes


@dataclass(frozen=True)
class Fault:
    """One cause of a bad run: what differs from a healthy setting, and what repairs it."""

    cause: str
    broken: Mapping[str, object]
    repaired: Mapping[str, object]


FAULTS = {
    "small batch": Fault(
        "the micro-batch fits the memory, but too few of them are accumulated",
        {"micro_batch": 2},
        {"micro_batch": 2, "accumulate": 8},
    ),
    "high learning rate": Fault("20 times too high", {"lr": 0.3}, {"lr": 0.015}),
    "preprocessing": Fault(
        'spaces became "_" in the training text, but not in the held-out text',
        {"training_text": "spaces marked"},
        {"training_text": "as it is"},
    ),
    "no warm-up": Fault("the first update is a full one", {"warmup": 0}, {"warmup": 10}),
    "moments lost": Fault(
        "the run goes on from its weights, with an empty optimizer",
        {"restored": "weights"},
        {"restored": "weights and moments"},
    ),
    "schedule runs on": Fault(
        "fp16 overflows and skips updates, but each batch moves the schedule",
        {"precision": "fp16", "schedule_counts": "batches"},
        {"precision": "fp16", "schedule_counts": "updates"},
    ),
}


def broken(fault: str, seed: int = 0) -> Setting:
    """The setting of a run with this fault."""
    return Setting(seed=seed, **FAULTS[fault].broken)


def repaired(fault: str, seed: int = 0) -> Setting:
    """The setting of that run once its fault is repaired."""
    return Setting(seed=seed, **FAULTS[fault].repaired)


@dataclass(frozen=True, eq=False)
class Curves:
    """The log of a run: one number a step, and the held-out loss from time to time. Read-only."""

    loss: np.ndarray  # (steps,) bits per byte of the step's batch, before the update
    grad_norm: np.ndarray  # (steps,) before clipping; not finite where fp16 overflowed
    schedule: np.ndarray  # (steps,) learning rate, as a fraction of the highest
    skipped: np.ndarray  # (steps,) bool: no update, because the gradient was not finite
    evaluated: np.ndarray  # (evaluations,) number of steps before each evaluation
    held_out: np.ndarray  # (evaluations,) bits per byte of text that is not trained on
    resumed: int | None  # step at which the run was started again

    @property
    def final(self) -> float:
        """Held-out bits per byte at the end."""
        return float(self.held_out[-1])


@cache
def run(setting: Setting) -> Curves:
    """Train once; a pure function of the setting (and of the corpus that can be had).

    Each setting is trained once in a process: whoever asks again gets the same log.
    """
    training = TrainingConfig(
        steps=setting.steps, lr=setting.lr, warmup=setting.warmup, clip_norm=setting.clip_norm,
        precision=setting.precision, seed=setting.seed,
    )  # fmt: skip
    text, held_out = text_bytes(setting.training_text)[0], text_bytes(setting.held_out_text)[1]
    state = _start(training, setting)
    rows, evaluations = [], []
    for step in range(setting.steps):
        if step == setting.resume_at:
            state = _resume(state, training, setting)
        if step % EVALUATE_EVERY == 0:
            evaluations.append((step, evaluate(state.model, held_out)))
        # Only an applied update may move the schedule (MP-04): the other choice is a fault.
        counted = state.optimizer_step if setting.schedule_counts == "updates" else step
        lr = learning_rate(training, counted)
        batches = micro_batches(text, step, setting)
        result = training_step(state, batches, lr, setting.clip_norm, setting.precision)
        rows.append((to_bits(result.loss), result.grad_norm, lr / setting.lr, not result.applied))
    evaluations.append((setting.steps, evaluate(state.model, held_out)))
    columns = [np.array(column) for column in (*zip(*rows), *zip(*evaluations))]
    for column in columns:
        column.flags.writeable = False  # the log is shared by all who ask for it
    return Curves(*columns, resumed=setting.resume_at)


def run_all(settings: Mapping[str, Setting]) -> dict[str, Curves]:
    """Run several settings, one after the other."""
    return {name: run(setting) for name, setting in settings.items()}


def to_bits(nats: float) -> float:
    """Bits per byte of a loss in nats a token, where each token is a byte."""
    return nats / math.log(2)


@cache
def text_bytes(form: TextForm) -> tuple[Tensor, Tensor]:
    """Training text and held-out text of the corpus: uint8, (bytes,) each."""
    text = ""
    for document in load_corpus("shakespeare", fallback="python-docs"):
        text += document.text
        if len(text) >= TEXT_BYTES:
            break
    text = text.replace(" ", "_") if form == "spaces marked" else text
    data = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES]), dtype=torch.uint8)
    return data.tensor_split([len(data) * 9 // 10])


def micro_batches(text: Tensor, step: int, setting: Setting) -> list[Batch]:
    """The micro-batches of one update: the same sequences however they are divided."""
    sequences = setting.micro_batch * setting.accumulate
    windows = (len(text) - 1) // MODEL.context
    places = [(step * sequences + i) % windows for i in range(sequences)]
    starts = MODEL.context * torch.tensor([permuted(n, windows, setting.seed, 0) for n in places])
    rows = _windows(text, starts)
    if step in setting.outliers:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(MODEL.vocab, rows.shape, generator=generator)
    return [_batch(part, step) for part in rows.split(setting.micro_batch)]


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: Tensor) -> float:
    """Bits per byte of windows spread evenly over the held-out text."""
    starts = torch.arange(HELD_OUT_WINDOWS) * (len(held_out) // HELD_OUT_WINDOWS)
    batch = _batch(_windows(held_out, starts), step=0)
    nats = loss_sum(model(**batch.inputs()), batch.labels)
    return to_bits(nats.item() / batch.valid)


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(MODEL.context + 1)].long()  # (starts, context + 1)


def _batch(rows: Tensor, step: int) -> Batch:
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    positions = torch.arange(MODEL.context).repeat(len(rows), 1)
    return Batch(tokens, labels, positions, torch.arange(len(rows)), step, valid=labels.numel())


def _start(training: TrainingConfig, setting: Setting) -> TrainingState:
    state = parallelize(MODEL, training, Mesh.single())
    if state.scaler:
        state.scaler = LossScaler(setting.loss_scale)
    return state


def _resume(old: TrainingState, training: TrainingConfig, setting: Setting) -> TrainingState:
    """What a new process holds after it has read the old one's checkpoint."""
    new = _start(training, setting)
    new.model.load_state_dict(old.model.state_dict())
    if setting.restored == "weights and moments":
        new.optimizer.load_state_dict(deepcopy(old.optimizer.state_dict()))
    counters = ("scaler", "data_step", "optimizer_step", "skipped", "skipped_in_a_row")
    return replace(new, **{name: getattr(old, name) for name in counters})
