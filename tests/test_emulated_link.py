"""The emulated link: never faster than the formula, one queue, hidden by compute.

Nothing here says how fast a machine is: times of the wire are computed, times of waits only have
lower bounds. tests/bench/link.py measures how close they come.
"""

import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.collectives import (
    EmulatedLink,
    Link,
    count_traffic,
    emulation,
    exchange,
    rings,
    time_of,
)
from course_lib.collectives.emulation import measure_gloo
from course_lib.mesh import Mesh
from tests.bench import link
from tests.checks_core import TWO, on_ranks

FAST = 1e12  # what gloo is said to move, so that nothing is measured
LINK = Link(2e-3, 1e6)


def wire() -> EmulatedLink:
    return EmulatedLink(LINK.latency_s, LINK.bytes_per_s, FAST)


def check_every_kind(mesh: Mesh) -> list:
    """Results stay right; each call takes the formula's time; returns the transfers."""
    ranks, group = mesh.world_size, mesh.world
    ones = torch.ones(ranks, 500)
    calls = {
        "all_reduce": lambda: collectives.all_reduce(ones.clone(), group, "x"),
        "all_gather": lambda: collectives.all_gather(ones[0], group, "x"),
        "reduce_scatter": lambda: collectives.reduce_scatter(ones, group, "x"),
        "broadcast": lambda: collectives.broadcast(ones.clone(), group, "x"),
        "all_to_all": lambda: collectives.all_to_all(ones, group, "x"),
    }
    with count_traffic() as traffic, wire():
        for kind, start in calls.items():
            begin = time.perf_counter()
            result = start().wait()
            seconds = time.perf_counter() - begin
            summed = kind in ("all_reduce", "reduce_scatter")
            assert result.unique().tolist() == [ranks if summed else 1], kind
            assert seconds >= time_of(kind, ones.nbytes, ranks, LINK), (kind, seconds)
    return traffic.transfers


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_take_the_formulas_time_from_the_last_ranks_arrival(ranks):
    by_rank = on_ranks(check_every_kind, {"dp": ranks})
    for same_call in zip(*by_rank):
        call = same_call[0].call
        seconds = time_of(call.kind, call.payload_bytes, ranks, LINK)
        last = max(transfer.launched_s for transfer in same_call)
        for transfer in same_call:
            assert transfer.started_s == last
            assert transfer.finished_s == pytest.approx(last + seconds, abs=1e-9)


def check_late_rank(mesh: Mesh) -> float:
    with wire():
        time.sleep(0.1 * dist.get_rank())
        launched = time.perf_counter()
        collectives.all_reduce(torch.ones(1), mesh.world, "x").wait()
        return time.perf_counter() - launched


def test_a_late_rank_delays_all():
    waited, _ = on_ranks(check_late_rank, TWO)
    assert waited > 0.09  # 0.1 s late, but for the ranks' own starts


def check_queue(mesh: Mesh) -> None:
    """Three transfers launched at once follow one another, in whatever order they're waited for."""
    naps = []
    emulation.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=naps.append)
    with count_traffic() as traffic, wire():
        sizes = [1000, 2000, 3000]
        handles = [collectives.all_reduce(torch.ones(n), mesh.world, str(n)) for n in sizes]
        ends = [handle.finish_time for handle in handles]
        time.sleep(max(ends[-1] - time.perf_counter(), 0))  # compute in the meantime
        for handle in reversed(handles):
            handle.wait()
    assert not naps, "nothing was left to wait for"
    transfers = traffic.transfers[::-1]
    assert [transfer.call.purpose for transfer in transfers] == ["1000", "2000", "3000"]
    assert [transfer.finished_s for transfer in transfers] == ends
    for transfer, size in zip(transfers, sizes):
        seconds = time_of("all_reduce", 4 * size, 2, LINK)
        assert math.isclose(transfer.finished_s - transfer.started_s, seconds, abs_tol=1e-9)
    for earlier, later in pairwise(transfers):
        assert later.started_s >= earlier.finished_s


def test_transfers_queue_and_compute_hides_them():
    on_ranks(check_queue, TWO)


def check_messages(mesh: Mesh) -> None:
    """A ring of our own, of which the link knows nothing, takes the time of its messages."""
    tensor = torch.ones(1500)
    with wire():
        begin = time.perf_counter()
        total = rings.all_reduce(tensor, mesh.world)
        seconds = time.perf_counter() - begin
        assert total.unique().tolist() == [mesh.world_size]
        assert seconds >= time_of("all_reduce", tensor.nbytes, mesh.world_size, LINK)
        begin = time.perf_counter()
        rings.broadcast(tensor, mesh.world)
        if dist.get_rank() == mesh.world_size - 1:  # the last leaf of the tree
            assert time.perf_counter() - begin >= time_of("send", tensor.nbytes, 2, LINK)


