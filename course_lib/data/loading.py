"""Loading ahead: threads or processes make the next items while this one is computed with.

An item is a function of its step alone, so workers need no order among themselves: each takes the
next step, and the consumer takes the items in order. Threads suffice where making an item means
waiting or copying, since both let go of Python's lock. Where it means computing in Python, take
processes. They are plain subprocesses that talk over pipes, each served by a thread here: nothing
imports the caller's `__main__` again, or torch if the items need none, and a worker ends when its
pipe does, so none outlives this process, however it ends.
"""

import itertools
import os
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import lru_cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import BinaryIO, Literal, TypeVar, get_args

import cloudpickle

T = TypeVar("T")
WorkerKind = Literal["thread", "process"]


class DataWorkerDied(RuntimeError):
    """A worker process ended before its item was made."""


def fetch_ahead(
    make: Callable[[int], T],
    steps: Iterable[int],
    workers: int = 1,
    kind: WorkerKind = "thread",
    depth: int = 2,
) -> Iterator[T]:
    """Yield `make(step)` for each of `steps`, in order, made ahead by `workers`.

    make: for processes, it and the items must survive pickling; functions of a notebook do.
    workers: how many items are in the making at once. With 0, each is made when asked for.
    depth: items ahead of the one in use, made or in the making; at least `workers`.
    An exception of `make` is raised here, in its item's place; DataWorkerDied if a process ends.
    Leaving the loop, or closing the generator, ends the workers.
    """
    if kind not in get_args(WorkerKind):
        raise ValueError(f"workers are {kind!r}; use one of {', '.join(get_args(WorkerKind))}")
    if workers < 0:
        raise ValueError(f"{workers} workers; use 0 or more")
    if workers == 0:
        yield from map(make, steps)
        return
    steps = iter(steps)
    with closing(_Crew(make, workers, kind)) as crew:
        ahead = deque(map(crew.submit, itertools.islice(steps, max(depth, workers))))
        while ahead:
            item = ahead.popleft().result()
            ahead.extend(map(crew.submit, itertools.islice(steps, 1)))
            yield item


class _Crew:
    """Threads that make items in the order of their steps, each by itself or by its own process.

    Unlike an executor's, they let Python exit while one is busy.
    """

    def __init__(self, make: Callable, size: int, kind: WorkerKind) -> None:
        self._steps: SimpleQueue = SimpleQueue()
        self._processes: list[_Process] = []
        if kind == "process":
            order = pickle.dumps(sys.path) + pickle.dumps(cloudpickle.dumps(make))
            self._processes = [_Process(order) for _ in range(size)]
        makers = [process.make for process in self._processes] or [make] * size
        self._threads = [
            Thread(target=self._run, args=(make,), name="prefetch", daemon=True) for make in makers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, step: int) -> Future:
        future = Future()
        self._steps.put((future, step))
        return future

    def _run(self, make: Callable) -> None:
        while task := self._steps.get():
            future, step = task
            try:
                future.set_result(make(step))
            except BaseException as problem:
                future.set_exception(problem)

    def close(self) -> None:
        """Drop what nobody has begun, end the processes, and wait for what threads have begun."""
        with suppress(Empty):
            while True:
                self._steps.get_nowait()
        for process in self._processes:
            process.kill()
        for _ in self._threads:
            self._steps.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.close()


class _Process:
    """A process that makes items, started at once, and the pipes to it."""

    # A signal that is meant to stop the run must not end its workers before it: the run does.
    _PROGRAM = (
        "import signal\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer)\n"
        "from course_lib.data.loading import serve; serve()"
    )

    def __init__(self, order: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        self._order = order  # sent with the first step
        self.kill = self._process.kill

    def make(self, step: int) -> object:
        """The item of a step; raises what went wrong there."""
        process = self._process
        try:
            process.stdin.write(self._order + pickle.dumps(step))
            process.stdin.flush()
            self._order = b""
            item, problem = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            advice = "If nobody ended it, the machine ran out of memory: take fewer data.workers."
            raise DataWorkerDied(
                f"data worker {process.pid} {how} while it made the item of step {step}. "
                + advice * (code == -9)
            ) from None
        if problem is not None:
            raise problem
        return item

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was still to be sent
                pipe.close()


def serve() -> None:
    """A worker process: answer steps with items until the pipe ends, even amid an item."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what `make` prints must not get among the answers
    orders: SimpleQueue = SimpleQueue()
    Thread(target=_listen, args=(sys.stdin.buffer, orders), daemon=True).start()
    pickled = orders.get()
    with suppress(BrokenPipeError):  # nobody waits for the item any more
        while True:
            answers.write(_answer(pickled, orders.get()))
            answers.flush()
    os._exit(0)


def _listen(file: BinaryIO, orders: SimpleQueue) -> None:
    try:
        while True:
            orders.put(pickle.load(file))
    finally:
        os._exit(0)


_opened = lru_cache(1)(pickle.loads)  # the function that makes items


def _answer(pickled: bytes, step: int) -> bytes:
    try:
        return pickle.dumps((_opened(pickled)(step), None), protocol=5)
    except BaseException as problem:  # as in a thread, also of sys.exit
        problem.add_note(f"In a data worker:\n{traceback.format_exc()}")
        try:
            answer = pickle.dumps((None, problem))
            pickle.loads(answer)
        except Exception:  # it cannot travel; its words can
            answer = pickle.dumps((None, RuntimeError(traceback.format_exc())))
        return answer
