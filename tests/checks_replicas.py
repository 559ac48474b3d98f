"""Checks of parameters that only some ranks hold alike: KV heads on more ranks, tied stages.

Each is real: attention cut by heads, a tied Transformer cut into two stages, both compared with
the plain model on one rank: initial values, gradients, norm, clipping, updates, checkpoints.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import checkpoint
from course_lib.boxes import Box, whole
from course_lib.data_parallel import Buckets, plan_buckets, sum_each, sum_flattened
from course_lib.engines import pytorch
from course_lib.gradients import finish_gradients, gradient_norm
from course_lib.mesh import Mesh
from course_lib.model import ModelConfig, ParameterSpec, Transformer, declare
from course_lib.model.decoder import Attention
from course_lib.oracle import random_batch
from course_lib.parameters import (
    Layout,
    assert_replicas_agree,
    build_records,
    gather_full,
    lay_out,
    materialise,
)
from course_lib.training import loss_sum
from tests.checks_records import failure

TP4 = {"tp": 4}
PP = {"pp": 2}
GROUPED = ModelConfig(layers=1, width=8, heads=4, kv_heads=2, vocab=11, context=6, bias=False)
TIED = ModelConfig(layers=1, width=8, heads=2, vocab=11, context=6)
CLIP = 0.01  # below every gradient norm here


# --------------------------------------------------------------- KV heads on tp > kv_heads ranks


class HeadShards(nn.Module):
    """Attention of this rank's query heads; four ranks share two KV heads."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.attention = Attention(GROUPED, layer=0)
        ranks, rank = mesh.size("tp"), mesh.rank("tp")
        wide, key_wide = GROUPED.width // ranks, max(4 // ranks, 2)  # rows of a rank
        first = rank * 4 // ranks // key_wide * key_wide
        cut(self.attention.query, Box((rank * wide, 0), (wide, 8), (0, 0)))
        cut(self.attention.key, Box((first, 0), (key_wide, 8), (0, 0)), ("tp",))
        cut(self.attention.value, Box((first, 0), (key_wide, 8), (0, 0)), ("tp",))
        cut(self.attention.output, Box((0, rank * wide), (8, wide), (0, 0)))

    def tie(self):
        return self


def cut(layer: nn.Linear, box: Box, partial_over: tuple[str, ...] = ()) -> None:
    layout = Layout(tuple(layer.weight.shape), (box,), partial_over)
    lay_out(layer, weight=layout).weight = nn.Parameter(torch.empty(box.size))


def heads(mesh: Mesh, seed: int = 3):
    """Model and records; the gradients are this rank's own, not yet summed."""
    with torch.device("meta"):
        model = HeadShards(mesh)
    records = materialise(model, mesh, seed, torch.float64)
    generator = torch.Generator().manual_seed(7)
    x, g = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64)
    (model.attention(x, None, None, None, None) * g).sum().backward()  # a sum over ranks
    return model, records


def check_kv_heads(mesh: Mesh) -> None:
    """Norm, clipping, whole tensors and initial values are the plain model's, in every way."""
    _, plain = heads(Mesh.single())
    want = finish_gradients(plain, Mesh.single(), CLIP)
    for summed in (sum_each, sum_flattened, in_buckets):
        _, records = heads(mesh)
        require_one_owner(records, mesh)
        require_same_weights(records, plain, mesh)
        got = finish_gradients(records, mesh, CLIP, reduce=summed)
        require_same_gradients(got, want, records, plain, mesh)


