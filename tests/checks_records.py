"""Checks of parameter records and collectives, on parameters cut in made-up ways.

No parallel module exists yet that cuts parameters, so `Cut` does it: uneven rows, padded rows,
columns, interleaved pieces, an empty shard, and one parameter held whole, over "tp".
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import collectives
from course_lib.collectives import Call, count_traffic
from course_lib.data_parallel import sum_flattened
from course_lib.gradients import finish_gradients, gradient_norm
from course_lib.mesh import AXES, Mesh
from course_lib.model import ParameterSpec, declare
from course_lib.parameters import (
    Box,
    Layout,
    assert_replicas_agree,
    build_records,
    gather_full,
    lay_out,
    materialise,
    whole,
)

SHAPES = {
    "replicated": (5, 3),
    "constant": (4,),
    "uneven": (7, 3),
    "padded": (131, 2),  # more than two blocks of rows
    "columns": (3, 5),
    "pieces": (8, 2),
    "empty": (64, 2),  # all rows on the first rank
}
SPECS = {name: ParameterSpec(std=0.5) for name in SHAPES} | {"constant": ParameterSpec(fill=1.0)}
TP = {"tp": 2}
DP_TP = {"dp": 2, "tp": 2}


def cut(name: str, ranks: int, rank: int) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Shape of the local tensor, and the boxes in it."""
    shape = SHAPES[name]
    if ranks == 1 or name in ("replicated", "constant"):
        return shape, (whole(shape),)
    assert ranks == 2
    columns = shape[-1]
    if name == "uneven":
        return ((4, 3), (Box((0, 0), (4, 3), (0, 0)),)) if rank == 0 else (
            (3, 3), (Box((4, 0), (3, 3), (0, 0)),)
        )  # fmt: skip
    if name == "padded":  # 66 rows each, of which the last rank uses 65
        return (66, 2), (Box((66 * rank, 0), (66 - rank, 2), (0, 0)),)
    if name == "columns":
        return (3, 3 - rank), (Box((0, 3 * rank), (3, 3 - rank), (0, 0)),)
    if name == "pieces":
        return (4, 2), tuple(Box((4 * i + 2 * rank, 0), (2, 2), (2 * i, 0)) for i in range(2))
    rows = 0 if rank else 64
    return (64, columns), (Box((64 * rank, 0), (rows, columns), (0, 0)),)


class Cut(nn.Module):
    """One child that holds all parameters of SHAPES, as this rank of "tp" holds them."""

    def __init__(self, mesh: Mesh, partial_over: tuple[str, ...] = ()):
        super().__init__()
        self.layer = nn.Module()
        for name, shape in SHAPES.items():
            local, boxes = cut(name, mesh.size("tp"), mesh.rank("tp"))
            self.layer.register_parameter(name, nn.Parameter(torch.empty(local)))
            if boxes != (whole(shape),):
                lay_out(self.layer, **{name: Layout(shape, boxes)})
        layout = Layout(SHAPES["constant"], (whole(SHAPES["constant"]),), partial_over)
        lay_out(self.layer, constant=layout)
        declare(self.layer, **SPECS)

    def tie(self):
        return self


def made(mesh: Mesh, partial_over: tuple[str, ...] = ()):
    """Model and records of a materialised `Cut`."""
    with torch.device("meta"):
        model = Cut(mesh, partial_over)
    return model, materialise(model, mesh, seed=3)


def filled(record, tensor: Tensor, padding: float = 0.0) -> Tensor:
    """A whole tensor as this rank holds it, with this value where no box lies."""
    local = torch.full_like(record.parameter, padding)
    for box in record.boxes:
        local[box.local] = tensor[box.place]
    return local.detach()


