"""From text to batches: corpora, a byte-level BPE tokenizer, token shards, samples, batches.

A training run must see the same samples in the same order on any number of ranks, before and
after a resume, on every machine. So nothing here keeps a position in a stream. Text becomes
memory-mapped token files once (`prepare`); after that, the sample at (step, index) is a pure
function of the data and the seed (`TokenDataset.sample`), and a batch is a few such samples.

    text -> documents -> tokens -> shards on disk      corpora, cleaning, deduplication, tokenizer,
                                                       shards, pipeline, preparation
    (step, index) -> window -> sample -> batch         samples, mixtures, batches, loading

Names are loaded when they are first used, so that preparing data never imports torch.
"""

import importlib

_MODULES = {
    "config": ("DataConfig",),
    "cleaning": ("clean",),
    "deduplication": ("Deduplicator", "Verdict", "jaccard", "signature", "similarity"),
    "corpora": ("CORPORA", "Corpus", "Document", "default_cache", "load_corpus"),
    "tokenizer": ("END_OF_TEXT", "TextTokenizer", "load_tokenizer", "train_tokenizer"),
    "shards": ("ShardWriter", "TokenShards", "join_shards", "token_dtype"),
    "preparation": ("Prepared", "Source", "prepare"),
    "samples": ("NO_TARGET", "Sample", "TokenDataset", "permuted"),
    "mixtures": ("Mixture", "open_datasets"),
    "disk": ("EmulatedDisk",),
    "batches": ("Batch", "batch", "evaluation_batches", "micro_batches", "to_batch"),
    "loading": ("DataWorkerDied", "fetch_ahead"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted([*_HOME, "CorpusUnavailable", "DataError"])


class DataError(ValueError):
    """Data that must not be trained on. The message names the file and, where it can, the byte."""


class CorpusUnavailable(RuntimeError):
    """A corpus that cannot be had here. The message says why, and what to do instead."""


def __getattr__(name: str) -> object:
    """Load a public name from the submodule that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
