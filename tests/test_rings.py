"""Rings and trees from messages: equal to torch's, in as many bytes as the formula says."""

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import rings
from course_lib.mesh import Mesh
from tests import checks_collectives as checks
from tests.checks_core import on_ranks


def check_everything(mesh: Mesh) -> list[list[int]]:
    checks.check_ring_sums(mesh)
    checks.check_ring_copies(mesh)
    checks.check_ring_strides(mesh)
    checks.check_ring_sends(mesh)
    return checks.contributions(mesh)


@pytest.mark.trap("COM-02")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_rings_equal_torchs_and_send_what_the_formula_says(ranks):
    frames = on_ranks(check_everything, {"dp": ranks})
    for rank, steps in enumerate(frames):
        assert len(steps) == 2 * (ranks - 1)
        for step, chunks in enumerate(steps[: ranks - 1]):
            # A chunk that has come over s + 1 messages holds the numbers of s + 2 ranks.
            newest = (rank - step - 2) % ranks
            assert chunks[newest] == step + 2
            assert sum(chunks) == ranks + sum(range(1, step + 2))
        for step, chunks in enumerate(steps[ranks - 1 :]):
            assert sorted(chunks) == [0] * (ranks - step - 2) + [ranks] * (step + 2)


def test_all_ranks_get_the_same_bits():
    on_ranks(checks.check_same_bits, {"dp": 3})


def check_large(mesh: Mesh) -> None:
    """Messages larger than any socket buffer: a ring that only sends first would stand still."""
    total = rings.all_reduce(torch.ones(1_000_001), mesh.world)
    assert total.unique().tolist() == [mesh.world_size]
    half = dist.get_rank() // 2
    part = rings.all_reduce(torch.full((5,), half + 1.0), mesh.group("tp"))
    assert part.unique().tolist() == [2.0 * (half + 1)]
    assert rings.broadcast(torch.tensor([dist.get_rank()]), mesh.group("tp"), 1) == 2 * half + 1


def test_large_messages_and_parts_of_the_world():
    on_ranks(check_large, {"dp": 2, "tp": 2})


def test_a_chunk_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"chunk 0 of 5 elements over 1 ranks has 5 elements"):
        rings.all_gather(torch.zeros(4), None, 5)
