"""Weights from and to transformers' GPT-2 and Llama, without transformers.

Both are this course's decoder under other names. Three things differ. GPT-2 keeps query, key and
value in one matrix (`c_attn`). GPT-2 keeps its matrices as (inputs, outputs), the transpose of
ours. And a tied head is left out of the file. Rotary positions turn the same pairs as ours.

What our model cannot represent is refused, and so is every missing, unexpected or misshapen
weight: a model that is silently half random is worse than none.

Papers: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama, arXiv 2302.13971).
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from course_lib.checkpoint.errors import CheckpointError
from course_lib.checkpoint.files import write_tensors
from course_lib.checkpoint.hugging_face_config import (
    config_from_hugging_face,
    config_to_hugging_face,
    family_of,
)
from course_lib.model import ModelConfig, Transformer
from course_lib.parameters import plain_name

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NAMED = 8  # differences that an error names


def import_model(directory: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of a model in a directory that transformers' `save_pretrained` made.

    directory: with config.json, and model.safetensors or its shards with their index.
    Returns the configuration, and weights by our names for `model.load_state_dict`.
    Raises CheckpointError for what our model cannot represent, and for what is not complete.
    """
    directory = Path(directory)
    config = config_from_hugging_face(_read_json(directory / CONFIG))
    return config, import_weights(directory, config)


def export_model(directory: str | Path, weights: Mapping[str, Tensor], config: ModelConfig) -> Path:
    """Write model.safetensors and config.json so that `from_pretrained(directory)` loads them.

    weights: whole tensors by our names: `model.state_dict()`, or `parameters.gather_full`.
    Returns the directory. Raises CheckpointError where transformers has no such model, where the
    weights are not this model's, or where the disk is full.
    """
    directory = Path(directory)
    tensors = export_weights(weights, config)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    text = json.dumps({**config_to_hugging_face(config), "dtype": dtype}, indent=2)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory / WEIGHTS, lambda path: write_tensors(path, tensors))
        _replace(directory / CONFIG, lambda path: path.write_text(text + "\n"))
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error}") from error
    return directory


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write under another name, then rename: the old file stays until the new one is whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# -------------------------------------------------------------------------------- weights