def test_messages_between_two_ranks_take_time_too():
    on_ranks(check_messages, {"dp": 3})


def check_times_of_messages(mesh: Mesh) -> None:
    """By the wire's own clock, so that no load matters: latency, bytes, and one queue for all."""
    other, world = 1 - mesh.rank("dp"), mesh.world
    one_s = time_of("send", 6000, 2, LINK)
    with wire():
        sent = [
            exchange(torch.ones(1500), other, torch.empty(1500), other, world, "x")
            for _ in range(2)
        ]
        for handle in sent:
            handle.wait()
        first, second = (handle._pending for handle in sent)
        assert first.own_end_s - first.launched_s >= one_s - 1e-9
        assert second.own_end_s - first.own_end_s >= one_s - 1e-9
        large = collectives.all_reduce(torch.ones(1500), world, "x")
        large._pending.works[0].wait()
        behind = exchange(torch.ones(9), other, torch.empty(9), other, world, "x")
        assert behind._pending.started_s >= large.finish_time
        behind.wait()
        large.wait()


def test_messages_and_collectives_share_one_queue():
    on_ranks(check_times_of_messages, TWO)


def check_two_groups(mesh: Mesh) -> None:
    """A transfer for which a rank is missing doesn't hold up one of another group."""
    with wire():
        late = mesh.rank("tp") == 1
        if not late:
            first = collectives.all_reduce(torch.ones(9), mesh.group("tp"), "tp")
        own = collectives.all_reduce(torch.ones(9), mesh.group("dp"), "dp")
        own.wait()
        dist.barrier()
        if late:
            first = collectives.all_reduce(torch.ones(9), mesh.group("tp"), "tp")
        assert first.wait().unique().tolist() == [2.0]
        assert first.finish_time > own.finish_time


def test_groups_share_the_wire_but_do_not_wait_for_each_other():
    on_ranks(check_two_groups, {"dp": 2, "tp": 2})


def check_refusals(mesh: Mesh) -> None:
    gloo = measure_gloo()
    assert gloo == measure_gloo() > 0
    with pytest.raises(ValueError, match="faster than half of gloo's"), EmulatedLink(0.0, gloo):
        pass
    with EmulatedLink(0.0, gloo / 3), count_traffic() as traffic:
        collectives.all_reduce(torch.ones(5), mesh.world, "x").wait()
    collectives.all_reduce(torch.ones(5), mesh.world, "outside").wait()
    assert not emulation._active
    assert [call.purpose for call in traffic.calls] == ["x"]
    gathered = [None] * mesh.world_size
    dist.all_gather_object(gathered, gloo)
    assert len(set(gathered)) == 1, "ranks must agree whether the link is refused"


def test_links_that_gloo_could_not_show_are_refused_by_all_ranks():
    on_ranks(check_refusals, TWO)


def test_the_wire_carries_one_thing_at_a_time():
    one = wire()
    assert one.occupy(10.0, 2.0) == (10.0, 12.0)
    assert one.occupy(11.0, 1.0) == (12.0, 13.0)
    assert one.occupy(20.0, 1.0) == (20.0, 21.0)


def test_one_rank_alone_needs_no_wire():
    with wire() as one, count_traffic() as traffic:
        handle = collectives.all_reduce(torch.ones(3), None, "x")
        assert handle.wait().tolist() == [1.0] * 3
        assert handle.finish_time is None
    assert not traffic.transfers
    assert one.occupy(0.0, 1.0) == (0.0, 1.0)


def test_a_really_shaped_network_can_be_compared():
    """Ranks in namespaces of their own, joined by wires that tc slows down, and the emulation.

    How close they are is a matter of time: tests/bench/link.py --shaped.
    """
    if reason := link.missing_rights():
        pytest.skip(reason)
    for row in link.shaped(ranks=2, mbits=100, rounds=1):
        assert row["emulated_s"] >= row["bytes"] / (100e6 / 8)  # 2 (n - 1) / n = 1
        # The token bucket lets 32 kB through at once, in each direction.
        assert row["shaped_s"] >= (row["bytes"] - 64_000) / (100e6 / 8)
