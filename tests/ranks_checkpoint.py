"""A toy model cut in odd ways, and what the tests of checkpoints run on ranks."""

import contextlib
import errno
import hashlib
import importlib
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from course_lib import checkpoint
from course_lib.checkpoint import files
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, ParameterSpec, declare
from course_lib.oracle import random_batch, split
from course_lib.parameters import (
    Box,
    Layout,
    gather_full,
    lay_out,
    materialise,
    whole,
)
from course_lib.trainer.step import parallelize, training_step
from course_lib.training import TrainingConfig

SMALL = ModelConfig(layers=2, width=16, heads=4, vocab=29, context=8, dropout=0.1)
SHAPES = {"matrix": (7, 7), "bias": (7,), "scale": (1,)}  # 57 numbers: few sizes divide them


class Toy(nn.Module):
    """Parameters without a computation; each may be cut in its own way."""

    def __init__(self, shapes=None, layouts=None, locals_=None):
        super().__init__()
        for name, shape in (shapes or SHAPES).items():
            local = (locals_ or {}).get(name, shape)
            setattr(self, name, nn.Parameter(torch.empty(local)))
            declare(self, **{name: ParameterSpec(std=1.0)})
        if layouts:
            lay_out(self, **layouts)

    def tie(self):
        """Nothing is tied."""
        return self


