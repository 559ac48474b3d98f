"""Checks of rings, derivatives and handles, shared by the tests and by the mutants.

Each check takes the mesh of the ranks that it runs on, first, and fails with AssertionError.
"""

import gc
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import collectives
from course_lib.collectives import autograd, count_traffic, rings, sent_bytes
from course_lib.mesh import Mesh

DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
FORMS = {
    "transposed": lambda: numbers(4, 6).t(),
    "expanded": lambda: numbers(1, 5).expand(3, 5),
    "every second": lambda: numbers(14)[::2],
    "no dimension": lambda: numbers(1)[0],
}


def sizes(ranks: int) -> list[int]:
    """Without elements, with empty chunks, with equal ones, with a remainder."""
    return sorted({0, 1, ranks - 1, ranks, 2 * ranks + 1, 3 * ranks - 1})


def place(mesh: Mesh) -> tuple[int, int]:
    return (dist.get_rank() if mesh.world else 0), mesh.world_size


def numbers(*shape: int, dtype=torch.float32) -> Tensor:
    """Small whole numbers, others on every rank, whose sums are exact in every dtype."""
    seed = 1 + (dist.get_rank() if dist.is_initialized() else 0)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def summed(tensor: Tensor) -> Tensor:
    """The sum over ranks, by torch."""
    total = tensor.contiguous().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


# ------------------------------------------------------------------------------------------ rings


def check_ring_sums(mesh: Mesh) -> None:
    """Reduce-scatter, and an all-gather after it, give torch's sums, for all sizes and dtypes."""
    rank, ranks = place(mesh)
    cases = [(size, torch.float32) for size in sizes(ranks)]
    for size, dtype in cases + [(2 * ranks + 1, dtype) for dtype in DTYPES]:
        tensor = numbers(size, dtype=dtype)
        before, want = tensor.clone(), summed(tensor)
        chunk = rings.reduce_scatter(tensor, mesh.world)
        assert torch.equal(chunk, want.tensor_split(ranks)[rank]), (size, dtype, chunk, want)
        total = rings.all_gather(chunk, mesh.world, size)
        assert torch.equal(total, want), (size, dtype, total, want)
        assert torch.equal(tensor, before)


def check_ring_copies(mesh: Mesh) -> None:
    """All-gather, broadcast and all-to-all move what they should."""
    rank, ranks = place(mesh)
    for size in sizes(ranks):
        whole = torch.arange(size) * 3 - 5
        chunk = whole.tensor_split(ranks)[rank]
        assert torch.equal(rings.all_gather(chunk, mesh.world, size), whole)
        for source in {0, ranks - 1, size % ranks}:
            got = rings.broadcast(whole * (rank == source), mesh.world, source)
            assert torch.equal(got, whole), (size, source, got)
        pieces = [torch.full((size + to,), 10 * rank + to) for to in range(ranks)]
        got = rings.all_to_all(pieces, mesh.world, [size + rank] * ranks)
        assert [piece.tolist() for piece in got] == [
            [10 * source + rank] * (size + rank) for source in range(ranks)
        ]


def check_ring_strides(mesh: Mesh) -> None:
    """COM-02: tensors that are not dense are summed and copied like dense ones."""
    for name, make in FORMS.items():
        tensor = make()
        want = summed(tensor)
        assert torch.equal(rings.all_reduce(tensor, mesh.world), want), name
        if mesh.world is not None:
            dist.broadcast(first := tensor.contiguous().clone(), 0)
            assert torch.equal(rings.broadcast(tensor, mesh.world), first), name
        if tensor.dim() == 1:
            got = rings.all_gather(tensor, mesh.world)
            assert torch.equal(got.view(mesh.world_size, -1)[place(mesh)[0]], tensor), name


