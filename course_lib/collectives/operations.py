"""The collectives that the library uses: torch's own, counted, checked and kept alive.

Each function starts the operation and returns a `Handle`; `handle.wait()` gives the result. The
handle keeps the buffers alive until then. A group of None is one rank alone: nothing is sent.

Two rules are enforced here. Tensors must be contiguous: gloo reads the memory behind a strided
tensor as if it were dense, and corrupts it silently. Reductions are sums (or a maximum), never
averages: the one division of a step happens before backward.

gloo sends what the ring and the tree do, except in a reduce-scatter: it makes an all-reduce of it
and keeps one piece, twice the bytes (torch 2.13). NCCL doesn't.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import cost, emulation
from course_lib.collectives.failures import CollectiveError, DisagreementError, require_agreement
from course_lib.collectives.traffic import Call, Transfer, count_call, count_wait

# Newer names first: PyTorch 2.13 warns at the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective on its way. `wait` returns its result; the buffers live as long as this."""

    def __init__(self, result: Tensor, call: Call | None = None, works=(), pending=None, kept=None):
        self._result, self._call, self._works, self._kept = result, call, works, kept
        self._pending = pending
        self._launched_s = time.perf_counter()
        self.transfer: Transfer | None = None  # when it was on its way, once it was waited for

    def wait(self) -> Tensor:
        """Block until the result is there (on a GPU: make the current stream wait for it)."""
        if self._works:
            start_s = time.perf_counter()
            try:
                for work in self._works:
                    work.wait()
                if self._pending is not None:
                    self._pending.wait()
            except RuntimeError as error:
                raise CollectiveError.of(self._call, error) from error
            end_s = time.perf_counter()
            self.transfer = self._timed(end_s)
            count_wait(self.transfer, end_s - start_s)
            self._works = self._kept = None
        return self._result

    @property
    def finish_time(self) -> float | None:
        """When the emulated wire is done (time.perf_counter); None without one. May block."""
        if self._pending is None:
            return None
        self._pending.know()
        return self._pending.finished_s

    def _timed(self, end_s: float) -> Transfer:
        if self._pending is None:
            return Transfer(self._call, self._launched_s, self._launched_s, end_s)
        times = self._pending
        return Transfer(self._call, times.launched_s, times.started_s, times.finished_s)


def all_reduce(tensor: Tensor, group, purpose: str, op: str = "sum") -> Handle:
    """Every rank gets the elementwise sum (or "max") over the group; tensor changes in place."""
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    if group is None:
        return Handle(tensor)
    return _launch(
        "all_reduce", tensor, group, purpose, tensor, op,
        start=lambda: dist.all_reduce(tensor, operation, group, async_op=True),
    )  # fmt: skip


def all_gather(tensor: Tensor, group, purpose: str) -> Handle:
    """Every rank gets all ranks' tensors: (ranks, *shape), in rank order. Shapes must be equal."""
    if group is None:
        return Handle(tensor[None])
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    return _launch(
        "all_gather", tensor, group, purpose, gathered,
        start=lambda: _gather(gathered.view(-1), tensor.view(-1), group, async_op=True),
    )  # fmt: skip


def reduce_scatter(tensor: Tensor, group, purpose: str) -> Handle:
    """Rank r gets the sum over ranks of tensor[r]; tensor: (ranks, *shape), result: shape."""
    if group is None:
        return Handle(tensor[0])
    ranks = dist.get_world_size(group)
    if tensor.shape[0] != ranks:
        raise ValueError(f"reduce_scatter over {ranks} ranks needs {ranks} pieces in dimension 0")
    own = torch.empty_like(tensor[0])
    return _launch(
        "reduce_scatter", tensor, group, purpose, own,
        start=lambda: _scatter(own.view(-1), tensor.view(-1), group=group, async_op=True),
    )  # fmt: skip


def broadcast(tensor: Tensor, group, purpose: str, source: int = 0) -> Handle:
    """Every rank gets the tensor of the group's rank `source`; tensor changes in place."""
    if group is None:
        return Handle(tensor)
    if not 0 <= source < (ranks := dist.get_world_size(group)):
        raise ValueError(f"rank {source} is not in a group of {ranks} ranks")
    root = dist.get_global_rank(group, source)
    return _launch(
        "broadcast", tensor, group, purpose, tensor, f"from {source}",
        start=lambda: dist.broadcast(tensor, root, group, async_op=True),
    )  # fmt: skip


