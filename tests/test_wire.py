"""What gloo really puts on the wire, by the interface's own counter, in a network of our own.

A fresh network namespace has a loopback interface that nobody else uses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.collectives import sent_bytes

PAYLOAD_BYTES = 12 << 20
RANKS = 3
NEW_NETWORK = ["unshare", "--net", "--map-root-user"]

COUNT = """
import fcntl, json, socket, struct, time
from pathlib import Path

# Loopback is down in a new namespace: SIOCSIFFLAGS, IFF_UP.
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))

import torch
import torch.distributed as dist
from course_lib import collectives
from course_lib.classroom import run_ranks

def lo_bytes():
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])  # transmitted

def count(payload_bytes):
    group, ranks = dist.group.WORLD, dist.get_world_size()
    whole = torch.ones(ranks, payload_bytes // 4 // ranks)
    calls = {
        "all_reduce": lambda: collectives.all_reduce(whole, group, "x"),
        "all_gather": lambda: collectives.all_gather(whole[0], group, "x"),
        "reduce_scatter": lambda: collectives.reduce_scatter(whole, group, "x"),
        "broadcast": lambda: collectives.broadcast(whole, group, "x"),
        "all_to_all": lambda: collectives.all_to_all(whole, group, "x"),
    }
    seen = {}
    for kind, start in calls.items():
        start().wait()  # opens connections
        dist.barrier()
        time.sleep(0.1)  # acknowledgements
        before = lo_bytes()
        dist.barrier()
        start().wait()
        dist.barrier()
        time.sleep(0.1)
        seen[kind] = lo_bytes() - before
    return seen

if __name__ == "__main__":
    print(json.dumps(run_ranks(count, RANKS, PAYLOAD_BYTES, backend="gloo")[0]))
"""


@pytest.fixture(scope="module")
def lo_bytes(tmp_path_factory) -> dict[str, int]:
    """Bytes that loopback carried for one call of each kind, all ranks together."""
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are Linux's")
    try:
        allowed = subprocess.run([*NEW_NETWORK, "true"], capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if allowed.returncode:
        pytest.skip(f"no right to make a network namespace: {allowed.stderr.decode().strip()}")
    script = tmp_path_factory.mktemp("wire") / "count.py"
    script.write_text(
        COUNT.replace("RANKS", str(RANKS)).replace("PAYLOAD_BYTES", str(PAYLOAD_BYTES))
    )
    root = str(Path(__file__).parents[1])
    run = subprocess.run(
        [*NEW_NETWORK, sys.executable, "-W", "ignore", str(script)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
)
def test_gloo_sends_what_the_formula_says(lo_bytes, kind):
    """All ranks' bytes together, within 1 %: headers and acknowledgements are the difference."""
    # gloo makes an all-reduce of a reduce-scatter.
    by_formula = "all_reduce" if kind == "reduce_scatter" else kind
    formula = sum(sent_bytes(by_formula, PAYLOAD_BYTES, RANKS, rank, 4) for rank in range(RANKS))
    assert formula <= lo_bytes[kind] <= 1.01 * formula