def check_ring_sends(mesh: Mesh) -> None:
    """What is really sent is the closed form, with real chunk sizes."""
    rank, ranks = place(mesh)
    for elements in (1, 2 * ranks, 3 * ranks - 1):
        tensor = torch.ones(elements, dtype=torch.float64)
        chunk = tensor.tensor_split(ranks)[rank]
        runs: dict[str, Callable] = {
            "all_reduce": lambda: rings.all_reduce(tensor, mesh.world),
            "all_gather": lambda: rings.all_gather(chunk, mesh.world, elements),
            "broadcast": lambda: rings.broadcast(tensor, mesh.world),
        }
        for kind, run in runs.items():
            with count_traffic() as traffic:
                run()
            sent = traffic.payload_bytes(kind="send")
            formula = sent_bytes(kind, tensor.nbytes, ranks, rank, element_bytes=8)
            assert sent == formula, (kind, elements, sent, formula)
            if elements % ranks == 0 and kind != "broadcast":
                assert sent == sent_bytes(kind, tensor.nbytes, ranks)


def contributions(mesh: Mesh) -> list[list[int]]:
    """After each step of an all-reduce of ones: how many ranks' numbers are in each chunk."""
    frames: list[list[int]] = []
    ones = torch.ones(2 * mesh.world_size)
    rings.all_reduce(ones, mesh.world, lambda chunks: frames.append([int(c[-1]) for c in chunks]))
    return frames


