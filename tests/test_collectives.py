"""Collectives: equal to torch's own, counted, and safe with memory that is not dense."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.collectives import CollectiveError, Traffic, count_traffic
from course_lib.mesh import Mesh
from tests import checks_records as records
from tests.checks_core import TWO, on_ranks


@pytest.mark.trap("TP-04")
def test_every_collective_equals_torchs_own():
    on_ranks(records.check_collectives_equal_torch, {"dp": 3})


def check_broadcast_in_a_part(mesh: Mesh) -> None:
    """The source is a place in the group; torch wants the rank in the world."""
    for source in (0, 1):
        for axis, root in (
            ("dp", 2 * source + mesh.rank("tp")),
            ("tp", 2 * mesh.rank("dp") + source),
        ):
            tensor = torch.full((3,), float(dist.get_rank()))
            collectives.broadcast(tensor, mesh.group(axis), "x", source).wait()
            assert tensor.tolist() == [root] * 3, (axis, source)


def test_a_broadcast_starts_at_a_place_in_its_group():
    on_ranks(check_broadcast_in_a_part, {"dp": 2, "tp": 2})


def test_one_rank_alone_gets_the_same_shapes_and_sends_nothing():
    tensor = torch.arange(6.0).view(2, 3)
    with count_traffic() as traffic:
        assert torch.equal(collectives.all_reduce(tensor, None, "x").wait(), tensor)
        assert torch.equal(collectives.broadcast(tensor, None, "x").wait(), tensor)
        assert torch.equal(collectives.all_gather(tensor, None, "x").wait(), tensor[None])
        assert torch.equal(collectives.reduce_scatter(tensor[None], None, "x").wait(), tensor)
    assert traffic == Traffic()


@pytest.mark.trap("COM-02")
def test_tensors_that_are_not_dense_are_refused():
    on_ranks(records.check_strided_refused, TWO)


def test_calls_are_counted_by_kind_purpose_ranks_and_payload():
    on_ranks(records.check_traffic, TWO)


def test_equal_counters_end_in_any_order():
    first, second = count_traffic(), count_traffic()
    one, two = first.__enter__(), second.__enter__()
    assert one == two
    first.__exit__(None, None, None)
    assert [counter is two for counter in collectives.traffic._counters] == [True]
    second.__exit__(None, None, None)
    assert not collectives.traffic._counters


def check_pieces(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="needs 2 pieces in dimension 0"):
        collectives.reduce_scatter(torch.zeros(3, 2), mesh.world, "x")


def test_a_wrong_number_of_pieces_is_refused():
    on_ranks(check_pieces, TWO)


def check_buffers(mesh: Mesh) -> None:
    """Nobody else holds what is sent; the handle does, until it is waited for, and twice."""
    for collective, shape in (
        (collectives.all_gather, (1000,)),
        (collectives.reduce_scatter, (2, 9)),
    ):
        sent = torch.ones(shape)
        alive = weakref.ref(sent)
        handle = collective(sent, mesh.world, "x")
        del sent
        gc.collect()
        assert alive() is not None
        result = handle.wait()
        gc.collect()
        assert alive() is None
        assert handle.wait() is result
        assert result.unique().tolist() in ([1.0], [2.0])
    handle = collectives.all_reduce(torch.ones(1000), mesh.world, "x")
    gc.collect()
    assert handle.wait().unique().tolist() == [2.0]


def test_buffers_live_until_waited_for():
    on_ranks(check_buffers, TWO)


def check_waiting(mesh: Mesh) -> None:
    """Rank 1 comes late, so rank 0 waits; the time of other work is not counted."""
    import time

    with count_traffic() as traffic:
        if mesh.rank("dp") == 1:
            time.sleep(0.2)
        handle = collectives.all_reduce(torch.zeros(1), mesh.world, "x")
        handle.wait()
        before = traffic.waiting_s
        time.sleep(0.05)
        handle.wait()
    assert traffic.waiting_s == before
    assert mesh.rank("dp") == 1 or traffic.waiting_s > 0.1, traffic.waiting_s


def test_the_time_spent_waiting_is_counted():
    on_ranks(check_waiting, TWO)


def check_missing_peer(mesh: Mesh) -> str | None:
    """Rank 1 never joins; rank 0 learns which collective failed, and where."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if mesh.rank("dp") == 1:
        return None
    try:
        collectives.all_reduce(torch.zeros(5), group, "gradients").wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_collective_that_does_not_end_is_named():
    message, _ = on_ranks(check_missing_peer, TWO)
    assert message.startswith(
        "all_reduce of 20 bytes for 'gradients' over 2 ranks failed on rank 0"
    )
