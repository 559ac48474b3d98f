"""The trainer as a whole: on one process and several, stopped, resumed, and given bad input."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from course_lib import checkpoint
from course_lib.classroom.launch import run_ranks
from course_lib.config import ConfigError
from course_lib.mesh import Mesh, make_mesh
from course_lib.trainer import loop
from course_lib.trainer.__main__ import Process, choose_device, main
from course_lib.trainer.loop import STOPPED, Trainer, TrainingDiverged
from course_lib.trainer.metrics import (
    FIELDS,
    JsonLines,
    model_flops_utilisation,
    peak_flops,
    read_lines,
)
from course_lib.trainer.settings import SECTIONS, load_config

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("loss", "grad_norm", "lr", "tokens", "skipped", "step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of short documents of very different lengths, and a configuration that reads it."""
    folder = tmp_path_factory.mktemp("trainer")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
    (folder / "text").mkdir()
    for number in range(60):
        text = " ".join(rng.choices(words, k=rng.randint(1, 60)))
        (folder / "text" / f"{number:02}.txt").write_text(text)
    (folder / "run.toml").write_text(f"""
        [model]
        layers = 2
        width = 16
        heads = 2
        vocab = 260
        context = 16
        [data]
        corpus = "{folder / "text"}"
        cache = "{folder / "cache"}"
        sequence_length = 16
        packing = "pad"
        held_out = 0.2
        [training]
        steps = 20
        global_batch_tokens = 192
        micro_batch = 2
        warmup = 4
        clip_norm = 0.1
        [run]
        sample_tokens = 8
    """)
    return folder


def train_here(config_file, overrides, world_size):
    """What one rank does: exit code, or the name and text of the error."""
    torch.set_num_threads(1)
    config, layout = load_config(config_file, overrides, world_size)
    mesh = make_mesh({"dp": layout.dp}) if world_size > 1 else Mesh.single()
    try:
        return Trainer(config, layout, mesh).run()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)


def train(folder, name, world_size=1, *overrides, function=train_here, timeout_s=60):
    """Train in real ranks; returns (what each rank returned, run directory)."""
    directory = folder / name
    settings = [f"--run.directory={directory}", *overrides]
    arguments = str(folder / "run.toml"), settings, world_size
    results = run_ranks(function, world_size, *arguments, timeout_s=timeout_s)
    return results, directory


def metrics(directory):
    return read_lines(directory / "metrics.jsonl")


def exact(directory):
    return [[line[key] for key in EXACT] for line in metrics(directory)]


def worst_difference(a, b):
    pairs = zip(metrics(a), metrics(b), strict=True)
    return max(abs(x["loss"] - y["loss"]) / abs(x["loss"]) for x, y in pairs)


def weights_of(directory):
    """Names and hashes of everything in the newest checkpoint, whatever its layout of files."""
    config, layout = load_config(directory / "config.toml", [], 1)
    trainer = Trainer(config, layout, Mesh.single())
    state = trainer.state.optimizer.state
    return {
        record.name: (record.parameter.detach().clone(), state[record.parameter]["exp_avg"].clone())
        for record in trainer.state.records
    }


# ------------------------------------------------------------------------- one process and many


@pytest.mark.trap("ACC-01")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5)])
def test_one_and_two_processes_have_equal_losses(folder, precision, tolerance):
    """Uneven masks, three micro-batches a step on both, clipping that binds in every step."""
    common = [f"--training.precision={precision}"]
    codes_1, one = train(folder, f"one-{precision}", 1, *common, "--training.micro_batch=4")
    codes_2, two = train(folder, f"two-{precision}", 2, *common)
    assert codes_1 == [0]
    assert codes_2 == [0, 0]
    assert len(metrics(one)) == 20
    assert all(line["grad_norm"] > 0.1 for line in metrics(one))
    assert len({line["tokens"] for line in metrics(one)}) == 20
    assert worst_difference(one, two) <= tolerance


