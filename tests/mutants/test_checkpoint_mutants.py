"""Faults of public training code, put back into checkpoints: their checks must find each one."""

import shutil
import warnings

import pytest
import torch

from course_lib import checkpoint, parameters
from course_lib.checkpoint import files, hugging_face, loading, manifest, pieces, saving
from course_lib.classroom.launch import RankError, run_ranks
from course_lib.mesh import Mesh
from tests import checks_checkpoint as checks
from tests import ranks_checkpoint as ranks
from tests.test_checkpoint_hugging_face import GPT, LLAMA

STRIPS = (((0, 0), (2, 4)), ((2, 0), (3, 4)))  # of a (5, 4) tensor: rows
PILLARS = (((0, 2), (5, 2)), ((0, 0), (5, 2)))  # columns, the second half first


def must_fail(check, *arguments):
    check_failed = False
    try:
        check(*arguments)
    except (AssertionError, checkpoint.CheckpointError, RankError):
        check_failed = True
    assert check_failed, f"{check.__name__} does not notice the fault"


def test_the_checks_pass_without_a_fault(tmp_path):
    checks.check_boxes(tmp_path / "boxes", (5, 4), STRIPS, PILLARS)
    checks.check_adam_goes_on(tmp_path / "adam")
    checks.check_files_hold_only_their_part(tmp_path / "part")
    check_all_ranks_hear_of_a_failure(tmp_path / "disk", {})
    check_all_ranks_take_the_same(tmp_path / "latest", {})


# --------------------------------------------------------------------------- values and boxes


def misread(monkeypatch, fault):
    """Put a fault into what a rank reads of a checkpoint: fault(value, kind)."""
    read = loading._Stored.read
    monkeypatch.setattr(
        loading._Stored, "read", lambda self, record, name, kind: fault(
            read(self, record, name, kind), kind
        )
    )  # fmt: skip


@pytest.mark.trap("CK-05")
@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_moments_or_step_not_restored(tmp_path, monkeypatch, lost):
    misread(monkeypatch, lambda value, kind: value * 0 if kind == lost else value)
    must_fail(checks.check_adam_goes_on, tmp_path)


@pytest.mark.trap("CK-05")
def test_optimizer_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "_values", lambda record, _: {pieces.WEIGHT: record.parameter})
    must_fail(checks.check_adam_goes_on, tmp_path)


@pytest.mark.trap("CK-06")
@pytest.mark.parametrize("manner", ["local", "global"])
def test_places_taken_from_the_wrong_side(tmp_path, monkeypatch, manner):
    slices = loading._slices

    def misplaced(shared, begin):
        return slices(shared, [0] * len(begin) if manner == "global" else shared[0])

    monkeypatch.setattr(loading, "_slices", misplaced)
    with pytest.raises((AssertionError, checkpoint.CheckpointError)):
        checks.check_boxes(tmp_path, (5, 4), STRIPS, PILLARS)


@pytest.mark.trap("CK-06")
def test_only_the_first_box_that_fits_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "product", lambda boxes, found: [(boxes[0], found[0])])
    must_fail(checks.check_boxes, tmp_path, (5, 4), STRIPS, PILLARS)


def test_padding_left_as_it_was(tmp_path, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **k).fill_(7))
    must_fail(checks.check_boxes, tmp_path, (5, 4), STRIPS, PILLARS)


@pytest.mark.trap("CK-08")
def test_a_views_whole_storage_written(tmp_path, monkeypatch):
    def everything(path, tensors):
        whole = {k: t if t._base is None else t._base.detach() for k, t in tensors.items()}
        return files.write_tensors(path, whole)

    monkeypatch.setattr(saving, "write_tensors", everything)
    must_fail(checks.check_files_hold_only_their_part, tmp_path)


# --------------------------------------------------------------------------- kills and damage


def check_kills_cost_nothing(folder, faults):
    """CK-09: what a kill leaves at any point of a save is whole: step 1 or step 2."""
    first = ranks.save_trained(folder / "run", "whole")
    ranks.with_fault(faults, ranks.save_and_copy, folder / "run", "whole", folder / "copies")
    second = ranks.load_newest(folder / "run", "whole")[2]
    for copy in (folder / "copies").iterdir():
        name, _, values = ranks.load_newest(copy, "whole")
        assert ranks.same(values, {"step_1": first, "step_2": second}[name])
        assert all(path in checkpoint.complete(copy) for path in copy.glob("step_*"))


def early(temporary, target, *rest, commit=saving._commit):
    """Removes the old checkpoint before the new one is there."""
    for path in checkpoint.complete(target.parent):
        shutil.rmtree(path)
    commit(temporary, target, *rest)


@pytest.mark.trap("CK-09")
@pytest.mark.parametrize(
    "faults",
    [
        {"checkpoint.saving:_commit": early},
        {"checkpoint.saving:_aside": lambda path, prefix: path},  # written under its final name
    ],
)
def test_a_save_that_a_kill_would_spoil(tmp_path, faults):
    check_kills_cost_nothing(tmp_path / "right", {})
    with warnings.catch_warnings(action="ignore"):
        must_fail(check_kills_cost_nothing, tmp_path / "wrong", faults)


