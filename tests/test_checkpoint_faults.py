"""Checkpoints when things go wrong: killed saves, full disks, damage, strangers."""

import errno
import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from course_lib import checkpoint
from course_lib.checkpoint import CheckpointError, manifest
from course_lib.classroom.launch import RankError, run_ranks
from course_lib.mesh import Mesh
from tests import checks_checkpoint as checks
from tests import ranks_checkpoint as ranks

# --------------------------------------------------------------------------- atomic saves


@pytest.mark.trap("CK-09")
def test_at_every_moment_of_a_save_the_previous_checkpoint_is_there_or_the_new_one(tmp_path):
    folder, copies = tmp_path / "run", tmp_path / "copies"
    first = run_ranks(ranks.save_trained, 2, folder, "rows")[0]
    points = run_ranks(ranks.save_and_copy, 2, folder, "rows", copies)
    second = ranks.load_newest(folder, "whole")[2]
    assert not ranks.same(first, second)
    names = []
    for copy in sorted(copies.iterdir()):
        name, _, values = ranks.load_newest(copy, "interleaved")
        assert ranks.same(values, {"step_1": first, "step_2": second}[name]), copy.name
        assert all(path in checkpoint.complete(copy) for path in copy.glob("step_*")), copy.name
        names.append(name)
    assert len(names) == sum(points) > 20
    assert set(names) == {"step_1", "step_2"}


@pytest.mark.trap("CK-09")
@pytest.mark.parametrize("victim, at", [(0, 9), (1, 1)])
def test_a_killed_rank_ends_the_save_and_the_next_one_succeeds(tmp_path, victim, at):
    first = run_ranks(ranks.save_trained, 2, tmp_path, "rows")[0]
    with pytest.raises(RankError, match=f"rank {victim} was killed"):
        run_ranks(ranks.save_and_die, 2, tmp_path, "rows", victim, at)
    name, _, values = ranks.load_newest(tmp_path, "whole")
    assert name == "step_1"
    assert ranks.same(values, first)
    assert list(tmp_path.glob(".partial*"))
    ranks.save_trained(tmp_path, "whole", 3, keep=1)
    assert [child.name for child in tmp_path.iterdir()] == ["step_3"]


def test_what_a_killed_save_left_is_never_read_and_goes_with_the_next(tmp_path):
    path, _ = checks.saved_toy(tmp_path, 1)
    for name in (".partial_step_9_0123abcd", ".partial_step_8_0123abcd"):
        (tmp_path / name).mkdir()
        for child in path.iterdir():
            (tmp_path / name / child.name).write_bytes(child.read_bytes())
    (tmp_path / "step_7").mkdir()  # nothing in it
    (tmp_path / "step_6.tmp").mkdir()
    with pytest.warns(UserWarning, match="passed over: .*step_7 is no checkpoint, manifest.json"):
        assert checkpoint.latest(tmp_path) == path
    checks.saved_toy(tmp_path, 2)
    assert {child.name for child in tmp_path.iterdir()} == {
        "step_1",
        "step_2",
        "step_7",
        "step_6.tmp",
    }


def test_the_same_step_again_replaces_it(tmp_path):
    checks.saved_toy(tmp_path, 1, steps=1)
    path, state = checks.saved_toy(tmp_path, 1, steps=2)
    assert [child.name for child in tmp_path.iterdir()] == ["step_1"]
    name, _, values = ranks.load_newest(tmp_path, "whole")
    assert name == path.name
    assert ranks.same(values, state)


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    path, state = checks.saved_toy(tmp_path, 4)
    path.rename(tmp_path / ".replaced_step_4_0123abcd")
    name, _, values = ranks.load_newest(tmp_path, "whole")
    assert name == "step_4"
    assert ranks.same(values, state)


def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path):
    _, state = checks.saved_toy(tmp_path, 4)
    rename = os.rename

    def fail(source, target, **keywords):
        if Path(source).name.startswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target, **keywords)

    with mock.patch("os.rename", fail):
        assert "was not saved" in ranks.error_of(ranks.save_trained, tmp_path, "whole", 4)
    assert [child.name for child in tmp_path.iterdir()] == ["step_4"]
    assert ranks.same(ranks.load_newest(tmp_path, "whole")[2], state)


def test_the_newest_are_kept_and_always_the_one_just_saved(tmp_path):
    for step in (1, 2, 10, 9):
        ranks.save_trained(tmp_path, "whole", step, keep=2)
    assert {child.name for child in tmp_path.iterdir()} == {"step_10", "step_9"}
    ranks.save_trained(tmp_path, "whole", 3, keep=1)
    assert [child.name for child in tmp_path.iterdir()] == ["step_3"]