@pytest.mark.trap("DA-07")
def test_evaluation_does_not_depend_on_the_number_of_processes(folder):
    _, one = train(folder, "eval-1", 1, "--training.steps=2", "--training.warmup=1",
                   "--training.precision=fp64")  # fmt: skip
    _, two = train(folder, "eval-2", 2, "--training.steps=2", "--training.warmup=1",
                   "--training.precision=fp64")  # fmt: skip
    a, b = (read_lines(d / "evaluation.jsonl")[-1] for d in (one, two))
    assert a["tokens"] == b["tokens"] > 0
    assert a["bits_per_byte"] == pytest.approx(b["bits_per_byte"], rel=1e-10)
    assert a["loss"] * a["tokens"] / math.log(2) == pytest.approx(
        a["bits_per_byte"] * sum(held_out_bytes(folder)), rel=1e-10
    )


def held_out_bytes(folder):
    config, layout = load_config(folder / "run.toml", [], 1)
    trainer = Trainer(config, layout, Mesh.single())
    yield trainer.held_out.text_bytes


def test_dropout_does_not_depend_on_the_number_of_processes(folder):
    options = ["--model.dropout=0.2", "--training.precision=fp64", "--training.steps=5"]
    _, one = train(folder, "dropout-1", 1, *options)
    _, two = train(folder, "dropout-2", 2, *options)
    assert worst_difference(one, two) <= 1e-10


# ----------------------------------------------------------------------------- stop and resume


@pytest.mark.trap("CK-01")
@pytest.mark.trap("DP-14")
@pytest.mark.trap("LR-04")
@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_and_resumed_is_the_unbroken_run_to_the_bit(folder, world_size):
    options = ["--model.dropout=0.1"]
    _, whole = train(folder, f"whole-{world_size}", world_size, *options)
    codes, parts = train(folder, f"parts-{world_size}", world_size, *options, "--run.stop_after=10")
    assert codes == [STOPPED] * world_size
    assert len(metrics(parts)) == 10
    codes, _ = train(folder, f"parts-{world_size}", world_size, *options)
    assert codes == [0] * world_size
    assert exact(parts) == exact(whole)
    ours, theirs = weights_of(parts), weights_of(whole)
    for name in theirs:
        for a, b in zip(ours[name], theirs[name]):
            assert torch.equal(a, b), name


@pytest.mark.trap("CK-06")
def test_resumed_on_another_number_of_processes_follows_the_unbroken_run(folder):
    options = ["--training.precision=fp64"]
    _, whole = train(folder, "other-whole", 1, *options)
    train(folder, "other-parts", 2, *options, "--run.stop_after=8")
    _, parts = train(folder, "other-parts", 1, *options)
    assert worst_difference(whole, parts) <= 1e-10


@pytest.mark.trap("CK-01")
def test_data_workers_do_not_change_a_run(folder):
    """No workers; two processes, then three threads on each of two ranks: the very same samples."""
    options = ["--training.precision=fp64"]
    processes = ["--data.workers=2", "--data.worker_kind=process", "--run.stop_after=7"]
    _, whole = train(folder, "workers-whole", 1, *options, "--data.workers=0")
    _, parts = train(folder, "workers-parts", 1, *options, *processes)
    assert exact(parts) == exact(whole)[:7]
    train(folder, "workers-parts", 2, *options, "--data.workers=3")
    assert worst_difference(parts, whole) <= 1e-10
    assert [line["tokens"] for line in metrics(parts)] == [
        line["tokens"] for line in metrics(whole)
    ]


