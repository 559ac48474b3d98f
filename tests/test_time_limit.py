"""A check whose code never ends is ended after a while, in words, and leaves nothing behind."""

import os
import signal
import threading
import time

import pytest

from course_lib.classroom.checks import Exercise, find, grading
from course_lib.classroom.checks.time_limit import LIMIT_S, TookTooLong, time_limit


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(grading, "LIMIT_S", 0.3)


def judged(answer):
    toy = Exercise("toy/1", "a toy", 1, 5, ("look",), "somewhere:else", lambda given: given(3))
    return grading.judge(toy, answer)


def endless(*arguments):
    while True:
        count = 0
    return count


def catches_everything(*arguments):
    while True:
        try:
            time.time()
        except:  # noqa: E722 (what a learner may write)
            continue


def sleeps(*arguments):
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["text-to-tokens/1", "tokens-to-batches/2", "training-loop/2"])
def test_an_endless_loop_is_ended_and_its_line_shown(name):
    verdict = grading.judge(find(name), endless)
    assert verdict.status == "wrong"
    assert "did not finish in" in verdict.message
    assert "Does a loop never end?" in verdict.message
    assert "in endless, line" in verdict.message


def test_except_exception_does_not_stop_it():
    def answer(n):
        while True:
            try:
                endless()
            except Exception:
                continue

    assert "did not finish in" in judged(answer).message


def test_a_bare_except_in_an_endless_loop_is_left_in_the_end():
    # The signal ends the loop where it comes outside the `try`: it comes again and again.
    assert "did not finish in" in judged(catches_everything).message


def test_a_loop_that_sleeps_is_ended_too():
    assert "did not finish in" in judged(sleeps).message


def test_an_interrupt_is_still_the_learners():
    def answer(n):
        os.kill(os.getpid(), signal.SIGINT)
        endless()

    verdict = judged(answer)
    assert verdict.status == "crashed"
    assert "stopped by you before the check was done.\n  in answer, line" in verdict.message


@pytest.mark.parametrize("answer", [abs, endless])
def test_handler_and_timer_are_as_before(answer):
    def mine(*signum_and_frame):
        raise AssertionError("the timer of the caller came too early")

    before = signal.signal(signal.SIGALRM, mine)
    signal.setitimer(signal.ITIMER_REAL, 900, 7)
    try:
        judged(answer)
        assert signal.getsignal(signal.SIGALRM) is mine
        delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 890 < delay <= 900
        assert interval == 7
    finally:
        signal.signal(signal.SIGALRM, before)


def test_no_alarm_is_left_behind():
    judged(abs)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_off_the_main_thread_and_without_the_signal_there_is_no_limit(monkeypatch):
    def answer(n):
        began = time.thread_time()
        while time.thread_time() - began < 0.5:  # more than the limit
            pass

    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(judged(answer)))
    thread.start()
    thread.join()
    monkeypatch.delattr(signal, "setitimer")
    verdicts.append(judged(answer))
    assert [verdict.status for verdict in verdicts] == ["passed", "passed"]


def test_waiting_counts_a_fifth():
    with time_limit(1.0):
        time.sleep(1.5)  # ranks at work, say
    with pytest.raises(TookTooLong, match="did not finish in 1 s"), time_limit(0.2):
        time.sleep(10)


def test_the_limit_leaves_room_on_a_slow_machine():
    assert LIMIT_S >= 120
