"""A training run from its first batch to its last checkpoint, on one process or many."""

import itertools
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Timer

import torch

from course_lib import checkpoint, collectives
from course_lib.checkpoint.errors import together
from course_lib.config import to_toml
from course_lib.data import (
    Batch,
    Mixture,
    Prepared,
    default_cache,
    evaluation_batches,
    fetch_ahead,
    load_tokenizer,
    micro_batches,
    open_datasets,
)
from course_lib.data import prepare as prepare_data
from course_lib.data_parallel import agree
from course_lib.mesh import Mesh
from course_lib.model import generate
from course_lib.trainer import metrics
from course_lib.trainer.directory import make_directory, only_run_in
from course_lib.trainer.resume import describe, require_same_run
from course_lib.trainer.settings import Config, Layout
from course_lib.trainer.step import StepResult, parallelize, training_step
from course_lib.training import autocast, learning_rate, loss_sum

STOPPED = 75  # exit code of a run that a signal ended after saving (EX_TEMPFAIL: run it again)

NOTICE_S = 1.0  # data preparation that takes longer is announced

COUNTERS = ("data_step", "optimizer_step", "skipped", "skipped_in_a_row")  # of the state; saved


class TrainingDiverged(RuntimeError):
    """Too many steps in a row whose gradient was not finite."""


