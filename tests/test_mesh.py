"""Meshes: where each rank lies, and whom it talks to along each axis."""

import pytest
import torch

from course_lib.mesh import AXES, Mesh, coordinates_of, make_mesh
from tests import checks_records as records
from tests.checks_core import ALONE, on_ranks


def test_neighbouring_ranks_differ_in_tp():
    sizes = {"pp": 2, "dp": 3, "tp": 2}
    places = [tuple(coordinates_of(rank, sizes).values()) for rank in range(12)]
    assert places[:5] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 2, 0)]
    assert places[6] == (1, 0, 0)
    assert len(set(places)) == 12
    assert tuple(coordinates_of(0, sizes)) == AXES


def test_groups_join_the_ranks_that_differ_in_one_axis():
    found = on_ranks(records.check_groups, records.DP_TP)
    assert [tuple(place.values()) for place, _ in found] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1),
    ]  # fmt: skip
    assert [groups["tp"] for _, groups in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [groups["dp"] for _, groups in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_one_process_needs_no_process_group():
    for mesh in (Mesh.single(), make_mesh({}), make_mesh(ALONE)):
        assert mesh.world_size == 1
        assert mesh.world is None
        assert mesh.is_first
        assert mesh.device == torch.device("cpu")
        for axis in AXES:
            assert (mesh.size(axis), mesh.rank(axis), mesh.group(axis)) == (1, 0, None)


def test_a_process_group_of_one_rank_sends_nothing():
    assert on_ranks(records.check_groups, ALONE) == [({"pp": 0, "dp": 0, "tp": 0}, {})]


def test_sizes_that_do_not_match_the_world_are_refused():
    with pytest.raises(ValueError, match="pp 1 x dp 2 x tp 1 does not match a world of 1 ranks"):
        make_mesh({"dp": 2})


def test_unknown_axes_are_refused():
    with pytest.raises(ValueError, match=r"unknown mesh axis \['cp'\]; axes are pp, dp, tp"):
        make_mesh({"cp": 1})
