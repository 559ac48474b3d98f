"""Items made ahead by threads and processes, and the disk that makes them wait."""

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import (
    DataError,
    DataWorkerDied,
    EmulatedDisk,
    Mixture,
    TokenDataset,
    disk,
    fetch_ahead,
)
from tests import checks_batches as checks
from tests.checks_data import counting, write_shards

ROOT = Path(__file__).parents[1]
KINDS = pytest.mark.parametrize("kind", ["thread", "process"])


def items():
    """Two functions that travel by value, so that a worker need not import these tests."""

    def squared(step):
        return step, np.full(step, step * step)

    def failing(step):
        if step == 3:
            raise DataError(f"step {step} is damaged")
        return step

    return squared, failing


squared, failing = items()


def until(condition, seconds=20.0) -> bool:
    """Whether a condition comes true before long."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return not Path("/proc/self").exists()
        return False


# ----------------------------------------------------------------------- order, depth, exceptions


@KINDS
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_items_come_in_order_from_any_number_of_workers(kind, workers):
    items = list(fetch_ahead(squared, range(4, 24), workers, kind))
    assert [step for step, _ in items] == list(range(4, 24))
    assert all((array == step * step).all() and len(array) == step for step, array in items)


def test_items_that_take_unequal_times_keep_their_order():
    turns = [threading.Event() for _ in range(3)]

    def make(step):  # each can only end after the next one has
        if step + 1 < len(turns):
            assert turns[step + 1].wait(10)
        turns[step].set()
        return step

    assert list(fetch_ahead(make, range(3), 3)) == [0, 1, 2]


@KINDS
def test_only_so_many_items_are_made_ahead(kind, tmp_path):
    def make(step):
        (tmp_path / str(step)).touch()
        return step

    ahead = fetch_ahead(make, itertools.count(), 2, kind, depth=3)
    assert next(ahead) == 0
    assert until(lambda: len(list(tmp_path.iterdir())) >= 4)
    time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 4  # the one taken and three ready
    ahead.close()


@KINDS
def test_an_exception_comes_in_its_place(kind):
    ahead = fetch_ahead(failing, range(9), 2, kind)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="step 3 is damaged") as error:
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    if kind == "process":
        assert "in failing" in "".join(error.value.__notes__)


def test_an_unknown_kind_of_worker_is_refused():
    with pytest.raises(ValueError, match="use one of thread, process"):
        next(fetch_ahead(failing, range(3), kind="fiber"))


def test_fewer_than_no_workers_are_refused():
    with pytest.raises(ValueError, match="-1 workers; use 0 or more"):
        next(fetch_ahead(failing, range(3), -1))


@KINDS
@pytest.mark.parametrize("problem", [OSError(5, "the disk is gone"), SystemExit(3)])
def test_whatever_a_worker_raises_arrives(kind, problem):
    def make(step):
        raise problem

    with pytest.raises(type(problem)) as error:
        next(fetch_ahead(make, range(3), 1, kind))
    assert error.value.args == problem.args


def test_threads_end_when_the_reader_leaves():
    for number in fetch_ahead(abs, itertools.count(), 1):
        if number == 3:
            break
    del number
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


# ------------------------------------------------------------------------------------- processes


def test_an_exception_that_cannot_travel_is_told_in_words():
    def make(step):
        problem = ValueError("this and that")
        problem.lock = threading.Lock()
        raise problem

    with pytest.raises(RuntimeError, match="ValueError: this and that"):
        next(fetch_ahead(make, range(3), 1, "process"))


def test_a_function_that_is_not_there_for_a_worker_is_told(tmp_path, monkeypatch):
    (tmp_path / "passing_module.py").write_text("def make(step): return step")
    monkeypatch.syspath_prepend(tmp_path)
    from passing_module import make

    (tmp_path / "passing_module.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="passing_module"):
        next(fetch_ahead(make, range(3), 1, "process"))


@pytest.mark.parametrize(("code", "advice"), [(3, False), (-9, True)])
def test_only_a_killed_worker_is_said_to_lack_memory(code, advice):
    def make(step):
        os._exit(code) if code > 0 else os.kill(os.getpid(), -code)

    with pytest.raises(DataWorkerDied) as error:
        next(fetch_ahead(make, range(3), 1, "process"))
    assert ("out of memory" in str(error.value)) == advice


def test_what_a_worker_prints_does_not_disturb():
    def make(step):
        print("hello from", step)
        os.write(1, b"and from below")
        return step

    assert list(fetch_ahead(make, range(5), 1, "process")) == list(range(5))


def test_samples_need_no_torch_in_a_worker(tmp_path):
    data = TokenDataset(write_shards(tmp_path, counting(100)), 16)

    def make(step):
        return data.samples(step, range(2), 2), "torch" in sys.modules

    rows, has_torch = next(fetch_ahead(make, range(3), 1, "process"))
    assert not has_torch
    assert (rows.tokens == data.samples(0, range(2), 2).tokens).all()
    assert rows.tokens.flags.writeable


def test_a_killed_worker_is_an_error_and_no_hang():
    def make(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step

    ahead = fetch_ahead(make, range(9), 2, "process")
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(DataWorkerDied, match=r"was ended by signal 9 while .* step 2"):
        next(ahead)


def test_signals_to_stop_a_run_leave_its_workers_at_work():
    """Slurm sends SIGTERM to all processes of a job; the trainer still finishes its step."""

    def make(step):
        os.kill(os.getpid(), signal.SIGTERM if step % 2 else signal.SIGINT)
        return step

    assert list(fetch_ahead(make, range(6), 1, "process")) == list(range(6))


def test_leaving_early_ends_the_workers_even_in_the_middle_of_an_item():
    def make(step):
        if step > 1:
            time.sleep(1000)
        return os.getpid()

    ahead = fetch_ahead(make, itertools.count(), 2, "process")
    pids = {next(ahead), next(ahead)}
    ahead.close()
    assert not any(map(is_alive, pids))


SCRIPT = """
import itertools, os, signal, time
from course_lib.data import fetch_ahead

