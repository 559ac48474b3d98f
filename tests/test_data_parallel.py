"""Data parallelism: buckets as data, ways of summing, and ranks that stay in step."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from course_lib.classroom.checks import find
from course_lib.classroom.checks.grading import judge
from course_lib.data_parallel import (
    DataParallel,
    adopt,
    data_parallelize,
    keep_in_step,
    plan_buckets,
    without_targets,
)
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig, Transformer, build
from course_lib.oracle import random_batch
from course_lib.parameters import build_records
from tests import checks_core as core
from tests import checks_data_parallel as checks
from tests import checks_records as records
from tests.checks_core import TINY, TWO, on_ranks
from tests.exercise_cases.data_parallelism import with_mistake

ALONE = Mesh.single()
THREE_LAYERS = ModelConfig(layers=3, width=16, heads=2, vocab=50, context=8)


def planned(config=THREE_LAYERS, change=None, **sizes):
    model = build(config)
    if change is not None:
        change(model)
    rows = build_records(model, ALONE)
    return rows, plan_buckets(rows, ALONE, **sizes)


# ------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("config", [THREE_LAYERS, replace(THREE_LAYERS, tie_embeddings=False)])
def test_each_gradient_is_in_one_bucket_in_reverse_order_of_use(config):
    rows, plan = planned(config, bucket_bytes=5000)
    names = [name for bucket in plan for name in bucket.names]
    assert names == [record.name for record in reversed(rows)]  # a tied one once
    assert names[-1] == "embedding.weight"
    assert (names[0] == "head.weight") != config.tie_embeddings
    sizes = {record.name: record.parameter.numel() for record in rows}
    assert all(b.sizes == tuple(sizes[name] for name in b.names) for b in plan)


def test_a_bucket_is_closed_by_the_gradient_that_fills_it():
    _, plan = planned(bucket_bytes=5000, first_bytes=700)
    assert len(plan) > 3
    for bucket, limit in zip(plan[:-1], [700, *[5000] * len(plan)]):
        last_bytes = bucket.sizes[-1] * bucket.dtype.itemsize
        assert bucket.payload_bytes - last_bytes < limit <= bucket.payload_bytes


def test_buckets_of_one_byte_hold_one_gradient_each():
    rows, plan = planned(bucket_bytes=1)
    assert [bucket.names for bucket in plan] == [(r.name,) for r in reversed(rows)]
    assert len(planned()[1]) == 1


@pytest.mark.parametrize("name", ["gpt2", "gpt2-large", "llama-7b"])
def test_no_message_of_a_real_model_is_mere_latency(name):
    """The first bucket too: GPT-2's last norm has 6 kB, and the gradient before it 9.4 MB."""
    with torch.device("meta"):
        rows = build_records(Transformer(ModelConfig.presets()[name]), ALONE)
    assert min(bucket.payload_bytes for bucket in plan_buckets(rows, ALONE)) > 2**20


def test_buckets_closed_before_the_gradient_are_a_right_answer_too():
    verdict = judge(find("data-parallelism/1"), with_mistake(""))
    assert verdict.status == "passed", verdict.message


def test_frozen_parameters_are_left_out():
    _, plan = planned(change=checks.freeze_some)
    names = {name for bucket in plan for name in bucket.names}
    assert not names & {"embedding.weight", "blocks.0.mlp.up.weight"}
    assert planned(change=lambda model: model.requires_grad_(False))[1] == []


def test_dtypes_never_mix_and_the_last_gradient_decides_the_order():
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    model[3].double()
    model[0].double()
    for layer in model:
        core.declared(layer)
    plan = plan_buckets(build_records(model, ALONE), ALONE)
    assert [b.names for b in plan] == [("2.weight", "1.weight"), ("3.weight", "0.weight")]
    assert [b.dtype for b in plan] == [torch.float32, torch.float64]
    assert [b.payload_bytes for b in plan] == [32, 64]