def check_kv_numbers(mesh: Mesh) -> None:
    """Ones on the ranks that share a head make 2, not 4, and each element counts once."""
    _, records = heads(mesh)
    for record in records:
        record.parameter.grad = torch.ones_like(record.parameter)
    sum_flattened(records, mesh)
    found = {r.name.split(".")[1]: r.parameter.grad.unique().tolist() for r in records}
    assert found == {"query": [1], "key": [2], "value": [2], "output": [1]}, found
    norm, elements = gradient_norm(records, mesh), 2 * 64 + 2 * 4 * 32
    assert math.isclose(norm, math.sqrt(elements)), f"norm {norm}, not {math.sqrt(elements)}"
    for record in records:
        key = record.name.split(".")[1] in ("key", "value")
        shared = mesh.rank("tp") // 2 * 2
        here = (shared, shared + 1) if key else (mesh.rank("tp"),)
        assert record.replicas == here, f"{record.name}: {record.replicas}"


def check_kv_checkpoint(mesh: Mesh, folder: Path) -> None:
    _, plain = heads(Mesh.single())
    _, records = heads(mesh)
    _, again = heads(mesh, seed=4)
    check_checkpoints(mesh, folder, plain, records, again)


# ---------------------------------------------------------------------- tied embedding, stages


class Stage(Transformer):
    """The first stage: embeddings and the block. The second: norm and head. Or the plain model.

    manner: how what belongs to the other stage is absent.
    """

    def __init__(self, stage: int | None, manner: str = "none"):
        super().__init__(TIED)
        others = {None: (), 0: ("norm", "head"), 1: ("embedding", "position_embedding", "blocks")}
        for name in others[stage]:
            if manner == "deleted":
                delattr(self, name)
            else:
                setattr(self, name, None if manner == "none" else nn.Identity())


def first_half(model: Transformer, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]))
    return model.blocks[0](x, None, None, None, None)


def second_half(model: Transformer, x: Tensor, labels: Tensor) -> Tensor:
    return loss_sum(model.head(model.norm(x)), labels) / labels.numel()


def stage(mesh: Mesh, manner: str = "none", seed: int = 3):
    """Model and records of this rank's stage."""
    stages = mesh.size("pp") > 1
    with torch.device("meta"):
        model = Stage(mesh.rank("pp") if stages else None, manner)
    names = [name for name, _ in Transformer(TIED).named_parameters()]
    return model, materialise(model, mesh, seed, torch.float64, names)


def backward(model: Transformer, mesh: Mesh, number: int) -> None:
    """This stage's part of the gradient of one batch."""
    batch = random_batch(TIED, 4, number)
    if mesh.size("pp") == 1:
        second_half(model, first_half(model, batch.tokens), batch.labels).backward()
    elif mesh.rank("pp") == 0:
        x = first_half(model, batch.tokens)
        dist.send(x.detach(), 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, 1)
        x.backward(gradient)
    else:
        x = torch.empty(*batch.tokens.shape, TIED.width, dtype=torch.float64)
        dist.recv(x, 0)
        x.requires_grad_()
        second_half(model, x, batch.labels).backward()
        dist.send(x.grad, 0)


def check_tied_stages(mesh: Mesh) -> None:
    """PP-04: five AdamW steps as the plain model's; the two copies stay equal, counted once."""
    for manner, summed in (
        ("none", sum_each), ("deleted", sum_flattened), ("identity", in_buckets),
    ):  # fmt: skip
        whole_model, plain = stage(Mesh.single())
        model, records = stage(mesh, manner)
        names = {r.name: r.tied for r in records}
        assert names.get("embedding.weight") == ("head.weight",), f"records: {names}"
        require_one_owner(records, mesh)
        require_same_weights(records, plain, mesh)
        optimizers = [torch.optim.AdamW([r.parameter for r in rs], 0.01) for rs in (records, plain)]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model, mesh, step)
            backward(whole_model, Mesh.single(), step)
            got = finish_gradients(records, mesh, CLIP, reduce=summed)
            want = finish_gradients(plain, Mesh.single(), CLIP)
            require_same_gradients(got, want, records, plain, mesh)
            for optimizer in optimizers:
                optimizer.step()
            require_same_weights(records, plain, mesh)