print("main", flush=True)

def make(step):
    if step > 1:
        time.sleep(1000)
    return os.getpid()

if __name__ == "__main__":
    ahead = fetch_ahead(make, itertools.count(), 2, "process")
    print(next(ahead), next(ahead), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.killpg(0, signal.SIGINT); next(ahead)",
        "next(ahead)  # until SIGTERM",
        "raise SystemExit",
    ],
    ids=["killed", "Ctrl-C", "terminated", "left"],
)
def test_no_worker_outlives_its_program_or_runs_it_again(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout.readline() == "main\n"
    pids = [int(pid) for pid in process.stdout.readline().split()]
    if "SIGTERM" in end:
        process.terminate()
    assert process.communicate(timeout=30)[0] == ""
    assert len(set(pids)) == 2
    assert until(lambda: not any(map(is_alive, pids)))


# ----------------------------------------------------------------------------------- exact resume


LAYOUT = st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 4))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A data set, and a mixture that it is part of."""
    folder = tmp_path_factory.mktemp("sources")
    one = TokenDataset(write_shards(folder / "one", counting(155, 9)), 16, "documents", seed=3)
    two = TokenDataset(write_shards(folder / "two", counting(700, 9)), 16, "documents", seed=3)
    return {"one": one, "mixture": Mixture([one, two], [0.7, 0.3], seed=3)}


@pytest.mark.trap("CK-01")
@pytest.mark.trap("DA-09")
@given(LAYOUT, LAYOUT, st.integers(1, 5), st.sampled_from(["one", "mixture"]))
@settings(deadline=None, max_examples=30)
def test_a_resumed_run_has_the_very_samples_under_any_ranks_and_workers(
    sources, before, after, stop, source
):
    checks.check_resume(sources[source], before, after, stop)


def test_processes_make_the_very_samples_that_threads_make(sources):
    checks.check_resume(sources["mixture"], (1, 2), (2, 1), 3, kind="process")


# ------------------------------------------------------------------------------- an emulated disk


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by sleeping only."""
    now = SimpleNamespace(time=100.0)

    def sleep(seconds):
        now.time += seconds

    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: now.time, sleep=sleep))
    return now


def test_a_read_takes_the_latency_and_its_bytes(tmp_path, clock):
    shards = write_shards(tmp_path, counting(1000, 3), vocab=1000)
    slow = EmulatedDisk(bytes_per_s=1e4, latency_s=0.5).mount(shards)
    assert (slow.read(100, 300) == shards.read(100, 300)).all()
    assert clock.time == pytest.approx(100 + 0.5 + 200 * 2 / 1e4)  # uint16
    assert (len(slow), slow.documents) == (len(shards), shards.documents)


def test_reads_queue_also_from_copies_in_other_processes(tmp_path, clock, monkeypatch):
    slow = EmulatedDisk(bytes_per_s=100.0).mount(write_shards(tmp_path, counting(64), vocab=64))
    waits = []
    sleeping = SimpleNamespace(monotonic=lambda: clock.time, sleep=waits.append)
    monkeypatch.setattr(disk, "time", sleeping)
    for reader in (slow, pickle.loads(pickle.dumps(slow)), slow):  # all at one moment
        reader.read(0, 50)
    assert waits == pytest.approx([1.0, 2.0, 3.0])


def test_a_worker_process_waits_for_the_disk_of_its_parent(tmp_path):
    emulated = EmulatedDisk(bytes_per_s=1e9)
    data = TokenDataset(emulated.mount(write_shards(tmp_path, counting(100))), 16)
    before = Path(emulated._queue).read_bytes()
    make = partial(data.samples, indices=range(2), global_batch=2)
    rows = next(fetch_ahead(make, range(1), 1, "process"))
    assert (rows.tokens == data.samples(0, range(2), 2).tokens).all()
    assert Path(emulated._queue).read_bytes() != before


def test_a_disk_leaves_nothing_behind():
    emulated = EmulatedDisk(1e6)
    path = Path(emulated._queue)
    assert path.exists()
    del emulated
    assert not path.exists()


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (-1, 0), (1e6, -1), (float("nan"), 0)])
def test_an_impossible_disk_is_refused(rate, latency):
    with pytest.raises(ValueError, match="no disk"):
        EmulatedDisk(rate, latency)