def import_weights(
    source: str | Path | Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """Weights by our names, from transformers' names.

    source: a state dict, a .safetensors file, or a directory with one or with shards and an index.
    config: the shape of our model; says whether the source must be a GPT-2 or a Llama.
    Returns every name of the plain model's `state_dict`, in the source's dtype.
    Raises CheckpointError naming missing, unexpected and misshapen weights.
    """
    family = _family(config)
    found = source if isinstance(source, Mapping) else _read_weights(Path(source))
    found = family.full_names(found)
    entries = family.entries(config)
    shapes = {entry.theirs: _their_shape(entry, _our_shapes(config)) for entry in entries}
    given = _without_tied_head(found, config, family.head, family.embedding)
    _require_weights(given, shapes, f"transformers' {family.name}")
    weights = {}
    for entry in entries:
        tensor = found[entry.theirs].T if entry.transposed else found[entry.theirs]
        rows = [_our_shapes(config)[name][0] for name in entry.ours]
        weights.update(zip(entry.ours, (piece.contiguous() for piece in tensor.split(rows))))
    if config.tie_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def export_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by transformers' names, from ours; a tied head is left out, as transformers does.

    weights: whole tensors by the plain model's names; names inside wrappers are understood.
    Raises CheckpointError where transformers has no such model, and for missing, unexpected and
    misshapen weights.
    """
    family = _family(config)
    found = {plain_name(name): tensor.detach() for name, tensor in weights.items()}
    given = _without_tied_head(found, config, "head.weight", "embedding.weight")
    _require_weights(given, _our_shapes(config), "this model")
    tensors = {}
    for entry in family.entries(config):
        joined = torch.cat([found[name] for name in entry.ours])
        tensors[entry.theirs] = (joined.T if entry.transposed else joined).contiguous()
    return tensors


@dataclass(frozen=True)
class Entry:
    """One of transformers' tensors, and which of ours it holds, one below the other."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """How transformers names the weights of one kind of model."""

    name: str
    prefix: str  # of all but the head; left out by files of the bare model
    embedding: str
    blocks: str
    block: tuple[tuple[str, tuple[str, ...], bool], ...]  # (theirs, ours, transposed) in a block
    others: tuple[tuple[str, str], ...]
    buffers: tuple[str, ...]  # endings of names that older files have and that hold no weights
    head: str = "lm_head.weight"

    def entries(self, config: ModelConfig) -> list[Entry]:
        """All tensors of a model of this shape."""
        found = [Entry(self.prefix + theirs, (ours,)) for theirs, ours in self.others]
        for layer in range(config.layers):
            for theirs, ours, transposed in self.block:
                names = tuple(f"blocks.{layer}.{name}" for name in ours)
                found.append(Entry(f"{self.prefix}{self.blocks}.{layer}.{theirs}", names))
                if transposed and theirs.endswith("weight"):
                    found[-1] = Entry(found[-1].theirs, names, transposed=True)
        if not config.tie_embeddings:
            found.append(Entry(self.head, ("head.weight",)))
        return [entry for entry in found if entry.ours[0] in _our_shapes(config)]

    def full_names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors under full names, without wrappers' names and without buffers."""
        plain = {plain_name(name): tensor for name, tensor in weights.items()}
        bare = not any(name.startswith(self.prefix) for name in plain)
        return {
            self.prefix + name if bare and name != self.head else name: tensor
            for name, tensor in plain.items()
            if not name.endswith(self.buffers)
        }


def _layer(theirs: str, *ours: str, transposed: bool = False):
    """A linear layer or a norm, with and without bias."""
    return tuple(
        (f"{theirs}.{part}", tuple(f"{name}.{part}" for name in ours), transposed)
        for part in ("weight", "bias")
    )


GPT2 = Family(
    name="GPT-2",
    prefix="transformer.",
    embedding="transformer.wte.weight",
    blocks="h",
    block=(
        *_layer("ln_1", "attention_norm"),
        *_layer("attn.c_attn", "attention.query", "attention.key", "attention.value",
                transposed=True),
        *_layer("attn.c_proj", "attention.output", transposed=True),
        *_layer("ln_2", "mlp_norm"),
        *_layer("mlp.c_fc", "mlp.up", transposed=True),
        *_layer("mlp.c_proj", "mlp.down", transposed=True),
    ),
    others=(
        ("wte.weight", "embedding.weight"),
        ("wpe.weight", "position_embedding.weight"),
        ("ln_f.weight", "norm.weight"),
        ("ln_f.bias", "norm.bias"),
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip

LLAMA = Family(
    name="Llama",
    prefix="model.",
    embedding="model.embed_tokens.weight",
    blocks="layers",
    block=(
        *_layer("input_layernorm", "attention_norm"),
        *_layer("self_attn.q_proj", "attention.query"),
        *_layer("self_attn.k_proj", "attention.key"),
        *_layer("self_attn.v_proj", "attention.value"),
        *_layer("self_attn.o_proj", "attention.output"),
        *_layer("post_attention_layernorm", "mlp_norm"),
        *_layer("mlp.gate_proj", "mlp.gate"),
        *_layer("mlp.up_proj", "mlp.up"),
        *_layer("mlp.down_proj", "mlp.down"),
    ),
    others=(("embed_tokens.weight", "embedding.weight"), ("norm.weight", "norm.weight")),
    buffers=(".rotary_emb.inv_freq",),
)


def _family(config: ModelConfig) -> Family:
    return {"GPT-2": GPT2, "Llama": LLAMA}[family_of(config)]


@cache
def _our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of our model; a tied head is left out."""
    with torch.device("meta"):
        model = Transformer(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _their_shape(entry: Entry, ours: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    rows = sum(ours[name][0] for name in entry.ours)
    shape = (rows, *ours[entry.ours[0]][1:])
    return shape[::-1] if entry.transposed else shape


def _without_tied_head(weights, config: ModelConfig, head: str, embedding: str) -> dict:
    """Drop a tied head, after a look whether it is really the embedding."""
    given = dict(weights)
    if config.tie_embeddings and head in given:
        tied = given.pop(head)
        if embedding in given and not torch.equal(tied, given[embedding]):
            raise CheckpointError(f"{head} and {embedding} differ, but the model ties them")
    return given


def _require_weights(given: Mapping[str, Tensor], wanted: Mapping[str, tuple], whose: str) -> None:
    faults = [f"{name} is missing" for name in wanted if name not in given]
    faults += [f"{name} is unexpected" for name in given if name not in wanted]
    faults += [
        f"{name} has shape {list(given[name].shape)}, not {list(wanted[name])}"
        for name in wanted
        if name in given and tuple(given[name].shape) != tuple(wanted[name])
    ]
    if faults:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise CheckpointError(
            f"the weights are not those of {whose} of this shape: {'; '.join(faults[:NAMED])}{more}"
        )


# -------------------------------------------------------------------------------- files


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or of a directory's one file or shards."""
    if path.is_dir():
        if (path / WEIGHTS).is_file():
            return _read_file(path / WEIGHTS)
        if (path / INDEX).is_file():
            return _read_shards(path)
        pickles = sorted(child.name for child in path.glob("*.bin"))
        raise CheckpointError(
            f"{path} holds no {WEIGHTS}"
            + (f"; {pickles[0]} is a pickle, which is never opened here" if pickles else "")
        )
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file; pickles are never opened here")
    return _read_file(path)


def _read_shards(directory: Path) -> dict[str, Tensor]:
    places = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(places, dict) or any(Path(str(f)).name != f for f in places.values()):
        raise CheckpointError(f"{directory / INDEX} has no weight_map of names to files")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        content = _read_file(directory / name)
        if lacking := sorted(k for k, file in places.items() if file == name and k not in content):
            raise CheckpointError(f"{directory / name} lacks {lacking[0]}, which the index names")
        weights.update(content)
    return weights


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return table