def random_whole(seed: int) -> dict[str, Tensor]:
    """A random whole tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def failure(function, *arguments) -> str:
    """The message of the error that a call ends with; empty where it does not fail."""
    try:
        function(*arguments)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------- records


def check_cut_starts_as_plain(mesh: Mesh) -> None:
    """TP-15: every rank's part has the plain model's numbers, padding is zero."""
    _, records = made(mesh)
    _, plain = made(Mesh.single())
    expected = {r.name: r.parameter.detach() for r in plain}
    for record in records:
        assert record.shape == SHAPES[record.name.removeprefix("layer.")]
        assert torch.equal(record.parameter, filled(record, expected[record.name])), record.name
    full = gather_full(records, {r.name: r.parameter.detach() for r in records}, mesh)
    assert full.keys() == expected.keys()
    for name, tensor in full.items():
        assert torch.equal(tensor, expected[name]), name


def check_one_owner(mesh: Mesh) -> None:
    """Every element of every parameter has exactly one owner in the world."""
    _, records = made(mesh)
    ones = {r.name: torch.ones_like(r.parameter) for r in records}
    for name, counts in gather_full(records, ones, mesh).items():
        assert counts.unique().tolist() == [1.0], f"{name}: owners {counts.unique().tolist()}"


def check_each_element_counted_once(mesh: Mesh) -> None:
    """The norm of a cut gradient is the whole one's, on every rank; padding does not count."""
    _, records = made(mesh)
    gradients = random_whole(seed=1)
    for record in records:
        record.parameter.grad = filled(record, gradients[record.name], padding=7.0)
    got = gradient_norm(records, mesh)
    want = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert math.isclose(got, want, rel_tol=1e-6), f"norm {got}, not {want}"


def check_replicated_and_sharded_norm(mesh: Mesh) -> None:
    """CLIP-01: replicated gradient (3, 4), half of a gradient of norm 12 on each of two ranks."""
    layer = nn.ParameterDict({"replicated": torch.zeros(2), "sharded": torch.zeros(1)})
    rank = mesh.rank("tp")
    lay_out(layer, sharded=Layout((2,), (Box((rank,), (1,), (0,)),)))
    declare(layer, replicated=ParameterSpec(), sharded=ParameterSpec())
    layer["replicated"].grad = torch.tensor([3.0, 4.0])
    layer["sharded"].grad = torch.tensor([12 / math.sqrt(2)])
    done = finish_gradients(build_records(layer, mesh), mesh, clip_norm=1.0)
    assert math.isclose(done.norm, 13.0, rel_tol=1e-6), f"norm {done.norm}"
    left = torch.tensor([3.0, 4.0]) / 13
    assert torch.allclose(layer["replicated"].grad, left, rtol=1e-5)


def check_sums(mesh: Mesh) -> None:
    """Gradients are summed over "dp", and over the axes of which each rank sees only a part."""
    _, records = made(mesh, partial_over=("tp",))
    place = 1 + mesh.rank("dp") + 10 * mesh.rank("tp")
    for record in records:
        record.parameter.grad = torch.full_like(record.parameter, place)
    sum_flattened(records, mesh)
    dp = range(mesh.size("dp"))
    over_dp = sum(1 + d + 10 * mesh.rank("tp") for d in dp)
    over_both = sum(1 + d + 10 * t for d in dp for t in range(mesh.size("tp")))
    for record in records:
        want = over_both if record.name == "layer.constant" else over_dp
        got = record.parameter.grad.unique().tolist()
        assert got == [want], f"{record.name}: {got}, not {want}"


def check_missing_gradients_become_zeros(mesh: Mesh) -> None:
    """A rank that has no gradient of a parameter adds zero, and leaves out no message."""
    _, records = made(mesh)
    first = mesh.rank("dp") == 0
    for index, record in enumerate(records):
        record.parameter.grad = torch.ones_like(record.parameter) if index or first else None
    finish_gradients(records, mesh)
    for index, record in enumerate(records):
        want = mesh.size("dp") if index else 1
        assert record.parameter.grad.unique().tolist() == [want], record.name


def check_strided_gradients_are_summed(mesh: Mesh) -> None:
    """COM-02: a gradient with other strides than its parameter, and its peers', arrives whole."""
    _, records = made(mesh)
    gradients = random_whole(seed=mesh.rank("dp"))
    for record in records:
        local = filled(record, gradients[record.name])
        strided = local.dim() == 2 and mesh.rank("dp") == 0
        record.parameter.grad = local.t().contiguous().t() if strided else local
    sum_flattened(records, mesh)
    parts = [random_whole(seed=rank) for rank in range(mesh.size("dp"))]
    for record in records:
        want = filled(record, sum(part[record.name] for part in parts))
        assert torch.allclose(record.parameter.grad, want), record.name