def test_a_mixture_with_documents_apart_trains_and_says_how_often_it_repeats(folder, capsys):
    (folder / "second").mkdir()
    (folder / "second" / "text.txt").write_text("abcd efgh. " * 150)
    mixture = f'{{"{folder / "text"}" = 0.75, "{folder / "second"}" = 0.25}}'
    options = [f"--data.mixture={mixture}", "--data.corpus=shakespeare", "--training.steps=8",
               "--data.packing=documents", "--training.precision=fp64"]  # fmt: skip
    codes, whole = train(folder, "mixture", 1, *options)
    assert codes == [0]
    said = capsys.readouterr().out
    assert re.search(r"text: 72 of 96 samples, [\d.]+ % of an epoch", said)
    assert [loop._epochs(n) for n in (0.00612, 0.5, 1, 12.345)] == [
        "0.612 % of an epoch", "50 % of an epoch", "1.0 epochs", "12.3 epochs",
    ]  # fmt: skip
    assert "second: 24 of 96 samples" in said
    train(folder, "mixture-parts", 2, *options, "--run.stop_after=3")
    train(folder, "mixture-parts", 1, *options)
    assert worst_difference(folder / "mixture-parts", whole) <= 1e-10
    [(kind, text)], _ = train(folder, "mixture", 1, *options, "--data.packing=stream")
    assert kind == "CheckpointError"
    assert "data" in text


def test_lines_after_the_checkpoint_are_replaced_when_it_is_resumed(folder):
    _, whole = train(folder, "lines", 1, "--run.stop_after=6")
    with (whole / "metrics.jsonl").open("a") as file:  # as a run killed after its checkpoint
        file.write(json.dumps(metrics(whole)[-1] | {"step": 7, "loss": -1}) + "\n")
        file.write('{"step": 8, "lo')
    train(folder, "lines", 1)
    assert [line["step"] for line in metrics(whole)] == list(range(1, 21))
    assert all(line["loss"] > 0 for line in metrics(whole))


def test_a_finished_run_that_is_started_again_trains_no_more(folder):
    train(folder, "again", 1)
    before = exact(folder / "again")
    codes, directory = train(folder, "again", 1)
    assert codes == [0]
    assert exact(directory) == before
    assert len(read_lines(directory / "evaluation.jsonl")) == 1


def test_the_last_step_is_evaluated_once(folder):
    _, directory = train(folder, "last", 1, "--run.eval_every=10")
    assert [line["step"] for line in read_lines(directory / "evaluation.jsonl")] == [10, 20]


@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_with_another_model_or_other_data_is_refused(folder, world_size):
    name = f"identity-{world_size}"
    train(folder, name, world_size, "--run.stop_after=2")
    for setting, word in [("--model.width=32", "width"), ("--data.seed=1", "data"),
                          ("--training.seed=5", "seed")]:  # fmt: skip
        results, _ = train(folder, name, world_size, setting)
        for kind, text in results:
            assert kind == "CheckpointError"
            assert word in text


def test_a_run_never_overwrites_an_earlier_one_by_accident(folder):
    train(folder, "mine", 1, "--run.stop_after=2")
    [(kind, text)], _ = train(folder, "mine", 1, "--run.resume=false")
    assert kind == "CheckpointError"
    assert "run.resume" in text


def test_a_damaged_checkpoint_is_named(folder):
    _, directory = train(folder, "damaged", 1, "--run.stop_after=2")
    file = next((directory / "checkpoints").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-20])
    [(kind, text)], _ = train(folder, "damaged", 1)
    assert kind == "CheckpointError"
    assert file.name in text


# ------------------------------------------------------------------------ what a step may meet


def with_broken_gradients(*arguments, bad_steps, rank):
    """Train while one rank's gradient is infinite at some data steps."""
    original = loop.training_step

    def step(state, micro_batches, *rest):
        weight = state.records[0].parameter
        hook = None
        if state.data_step in bad_steps and (rank is None or state.mesh.rank("dp") == rank):
            hook = weight.register_hook(lambda gradient: gradient + math.inf)
        result = original(state, micro_batches, *rest)
        if hook:
            hook.remove()
        return result

    loop.training_step = step
    return train_here(*arguments)


@pytest.mark.trap("CLIP-08")
@pytest.mark.trap("MP-04")
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(folder):
    def function(*arguments):
        return with_broken_gradients(*arguments, bad_steps={2, 3}, rank=1)

    codes, directory = train(folder, "skips", 2, "--training.steps=6", function=function)
    assert codes == [0, 0]
    lines = metrics(directory)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert lines[2]["lr"] == lines[3]["lr"] == lines[4]["lr"]  # the update was not counted
    assert lines[2]["grad_norm"] is None  # JSON has no infinity


