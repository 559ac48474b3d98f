"""Mixtures: exact shares, epochs of each source's own, wrong weights refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import DataConfig, Mixture, TokenDataset, batch, open_datasets
from tests import checks_batches as checks
from tests.checks_data import counting, write_shards

WEIGHTS = st.lists(st.floats(0, 100) | st.integers(0, 5), min_size=1, max_size=6)


@given(WEIGHTS.filter(lambda weights: sum(weights) > 0), st.integers(0, 2**40))
@settings(deadline=None, max_examples=20)
def test_every_stretch_has_the_shares_asked_for(weights, seed):
    checks.check_shares(weights, seed)


def test_a_mixture_does_not_depend_on_what_was_read_before():
    checks.check_mixture_is_pure()


def test_each_source_has_epochs_of_its_own():
    checks.check_sources_have_their_own_epochs()


def test_the_sources_take_turns_alike_on_every_machine():
    """Known values: they may never change, or runs could not be resumed."""
    with checks.dataset_of(counting(50)) as data:
        mixture = Mixture([data] * 3, [0.5, 0.3, 0.2], seed=7)
    sources = [mixture.place(number)[0] for number in range(20)]
    assert sources == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert mixture.drawn(10**9) == [500_000_000, 300_000_000, 200_000_000]


def test_a_small_source_repeats_more_often_and_says_so(two_sources):
    mixture = Mixture(two_sources, [1, 1])
    drawn = mixture.drawn(1000)
    assert drawn == [500, 500]
    assert [n // len(data) for n, data in zip(drawn, two_sources)] == [83, 20]


@pytest.fixture
def two_sources(tmp_path):
    """One of 6 windows, one of 25 with larger ids."""
    one = write_shards(tmp_path / "one", counting(90, 3))
    two = write_shards(tmp_path / "two", [[1000 + n for n in d] for d in counting(400, 9)])
    return [TokenDataset(shards, 16, "documents") for shards in (one, two)]


def test_windows_of_all_sources_come_stacked_in_the_order_asked_for(two_sources):
    mixture = Mixture(two_sources, [1, 1])
    assert len(mixture) == 31
    numbers = [30, 0, 6, 5, 0]
    rows = mixture.windows(numbers)
    for row, number in enumerate(numbers):
        source, own = (0, number) if number < 6 else (1, number - 6)
        for field, expected in zip(rows, two_sources[source].window(own)):
            assert np.array_equal(field[row], expected)
    assert mixture.windows([]).tokens.shape == (0, 16)
    with pytest.raises(IndexError):
        mixture.windows([31])


def test_held_out_text_of_a_mixture_is_evaluated_whole_whatever_the_weights(tmp_path):
    """Ids follow on from one source to the next, so that each target can be counted."""
    one = write_shards(tmp_path / "one", [list(range(90))])
    two = write_shards(tmp_path / "two", [list(range(89, 300))])
    mixture = Mixture([TokenDataset(one, 16), TokenDataset(two, 16)], [9, 1])
    mixture.shards = range(300)  # as many targets, and one more
    for world_size in (1, 3):
        checks.check_evaluation(mixture, world_size, 2)
    assert mixture.text_bytes == 301


def test_a_source_of_weight_zero_is_only_evaluated(two_sources):
    mixture = Mixture(two_sources, [0, 2])
    assert {mixture.place(number)[0] for number in range(100)} == {1}
    assert len(mixture) == 31


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, -0.5], "weight -0.5 of 1 must be a number from 0"),
        ([math.nan, 1], "weight nan of 0 must be a number from 0"),
        ([math.inf, 1], "weight inf of 0"),
        ([0, 0.0], "one weight must be above 0"),
        ([1], "2 data sets need as many weights, not 1"),
        ([1, "a"], "weight a of 1 must be a number"),
        ([1, None], "weight None of 1 must be a number"),
    ],
)
def test_wrong_weights_are_refused(two_sources, weights, says):
    with pytest.raises(ValueError, match=says):
        Mixture(two_sources, weights)


def test_sources_of_other_window_lengths_are_refused(two_sources):
    other = TokenDataset(two_sources[0].shards, 8)
    with pytest.raises(ValueError, match="windows of one length"):
        Mixture([two_sources[0], other], [1, 1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixture": {"shakespear": 1.0}}, "nearest: 'shakespeare'"),
        ({"mixture": {"shakespeare": -1.0}}, "mixture: weight -1.0 of 'shakespeare'"),
        ({"mixture": {"shakespeare": 0.0}}, "mixture: one weight must be above 0"),
        ({"mixture": {"shakespeare": 1.0}, "corpus": "python-docs"}, "both given"),
        ({"workers": -1}, "workers = -1 must be at least 0"),
    ],
)
def test_wrong_mixtures_are_faults_of_the_configuration(options, says):
    (fault,) = DataConfig(**options).faults()
    assert says in fault


def test_data_sets_are_opened_one_a_source(tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, size in zip(folders, (100, 200, 5)):
        write_shards(folder, counting(size, 2))
    sources = [
        SimpleNamespace(weight=3.0, train=folders[0], held_out=folders[2]),
        SimpleNamespace(weight=1.0, train=folders[1], held_out=None),
    ]
    prepared = SimpleNamespace(sources=sources, vocab=70_000)
    config = DataConfig(sequence_length=16, packing="documents")
    train, held_out = open_datasets(prepared, config)
    assert train.drawn(8) == [6, 2]
    assert batch(train, 0, range(4), 8).documents is not None
    assert held_out.packing == "pad"  # too short for a window of the stream
    prepared.sources = sources[:1]
    assert isinstance(open_datasets(prepared, config)[0], TokenDataset)


def test_short_and_long_held_out_texts_keep_documents_apart_together(tmp_path):
    long = TokenDataset(write_shards(tmp_path / "long", counting(99, 9)), 16, "documents")
    short = TokenDataset(write_shards(tmp_path / "short", [[1, 2], [3, 4]]), 16, "pad")
    rows = Mixture([long, short], [1, 1]).windows([0, len(long), 1])
    assert rows.documents.shape == (3, 16)
    assert rows.documents[1].tolist() == [0] * 16
    assert rows.documents[0].tolist() == long.window(0).documents.tolist()
