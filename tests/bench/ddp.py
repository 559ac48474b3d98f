"""Data-parallel step time: ours against torch's DistributedDataParallel, in one interleaved run.

    python tests/bench/ddp.py [--sizes 3 14 30] [--rounds 10] [--bucket-mb 25]

Two real ranks on gloo, one thread each. Every round runs one step of each contender, on its own
copy of the model with the same weights and data: forward, backward, sum over ranks, fused AdamW.
    ours     overlap.data_parallelize   after     the same buckets, sent after backward
    flat     one message after backward    ddp       torch's own, averaging, buckets as views
A round's time is that of its slowest rank, figures are medians, and "ratio" is the median of
ours / ddp, round by round. Gradients are compared before anything is timed. The last line is one
JSON object.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from course_lib import data_parallel, overlap
from course_lib.classroom.launch import run_ranks
from course_lib.data_parallel import DataParallel, sum_flattened
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build
from course_lib.parameters import build_records
from course_lib.training import TrainingConfig, loss_sum, make_optimizer

RANKS = 2
SHAPES = {  # million parameters -> shape, and samples of a rank's batch
    3: (ModelConfig(layers=4, width=192, heads=6, vocab=4096, context=128), 8),
    14: (ModelConfig(layers=6, width=384, heads=6, vocab=8192, context=128), 4),
    30: (ModelConfig(layers=8, width=512, heads=8, vocab=8192, context=128), 4),
}
GOAL = 1.00
TOLERANCE = 1e-6  # of gradients, relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bucket-mb", type=float, default=25)
    options = parser.parse_args()
    found = {}
    print("parameters   ours ms  after ms   flat ms    ddp ms  ratio  gradients differ by")
    for size in options.sizes:
        arguments = (size, options.rounds, int(options.bucket_mb * 2**20))
        row = found[size] = run_ranks(measure, RANKS, *arguments, timeout_s=600)[0]
        print(
            f"{row['parameters']:10,d} {row['ours_ms']:9.0f} {row['after_ms']:9.0f}"
            f" {row['flat_ms']:9.0f} {row['ddp_ms']:9.0f} {row['ratio']:6.3f}"
            f" {row['gradient_difference']:20.1e}",
            flush=True,
        )
    print(json.dumps({"ranks": RANKS, "goal": GOAL, "rounds": options.rounds, "sizes": found}))


def measure(size: int, rounds: int, bucket_bytes: int) -> dict[str, float]:
    """One rank's part: medians over the rounds, equal on all ranks."""
    mesh = make_mesh({"dp": RANKS})
    config, samples = SHAPES[size]
    torch.manual_seed(dist.get_rank())  # of the data
    text = torch.randint(config.vocab, (samples, config.context + 1))
    runs = contenders(config, mesh, text, bucket_bytes)
    difference = largest_difference(runs)
    times = {name: [] for name in runs}
    order = random.Random(0)  # the same on all ranks: what runs before leaves its caches behind
    for _ in range(rounds + 2):  # DDP plans its buckets anew after the first step
        for name in order.sample(list(runs), len(runs)):
            step, _ = runs[name]
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(seconds.item())
    times = {name: found[2:] for name, found in times.items()}
    return {
        "parameters": sum(p.numel() for p in runs["ours"][1].parameters()),
        **{f"{name}_ms": 1e3 * median(found) for name, found in times.items()},
        "ratio": median(a / b for a, b in zip(times["ours"], times["ddp"])),
        "gradient_difference": difference,
    }


def contenders(config, mesh, text, bucket_bytes) -> dict:
    """Name to a step and its plain model."""
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    runs = {}

    def add(name, replicate):
        model = build(config)
        records = build_records(model, mesh)
        forward, reduce, watch, divisor = replicate(model, records)
        pairs = [(r.parameter, r.spec.decay) for r in records]
        optimizer = make_optimizer(TrainingConfig(lr=1e-4), pairs)

        def step():
            optimizer.zero_grad(set_to_none=True)
            for own in watch([tokens], 1):
                (loss_sum(forward(own), labels) / divisor).backward()
            reduce(records, mesh)
            optimizer.step()

        runs[name] = step, model

    def ours(made: DataParallel):
        return made.model, made.reduce, made.watch, labels.numel() * RANKS

    def ddp(model, records):
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
        )
        # It averages over ranks, so here, with equal counts, each divides by its own.
        return wrapped, lambda *_: None, lambda batches, count: iter(batches), labels.numel()

    add("ours", lambda *a: ours(overlap.data_parallelize(*a, mesh, bucket_bytes)))
    add("ddp", ddp)
    add("after", lambda *a: ours(data_parallel.data_parallelize(*a, mesh, bucket_bytes)))
    add("flat", lambda model, records: ours(DataParallel(model, sum_flattened)))
    return runs


def largest_difference(runs: dict) -> float:
    """Run one step of each; how far apart gradients are, relative to the whole gradient's norm."""
    for step, _ in runs.values():
        step()
    theirs = {n: p.grad for n, p in runs["ddp"][1].named_parameters()}
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    worst = max(
        float((p.grad - theirs[name]).norm() / whole)
        for key in ("ours", "after", "flat")
        for name, p in runs[key][1].named_parameters()
    )
    if not worst <= TOLERANCE:
        raise SystemExit(f"gradients differ by {worst:.1e} of their norm")
    return worst


if __name__ == "__main__":
    main()
