"""Faults put back into the core: the checks that the tests use must find each one."""

import pytest

from course_lib.classroom.launch import RankError
from course_lib.mesh import Mesh
from tests.checks_core import on_ranks
from tests.mutants.faults_core import FAULTS

ROWS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.trap(f.trap)] if f.trap else []) for f in FAULTS
]


@pytest.mark.parametrize("fault", ROWS)
def test_a_check_fails_on(fault, monkeypatch):
    message = failure_of(fault, monkeypatch)
    assert message is not None, f"{fault.check.__name__} does not notice: {fault.name}"
    assert fault.symptom in message


def failure_of(fault, monkeypatch) -> str | None:
    """What the check says; None where it passes. Any error but an AssertionError goes through."""
    try:
        if set(fault.sizes.values()) == {1}:
            fault.put_back(monkeypatch.setattr)
            fault.check(Mesh.single())
        else:
            on_ranks(fault.check, fault.sizes, fault=fault.put_back, timeout_s=30)
    except AssertionError as error:
        return str(error)
    except RankError as error:
        if error.type_name != "AssertionError":
            raise
        return error.message
    return None