def check_tied_checkpoint(mesh: Mesh, folder: Path) -> None:
    _, plain = stage(Mesh.single())
    _, records = stage(mesh)
    _, again = stage(mesh, seed=4)
    check_checkpoints(mesh, folder, plain, records, again)
    found = checkpoint.read_manifest(folder / "parts" / "step_1").pieces
    names = [piece.name for piece in found if piece.kind == "weight"]
    assert sorted(names) == sorted(record.name for record in plain), f"written: {names}"


# ------------------------------------------------------------------------ compared with the plain


def in_buckets(records, mesh: Mesh) -> None:
    Buckets(records, mesh, plan_buckets(records, mesh, bucket_bytes=200)).sum(records, mesh)


def require_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys(), f"{got.keys() ^ want.keys()} are on one side only"
    for name, tensor in want.items():
        apart = float((got[name] - tensor).norm())
        assert apart <= tolerance * (float(tensor.norm()) + 1e-3), f"{name}: {apart:.2e} apart"


def values(records) -> dict[str, Tensor]:
    return {r.name: r.parameter.detach() for r in records}


def require_same_weights(records, plain, mesh: Mesh) -> None:
    message = failure(assert_replicas_agree, records, mesh)
    assert not message, message
    require_close(gather_full(records, values(records), mesh), values(plain), 1e-9)


def require_one_owner(records, mesh: Mesh) -> None:
    ones = {r.name: torch.ones_like(r.parameter) for r in records}
    for name, counts in gather_full(records, ones, mesh).items():
        assert counts.unique().tolist() == [1.0], f"{name}: owners {counts.unique().tolist()}"


def require_same_gradients(got, want, records, plain, mesh: Mesh) -> None:
    assert math.isclose(got.norm, want.norm, rel_tol=1e-10), f"norm {got.norm}, not {want.norm}"
    assert got.norm > CLIP
    left = gather_full(records, {r.name: r.parameter.grad for r in records}, mesh)
    require_close(left, {r.name: r.parameter.grad for r in plain}, 1e-9)


def check_checkpoints(mesh: Mesh, folder: Path, plain, records, again) -> None:
    """What parts saved, parts and the plain model load; and what the plain model saved, parts."""
    optimizer = adamw(records)
    path = checkpoint.save(folder / "parts", 1, records, optimizer, mesh, {})
    saved = everything(records, optimizer, mesh)
    for loaded, where in ((again, mesh), (plain, Mesh.single())):
        other = adamw(loaded)
        checkpoint.load(path, loaded, other, where)
        require_close(everything(loaded, other, where), saved, 0.0)
    if mesh.is_first:
        checkpoint.save(folder / "plain", 1, plain, other, Mesh.single(), {})
    dist.barrier()
    other = adamw(again, rate=0.2)
    checkpoint.load(folder / "plain" / "step_1", again, other, mesh)
    require_close(everything(again, other, mesh), saved, 0.0)


def adamw(records, rate: float = 0.1) -> torch.optim.AdamW:
    """After one step with made-up gradients, equal in all replicas."""
    for record in records:
        record.parameter.grad = record.parameter.detach().sin()
    optimizer = torch.optim.AdamW([r.parameter for r in records], rate)
    optimizer.step()
    return optimizer


def everything(records, optimizer, mesh: Mesh) -> dict[str, Tensor]:
    """Whole weights and moments."""
    found = gather_full(records, values(records), mesh)
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {r.name: optimizer.state[r.parameter][kind] for r in records}
        whole_moments = gather_full(records, moments, mesh)
        found |= {f"{name}:{kind}": tensor for name, tensor in whole_moments.items()}
    return found


# ------------------------------------------------------------------------------- what is refused


class Lone(nn.Module):
    """One parameter "w", laid out as given; None: absent."""

    def __init__(self, layout: Layout | None, local=(), **spec):
        super().__init__()
        if layout is not None:
            self.w = nn.Parameter(torch.empty(local))
            declare(self, w=ParameterSpec(std=1.0, **spec))
            lay_out(self, w=layout)


