"""Checkpoints: any layout loads any other's, a killed save costs nothing, damage is named."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from course_lib import checkpoint
from course_lib.boxes import tiling_fault
from course_lib.checkpoint import files, saving
from course_lib.classroom.launch import run_ranks
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ParameterSpec, build, declare
from course_lib.parameters import Box, Layout, build_records, lay_out, materialise, whole
from course_lib.training import TrainingConfig, make_optimizer
from tests import checks_checkpoint as checks
from tests import ranks_checkpoint as ranks

# --------------------------------------------------------------------------- layouts


@pytest.mark.trap("CK-06")
def test_57_numbers_survive_worlds_of_2_1_4_2(tmp_path):
    saved = run_ranks(ranks.save_trained, 2, tmp_path, "padded")[0]
    assert sum(saved[name].numel() for name in ranks.SHAPES) == 57
    assert ranks.same(ranks.load_and_save(tmp_path, "columns", 2), saved)
    for step, world, manner in ((3, 4, "interleaved"), (4, 2, "rows")):
        for state in run_ranks(ranks.load_and_save, world, tmp_path, manner, step):
            assert ranks.same(state, saved)
    for name, state, values in run_ranks(ranks.load_newest, 4, tmp_path, "columns"):
        assert name == "step_4"
        assert state == {"data_step": 4}
        assert ranks.same(values, saved)


@pytest.mark.trap("CK-06")
@pytest.mark.trap("CK-01")
@pytest.mark.trap("DP-14")
def test_training_goes_on_the_same_on_any_number_of_ranks(tmp_path):
    losses, weights = run_ranks(ranks.train, 2, tmp_path, 0, 6, save_at=3)[0]
    resumed, same_weights = run_ranks(ranks.train, 2, tmp_path, 3, 6, resume=True)[0]
    assert resumed == losses[3:]
    assert same_weights == weights
    alone, _ = ranks.train(tmp_path, 3, 6, resume=True)
    on_four, _ = run_ranks(ranks.train, 4, tmp_path, 3, 6, resume=True)[0]
    for other in (alone, on_four):
        assert other[0] == pytest.approx(losses[3], abs=1e-6)
        assert other == pytest.approx(losses[3:], abs=1e-4)  # Adam spreads the last digit


class Tied(nn.Module):
    """Embedding and head share a weight; as two stages, each holds a copy of it."""

    def __init__(self, stage: int | None = None):
        super().__init__()
        names = {None: ("embedding", "first", "second", "head"), 0: ("embedding", "first"),
                 1: ("second", "head")}[stage]  # fmt: skip
        for name in names:
            layer = declare(nn.Linear(4, 4, bias=False), weight=ParameterSpec(std=1.0))
            if stage is not None:
                lay_out(layer, weight=Layout((4, 4), (whole((4, 4)),)))
            setattr(self, name, layer)
        self.whole = stage is None
        self.tie()

    def tie(self):
        if self.whole:
            self.head.weight = self.embedding.weight
        return self


def stage_of_tied(folder, action: str, seed: int):
    mesh = make_mesh({"pp": dist.get_world_size()} if dist.is_initialized() else {})
    stages = mesh.size("pp") > 1
    with torch.device("meta"):
        model = Tied(mesh.rank("pp") if stages else None)
    records = materialise(model, mesh, seed)
    with torch.no_grad():
        for record in records:  # the two copies must be equal, as training keeps them
            if record.name in ("embedding.weight", "head.weight"):
                record.parameter.fill_(seed + 0.5)
    optimizer = ranks.adamw(records)
    if action == "save":
        for record in records:
            record.parameter.grad = torch.full_like(record.parameter, 0.25)
        optimizer.step()
        checkpoint.save(folder, 1, records, optimizer, mesh, {})
    else:
        checkpoint.load(checkpoint.latest(folder, mesh), records, optimizer, mesh)
    return {
        name: (record.parameter.detach(), optimizer.state[record.parameter]["exp_avg"])
        for record in records
        for name in (record.name, *record.tied)
    }


@pytest.mark.trap("CK-06")
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_tied_weights_cross_pipeline_stages(tmp_path, before, after):
    def on(world, *arguments):
        alone = world == 1
        parts = [stage_of_tied(*arguments)] if alone else run_ranks(stage_of_tied, 2, *arguments)
        return {name: values for part in parts for name, values in part.items()}

    old, new = on(before, tmp_path, "save", 1), on(after, tmp_path, "load", 2)
    assert (
        old.keys()
        == new.keys()
        == {f"{n}.weight" for n in ("embedding", "first", "second", "head")}
    )
    for name in old:
        assert all(torch.equal(a, b) for a, b in zip(old[name], new[name])), name


def test_an_untied_checkpoint_is_not_forced_into_a_tied_model(tmp_path):
    untied = build(replace(ranks.SMALL, tie_embeddings=False))
    mesh = Mesh.single()
    path = checkpoint.save(tmp_path, 1, build_records(untied, mesh), None, mesh, {})
    words = checks.refusal(path, build_records(build(ranks.SMALL, seed=2), mesh))
    assert "embedding.weight and head.weight differ in it, here they are tied" in words


@st.composite
def tilings(draw, shape):
    """A random cut of a shape into rectangles, in any order."""
    pieces = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        offset, size = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        first = (*size[:axis], at, *size[axis + 1 :])
        second = (*size[:axis], size[axis] - at, *size[axis + 1 :])
        moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        pieces += [(offset, first), (moved, second)]
    return draw(st.permutations([p for p in pieces if math.prod(p[1])]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_boxes_load_any_others(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    pieces = [data.draw(tilings(shape)) for _ in range(2)]
    checks.check_boxes(tmp_path_factory.mktemp("boxes"), shape, *pieces)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_tilings_are_told_from_holes_and_overlaps(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = [Box(offset, size, offset) for offset, size in data.draw(tilings(shape))]
    assert tiling_fault(shape, boxes) is None
    place = data.draw(st.integers(0, len(boxes) - 1))
    assert "elements" in tiling_fault(shape, boxes[:place] + boxes[place + 1 :])
    assert "overlap" in tiling_fault(shape, [*boxes, boxes[place]])
    boxes[place] = replace(boxes[place], offset=tuple(o + 5 for o in boxes[place].offset))
    assert "leaves" in tiling_fault(shape, boxes)


# --------------------------------------------------------------------------- values


@pytest.mark.trap("CK-05")
def test_adam_goes_on_where_it_was(tmp_path):
    checks.check_adam_goes_on(tmp_path)


@pytest.mark.trap("CK-08")
def test_a_view_is_saved_without_its_storage(tmp_path):
    checks.check_files_hold_only_their_part(tmp_path)


@pytest.mark.trap("CK-08")
def test_shards_are_as_small_as_what_they_hold(tmp_path):
    shapes = {"matrix": (64, 512)}

    def save_sharded(folder):
        mesh = ranks.mesh_over_tp()
        records, optimizer = ranks.toy(mesh, "padded", shapes=shapes)
        ranks.take_steps(records, optimizer)
        checkpoint.save(folder, 1, records, optimizer, mesh, {})

    run_ranks(save_sharded, 4, tmp_path)
    for path in (tmp_path / "step_1").glob("*.safetensors"):
        payload = 16 * 512 * 4 * (2 if "optimizer" in path.name else 1)
        assert payload < path.stat().st_size < 1.02 * payload, path.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_files_are_what_safetensors_reads(tmp_path, dtype):
    tensors = {
        "odd": torch.arange(3).to(dtype),
        "strided": torch.arange(12).view(3, 4).to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "double": torch.tensor([0.1], dtype=torch.float64),
    }
    entry = files.write_tensors(tmp_path / "file.safetensors", tensors)
    found = load_file(tmp_path / "file.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[k], t) and found[k].dtype == t.dtype for k, t in tensors.items())
    assert files.file_fault(tmp_path / "file.safetensors", entry) is None
    (tmp_path / "usual").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("file.safetensors", "usual")]
    assert modes[0] == modes[1]  # colleagues can read it


def test_a_rank_writes_files_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FILE_BYTES", 150)
    path, state = checks.saved_toy(tmp_path)
    sizes = [len(load_file(file)) for file in sorted(path.glob("weights*"))]
    assert sizes == [1, 2]  # 196 bytes, then 28 and 4
    assert ranks.same(ranks.load_newest(tmp_path, "whole")[2], state)


def test_optimizer_state_comes_back_in_kind(tmp_path):
    mesh, dtype = Mesh.single(), torch.float64
    model = build(ranks.SMALL, dtype=dtype)
    records = build_records(model, mesh)
    pairs = [(r.parameter, r.spec.decay) for r in records]
    optimizer = make_optimizer(TrainingConfig(), pairs)
    ranks.take_steps(records, optimizer, 2)
    checkpoint.save(tmp_path, 2, records, optimizer, mesh, {})
    fresh = make_optimizer(TrainingConfig(), pairs)
    checkpoint.load(tmp_path / "step_2", records, fresh, mesh)
    for parameter, state in optimizer.state.items():
        loaded = fresh.state[parameter]
        assert state.keys() == loaded.keys()
        for kind, value in state.items():
            assert torch.equal(value, loaded[kind])
            assert (value.dtype, value.device) == (loaded[kind].dtype, loaded[kind].device)
    ranks.take_steps(records, fresh, 1)  # the fused update accepts them


def test_sgd_has_no_state_and_weights_load_alone(tmp_path):
    mesh = Mesh.single()
    records, adam = ranks.toy(mesh, "whole")
    sgd = torch.optim.SGD([r.parameter for r in records], lr=0.1)
    ranks.take_steps(records, sgd)
    path = checkpoint.save(tmp_path, 3, records, sgd, mesh, {"lr": 0.1})
    assert sorted(child.name for child in path.iterdir()) == [
        "manifest.json",
        "weights_00000_000.safetensors",
    ]
    assert checkpoint.load(path, records, sgd, mesh) == {"lr": 0.1}
    words = checks.refusal(path, records, adam)
    assert "state of SGD" in words
    assert "AdamW" in words
    assert checkpoint.load(path, records, None, mesh) == {"lr": 0.1}
    plain = load_file(path / "weights_00000_000.safetensors")  # anyone can read an undivided one
    assert all(torch.equal(plain[r.name], r.parameter) for r in records)


def test_weights_alone_need_no_optimizer_files(tmp_path):
    path, state = checks.saved_toy(tmp_path)
    (path / "optimizer_00000_000.safetensors").write_bytes(b"damaged")
    records, optimizer = ranks.toy(Mesh.single(), "whole", seed=99)
    checkpoint.load(path, records, None, Mesh.single())
    assert all(torch.equal(r.parameter, state[r.name]) for r in records)
    assert "optimizer_00000" in checks.refusal(path, records, optimizer)


def test_a_parameter_without_saved_moments_is_refused(tmp_path):
    mesh = Mesh.single()
    records, _ = ranks.toy(mesh, "whole")
    some = torch.optim.AdamW([r.parameter for r in records[:2]], lr=0.1, fused=True)
    ranks.take_steps(records, some)
    path = checkpoint.save(tmp_path, 1, records, some, mesh, {})
    assert "no AdamW state of scale" in checks.refusal(path)


@pytest.mark.trap("CK-10")
def test_wrappers_do_not_change_names(tmp_path):
    run_ranks(checks.check_wrapped_names, 1, tmp_path)


# --------------------------------------------------------------------------- other models and runs


@pytest.mark.trap("CK-10")
def test_another_model_is_refused_with_both_sides_named(tmp_path):
    mesh = Mesh.single()
    records = build_records(build(ranks.SMALL), mesh)
    path = checkpoint.save(tmp_path, 1, records, None, mesh, {})

    def words_for(**change):
        other = build_records(build(replace(ranks.SMALL, **change)), mesh)
        return checks.refusal(path, other)

    wider = words_for(vocab=30)
    assert "embedding.weight is [29, 16] float32 in the checkpoint, [30, 16] float32 here" in wider
    deeper = words_for(layers=3)
    assert "blocks.2.attention_norm.weight is absent in the checkpoint, [16] float32 here" in deeper
    assert "more" in deeper
    doubles = build_records(build(ranks.SMALL, dtype=torch.float64), mesh)
    assert "[29, 16] float32 in the checkpoint, [29, 16] float64 here" in checks.refusal(
        path, doubles
    )


def test_the_newest_is_the_one_of_the_highest_step_not_of_the_last_name(tmp_path):
    for step in (9, 10, 100, 11):
        checks.saved_toy(tmp_path, step)
    assert checkpoint.latest(tmp_path, Mesh.single()).name == "step_100"
    assert [path.name for path in checkpoint.complete(tmp_path)] == [
        "step_9", "step_10", "step_11", "step_100",
    ]  # fmt: skip


def test_a_stored_run_can_be_looked_at_without_a_model(tmp_path):
    path, _ = checks.saved_toy(tmp_path, 5)
    found = checkpoint.read_manifest(path)
    assert (found.step, found.optimizer, found.state) == (5, "AdamW", {"data_step": 5})
    assert {(p.name, p.kind) for p in found.pieces} == {
        (name, kind)
        for name in ranks.SHAPES
        for kind in ("weight", "exp_avg", "exp_avg_sq", "step")
    }
    assert found.mesh == {"pp": 1, "dp": 1, "tp": 1}
