"""Going on with an earlier run: what forbids it is named, and what has changed is said."""

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from course_lib.checkpoint import CheckpointError, manifest
from course_lib.trainer import loop
from course_lib.trainer.loop import STOPPED
from course_lib.trainer.resume import require_same_run, settings_of
from course_lib.trainer.settings import load_config
from tests.test_trainer import (
    folder,  # noqa: F401  the fixture
    metrics,
    train,
    train_here,
)
from tests.test_trainer_state import train_alone

SAVED = {
    "settings": {
        "model.width": "128", "model.vocab": "512", "model.bias": "true",
        "data.corpus": '"shakespeare"', "data.workers": "1", "data.cache": '"none"',
        "training.seed": "0", "training.lr": "0.001", "training.steps": "20",
        "parallel.overlap": "true",
    },
    "data_fingerprint": "ab",
}  # fmt: skip


def compared(fingerprint="ab", saved=SAVED, **changes):
    """What has changed, where these settings are other ones now; None: no such setting."""
    now = SAVED["settings"] | {name.replace("__", "."): text for name, text in changes.items()}
    now = {name: text for name, text in now.items() if text is not None}
    return require_same_run("step_1", saved, {"settings": now, "data_fingerprint": fingerprint})


def refused(*arguments, **changes) -> str:
    with pytest.raises(CheckpointError) as caught:
        compared(*arguments, **changes)
    return str(caught.value)


# ------------------------------------------------------------------------------ what forbids it


def test_the_same_run_may_go_on():
    assert compared() == []


def test_each_setting_that_makes_it_another_run_is_named_with_both_values():
    words = refused("cd", data__corpus='"python-docs"', model__width="256", training__seed="5",
                    training__lr="0.1")  # fmt: skip
    assert words.startswith("step_1 is of another run: ")
    assert '[data] corpus was "shakespeare", is "python-docs"' in words
    assert "[model] width was 128, is 256" in words
    assert "[training] seed was 0, is 5" in words
    assert "run.directory" in words
    for other in ("lr", "vocab", "itself", "ab", "cd"):
        assert other not in words.split(), other


def test_a_setting_that_only_one_of_the_two_knows_is_named():
    words = refused(model__bias=None, model__experts="4")
    assert "[model] bias was true, is absent" in words
    assert "[model] experts was absent, is 4" in words


def test_equal_settings_with_another_text_blame_the_text_or_the_tokenizer():
    for changes in ({}, {"data__workers": "3", "data__cache": '"/elsewhere"'}):
        words = refused("cd", **changes)
        assert "[data] settings are as they were, but the text or the tokenizer itself" in words
        assert "workers" not in words
        assert "cache" not in words


def test_another_vocabulary_alone_explains_other_data():
    words = refused("cd", model__vocab="300")
    assert "[model] vocab was 512, is 300" in words
    assert "[data]" not in words


OLDER = {  # before settings were saved
    "identity": {
        "model": {"width": 128, "vocab": 512, "bias": True},
        "data": "ab",
        "training": {"seed": 0},
    }
}


def test_an_older_checkpoint_is_taken_or_refused_by_what_it_knows():
    assert compared(saved=OLDER, training__lr="0.1", data__workers="3") == []
    assert "[model] width was 128, is 256" in refused(saved=OLDER, model__width="256")
    assert "[training] seed was 0, is 1" in refused(saved=OLDER, training__seed="1")
    words = refused("cd", OLDER, data__corpus='"python-docs"')
    assert "[data] is not the same" in words
    assert "older checkpoint" in words


def test_a_checkpoint_that_the_trainer_did_not_write_is_refused():
    with pytest.raises(CheckpointError, match="step_1 was not saved by the trainer"):
        compared(saved={"data_step": 3})


# ------------------------------------------------------------------------------ what may change


def test_what_may_change_is_listed_in_the_order_of_the_file():
    assert compared(training__steps="30", training__lr="0.0005", data__workers="3") == [
        "data.workers 1 -> 3", "training.lr 0.001 -> 0.0005", "training.steps 20 -> 30",
    ]  # fmt: skip


def test_data_settings_that_made_the_same_samples_may_change():
    """Such as another path of the same text."""
    changed = compared(data__corpus='"copy"')
    assert changed == ['data.corpus "shakespeare" -> "copy"']


