"""Faults put back into the core: the checks that the tests use must find each one."""

import pytest

from course_lib.classroom.launch import RankError
from course_lib.mesh import Mesh
from tests import checks_core as core
from tests import checks_records as records
from tests.mutants.faults_core import FAULTS

ROWS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.trap(f.trap)] if f.trap else []) for f in FAULTS
]


@pytest.mark.parametrize("sizes", [core.ALONE, core.TWO, records.TP], ids=["one", "dp2", "tp2"])
def test_every_check_passes_without_a_fault(sizes):
    """Else a check that always fails would seem to notice everything."""
    checks = list(dict.fromkeys(fault.check for fault in FAULTS if fault.sizes == sizes))
    assert len(checks) > 3
    run(check_all, sizes, checks)


def check_all(mesh, checks) -> None:
    for check in checks:
        check(mesh)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has doubts about some of them too
@pytest.mark.parametrize("fault", ROWS)
def test_a_check_fails_on(fault, monkeypatch):
    message = failure_of(fault, monkeypatch)
    assert message is not None, f"{fault.check.__name__} does not notice: {fault.name}"
    assert fault.symptom in message


def failure_of(fault, monkeypatch) -> str | None:
    """What the check says; None where it passes. Any error but an AssertionError goes through."""
    try:
        if fault.sizes == core.ALONE:
            fault.put_back(monkeypatch.setattr)
        run(fault.check, fault.sizes, fault=fault.put_back)
    except AssertionError as error:
        return str(error)
    except RankError as error:
        if error.type_name != "AssertionError":
            raise
        return error.message
    return None


def run(check, sizes, *arguments, fault=None) -> None:
    """Run a check here where the mesh is one rank, else on ranks."""
    if sizes == core.ALONE:
        check(Mesh.single(), *arguments)
    else:
        core.on_ranks(check, sizes, *arguments, fault=fault, timeout_s=60)