class Trainer:
    """One rank of a run. Make it on every rank, then call `run`."""

    def __init__(self, config: Config, layout: Layout, mesh: Mesh):
        """Prepare the data, make the model, and go on from the newest checkpoint if there is one.

        Raises ConfigError where the run cannot write; DataError, CorpusUnavailable or
        CheckpointError for what cannot be used.
        """
        self.config, self.layout, self.mesh = config, layout, mesh
        self.directory = Path(config.run.directory)
        make_directory(self.directory, mesh)
        self.prepared = _prepare(config, mesh)
        self.train_data, self.held_out = open_datasets(self.prepared, config.data)
        self.state = parallelize(config.model, config.training, mesh, config.parallel)
        self.tokens = 0  # valid tokens trained on so far
        self._described = describe(config, self.prepared.fingerprint)
        self._resumed = ""  # from where, and what has changed since, in words
        self._resume()
        self._first = self.state.data_step  # of this process
        self._stop = _StopSignals()

    # ------------------------------------------------------------------------------- the run

    def run(self) -> int:
        """Train until the last step, or until SIGTERM or Ctrl-C asks to stop.

        Returns 0 after the last step, STOPPED after a signal; both leave a checkpoint. Raises
        TrainingDiverged after `training.max_skipped` non-finite steps in a row, and RunInUse
        where another run holds the directory.
        """
        with self._stop, only_run_in(self.directory, self.mesh):
            self._open_logs()
            self._announce_mixture()
            if not self._finished:
                self._train()
            if self._finished:
                self._conclude()
            self._close_logs()
        return 0 if self._finished else STOPPED

    @property
    def _finished(self) -> bool:
        return self.state.optimizer_step >= self.config.training.steps

    def _train(self) -> None:
        with closing(self._batches()) as batches:
            while not self._finished and not self._stop_agreed():
                self._train_one_step(batches)
        self.save()  # before anything else can go wrong

    def _conclude(self) -> None:
        """Evaluate and sample once the last checkpoint is safe, unless an earlier run did."""
        if self._any_rank(self.mesh.is_first and self._evaluated != self.state.data_step):
            self.evaluate()
            self._write_sample()
        else:
            self._progress.say("this run is finished; raise training.steps to go on")

    def _train_one_step(self, batches: Iterator[list]) -> None:
        run, training, state = self.config.run, self.config.training, self.state
        lr = learning_rate(training, state.optimizer_step)
        start = time.perf_counter()  # waiting for data belongs to the step
        micro_batches = next(batches)
        with collectives.count_traffic() as traffic:
            result = training_step(state, micro_batches, lr, training.clip_norm, training.precision)
        self.tokens += result.tokens
        self._window.add(result.tokens, time.perf_counter() - start, traffic.waiting_s)
        self._progress.step(result.applied)
        if _due(state.data_step, run.log_every):
            self._log(result, lr)
        if not result.applied:
            self._report_skip(result)
        if not self._finished:  # else both follow at once
            if _due(state.data_step, run.checkpoint_every):
                self.save()
            if _due(state.data_step, run.eval_every):
                self.evaluate()

    def _batches(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each global batch, from the next data step on."""
        data, layout, size = self.config.data, self.layout, self.config.training.micro_batch
        count = layout.accumulation * size
        own = range(self.mesh.rank("dp") * count, (self.mesh.rank("dp") + 1) * count)
        make = partial(self.train_data.samples, indices=own, global_batch=layout.global_batch)
        first = self.state.data_step
        ahead = fetch_ahead(make, itertools.count(first), data.workers, data.worker_kind)
        with closing(ahead):
            for step, rows in zip(itertools.count(first), ahead):
                yield micro_batches(rows, own, step, size)

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: all ranks leave after the same step."""
        limit = self.config.run.stop_after
        enough = limit > 0 and self.state.data_step - self._first >= limit
        return self._any_rank(self._stop.asked or enough)

    def _any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on any rank. Collective."""
        return agree(condition, self.mesh)

    def _report_skip(self, result: StepResult) -> None:
        state, limit = self.state, self.config.training.max_skipped
        if state.skipped_in_a_row >= limit:
            # Nothing is saved: what a resumed run would start from is probably spoilt.
            raise TrainingDiverged(
                f"{limit} steps in a row had a gradient that is not finite (data steps "
                f"{state.data_step - limit} to {state.data_step - 1}, loss {result.loss}). "
                f"Lower training.lr, raise training.warmup, or look at the data of these steps; "
                f"then start again: the run goes on from the newest checkpoint in "
                f"{self.directory / 'checkpoints'}, or anew where there is none."
            )
        scale = f"; the loss scale is now {state.scaler.scale:g}" if state.scaler else ""
        self._progress.say(f"data step {state.data_step - 1}: not finite, skipped{scale}")

    # ------------------------------------------------------------------- evaluation and sample

    @torch.no_grad()
    def evaluate(self) -> dict | None:
        """Loss and bits per byte on the held-out text, each target counted once. Collective.

        Returns None without held-out text, and where a signal asks to stop meanwhile.
        """
        if self.held_out is None:
            return None
        model, precision = self.state.model.eval(), self.config.training.precision
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)  # nats, targets
        ranks, rank = self.mesh.size("dp"), self.mesh.rank("dp")
        for own in evaluation_batches(self.held_out, rank, ranks, self.config.training.micro_batch):
            if self._any_rank(self._stop.asked):
                model.train()
                return None
            own = own.to(self.mesh.device)
            with autocast(self.mesh.device, precision):
                logits = model(**own.inputs())
            total += torch.stack(
                (loss_sum(logits, own.labels).double(), total.new_tensor(own.valid))
            )
        model.train()
        nats, targets = collectives.all_reduce(total, self.mesh.group("dp"), "evaluation").wait()
        line = {
            "step": self.state.data_step,
            "loss": _number(float(nats / targets)),
            "bits_per_byte": _number(float(nats) / math.log(2) / self.held_out.text_bytes),
            "tokens": int(targets),
        }
        if self._evaluations is not None:
            self._evaluations.write(line)
        bits = metrics.shown(line["bits_per_byte"], ".4f")
        self._progress.say(f"held-out text after {line['step']} steps: {bits} bits per byte")
        return line

    def _write_sample(self) -> None:
        """Continue the start of the held-out text, and write it to sample.txt."""
        length = min(self.config.run.sample_tokens, self.config.model.context - 1)
        if length == 0 or not self.mesh.is_first:
            return
        start = (self.held_out or self.train_data).window(0)
        prompt = torch.from_numpy(start.tokens[: max(1, min(start.valid, (length + 1) // 8))])[None]
        generator = torch.Generator(self.mesh.device).manual_seed(self.config.training.seed)
        with _as_written(self.config.parallel.compile):
            tokens = generate(
                self.state.model, prompt.to(self.mesh.device), length + 1 - prompt.shape[1],
                temperature=0.8, top_k=50, generator=generator,
            )  # fmt: skip
        tokenizer = load_tokenizer(self.prepared.tokenizer, self.config.model.vocab)
        text = tokenizer.decode(tokens[0].tolist())
        (self.directory / "sample.txt").write_text(text + "\n", encoding="utf-8")

    # ---------------------------------------------------------------------- saving and resuming

    def _run_state(self) -> dict:
        state = self.state
        return {
            **{name: getattr(state, name) for name in COUNTERS},
            "tokens": self.tokens,
            "scaler": asdict(state.scaler) if state.scaler else None,
            **self._described,
        }

    def save(self) -> None:
        """Write a checkpoint of this step. Collective."""
        state = self.state
        checkpoint.save(
            self.directory / "checkpoints", state.data_step, state.records, state.optimizer,
            self.mesh, self._run_state(), self.config.run.keep,
        )  # fmt: skip

    def _resume(self) -> None:
        folder = self.directory / "checkpoints"
        newest = checkpoint.latest(folder, self.mesh)
        if newest is None:
            return
        if not self.config.run.resume:
            raise checkpoint.CheckpointError(
                f"{folder} holds checkpoints of an earlier run; choose another run.directory, or "
                "go on with run.resume = true"
            )
        state = self.state

        def compare() -> list[str]:
            return require_same_run(newest, checkpoint.read_manifest(newest).state, self._described)

        changes, *_ = together(self.mesh, compare)
        saved = checkpoint.load(newest, state.records, state.optimizer, self.mesh)
        for name in COUNTERS:
            setattr(state, name, saved[name])
        self.tokens = saved["tokens"]
        if state.scaler:
            state.scaler = type(state.scaler)(**saved["scaler"])
        self._resumed = f"resumed after {state.data_step} steps from {folder}" + (
            f"; changed since: {', '.join(changes)}" if changes else ""
        )

    # ------------------------------------------------------------------------------- reporting

    def _open_logs(self) -> None:
        first, done = self.mesh.is_first, self.state.data_step
        self._window = metrics.Window()
        self._peak = metrics.peak_flops(self.mesh.device, self.config.training.precision)
        self._progress = metrics.Progress(
            self.config.training.steps, self.state.optimizer_step, shown=first
        )
        self._metrics = self._evaluations = None
        self._evaluated = None  # the last step that was evaluated, known to the first rank
        if first:
            (self.directory / "config.toml").write_text(to_toml(self.config.sections()))
            self._metrics = metrics.JsonLines(self.directory / "metrics.jsonl", done)
            self._evaluations = metrics.JsonLines(self.directory / "evaluation.jsonl", done)
            self._evaluated = self._evaluations.last_step
        if self._resumed:
            self._progress.say(self._resumed)

    def _close_logs(self) -> None:
        if not self._finished:
            self._progress.say(f"stopped after {self.state.data_step} steps; saved, run it again")
        self._progress.close()
        for log in (self._metrics, self._evaluations):
            if log is not None:
                log.close()

    def _announce_mixture(self) -> None:
        """Say how often each source of a mixture will be read: small ones may repeat much."""
        if isinstance(self.train_data, Mixture):
            samples = self.config.training.steps * self.layout.global_batch
            drawn = self.train_data.drawn(samples)
            for source, data, count in zip(self.prepared.sources, self.train_data.datasets, drawn):
                self._progress.say(
                    f"{source.name}: {count} of {samples} samples, {_epochs(count / len(data))}"
                )

    def _log(self, result: StepResult, lr: float) -> None:
        """Write one line of metrics. Collective: the peak memory is the largest of all ranks."""
        memory = torch.tensor(metrics.peak_memory_bytes(self.mesh.device), device=self.mesh.device)
        memory = collectives.all_reduce(memory, self.mesh.world, "metrics", op="max").wait()
        if self._metrics is None:
            return
        tokens_per_s = self._window.tokens / self._window.seconds
        on_cpu = self.mesh.device.type == "cpu"  # on a GPU the host does not wait: not known
        line = {
            "step": self.state.data_step,
            "loss": _number(result.loss),
            "grad_norm": _number(result.grad_norm),
            "lr": lr,
            "tokens": self.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": metrics.model_flops_utilisation(
                self.config.model, self.config.data.sequence_length, tokens_per_s,
                self.mesh.world_size, self._peak,
            ),
            "peak_memory_bytes": int(memory),
            "comm_fraction": self._window.waiting_s / self._window.seconds if on_cpu else None,
            "skipped": self.state.skipped,
        }  # fmt: skip
        self._metrics.write(line)
        self._progress.log(line)
        self._window = metrics.Window()


def _as_written(compiled: bool) -> AbstractContextManager:
    """Run a compiled model uncompiled: text of every length would be compiled for once more."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _epochs(passes: float) -> str:
    """How often a data set is read, in words."""
    return f"{passes:.1f} epochs" if passes >= 1 else f"{100 * passes:.3g} % of an epoch"


def _number(value: float) -> float | None:
    """A figure for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _prepare(config: Config, mesh: Mesh) -> Prepared:
    """Prepare the data; the first rank says so where that takes more than a moment."""
    data = config.data
    names = ", ".join(data.mixture or [data.corpus])
    words = (
        f"preparing {names}: fetched and tokenized once, then kept in "
        f"{data.cache or default_cache()}; large texts take minutes"
    )
    notice = Timer(NOTICE_S, print, [words], {"flush": True})
    notice.daemon = True
    if mesh.is_first:
        notice.start()
    try:
        return prepare_data(data, config.model.vocab)
    finally:
        notice.cancel()


class _StopSignals:
    """While active, SIGTERM and Ctrl-C only leave a note: the running step is finished first."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exception):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        self.asked = True
