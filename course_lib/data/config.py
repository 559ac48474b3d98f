"""The [data] section of the configuration."""

import math
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Literal

from course_lib.config import type_faults
from course_lib.data import corpora
from course_lib.data.loading import WorkerKind
from course_lib.data.samples import Packing

Duplicates = Literal["none", "exact", "near"]


@dataclass(frozen=True)
class DataConfig:
    """What a model is trained on. The vocabulary is the model's: `model.vocab`."""

    corpus: Annotated[
        str, "'shakespeare', 'aws-docs', 'python-docs', 'tinystories', … or a path"
    ] = "shakespeare"
    tokenizer: Annotated[str, "'bpe' (learned) or the path of a tokenizer.json"] = "bpe"
    sequence_length: Annotated[int, "tokens in a sample"] = 256
    packing: Annotated[Packing, "'stream', 'documents' (kept apart) or 'pad' (each alone)"] = (
        "stream"
    )
    held_out: Annotated[float, "share of the text kept for evaluation, 0 to below 1"] = 0.05
    seed: Annotated[int, "decides the held-out documents and the order of samples"] = 0
    mixture: Annotated[
        dict[str, float], "corpora instead of `corpus`, each with its weight, in any unit"
    ] = field(default_factory=dict)
    clean: Annotated[bool, "take HTML, control characters and spare blanks out of the text"] = False
    deduplicate: Annotated[Duplicates, "which repeated documents to leave out"] = "none"
    processes: Annotated[int, "that prepare text; 1: this one"] = 1
    workers: Annotated[int, "batches in the making ahead of training; 0: none, made in turn"] = 1
    worker_kind: Annotated[WorkerKind, "what makes them"] = "thread"
    cache: Annotated[str | None, "folder (default: ~/.cache/one-gpu-to-many)"] = None

    def faults(self) -> list[str]:
        """Everything that is wrong with these values, each with the nearest valid choice."""
        if wrong_types := type_faults(self):
            return wrong_types
        found = [corpora.unknown_corpus(name) for name in self.mixture or [self.corpus]]
        if self.mixture:
            found += [f"mixture: {fault}" for fault in weight_faults(self.mixture)]
            if self.corpus != DataConfig.corpus:
                found.append("corpus and mixture are both given; put the corpus in the mixture")
        if self.processes < 1:
            found.append(f"processes = {self.processes} must be at least 1")
        if self.workers < 0:
            found.append(f"workers = {self.workers} must be at least 0")
        if self.tokenizer != "bpe" and not os.path.isfile(os.path.expanduser(self.tokenizer)):
            found.append(f"tokenizer = {self.tokenizer!r} is no file; nearest: 'bpe'")
        if self.sequence_length < 1:
            found.append(f"sequence_length = {self.sequence_length} must be at least 1")
        if not 0 <= self.held_out < 1:
            found.append(f"held_out = {self.held_out} must be 0 or more and below 1")
        if os.path.expanduser(self.cache or "").startswith("~"):
            found.append(f"cache = {self.cache!r} is in the home of an unknown user")
        return [fault for fault in found if fault]


def weight_faults(weights: Mapping) -> list[str]:
    """What is wrong with the weights of a mixture, by the names of its sources."""
    found = [
        f"weight {weight} of {name!r} must be a number from 0 to below infinity"
        for name, weight in weights.items()
        if not isinstance(weight, Real) or not 0 <= weight < math.inf
    ]
    return found or ([] if sum(weights.values()) > 0 else ["one weight must be above 0"])
