"""Right answers of another style than the library's pass the checks of chapters 7 to 9."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exercise_cases.collectives import ring, seconds
from exercise_cases.data_parallelism import in_buckets
from exercise_cases.overlap import sent

from course_lib.classroom.checks import find
from course_lib.classroom.checks.grading import judge
from course_lib.classroom.checks.overlap_sizes import choose_bucket_sizes


def ring_of_plain_messages(tensor, group):
    """Without the library: torch's own messages, and no message where a chunk is empty."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = [chunk.clone() for chunk in tensor.tensor_split(ranks)]
    for step in range(1, ranks):
        going, coming = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        arriving = torch.empty_like(coming)
        works = [dist.isend(going, (rank + 1) % ranks)] if len(going) else []
        works += [dist.irecv(arriving, (rank - 1) % ranks)] if len(arriving) else []
        for work in works:
            work.wait()
        coming += arriving
    return chunks[rank]


def numpys_seconds(*case):
    return np.float32(seconds(*case))


def numpys_sizes(*model):
    return tuple(np.int64(size) for size in choose_bucket_sizes(*model))


def torchs_seconds(*case):
    return torch.tensor(seconds(*case), dtype=torch.float64)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("collectives/1", ring),
        ("collectives/1", ring_of_plain_messages),
        ("collectives/2", seconds),
        ("collectives/2", numpys_seconds),
        ("collectives/2", torchs_seconds),
        ("data-parallelism/1", in_buckets),
        ("overlap/1", sent("")),
        ("overlap/2", numpys_sizes),
    ],
)
def test_an_answer_by_hand_passes(name, answer):
    verdict = judge(find(name), answer)
    assert verdict.status == "passed", verdict.message
