"""Faults put into what a resumed run compares: the tests of `resume` must find each one."""

from unittest.mock import ANY

import pytest

from course_lib.checkpoint import CheckpointError
from course_lib.trainer import resume
from tests import test_resume as checks

CHECKS = [
    checks.test_the_same_run_may_go_on,
    checks.test_each_setting_that_makes_it_another_run_is_named_with_both_values,
    checks.test_equal_settings_with_another_text_blame_the_text_or_the_tokenizer,
    checks.test_an_older_checkpoint_is_taken_or_refused_by_what_it_knows,
    checks.test_what_may_change_is_listed_in_the_order_of_the_file,
    checks.test_data_settings_that_made_the_same_samples_may_change,
]
decides, stored = resume._decides, resume._stored
FAULTS = {
    "speed taken for data": ("SPEED", ()),
    "the recipe forgotten": ("RECIPE", ()),
    "the model forgotten": ("_decides", lambda n, same: n[:6] != "model." and decides(n, same)),
    "settings of other data not named": ("_decides", lambda name, _: decides(name, True)),
    "settings of the same data refused": ("_decides", lambda name, _: decides(name, False)),
    "everything must stay": ("_decides", lambda *_: True),
    "nothing must stay": ("_decides", lambda *_: False),
    "the text not compared": ("_stored", lambda path, saved: (stored(path, saved)[0], ANY)),
    "older checkpoints trusted": ("_stored", lambda path, saved: (saved.get("settings", {}), ANY)),
}  # fmt: skip


def noticed() -> list[str]:
    """Names of the checks that fail."""
    found = []
    for check in CHECKS:
        try:
            check()
        except (AssertionError, CheckpointError, pytest.fail.Exception):
            found.append(check.__name__)
    return found


def test_the_checks_pass_without_a_fault():
    assert noticed() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(monkeypatch, fault):
    monkeypatch.setattr(resume, *FAULTS[fault])
    assert noticed()
