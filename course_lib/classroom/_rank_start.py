"""How the notebook starts processes for ranks, and ends them.

`start_ranks` gives the parent's ends of fresh (Linux: forked) or kept (elsewhere) processes; see
`_rank_process` for what runs in them. Each has a socket for messages, a pipe for what it prints
and one for its errors, and a way to ask how it ended.
"""

import atexit
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.classroom._rank_process import STATUS

_ROOT = str(Path(__file__).parents[2])  # where course_lib is found
# Before torch is imported: one compute thread also means that a fork copies no thread.
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}

_lock = threading.Lock()
_server: "_ForkServer | None" = None
_idle: list["KeptRank"] = []


class RankProcess:
    """The parent's side of one rank's process."""

    pid: int | None = None
    start_error: OSError | None = None
    signs_of_end: tuple[int, ...] = ()  # file descriptors that wake a waiting parent

    def __init__(self) -> None:
        # Made one by one, with everything closed again if the system has no more to give.
        with contextlib.ExitStack() as stack:
            mine, theirs = socket.socketpair()
            stack.callback(theirs.close)
            self.connection = Connection(mine.detach())
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(self.connection.close)
            self.outputs: list[int] = []
            writers = []
            for _ in range(2):  # standard output, standard error
                reader, writer = os.pipe()
                undo.callback(os.close, reader)
                stack.callback(os.close, writer)
                os.set_blocking(reader, False)
                self.outputs.append(reader)
                writers.append(writer)
            self._start(theirs, *writers)
            undo.pop_all()

    def _start(self, link: socket.socket, out: int, err: int) -> None:
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Whether the process is gone."""
        raise NotImplementedError

    def exit_code(self) -> int | None:
        """The exit code of an ended process, -n after signal n, None if nobody knows."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process, and what it started, at once."""
        if not self.has_ended() and self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give the pipes back."""
        self.connection.close()
        while self.outputs:
            os.close(self.outputs.pop())


class ForkedRank(RankProcess):
    """A fresh process, forked by the fork server for one call."""

    _code: int | None = None
    _ended = False

    def _start(self, link: socket.socket, out: int, err: int) -> None:
        self.status, status = os.pipe()
        os.set_blocking(self.status, False)
        self.signs_of_end = (self.status,)
        try:
            try:
                self._server = _fork_server()
                self._server.fork([link.fileno(), out, err, status])
            except ProcessLookupError:  # it was ended a moment ago; a new one takes its place
                self._server = _fork_server()
                self._server.fork([link.fileno(), out, err, status])
        except BaseException:
            os.close(self.status)
            raise
        finally:
            os.close(status)

    def has_ended(self) -> bool:
        # The pipe brings the pid, then the exit code, then its end.
        while not self._ended:
            try:
                record = os.read(self.status, STATUS.size)
            except BlockingIOError:
                return False
            if not record:
                self._ended = True
                if self.pid is None and self.start_error is None:
                    self.start_error = OSError(self._server.last_words())
            elif self.pid is not None:
                self._code, self._ended = STATUS.unpack(record)[0], True
            elif (number := STATUS.unpack(record)[0]) > 0:
                self.pid = number
            else:
                self.start_error = OSError(-number, os.strerror(-number))
        return True

    def exit_code(self) -> int | None:
        return self._code

    def close(self) -> None:
        super().close()
        os.close(self.status)


class KeptRank(RankProcess):
    """A new interpreter, kept for the next call."""

    def _start(self, link: socket.socket, out: int, err: int) -> None:
        self._process = subprocess.Popen(
            _command(f"run_kept_rank({link.fileno()})"),
            pass_fds=[link.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,
        )
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int | None:
        return self._process.returncode


def warm_up() -> None:
    """Start the fork server, without waiting until it is ready."""
    _fork_server()


def start_ranks(count: int, keep: bool) -> list[RankProcess]:
    """Start processes for `count` ranks, or take kept ones.

    Args:
        count: how many.
        keep: take ranks kept from earlier calls, instead of forking fresh ones.

    Returns:
        The processes; they wait for a job.

    Raises:
        OSError: the system has no processes, files or memory left for them.
    """
    ranks: list[RankProcess] = []
    try:
        while len(ranks) < count:
            ranks.append((_take_idle() or KeptRank()) if keep else ForkedRank())
    except BaseException:
        end_ranks(ranks)
        raise
    return ranks


def keep_ranks(ranks: list[RankProcess]) -> None:
    """Put ranks aside for the next call."""
    with _lock:
        _idle.extend(ranks)


def replace_ranks(count: int) -> None:
    """Start new ranks to keep, in the place of ended ones, without waiting for them."""
    with contextlib.suppress(OSError):
        keep_ranks([KeptRank() for _ in range(count)])


def end_ranks(ranks: list[RankProcess]) -> None:
    """Kill the ranks' processes and wait until they are gone."""
    for rank in ranks:
        rank.kill()
    deadline = time.monotonic() + 5
    for rank in ranks:
        while not rank.has_ended() and time.monotonic() < deadline:
            rank.kill()  # again: at the first try it may not have had a pid yet
            time.sleep(0.002)
        rank.close()


def shut_down() -> None:
    """End the fork server and the kept ranks; a later call starts new ones."""
    global _server
    with _lock:
        server, _server = _server, None
        kept, _idle[:] = list(_idle), []
    if server:
        server.stop()
    end_ranks(kept)


def _take_idle() -> KeptRank | None:
    with _lock:
        while _idle:
            rank = _idle.pop()
            if not rank.has_ended():
                return rank
            rank.close()
    return None


def _fork_server() -> "_ForkServer":
    global _server
    with _lock:
        if _server is None or not _server.is_alive():
            _server = _ForkServer()
        return _server


class _ForkServer:
    """A clean process that has imported torch and forks ranks on request (Linux)."""

    def __init__(self) -> None:
        # One request, one message: rank processes arrive with their four file descriptors.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        with theirs:
            self._process = subprocess.Popen(
                _command(f"serve_forks({theirs.fileno()})"),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env={**os.environ, **_ONE_THREAD},
                process_group=0,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [b"fork"], fds)
        except (BrokenPipeError, ConnectionResetError):
            raise OSError(errno.ESRCH, self.last_words()) from None

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        return "the process that starts ranks ended: " + (words[-1] if words else "it was killed")

    def stop(self) -> None:
        self._control.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def _command(call: str) -> list[str]:
    # By -c and an explicit path, so that the learner's script is not run a second time.
    path = [_ROOT, *(entry or os.getcwd() for entry in sys.path)]
    program = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from course_lib.classroom import _rank_process; _rank_process.{call}"
    )
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", program]


def _forget_after_fork() -> None:
    # A forked copy of the notebook must neither use nor end the notebook's processes.
    global _server, _lock
    _server, _lock = None, threading.Lock()
    _idle.clear()


atexit.register(shut_down)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
