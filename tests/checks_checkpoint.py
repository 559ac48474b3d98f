"""What checkpoints promise, as checks that their tests and their mutants share."""

import functools
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib import checkpoint
from course_lib.checkpoint import hugging_face
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import ModelConfig, build
from course_lib.parameters import (
    Box,
    Layout,
    build_records,
    materialise,
)
from tests import ranks_checkpoint as ranks

# --------------------------------------------------------------------------- checks on one process


def quietly(check):
    """Without the warnings that damaged checkpoints cause here on purpose."""

    @functools.wraps(check)
    def run(*arguments):
        with warnings.catch_warnings(action="ignore"):
            return check(*arguments)

    return run


def saved_toy(folder: Path, step: int = 1, steps: int = 3, manner: str = "whole"):
    """A checkpoint written by this process alone; returns its path and its state."""
    state = ranks.save_trained(folder, manner, step, steps=steps)
    return folder / f"step_{step}", state


def refusal(path, records=None, optimizer=None) -> str:
    """Words of the error with which a checkpoint is refused; nothing may have changed."""
    mesh = Mesh.single()
    if records is None:
        records, optimizer = ranks.toy(mesh, "whole", seed=99)
    before = [r.parameter.detach().clone() for r in records]
    words = ranks.error_of(checkpoint.load, path, records, optimizer, mesh)
    assert words != "no error", f"{path} was loaded"
    assert all(torch.equal(r.parameter, b) for r, b in zip(records, before)), "weights changed"
    return words