@contextmanager
def small_disk(folder: Path, size: str):
    """A disk that is soon full; False where this machine does not let us make one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_on_one_rank_stops_all_and_costs_nothing(tmp_path):
    saved = run_ranks(ranks.save_trained, 2, tmp_path, "rows")[0]
    faults = {"checkpoint.files:save_file": ranks.write_half_on_rank_1}
    (words, left), other = run_ranks(ranks.save_on_full_disk, 2, tmp_path, faults)
    assert (words, left) == other
    for part in ("step_2 was not saved", "rank 1", "weights_00001", os.strerror(errno.ENOSPC)):
        assert part in words
    assert left == ["step_1"]
    assert ranks.same(run_ranks(ranks.load_newest, 2, tmp_path, "rows")[0][2], saved)


def test_a_really_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "60k") as mounted:
        if not mounted:
            pytest.skip("making a small disk needs root; the test above simulates a full one")
        ranks.save_trained(tmp_path / "disk", "whole", 1)
        (tmp_path / "disk" / "filler").write_bytes(b"x" * 40_000)
        words = ranks.error_of(ranks.save_trained, tmp_path / "disk", "whole", 2)
        assert os.strerror(errno.ENOSPC) in words
        assert checkpoint.latest(tmp_path / "disk").name == "step_1"
        assert not list((tmp_path / "disk").glob(".partial*"))


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in ranks.error_of(ranks.save_trained, tmp_path / "file" / "run", "whole", 1)


def test_ranks_that_disagree_save_nothing(tmp_path):
    expected = {
        "state": "agree on the run state",
        "holes": "weight of matrix [7, 7] float32: 28 of 49 elements",
        "owners": "weight of matrix [7, 7] float32: boxes at (0, 0) and (0, 0) overlap",
    }
    one, other = run_ranks(ranks.save_with_disagreements, 2, tmp_path, list(expected))
    assert one == other
    for what, words in expected.items():
        assert words in one[what]
    assert not list(tmp_path.iterdir())


def test_state_that_json_cannot_hold_is_refused(tmp_path):
    records, optimizer = ranks.toy(Mesh.single(), "whole")
    with pytest.raises(CheckpointError, match="JSON"):
        checkpoint.save(tmp_path, 1, records, optimizer, Mesh.single(), {"x": torch.ones(1)})
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- damage and strangers


@pytest.mark.trap("CK-09")
def test_damage_is_found_and_named(tmp_path):
    checks.check_damage_is_found(tmp_path)
    checks.check_altered_state_is_found(tmp_path)


@pytest.mark.trap("CK-09")
def test_all_ranks_refuse_a_damaged_checkpoint_alike(tmp_path):
    run_ranks(ranks.save_trained, 2, tmp_path, "rows")
    for file in ("weights_00001_000.safetensors", "manifest.json"):
        content = bytearray((tmp_path / "step_1" / file).read_bytes())
        content[-20] ^= 1
        (tmp_path / "step_1" / file).write_bytes(content)
        words = run_ranks(ranks.load_words, 3, tmp_path)
        assert len(set(words)) == 1
        assert f"cannot be loaded: {file}" in words[0]


@pytest.mark.trap("DP-04")
def test_the_first_rank_decides_which_is_the_latest(tmp_path):
    for step in (1, 2):
        checks.saved_toy(tmp_path, step)
    assert run_ranks(ranks.latest_on_a_slow_disk, 2, tmp_path) == [tmp_path / "step_2"] * 2


def test_a_checkpoint_renamed_by_hand_is_not_taken_for_the_step_of_its_name(tmp_path):
    path, state = checks.saved_toy(tmp_path, 10)
    renamed = path.rename(tmp_path / "step_20")
    with pytest.raises(CheckpointError, match=r"only damaged.*it was saved as step_10"):
        checkpoint.latest(tmp_path)
    newer, _ = checks.saved_toy(tmp_path, 15, steps=4)
    with pytest.warns(UserWarning, match=r"step_20 .*it was saved as step_10"):
        assert checkpoint.latest(tmp_path) == newer
    assert "rename it back" in checks.refusal(renamed)
    renamed.rename(tmp_path / "best")  # a name that says no step may be any
    records, optimizer = ranks.toy(Mesh.single(), "whole", seed=99)
    assert checkpoint.load(tmp_path / "best", records, optimizer, Mesh.single()) == {
        "data_step": 10
    }
    assert ranks.same(ranks.everything(records, optimizer, Mesh.single()), state)


def test_nothing_there(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    checks.saved_toy(tmp_path, 3)
    assert "step_4 is no checkpoint" in checks.refusal(tmp_path / "step_4")
    assert f"did you mean {tmp_path / 'step_3'}" in checks.refusal(tmp_path)


def rewrite(path: Path, change) -> None:
    """Change a manifest's content and make it fit its own hash again."""
    outer = json.loads((path / "manifest.json").read_text())
    change(outer)
    outer["sha256"] = manifest._hash(outer["content"])
    (path / "manifest.json").write_text(json.dumps(outer))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda o: o.update(format="other"), "is of format 'other'"),
        (lambda o: o["content"].pop("files"), "manifest.json cannot be read"),
    ],
)  # fmt: skip
def test_foreign_and_forged_manifests_are_refused(tmp_path, change, words):
    path, _ = checks.saved_toy(tmp_path)
    rewrite(path, change)
    assert words in checks.refusal(path)


@pytest.mark.trap("CK-11")
def test_nothing_is_ever_unpickled(tmp_path):
    checks.check_nothing_is_unpickled(tmp_path)


@pytest.mark.trap("CK-11")
def test_the_library_has_no_way_to_unpickle():
    for path in Path(checkpoint.__file__).parent.glob("*.py"):
        text = path.read_text()
        for word in ("torch.load", "pickle.load", "import pickle", "allow_pickle", "eval("):
            assert word not in text, f"{path.name} has {word}"


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path):
    events = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source, target, **keywords):
        events.append("rename")
        rename(source, target, **keywords)

    with mock.patch("os.fsync", synced), mock.patch("os.rename", renamed):
        path, _ = checks.saved_toy(tmp_path)
    temporary = next(name for name in events if name.startswith(".partial"))
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {*before} == {temporary, *(child.name for child in path.iterdir())}
    assert before[-1] == temporary  # after the last name was put into it
    assert after == [tmp_path.name]
