"""The alpha-beta model: closed forms by hand, the typical mistakes, and the fit."""

import random

import pytest

from course_lib.collectives import (
    ETHERNET_1G,
    LINKS,
    NVLINK_4,
    EmulatedLink,
    Link,
    fit,
    scaled,
    sent_bytes,
    time_of,
)
from course_lib.collectives.cost import chunk_size, steps

MB = 1_000_000
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")


def test_bytes_that_each_rank_sends_in_an_all_reduce_of_100_mb():
    assert [sent_bytes("all_reduce", 100 * MB, n) / MB for n in (1, 2, 4, 8)] == [0, 100, 150, 175]


def test_halves_of_an_all_reduce_send_half():
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        assert sent_bytes(kind, 100 * MB, 4) == 75 * MB


def test_gradients_of_124_million_parameters_take_four_seconds_on_gigabit_ethernet():
    """Two ranks, fp32: 124e6 x 4 bytes x 8 bits / 1e9 bits/s."""
    assert time_of("all_reduce", 4 * 124e6, 2, ETHERNET_1G) == pytest.approx(3.968, rel=1e-3)


def test_bandwidths_are_bytes_of_one_direction():
    assert ETHERNET_1G.bytes_per_s * 8 == 1e9
    assert NVLINK_4.bytes_per_s * 2 == 900e9
    assert list(LINKS) == ["1 GbE", "10 GbE", "100 GbE", "NVLink 4"]
    assert sorted(LINKS.values(), key=lambda link: link.bytes_per_s) == list(LINKS.values())


def test_latency_counts_once_a_step():
    slow = Link(1.0, 1e30)
    for ranks, ring, tree in ((1, 0, 0), (2, 1, 1), (3, 2, 2), (4, 3, 2), (5, 4, 3), (8, 7, 3)):
        for kind in ("reduce_scatter", "all_gather", "all_to_all"):
            assert time_of(kind, 1, ranks, slow) == steps(kind, ranks) == ring
        assert time_of("all_reduce", 1, ranks, slow) == 2 * ring
        assert time_of("broadcast", 1, ranks, slow) == tree
        assert time_of("send", 1, ranks, slow) == 1


def test_a_broadcast_costs_the_whole_payload_a_step():
    wire = Link(0.0, 1.0)
    assert [time_of("broadcast", 10, n, wire) for n in (1, 2, 3, 4, 5, 8)] == [
        0,
        10,
        20,
        20,
        30,
        30,
    ]


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("elements", [0, 1, 5, 8, 840])
def test_bytes_of_single_ranks_add_up(ranks, elements):
    """Each chunk crosses n - 1 wires in each round, whatever its size."""
    payload = 4 * elements
    chunks = [chunk_size(elements, ranks, chunk) for chunk in range(ranks)]
    assert sum(chunks) == elements
    assert max(chunks) - min(chunks) <= 1
    for kind in KINDS[:-1]:
        of_ranks = [sent_bytes(kind, payload, ranks, rank, 4) for rank in range(ranks)]
        rounds = 2 if kind == "all_reduce" else 1
        assert sum(of_ranks) == rounds * (ranks - 1) * payload, kind
        assert max(of_ranks) <= sent_bytes(kind, payload, ranks) + 4 * rounds
        if elements == 840 and kind != "broadcast":
            assert set(of_ranks) == {sent_bytes(kind, payload, ranks)}, kind


@pytest.mark.parametrize("kind, ranks", [("send", 2), ("all_reduce", 4), ("broadcast", 3)])
def test_a_fit_finds_the_link_again(kind, ranks):
    link, sizes = Link(20e-6, 3e9), [10**power for power in range(2, 9)]
    found = fit(sizes, [time_of(kind, size, ranks, link) for size in sizes], kind, ranks)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-6)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-6)


def test_a_fit_bears_noise_and_messages_that_were_held_up():
    chance, link = random.Random(0), Link(1e-3, 20e6)
    sizes = [10**power for power in range(2, 8) for _ in range(5)]
    times = [time_of("send", s, 2, link) * (1 + 0.04 * chance.random()) for s in sizes]
    for late in range(2, len(times), 7):
        times[late] *= 5
    found = fit(sizes, times)
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.05)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.05)


@pytest.mark.parametrize("sizes, times, says", [
    ([1, 1], [1, 1], "two different sizes"),
    ([1, 2], [1], "two different sizes"),
    ([1, 2], [0, 1], "times > 0"),
    ([1, 2, 3], [3, 2, 1], "do not grow"),
])  # fmt: skip
def test_measurements_that_say_nothing_are_refused(sizes, times, says):
    with pytest.raises(ValueError, match=says):
        fit(sizes, times)


def test_impossible_questions_are_refused():
    with pytest.raises(ValueError, match="unknown kind 'allreduce'"):
        time_of("allreduce", 1, 2, ETHERNET_1G)
    for latency, bandwidth in ((-1, 1), (0, 0), (0, float("nan"))):
        with pytest.raises(ValueError, match="a link needs"):
            Link(latency, bandwidth)


def test_a_scaled_link_keeps_the_ratio_of_communication_to_compute():
    wire = scaled(NVLINK_4, cpu_flops=50e9, gpu_flops=400e12)
    assert isinstance(wire, EmulatedLink)
    flops, payload = 6e12, 10 * MB
    real = time_of("all_reduce", payload, 4, NVLINK_4) / (flops / 400e12)
    here = time_of("all_reduce", payload, 4, wire.link) / (flops / 50e9)
    assert here == pytest.approx(real)
    assert str(wire) == (
        "emulated link of 56.25 MB/s and 27,200 µs: 450,000 MB/s and 3.4 µs at scale 1 : 8,000"
    )
    assert str(EmulatedLink(1e-3, 1e6)) == "emulated link of 1 MB/s and 1,000 µs"
