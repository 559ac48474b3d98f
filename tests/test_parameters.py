"""Parameter records: names, boxes, owners, ties, and the initial weights that follow from them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from course_lib.mesh import Mesh
from course_lib.model import Transformer, build, initial_rows
from course_lib.parameters import (
    Box,
    Layout,
    build_records,
    gather_full,
    initialise,
    lay_out,
    materialise,
    whole,
)
from tests import checks_core as core
from tests import checks_records as records
from tests import checks_replicas as replicas
from tests.checks_core import ALONE, TINY, TINY_LLAMA, on_ranks

COMPILES = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own


def names_through_ddp(mesh: Mesh) -> list[str]:
    model = nn.parallel.DistributedDataParallel(build(TINY))
    return [record.name for record in build_records(model, mesh)]


@COMPILES
def test_wrappers_leave_the_names_of_the_plain_model():
    plain = [name for name, _ in build(TINY).named_parameters()]
    assert on_ranks(names_through_ddp, ALONE) == [plain]

    def recompute(model):
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        return model

    def compile_block(model):
        model.blocks[0] = torch.compile(model.blocks[0])
        return model

    for wrap in (torch.compile, recompute, compile_block, lambda m: torch.compile(recompute(m))):
        wrapped = wrap(build(TINY))
        found = build_records(wrapped, Mesh.single())
        assert [record.name for record in found] == plain
        assert [r.parameter for r in found] == list(wrapped.parameters())


def test_a_tied_parameter_has_one_record_with_both_names():
    tied = build_records(build(TINY), Mesh.single())
    assert [(r.name, r.tied) for r in tied if r.tied] == [("embedding.weight", ("head.weight",))]
    untied = {r.name: r for r in build_records(build(TINY_LLAMA), Mesh.single())}
    assert {"embedding.weight", "head.weight"} <= untied.keys()
    assert not any(r.tied for r in untied.values())


def test_a_parameter_without_layout_is_held_whole_and_summed_over_replicas():
    for record in build_records(build(TINY), Mesh.single()):
        assert record.shape == tuple(record.parameter.shape)
        assert record.boxes == (whole(record.shape),)
        assert (record.replicas, record.summed_over, record.owner) == ((0,), {}, True)
    on_ranks(check_whole_and_summed, records.DP_TP)


def check_whole_and_summed(mesh: Mesh) -> None:
    for number, record in enumerate(build_records(build(TINY), mesh)):
        assert record.replicas == (0, 1, 2, 3)
        assert record.summed_over == {"dp": mesh.group("dp")}
        assert record.owner == (mesh.world_rank == number % 4), "replicas take turns"


def test_an_undeclared_parameter_is_refused_by_name():
    model = build(TINY)
    model.blocks[0].extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"blocks.0.extra.weight has no specification"):
        build_records(model, Mesh.single())


def test_a_box_maps_global_places_to_local_ones():
    box = Box(offset=(4, 0), size=(3, 5), local_offset=(1, 0))
    assert box.elements == 15
    assert box.place == (slice(4, 7), slice(0, 5))
    assert box.local == (slice(1, 4), slice(0, 5))


@pytest.mark.trap("TP-15")
def test_cut_parameters_start_with_the_plain_models_numbers():
    on_ranks(records.check_cut_starts_as_plain, records.DP_TP)


def test_initial_weights_are_the_plain_models_in_every_precision():
    for config in (TINY, TINY_LLAMA):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            with torch.device("meta"):
                model = Transformer(config)
            materialise(model, Mesh.single(), seed=5, dtype=dtype)
            plain = build(config, seed=5)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, plain.get_parameter(name).to(dtype)), name


def test_an_empty_shard_at_the_start_of_a_block_has_no_initial_rows():
    (record,) = build_records(
        core.declared(nn.ParameterDict({"w": torch.ones(64, 2)})), Mesh.single()
    )
    beyond = Box((64, 0), (0, 2), (0, 0))
    initialise([replace(record, shape=(64, 2), boxes=(beyond,))], seed=0)
    assert not record.parameter.any()


def test_a_part_is_drawn_as_it_lies_in_the_whole():
    (record, *_) = build_records(build(TINY), Mesh.single())
    rows = initial_rows("x", record.spec, (300, 3), 0, 300, seed=1)
    for first, last in ((0, 1), (63, 65), (64, 128), (100, 300), (299, 300)):
        part = initial_rows("x", record.spec, (300, 3), first, last, seed=1)
        assert torch.equal(part, rows[first:last])


@pytest.mark.trap("CLIP-01")
def test_every_element_has_one_owner():
    on_ranks(records.check_one_owner, records.DP_TP)


def test_gathering_gives_whole_tensors_on_one_rank_too():
    found = build_records(build(TINY), Mesh.single())
    weights = {r.name: r.parameter.detach() for r in found}
    full = gather_full(found, weights, Mesh.single())
    assert core.same(full, weights)
    full["norm.weight"].zero_()
    assert weights["norm.weight"].any(), "a proof must not share memory with the model"


def check_gathers_all_dtypes(mesh: Mesh) -> None:
    """Rank 0 holds two dtypes, rank 1 nothing (a stage without trainable parameters)."""
    model = build(TINY)
    model.norm.double()
    found = [replace(record, owner=True) for record in build_records(model, mesh)]
    found = found if mesh.rank("pp") == 0 else []
    third = {r.name: torch.full_like(r.parameter.detach(), 1 / 3) for r in found}
    full = gather_full(found, third, mesh)
    assert full["norm.weight"].tolist() == [1 / 3] * TINY.width, "digits of float64 were lost"
    assert full["embedding.weight"].dtype == torch.float32
    assert gather_full([], {}, mesh) == {}


def test_gathering_keeps_every_dtype_and_needs_no_tensor_on_each_rank():
    on_ranks(check_gathers_all_dtypes, {"pp": 2})


@pytest.mark.trap("TP-10")
@pytest.mark.trap("TP-14")
def test_kv_heads_on_more_ranks_than_heads_train_as_the_plain_model():
    on_ranks(replicas.check_kv_heads, replicas.TP4)


@pytest.mark.trap("CLIP-01")
def test_ranks_that_share_a_part_are_summed_and_counted_once():
    on_ranks(replicas.check_kv_numbers, replicas.TP4)


def test_checkpoints_of_shared_kv_heads_cross_layouts(tmp_path):
    on_ranks(replicas.check_kv_checkpoint, replicas.TP4, tmp_path)


@pytest.mark.trap("PP-04")
def test_a_tied_embedding_on_two_stages_trains_as_the_plain_model():
    on_ranks(replicas.check_tied_stages, replicas.PP)


@pytest.mark.trap("PP-04")
@pytest.mark.trap("CK-06")
def test_checkpoints_of_tied_stages_hold_one_tensor_and_cross_layouts(tmp_path):
    on_ranks(replicas.check_tied_checkpoint, replicas.PP, tmp_path)


@pytest.mark.trap("PP-03")
def test_parts_that_make_no_whole_are_refused_on_all_ranks():
    on_ranks(replicas.check_refusals, records.TP)


def test_one_tensor_has_one_layout_and_one_name_has_one_tensor():
    model = build(TINY)
    lay_out(model.embedding, weight=Layout((11, 8), (whole((11, 8)),)))
    lay_out(model.head, weight=Layout((11, 8), (whole((11, 8)),), ("tp",)))
    with pytest.raises(ValueError, match="are one tensor, but have several layouts"):
        build_records(model, Mesh.single())
    model = build(TINY)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"rank 0 holds embedding\.weight in several tensors"):
        build_records(model, Mesh.single())


def test_a_parameter_may_be_one_number(tmp_path):
    on_ranks(replicas.check_number, core.TWO, tmp_path)


def test_replicas_that_differ_are_named():
    on_ranks(records.check_replicas_are_compared, records.DP_TP)


@pytest.mark.trap("DP-13")
def test_nothing_holds_parameters_from_before_materialising():
    core.check_materialised(Mesh.single())


@COMPILES
@pytest.mark.trap("DP-13")
def test_compiling_changes_neither_names_nor_parameters():
    core.check_materialised(Mesh.single(), compiled=True)
