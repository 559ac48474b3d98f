"""Memory on one device: what autograd keeps between forward and backward; what the CPU keeps.

The count of saved bytes comes from the running code and is independent of any formula: every
tensor that autograd saves is seen as it is saved, and tensors that share a storage count once.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SavedActivations:
    """Storages that autograd saved while `count_saved_activations` was active."""

    bytes_by_storage: dict[int, int] = field(default_factory=dict)
    _alive: list = field(default_factory=list, repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all saved storages, each counted once."""
        return sum(self.bytes_by_storage.values())


@contextmanager
def count_saved_activations(excluded: Iterable[Tensor] = ()) -> Iterator[SavedActivations]:
    """Count the bytes that the forward pass inside the block saves for its backward pass.

    excluded: tensors that are there anyway, such as parameters and the batch; what shares their
    storage is not counted. Storages stay alive until the block ends, so that no address is
    counted for two tensors.
    """
    saved = SavedActivations()
    present = {_key(tensor.untyped_storage()) for tensor in excluded}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _key(storage) not in present:
            saved.bytes_by_storage[_key(storage)] = storage.nbytes()
            saved._alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    saved._alive.clear()


def _key(storage: torch.UntypedStorage) -> int:
    # Of the storage itself: on the meta device every memory address is 0.
    return storage._cdata


def keep_freed_memory() -> bool:
    """Let the process keep the CPU memory that tensors free; returns whether it could be set.

    By default glibc gives blocks over 32 MB back at once, and the kernel clears their pages again
    at the next use: a few percent of a training step on a CPU. Other systems stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, mmap_max = -1, -4  # the parameters' numbers in malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))
