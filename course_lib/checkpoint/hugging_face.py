"""Weights from and to transformers' GPT-2 and Llama, without transformers.

Both are this course's decoder under other names. Three things differ. GPT-2 keeps query, key and
value in one matrix (`c_attn`). GPT-2 keeps its matrices as (inputs, outputs), the transpose of
ours. And a tied head is left out of the file. Rotary positions turn the same pairs as ours.

Every missing, unexpected or misshapen weight is refused: a model that is silently half random is
worse than none.

Papers: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama, arXiv 2302.13971).
"""

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from course_lib.checkpoint.errors import CheckpointError, listed
from course_lib.checkpoint.files import write_tensors
from course_lib.checkpoint.hugging_face_config import (
    config_from_hugging_face,
    config_to_hugging_face,
    family_of,
)
from course_lib.model import ModelConfig, Transformer
from course_lib.parameters import plain_name

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Our modules, and which of theirs hold them; several of ours in one lie one below the other.
MODULES = """
    ours                      gpt2                         llama
    embedding                 transformer.wte              model.embed_tokens
    position_embedding        transformer.wpe              -
    blocks.*.attention_norm   transformer.h.*.ln_1         model.layers.*.input_layernorm
    blocks.*.attention.query  transformer.h.*.attn.c_attn  model.layers.*.self_attn.q_proj
    blocks.*.attention.key    transformer.h.*.attn.c_attn  model.layers.*.self_attn.k_proj
    blocks.*.attention.value  transformer.h.*.attn.c_attn  model.layers.*.self_attn.v_proj
    blocks.*.attention.output transformer.h.*.attn.c_proj  model.layers.*.self_attn.o_proj
    blocks.*.mlp_norm         transformer.h.*.ln_2         model.layers.*.post_attention_layernorm
    blocks.*.mlp.gate         -                            model.layers.*.mlp.gate_proj
    blocks.*.mlp.up           transformer.h.*.mlp.c_fc     model.layers.*.mlp.up_proj
    blocks.*.mlp.down         transformer.h.*.mlp.c_proj   model.layers.*.mlp.down_proj
    norm                      transformer.ln_f             model.norm
    head                      lm_head                      lm_head
"""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in older files; no weights


def import_model(directory: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of a model in a directory that transformers' `save_pretrained` made.

    directory: with config.json, and model.safetensors or its shards with their index.
    Returns the configuration, and what `import_weights` returns.
    Raises CheckpointError for what our model cannot represent, and for what is not complete.
    """
    path = Path(directory) / CONFIG
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    config = config_from_hugging_face(table)
    return config, import_weights(directory, config)


def export_model(directory: str | Path, weights: Mapping[str, Tensor], config: ModelConfig) -> Path:
    """Write model.safetensors and config.json so that `from_pretrained(directory)` loads them.

    weights: whole tensors by our names: `model.state_dict()`, or `parameters.gather_full`.
    Returns the directory. Raises CheckpointError where transformers has no such model, where the
    weights are not this model's, or where the disk is full; then older files stay as they were.
    """
    directory = Path(directory)
    tensors = export_weights(weights, config)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    text = json.dumps({**config_to_hugging_face(config), "dtype": dtype}, indent=2)
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{WEIGHTS}.{os.getpid()}"
    try:
        write_tensors(partial, tensors)
        (directory / CONFIG).write_text(text + "\n")
        partial.replace(directory / WEIGHTS)
    finally:
        partial.unlink(missing_ok=True)
    return directory


def import_weights(
    source: str | Path | Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Tensor]:
    """Weights by our names, from transformers' names.

    source: a state dict, a .safetensors file, or a directory with one or with shards and an index.
    config: the shape of our model; says whether the source must be a GPT-2 or a Llama.
    Returns tensors for `model.load_state_dict`, every name of it, in the source's dtype.
    Raises CheckpointError naming missing, unexpected and misshapen weights.
    """
    names, ours = _names(config), _our_weights(config)
    embedding = next(theirs for theirs, parts in names.items() if "embedding.weight" in parts)
    prefix = embedding.partition(".")[0] + "."
    source = source if isinstance(source, Mapping) else _read(Path(source))
    found = {  # files of the bare model, as GPT-2's on the hub, leave out the prefix
        name if name.startswith((prefix, "lm_head.")) else prefix + name: tensor
        for name, tensor in source.items()
        if not name.endswith(BUFFERS)
    }
    _require(found, _joined(ours, names), config, "lm_head.weight", embedding)
    weights = {}
    for theirs, parts in names.items():
        tensor = found[theirs].T if theirs.endswith(TRANSPOSED) else found[theirs]
        pieces = tensor.split([len(ours[name]) for name in parts])
        weights.update(zip(parts, (piece.contiguous() for piece in pieces)))
    if config.tie_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def export_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights by transformers' names, from ours; a tied head is left out, as transformers does.

    weights: whole tensors by the plain model's names; names inside wrappers are understood.
    Raises CheckpointError as `export_model`.
    """
    names = _names(config)
    found = {plain_name(name): tensor.detach() for name, tensor in weights.items()}
    _require(found, _our_weights(config), config, "head.weight", "embedding.weight")
    return _joined(found, names)


def _joined(ours: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Our weights as theirs."""
    tensors = {}
    for theirs, parts in names.items():
        tensor = torch.cat([ours[name] for name in parts])
        tensors[theirs] = (tensor.T if theirs.endswith(TRANSPOSED) else tensor).contiguous()
    return tensors


def _names(config: ModelConfig) -> dict[str, list[str]]:
    """Each of transformers' weights, and the ones of ours that it holds."""
    header, *rows = (line.split() for line in MODULES.strip().splitlines())
    column, found = header.index(family_of(config)), {}
    modules = {row[0]: row[column] for row in rows}
    for name in _our_weights(config):
        block = "".join(re.findall(r"\d+", name))
        module, _, part = name.replace(f".{block}.", ".*.").rpartition(".")
        theirs = f"{modules[module]}.{part}".replace("*", block)
        found.setdefault(theirs, []).append(name)
    return found


@cache
def _our_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of our model, without its values; a tied head is left out."""
    with torch.device("meta"):
        return {name: p.detach() for name, p in Transformer(config).named_parameters()}


def _require(
    given: dict[str, Tensor], wanted: Mapping[str, Tensor], config: ModelConfig,
    head: str, embedding: str,
) -> None:  # fmt: skip
    """Refuse missing, unexpected and misshapen weights; a tied head may be there if it is equal."""
    faults = [f"{name} is missing" for name in wanted if name not in given]
    for name, tensor in given.items():
        if name == head and config.tie_embeddings and embedding in given:
            if not torch.equal(tensor, given[embedding]):
                faults.append(f"{head} and {embedding} differ, but the model ties them")
        elif name not in wanted:
            faults.append(f"{name} is unexpected")
        elif tensor.shape != wanted[name].shape:
            shapes = f"{list(tensor.shape)}, not {list(wanted[name].shape)}"
            faults.append(f"{name} has shape {shapes}")
    if faults:
        kind = family_of(config)
        raise CheckpointError(f"the weights are not those of this {kind}: {listed(faults)}")


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or of a directory's one file or shards."""
    file, weights = path / WEIGHTS if path.is_dir() else path, {}
    files = [file]
    try:
        if not file.exists() and (path / INDEX).exists():
            places = json.loads((file := path / INDEX).read_bytes())["weight_map"]
            files = [path / name for name in sorted(set(places.values()))]
        for file in files:
            weights |= load_file(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        never = "pickles are never opened here"
        raise CheckpointError(f"{file} cannot be read: {error!r}; {never}") from error
    return weights
