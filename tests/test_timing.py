"""Spread of timings, and the sign that other work disturbed them."""

import threading
import time

import pytest

from course_lib.classroom.timing import Computing, Spread, disturbance, spread


def test_the_spread_is_the_median_and_the_middle_half():
    assert spread(range(1, 10)) == Spread(5, 3, 7)
    assert spread(iter([2.0])) == Spread(2.0, 2.0, 2.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]).high == 4.0  # one outlier moves nothing
    with pytest.raises(ValueError, match="repeat it"):
        spread([])


def test_a_spread_formats_all_three_numbers():
    assert f"{Spread(0.5, 0.48, 0.531):.2f}" == "0.50 (0.48–0.53)"
    assert f"{Spread(0.3, 0.29, 0.34):.0%}" == "30% (29%–34%)"


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_without_a_processor_is_lost():
    with Computing() as computing:
        work(0.05)
        time.sleep(0.2)  # as if another program ran
    assert computing.seconds >= 0.25
    assert computing.lost >= 0.2 / computing.seconds - 0.02


def test_the_work_of_another_thread_is_not_ours():
    other = threading.Thread(target=time.sleep, args=(0.01,))
    other.start()
    with Computing() as computing:
        work(0.02)
    other.join()
    assert computing.seconds >= 0.02
    assert 0 <= computing.lost < 1


def test_nothing_is_lost_in_no_time(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    with Computing() as computing:
        pass
    assert computing.lost == 0


def test_a_disturbed_measurement_says_what_to_do():
    assert disturbance([0.02, 0.01, 0.9]).endswith("2% of the computing time: quiet enough.")
    said = disturbance([0.3, 0.5, 0.4])
    assert "40%" in said
    assert "DISTURBED" in said
    assert "run this cell again" in said
