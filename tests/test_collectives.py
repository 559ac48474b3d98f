"""Collectives: equal to torch's own, counted, and safe with memory that is not dense."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.classroom.launch import RankError
from course_lib.collectives import (
    CollectiveError,
    DisagreementError,
    Traffic,
    autograd,
    check_agreement,
    count_traffic,
)
from course_lib.mesh import Mesh
from tests import checks_collectives as checks
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
        assert torch.equal(collectives.all_to_all(tensor, None, "x").wait(), tensor)
        assert autograd.reduce_from(tensor, None, "x") is tensor
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


def test_buffers_live_until_waited_for():
    on_ranks(checks.check_buffers, TWO)


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


# ---------------------------------------------------------------------- all-to-all, groups, bytes


def check_all_to_all(mesh: Mesh) -> None:
    """Rank r sends r + to rows to rank `to`; equal parts need no numbers."""
    ranks, rank = mesh.world_size, dist.get_rank()
    sent = [rank + to for to in range(ranks)]
    rows = torch.full((sum(sent), 2), float(rank))
    with count_traffic() as traffic:
        got = collectives.all_to_all(rows, mesh.world, "x", sent, sent).wait()
        even = collectives.all_to_all(torch.arange(2 * ranks), mesh.world, "y").wait()
    assert got[:, 1].tolist() == [source for source in range(ranks) for _ in range(rank + source)]
    assert even.tolist() == [2 * rank, 2 * rank + 1] * ranks
    uneven, equal = traffic.calls
    assert (uneven.payload_bytes, uneven.sent_bytes) == (8 * sum(sent), 8 * (sum(sent) - 2 * rank))
    assert (equal.payload_bytes, equal.sent_bytes) == (16 * ranks, 16 * (ranks - 1))
    for wrong in ((sent, sent[:-1]), ([9] * ranks, sent), (None, sent), (sent, None)):
        with pytest.raises(ValueError, match="one number a rank"):
            collectives.all_to_all(rows, mesh.world, "x", *wrong)
    with pytest.raises(ValueError, match="cannot cut 4 rows into 3 equal parts"):
        collectives.all_to_all(torch.zeros(4), mesh.world, "x")


def test_rows_go_to_all_ranks_in_equal_and_unequal_parts():
    on_ranks(check_all_to_all, {"dp": 3})


def check_strided(mesh: Mesh) -> None:
    strided = torch.arange(8.0).view(4, 2).t()
    for start in (
        lambda: collectives.all_to_all(strided, mesh.world, "x"),
        lambda: collectives.exchange(strided, 0, None, 0, mesh.world, "x"),
        lambda: collectives.exchange(None, 0, strided, 0, mesh.world, "x"),
    ):
        with pytest.raises(ValueError, match="contiguous"):
            start()


@pytest.mark.trap("COM-02")
def test_strided_rows_and_messages_are_refused():
    on_ranks(check_strided, TWO)


def check_groups(mesh: Mesh) -> None:
    with count_traffic() as traffic:
        collectives.all_reduce(torch.zeros(10), mesh.group("dp"), "gradients").wait()
        collectives.all_reduce(torch.zeros(5), mesh.group("tp"), "activations").wait()
        collectives.all_reduce(torch.zeros(1), mesh.world, "gradients").wait()
        collectives.all_gather(torch.zeros(1), mesh.world, "loss").wait()
    assert [call.group for call in traffic.calls] == ["dp", "tp", "world", "world"]
    assert traffic.payload_bytes(group="world") == 4 + 16
    assert traffic.payload_bytes("gradients", group="dp") == 40
    assert traffic.sent_bytes("gradients") == 40 + 1.5 * 4
    assert traffic.sent_bytes(kind="all_gather") == 12
    assert len(traffic.select("gradients")) == 2
    assert [transfer.call for transfer in traffic.transfers] == traffic.calls
    assert all(t.launched_s <= t.started_s <= t.finished_s for t in traffic.transfers)


def test_traffic_is_known_by_group_and_by_bytes_on_the_wire():
    on_ranks(check_groups, {"dp": 2, "tp": 2})


# --------------------------------------------------------------------------------- derivatives


@pytest.mark.trap("TP-12")
def test_the_backward_of_an_all_reduce_doesnt_multiply():
    on_ranks(checks.check_all_reduce_backward, TWO)


def check_derivatives(mesh: Mesh) -> None:
    checks.check_pairs(mesh)
    checks.check_uneven_rows_return(mesh)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_through_collectives_equal_the_dense_ones(ranks):
    on_ranks(check_derivatives, {"dp": ranks})


@pytest.mark.trap("COM-02")
def test_expanded_and_transposed_gradients_are_communicated_right():
    on_ranks(checks.check_strided_gradients, TWO)


def check_second_derivative(mesh: Mesh) -> None:
    x = torch.ones(2, requires_grad=True)
    y = autograd.copy_to(x.square(), mesh.world, "x").pow(3).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_a_second_derivative_is_refused():
    """It would leave out the ranks' other terms, without an error."""
    on_ranks(check_second_derivative, TWO)


