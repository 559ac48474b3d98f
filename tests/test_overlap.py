"""Overlap: buckets leave inside backward, complete and in order; nothing else changes."""

from dataclasses import replace

import pytest
import torch

from course_lib.collectives import EmulatedLink, Link
from course_lib.data_parallel import Buckets, plan_buckets
from course_lib.mesh import Mesh
from course_lib.oracle import random_batch
from course_lib.overlap import Overlap, SideStream, fetch_to_device, schedule
from course_lib.parameters import build_records
from course_lib.trainer.step import training_step
from tests import checks_core as core
from tests import checks_data_parallel as checks
from tests import checks_records as records
from tests.checks_core import TINY, TWO, on_ranks

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_buckets_leave_in_the_last_backward_pass_in_order():
    on_ranks(checks.check_transfers_begin_in_backward, TWO)


def test_a_bucket_is_complete_when_it_is_sent():
    on_ranks(checks.check_sent_when_complete, TWO)


@pytest.mark.parametrize("ranks", [2, 3])
def test_overlap_changes_no_bit(ranks):
    on_ranks(checks.check_overlap_changes_no_bit, {"dp": ranks})


def test_buffers_rest_until_they_are_waited_for():
    on_ranks(checks.check_buffers_rest_until_waited_for, TWO)


def test_an_unused_parameter_holds_back_its_bucket_and_those_behind():
    on_ranks(checks.check_unused_keeps_the_order, TWO)


def test_a_parameter_that_one_rank_uses_is_summed_on_all():
    on_ranks(checks.check_rank_dependent_graph, TWO)


@pytest.mark.trap("DP-07")
def test_a_gradient_that_comes_after_its_bucket_is_refused():
    on_ranks(checks.check_late_gradient_is_refused, TWO)


def test_after_a_failed_backward_pass_the_buckets_can_be_cleared():
    on_ranks(checks.check_after_a_failed_backward, TWO)


def check_hooked_twice(mesh: Mesh) -> None:
    """The newer hooks take the gradients away from the older ones, which are used here."""
    state, older = checks.overlapped(mesh)
    Overlap(Buckets(state.records, mesh, older.buckets.plan))
    message = records.failure(training_step, state, core.own_batches(mesh, 0), 0.1, 0.0, "fp64")
    assert "was replaced while its bucket travelled" in message, message


def test_a_gradient_replaced_before_its_sum_is_refused():
    on_ranks(check_hooked_twice, TWO)


def test_a_loop_left_early_sends_nothing_more():
    on_ranks(checks.check_a_loop_left_early, TWO)


def test_the_configuration_switches_overlap():
    on_ranks(checks.check_the_switch_of_overlap, TWO)


@pytest.mark.trap("DP-07")
def test_checkpointed_blocks_used_twice_arrive_once():
    on_ranks(checks.check_checkpointed_block_used_twice, TWO)


def test_time_that_compute_covers_is_not_counted_as_waiting():
    (exposed, hidden), _ = on_ranks(checks.check_hidden_wait_is_not_counted, TWO)
    assert exposed > 0.1 > hidden


def on_a_slow_wire(mesh: Mesh) -> None:
    """The times of a step on an emulated link: the wire takes one bucket after the other."""
    state, hooks = checks.overlapped(mesh)
    wire = EmulatedLink(1e-3, 1e6)
    with wire:
        training_step(state, core.own_batches(mesh, 0), 0.1, 0.0, "fp64")
    sizes = [bucket.payload_bytes for bucket in hooks.buckets.plan]
    earliest = schedule([t.ready_s for t in hooks.times], sizes, wire.link, mesh.size("dp"))
    for before, after in zip(hooks.times, hooks.times[1:]):
        assert before.finished_s <= after.started_s
    for times, possible in zip(hooks.times, earliest):
        assert times.launched_s <= times.started_s < times.finished_s
        assert times.finished_s >= possible  # nothing is faster than its wire


def test_bucket_times_on_an_emulated_link_follow_the_schedule():
    on_ranks(on_a_slow_wire, TWO)


# -------------------------------------------------------------------------------- the schedule


def test_each_bucket_waits_to_be_ready_and_for_the_wire():
    link = Link(latency_s=0.0, bytes_per_s=10.0)  # with two ranks a byte of payload is one sent
    assert schedule([1, 2, 10], [20, 30, 10], link, 2) == [3.0, 6.0, 11.0]
    assert schedule([1, 2, 10], [20, 30, 10], replace(link, latency_s=0.5), 2) == [4.0, 8.0, 12.0]
    assert schedule([], [], link, 2) == []


def test_a_bucket_that_is_ready_first_still_keeps_its_place():
    link = Link(latency_s=0.0, bytes_per_s=1.0)
    assert schedule([5, 0], [1, 1], link, 2) == [6.0, 7.0]


def test_equal_buckets_hide_all_but_the_last():
    """k buckets, ready at even times, on a wire as fast as backward: (k - 1) / k is hidden."""
    for k in (1, 2, 5, 10):
        ready = [(i + 1) / k for i in range(k)]
        exposed = schedule(ready, [1] * k, Link(0.0, float(k)), 2)[-1] - 1
        assert exposed == pytest.approx(1 / k)


# -------------------------------------------------------------------------------- side streams


def test_on_a_cpu_batches_pass_in_order_and_the_side_stream_does_nothing():
    batches = [random_batch(TINY, 2, step) for step in range(3)]
    fetched = list(fetch_to_device(iter(batches), torch.device("cpu")))
    assert [b.step for b in fetched] == [0, 1, 2]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(fetched, batches))
    side = SideStream(torch.device("cpu"))
    side.follow()
    with side.queue():
        side.lead([torch.ones(1)])


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("count", [0, 1, 4])
def test_batches_on_a_gpu_are_whole_although_compute_is_busy(count):
    device = torch.device("cuda")
    batches = [random_batch(TINY, 64, step) for step in range(count)]
    busy = torch.randn(2048, 2048, device=device)
    sums = []
    for batch in fetch_to_device(batches, device):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append((batch.step, batch.tokens.sum()))
        del batch  # its memory may be used again, but not before the sum is made
    assert [(step, int(total)) for step, total in sums] == [
        (b.step, int(b.tokens.sum())) for b in batches
    ]


@pytest.mark.gpu
@ON_GPU
def test_two_streams_wait_for_each_other_where_told():
    device = torch.device("cuda")
    side, big = SideStream(device), torch.zeros(1 << 24, device=device)
    for _ in range(50):
        big += 1
    side.follow()
    with side.queue():
        doubled = big * 2
    side.lead([doubled])
    big.zero_()  # after `doubled` was made, since compute waits for the side
    assert float(doubled.min()) == float(doubled.max()) == 100


@pytest.mark.gpu
@ON_GPU
def test_hooks_on_a_gpu_leave_the_gradients_of_a_plain_backward():
    mesh = Mesh.single("cuda")
    model = core.parallelize(TINY, core.TrainingConfig(), mesh).model
    rows = build_records(model, mesh)
    batch = random_batch(TINY, 4, 0).to("cuda")
    model(batch.tokens).square().sum().backward()
    want = [r.parameter.grad.clone() for r in rows]
    model.zero_grad(set_to_none=True)
    hooks = Overlap(Buckets(rows, mesh, plan_buckets(rows, mesh, checks.SMALL_BUCKETS)))
    for fetched in hooks.watch([batch], 1):
        model(fetched.tokens).square().sum().backward()
    hooks.reduce(rows, mesh)
    assert all(torch.equal(r.parameter.grad, g) for r, g in zip(rows, want))