def cut(shape, rank: int, ranks: int, manner: str):
    """The layout and the local shape of one parameter that is cut over "tp"."""
    rows, rest = shape[0], shape[1:]
    if manner == "whole":
        return Layout(shape, (whole(shape),)), shape
    if manner == "columns" and rest:
        per = -(-rest[0] // ranks)
        first, last = min(rank * per, rest[0]), min((rank + 1) * per, rest[0])
        box = Box((0, first), (rows, last - first), (0, 0))
        return Layout(shape, (box,) if last > first else ()), (rows, last - first)
    if manner == "interleaved":  # row 0 to rank 0, row 1 to rank 1, …
        own = range(rank, rows, ranks)
        boxes = [
            Box((row, *[0] * len(rest)), (1, *rest), (i, *[0] * len(rest)))
            for i, row in enumerate(own)
        ]
        return Layout(shape, tuple(boxes)), (len(own), *rest)
    per = -(-rows // ranks)  # rows: uneven, the last ranks may have none
    first, last = min(rank * per, rows), min((rank + 1) * per, rows)
    zeros = [0] * len(rest)
    pad = 2 if manner == "padded" else 0
    box = Box((first, *zeros), (last - first, *rest), (pad, *zeros))
    boxes = (box,) if last > first else ()
    return Layout(shape, boxes), (last - first + 2 * pad, *rest)


def toy(mesh: Mesh, manner: str, seed: int = 0, shapes=None):
    """Records and optimizer of a toy that is cut in this manner over "tp"."""
    shapes = shapes or SHAPES
    parts = {n: cut(s, mesh.rank("tp"), mesh.size("tp"), manner) for n, s in shapes.items()}
    with torch.device("meta"):
        model = Toy(
            shapes, {n: p[0] for n, p in parts.items()}, {n: p[1] for n, p in parts.items()}
        )
    records = materialise(model, mesh, seed)
    return records, adamw(records)


def adamw(records):
    return torch.optim.AdamW([r.parameter for r in records], lr=0.1, fused=True)


def take_steps(records, optimizer, steps: int = 3) -> None:
    """Updates with gradients that differ from element to element, so that moments do too."""
    for step in range(steps):
        for index, record in enumerate(records):
            grad = torch.sin(torch.arange(record.parameter.numel()) + 7.0 * index + step)
            record.parameter.grad = grad.view_as(record.parameter).to(record.parameter)
        optimizer.step()


def everything(records, optimizer, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Whole parameters and moments by name, and Adam's step; on every rank."""
    found = gather_full(records, {r.name: r.parameter.detach() for r in records}, mesh)
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {r.name: optimizer.state[r.parameter][kind] for r in records}
        full = gather_full(records, moments, mesh)
        found |= {f"{name}:{kind}": tensor for name, tensor in full.items()}
    steps = {float(optimizer.state[r.parameter]["step"]) for r in records}
    return {**found, "step": torch.tensor(sorted(steps))}


def same(a: dict, b: dict) -> bool:
    """Whether two states are equal to the bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


def mesh_over_tp() -> Mesh:
    """All ranks along "tp"; also without a process group."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    return make_mesh({"tp": size})


def held_in(shape, pieces):
    """A toy that holds a parameter as these pieces, one below the other in a larger tensor."""
    local, placed, row = [max(s[d] for _, s in pieces) + 1 for d in range(len(shape))], [], 0
    for offset, size in pieces:
        placed.append(Box(offset, size, (row, *[0] * (len(shape) - 1))))
        row += size[0] + 1
    local[0] = row
    with torch.device("meta"):
        model = Toy({"x": shape}, {"x": Layout(shape, tuple(placed))}, {"x": local})
    return materialise(model, Mesh.single(), 0)


# --------------------------------------------------------------------------- functions for ranks


def save_trained(folder, manner: str, step: int = 1, keep=None, steps: int = 3):
    """Train a toy, save it; returns the whole state."""
    mesh = mesh_over_tp()
    records, optimizer = toy(mesh, manner)
    take_steps(records, optimizer, steps)
    checkpoint.save(folder, step, records, optimizer, mesh, {"data_step": step}, keep)
    return everything(records, optimizer, mesh)


def load_newest(folder, manner: str):
    """Load the newest checkpoint into a toy that started from other weights."""
    mesh = mesh_over_tp()
    records, optimizer = toy(mesh, manner, seed=99)
    path = checkpoint.latest(folder, mesh)
    assert path is not None, "no checkpoint is left"
    state = checkpoint.load(path, records, optimizer, mesh)
    for record in records:  # what no box covers is zero
        rest = record.parameter.detach().clone()
        for box in record.boxes:
            rest[box.local] = 0
        assert not rest.any()
    return path.name, state, everything(records, optimizer, mesh)


def load_and_save(folder, manner: str, step: int):
    """Load the newest and save it again, as it lies here."""
    mesh = mesh_over_tp()
    records, optimizer = toy(mesh, manner, seed=99)
    checkpoint.load(checkpoint.latest(folder, mesh), records, optimizer, mesh)
    checkpoint.save(folder, step, records, optimizer, mesh, {"data_step": step})
    return everything(records, optimizer, mesh)


def latest_on_a_slow_disk(folder):
    """What `latest` says where rank 1's file system does not show the newest one yet."""
    seen = dict.fromkeys(checkpoint.complete(folder)[: 2 - dist.get_rank()])
    faults = {"checkpoint.manifest:_faults": lambda *_: seen}
    return with_fault(faults, checkpoint.latest, folder, mesh_over_tp())


def error_of(function, *arguments) -> str:
    """The words of the CheckpointError that this rank raised."""
    try:
        function(*arguments)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "no error"


def train(folder, first: int, last: int, save_at: int | None = None, resume: bool = False):
    """Steps first … last - 1 of a small GPT over "dp"; returns losses, and bits of the weights."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = make_mesh({"dp": size})
    state = parallelize(SMALL, TrainingConfig(seed=5 if resume else 1), mesh)
    if resume:
        state.model.seed = 1  # of the dropout masks
        saved = checkpoint.load(
            checkpoint.latest(folder, mesh), state.records, state.optimizer, mesh
        )
        state.data_step = saved["data_step"]
    losses = []
    for step in range(first, last):
        assert state.data_step == step
        own = split(random_batch(SMALL, 8, step), size, 8 // size)[mesh.rank("dp")]
        losses.append(training_step(state, own, 1e-2, 1.0, "fp32").loss)
        if save_at == step + 1:
            checkpoint.save(
                folder, save_at, state.records, state.optimizer, mesh, {"data_step": save_at}
            )
    digest = hashlib.sha256()
    for record in state.records:
        digest.update(record.parameter.detach().numpy().tobytes())
    return losses, digest.hexdigest()


class AtEachPoint:
    """Does something with the number of each point at which a save changes the disk."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree")

    def __init__(self, folder, act):
        self.folder, self.act, self.points, self.active = str(folder), act, 0, True
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments) -> None:
        if event in self.EVENTS and (
            self.folder in str(arguments[0]) or event in ("os.rmdir", "os.remove")
        ):
            self.point()

    def point(self) -> None:
        if self.active:
            self.active = False  # what is done here is no point of its own
            self.act(self.points)
            self.points, self.active = self.points + 1, True

    def write_half(self, tensors, path, **keywords) -> None:
        """In place of safetensors' `save_file`: the middle of a file is a point, too."""
        save_file(tensors, path, **keywords)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        self.point()
        path.write_bytes(content)


def save_step_2(folder, manner: str, act) -> int:
    """Save step 2 in place of step 1, and act at each point of it; returns the number of points."""
    mesh = mesh_over_tp()
    records, optimizer = toy(mesh, manner)
    take_steps(records, optimizer, 5)
    watch = AtEachPoint(folder, act)
    with mock.patch.object(files, "save_file", watch.write_half):
        checkpoint.save(folder, 2, records, optimizer, mesh, {"data_step": 2}, keep=1)
    watch.active = False
    return watch.points


def save_and_copy(folder, manner: str, copies: Path) -> int:
    """At each point of a save, copy what a kill there would leave."""

    def copy_file(source, target):
        with contextlib.suppress(FileNotFoundError):  # the other rank has just renamed it
            shutil.copyfile(source, target)

    def copy(point: int) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        target = copies / f"rank_{rank}_point_{point:03d}"
        shutil.copytree(folder, target, copy_function=copy_file)

    return save_step_2(folder, manner, copy)


def save_and_die(folder, manner: str, victim: int, at: int) -> None:
    """Kill one rank at one point of a save."""

    def die(point: int) -> None:
        if (dist.get_rank(), point) == (victim, at):
            os.kill(os.getpid(), signal.SIGKILL)

    save_step_2(folder, manner, die)


def with_fault(faults: dict, function, *arguments):
    """Run a function while names of the library, "module:attribute", are something else.

    As `monkeypatch`, but inside a rank.
    """
    with contextlib.ExitStack() as stack:
        for place, replacement in faults.items():
            module, attribute = place.split(":")
            owner = importlib.import_module(f"course_lib.{module}")
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        return function(*arguments)


def write_half_on_rank_1(tensors, path, **keywords):
    """What a full disk does, on one of two ranks."""
    if dist.get_rank() == 1:
        path.write_bytes(b"only a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    save_file(tensors, path, **keywords)


def save_on_full_disk(folder, faults):
    """Words of the error on this rank, and what is left of the save."""
    words = with_fault(faults, error_of, save_trained, folder, "rows", 2, 1, 5)
    dist.barrier()
    return words, sorted(child.name for child in Path(folder).iterdir())


def save_with_disagreements(folder, whats):
    mesh, words = mesh_over_tp(), {}
    for what in whats:
        records, optimizer = toy(mesh, "rows")
        if what == "holes":  # the second rank's rows are held by nobody
            records = [replace(r, boxes=r.boxes if mesh.is_first else ()) for r in records]
        if what == "owners":  # both write the same whole parameters
            records = [replace(r, owner=True) for r in toy(mesh, "whole")[0]]
        state = {"data_step": mesh.rank("tp") if what == "state" else 0}
        words[what] = error_of(checkpoint.save, folder, 1, records, optimizer, mesh, state)
    return words


def load_words(folder, manner="rows"):
    mesh = mesh_over_tp()
    records, optimizer = toy(mesh, manner, seed=99)
    return error_of(checkpoint.load, Path(folder) / "step_1", records, optimizer, mesh)
