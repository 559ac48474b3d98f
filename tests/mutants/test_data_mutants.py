"""Faults of public training code, put back into the data path: its checks must find each one."""

import numpy as np
import pytest

from course_lib.data import TokenDataset, batches, preparation, samples, shards
from tests import checks_data as checks


def dataset(folder, packing="stream", documents=4, seed=0):
    tokens = checks.counting(155, documents)  # 10 windows of 16, the last one partly filled
    return TokenDataset(checks.write_shards(folder, tokens), 16, packing, seed)


def must_fail(check, *arguments):
    check_failed = False
    try:
        check(*arguments)
    except AssertionError:
        check_failed = True
    assert check_failed, f"{check.__name__} does not notice the fault"


@pytest.mark.trap("DA-01")
def test_ids_stored_without_a_check(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shards, "checked_ids", lambda ids, vocab: np.asarray(ids).astype(shards.token_dtype(vocab))
    )
    must_fail(checks.check_ids_survive, tmp_path)


@pytest.mark.trap("DA-01")
def test_ids_always_stored_in_two_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "token_dtype", lambda vocab: np.dtype("<u2"))
    with pytest.raises((AssertionError, ValueError)):
        checks.check_ids_survive(tmp_path)


def test_shards_opened_without_looking(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_verify", lambda *arguments: None)
    must_fail(checks.check_damage_is_found, tmp_path / "a")
    must_fail(checks.check_foreign_ids_are_refused, tmp_path / "b")


@pytest.mark.trap("DA-03")
@pytest.mark.parametrize("packing", ["stream", "pad"])
def test_the_last_window_dropped(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(samples, "window_counts", lambda targets, length: targets // length)
    must_fail(checks.check_every_token_is_a_target_once, dataset(tmp_path, packing))


@pytest.mark.trap("ACC-10")
def test_labels_shifted_twice(tmp_path, monkeypatch):
    window = TokenDataset.window

    def shifted(self, number):
        sample = window(self, number)
        return sample._replace(labels=np.append(sample.labels[1:], -100))

    monkeypatch.setattr(TokenDataset, "window", shifted)
    must_fail(checks.check_every_token_is_a_target_once, dataset(tmp_path))


@pytest.mark.trap("DA-06")
def test_the_same_order_in_each_epoch(tmp_path, monkeypatch):
    scrambled = samples.scrambled
    monkeypatch.setattr(samples, "scrambled", lambda *numbers: scrambled(*numbers[:-1], 0))
    must_fail(checks.check_order, dataset(tmp_path))


def test_samples_drawn_with_replacement(tmp_path, monkeypatch):
    monkeypatch.setattr(
        samples, "permuted", lambda p, count, seed, epoch: hash((p, seed, epoch)) % count
    )
    must_fail(checks.check_order, dataset(tmp_path))


@pytest.mark.trap("DA-09")
def test_a_seed_that_depends_on_the_rank(tmp_path):
    datasets = [dataset(tmp_path / str(rank), seed=rank) for rank in range(2)]
    must_fail(checks.check_ranks_share, lambda rank: datasets[rank], 2)


@pytest.mark.trap("CK-01")
def test_samples_that_follow_a_stream(tmp_path, monkeypatch):
    def next_one(self, step, index, global_batch):
        self.position = getattr(self, "position", -1) + 1
        return self.window(samples.permuted(self.position % len(self), len(self), self.seed, 0))

    monkeypatch.setattr(TokenDataset, "sample", next_one)
    must_fail(checks.check_sample_is_pure, lambda: dataset(tmp_path))


@pytest.mark.trap("DA-07")
def test_an_evaluation_filled_up_with_repeated_samples(tmp_path, monkeypatch):
    windows = batches.evaluation_windows
    monkeypatch.setattr(
        batches,
        "evaluation_windows",
        lambda count, *rest: ([n % count for n in numbers] for numbers in windows(count, *rest)),
    )
    must_fail(checks.check_evaluation, dataset(tmp_path), 3, 1)
    must_fail(checks.check_bits_per_byte, dataset(tmp_path))


@pytest.mark.trap("DA-07")
def test_an_evaluation_that_drops_the_rest(tmp_path, monkeypatch):
    windows = batches.evaluation_windows
    monkeypatch.setattr(
        batches,
        "evaluation_windows",
        lambda count, rank, world, size: windows(count - count % (world * size), rank, world, size),
    )
    must_fail(checks.check_evaluation, dataset(tmp_path), 3, 1)
    must_fail(checks.check_bits_per_byte, dataset(tmp_path))


def test_an_evaluation_in_which_ranks_stop_at_their_own_end(tmp_path, monkeypatch):
    windows = batches.evaluation_windows
    monkeypatch.setattr(
        batches,
        "evaluation_windows",
        lambda count, *rest: (numbers for numbers in windows(count, *rest) if numbers[0] < count),
    )
    must_fail(checks.check_evaluation, dataset(tmp_path), 3, 1)


def test_held_out_documents_in_training(tmp_path, monkeypatch):
    parts = preparation.Split.parts

    def leaking(self, what):
        for text, out in parts(self, what):
            yield text, out
            if out:
                yield text, False

    monkeypatch.setattr(preparation.Split, "parts", leaking)
    must_fail(checks.check_split, tmp_path)


def test_copies_of_a_held_out_text_in_training(tmp_path, monkeypatch):
    by_name = {"3.txt", "5.txt", "6.txt", "8.txt"}  # and not copy.txt, which is 3.txt again
    monkeypatch.setattr(preparation, "drawn", lambda document, *_: document.name in by_name)
    must_fail(checks.check_split, tmp_path)