@pytest.mark.trap("CK-09")
def test_a_name_trusted_without_a_look(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_incomplete", lambda path: None)
    must_fail(checks.check_damage_is_found, tmp_path)


@pytest.mark.trap("CK-09")
@pytest.mark.parametrize("left_out", ["everything", "hashes"])
def test_files_not_verified(tmp_path, monkeypatch, left_out):
    fault = files.file_fault
    no_look = (lambda *_, **__: None) if left_out == "everything" else (
        lambda path, expected, read=True: fault(path, expected, read=False)
    )  # fmt: skip
    monkeypatch.setattr(loading, "file_fault", no_look)
    must_fail(checks.check_damage_is_found, tmp_path)


def test_a_manifest_that_is_not_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_hash", lambda content: "same")
    must_fail(checks.check_altered_state_is_found, tmp_path)


def check_all_ranks_hear_of_a_failure(folder, faults, timeout_s=60):
    run_ranks(ranks.save_trained, 2, folder, "rows")
    faults = {**faults, "checkpoint.files:save_file": ranks.write_half_on_rank_1}
    one, other = run_ranks(ranks.save_on_full_disk, 2, folder, faults, timeout_s=timeout_s)
    assert one == other
    assert one[1] == ["step_1"]


def each_for_itself(mesh, work):
    try:
        return [work()] * mesh.world_size
    except OSError as error:
        raise checkpoint.CheckpointError(str(error)) from error


@pytest.mark.trap("DP-04")
@pytest.mark.trap("CK-09")
def test_a_rank_that_fails_alone(tmp_path):
    faults = {"checkpoint.saving:together": each_for_itself}
    must_fail(check_all_ranks_hear_of_a_failure, tmp_path, faults, 3)


def check_all_ranks_take_the_same(folder, faults):
    for step in (1, 2):
        checks.saved_toy(folder, step)
    chosen = run_ranks(ranks.with_fault, 2, faults, ranks.latest_on_a_slow_disk, folder)
    assert chosen == [folder / "step_2"] * 2


@pytest.mark.trap("DP-04")
def test_each_rank_looks_for_itself(tmp_path):
    faults = {"checkpoint.manifest:first_decides": lambda mesh, work: work()}
    must_fail(check_all_ranks_take_the_same, tmp_path, faults)


# --------------------------------------------------------------------------- names and strangers


@pytest.mark.trap("CK-10")
def test_wrappers_names_stripped_once(tmp_path):
    def once(path, wrappers=frozenset(parameters.WRAPPERS)):
        first, _, rest = path.partition(".")
        return rest if first in wrappers else path

    check = checks.check_wrapped_names
    faults, names = {"parameters:plain_name": once}, ["ddp(recomputing)"]
    run_ranks(check, 1, tmp_path / "right", names)
    must_fail(run_ranks, ranks.with_fault, 1, faults, check, tmp_path / "wrong", names)


@pytest.mark.trap("CK-10")
def test_missing_and_unexpected_names_let_through(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_require_model", lambda model, found: None)
    path, _ = checks.saved_toy(tmp_path)
    fewer = {"matrix": (7, 7)}
    must_fail(checks.refusal, path, *ranks.toy(Mesh.single(), "whole", shapes=fewer))


@pytest.mark.trap("CK-11")
def test_a_fallback_that_unpickles(tmp_path, monkeypatch):
    read = manifest.read_manifest

    def obliging(path):
        for old in sorted(path.glob("*.pt")):
            torch.load(old, weights_only=False)
        return read(path)

    monkeypatch.setattr(loading, "read_manifest", obliging)
    must_fail(checks.check_nothing_is_unpickled, tmp_path)


@pytest.mark.trap("CK-10")
@pytest.mark.parametrize("fault", ["not transposed", "another order", "gate and up exchanged"])
def test_weights_under_the_wrong_name(tmp_path, monkeypatch, fault):
    pytest.importorskip("transformers", reason="needs assets/requirements-peers.txt")
    names, config = hugging_face._names, LLAMA if "gate" in fault else GPT
    checks.check_transformers_agrees(tmp_path / "right", config)
    if fault == "not transposed":  # the square ones, which no shape gives away
        monkeypatch.setattr(hugging_face, "TRANSPOSED", ("c_attn.weight", "c_fc.weight",
                                                         "mlp.c_proj.weight"))  # fmt: skip
    elif fault == "another order":  # of query, key, value
        monkeypatch.setattr(
            hugging_face, "_names", lambda c: {k: v[::-1] for k, v in names(c).items()}
        )
    else:
        table = hugging_face.MODULES
        for old, new in (("gate_proj", "?"), ("up_proj", "gate_proj"), ("?", "up_proj")):
            table = table.replace(old, new)
        monkeypatch.setattr(hugging_face, "MODULES", table)
    must_fail(checks.check_transformers_agrees, tmp_path / "wrong", config)
