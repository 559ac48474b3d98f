"""What the check of near duplicates relies on: its hidden texts are what their names say."""

import pytest

from course_lib.classroom.checks.text_to_tokens_duplicates import (
    THRESHOLD,
    find_duplicates,
    groups,
)
from course_lib.data.deduplication import Deduplicator, jaccard, signature, similarity

GROUPS = {group.what: group.texts for group in groups()}
THRESHOLDS = {group.what: group.threshold for group in groups()}


@pytest.mark.parametrize("what", GROUPS)
def test_the_index_gives_the_same_verdicts_as_comparing_all(what, tmp_path):
    texts, threshold = GROUPS[what], THRESHOLDS[what]
    with Deduplicator(tmp_path / "index", threshold) as index:
        found = [index.look(str(place), text) for place, text in enumerate(texts)]
    assert [(it.kind, it.of and int(it.of)) for it in found] == find_duplicates(texts, threshold)


def test_hidden_texts_are_as_alike_as_their_mistakes_need():
    poem, edited, _ = GROUPS["an edited copy"]
    assert poem != edited
    assert jaccard(poem, edited) > 0.9
    poem, capitals, _ = GROUPS["a copy in capitals"]
    assert poem != capitals
    assert jaccard(poem, capitals) == 1
    long, short, _ = GROUPS["a common license header"]
    common = set(long.split()) & set(short.split())
    assert len(common) / len(short.split()) > THRESHOLD > 2 * jaccard(long, short)
    half = jaccard(*GROUPS["texts that share three quarters"])
    assert half < THRESHOLD < 2 * half / (1 + half)  # Dice would call them near
    first, second, third = GROUPS["a chain of edits"]
    assert min(jaccard(first, second), jaccard(second, third)) > THRESHOLD > jaccard(first, third)
    one, other, between = GROUPS["a text between two kept ones"]
    assert min(jaccard(one, between), jaccard(other, between)) > THRESHOLD > jaccard(one, other)
    lower = jaccard(*GROUPS["three quarters shared, with the threshold 0.6"])
    assert 0.6 < lower < THRESHOLD
    assert jaccard(*GROUPS["a similarity of exactly 0.5, with the threshold 0.5"]) == 0.5


def test_estimates_and_true_similarities_lie_on_two_sides_of_the_threshold():
    above, near, below, far = GROUPS["similarities close to the threshold"]
    assert jaccard(above, near) > THRESHOLD > similarity(signature(above), signature(near))
    assert jaccard(below, far) < THRESHOLD < similarity(signature(below), signature(far))
