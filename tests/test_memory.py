"""What autograd keeps, by unique storage; and freed memory that the process keeps."""

import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.memory import count_saved_activations


def saved_bytes(function, *inputs, excluded=()) -> int:
    with count_saved_activations(excluded) as saved:
        result = function(*inputs)
    del result
    return saved.total_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_saved_is_counted_on_every_device(device):
    """A linear layer keeps its input, GELU its own input: (4, 8) and (4, 16) fp32."""
    layer = nn.Linear(8, 16, device=device)
    x = torch.empty(4, 8, device=device)

    def forward(x):
        return F.gelu(layer(x))

    assert saved_bytes(forward, x, excluded=layer.parameters()) == 4 * (4 * 8 + 4 * 16)
    assert saved_bytes(forward, x, excluded=[*layer.parameters(), x]) == 4 * 4 * 16


def test_tensors_that_share_a_storage_count_once():
    x = torch.ones(10, 10, requires_grad=True)
    assert saved_bytes(lambda: (x * x).sum()) == 400
    assert saved_bytes(lambda: (x[:5] * x[5:]).sum()) == 400
    assert saved_bytes(lambda: (x.t() @ x).sum()) == 400


def test_a_view_counts_with_all_of_its_storage():
    x = torch.ones(100, requires_grad=True)
    assert saved_bytes(lambda: x[:1].exp() * x[1:2]) == 4 * 100 + 4


def test_freed_memory_is_not_mistaken_for_what_is_counted():
    """Results that die at once may leave their address to the next tensor."""
    x = torch.ones(1000, requires_grad=True)

    def forward():
        for _ in range(20):
            x.exp()  # keeps its result, and drops it

    assert saved_bytes(forward) == 20 * 4000


def test_nothing_is_saved_without_gradients_or_after_the_block():
    x = torch.ones(10, requires_grad=True)
    with torch.no_grad():
        assert saved_bytes(lambda: x.exp()) == 0
    with count_saved_activations() as saved:
        pass
    x.exp()
    assert saved.total_bytes == 0


def test_backward_works_as_without_the_counter():
    x = torch.ones(3, requires_grad=True)
    with count_saved_activations():
        y = (x * x).sum()
    y.backward()
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept_and_used_again():
    code = (
        "import resource, torch; from course_lib.memory import keep_freed_memory\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def use():\n"
        "    before = faults(); torch.ones(16 << 20); return faults() - before\n"
        "use(); without = use(); assert keep_freed_memory()\n"
        "print(without, [use() for _ in range(32)][-1])"  # after some the heap has its shape
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    without, kept = map(int, result.stdout.split())
    assert kept < without / 10, "page faults of a 64 MB tensor, with the setting and without"