def test_settings_are_kept_as_the_configuration_file_writes_them():
    tables = {"data": {"cache": None, "mixture": {"b": 1.0, "a": 2.0}}, "model": {"bias": True}}
    assert settings_of(tables) == {
        "data.cache": '"none"', "data.mixture": '{"b" = 1.0, "a" = 2.0}', "model.bias": "true",
    }  # fmt: skip
    assert settings_of({"x": {"betas": (0.9, 0.95)}}) == settings_of({"x": {"betas": [0.9, 0.95]}})


# ------------------------------------------------------------------------------------ real runs


def test_a_run_says_what_has_changed_since(folder, capsys):  # noqa: F811
    name = "changed"
    train_alone(folder, name, "--training.lr=0.001", "--run.stop_after=2")
    capsys.readouterr()
    result, directory = train_alone(folder, name, "--training.lr=0.0005", "--training.steps=5",
                                    "--training.micro_batch=1", "--run.stop_after=1")  # fmt: skip
    assert result == STOPPED
    changes = "training.steps 20 -> 5, training.micro_batch 2 -> 1, training.lr 0.001 -> 0.0005"
    said = capsys.readouterr().out
    assert f"resumed after 2 steps from {directory / 'checkpoints'}; changed since: {changes}" in (
        said
    )
    train_alone(folder, name, "--training.lr=0.0005", "--training.steps=5",
                "--training.micro_batch=1")  # fmt: skip
    said = capsys.readouterr().out
    assert f"resumed after 3 steps from {directory / 'checkpoints'}\n" in said
    assert [line["step"] for line in metrics(directory)] == [1, 2, 3, 4, 5]


def test_a_refused_run_reads_what_differs(folder):  # noqa: F811
    name = "differs"
    train_alone(folder, name, "--run.stop_after=1")
    (kind, text), _ = train_alone(folder, name, "--data.seed=1", "--model.width=32")
    assert kind == "CheckpointError"
    assert "[data] seed was 0, is 1" in text
    assert "[model] width was 16, is 32" in text
    (kind, text), _ = train_alone(folder, name, "--data.packing=stream")
    assert '[data] packing was "pad", is "stream"' in text
    corpus = folder / "text" / "00.txt"
    before = corpus.read_text()
    try:
        corpus.write_text("another text")
        (kind, text), _ = train_alone(folder, name)
    finally:
        corpus.write_text(before)
    assert kind == "CheckpointError"
    assert "the text or the tokenizer itself" in text


def test_a_checkpoint_from_before_settings_were_saved_goes_on(folder):  # noqa: F811
    name = "older"
    _, directory = train_alone(folder, name, "--run.stop_after=1")
    path = directory / "checkpoints" / "step_1" / "manifest.json"
    outer = json.loads(path.read_text())
    state = outer["content"]["state"]
    del state["settings"]
    config, _ = load_config(directory / "config.toml", [], 1)
    kept = ("global_batch_tokens", "precision", "optimizer", "seed")
    state["identity"] = {
        "model": vars(config.model),
        "data": state.pop("data_fingerprint"),
        "training": {key: getattr(config.training, key) for key in kept},
    }
    outer["sha256"] = manifest._hash(outer["content"])
    path.write_text(json.dumps(outer))
    (_, text), _ = train_alone(folder, name, "--training.seed=1")
    assert "[training] seed was 0, is 1" in text
    assert train_alone(folder, name, "--training.lr=0.1", "--training.steps=5")[0] == 0


def with_other_text_on_rank_1(config_file, overrides, world_size):
    """As a folder on one node that differs from the others'."""

    def prepare(*arguments, prepare=loop.prepare_data):
        prepared = prepare(*arguments)
        return replace(prepared, fingerprint="other") if dist.get_rank() == 1 else prepared

    with mock.patch.object(loop, "prepare_data", prepare):
        return train_here(config_file, overrides, world_size)


def test_a_text_that_differs_on_one_rank_is_refused_by_all(folder):  # noqa: F811
    train(folder, "one-rank", 2, "--run.stop_after=1")
    results, _ = train(folder, "one-rank", 2, function=with_other_text_on_rank_1)
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == "CheckpointError"
    assert "rank 1: " in text
    assert "the text or the tokenizer itself" in text
