"""Samples: windows, packings, the order of each epoch; the same on every machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import DataError, TokenDataset, TokenShards, permuted
from tests import checks_batches as checks
from tests.checks_data import counting, write_shards

PACKINGS = ["stream", "documents", "pad"]


@given(st.integers(1, 300), st.integers(0, 2**64), st.integers(0, 1_000_000))
@settings(deadline=None)
def test_a_permutation_reaches_each_place_once(count, seed, epoch):
    assert sorted(permuted(i, count, seed, epoch) for i in range(count)) == list(range(count))


def test_the_order_is_the_same_on_every_machine():
    """Known values: they may never change, or runs could not be resumed."""
    assert [permuted(i, 10, 0, 0) for i in range(10)] == [5, 7, 2, 4, 0, 9, 3, 8, 1, 6]
    assert [permuted(i, 10**12, 7, 3) for i in range(3)] == [
        620179382873,
        138987155048,
        133220254977,
    ]


def test_an_order_looks_random():
    """Over many epochs every window comes to every place, and neighbours are separated."""
    count, epochs = 20, 1_000
    orders = np.array([[permuted(i, count, 0, e) for i in range(count)] for e in range(epochs)])
    seen = np.array([np.bincount(orders[:, i], minlength=count) for i in range(count)])
    expected = epochs / count
    assert ((seen - expected) ** 2 / expected).sum() < 500  # 361 ± 27 where it is random
    steps = np.bincount((np.diff(orders) % count).ravel(), minlength=count)[1:]
    expected = epochs * (count - 1) / (count - 1)
    assert (abs(steps - expected) < 6 * expected**0.5).all()


@pytest.mark.trap("DA-06")
def test_each_epoch_is_another_permutation(tmp_path):
    checks.check_order(TokenDataset(write_shards(tmp_path, counting(500)), 16))


@pytest.mark.trap("DA-09")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_read_disjoint_samples_of_one_order(tmp_path, world_size):
    shards = write_shards(tmp_path, counting(500))
    checks.check_ranks_share(lambda rank: TokenDataset(shards, 16, seed=3), world_size)


@pytest.mark.trap("CK-01")
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_sample_does_not_depend_on_what_was_read_before(tmp_path, packing):
    write_shards(tmp_path, counting(333, documents=7))
    checks.check_sample_is_pure(lambda: TokenDataset(TokenShards(tmp_path), 16, packing, seed=1))


def test_the_global_batch_does_not_change_the_order(tmp_path):
    dataset = TokenDataset(write_shards(tmp_path, counting(500)), 16)
    orders = {
        size: [dataset.locate(n // size, n % size, size) for n in range(100)] for size in (1, 4, 7)
    }
    assert orders[1] == orders[4] == orders[7]
    assert {epoch for epoch, _ in orders[1]} == {0, 1, 2, 3}


@pytest.mark.trap("ACC-10")
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("documents", [1, 2, 7])
def test_every_token_but_the_first_is_a_target_once(tmp_path, packing, documents):
    for tokens in (100, 97, 113, 128):
        parts = counting(tokens, documents)
        shards = write_shards(tmp_path / str(tokens), parts, tokens_per_shard=30)
        checks.check_every_token_is_a_target_once(TokenDataset(shards, 16, packing))


@pytest.mark.trap("DA-03")
def test_too_few_tokens_for_a_window_are_refused(tmp_path):
    length = 8
    for tokens in (1, length - 1, length):
        shards = write_shards(tmp_path / str(tokens), counting(tokens))
        with pytest.raises(DataError, match=f"holds {tokens} tokens; one window of 8 needs 9"):
            TokenDataset(shards, length)
    one = TokenDataset(write_shards(tmp_path / "one", counting(length + 1)), length)
    assert len(one) == 1
    assert one.window(0).labels.tolist() == list(range(1, 9))
    two = TokenDataset(write_shards(tmp_path / "two", counting(length + 2)), length)
    assert len(two) == 2
    assert two.window(1).labels.tolist() == [9] + [-100] * 7
    with pytest.raises(DataError, match="needs 9"):
        TokenDataset(TokenShards(tmp_path / str(length)), length, "documents")
    with pytest.raises(DataError, match="needs 2"):
        TokenDataset(TokenShards(tmp_path / "1"), length, "pad")


@pytest.mark.trap("ACC-06")
@pytest.mark.parametrize("windows", [7, 3])
def test_the_end_of_an_epoch_is_neither_dropped_nor_repeated(tmp_path, windows):
    """Batches go on over it: two epochs of 7 windows are 3.5 batches of 4, and 3 windows train."""
    dataset = TokenDataset(write_shards(tmp_path, counting(16 * windows + 1)), 16)
    places = [divmod(number, 4) for number in range(2 * windows)]
    seen = [dataset.locate(step, index, 4) for step, index in places]
    assert sorted(seen) == [(epoch, window) for epoch in range(2) for window in range(windows)]
    assert dataset.samples(windows // 4, range(4), 4).valid.tolist() == [16] * 4


def test_packed_documents_are_told_apart():
    checks.check_documents_are_told_apart()


def test_a_documents_last_target_is_the_next_opening_token(tmp_path):
    """It says that the text ends; the next text's first token is predicted in the next document."""
    dataset = TokenDataset(write_shards(tmp_path, [[0, 7, 8], [0, 5, 6], [0]]), 6, "documents")
    sample = dataset.window(0)
    assert sample.tokens.tolist() == [0, 7, 8, 0, 5, 6]
    assert sample.labels.tolist() == [7, 8, 0, 5, 6, 0]
    assert sample.documents.tolist() == [0, 0, 0, 1, 1, 1]
    assert sample.positions.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.trap("DA-04")