def all_to_all(
    tensor: Tensor, group, purpose: str,
    sent_rows: Sequence[int] | None = None, received_rows: Sequence[int] | None = None,
) -> Handle:  # fmt: skip
    """Rank r gets every rank's r-th part of the rows, in rank order.

    sent_rows: how many of tensor's rows go to each rank, in rank order; received_rows: how many
    come from each, which must be what they send here. Equal parts where neither is given.
    """
    if group is None:
        return Handle(tensor)
    ranks, rows = dist.get_world_size(group), tensor.shape[0]
    if sent_rows is None and received_rows is None:
        if rows % ranks:
            raise ValueError(f"all_to_all cannot cut {rows} rows into {ranks} equal parts")
        sent_rows = received_rows = [rows // ranks] * ranks
    elif (
        sum(sent_rows or ()) != rows
        or not len(sent_rows) == len(received_rows or ()) == ranks
        or min(*sent_rows, *received_rows) < 0
    ):
        raise ValueError(
            f"all_to_all over {ranks} ranks got {rows} rows, to send {sent_rows} and to receive "
            f"{received_rows}: one number a rank, 0 or more; the first sum to {rows}"
        )
    received = tensor.new_empty((sum(received_rows), *tensor.shape[1:]))
    own = dist.get_rank(group)
    others = max(rows - sent_rows[own], sum(received_rows) - received_rows[own])
    row_bytes = tensor[:1].nbytes if rows else received[:1].nbytes
    return _launch(
        "all_to_all", tensor, group, purpose, received,
        rows=(*sent_rows, *received_rows), sent_bytes=others * row_bytes,
        start=lambda: dist.all_to_all_single(
            received, tensor, list(received_rows), list(sent_rows), group, async_op=True
        ),
    )  # fmt: skip


def exchange(
    outgoing: Tensor | None, destination: int, incoming: Tensor | None, source: int, group,
    purpose: str,
) -> Handle:  # fmt: skip
    """Send a tensor to the group's rank `destination` while `incoming` is filled from `source`.

    Both messages start at once, so that a ring of ranks that all send doesn't wait for itself.
    Either tensor may be None, or empty: then there is no such message.
    """
    sends = outgoing is not None and outgoing.numel() > 0
    receives = incoming is not None and incoming.numel() > 0
    if not (sends or receives):
        return Handle(incoming)
    messages = []
    for there, tensor, start, peer in (
        (sends, outgoing, dist.isend, destination), (receives, incoming, dist.irecv, source),
    ):  # fmt: skip
        if there:
            _require_contiguous(tensor)
            messages.append(dist.P2POp(start, tensor, group=group, group_peer=peer))
    kind, tensor = ("send", outgoing) if sends else ("receive", incoming)
    size = tensor.nbytes
    call = Call(kind, purpose, dist.get_world_size(group), size, _name(group), size * sends)
    if sends:
        count_call(call)
    pending = emulation.launch_message(
        call, group, destination if sends else None, source if receives else None
    )
    return Handle(incoming, call, dist.batch_isend_irecv(messages), pending, outgoing)


def _launch(
    kind: str, tensor: Tensor, group, purpose: str, result: Tensor, detail: str = "", *,
    start: Callable, sent_bytes: float | None = None, rows: Sequence[int] = (),
) -> Handle:  # fmt: skip
    _require_contiguous(tensor)
    ranks = dist.get_world_size(group)
    payload_bytes = max(tensor.nbytes, result.nbytes if kind == "all_gather" else 0)
    if sent_bytes is None:
        sent_bytes = cost.sent_bytes(kind, payload_bytes, ranks)
    call = Call(kind, purpose, ranks, payload_bytes, _name(group), sent_bytes)
    shape = list(tensor.shape[1 if rows else 0 :])  # each rank may have its own number of rows
    dtype = str(tensor.dtype).removeprefix("torch.")
    what = f"{kind}{detail and f' ({detail})'} of {dtype} {shape} for {purpose!r}"
    try:
        require_agreement(what, group, rows)
    except DisagreementError:
        raise
    except RuntimeError as error:
        raise CollectiveError.of(call, error) from error
    count_call(call)
    pending = emulation.launch(call, group)
    return Handle(result, call, [start()], pending, tensor)


def _name(group) -> str:
    """The axis of the mesh, or "world"."""
    return group.group_desc.removeprefix("mesh_").replace("default_pg", "world")


def _require_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a collective needs a contiguous tensor; got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous() first"
        )
