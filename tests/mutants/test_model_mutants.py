"""Faults put back into the plain model: the checks that the tests use must find each one."""

from importlib.util import find_spec

import pytest

from tests.mutants import faults_model, faults_randomness

FAULTS = faults_model.FAULTS + faults_randomness.FAULTS


NEEDS_PEER = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers, to compare with, is not installed"
)


def _row(fault):
    marks = [pytest.mark.trap(fault.trap)] if fault.trap else []
    marks += [NEEDS_PEER] if "transformers" in fault.name else []
    return pytest.param(fault, id=fault.name, marks=marks)


@pytest.mark.parametrize("fault", [_row(fault) for fault in FAULTS])
def test_a_check_fails_on(fault, monkeypatch):
    fault.put_back(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        fault.check()


@NEEDS_PEER
def test_all_checks_pass_without_a_fault():
    for check in {repr(fault.check): fault.check for fault in FAULTS}.values():
        check()
