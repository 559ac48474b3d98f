"""Faults of public training code, put back into token shards: their checks must find each one."""

import numpy as np
import pytest

from course_lib.data import shards
from tests import checks_data as checks


def must_fail(check, *arguments):
    check_failed = False
    try:
        check(*arguments)
    except AssertionError:
        check_failed = True
    assert check_failed, f"{check.__name__} does not notice the fault"


@pytest.mark.trap("DA-01")
def test_ids_stored_without_a_check(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shards, "checked_ids", lambda ids, vocab: np.asarray(ids).astype(shards.token_dtype(vocab))
    )
    must_fail(checks.check_ids_survive, tmp_path)


@pytest.mark.trap("DA-01")
def test_ids_always_stored_in_two_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "token_dtype", lambda vocab: np.dtype("<u2"))
    with pytest.raises((AssertionError, ValueError)):
        checks.check_ids_survive(tmp_path)


def test_shards_opened_without_looking(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_verify", lambda *arguments: None)
    must_fail(checks.check_damage_is_found, tmp_path / "a")
    must_fail(checks.check_foreign_ids_are_refused, tmp_path / "b")
