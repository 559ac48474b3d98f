"""How much of a slow wire is hidden under backward, against what is possible at all.

    python tests/bench/overlap.py [--shares 0.25 0.5 1.0] [--rounds 8] [--size 14] [--bucket-mb 4]

Two real ranks on gloo, one thread each, on an emulated link so slow that all gradients take that
share of backward's time on the wire. Interleaved, round by round:
    base       overlapped, without the link       overlap    overlapped, on the link
    after      the same buckets sent after backward, on the link
hidden    = 1 - (overlap - base) / wire time
possible  = the same, if the wire did nothing but follow `overlap.schedule` over the ready times
            and the end of backward measured without the link, bucket after bucket
A round's time is that of its slowest rank; figures are medians. The last line is one JSON object.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from course_lib.classroom.launch import run_ranks
from course_lib.collectives import EmulatedLink, Link, measure_gloo, sent_bytes, time_of
from course_lib.data_parallel import Buckets, plan_buckets
from course_lib.mesh import make_mesh
from course_lib.model import ModelConfig, build
from course_lib.overlap import Overlap, schedule
from course_lib.parameters import build_records
from course_lib.training import loss_sum

RANKS = 2
LATENCY_S = 1e-5
GOAL = 0.90  # hidden / possible
SHAPES = {  # million parameters -> shape, and samples of a rank's batch
    3: (ModelConfig(layers=4, width=192, heads=6, vocab=4096, context=128), 8),
    14: (ModelConfig(layers=6, width=384, heads=6, vocab=8192, context=128), 4),
    30: (ModelConfig(layers=8, width=512, heads=8, vocab=8192, context=128), 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", type=int, default=14, choices=SHAPES)
    parser.add_argument("--bucket-mb", type=float, default=4)
    options = parser.parse_args()
    arguments = (options.size, options.shares, options.rounds, int(options.bucket_mb * 2**20))
    found = run_ranks(measure, RANKS, *arguments, timeout_s=900)[0]
    print("share  wire ms  base ms  overlap ms  after ms  hidden  possible  hidden/possible")
    for row in found:
        print(
            f"{row['share']:5.2f} {row['wire_ms']:8.0f} {row['base_ms']:8.0f}"
            f" {row['overlap_ms']:11.0f} {row['after_ms']:9.0f} {row['hidden']:7.2f}"
            f" {row['possible']:9.2f} {row['of_possible']:16.2f}"
        )
    print(json.dumps({"ranks": RANKS, "goal": GOAL, "size": options.size, "shares": found}))


def measure(size: int, shares: list[float], rounds: int, bucket_bytes: int) -> list[dict]:
    """One rank's part; figures are equal on all ranks."""
    mesh = make_mesh({"dp": RANKS})
    config, samples = SHAPES[size]
    torch.manual_seed(dist.get_rank())  # of the data
    text = torch.randint(config.vocab, (samples, config.context + 1))
    steps = {kind: Step(config, mesh, text, bucket_bytes, kind) for kind in ("during", "after")}
    gloo = measure_gloo()
    warmed = [slowest(steps["during"].run()[1]) for _ in range(8)]
    backward_s = median(warmed[3:])
    payload = sum(b.payload_bytes for b in steps["during"].buckets.plan)
    return [compare(steps, share, backward_s, payload, rounds, gloo) for share in shares]


class Step:
    """Forward, backward and sum over ranks of one model, with buckets sent during or after."""

    def __init__(self, config, mesh, text, bucket_bytes, kind):
        self.model, self.mesh = build(config), mesh
        self.records = build_records(self.model, mesh)
        self.buckets = Buckets(self.records, mesh, plan_buckets(self.records, mesh, bucket_bytes))
        self.hooks = Overlap(self.buckets) if kind == "during" else None
        self.tokens, self.labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def run(self) -> tuple[float, float]:
        """Seconds of the step, and of its backward pass."""
        self.model.zero_grad(set_to_none=True)
        dist.barrier()
        start = time.perf_counter()
        watched = self.hooks.watch([self.tokens], 1) if self.hooks else [self.tokens]
        for tokens in watched:
            loss = loss_sum(self.model(tokens), self.labels) / self.labels.numel() / RANKS
            self.backward_start_s = time.perf_counter()
            loss.backward()
            self.backward_end_s = time.perf_counter()
        (self.hooks.reduce if self.hooks else self.buckets.sum)(self.records, self.mesh)
        return time.perf_counter() - start, self.backward_end_s - self.backward_start_s


def compare(steps, share, backward_s, payload, rounds, gloo) -> dict[str, float]:
    """The three contenders on a wire that takes this share of backward's time."""
    plan = steps["during"].buckets.plan
    latencies = time_of("all_reduce", 0, RANKS, Link(LATENCY_S, 1)) * len(plan)
    bytes_per_s = sent_bytes("all_reduce", payload, RANKS) / (share * backward_s - latencies)
    wire = EmulatedLink(LATENCY_S, bytes_per_s, gloo)
    sizes = [bucket.payload_bytes for bucket in plan]
    wire_s = sum(time_of("all_reduce", size, RANKS, wire.link) for size in sizes)
    found: dict[str, list[float]] = {name: [] for name in ("base", "overlap", "after", "possible")}
    for _ in range(rounds):
        during = steps["during"]
        found["base"].append(slowest(during.run()[0]))
        # Ranks wait for the slowest: its ready times, and its end of backward, are what counts.
        ready = [slowest(times.ready_s) for times in during.hooks.times]
        exposed = schedule(ready, sizes, wire.link, RANKS)[-1] - slowest(during.backward_end_s)
        found["possible"].append(1 - max(exposed, 0.0) / wire_s)
        with wire:
            found["overlap"].append(slowest(during.run()[0]))
        with wire:
            found["after"].append(slowest(steps["after"].run()[0]))
    base, overlap, after, possible = (median(values) for values in found.values())
    hidden = 1 - median(o - b for o, b in zip(found["overlap"], found["base"])) / wire_s
    return {
        "share": share, "wire_ms": 1e3 * wire_s, "link_bytes_per_s": bytes_per_s,
        "base_ms": 1e3 * base, "overlap_ms": 1e3 * overlap, "after_ms": 1e3 * after,
        "hidden": hidden, "possible": possible, "of_possible": hidden / possible,
        "hidden_after": 1 - (after - base) / wire_s, "buckets": len(plan),
    }  # fmt: skip


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


if __name__ == "__main__":
    main()
