"""The trainer's whole configuration, and whether it fits the number of processes."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from course_lib.config import load, type_faults
from course_lib.data import DataConfig
from course_lib.data.tokenizer import SMALLEST_VOCAB
from course_lib.data_parallel import BUCKET_BYTES
from course_lib.model import ModelConfig
from course_lib.training import TrainingConfig


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is divided over ranks."""

    dp: Annotated[int | None, "data-parallel ranks; none: what is left of the world size"] = None
    overlap: Annotated[bool, "send gradients during backward; backend pytorch always does"] = True
    bucket_bytes: Annotated[int, "about so many bytes of gradients make a message"] = BUCKET_BYTES
    compile: Annotated[bool, "run the model through torch.compile"] = False
    backend: Annotated[Literal["course", "pytorch"], "whose parallel parts; pytorch: DDP"] = (
        "course"
    )

    def faults(self) -> list[str]:
        """Everything that is wrong with these values."""
        if wrong_types := type_faults(self):
            return wrong_types
        found = [] if self.dp is None or self.dp >= 1 else ["dp must be at least 1"]
        if self.bucket_bytes < 1:
            found.append(f"bucket_bytes {self.bucket_bytes} must be at least 1")
        return found


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes, how often, and how it ends."""

    directory: Annotated[str, "everything the run writes lies below it"] = "runs/run"
    device: Annotated[Literal["auto", "cpu", "cuda"], "auto: GPUs where there are enough"] = "auto"
    log_every: Annotated[int, "steps between lines of metrics.jsonl; 0: none"] = 1
    eval_every: Annotated[int, "steps between evaluations on held-out text; 0: only the last"] = 0
    checkpoint_every: Annotated[int, "steps between checkpoints; 0: only the last"] = 0
    keep: Annotated[int, "newest checkpoints that are kept"] = 2
    stop_after: Annotated[int, "stop after so many steps, as a signal would; 0: never"] = 0
    resume: Annotated[bool, "go on from the directory's newest checkpoint, if it has one"] = True
    sample_tokens: Annotated[int, "tokens of sample text written at the end; 0: none"] = 128
    timeout_s: Annotated[float, "seconds after which a collective that does not end fails"] = 600.0
    deterministic: Annotated[bool, "refuse algorithms whose result may vary between runs"] = False

    def faults(self) -> list[str]:
        """Everything that is wrong with these values."""
        if wrong_types := type_faults(self):
            return wrong_types
        found = [
            f"{name} {getattr(self, name)} must be at least {least}"
            for name, least in (
                ("log_every", 0), ("eval_every", 0), ("checkpoint_every", 0),
                ("keep", 1), ("stop_after", 0), ("sample_tokens", 0),
            )
            if getattr(self, name) < least
        ]  # fmt: skip
        if not 0 < self.timeout_s < 1e7:
            found.append(f"timeout_s {self.timeout_s} must be positive, and below 1e7")
        if not self.directory:
            found.append("directory must not be empty")
        return found


@dataclass(frozen=True)
class Config:
    """All sections of a run's configuration."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    parallel: ParallelConfig
    run: RunConfig

    def sections(self) -> dict[str, Any]:
        """Section name to dataclass, in the order of the file."""
        return dict(vars(self))


SECTIONS = get_type_hints(Config)  # section name -> its dataclass


@dataclass(frozen=True)
class Layout:
    """The sizes that follow from a configuration and a number of processes."""

    dp: int
    global_batch: int  # sequences of one step
    accumulation: int  # micro-batches of one step on one rank


def load_config(path, overrides: list[str], world_size: int) -> tuple[Config, Layout]:
    """Read and check a run's configuration before anything starts.

    Raises ConfigError with all faults: of the file, of single values, and of the whole against
    the world size.
    """

    def judge(sections: dict[str, Any]) -> list[str]:
        return layout_faults(Config(**sections), world_size)

    config = Config(**load(path, overrides, SECTIONS, judge))
    return config, make_layout(config, world_size)


def make_layout(config: Config, world_size: int) -> Layout:
    """Sizes of a configuration without faults."""
    dp = config.parallel.dp or world_size
    global_batch = config.training.global_batch_tokens // config.data.sequence_length
    return Layout(dp, global_batch, global_batch // (config.training.micro_batch * dp))


def layout_faults(config: Config, world_size: int) -> list[str]:
    """What does not fit together, each with the nearest choice that does.

    Sizes below 1 are faults of their sections; nothing more is said of them.
    """
    model, data, training = config.model, config.data, config.training
    found = []
    dp = config.parallel.dp or world_size
    if dp != world_size and dp > 0:
        found.append(
            f"parallel.dp {dp} needs {dp} processes, but there are {world_size}; "
            f"leave dp out or start {dp} processes"
        )
    if 0 < model.vocab < SMALLEST_VOCAB:
        found.append(
            f"model.vocab {model.vocab} is too small for all bytes and the end of a text; "
            f"use at least {SMALLEST_VOCAB}"
        )
    if data.sequence_length > model.context > 0:
        found.append(
            f"data.sequence_length {data.sequence_length} exceeds model.context {model.context}"
        )
    unit = training.micro_batch * data.sequence_length * dp
    sizes = (training.micro_batch, data.sequence_length, dp, training.global_batch_tokens)
    if min(sizes) > 0 and training.global_batch_tokens % unit:
        lower = training.global_batch_tokens // unit * unit
        choices = " or ".join(str(n) for n in (lower, lower + unit) if n)
        found.append(
            f"training.global_batch_tokens {training.global_batch_tokens} is not a multiple of "
            f"micro_batch x sequence_length x dp = {training.micro_batch} x "
            f"{data.sequence_length} x {dp} = {unit}; use {choices}"
        )
    return found
