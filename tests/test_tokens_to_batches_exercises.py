"""Right answers of another style than the library's pass the checks of "From tokens to batches"."""

import numpy as np
from exercise_cases.tokens_to_batches import locate, pack

from course_lib.classroom.checks import find
from course_lib.classroom.checks.grading import judge


def by_sorting(dataset, step, index, global_batch):
    """An order of its own: windows sorted by a hash of whole numbers."""
    epoch, position = divmod(step * global_batch + index, len(dataset))
    order = sorted(range(len(dataset)), key=lambda n: hash((dataset.seed, epoch, n, n * n)))
    return epoch, order[position]


def with_numpy(dataset, step, index, global_batch):
    return tuple(np.array(locate(dataset, step, index, global_batch)))


def spoils_what_it_is_given(dataset, step, index, global_batch):
    dataset.count = dataset._count = 2
    return 0, 0


def numbered_by_row(documents, length):
    """In order, but with numbers that begin again in each row, and numpy's whole numbers."""
    rows = [[]]
    for tokens in documents:
        if sum(map(len, rows[-1])) + len(tokens) > length:
            rows.append([])
        rows[-1].append(tokens)
    return [_packed(row, length) for row in rows]


def _packed(row, length):
    left = length - sum(map(len, row))
    return {
        "tokens": [t for tokens in row for t in tokens] + [0] * left,
        "labels": [t for tokens in row for t in (*tokens[1:], -100)] + [-100] * left,
        "positions": [np.int64(at) for tokens in row for at in range(len(tokens))] + [7] * left,
        "documents": [n for n, tokens in enumerate(row) for _ in tokens] + [len(row)] * left,
    }


def numbers_filler_zero(documents, length):
    """Filler with a document's number is right: it comes last, so no document sees it."""
    rows = pack(documents, length)
    return [row | {"documents": [max(number, 0) for number in row["documents"]]} for row in rows]


def out_of_its_own_range(dataset, step, index, global_batch):
    return [0][step], index


def test_sample_by_hand_and_by_sorting_pass():
    for answer in (locate, by_sorting, with_numpy):
        assert judge(find("tokens-to-batches/1"), answer).status == "passed"


def test_packing_by_hand_and_with_numbers_by_row_pass():
    for answer in (pack, numbered_by_row, numbers_filler_zero):
        assert judge(find("tokens-to-batches/2"), answer).status == "passed"


def test_an_index_error_of_the_learners_own_is_shown_as_it_is():
    verdict = judge(find("tokens-to-batches/1"), out_of_its_own_range)
    assert verdict.status == "crashed"
    assert "IndexError: list index out of range" in verdict.message


def test_an_answer_that_spoils_its_data_set_does_no_harm_to_the_next_check():
    for answer, status in ((spoils_what_it_is_given, "wrong"), (locate, "passed")):
        assert judge(find("tokens-to-batches/1"), answer).status == status
