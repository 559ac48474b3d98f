"""Loading: batches by `fetch_ahead` against torch's DataLoader and torchdata's StatefulDataLoader.

    python tests/bench/data.py [--rounds 7] [--batch 8] [--sequence 256]

All give the same batches (tokens, shifted labels, positions, sample numbers; int64) of the same
shards, in a shuffled order, from 0 or 2 workers. The others get what a careful user would write:
a memory-mapped file, a sampler of precomputed order, one stack a field. Rounds run A B C A B C …,
figures are medians over the rounds; a warm-up round is left out. Then the share of a real training
step that is spent waiting for its batch, and tokenising by numbers of processes. The last line is
one JSON object.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from course_lib.data import ShardWriter, TokenDataset, TokenShards, fetch_ahead, to_batch
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig
from course_lib.trainer.step import parallelize, training_step
from course_lib.training import TrainingConfig

TOKENS, VOCAB = 8_000_000, 8192
GOALS = {"times_dataloader": 2.0, "waiting_share": 0.01}  # at least, below
BATCHES = 400  # of one round


class Windows(Dataset):
    """The usual data set of token windows: one memory map, indexed by window."""

    def __init__(self, path: Path, sequence: int) -> None:
        self.tokens, self.sequence = np.memmap(path, np.uint16, mode="r"), sequence

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.sequence

    def __getitem__(self, window: int) -> tuple[torch.Tensor, ...]:
        begin = window * self.sequence
        ids = torch.from_numpy(self.tokens[begin : begin + self.sequence + 1].astype(np.int64))
        return ids[:-1], ids[1:], torch.arange(self.sequence), torch.tensor(window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with ShardWriter(folder, VOCAB) as writer:
            ids = np.random.default_rng(0).integers(0, VOCAB, TOKENS)
            for part in np.array_split(ids, 1000):
                writer.add(part, 3 * len(part))
        found = {
            "shape": [options.batch, options.sequence],
            "goals": GOALS,
            "loading": compare(Path(folder), options),
            "waiting": waiting(Path(folder)),
            "tokenising_mb_per_s": tokenising(),
        }
    print(json.dumps(found))


def compare(folder: Path, options: argparse.Namespace) -> dict:
    """Tokens a second of each loader, by number and kind of workers."""
    data = TokenDataset(TokenShards(folder), options.sequence)
    windows = Windows(folder / "tokens-00000.bin", options.sequence)
    found = {}
    print(f"{'workers':10s} {'ours':>10s} {'DataLoader':>11s} {'Stateful':>10s}  Mtokens/s, times")
    for workers, kind in ((0, "thread"), (2, "thread"), (2, "process")):
        loaders = {
            "ours": ours(data, options.batch, workers, kind),
            "dataloader": theirs(DataLoader, windows, options.batch, workers),
            "stateful": theirs(StatefulDataLoader, windows, options.batch, workers),
        }
        seconds = {name: [] for name in loaders}
        for _ in range(options.rounds + 1):
            for name, loader in loaders.items():
                seconds[name].append(time_of(loader))
        rates = {
            name: BATCHES * options.batch * options.sequence / median(some[1:])
            for name, some in seconds.items()
        }
        times = rates["ours"] / rates["dataloader"], rates["ours"] / rates["stateful"]
        found[f"{workers} {kind}"] = {**rates, "times": times}
        row = " ".join(f"{rates[name] / 1e6:10.1f}" for name in loaders)
        print(f"{workers} {kind:8s} {row}   {times[0]:.1f} x, {times[1]:.1f} x")
    return found


def ours(data: TokenDataset, batch: int, workers: int, kind: str) -> Iterator:
    """Batches without end."""
    make = partial(data.samples, indices=range(batch), global_batch=batch)
    rows = fetch_ahead(make, itertools.count(), workers, kind, depth=2 * workers)
    for step, part in enumerate(rows):
        yield to_batch(part, range(batch), step)


def theirs(loader: type, windows: Windows, batch: int, workers: int) -> Iterator:
    """The same by a loader of PyTorch, epoch after epoch."""
    generator = torch.Generator().manual_seed(0)
    options = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    loaded = loader(
        windows, batch, shuffle=True, generator=generator, num_workers=workers, drop_last=True,
        **options,
    )  # fmt: skip
    while True:
        yield from loaded


def time_of(batches: Iterator) -> float:
    """Seconds for a round of batches; one before it lets workers start and fill up."""
    next(batches)
    start = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return time.perf_counter() - start


def waiting(folder: Path) -> dict:
    """Share of a training step that passes until its batch is there."""
    model = ModelConfig(layers=4, width=128, heads=4, vocab=VOCAB, context=128)
    training = TrainingConfig(steps=100, micro_batch=8)
    state = parallelize(model, training, Mesh.single(torch.device("cpu")))
    data = TokenDataset(TokenShards(folder), model.context)
    found = {}
    for workers, kind in ((0, "thread"), (1, "thread"), (1, "process")):
        waited = total = 0.0
        with closing(ours(data, training.micro_batch, workers, kind)) as batches:
            next(batches)
            for _ in range(12):
                start = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - start
                training_step(state, [batch], 1e-3, 1.0, "fp32")
                total += time.perf_counter() - start
        found[f"{workers} {kind}"] = waited / total
        print(f"waiting in a step of {total / 12 * 1e3:.0f} ms, {workers} {kind}: "
              f"{waited / total:.3%}")  # fmt: skip
    return found


def tokenising() -> dict:
    """MB of text a second by number of processes."""
    try:
        from tests.bench.preprocess import measure_tokenising
    except ImportError:
        print("tokenising: not measured, tests/bench/preprocess.py is missing")
        return {}
    found = {str(processes): measure_tokenising(processes, megabytes=4) for processes in (1, 2)}
    for processes, rate in found.items():
        print(f"tokenising with {processes} processes: {rate:.2f} MB/s")
    return found


if __name__ == "__main__":
    main()
