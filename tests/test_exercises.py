"""Every exercise: its stub, the library's answer, and wrong answers, each named by its check."""

import exercise_cases
import pytest

from course_lib.classroom import check, checks, hint, journal, solution, syllabus
from course_lib.classroom.checks import Exercise, WrongAnswer, find
from course_lib.classroom.checks.grading import judge

CASES = exercise_cases.all_cases()
EXERCISES = {
    exercise.name: exercise
    for chapter in syllabus.load().chapters
    for exercise in checks.exercises_of(chapter.topic)
}
WRONG = [
    pytest.param(name, wrong, id=f"{name}: {wrong.mistake}")
    for name, cases in CASES.items()
    for wrong in cases.wrong
]


@pytest.fixture(autouse=True)
def own_progress_file(tmp_path, monkeypatch):
    monkeypatch.setenv(journal.VARIABLE, str(tmp_path / "progress.json"))


def test_every_exercise_has_cases():
    assert EXERCISES, "no exercises are registered"
    assert set(CASES) == set(EXERCISES), "tests/exercise_cases/ and checks/ name other exercises"
    for name, cases in CASES.items():
        assert len(cases.wrong) >= 3, f"{name}: give at least three typical wrong answers"
        messages = [wrong.says for wrong in cases.wrong]
        assert len(set(messages)) == len(messages), f"{name}: each mistake has its own message"


@pytest.mark.parametrize("name", EXERCISES)
def test_stub_is_not_attempted(name):
    assert judge(EXERCISES[name], CASES[name].stub).status == "not attempted"


@pytest.mark.parametrize("name", EXERCISES)
def test_library_answer_is_right_and_labelled(name):
    verdict = judge(EXERCISES[name], EXERCISES[name].library_object())
    assert verdict.status == "library", verdict.message
    assert not verdict, "the library's own object must not count as passed"


@pytest.mark.parametrize("name, wrong", WRONG)
def test_wrong_answer_is_named(name, wrong):
    verdict = judge(EXERCISES[name], wrong.answer)
    assert verdict.status == "wrong", f"{verdict.status}: {verdict.message}"
    assert wrong.says in verdict.message


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_get_stronger_and_do_not_hold_the_stub(name, capsys):
    exercise = EXERCISES[name]
    for number in (*range(1, len(exercise.hints) + 1), len(exercise.hints)):
        hint(name)
        assert f"Hint {number} of {len(exercise.hints)}: {exercise.hints[number - 1]}" in (
            capsys.readouterr().out
        )
    assert journal.read()["exercises"][name]["hints"] == len(exercise.hints)


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_shows_the_librarys_source(name, capsys):
    solution(name)
    assert EXERCISES[name].solution.rpartition(":")[2].split(".")[-1] in capsys.readouterr().out
    assert journal.read()["exercises"][name]["solution"]


def test_solution_shows_what_it_calls(capsys):
    solution("collectives/2")
    said = capsys.readouterr().out
    assert "return steps(kind, ranks) * link.latency_s" in said
    assert "(ranks - 1).bit_length()  # log2, rounded up" in said


def _exercise(grade, solution="course_lib.classroom.syllabus:load") -> Exercise:
    return Exercise("toy/1", "a toy", 1, 5, ("look",), solution, grade)


def _double(answer):
    if answer(3) != 6:
        raise WrongAnswer(f"for 3 you return {answer(3)}, expected 6")


def test_right_answer_passes_and_is_true():
    verdict = judge(_exercise(_double), lambda n: 2 * n)
    assert verdict
    assert verdict.status == "passed"


@pytest.mark.parametrize("answer", [None, ...])
def test_missing_answer_is_not_attempted(answer):
    assert judge(_exercise(_double), answer).status == "not attempted"


def test_crash_shows_the_learners_own_line():
    def answer(n):
        halves = n / 0
        return halves

    verdict = judge(_exercise(_double), answer)
    assert verdict.status == "crashed"
    assert "ZeroDivisionError: division by zero" in verdict.message
    assert "in answer, line" in verdict.message
    assert "halves = n / 0" in verdict.message


def test_not_implemented_in_the_learners_helper_is_not_attempted():
    def helper():
        raise NotImplementedError

    assert judge(_exercise(_double), lambda n: helper()).status == "not attempted"


def test_exit_in_an_answer_does_not_leave_the_notebook():
    def answer(n):
        raise SystemExit(3)

    assert judge(_exercise(_double), answer).status == "crashed"


def test_an_answer_with_other_arguments_is_the_learners_to_repair():
    def answer(config, more):
        return {}

    verdict = judge(find("transformer/1"), answer)
    assert verdict.status == "crashed"
    assert "other arguments than the exercise says" in verdict.message
    assert "answer() missing 1 required positional argument: 'more'" in verdict.message


def test_fault_of_the_check_is_not_blamed_on_the_learner():
    # A grader of the library that fails by itself: here one that is given a number.
    verdict = judge(_exercise(checks.card), 3)
    assert verdict.status == "broken"
    assert "fault of the course" in verdict.message


def test_unknown_exercise_offers_the_nearest_name(capsys):
    verdict = check("start-her/1", 3)
    assert verdict.status == "unknown"
    assert "start-here/1" in capsys.readouterr().out
    hint("strat-here/1")
    solution("start-here/9")
    assert capsys.readouterr().out.count("did you mean start-here/1") == 2


def test_check_prints_and_records(capsys, monkeypatch):
    toy = _exercise(_double)
    monkeypatch.setattr("course_lib.classroom.checks.grading.find", lambda name: toy)
    check("toy/1", lambda n: n)
    check("toy/1", lambda n: 2 * n)
    check("toy/1", ...)
    said = capsys.readouterr().out
    assert "toy/1 · not yet: for 3 you return 3, expected 6" in said
    assert "toy/1 · passed" in said
    assert journal.read()["exercises"]["toy/1"] == {
        "attempts": 2,
        "passed": True,
        "hints": 0,
        "solution": False,
    }


def test_faulty_records_are_refused():
    with pytest.raises(ValueError, match=r"difficulty 4 .* 0 hints") as error:
        Exercise("toy/one", "", 4, 5, (), "somewhere", _double)
    assert "module:name" in str(error.value)
    assert "topic/number" in str(error.value)


def test_find_names_what_exists():
    assert find("start-here/1").topic == "start-here"
    with pytest.raises(KeyError, match="did you mean"):
        find("nonsense")
