"""What a run carries from step to step, and what it must not: skips, scale, mode, windows."""

import shutil
from types import SimpleNamespace

import pytest

from course_lib import checkpoint
from course_lib.mesh import Mesh
from course_lib.trainer import loop
from course_lib.trainer import metrics as reported
from course_lib.trainer.loop import STOPPED, Trainer
from course_lib.trainer.metrics import read_lines
from course_lib.trainer.settings import load_config
from tests.test_trainer import (
    exact,
    folder,  # noqa: F401
    metrics,
    train,
    train_here,
    with_broken_gradients,
)


def train_alone(folder, name, *overrides):  # noqa: F811
    """Train in this process; returns (exit code, or the kind and text of the error; directory)."""
    settings = [f"--run.directory={folder / name}", *overrides]
    return train_here(str(folder / "run.toml"), settings, 1), folder / name


def new_trainer(folder, name, *overrides):  # noqa: F811
    """A trainer that has not trained yet, with its logs open."""
    settings = [f"--run.directory={folder / name}", *overrides]
    config, layout = load_config(folder / "run.toml", settings, 1)
    trainer = Trainer(config, layout, Mesh.single())
    trainer._open_logs()
    return trainer


def saved_state(directory):
    return checkpoint.read_manifest(checkpoint.latest(directory / "checkpoints")).state


# ------------------------------------------------------------------------- stopped among skips


@pytest.fixture
def overflowing(folder, monkeypatch):  # noqa: F811
    """Train as `train_alone`, where data steps 1 and 2 are not finite."""

    def run(name, *overrides):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "training_step", loop.training_step)  # put back at the end
            settings = [f"--run.directory={folder / name}", "--training.steps=6", *overrides]
            result = with_broken_gradients(
                str(folder / "run.toml"), settings, 1, bad_steps={1, 2}, rank=None
            )
        return result, folder / name

    return run


@pytest.mark.trap("CK-01")
@pytest.mark.trap("MP-04")
def test_a_run_stopped_among_skipped_steps_goes_on_as_the_unbroken_one(overflowing):
    """Batches follow the data step, and the loss scale and the count of skips go on."""
    options = ["--training.precision=fp16"]
    code, whole = overflowing("skips-whole", *options)
    assert code == 0
    code, parts = overflowing("skips-parts", *options, "--run.stop_after=2")
    assert code == STOPPED
    middle = saved_state(parts)
    assert (middle["data_step"], middle["optimizer_step"]) == (2, 1)
    shutil.copytree(parts, parts.with_name("skips-limit"))

    code, _ = overflowing("skips-parts", *options)
    assert code == 0
    assert exact(parts) == exact(whole)
    assert saved_state(parts) == saved_state(whole)
    assert saved_state(parts)["scaler"]["scale"] == middle["scaler"]["scale"] / 2 == 2.0**14

    # One more skip is the second in a row, also for a process that saw only this one.
    (kind, text), limit = overflowing("skips-limit", *options, "--training.max_skipped=2")
    assert kind == "TrainingDiverged"
    assert "data steps 1 to 2" in text
    assert [line["skipped"] for line in metrics(limit)][:2] == [0, 1]


# ---------------------------------------------------------------------------------- evaluation


def test_an_evaluation_changes_nothing_in_the_steps_after_it(folder):  # noqa: F811
    options = ["--model.dropout=0.2", "--training.steps=5"]
    _, without = train_alone(folder, "without-evaluations", *options)
    _, often = train_alone(folder, "with-evaluations", *options, "--run.eval_every=2")
    assert [line["step"] for line in read_lines(often / "evaluation.jsonl")] == [2, 4, 5]
    assert exact(often) == exact(without)


def test_an_evaluation_drops_nothing_out(folder):  # noqa: F811
    plain = new_trainer(folder, "plain", "--model.dropout=0.0").evaluate()
    trainer = new_trainer(folder, "dropping", "--model.dropout=0.5")
    assert trainer.evaluate() == trainer.evaluate() == plain
    assert trainer.state.model.training


def test_an_evaluation_is_computed_in_the_precision_of_training(folder):  # noqa: F811
    plain = new_trainer(folder, "eval-fp32", "--training.precision=fp32").evaluate()["loss"]
    bf16 = new_trainer(folder, "eval-bf16", "--training.precision=bf16").evaluate()["loss"]
    assert bf16 != plain
    assert bf16 == pytest.approx(plain, rel=2e-3)


# -------------------------------------------------------------------------------------- metrics


def test_speed_is_that_of_the_steps_since_the_last_line(folder, monkeypatch):  # noqa: F811
    """On a clock where step n takes 2^n seconds, each line is about its own two steps."""
    clock, original = [0.0], loop.training_step

    def step(state, *rest):
        clock[0] += 2.0**state.data_step
        return original(state, *rest)

    monkeypatch.setattr(loop, "training_step", step)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    _, directory = train_alone(folder, "speed", "--training.steps=6", "--run.log_every=2")
    lines = metrics(directory)
    before = [0, *(line["tokens"] for line in lines)]
    speeds = [(line["tokens"] - old) / s for line, old, s in zip(lines, before, (3, 12, 48))]
    assert [line["tokens_per_s"] for line in lines] == pytest.approx(speeds)


def test_the_memory_reported_is_that_of_the_rank_with_most(folder):  # noqa: F811
    def function(config_file, overrides, world_size):
        import torch.distributed as dist

        def peak(device):
            return 1_000_000 * (1 + dist.get_rank())

        reported.peak_memory_bytes = peak
        return train_here(config_file, overrides, world_size)

    codes, directory = train(folder, "memory", 2, "--training.steps=2", "--training.warmup=1",
                             function=function)  # fmt: skip
    assert codes == [0, 0]
    assert [line["peak_memory_bytes"] for line in metrics(directory)] == [2_000_000] * 2