def test_a_run_that_stays_not_finite_ends_with_a_clear_error_and_keeps_the_last_checkpoint(folder):
    def function(*arguments):
        return with_broken_gradients(*arguments, bad_steps=range(3, 100), rank=0)

    results, directory = train(
        folder, "diverged", 2, "--training.max_skipped=4", "--run.checkpoint_every=2",
        "--run.keep=1", function=function,
    )  # fmt: skip
    for kind, text in results:
        assert kind == TrainingDiverged.__name__
        assert "data steps 3 to 6" in text
        assert "checkpoints" in text
    assert [line["skipped"] for line in metrics(directory)] == [0, 0, 0, 1, 2, 3, 4]
    newest = checkpoint.latest(directory / "checkpoints")
    assert newest.name == "step_6"  # the last one before the end; its weights are those of step 3
    assert checkpoint.read_manifest(newest).state["optimizer_step"] == 3


def test_a_loss_that_is_not_finite_is_skipped_and_shown(folder, capsys):
    [(kind, _)], directory = train(
        folder, "overflow", 1, "--training.lr=1e38", "--training.max_skipped=3"
    )
    assert kind == TrainingDiverged.__name__
    assert metrics(directory)[-1]["loss"] is None
    assert "loss -" in capsys.readouterr().out


def test_an_error_after_the_last_step_loses_no_training(folder):
    def function(*arguments):
        def fail(self):
            raise RuntimeError("the sample failed")

        Trainer._write_sample = fail
        return train_here(*arguments)

    [(_, text)], directory = train(folder, "late", 1, "--training.steps=3",
                                   "--training.warmup=1", function=function)  # fmt: skip
    assert text == "the sample failed"
    assert checkpoint.latest(directory / "checkpoints").name == "step_3"


def test_a_second_run_in_the_same_directory_is_refused(folder):
    process, directory = start(folder, "twice", "--training.steps=100000")
    wait_for_step(process, directory, 2)
    log, settings = directory / "metrics.jsonl", (directory / "config.toml").read_text()
    number = log.stat().st_ino
    results, _ = train(folder, "twice", 2, "--data.workers=0")  # known to every rank
    assert (directory / "config.toml").read_text() == settings
    assert log.stat().st_ino == number  # else the first run would write to a deleted file
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    for kind, text in results:
        assert kind == "RunInUse"
        assert "another run uses" in text
    assert process.returncode == STOPPED


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_directory_that_cannot_be_written_to_is_refused_before_data_is_prepared(
    folder, world_size
):
    (folder / "a file").write_text("")
    options = ["--run.directory=" + str(folder / "a file" / "run"), "--data.corpus=python-docs",
               f"--data.cache={folder / 'untouched'}"]  # fmt: skip
    for kind, text in train(folder, "unused", world_size, *options)[0]:
        assert kind == "ConfigError"
        assert f"run.directory {folder / 'a file' / 'run'} cannot be written to: Not a dir" in text
    assert not (folder / "untouched").exists()


def test_preparation_that_takes_long_is_announced_once(folder, capfd, monkeypatch):
    def prepare(*arguments):
        time.sleep(1)
        return right(*arguments)

    right = loop.prepare_data
    config, layout = load_config(folder / "run.toml", [f"--run.directory={folder / 'slow'}"], 1)
    monkeypatch.setattr(loop, "NOTICE_S", 60)
    Trainer(config, layout, Mesh.single())
    assert "preparing" not in capfd.readouterr().out
    monkeypatch.setattr(loop, "NOTICE_S", 0.1)
    monkeypatch.setattr(loop, "prepare_data", prepare)
    Trainer(config, layout, Mesh.single())
    (said,) = capfd.readouterr().out.splitlines()
    assert f"preparing {folder / 'text'}: " in said
    assert str(folder / "cache") in said