def check_same_bits(mesh: Mesh) -> None:
    """Sums of any floats are close to exact ones, and equal to the bit on all ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensor = torch.randn(1001, generator=generator)
    total = rings.all_reduce(tensor, mesh.world)
    exact = tensor.double()
    dist.all_reduce(exact)
    assert torch.allclose(total.double(), exact, atol=1e-5)
    first = total.clone()
    dist.broadcast(first, 0)
    assert torch.equal(total, first)


# ------------------------------------------------------------------------------------ derivatives


def check_pairs(mesh: Mesh) -> None:
    """Each pair of operations gives the dense gradients: a linear layer cut in every way, fp64.

    Dense: y = x @ w, loss = sum(y * y * c), on every rank. Parts: of x's rows, of w's columns, or
    of the dimension that is summed over.
    """
    ranks, rank, group = mesh.world_size, dist.get_rank(), mesh.world
    x, w = _random(2 * ranks, 3 * ranks), _random(3 * ranks, 5 * ranks)
    c = _random(2 * ranks, 5 * ranks)
    dense = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = ((dense[0] @ dense[1]).square() * c).sum()
    loss.backward()

    def close(got: Tensor | None, want: Tensor, what: str) -> None:
        assert got is not None, f"{what}: no gradient"
        error = float((got - want).norm() / want.norm())
        assert error < 1e-10, f"{what}: {float(got.norm() / want.norm()):.3f} x the reference"

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(ranks, dim)[rank].clone().requires_grad_()

    # Columns of w: x is used differently by each rank, y is in parts.
    own_x, columns = x.clone().requires_grad_(), part(w, 1)
    y = autograd.gather_from(autograd.copy_to(own_x, group, "x") @ columns, group, "y")
    got = (y.square() * c).sum()
    got.backward()
    close(got, loss, "loss by columns")
    close(own_x.grad, dense[0].grad, "copy_to")
    close(columns.grad, dense[1].grad.chunk(ranks, 1)[rank], "gather_from")

    # Rows of w: x is split, y is a sum of terms.
    own_x, rows = x.clone().requires_grad_(), part(w, 0)
    y = autograd.reduce_from(autograd.split_to(own_x, group, "x") @ rows, group, "y")
    got = (y.square() * c).sum()
    got.backward()
    close(got, loss, "loss by rows")
    close(own_x.grad, dense[0].grad, "split_to")
    close(rows.grad, dense[1].grad.chunk(ranks, 0)[rank], "reduce_from")

    # Samples in parts on the way in and out, w's columns in between (sequence parallelism).
    own_x, columns, rows = part(x, 0), part(w, 1), part(c, 0)
    y = autograd.all_gather(own_x, group, "x") @ columns
    spread = torch.zeros(2 * ranks, 5 * ranks, dtype=y.dtype)
    spread[:, 5 * rank : 5 * rank + 5] = 1
    terms = torch.cat([y] * ranks, 1) * spread  # this rank's term of y
    y = autograd.reduce_scatter(terms, group, "y")
    got = autograd.reduce_from((y.square() * rows.detach()).sum(), group, "loss")
    got.backward()
    close(got, loss, "loss by samples")
    close(own_x.grad, dense[0].grad.chunk(ranks, 0)[rank], "all_gather")
    close(columns.grad, dense[1].grad.chunk(ranks, 1)[rank], "reduce_scatter")


def check_uneven_rows_return(mesh: Mesh) -> None:
    """Rows go to other ranks, are squared there, and their gradients come home."""
    ranks, rank = mesh.world_size, dist.get_rank()
    sent = [(rank + 2 * to) % 3 for to in range(ranks)]  # also none
    received = [(source + 2 * rank) % 3 for source in range(ranks)]
    rows = _random(sum(sent), 4) if sum(sent) else torch.zeros(0, 4, dtype=torch.float64)
    rows.requires_grad_()
    arrived = autograd.all_to_all(rows, mesh.world, "rows", sent, received)
    assert arrived.shape == (sum(received), 4)
    ((rank + 1) * arrived.square()).sum().backward()
    factors = torch.repeat_interleave(torch.arange(1.0, ranks + 1), torch.tensor(sent)).double()
    assert torch.allclose(rows.grad, 2 * rows.detach() * factors[:, None], rtol=1e-12)


def check_all_reduce_backward(mesh: Mesh) -> None:
    """TP-12: y = sum over ranks of w (rank + 1), loss y.sum() on each: gradient rank + 1."""
    rank = dist.get_rank()
    w = torch.ones(2, requires_grad=True)
    autograd.reduce_from(w * (rank + 1), mesh.world, "y").sum().backward()
    assert w.grad is not None, "no gradient"
    assert w.grad.tolist() == [rank + 1.0] * 2, f"gradient {w.grad.tolist()} on rank {rank}"


def check_strided_gradients(mesh: Mesh) -> None:
    """COM-02: expanded and transposed gradients are communicated like dense ones."""
    ranks, group = mesh.world_size, mesh.world
    for name in ("copy_to", "reduce_from", "split_to", "gather_from", "all_gather",
                 "reduce_scatter", "all_to_all"):  # fmt: skip
        operation = getattr(autograd, name)
        x = _random(2 * ranks, 2 * ranks)
        factor = _random(2 * ranks, 2 * ranks, seed=7)
        for form in ("expanded", "transposed"):
            gradients = []
            for dense in (False, True):
                leaf = x.clone().requires_grad_()
                y = operation(leaf.t() if form == "transposed" else leaf, group, "x")
                if form == "expanded":
                    y.backward(torch.ones(1, dtype=y.dtype).expand(y.shape)
                               if not dense else torch.ones_like(y))  # fmt: skip
                else:
                    weights = factor.repeat(ranks, ranks)[: y.shape[1], : y.shape[0]].t()
                    upstream = weights.contiguous() if dense else weights
                    before = upstream.clone()
                    y.backward(upstream)
                    assert torch.equal(upstream, before), f"{name} changed its gradient"
                gradients.append(leaf.grad)
            assert torch.equal(*gradients), f"{name}, {form}: {gradients}"


def _random(*shape: int, seed: int = 0) -> Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------- handles


def check_buffers(mesh: Mesh) -> None:
    """Nobody else holds what is sent; the handle does, until it is waited for, and twice."""
    ranks, group = mesh.world_size, mesh.world
    right, left = (dist.get_rank() + 1) % ranks, (dist.get_rank() - 1) % ranks
    calls = {
        "all_gather": (lambda t: collectives.all_gather(t, group, "x"), (1000,)),
        "reduce_scatter": (lambda t: collectives.reduce_scatter(t, group, "x"), (ranks, 9)),
        "all_to_all": (lambda t: collectives.all_to_all(t, group, "x"), (5 * ranks, 3)),
        "exchange": (
            lambda t: collectives.exchange(t, right, torch.empty(11), left, group, "x"), (11,),
        ),
    }  # fmt: skip
    for name, (start, shape) in calls.items():
        sent = torch.ones(shape)
        alive = weakref.ref(sent)
        handle = start(sent)
        del sent
        gc.collect()
        assert alive() is not None, f"{name} lets go of what it sends"
        result = handle.wait()
        gc.collect()
        assert alive() is None, f"{name} keeps what was sent"
        assert handle.wait() is result
        assert result.unique().tolist() in ([1.0], [float(ranks)]), name
    handle = collectives.all_reduce(torch.ones(1000), group, "x")
    gc.collect()
    assert handle.wait().unique().tolist() == [float(ranks)]