def check_refusals(mesh: Mesh) -> None:
    """What two ranks hold of a parameter, and the words that all of them get."""
    rank = mesh.world_rank

    def rows(first: int, count: int, local: int, **more) -> Lone:
        return Lone(Layout((4,), (Box((first,), (count,), (0,)),), **more), (local,))

    cases = [
        ((rows(0, 3, 3), rows(2, 2, 2)), "w [4]: boxes at (0,) and (2,) overlap; ranks must hold"),
        ((rows(0, 4, 4), rows(0, 2, 2)), "boxes at (0,) and (0,) overlap"),
        ((rows(0, 4, 4), rows(0, 4, 6)), "boxes at (0,) and (0,) overlap"),  # padded otherwise
        ((rows(0, 1, 1), rows(3, 1, 1)), "2 of 4 elements are there"),
        ((rows(0, 4, 4), rows(4, 1, 1)), "leaves the tensor"),
        ((rows(0, 4, 4), rows(0, 4, 4, partial_over=("tp",))), "on rank 0, but"),
        ((Lone(None), Lone(None)), "no rank holds w"),
        ((Lone(None), Lone(Layout((4,), (whole((4,)),)), (4,), tied_to="v")), "no rank holds v"),
        ((Lone(None), rows(0, 4, 4)), ""),
    ]
    for models, words in cases:
        message = failure(build_records, models[rank], mesh, ["w"])
        assert words in message, f"{message!r} instead of {words!r}"
        assert bool(words) == bool(message), message


def number(mesh: Mesh):
    """A parameter without dimensions, beside one with."""
    with torch.device("meta"):
        model = declare(
            nn.ParameterDict({"n": torch.empty(()), "v": torch.empty(3)}),
            n=ParameterSpec(std=1.0), v=ParameterSpec(std=1.0),
        )  # fmt: skip
    model.tie = lambda: model
    return materialise(model, mesh, seed=5)


def check_number(mesh: Mesh, folder: Path) -> None:
    """A parameter of no dimension is drawn, counted, gathered, saved and loaded as any other."""
    records, plain = number(mesh), number(Mesh.single())
    assert records[0].parameter.item() != 0
    require_same_weights(records, plain, mesh)
    for record in records:
        record.parameter.grad = torch.ones_like(record.parameter)
    done = finish_gradients(records, mesh)
    assert math.isclose(done.norm, 2.0 * mesh.size("dp"), rel_tol=1e-6), done
    check_checkpoints(mesh, folder, plain, records, number(mesh))


def check_ddp_sums_partial_gradients(mesh: Mesh) -> None:
    """DDP sums over "dp"; what each rank of "tp" sees only a part of is summed there too."""
    model = declare(nn.Linear(3, 1), weight=ParameterSpec(std=1.0), bias=ParameterSpec())
    lay_out(model, weight=Layout((1, 3), (whole((1, 3)),), partial_over=("tp",)))
    records = build_records(model, mesh)
    replicas = pytorch.data_parallelize(model, records, mesh)
    for accumulation in (1, 2):
        model.zero_grad()
        part = torch.full((1, 3), 1.0 + mesh.rank("dp") + 10 * mesh.rank("tp"))
        for x in replicas.watch([part] * accumulation, accumulation):
            replicas.model(x).sum().backward()
        finish_gradients(records, mesh, reduce=replicas.reduce)
        got = model.weight.grad.unique().tolist(), model.bias.grad.tolist()
        want = ([accumulation * (1.0 + 2 + 11 + 12)], [accumulation * 2.0])
        assert got == want, f"{got}, not {want}"


def check_ddp_refuses_cut_replicas(mesh: Mesh) -> None:
    """DDP would add the parts that ranks of "dp" hold of one parameter."""
    rank = mesh.rank("dp")
    model = Lone(Layout((4,), (Box((2 * rank,), (2,), (0,)),)), (2,))
    message = failure(pytorch.data_parallelize, model, build_records(model, mesh), mesh)
    assert 'DDP sums over all of "dp", where w is cut' in message, message