def test_a_stop_during_an_evaluation_does_not_wait_for_its_end(folder):
    def function(*arguments):
        right = loop.loss_sum

        def loss_sum(*given):
            os.kill(os.getpid(), signal.SIGTERM)
            return right(*given)

        loop.loss_sum = loss_sum  # used by the evaluation only
        return train_here(*arguments)

    codes, directory = train(folder, "stop-evaluation", 1, "--run.eval_every=3", function=function)
    assert codes == [STOPPED]
    assert read_lines(directory / "evaluation.jsonl") == []
    assert checkpoint.latest(directory / "checkpoints").name == "step_3"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_trains_alike_and_compiles_nothing_for_its_sample(folder):
    def function(*arguments):
        right, compiled = loop.generate, torch._dynamo.utils.counters["stats"]

        def generate(*given, **named):
            before = compiled["unique_graphs"]
            text = right(*given, **named)
            return grown.append((before, compiled["unique_graphs"])) or text

        grown, loop.generate = [], generate
        return train_here(*arguments), grown

    overrides = ["--training.steps=4", "--training.precision=fp64"]
    [(code, [(before, after)])], directory = train(
        folder, "compiled", 1, "--parallel.compile=true", *overrides,
        function=function, timeout_s=300,
    )  # fmt: skip
    assert code == 0
    assert before == after > 0
    _, plain = train(folder, "not-compiled", 1, *overrides)
    assert worst_difference(directory, plain) < 1e-10
    assert (directory / "sample.txt").read_text() == (plain / "sample.txt").read_text()


def test_a_signal_on_one_rank_stops_all_after_the_same_step(folder):
    def function(*arguments):
        original = loop.training_step

        def step(state, *rest):
            if state.data_step == 4 and state.mesh.rank("dp") == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(state, *rest)

        loop.training_step = step
        return train_here(*arguments)

    codes, directory = train(folder, "signal", 2, function=function)
    assert codes == [STOPPED, STOPPED]
    assert checkpoint.latest(directory / "checkpoints").name == "step_5"


# ---------------------------------------------------------------------------- what is reported


def test_metrics_have_the_documented_fields_and_unknown_figures_are_null(folder):
    _, directory = train(folder, "schema", 2, "--training.steps=4", "--run.log_every=2")
    lines = metrics(directory)
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert tuple(line) == FIELDS
        assert line["mfu"] is None  # no peak is known for a CPU
        assert line["tokens_per_s"] > 0
        assert line["peak_memory_bytes"] > 1e7
        assert 0 < line["comm_fraction"] < 1
    assert (directory / "sample.txt").read_text().strip()
    assert {p.name for p in directory.iterdir()} == {
        "metrics.jsonl", "evaluation.jsonl", "config.toml", "checkpoints", "sample.txt", ".lock",
    }  # fmt: skip


def test_zero_switches_logging_evaluation_and_samples_off(folder):
    _, directory = train(folder, "off", 1, "--run.log_every=0", "--run.sample_tokens=0",
                         "--training.steps=4")  # fmt: skip
    assert metrics(directory) == []
    assert len(read_lines(directory / "evaluation.jsonl")) == 1  # the last one always
    assert not (directory / "sample.txt").exists()


def test_the_written_configuration_starts_the_same_run(folder):
    _, directory = train(folder, "toml", 1, "--training.steps=3", "--training.warmup=2")
    config, _ = load_config(directory / "config.toml", [], 1)
    again, _ = load_config(
        folder / "run.toml",
        [f"--run.directory={directory}", "--training.steps=3", "--training.warmup=2"],
        1,
    )
    assert config == again


def test_old_checkpoints_are_removed_and_the_newest_kept(folder):
    _, directory = train(folder, "keep", 1, "--run.checkpoint_every=5", "--run.keep=2")
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step_15", "step_20"]


