"""The emulated link: against the alpha-beta model, and against a network that is really slow.

    python tests/bench/link.py [--rounds 5] [--shaped]

First part. On an emulated link of 10 MB/s and 5 ms, all-reduces of two ranks are timed and a link
is fitted to them; it predicts every collective on 2, 3 and 4 ranks. Goal: within 15 %.

Second part, with --shaped (needs root, ip and tc). Each rank runs in a network namespace of its
own; they are joined by a bridge, and tc's token bucket (tbf) lets so many bits a second through in
each direction. All-reduces there are timed against the emulated link of the same rate, in turns.
Goal: within 20 %. Emulated: bytes/s = bits/s / 8, latency as a message of one byte shows it.

Times are medians; the last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from course_lib import collectives
from course_lib.classroom import run_ranks
from course_lib.collectives import EmulatedLink, Link, fit, time_of

LINK = Link(5e-3, 10e6)
SIZES = (12_000, 120_000, 1_200_000)  # bytes, which 2, 3 and 4 ranks divide
FITTED = (4_000, 40_000, 400_000, 2_000_000)
GOALS = {"prediction": 0.15, "shaped": 0.20}
MBITS = (100, 400)
SHAPED = (300_000, 1_200_000, 4_800_000)  # bytes
GLOO = 1e12  # the bench is there to tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shaped", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # "rank/ranks/address/rounds"
    options = parser.parse_args()
    if options.rank:
        return be_a_rank(*options.rank.split("/"))
    found = {"goals": GOALS, "prediction": predict(options.rounds)}
    if options.shaped:
        found["shaped"] = [
            row for n in (2, 3) for r in MBITS for row in shaped(n, r, options.rounds)
        ]
    print(json.dumps(found))


def timed(run: Callable[[], object], rounds: int) -> float:
    """Median seconds from the moment at which all ranks are there."""
    run()
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


# ------------------------------------------------------------------------------- against the model


def predict(rounds: int) -> dict:
    """Worst and median relative error of predictions from a fitted link."""
    with_two = run_ranks(time_two, 2, rounds, backend="gloo")[0]
    found = fit(FITTED, with_two, "all_reduce", 2)
    print(f"fitted: {found.bytes_per_s / 1e6:.2f} MB/s, {found.latency_s * 1e3:.2f} ms")
    print("kind            ranks   bytes  predicted ms  measured ms  error %")
    errors = []
    for ranks in (2, 3, 4):
        for kind, size, seconds in run_ranks(time_collectives, ranks, rounds, backend="gloo")[0]:
            predicted = time_of(kind, size, ranks, found)
            errors.append(predicted / seconds - 1)
            print(f"{kind:15s} {ranks:5d} {size:7d} {1e3 * predicted:13.2f} {1e3 * seconds:12.2f}"
                  f" {100 * errors[-1]:8.1f}")  # fmt: skip
    worst = max(errors, key=abs)
    return {
        "latency_s": found.latency_s, "bytes_per_s": found.bytes_per_s, "worst": worst,
        "median": median(map(abs, errors)),
        "share_within_goal": sum(abs(e) <= GOALS["prediction"] for e in errors) / len(errors),
    }  # fmt: skip


def time_two(rounds: int) -> list[float]:
    with EmulatedLink(LINK.latency_s, LINK.bytes_per_s, GLOO):
        return list(time_all_reduces(rounds, FITTED).values())


def time_collectives(rounds: int) -> list[tuple[str, int, float]]:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    found = []
    with EmulatedLink(LINK.latency_s, LINK.bytes_per_s, GLOO):
        for size in SIZES:
            whole = torch.ones(ranks, size // 4 // ranks)
            calls = {
                "all_reduce": lambda t=whole: collectives.all_reduce(t, group, "x"),
                "all_gather": lambda t=whole: collectives.all_gather(t[0], group, "x"),
                "reduce_scatter": lambda t=whole: collectives.reduce_scatter(t, group, "x"),
                "broadcast": lambda t=whole: collectives.broadcast(t, group, "x"),
                "all_to_all": lambda t=whole: collectives.all_to_all(t, group, "x"),
            }
            for kind, start in calls.items():
                found.append((kind, size, timed(lambda s=start: s().wait(), rounds)))
    return found


# ----------------------------------------------------------------------- against a shaped network


def missing_rights() -> str | None:
    """Why this machine can't shape a network of its own, if it can't."""
    if os.name != "posix" or os.geteuid() != 0:
        return "making network namespaces and veth pairs needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (iproute2) is not installed"
    with network(1, 100) as error:
        return error


@contextmanager
def network(ranks: int, mbits: float):
    """Namespaces g0, g1, ... joined by a bridge, each with so many Mbit/s in and out."""
    hub = f"hub{os.getpid()}"
    spaces = [f"g{rank}-{os.getpid()}" for rank in range(ranks)]
    shape = f"root tbf rate {mbits}mbit burst 32kb latency 200ms"
    lines = [f"ip netns add {hub}", f"ip -n {hub} link add bridge type bridge",
             f"ip -n {hub} link set bridge up"]  # fmt: skip
    for rank, space in enumerate(spaces):
        lines += [
            f"ip netns add {space}",
            f"ip -n {hub} link add port{rank} type veth peer name wire netns {space}",
            f"ip -n {hub} link set port{rank} master bridge up",
            f"ip -n {space} addr add 10.77.0.{rank + 1}/24 dev wire",
            f"ip -n {space} link set wire up",
            f"ip -n {space} link set lo up",
            f"ip netns exec {hub} tc qdisc add dev port{rank} {shape}",
            f"ip netns exec {space} tc qdisc add dev wire {shape}",
        ]
    error = None
    try:
        for line in lines:
            run = subprocess.run(line.split(), capture_output=True, text=True)
            if run.returncode:
                error = f"{line}: {run.stderr.strip()}"
                break
        yield error
    finally:
        for space in [*spaces, hub]:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def shaped(ranks: int, mbits: float, rounds: int) -> list[dict]:
    """Rows: size, seconds on the shaped network and on the emulated link, their ratio."""
    with network(ranks, mbits) as error:
        if error:
            raise SystemExit(error)
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"g{rank}-{os.getpid()}", sys.executable, "-W", "ignore",
                 __file__, "--rank", f"{rank}/{ranks}/10.77.0.1/{rounds}"],
                stdout=subprocess.PIPE, text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            output = processes[0].communicate(timeout=300)[0]
        finally:
            for process in processes:
                process.kill()
    real = json.loads(output.splitlines()[-1])
    link = Link(real.pop("0"), mbits * 1e6 / 8)
    emulated = run_ranks(time_emulated, ranks, rounds, link, backend="gloo")[0]
    rows = []
    for size, seconds in real.items():
        here = emulated[int(size)]
        rows.append({"ranks": ranks, "mbits": mbits, "bytes": int(size), "shaped_s": seconds,
                     "emulated_s": here, "ratio": here / seconds})  # fmt: skip
        print(f"{ranks} ranks, {mbits} Mbit/s, {int(size):8d} bytes: shaped {1e3 * seconds:.1f} ms,"
              f" emulated {1e3 * here:.1f} ms, ratio {here / seconds:.3f}")  # fmt: skip
    return rows


def be_a_rank(rank: str, ranks: str, address: str, rounds: str) -> None:
    """One rank in its namespace."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29876", rank=int(rank), world_size=int(ranks)
    )
    out, into = torch.ones(1), torch.ones(1)
    right, left = (int(rank) + 1) % int(ranks), (int(rank) - 1) % int(ranks)
    group = dist.group.WORLD
    hop_s = timed(lambda: collectives.exchange(out, right, into, left, group, "x").wait(), 20)
    seconds = {0: hop_s, **time_all_reduces(int(rounds), SHAPED)}
    if rank == "0":
        print(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def time_all_reduces(rounds: int, sizes: Sequence[int]) -> dict[int, float]:
    tensors = {size: torch.zeros(size // 4) for size in sizes}
    group = dist.group.WORLD
    return {
        size: timed(lambda t=tensor: collectives.all_reduce(t, group, "x").wait(), rounds)
        for size, tensor in tensors.items()
    }


def time_emulated(rounds: int, link: Link) -> dict[int, float]:
    with EmulatedLink(link.latency_s, link.bytes_per_s, GLOO):
        return time_all_reduces(rounds, SHAPED)


if __name__ == "__main__":
    main()
