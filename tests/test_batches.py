"""Batches: what the model gets, and an evaluation that counts each target once."""

import pytest
import torch

from course_lib.data import Batch, TokenDataset, batch, micro_batches
from tests import checks_batches as checks
from tests.checks_data import counting, write_shards

PACKINGS = ["stream", "documents", "pad"]


def test_a_batch_carries_what_the_model_and_the_loss_need(tmp_path):
    dataset = TokenDataset(write_shards(tmp_path, counting(90, 5)), 16, "pad")
    part = batch(dataset, 2, [1, 3], 4)
    for tensor in (part.tokens, part.labels, part.positions):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 16)
        assert tensor.is_contiguous()
    assert part.positions[1].tolist() == list(range(16))
    assert part.samples.tolist() == [1, 3]
    assert part.step == 2
    assert part.valid == int((part.labels != -100).sum()) < 32
    assert list(part.inputs()) == ["tokens", "positions", "samples", "step", "documents"]
    moved = part.to("cpu")
    assert (moved.valid, moved.step, moved.documents) == (part.valid, 2, None)
    assert moved.to("meta").tokens.device.type == "meta"


def test_a_batch_counts_its_labels_if_nobody_did():
    ids = torch.zeros(1, 3, dtype=torch.int64)
    labels = torch.tensor([[5, -100, 0]])
    assert Batch(ids, labels, ids, torch.zeros(1, dtype=torch.int64), step=0).valid == 2


@pytest.mark.trap("DA-07")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_an_evaluation_counts_each_target_once(tmp_path, world_size, batch_size, packing):
    shards = write_shards(tmp_path, counting(155, documents=4))  # 10 windows of 16
    checks.check_evaluation(TokenDataset(shards, 16, packing), world_size, batch_size)


@pytest.mark.trap("DA-07")
def test_bits_per_byte_do_not_depend_on_the_number_of_ranks(tmp_path):
    shards = write_shards(tmp_path, counting(155, documents=4))
    checks.check_bits_per_byte(TokenDataset(shards, 16, "pad"))


@pytest.mark.trap("DA-04")
def test_an_evaluation_keeps_documents_apart():
    checks.check_evaluation_keeps_documents_apart()


@pytest.mark.parametrize("packing", PACKINGS)
def test_micro_batches_are_the_batch_in_pieces(tmp_path, packing):
    dataset = TokenDataset(write_shards(tmp_path, counting(155, 9)), 16, packing)
    whole = batch(dataset, 1, range(3, 9), 12)
    parts = micro_batches(dataset.samples(1, range(3, 9), 12), range(3, 9), 1, 2)
    assert [part.samples.tolist() for part in parts] == [[3, 4], [5, 6], [7, 8]]
    assert sum(part.valid for part in parts) == whole.valid
    for name, value in whole.inputs().items():
        if isinstance(value, torch.Tensor):
            pieces = [part.inputs()[name] for part in parts]
            assert all(piece.is_contiguous() for piece in pieces)
            assert torch.equal(torch.cat(pieces), value)
