"""run_ranks: real processes behind a cell, and everything that may go wrong with them."""

import contextlib
import ctypes
import operator
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from jupyter_client import KernelManager

from course_lib.classroom import _rank_process, _rank_report, _rank_start, _rank_watch, launch
from course_lib.classroom.launch import RankError, RanksInterrupted, RankTimeout, run_ranks

ROOT = Path(__file__).parents[1]
LIMIT_S = 30.0  # of calls that should not need it


def run(fn, world_size, *args, timeout_s=LIMIT_S, **kwargs):
    return run_ranks(fn, world_size, *args, timeout_s=timeout_s, **kwargs)


def fail(fn, world_size, *args, timeout_s=LIMIT_S, error=RankError):
    """Run what must fail; return the error. No process may outlive it."""
    with pytest.raises(error) as caught:
        run_ranks(fn, world_size, *args, timeout_s=timeout_s)
    assert ranks_alive() == []
    return caught.value


def ranks_alive(parent=None):
    """The launcher's processes below `parent`, without the fork server and ranks kept idle."""
    server = _rank_start._server
    spared = {server._process.pid} if server else set()
    spared |= {rank.pid for rank in _rank_start._idle}
    return [pid for pid in launched(parent) if pid not in spared]


def launched(parent=None):
    """The fork server and all ranks below `parent` (this process)."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and any("_rank_process" in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until_gone(pids, limit_s=15.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        left = [pid for pid in left if not _is_zombie(pid)]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"processes {left} are still there")


def _is_zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@pytest.fixture
def kept_ranks(monkeypatch):
    """The way of systems without a safe fork: ranks that are kept from call to call."""
    monkeypatch.setattr(launch, "KEEP_RANKS", True)
    yield
    idle, _rank_start._idle[:] = list(_rank_start._idle), []
    _rank_start.end_ranks(idle)


# ---------------------------------------------------------------------------------------------
# What a call gives


def test_values_come_back_in_rank_order():
    def late_first(base):
        time.sleep(0.1 * (2 - dist.get_rank()))
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return base + dist.get_rank(), total

    values = run(late_first, 3, 10)
    assert [value for value, _ in values] == [10, 11, 12]
    assert all(torch.equal(total, torch.tensor([3.0])) for _, total in values)


def test_closures_lambdas_and_imported_functions_run():
    def make(offset):
        return lambda factor, power=1: (dist.get_rank() + offset) * factor**power

    assert run(make(5), 2, 2, power=3) == [40, 48]
    assert run(operator.add, 1, 2, 3) == [5]
    assert run(dist.get_world_size, 2) == [2, 2]


def test_one_rank_is_a_real_process_in_a_group():
    pid, initialized = run(lambda: (os.getpid(), dist.is_initialized()), 1)[0]
    assert pid != os.getpid()
    assert initialized


def test_ranks_work_on_copies():
    numbers = [0]

    def add():
        numbers[0] += 1 + dist.get_rank()
        return numbers[0]

    assert run(add, 2) == [1, 2]
    assert numbers == [0]


def test_instances_of_local_classes_travel_both_ways_and_between_ranks():
    class Point:
        def __init__(self, x):
            self.x = x

    def exchange(point):
        others = [None] * dist.get_world_size()
        dist.all_gather_object(others, Point(point.x + dist.get_rank()).x)
        return Point(others)

    values = run(exchange, 2, Point(1))
    assert [value.x for value in values] == [[1, 2], [1, 2]]
    assert isinstance(values[0], Point)


def test_ranks_see_the_directory_environment_and_paths_of_the_moment(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_TEST", "yes")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import only_here

        return os.getcwd(), os.environ["COURSE_TEST"], only_here.answer, os.environ["RANK"]

    assert run(look, 2) == [(str(tmp_path), "yes", 42, "0"), (str(tmp_path), "yes", 42, "1")]


def test_every_call_starts_from_the_same_seed_on_every_rank():
    first = run(lambda: torch.rand(2).tolist(), 2)
    assert first == run(lambda: torch.rand(2).tolist(), 2)
    assert first[0] == first[1]


@pytest.mark.trap("ENV-06")
def test_a_rank_computes_with_one_thread_unless_told():
    def threads():
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    assert run(threads, 2) == [(1, "1")] * 2
    assert run(threads, 1, threads=2) == [(2, "2")]


def test_a_result_of_100_megabytes_arrives():
    value = run(lambda: torch.arange(25_000_000, dtype=torch.float32), 1)[0]
    assert value.nbytes == 100_000_000
    assert value[-1] == 24_999_999


def test_a_view_travels_without_its_storage_and_a_loss_without_its_graph():
    view = torch.zeros(1_000_000)[:3]
    assert len(_rank_process.pack(view)) < 10_000

    def loss():
        return (torch.ones(2, requires_grad=True) * 3).sum()

    assert run(loss, 1)[0].item() == 6
    assert not run(loss, 1)[0].requires_grad


# ---------------------------------------------------------------------------------------------
# What ranks print


def test_output_is_in_rank_order_and_each_line_whole(capfd):
    def talk():
        for line in range(3):
            print("line", line, "of", dist.get_rank())
            time.sleep(0.02 * (2 - dist.get_rank()))
            print("error", line, file=sys.stderr)
        os.write(1, b"written by the system\n")
        print("no end", end="")

    run(talk, 2)
    out, err = capfd.readouterr()
    expected = [
        f"[rank {rank}] {text}"
        for rank in range(2)
        for text in [
            *(f"line {line} of {rank}" for line in range(3)),
            "written by the system",
            "no end",
        ]
    ]
    assert out.splitlines() == expected
    assert err.splitlines() == [f"[rank {r}] error {line}" for r in range(2) for line in range(3)]


def test_a_line_drawn_over_shows_its_last_state(capsys):
    run(lambda: print("10 %\r50 %\r100 %\nnext"), 1)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] 100 %", "[rank 0] next"]


def test_much_output_is_complete(capsys):
    def flood():
        for line in range(20_000):
            print(line, "x" * 80)

    run(flood, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40_000
    assert lines[-1].startswith("[rank 1] 19999 x")


def test_rank_0_is_shown_while_it_runs(tmp_path):
    seen = threading.Event()

    class Screen:
        def write(self, text):
            if "halfway" in text:
                seen.set()
                (tmp_path / "go on").touch()

        def flush(self):
            pass

    def half():
        print("halfway")
        while not (tmp_path / "go on").exists():
            time.sleep(0.01)

    keep, sys.stdout = sys.stdout, Screen()
    try:
        run(half, 2)
    finally:
        sys.stdout = keep
    assert seen.is_set()


def test_output_before_a_failure_is_shown(capsys):
    def talk_then(end):
        print("so far", dist.get_rank())
        dist.barrier()
        if dist.get_rank() == 1:
            end()
        time.sleep(60)

    def stop():
        raise ValueError("stop")

    def die():
        os._exit(3)

    for end in (stop, die):
        fail(talk_then, 2, end)
        assert capsys.readouterr().out.splitlines() == ["[rank 0] so far 0", "[rank 1] so far 1"]


# ---------------------------------------------------------------------------------------------
# Ranks that fail


def test_the_first_cause_is_shown_on_its_own_line_while_the_others_wait():
    def train():
        if dist.get_rank() == 2:
            raise ValueError("bad shard")  # the learner's line
        dist.all_reduce(torch.ones(2))

    started = time.monotonic()
    error = fail(train, 4)
    assert time.monotonic() - started < LIMIT_S / 2
    assert (error.rank, error.type_name, error.message) == (2, "ValueError", "bad shard")
    report = str(error)
    assert report.startswith("rank 2 raised ValueError: bad shard\n")
    assert 'raise ValueError("bad shard")  # the learner\'s line' in report
    assert "in train" in report
    assert "_rank_process" not in report
    assert "peer" not in report


def test_frames_of_installed_packages_are_left_out_and_causes_kept():
    def wrap():
        try:
            torch.nn.Linear(3, 4)(torch.ones(2, 5))
        except RuntimeError as error:
            raise LookupError("wrapped") from error

    report = str(fail(wrap, 1))
    assert "torch.nn.Linear(3, 4)(torch.ones(2, 5))" in report
    assert "shapes cannot be multiplied" in report
    assert "LookupError: wrapped" in report
    assert "site-packages" not in report


def test_the_same_error_on_many_ranks_is_said_once():
    def all_fail():
        raise RuntimeError(f"rank {dist.get_rank()} has no data")

    def most_fail():
        if dist.get_rank() > 0:
            raise RuntimeError("no data")
        dist.barrier()

    assert "All 4 ranks raised the same error." in str(fail(all_fail, 4))
    error = fail(most_fail, 3)
    assert error.rank == 1
    assert str(error).endswith("Ranks 1 and 2 raised the same error.")


def test_other_errors_are_named_after_the_first():
    def differ():
        if dist.get_rank() == 0:
            raise KeyError("a")
        raise TypeError("b")

    error = fail(differ, 2)
    assert error.type_name == "KeyError"
    assert str(error).endswith("rank 1 also raised TypeError: b")


@pytest.mark.parametrize(
    "end, words",
    [
        (lambda: os._exit(3), "rank 1 left with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by signal 9 (SIGKILL)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "compiled code crashed"),
    ],
    ids=["exit", "kill", "crash"],
)
def test_a_dead_rank_is_blamed_and_not_its_peers(end, words):
    def train():
        if dist.get_rank() == 1:
            end()
        dist.all_reduce(torch.ones(2))

    error = fail(train, 3)
    assert error.rank == 1
    assert words in str(error)


def test_sys_exit_in_a_rank_is_an_error():
    assert fail(lambda: sys.exit(3), 1).type_name == "SystemExit"


def test_a_dead_fork_server_is_reported_and_replaced():
    run(lambda: None, 1)
    server = _rank_start._server._process.pid
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
    assert "nobody could say how" in str(fail(lambda: time.sleep(60), 2))
    assert run(dist.get_rank, 2) == [0, 1]
    assert _rank_start._server._process.pid != server


# ---------------------------------------------------------------------------------------------
# Ranks that hang


def test_a_hang_ends_at_the_limit_with_every_stack(capsys):
    def hang():
        print("started", dist.get_rank())
        if dist.get_rank() == 3:
            return
        if dist.get_rank() == 2:
            time.sleep(60)  # busy elsewhere
        dist.all_reduce(torch.ones(2))  # two wait here

    started = time.monotonic()
    error = fail(hang, 4, timeout_s=0.5, error=RankTimeout)
    assert time.monotonic() - started < LIMIT_S / 2
    assert error.waiting == {0: "all_reduce", 1: "all_reduce", 2: None}
    assert error.finished == (3,)
    report = str(error)
    assert report.startswith("3 of 4 ranks did not finish within 0.5 s")
    assert "ranks 0 and 1 wait in all_reduce\n" in report
    assert "# two wait here" in report
    assert "rank 2 is still running\n" in report
    assert "# busy elsewhere" in report
    assert "rank 3 has finished: its function returned; it skipped this call, or" in report
    assert "_rank_process" not in report
    assert "[rank 3] started 3" in capsys.readouterr().out


def test_a_wait_for_an_asynchronous_collective_is_named():
    def hang():
        if dist.get_rank() == 0:
            handle = dist.all_reduce(torch.ones(2), async_op=True)
            handle.wait()

    report = str(fail(hang, 2, timeout_s=0.3, error=RankTimeout))
    assert "rank 0 waits in .wait() for an asynchronous collective" in report


def test_a_rank_that_cannot_answer_is_still_ended(capsys):
    def deaf():
        libc = ctypes.PyDLL(None)  # keeps Python's lock during a call
        if dist.get_rank() == 0:
            while libc.sleep(60):  # signals only interrupt it
                pass
        os.kill(os.getpid(), signal.SIGSTOP)

    error = fail(deaf, 2, timeout_s=0.3, error=RankTimeout)
    assert "rank 1 gives no answer" in str(error) or "ranks 0 and 1 give no answer" in str(error)
    assert "in deaf" in capsys.readouterr().err


def test_an_interrupt_leaves_no_process():
    def interrupt():
        while len(ranks_alive()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    run(lambda: None, 1)
    threading.Thread(target=interrupt).start()
    error = fail(lambda: time.sleep(60), 2, error=RanksInterrupted)
    assert "all 2 ranks were ended" in str(error)
    assert run(dist.get_rank, 2) == [0, 1]


def test_ranks_ignore_an_interrupt_of_their_own():
    def shrug():
        os.kill(os.getpid(), signal.SIGINT)
        return dist.get_rank()

    assert run(shrug, 2) == [0, 1]


def test_what_a_rank_started_ends_with_it(tmp_path):
    def start_and_fail():
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / str(dist.get_rank())).write_text(str(child.pid))
        dist.barrier()
        raise ValueError

    fail(start_and_fail, 2)
    wait_until_gone([int(path.read_text()) for path in tmp_path.iterdir()])


# ---------------------------------------------------------------------------------------------
# Calls that cannot work


@pytest.mark.parametrize(
    "arguments, options, error, words",
    [
        ((print, 0), {}, ValueError, "world_size is 0"),
        ((print, -1), {}, ValueError, "world_size is -1"),
        ((print, 2.0), {}, ValueError, "world_size is 2.0"),
        ((print, "2"), {}, ValueError, "world_size is '2'"),
        ((print, True), {}, ValueError, "world_size is True"),
        ((3, 2), {}, TypeError, "needs a function, got int"),
        ((lambda x: x, 2), {}, TypeError, "missing a required argument: 'x'"),
        ((lambda: 0, 2), {"timeout": 3}, TypeError, "unexpected keyword argument 'timeout'"),
        ((lambda: 0, 2), {"timeout": 3}, TypeError, "write timeout_s instead of timeout"),
        ((lambda: 0, 2), {"thread": 3}, TypeError, "write threads instead of thread"),
        ((lambda: 0, 2), {"step": 3}, TypeError, "argument 'step'$"),
        ((print, 2), {"timeout_s": 0}, ValueError, "timeout_s is 0"),
        ((print, 2), {"timeout_s": float("inf")}, ValueError, "timeout_s is inf"),
        ((print, 2), {"threads": 0}, ValueError, "threads is 0"),
        ((print, 2), {"backend": "mpi"}, ValueError, "use 'auto', 'gloo' or 'nccl'"),
        ((print, 999), {"backend": "nccl"}, ValueError, "needs one GPU a rank"),
        ((lambda x: x, 2, (i for i in ())), {}, TypeError, "argument 1 .*a generator"),
    ],
)
def test_bad_calls_are_refused_in_words(arguments, options, error, words):
    with pytest.raises(error, match=words):
        run_ranks(*arguments, **options)


def test_a_variable_that_cannot_travel_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="the variable 'lock' that it uses"):
        run_ranks(lambda: lock, 2)


def test_a_result_that_cannot_travel_is_named():
    error = fail(lambda: (i for i in range(3)), 2)
    assert "returned a value of type generator that cannot be sent back" in str(error)
    assert "Both ranks raised the same error." in str(error)


def test_a_module_that_ranks_cannot_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("def f(): pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    assert "No module named 'vanishing'" in str(fail(vanishing.f, 2))


def test_run_ranks_inside_a_rank_is_refused():
    assert "run_ranks was called inside rank 0" in str(fail(lambda: run_ranks(print, 2), 2))


def test_windows_is_pointed_to_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="open the course in WSL"):
        run_ranks(print, 2)


def test_too_many_ranks_fail_clearly_and_leave_nothing():
    run(lambda: None, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        error = fail(print, 40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "could not start 40 ranks" in str(error)
    assert "Too many open files" in str(error)


def test_a_fork_server_that_cannot_start_says_why(monkeypatch):
    _rank_start.shut_down()
    broken = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    monkeypatch.setattr(_rank_start, "_command", lambda call: broken)
    report = str(fail(print, 2))
    assert report.startswith("could not start")
    assert "the process that starts ranks ended: no torch here" in report


def test_gpus_are_used_where_there_are_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    both = "cpu:gloo,cuda:nccl"  # so that a CPU tensor can be reduced too
    assert launch._choose_backend("auto", 4) == (both, True)
    assert launch._choose_backend("nccl", 2) == (both, True)
    assert launch._choose_backend("auto", 5) == ("gloo", False)
    assert launch._choose_backend("gloo", 2) == ("gloo", False)
    jobs = launch._jobs(2, 1, both, on_gpus=True, threads=1, timeout_s=1.0)
    assert [job.device for job in jobs] == [0, 1]


def test_ranks_that_never_get_ready_are_named(monkeypatch):
    run(lambda: None, 1)
    monkeypatch.setattr(_rank_watch, "START_LIMIT_S", 0.0)
    assert str(fail(print, 10)) == "ranks 0 to 9 did not start within 0 s"


# ---------------------------------------------------------------------------------------------
# Many calls


@pytest.mark.trap("ENV-01")
def test_launches_at_once_with_port_29500_taken():
    def total(offset):
        value = torch.tensor([dist.get_rank() + offset])
        dist.all_reduce(value)
        return value.item()

    results = {}

    def launch_one(offset):
        results[offset] = run(total, 2, offset)

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # then somebody else has it: as good
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        threads = [threading.Thread(target=launch_one, args=(offset,)) for offset in (0, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert results == {0: [1, 1], 100: [201, 201]}


@pytest.mark.trap("ENV-01")
def test_a_rank_killed_from_outside_does_not_hinder_the_next_call(tmp_path):
    def wait():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        (tmp_path / "ready").touch()
        time.sleep(60)

    def kill():
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)

    threading.Thread(target=kill).start()
    assert "rank 1 was killed by signal 9" in str(fail(wait, 2))
    for _ in range(3):
        assert run(dist.get_rank, 2) == [0, 1]
    assert ranks_alive() == []


@pytest.mark.trap("ENV-03")
def test_cuda_in_the_notebook_does_not_reach_the_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "_initialized", True)

    def state():
        return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()

    assert run(state, 2) == [(False, False)] * 2


def test_the_fork_server_has_one_thread():
    run(lambda: None, 1)
    assert psutil.Process(_rank_start._server._process.pid).num_threads() == 1


@pytest.mark.trap("ENV-04")
def test_kept_ranks_are_reused_and_thrown_away_after_a_failure(kept_ranks, capsys):
    def total():
        value = torch.ones(1)
        dist.all_reduce(value)
        print("rank", dist.get_rank())
        return os.getpid(), value.item(), torch.get_num_threads(), torch.rand(1).item()

    def wait(how):
        if dist.get_rank() == 0:
            how()
        dist.all_reduce(torch.ones(1))

    def stop():
        raise ValueError("stop")

    first, second = run(total, 2), run(total, 2)
    assert sorted(first) == sorted(second)
    assert [value[1:3] for value in first] == [(2.0, 1)] * 2
    assert capsys.readouterr().out.split("\n")[:2] == ["[rank 0] rank 0", "[rank 1] rank 1"]
    error = fail(wait, 2, stop)
    assert (error.rank, error.message) == (0, "stop")
    third = run(total, 2)
    assert not {pid for pid, *_ in third} & {pid for pid, *_ in first}
    assert "rank 0 left with exit code 4" in str(fail(wait, 2, lambda: os._exit(4)))


# ---------------------------------------------------------------------------------------------
# The words of reports, without processes


def test_many_ranks_are_named_shortly():
    assert _rank_report.name_ranks([2]) == "rank 2"
    assert _rank_report.name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert _rank_report.name_ranks(list(range(64))) == "ranks 0 to 63"
    assert _rank_report.name_ranks(list(range(0, 40, 2))) == "20 ranks (0, 2, 4, 6, ...)"


@pytest.mark.parametrize(
    "messages, same",
    [
        (["index 3 is out of bounds for dimension 0 with size 2"] * 4, True),
        (["bad size 12 at layer 1"] * 4, True),
        (["1", "1"], True),  # sys.exit(1)
        (["rank 0 is missing"] * 3, True),
        ([f"[Rank {rank}] no data" for rank in range(3)], True),
        ([f"rank={rank}: 1 shard of 4" for rank in range(3)], True),
        ([f"layer {rank} is bad" for rank in range(2)], False),
        ([f"ranks need {rank}" for rank in range(2)], False),
    ],
)
def test_messages_are_the_same_but_for_a_ranks_own_number(messages, same):
    failures = {
        rank: _rank_report.Failure("ValueError", message, "", 0.0, False)
        for rank, message in enumerate(messages)
    }
    for first in failures:
        report = _rank_report.failure_report(first, failures, len(messages))
        assert ("ranks raised the same error." in report) is same
        assert ("also raised" in report) is not same


def test_a_finished_rank_is_not_said_to_have_skipped_what_it_may_have_called():
    waits, runs = _rank_report.Stack("", "all_reduce"), _rank_report.Stack("", None)
    for stack, finished, words in (
        (
            waits,
            [0],
            "rank 0 has finished: its function returned; it skipped this call, or made "
            "it with another shape",
        ),
        (
            waits,
            [0, 2],
            "ranks 0 and 2 have finished: their functions returned; they skipped "
            "this call, or made it with another shape",
        ),
        (runs, [0], "rank 0 has finished: its function returned"),
    ):
        assert _rank_report.hang_report({1: stack}, finished, 1.0).endswith("\n" + words)


def test_native_stacks_are_cut_from_messages():
    message = "Connection closed\nException raised from recv at a.cpp:1\nframe #0: 0x7f\nframe #1"
    failure = _rank_report.describe_failure(RuntimeError(message))
    assert failure.message == "Connection closed"
    assert "frame #" not in failure.text


# ---------------------------------------------------------------------------------------------
# From a plain script


@pytest.mark.trap("ENV-03")
@pytest.mark.trap("ENV-04")
def test_a_plain_script_needs_no_guard_and_exits_without_a_word(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            print("script runs once")
            import sys
            from course_lib.classroom import launch
            assert "torch" not in sys.modules
            import torch
            assert not torch.cuda.is_initialized()

            OFFSET = 10

            def value():
                torch.distributed.barrier()
                return OFFSET + torch.distributed.get_rank()

            print(launch.run_ranks(value, 2, timeout_s=30))
            launch.KEEP_RANKS = True
            print(launch.run_ranks(value, 1, timeout_s=30))
            assert not torch.cuda.is_initialized()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["script runs once", "[10, 11]", "[10]"]


# ---------------------------------------------------------------------------------------------
# From a real notebook kernel


class Kernel:
    """A Jupyter kernel that runs cells one after the other."""

    def __init__(self, directory):
        # ipc: the ports that Jupyter picks for tcp may be gone before the kernel takes them.
        self.manager = KernelManager(
            kernel_name="python3", transport="ipc", ip=str(directory / "socket")
        )
        self.manager.start_kernel(cwd=str(directory), env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    @property
    def pid(self):
        return self.run("import os; print(os.getpid())").out

    def run(self, cell):
        result = Output()
        reply = self.client.execute_interactive(
            textwrap.dedent(cell).strip(), timeout=90, output_hook=result.take
        )
        result.count = reply["content"]["execution_count"]
        return result

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


class Output:
    def __init__(self):
        self.out = self.err = ""
        self.error = None

    def take(self, message):
        content = message["content"]
        if message["msg_type"] == "stream":
            name = {"stdout": "out", "stderr": "err"}[content["name"]]
            setattr(self, name, getattr(self, name) + content["text"])
        elif message["msg_type"] == "error":
            self.error = content


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    kernel.run(
        """
        import os, time, torch, torch.distributed as dist
        from course_lib.classroom import launch
        from course_lib.classroom.launch import run_ranks
        """
    )
    yield kernel
    kernel.close()


@pytest.mark.trap("ENV-01")
@pytest.mark.trap("ENV-04")
@pytest.mark.parametrize("keep", [False, True], ids=["forked", "kept"])
def test_functions_classes_and_closures_of_cells_run(kernel, keep):
    kernel.run(
        f"""
        launch.KEEP_RANKS = {keep}
        class Model:
            def __init__(self, width):
                self.width = width
            def forward(self):
                return scale(self.width)
        """
    )
    cell = """
        def scale(x):
            return x * factor
        factor = 3

        def make(offset):
            def step(model):
                objects = [None] * dist.get_world_size()
                dist.all_gather_object(objects, Model(dist.get_rank()))
                print("rank", dist.get_rank(), [o.width for o in objects])
                return model.forward() + offset, Model(dist.get_rank())
            return step

        values = run_ranks(make(5), 2, Model(2), timeout_s=60)
        print(values[0][0], [type(model) is Model for _, model in values], values[1][1].width)
        """
    outputs = [kernel.run(cell) for _ in range(3)]
    expected = "".join(f"[rank {rank}] rank {rank} [0, 1]\n" for rank in range(2))
    assert [output.error for output in outputs] == [None] * 3
    assert [output.out for output in outputs] == [expected + "11 [True, True] 1\n"] * 3
    assert "".join(output.err for output in outputs) == ""
    kernel.run("launch.KEEP_RANKS = False")


def test_a_cell_shows_the_learners_line_and_nothing_of_the_launcher(kernel):
    output = kernel.run(
        """
        def train():
            if dist.get_rank() == 1:
                raise ValueError("bad shard")  # my own line
            dist.all_reduce(torch.ones(2))

        run_ranks(train, 3, timeout_s=60)
        """
    )
    shown = "\n".join(output.error["traceback"])
    assert output.error["ename"] == "RankError"
    assert shown.startswith("RankError: rank 1 raised ValueError: bad shard")
    assert f'File "Cell In[{output.count}]", line 3, in train' in shown
    assert 'raise ValueError("bad shard")  # my own line' in shown
    assert "launch.py" not in shown
    assert "ipykernel" not in shown
    assert len(shown.splitlines()) < 10


def test_a_hang_in_a_cell_shows_cells_and_lines(kernel):
    output = kernel.run(
        """
        def train():
            if dist.get_rank() == 0:
                return
            dist.barrier()  # waits for ever

        run_ranks(train, 2, timeout_s=0.5)
        """
    )
    shown = "\n".join(output.error["traceback"])
    assert output.error["ename"] == "RankTimeout"
    assert "rank 1 waits in barrier" in shown
    assert f'File "Cell In[{output.count}]", line 4, in train' in shown
    assert "# waits for ever" in shown


def test_an_interrupted_cell_leaves_no_process(kernel):
    pid = int(kernel.pid)
    before = launched(pid)

    def interrupt():
        while len(launched(pid)) < len(before) + 2:
            time.sleep(0.05)
        time.sleep(0.3)
        kernel.manager.interrupt_kernel()

    threading.Thread(target=interrupt).start()
    output = kernel.run("run_ranks(lambda: time.sleep(60), 2, timeout_s=60)")
    assert "\n".join(output.error["traceback"]) == (
        "KeyboardInterrupt: interrupted; all 2 ranks were ended"
    )
    assert sorted(launched(pid)) == sorted(before)
    assert kernel.run("print(run_ranks(dist.get_rank, 2))").out == "[0, 1]\n"


def test_cuda_stays_untouched_in_the_notebook(kernel):
    assert kernel.run("print(torch.cuda.is_initialized())").out == "False\n"


def test_a_killed_kernel_leaves_no_process(kernel):
    """Keep it the last: it ends the shared kernel."""
    pid = int(kernel.pid)
    server = launched(pid)
    assert server
    # Rank 1 keeps Python's lock: no thread of its own can end it.
    kernel.run("import ctypes")
    sleeper = "lambda: (ctypes.PyDLL(None) if dist.get_rank() else time).sleep(60)"
    kernel.client.execute(f"run_ranks({sleeper}, 2)")
    deadline = time.monotonic() + LIMIT_S
    while len(launched(pid)) < len(server) + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes = launched(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(processes)