def check_replicas_are_compared(mesh: Mesh) -> None:
    """Equal replicas pass; one changed bit is found, with the parameter and the ranks."""
    _, records = made(mesh)
    assert_replicas_agree(records, mesh)
    if not mesh.is_first and mesh.rank("tp") == mesh.size("tp") - 1:
        with torch.no_grad():
            records[0].parameter[1, 1] += 1e-7
    message = failure(assert_replicas_agree, records, mesh)
    assert "layer.replicated" in message, message
    assert "ranks 0 and 1" in message, message


# ----------------------------------------------------------------------------------------- mesh


def check_groups(mesh: Mesh) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Coordinates, and the global ranks of every group that this rank is in."""
    assert mesh.world_size == dist.get_world_size()
    assert mesh.is_first == (dist.get_rank() == 0)
    for axis in AXES:
        assert (mesh.group(axis) is None) == (mesh.size(axis) == 1)
    groups = {axis: dist.get_process_group_ranks(group) for axis, group in mesh.groups.items()}
    return {axis: mesh.rank(axis) for axis in AXES}, groups


# ---------------------------------------------------------------------------------- collectives


def numbered(shape: tuple[int, ...]) -> Tensor:
    """Distinct numbers, other ones on every rank."""
    return (torch.arange(math.prod(shape)) * (dist.get_rank() + 1.5) - 3).view(shape)


def check_collectives_equal_torch(mesh: Mesh) -> None:
    """TP-04: each gives a tensor of the full shape, equal to torch.distributed's own."""
    ranks, group = mesh.world_size, mesh.world
    for shape in ((3, 5), (1,), ()):
        summed, largest = numbered(shape), numbered(shape)
        dist.all_reduce(summed)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(collectives.all_reduce(numbered(shape), group, "x").wait(), summed)
        got = collectives.all_reduce(numbered(shape), group, "x", op="max").wait()
        assert torch.equal(got, largest)
        pieces = [torch.empty(shape) for _ in range(ranks)]
        dist.all_gather(pieces, numbered(shape))
        got = collectives.all_gather(numbered(shape), group, "x").wait()
        assert torch.equal(got, torch.stack(pieces))
        sent = numbered(shape)
        dist.broadcast(sent, 1)
        got = collectives.broadcast(numbered(shape), group, "x", source=1).wait()
        assert torch.equal(got, sent)
        everything = numbered((ranks, *shape))
        dist.all_reduce(everything)
        got = collectives.reduce_scatter(numbered((ranks, *shape)), group, "x").wait()
        assert torch.equal(got, everything[dist.get_rank()])


def check_strided_refused(mesh: Mesh) -> None:
    """COM-02: transposed and expanded tensors are refused by all, before anything is sent."""
    strided = torch.arange(12.0).view(3, 4).t()
    expanded = torch.ones(1).expand(mesh.world_size, 3)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for tensor in (strided[: mesh.world_size], expanded):
            with count_traffic() as traffic:
                message = failure(getattr(collectives, collective), tensor, mesh.world, "x")
                assert "contiguous" in message, f"{collective}: {message}"
            assert not traffic.calls


def check_traffic(mesh: Mesh) -> None:
    """Calls are counted by kind, purpose, ranks and payload; an inner block counts its own."""
    ranks, group = mesh.world_size, mesh.world
    with count_traffic() as outer:
        collectives.all_reduce(torch.zeros(10), group, "gradients").wait()
        with count_traffic() as inner:
            collectives.all_gather(torch.zeros(3, dtype=torch.float64), group, "weights").wait()
            collectives.reduce_scatter(torch.zeros(ranks, 5), group, "gradients").wait()
        collectives.broadcast(torch.zeros(7, dtype=torch.int8), group, "start").wait()
        collectives.all_reduce(torch.zeros(10), None, "nothing").wait()
    collectives.all_reduce(torch.zeros(10), group, "not counted").wait()
    within = [
        Call("all_gather", "weights", ranks, ranks * 24),
        Call("reduce_scatter", "gradients", ranks, ranks * 20),
    ]
    assert inner.calls == within, inner.calls
    first, last = Call("all_reduce", "gradients", ranks, 40), Call("broadcast", "start", ranks, 7)
    assert outer.calls == [first, *within, last], outer.calls
    assert outer.payload_bytes() == 40 + ranks * 44 + 7
    assert outer.payload_bytes("gradients") == 40 + ranks * 20
    assert outer.payload_bytes(kind="all_gather") == ranks * 24
    assert outer.payload_bytes("gradients", "all_reduce") == 40
    assert outer.waiting_s > inner.waiting_s > 0