def test_mfu_is_the_papers_number():
    """PaLM 540B: 238.3 thousand tokens a second on 6,144 TPU v4 of 275 TFLOP/s is 46.2 % MFU."""
    from course_lib.model import ModelConfig, count_flops

    # The paper counts 6 x 540e9 for the matrices; take our formula's attention for its shape.
    shape = ModelConfig(layers=118, width=18_432, heads=48, kv_heads=1, vocab=256_000, context=2048)
    scores = 3 * count_flops(shape, 1, 2048)["scores"] / 2048
    wider = scores * 256 * 48 / 18_432  # its heads are 256 wide
    assert 238_300 * (6 * 540e9 + wider) / (6144 * 275e12) == pytest.approx(0.462, abs=5e-4)
    per_token = count_flops(shape, 1, 2048)["total"] / 2048
    assert model_flops_utilisation(shape, 2048, 1e5, 8, 1e15) == pytest.approx(
        per_token * 1e5 / 8e15
    )
    assert model_flops_utilisation(shape, 2048, 1e5, 8, None) is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", None), ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None), ("Tesla T4", 65e12), ("NVIDIA T400", None), ("NVIDIA H200", 989e12),
    ],
)  # fmt: skip
def test_the_peak_of_another_gpu_is_never_taken(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), "bf16") == peak


@pytest.mark.trap("ACC-12")
def test_no_metric_keeps_a_graph(folder):
    torch.set_num_threads(1)
    config, layout = load_config(folder / "run.toml", [f"--run.directory={folder / 'graph'}"], 1)
    trainer = Trainer(config, layout, Mesh.single())
    trainer._open_logs()
    batches = trainer._batches()
    live = []
    for _ in range(6):
        trainer._train_one_step(batches)
        live.append(sum(isinstance(o, torch.Tensor) for o in _tensors()))
    assert live[-1] == live[-2] == live[-3]


def _tensors():
    import gc

    gc.collect()
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]


def test_json_lines_survive_a_cut_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    log = JsonLines(path, last_step=1)
    log.write({"step": 2, "new": True})
    log.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2, "new": True}]


# -------------------------------------------------------------------------- the command line


def call(folder, *arguments):
    return main([str(folder / "run.toml"), *arguments])


def test_every_fault_of_a_configuration_is_reported_at_once_before_anything_starts(folder, capsys):
    code = call(folder, "--model.widht=32", "--training.lr=fast", "--model.norm=layernrom",
                "--rnu.keep=3", f"--run.directory={folder / 'never'}")  # fmt: skip
    told = capsys.readouterr().err
    assert code == 2
    for expected in ("model.widht", "did you mean width", "training.lr", "a number",
                     "did you mean layernorm", "rnu", "did you mean run"):  # fmt: skip
        assert expected in told, expected
    assert not (folder / "never").exists()