@quietly
def check_damage_is_found(folder: Path) -> None:
    """Truncated, altered, missing: each is found and named, and the older one is taken."""
    saved_toy(folder, 1)
    path, _ = saved_toy(folder, 2)
    whole_copy = folder / "copy"
    shutil.copytree(path, whole_copy)
    for file in sorted(child.name for child in path.iterdir()):
        size = (path / file).stat().st_size
        for harm in ("truncated", "altered", "missing", "empty"):
            content = bytearray((path / file).read_bytes())
            if harm == "truncated":
                (path / file).write_bytes(content[:-1])
            elif harm == "altered":
                content[size * 2 // 3] ^= 1
                (path / file).write_bytes(content)
            elif harm == "empty":
                (path / file).write_bytes(b"")
            else:
                (path / file).unlink()
            words = refusal(path)
            assert file in words, f"{harm} {file}: {words}"
            assert "newest complete one" in words or "is no checkpoint" in words, words
            if harm != "altered":
                assert checkpoint.latest(folder).name == "step_1", f"{harm} {file}"
            shutil.rmtree(path)
            shutil.copytree(whole_copy, path)
    assert checkpoint.latest(folder).name == "step_2"


def check_adam_goes_on(folder: Path) -> None:
    """CK-05: one number, Adam with lr 0.1, gradients +1, -0.5, +1, …; update 11 after a resume."""
    mesh = Mesh.single()

    def one_number():
        records = materialise(ranks.Toy({"x": (1,)}), mesh, 0)
        return records, torch.optim.AdamW(
            [records[0].parameter], lr=0.1, weight_decay=0.0, fused=True
        )

    def update(records, optimizer, number: int) -> float:
        before = records[0].parameter.item()
        records[0].parameter.grad = torch.tensor([1.0 if number % 2 else -0.5])
        optimizer.step()
        return records[0].parameter.item() - before

    records, optimizer = one_number()
    for number in range(1, 11):
        update(records, optimizer, number)
    checkpoint.save(folder, 10, records, optimizer, mesh, {})
    records, optimizer = one_number()
    checkpoint.load(folder / "step_10", records, optimizer, mesh)
    change = update(records, optimizer, 11)
    assert abs(change - -0.0401035) < 1e-6, f"update 11 is {change:.7f}, not -0.0401035"


def check_boxes(folder: Path, shape, old_pieces, new_pieces) -> None:
    """CK-06: saved as some rectangles, loaded as others, anywhere in a larger tensor."""
    mesh = Mesh.single()
    old, new = ranks.held_in(shape, old_pieces), ranks.held_in(shape, new_pieces)
    with torch.no_grad():
        new[0].parameter.fill_(7)
    checkpoint.save(folder, 1, old, None, mesh, {})
    checkpoint.load(folder / "step_1", new, None, mesh)
    full = [torch.zeros(shape), torch.zeros(shape)]
    for tensor, (record,) in zip(full, (old, new)):
        for box in record.boxes:
            tensor[box.place] = record.parameter.detach()[box.local]
    assert torch.equal(*full)
    assert full[0].abs().min() > 0
    assert new[0].parameter.count_nonzero() == math.prod(shape), "padding was not cleared"


def check_files_hold_only_their_part(folder: Path) -> None:
    """CK-08: a shard that is a view of something large is saved alone."""
    mesh = Mesh.single()
    shape, box = (100_000,), Box((0,), (10,), (50,))
    layouts = {"x": Layout((10,), (box,))}
    with torch.device("meta"):
        model = ranks.Toy({"x": shape}, layouts)
    records = materialise(model, mesh, 0)
    path = checkpoint.save(folder, 1, records, None, mesh, {})
    size = sum(child.stat().st_size for child in path.iterdir())
    payload = 10 * 4
    assert size < 1.2 * payload + 10_000, f"{size} bytes for a payload of {payload}"


def check_altered_state_is_found(folder: Path) -> None:
    """A number changed in the manifest, which stays perfect JSON."""
    path, _ = saved_toy(folder)
    text = (path / "manifest.json").read_text()
    assert '"data_step": 1' in text
    (path / "manifest.json").write_text(text.replace('"data_step": 1', '"data_step": 2'))
    assert "manifest.json is altered" in refusal(path)


class Bomb:
    """Writes a marker file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


@quietly
def check_nothing_is_unpickled(folder: Path) -> None:
    """CK-11: no way into the library runs what a pickle says."""
    marker = folder / "marker"
    bomb = folder / "bomb"
    torch.save({"model": Bomb(marker)}, bomb)
    path, _ = saved_toy(folder / "checkpoints", 1)
    for name in ("weights_00000_000.safetensors", "manifest.json"):
        kept = (path / name).read_bytes()
        shutil.copy(bomb, path / name)
        refusal(path)
        with pytest.raises(checkpoint.CheckpointError, match="only damaged"):
            checkpoint.latest(folder / "checkpoints")
        (path / name).write_bytes(kept)
    other = folder / "other" / "step_1"
    other.mkdir(parents=True)
    for name in ("model.pt", "pytorch_model.bin", ".metadata", "optimizer.pkl", "rng.pth"):
        shutil.copy(bomb, other / name)
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 4}
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2", **shape}))
    with pytest.raises(checkpoint.CheckpointError, match="only damaged"):
        checkpoint.latest(other.parent)
    assert "pickle" in refusal(other)
    assert "pickle" in refusal(other / "model.pt")
    assert "pickle" in ranks.error_of(hugging_face.import_model, other)
    gpt = ModelConfig(1, 8, 2, vocab=9, context=4)
    assert "pickle" in ranks.error_of(hugging_face.import_weights, other / "pytorch_model.bin", gpt)
    shutil.copy(bomb, other / "model.safetensors")
    assert "cannot be read" in ranks.error_of(hugging_face.import_model, other)
    assert not marker.exists(), "a pickle was run"


def randomised(config: ModelConfig, seed: int = 1):
    """A model whose biases and norms are not 0 and 1, so that a wrong one shows."""
    model, generator = build(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def check_transformers_agrees(folder: Path, config: ModelConfig) -> None:
    """CK-10: what is exported gives the same logits in transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = randomised(config)
    hugging_face.export_model(folder, model.state_dict(), config)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.arange(3 * config.context).view(3, -1) * 7 % config.vocab
    with torch.no_grad():
        ours, other = model(tokens), theirs.eval()(tokens).logits
    assert ours.std() > 0.5, "the logits are too even to prove anything"
    difference = (ours - other).abs().max().item()
    assert difference <= 1e-5, f"logits differ by {difference:.2e}"


WRAPPERS = {
    "ddp": DDP,
    "ddp(recomputing)": lambda m: DDP(checkpoint_wrapper(m)),
    "compiled": torch.compile,
    "ddp(compiled)": lambda m: DDP(torch.compile(m)),
    "compiled(ddp)": lambda m: torch.compile(DDP(m)),
}


def check_wrapped_names(folder: Path, names=tuple(WRAPPERS)) -> None:
    """CK-10: saved from any wrapper, loaded into none, and back; on a rank: DDP needs a group."""
    mesh = make_mesh({})
    wrap = {"plain": lambda m: m, **{name: WRAPPERS[name] for name in names}}
    config = replace(ranks.SMALL, tie_embeddings=False)
    for old, new in [*((old, "plain") for old in wrap), *(("plain", new) for new in wrap)]:
        records = build_records(wrap[old](build(config, seed=1)), mesh)
        path = checkpoint.save(folder, 1, records, None, mesh, {})
        model = build(config, seed=2)
        checkpoint.load(path, build_records(wrap[new](model), mesh), None, mesh)
        for name, tensor in build(config, seed=1).state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (old, new, name)
