"""How the notebook follows its ranks: until all are done, one has failed, or time is up."""

import contextlib
import math
import os
import pickle
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from course_lib.classroom import _rank_report
from course_lib.classroom._rank_output import Printer
from course_lib.classroom._rank_process import Job
from course_lib.classroom._rank_report import Failure, RankError, RankTimeout, Stack
from course_lib.classroom._rank_start import RankProcess, end_ranks, keep_ranks

START_LIMIT_S = 120.0  # importing torch from a slow disk, then finding each other
SETTLE_LIMIT_S = 1.0  # how long the others may take to fail too, once a rank has failed
LEAVE_LIMIT_S = 5.0
TICK_S = 0.1


class Rank:
    """What the notebook knows of one rank."""

    def __init__(self, number: int, process: RankProcess) -> None:
        self.number = number
        self.process = process
        self.stage = "starting"  # running, then finished, raised or died; gone after finished
        self.value = b""
        self.failure: Failure | None = None
        self.died_at = math.inf
        self.stack: Stack | None = None
        self.waits_seen = 0  # stacks in a row that showed it in a collective

    def send(self, *message: Any, payload: bytes | None = None) -> None:
        """Send it a message; one that is gone already is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.process.connection.send_bytes(pickle.dumps(message))
            if payload is not None:
                self.process.connection.send_bytes(payload)


class Watch:
    """Reads what ranks say and print, and judges how they ended."""

    def __init__(self, processes: list[RankProcess]) -> None:
        self.ranks = [Rank(number, process) for number, process in enumerate(processes)]
        self._printer = Printer(len(processes))
        self._selector = selectors.DefaultSelector()
        for rank in self.ranks:
            self._listen(rank.process.connection, partial(self._read_message, rank))
            for stream, fd in enumerate(rank.process.outputs):
                self._listen(fd, partial(self._read_output, rank, stream))
            for fd in rank.process.signs_of_end:
                self._listen(fd, lambda: None)  # only wakes: `_until` asks each process

    def give_jobs(self, jobs: list[Job], call: bytes) -> None:
        """Hand each rank its job and the pickled call."""
        for rank, job in zip(self.ranks, jobs):
            rank.send("job", job, payload=call)

    def follow(self, timeout_s: float) -> RankError | None:
        """Watch until all have returned, or something is wrong; return what to raise, if any."""
        started = self._until(lambda: self._failed() or not self._at("starting"), START_LIMIT_S)
        if self._failed():
            return self._first_cause("starting")
        if not started:
            late = _rank_report.name_ranks([rank.number for rank in self._at("starting")])
            return RankError(f"{late} did not start within {START_LIMIT_S:g} s")
        for rank in self.ranks:
            rank.send("go")
        in_time = self._until(lambda: self._failed() or not self._at("running"), timeout_s)
        if self._failed():
            return self._first_cause("running")
        return None if in_time else self._hang(timeout_s)

    def let_go(self) -> None:
        """Let the ranks leave their group together, and end or be ready for the next call."""
        for rank in self.ranks:
            rank.send("leave")
        self._until(lambda: not self._at("finished"), LEAVE_LIMIT_S)

    def end(self, keep: bool) -> bool:
        """Print what is left; end all processes, or with `keep` put them aside if all is well.

        Returns whether they were kept.
        """
        processes = [rank.process for rank in self.ranks]
        keep = keep and len(self._at("gone")) == len(processes)
        try:
            if not keep:
                for process in processes:
                    process.kill()
            for rank in self.ranks:
                self._read_all_output(rank)
            # Before they start, only torch speaks: its complaints about what we report anyway.
            self._printer.close(leave_out=[rank.number for rank in self._at("starting")])
        finally:
            self._selector.close()
            (keep_ranks if keep else end_ranks)(processes)
        return keep

    # -- what ranks say

    def _until(self, done: Callable[[], Any], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in self._selector.select(min(left, TICK_S)):
                key.data()
            for rank in self.ranks:
                if rank.stage not in ("died", "gone") and rank.process.has_ended():
                    self._note_end(rank)
        return True

    def _listen(self, source: Any, callback: Callable[[], Any]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _ignore(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):  # ignored already
            self._selector.unregister(source)

    def _read_message(self, rank: Rank) -> bool:
        try:
            kind, *body = pickle.loads(rank.process.connection.recv_bytes())
        except (EOFError, OSError):
            self._ignore(rank.process.connection)
            return False
        if kind == "stack":
            rank.stack = body[0]
            rank.waits_seen = rank.waits_seen + 1 if rank.stack.waits_in else 0
            return True
        rank.stage = {"ready": "running", "left": "gone"}.get(kind, kind)
        if kind == "finished":
            rank.value = body[0]
        if kind == "raised":
            rank.failure = body[0]
        if kind in ("finished", "raised"):
            self._read_all_output(rank)
            self._printer.finish(rank.number)
        return True

    def _read_output(self, rank: Rank, stream: int) -> bool:
        fd = rank.process.outputs[stream]
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._ignore(fd)
        self._printer.feed(rank.number, stream, data)
        return bool(data)

    def _read_all_output(self, rank: Rank) -> None:
        for stream in range(len(rank.process.outputs)):
            while self._read_output(rank, stream):
                pass

    def _note_end(self, rank: Rank) -> None:
        for fd in rank.process.signs_of_end:
            self._ignore(fd)
        with contextlib.suppress(OSError):
            while rank.process.connection.poll() and self._read_message(rank):
                pass  # its last messages: it may have raised just before
        if rank.stage == "finished":
            rank.stage = "gone"
        elif rank.stage in ("starting", "running"):
            rank.stage, rank.died_at = "died", time.monotonic()
            self._read_all_output(rank)
            self._printer.finish(rank.number)

    # -- what to make of it

    def _at(self, stage: str) -> list[Rank]:
        return [rank for rank in self.ranks if rank.stage == stage]

    def _failed(self) -> list[Rank]:
        return self._at("raised") + self._at("died")

    def _settle(self, stage: str) -> None:
        """Wait until ranks at `stage` have failed too, or are seen waiting for a failed one."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < deadline:
            # Once may be in passing; a rank seen twice in a collective is stuck there.
            busy = [rank for rank in self._at(stage) if rank.waits_seen < 2]
            if not busy:
                return
            for rank in busy:
                rank.send("stack")
            self._until(lambda: not self._at(stage), TICK_S)

    def _first_cause(self, stage: str) -> RankError:
        self._settle(stage)
        failures = {rank.number: rank.failure for rank in self._at("raised")}
        causes = {number: failure for number, failure in failures.items() if not failure.peer_lost}
        first_death = min(self._at("died"), key=lambda rank: rank.died_at, default=None)
        first_raise = min((failure.when for failure in causes.values()), default=math.inf)
        if first_death and first_death.died_at <= first_raise:
            return self._death(first_death)
        first = min(causes or failures)  # by rank, not by the clock: the same in each run
        report = _rank_report.failure_report(first, failures, len(self.ranks))
        return RankError(report, first, failures[first].type_name, failures[first].message)

    def _death(self, rank: Rank) -> RankError:
        if rank.process.start_error is not None:
            report = f"could not start rank {rank.number} of {len(self.ranks)} ranks"
            return RankError(f"{report}: {rank.process.start_error}", rank.number)
        exit_code = rank.process.exit_code()
        return RankError(_rank_report.death_report(rank.number, exit_code), rank.number)

    def _hang(self, timeout_s: float) -> RankTimeout:
        running = self._at("running")
        for rank in running:
            rank.stack = None
            rank.send("stack")

        def silent() -> list[Rank]:
            return [rank for rank in running if rank.stack is None]

        if not self._until(lambda: not silent(), SETTLE_LIMIT_S):
            for rank in silent():  # then its stack comes in its error output
                with contextlib.suppress(OSError):
                    os.kill(rank.process.pid, signal.SIGUSR1)
            self._until(lambda: False, 2 * TICK_S)
        stacks = {rank.number: rank.stack for rank in running}
        finished = [rank.number for rank in self.ranks if rank not in running]
        waiting = {number: stack and stack.waits_in for number, stack in stacks.items()}
        report = _rank_report.hang_report(stacks, finished, timeout_s)
        return RankTimeout(report, waiting, tuple(finished))