@pytest.mark.parametrize("shape", list(checks.SHAPES))
@pytest.mark.parametrize("dropout", [0.0, 1e-9, 0.3], ids=["fused", "explicit", "dropout"])
def test_packed_documents_do_not_see_each_other(shape, dropout):
    checks.check_documents_do_not_leak(shape, dropout)


@pytest.mark.trap("DA-04")
@pytest.mark.parametrize("shape", list(checks.SHAPES))
@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["fused", "explicit"])
def test_in_a_plain_stream_they_do(shape, dropout):
    """Else the test above would not see a leak."""
    packed, other = (checks.scores(d, shape, dropout, "stream") for d in checks.packings()[1:])
    second = len(checks.texts_of(1))
    assert (packed - other)[:, -second:].abs().max() > 0.4


def test_padded_documents_keep_to_themselves(tmp_path):
    shards = write_shards(tmp_path, [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]])
    dataset = TokenDataset(shards, 4, "pad")
    assert [dataset.window(n).tokens.tolist() for n in range(len(dataset))] == [
        [0, 1, 2, 0],
        [3, 0, 0, 0],
        [4, 5, 6, 7],
        [8, 0, 0, 0],
    ]
    assert dataset.window(0).labels.tolist() == [1, 2, 3, -100]
    assert [dataset.window(n).valid for n in range(len(dataset))] == [3, 1, 4, 1]


@pytest.mark.parametrize("packing", PACKINGS)
def test_valid_is_the_number_of_real_tokens(tmp_path, packing):
    shards = write_shards(tmp_path, [[5, 6, 7, 8, 9, 10], [11, 12]])
    dataset = TokenDataset(shards, 5, packing)
    windows = [dataset.window(n) for n in range(len(dataset))]
    real = [token for window in windows for token in window.tokens[: window.valid].tolist()]
    assert real == [5, 6, 7, 8, 9, 10, 11]  # 12 is a target only
    assert all((window.tokens[window.valid :] == 0).all() for window in windows)
    assert windows[0].valid == 5
    assert TokenDataset(shards, 7).window(0).valid == 7
    assert TokenDataset(shards, 40, "pad").window(0).valid == 6


def test_impossible_places_are_refused(tmp_path):
    dataset = TokenDataset(write_shards(tmp_path, counting(100)), 16)
    for step, index in ((-1, 0), (0, 4), (0, -1)):
        with pytest.raises(IndexError, match="a global batch has 4"):
            dataset.sample(step, index, 4)
    with pytest.raises(IndexError):
        dataset.window(len(dataset))
    with pytest.raises(ValueError, match="packing"):
        TokenDataset(dataset.shards, 4, "best")
