"""How long a cell waits for its ranks, measured in a real Jupyter kernel.

    python tests/bench/launch.py [--repeats 7]

Prints a table (seconds; the warm figures are medians of interleaved calls with 2, 4 and 8 ranks)
and, as the last line, one JSON object. `first_s` is the first call of a fresh kernel, with all
that it imports; `raising_s` is the time until the error of one rank is shown while the others
wait in an all-reduce.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from jupyter_client import KernelManager

ROOT = Path(__file__).parents[2]
WORLD_SIZES = (2, 4, 8)

SET_UP = """
import json, time
from course_lib.classroom.launch import RankError, run_ranks

def seconds(fn, world_size):
    start = time.perf_counter()
    try:
        run_ranks(fn, world_size)
    except RankError:
        pass
    return time.perf_counter() - start

def total():
    import torch
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return value.item()

def one_raises():
    if __import__("torch").distributed.get_rank() == 1:
        raise ValueError("stop")
    total()
"""


def main() -> None:
    """Measure, print the table and the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="warm calls of each kind")
    repeats = parser.parse_args().repeats
    first = {size: first_call(size) for size in WORLD_SIZES}
    warm = warm_calls(repeats)
    print(f"{'ranks':>5} {'first':>7} {'warm':>7} {'raising':>8}   seconds")
    for size in WORLD_SIZES:
        figures = first[size], warm["total"][size], warm["one_raises"][size]
        print("{:5d} {:7.2f} {:7.3f} {:8.3f}".format(size, *figures))
    print(
        json.dumps(
            {
                "first_s": first,
                "warm_s": warm["total"],
                "raising_s": warm["one_raises"],
                "repeats": repeats,
                "cores": os.cpu_count(),
            }
        )
    )


def first_call(world_size: int) -> float:
    """Time the first call of a fresh kernel."""
    with Kernel() as kernel:
        return kernel.value(f"seconds(total, {world_size})")


def warm_calls(repeats: int) -> dict[str, dict[int, float]]:
    """Time calls in one kernel, kinds and sizes in turn; give the medians."""
    kinds = [(name, size) for size in WORLD_SIZES for name in ("total", "one_raises")]
    times: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    with Kernel() as kernel:
        kernel.value("seconds(total, 2)")
        for _ in range(repeats):
            for name, size in kinds:
                times[name, size].append(kernel.value(f"seconds({name}, {size})"))
    medians = {kind: round(statistics.median(values), 4) for kind, values in times.items()}
    return {
        name: {size: medians[name, size] for size in WORLD_SIZES}
        for name in ("total", "one_raises")
    }


class Kernel:
    """A Jupyter kernel with the functions above."""

    def __enter__(self) -> "Kernel":
        # ipc: the ports that Jupyter picks for tcp may be gone before the kernel takes them.
        self.directory = tempfile.TemporaryDirectory()
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=f"{self.directory.name}/socket"
        )
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.value(f"[exec({SET_UP!r}, globals()), 0.0][1]")
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.directory.cleanup()

    def value(self, expression: str) -> float:
        """Run a cell that prints the value of an expression."""
        printed: list[str] = []

        def take(message: dict) -> None:
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))
            printed.append(message["content"].get("text", ""))

        self.client.execute_interactive(f"print({expression})", timeout=120, output_hook=take)
        return float("".join(printed))


if __name__ == "__main__":
    main()
