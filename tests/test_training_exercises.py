"""Right answers of another style than the library's pass the checks of the training loop."""

import pytest
from exercise_cases.training_loop import Scaler, gradient, rate

from course_lib.classroom.checks import find
from course_lib.classroom.checks.grading import judge


@pytest.mark.parametrize(
    "name, answer",
    [("training-loop/1", gradient), ("training-loop/2", rate), ("training-loop/3", Scaler)],
)
def test_an_answer_by_hand_passes(name, answer):
    assert judge(find(name), answer).status == "passed"