def test_impossible_sizes_are_refused_with_the_nearest_valid_choice(folder, capsys):
    code = call(folder, "--data.sequence_length=32", "--training.global_batch_tokens=200")
    told = capsys.readouterr().err
    assert code == 2
    assert "exceeds model.context 16" in told
    assert "use 192 or 256" in told
    assert call(folder, "--parallel.dp=3") == 2
    assert "needs 3 processes, but there are 1" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_no_toml_is_an_error_in_words(tmp_path, capsys):
    assert main([str(tmp_path / "no.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("[model\n")
    assert main([str(tmp_path / "bad.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_help_lists_every_key_with_its_meaning(capsys):
    for arguments in (["--help"], ["-h"], ["run.toml", "--help"]):
        assert main(arguments) == 0
        told = capsys.readouterr().out
        assert told.startswith("usage: ")
        for section, kind in SECTIONS.items():
            for key in fields(kind):
                assert f"--{section}.{key.name}=" in told
    assert "highest learning rate (default: 0.003)" in told


def test_a_vocabulary_below_the_bytes_is_a_fault_of_its_key(folder, capsys):
    assert call(folder, "--model.vocab=100") == 2
    assert "run.toml: 1 fault(s)\n- model.vocab 100 is too small" in capsys.readouterr().err


def test_too_few_gpus_are_told_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config, _ = load_config(ROOT / "chapters/lab/configs/tiny.toml", ["--run.device=cuda"], 1)
    for count, words in ((1, "1 process here needs a GPU, found none"),
                         (2, "2 processes here need 2 GPUs, found none")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            choose_device(config, Process(0, count, 0, count, 0))


def test_an_error_of_writing_names_the_key(folder, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    assert call(folder, f"--run.directory={tmp_path}") == 1
    assert f"metrics.jsonl' (run.directory {tmp_path})" in capsys.readouterr().err


def test_bad_data_ends_the_run_with_the_file_named(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code = call(folder, f"--data.corpus={tmp_path / 'empty'}", f"--run.directory={tmp_path / 'r'}")
    assert code == 1
    assert "empty" in capsys.readouterr().err
    cache = tmp_path / "cache"
    options = [f"--data.cache={cache}", f"--run.directory={tmp_path / 'r'}", "--training.steps=4"]
    assert call(folder, *options) == 0
    shard = max((p for p in cache.rglob("*") if "train" in p.parts and p.is_file()),
                key=lambda p: p.stat().st_size)  # fmt: skip
    shard.write_bytes(shard.read_bytes()[:-3])
    told = subprocess.run(
        [sys.executable, "-m", "course_lib.trainer", str(folder / "run.toml"), *options],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert told.returncode == 1
    assert shard.name in told.stderr
    assert "Traceback" not in told.stderr


def start(folder, name, *overrides, ranks=1, launcher=()):
    """Start a long run as users do; returns the process and its run directory."""
    directory = folder / name
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        sys.executable, *([*torchrun, *launcher] if ranks > 1 else []), "-m", "course_lib.trainer",
        str(folder / "run.toml"), f"--run.directory={directory}", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    return process, directory


def wait_for_step(process, directory, step, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = metrics(directory)
        if lines and lines[-1]["step"] >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not reached in {timeout_s} s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_saves_and_leaves_with_its_own_code(folder, number):
    process, directory = start(folder, f"stop-{number}", "--training.steps=100000")
    wait_for_step(process, directory, 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, output
    assert "Traceback" not in output
    last = metrics(directory)[-1]["step"]
    assert checkpoint.latest(directory / "checkpoints").name == f"step_{last}"


def test_torchrun_passes_a_stop_on_and_every_rank_saves(folder):
    process, directory = start(folder, "stop-torchrun", "--training.steps=100000", ranks=2)
    wait_for_step(process, directory, 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    last = metrics(directory)[-1]["step"]
    assert checkpoint.latest(directory / "checkpoints").name == f"step_{last}"


@pytest.mark.trap("CK-09")
def test_a_killed_rank_is_restarted_by_torchrun_from_the_last_checkpoint(folder):
    _, whole = train(folder, "kill-whole", 2, "--training.steps=60")
    process, directory = start(
        folder, "kill", "--training.steps=60", "--run.checkpoint_every=5", ranks=2,
        launcher=["--max-restarts=2"],
    )  # fmt: skip
    wait_for_step(process, directory, 6)
    os.kill(child_ranks(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "resumed after" in output
    assert exact(directory) == exact(whole)


def test_a_rank_that_hangs_ends_the_run_at_the_timeout_naming_the_collective(folder):
    process, directory = start(
        folder, "hang", "--training.steps=100000", "--run.timeout_s=3", ranks=2
    )
    wait_for_step(process, directory, 3)
    hanging = child_ranks(process.pid)[-1]
    os.kill(hanging, signal.SIGSTOP)
    told = ""
    for line in process.stdout:
        told += line
        if line.startswith("error:"):
            break
    os.kill(hanging, signal.SIGKILL)  # torchrun would wait half a minute for it
    process.communicate(timeout=60)
    assert process.returncode != 0
    error = told.splitlines()[-1]
    assert "all_reduce" in error
    assert "failed on rank 0" in error


def child_ranks(parent):
    """Process ids of torchrun's workers."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return sorted(
        int(pid)
        for pid in children
        if b"course_lib.trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