def test_a_bucket_prints_its_size_and_its_ends():
    _, (bucket,) = planned(TINY)
    assert str(bucket) == "0.00 MB, 20 gradients: norm.bias … embedding.weight"


# --------------------------------------------------------------------------------- gradients


def test_a_gradient_becomes_a_view_whatever_it_was():
    parameter, view = nn.Parameter(torch.zeros(3)), torch.full((3,), 7.0)
    adopt(parameter, view)
    assert view.tolist() == [0.0, 0.0, 0.0]
    parameter.grad = torch.arange(3.0)
    adopt(parameter, view)
    assert parameter.grad is view
    assert view.tolist() == [0.0, 1.0, 2.0]
    adopt(parameter, view)
    assert view.tolist() == [0.0, 1.0, 2.0]


def test_gradients_may_be_set_to_none_or_zeroed_between_steps():
    on_ranks(checks.check_gradients_are_views, TWO)


@pytest.mark.trap("COM-02")
def test_strided_gradients_are_summed_in_every_way():
    on_ranks(checks.check_strided_gradients, TWO)


def test_gradients_are_summed_over_the_axes_that_the_record_names_in_every_way():
    on_ranks(checks.check_sums, records.DP_TP)


def test_one_rank_alone_sends_nothing_and_has_the_same_gradients():
    model = build(TINY)
    rows = build_records(model, ALONE)
    replicas = data_parallelize(model, rows, ALONE)
    model(random_batch(TINY, 2, 0).tokens).square().sum().backward()
    want = [r.parameter.grad.clone() for r in rows]
    replicas.reduce(rows, ALONE)
    assert all(torch.equal(r.parameter.grad, g) for r, g in zip(rows, want))


def test_a_parameter_frozen_after_the_plan_is_refused():
    on_ranks(checks.check_thawed_parameter_is_refused, TWO)


# ------------------------------------------------------------------------------- what is sent


@pytest.mark.trap("DP-01")
def test_each_bucket_is_sent_once_a_step_whatever_the_accumulation():
    on_ranks(checks.check_one_message_a_bucket, TWO)


def test_micro_batches_pass_unchanged_without_buckets():
    assert list(DataParallel(nn.Identity()).watch([1, 2, 3], 3)) == [1, 2, 3]


# ------------------------------------------------------------------------------ ranks in step


@pytest.mark.trap("DP-02")
@pytest.mark.trap("DP-06")
def test_ranks_with_other_numbers_of_batches_end_together_and_lose_no_sample():
    on_ranks(checks.check_uneven_batches, {"dp": 3})


def test_one_rank_alone_goes_through_its_batches():
    blank = random_batch(TINY, 2, 0)
    assert list(keep_in_step([[1], [2]], ALONE, blank)) == [[1], [2]]
    assert list(keep_in_step([], ALONE, blank)) == []


def test_a_batch_without_targets_keeps_its_inputs():
    batch = random_batch(TINY, 4, 0)
    empty = without_targets(batch)
    assert empty.valid == 0
    assert (empty.labels == -100).all()
    assert batch.valid > 0
    assert torch.equal(empty.tokens, batch.tokens)


@pytest.mark.trap("DP-04")
def test_all_ranks_take_the_same_branch():
    assert on_ranks(checks.check_decisions_are_agreed, TWO) == [[True, False]] * 2


def test_a_decision_of_one_rank_reaches_all_axes():
    on_ranks(checks.check_decisions_reach_all, {"dp": 2, "tp": 2})


def test_a_replaced_parameter_is_refused():
    on_ranks(checks.check_replaced_parameter_is_refused, TWO)


def test_other_seeds_on_each_rank_are_noticed_and_a_broadcast_would_hide_them():
    on_ranks(checks.check_seeds, TWO)


@pytest.mark.trap("CLIP-08")
@pytest.mark.trap("CLIP-02")
def test_an_overflow_on_one_rank_is_skipped_by_all_alike_in_small_buckets():
    on_ranks(checks.check_overflow_in_buckets, TWO)
