"""Faults put back into the collectives: the checks that the tests use must find each one."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from course_lib.classroom.launch import RankError
from course_lib.collectives import autograd, operations, rings
from course_lib.mesh import Mesh
from tests import checks_collectives as checks
from tests import checks_core as core
from tests.mutants.faults_core import Fault, Put

THREE = {"dp": 3}


def edited(module, name: str, old: str, new: str) -> Callable[[Put], None]:
    """The fault of a function whose source is changed in one place."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    return partial(_put_source, module, name, source.replace(old, new))


def _put_source(module, name, source, put) -> None:
    made = {}
    exec(compile(source, name, "exec"), vars(module), made)
    put(module, name, made[name])


def strided_tensors_accepted(put: Put) -> None:
    """As code does that takes the memory behind a tensor for the tensor."""

    def flatten(tensor: Tensor) -> Tensor:
        dense = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return dense if tensor.untyped_storage().nbytes() >= tensor.nbytes else tensor.flatten()

    source = inspect.getsource(rings.reduce_scatter)
    assert "tensor.flatten()" in source
    rings.flatten = flatten
    _put_source(rings, "reduce_scatter", source.replace("tensor.flatten()", "flatten(tensor)"), put)


def buffers_freed_before_the_wait(put: Put) -> None:
    right = operations.Handle.__init__

    def init(self, *arguments, **named):
        right(self, *arguments, **named)
        self._kept = None
        self._works = [_Forgetful(work) for work in self._works]

    put(operations.Handle, "__init__", init)


class _Forgetful:
    """A work of a library that doesn't hold its tensors (torch's gloo happens to)."""

    def __init__(self, work):
        work.wait()

    def wait(self):
        pass


def all_reduce_backward_too(put: Put) -> None:
    put(autograd, "_same", autograd._sum)


FAULTS = [
    Fault("wrong chunk sent", "", edited(
        rings, "reduce_scatter", "chunks[(rank - step - 1) % ranks]",
        "chunks[(rank - step) % ranks]"), checks.check_ring_sums, THREE),
    Fault("wrong chunk kept", "", edited(
        rings, "all_gather", "(rank - step - 1) % ranks", "(rank - step - 2) % ranks"),
        checks.check_ring_sums, THREE),
    Fault("one step short", "", edited(
        rings, "reduce_scatter", "range(ranks - 1)", "range(ranks - 2)"),
        checks.check_ring_sums, THREE),
    Fault("tail dropped", "", edited(
        rings, "reduce_scatter", ".tensor_split(ranks)",
        "[: tensor.numel() // ranks * ranks].tensor_split(ranks)"), checks.check_ring_sums, THREE),
    Fault("sends the whole tensor round", "", edited(
        rings, "all_reduce", "chunk = reduce_scatter(tensor, group, watch)",
        "rings_sum = reduce_scatter(tensor, group); chunk = reduce_scatter(tensor, group, watch)"),
        checks.check_ring_sends, THREE),
    Fault("argument changed", "", edited(
        rings, "reduce_scatter", "tensor.flatten().clone()", "tensor.view(-1)"),
        checks.check_ring_sums, THREE),
    Fault("broadcast from rank 0 always", "", edited(
        rings, "broadcast", "(rank - source) % ranks", "rank"), checks.check_ring_copies, THREE),
    Fault("strided tensor reduced", "COM-02", strided_tensors_accepted, checks.check_ring_strides,
          THREE),
    Fault("buffer freed before wait", "", buffers_freed_before_the_wait, checks.check_buffers,
          symptom="lets go of what it sends"),
    Fault("all-reduce backward of an all-reduce", "TP-12", all_reduce_backward_too,
          checks.check_all_reduce_backward),
    Fault("no gradient through an all-reduce", "TP-12", edited(
        autograd, "reduce_from", "return _apply(tensor, group, purpose, _sum, _same)",
        "return _sum(tensor.detach(), group, purpose).requires_grad_()"),
        checks.check_all_reduce_backward),
    Fault("gradient of an all-gather not summed", "", edited(
        autograd, "all_gather", "partial(_sum_part, dim=dim)", "partial(_part, dim=dim)"),
        checks.check_pairs),
    Fault("gradient of a split not gathered", "", edited(
        autograd, "split_to", "partial(_join, dim=dim)", "lambda g, **_: g.repeat(1, 2)"),
        checks.check_pairs),
    Fault("gradient of a copy not summed", "", edited(
        autograd, "copy_to", "_same, _sum", "_same, _same"), checks.check_pairs),
    Fault("gradient changed in place", "COM-02", edited(
        autograd, "_sum", "tensor.clone(memory_format=torch.contiguous_format)",
        "tensor.contiguous()"), checks.check_strided_gradients),
    Fault("expanded gradient sent as it is", "COM-02", edited(
        autograd, "_join", "tensor.contiguous()", "tensor"), checks.check_strided_gradients),
    Fault("rows go back by the numbers they came by", "", edited(
        autograd, "all_to_all", "sent=received_rows, received=sent_rows",
        "sent=sent_rows, received=received_rows"), checks.check_uneven_rows_return),
]  # fmt: skip

ROWS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.trap(f.trap)] if f.trap else []) for f in FAULTS
]


def check_all(mesh: Mesh, names: list[str]) -> None:
    for name in names:
        getattr(checks, name)(mesh)


@pytest.mark.parametrize("sizes", [core.TWO, THREE], ids=["two", "three"])
def test_every_check_passes_without_a_fault(sizes):
    names = list(dict.fromkeys(f.check.__name__ for f in FAULTS if f.sizes == sizes))
    core.on_ranks(check_all, sizes, names)


@pytest.mark.parametrize("fault", ROWS)
def test_a_check_fails_on(fault):
    """By its own words, or because the layer refuses what the fault hands it."""
    with pytest.raises(RankError) as caught:
        core.on_ranks(fault.check, fault.sizes, fault=fault.put_back, timeout_s=20)
    assert caught.value.type_name in ("AssertionError", "ValueError")
    assert fault.symptom in caught.value.message