def check_undivided(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"dimension -1 of shape \(2, 5\) does not divide over 2"):
        autograd.split_to(torch.zeros(2, 5), mesh.world, "x")


def test_a_dimension_that_doesnt_divide_is_refused():
    on_ranks(check_undivided, TWO)


# ------------------------------------------------------------------------------------- failures


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
        "all_reduce of 20 bytes for 'gradients' over 2 ranks failed on rank 0: a peer died, hangs"
    )


def check_dying_peer(mesh: Mesh) -> None:
    collectives.all_reduce(torch.zeros(5), mesh.world, "first").wait()
    if mesh.rank("dp") == 1:
        os._exit(7)
    with pytest.raises(CollectiveError, match="all_reduce of 4000 bytes for 'second'"):
        collectives.all_reduce(torch.zeros(1000), mesh.world, "second").wait()


def test_a_rank_that_dies_is_named_to_its_peers_and_to_the_caller():
    with pytest.raises(RankError, match="rank 1 left with exit code 7"):
        on_ranks(check_dying_peer, TWO)


def mismatches(group) -> dict[str, tuple]:
    """What rank 0 calls, and what rank 1 calls meanwhile."""
    four, two, c = torch.ones(4), torch.ones(2), collectives
    first = "all_reduce (sum) of float32 [4] for 'a'"
    return {
        f"{first}|all_gather of float32 [2] for 'a'": (
            lambda: c.all_reduce(four, group, "a"), lambda: c.all_gather(two, group, "a")),
        f"{first}|all_reduce (sum) of float32 [4] for 'b'": (
            lambda: c.all_reduce(four, group, "a"), lambda: c.all_reduce(four, group, "b")),
        f"{first}|all_reduce (sum) of int32 [4] for 'a'": (
            lambda: c.all_reduce(four, group, "a"), lambda: c.all_reduce(four.int(), group, "a")),
        f"{first}|all_reduce (max) of float32 [4] for 'a'": (
            lambda: c.all_reduce(four, group, "a"),
            lambda: c.all_reduce(four, group, "a", op="max")),
        f"{first}|all_reduce (sum) of float32 [2] for 'a'": (
            lambda: c.all_reduce(four, group, "a"), lambda: c.all_reduce(two, group, "a")),
        "broadcast (from 0) of float32 [4] for 'a'|broadcast (from 1) of float32 [4] for 'a'": (
            lambda: c.broadcast(four, group, "a"), lambda: c.broadcast(four, group, "a", 1)),
        "sends [2, 2] rows, receives [2, 1]|sends [2, 2] rows, receives [2, 2]": (
            lambda: c.all_to_all(four, group, "a", [2, 2], [2, 1]),
            lambda: c.all_to_all(four, group, "a", [2, 2], [2, 2])),
    }  # fmt: skip


def check_mismatches(mesh: Mesh) -> None:
    """All ranks learn what each one called, before anything is sent; then they can go on."""
    with check_agreement(), count_traffic() as traffic:
        for said, calls in mismatches(mesh.world).items():
            with pytest.raises(DisagreementError) as caught:
                calls[dist.get_rank()]()
            lines = str(caught.value).splitlines()
            for rank, what in enumerate(said.split("|")):
                assert lines[1 + rank].startswith(f"  rank {rank}, call "), lines
                assert what in lines[1 + rank], lines
        assert not traffic.calls
        assert collectives.all_reduce(torch.ones(2), mesh.world, "x").wait().tolist() == [2, 2]
        rows = collectives.all_to_all(torch.ones(2), mesh.world, "x").wait()
        assert rows.tolist() == [1, 1]


def test_a_mismatch_is_named_where_it_is_asked_for():
    on_ranks(check_mismatches, TWO)


def check_silence(mesh: Mesh) -> list[float]:
    """Two buckets in another order on each rank: no error, and numbers that belong nowhere."""
    tensors = {"a": torch.full((3,), 1.0), "b": torch.full((3,), 10.0)}
    for name in ("ab", "ba")[dist.get_rank()]:
        collectives.all_reduce(tensors[name], mesh.world, name).wait()
    return [float(tensor[0]) for tensor in tensors.values()]


def test_a_mismatch_of_equal_sizes_is_silent_without_the_check():
    """The symptom, so that nobody takes the check for needless. Right would be 2 and 20."""
    assert on_ranks(check_silence, TWO) == [[11.0, 11.0], [11.0, 11.0]]


def check_missing_peer_while_checking(mesh: Mesh) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if mesh.rank("dp") == 1:
        return ""
    with check_agreement(), pytest.raises(CollectiveError) as caught:
        collectives.all_reduce(torch.zeros(5), group, "gradients")
    return str(caught.value)


def test_a_peer_that_never_comes_is_an_error_of_the_check_too():
    message, _ = on_ranks(check_missing_peer_while_checking, TWO)
    assert "failed on rank 0" in message
