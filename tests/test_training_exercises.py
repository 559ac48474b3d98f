"""Right answers of another style than the library's pass the checks of the training loop."""

import pytest
import torch
from exercise_cases.training_loop import InPlace, Scaler, gradient, rate

from course_lib.classroom.checks import find
from course_lib.classroom.checks.grading import judge


def clips_by_hand(model, micro_batches, clip_norm):
    loss, norm = gradient(model, micro_batches, float("inf"))
    for parameter in model.parameters():
        parameter.grad *= min(1.0, clip_norm / norm)
    return torch.tensor(loss), torch.tensor(norm)


@pytest.mark.parametrize(
    "name, answer",
    [
        ("training-loop/1", gradient),
        ("training-loop/1", clips_by_hand),
        ("training-loop/2", rate),
        ("training-loop/3", Scaler),
        ("training-loop/3", InPlace),
    ],
)
def test_an_answer_by_hand_passes(name, answer):
    assert judge(find(name), answer).status == "passed"


class TakesNothing(Scaler):
    def update(self):
        pass


class IsGivenNothing(Scaler):
    def __init__(self):
        pass


@pytest.mark.parametrize("answer", [TakesNothing, IsGivenNothing])
def test_a_method_with_other_arguments_is_the_learners_to_repair(answer):
    verdict = judge(find("training-loop/3"), answer)
    assert verdict.status == "crashed"
    assert "other arguments than the exercise says" in verdict.message
