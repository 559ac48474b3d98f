"""Faults put back into data parallelism and overlap: the tests' checks must find each one."""

import pytest

from tests import checks_records as records
from tests.checks_core import TWO
from tests.mutants.faults_data_parallel import FAULTS
from tests.mutants.test_core_mutants import check_all, failure_of, run

ROWS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.trap(f.trap)] if f.trap else []) for f in FAULTS
]


@pytest.mark.parametrize("sizes", [TWO, records.DP_TP], ids=["dp2", "dp2 tp2"])
def test_every_check_passes_without_a_fault(sizes):
    run(check_all, sizes, list(dict.fromkeys(f.check for f in FAULTS if f.sizes == sizes)))


@pytest.mark.parametrize("fault", ROWS)
def test_a_check_fails_on(fault, monkeypatch):
    message = failure_of(fault, monkeypatch)
    assert message is not None, f"{fault.check.__name__} does not notice: {fault.name}"
    assert fault.symptom in message
