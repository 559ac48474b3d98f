"""Real ranks behind a notebook cell: `run_ranks(fn, 4)` runs `fn` on four processes.

Training on many GPUs means many processes that run the same program and talk through
collectives. Here a cell does it for real: each rank is a process of its own, joined with the
others in a process group (gloo on CPU, NCCL where there are enough GPUs). What makes that fit
for a class is all around the call: output in rank order, the first cause when a rank fails,
every rank's stack when they hang, and no process left behind, whatever happens.

This module checks a call, packs it and gives the answer. `_rank_start` makes and ends processes,
`_rank_process` runs in them, `_rank_watch` follows them, `_rank_output` prints what they print,
`_rank_report` turns failures into words.
"""

import contextlib
import difflib
import inspect
import linecache
import math
import operator
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from course_lib.classroom import _rank_process, _rank_start
from course_lib.classroom._rank_process import Job
from course_lib.classroom._rank_report import RankError, RanksInterrupted, RankTimeout
from course_lib.classroom._rank_watch import START_LIMIT_S, Watch

__all__ = ["RankError", "RankTimeout", "RanksInterrupted", "run_ranks"]

# A fork is not safe everywhere (macOS), so elsewhere ranks are kept from call to call.
KEEP_RANKS = sys.platform != "linux"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "auto",
    threads: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` real processes joined in a process group.

    Each rank gets its own copy of the function, of the arguments and of the notebook's variables
    that the function reads; nothing that a rank changes comes back, only what it returns. All
    start with the same random seeds. What they print appears in rank order, each line with its
    rank: rank 0's lines at once, the others' when those before them are done. Tensors travel to
    and from the ranks through the CPU.

    Args:
        fn: any function: from a cell, a closure, a lambda, or imported.
        world_size: number of ranks, at least 1.
        *args: what `fn` is called with, the same on every rank.
        timeout_s: seconds that `fn` may take, not counting the start of the processes.
        backend: "gloo" (CPU), "nccl" (one GPU a rank; CPU tensors still go through gloo), or
            "auto": nccl where there are at least `world_size` GPUs.
        threads: compute threads of each rank.
        **kwargs: keyword arguments for `fn`.

    Returns:
        What `fn` returned on each rank, in rank order.

    Raises:
        RankError: a rank raised, died, could not start, or returned what cannot be sent.
        RankTimeout: a rank was not done after `timeout_s`.
        ValueError, TypeError: the call itself is wrong; no process was started.
    """
    __tracebackhide__ = True
    world_size = _check_call(fn, world_size, timeout_s, threads, args, kwargs)
    if not KEEP_RANKS:
        _rank_start.warm_up()  # it imports torch while we do
    backend, on_gpus = _choose_backend(backend, world_size)
    call = _pack_call(fn, args, kwargs)
    try:
        with _ranks(world_size) as watch, _store() as port:
            watch.give_jobs(_jobs(world_size, port, backend, on_gpus, threads, timeout_s), call)
            error = watch.follow(timeout_s)
            if error is None:
                watch.let_go()
    except KeyboardInterrupt:
        raise RanksInterrupted(f"interrupted; all {world_size} ranks were ended") from None
    if error is not None:
        raise error from None
    return [_unpack(rank.value, rank.number) for rank in watch.ranks]


# ---------------------------------------------------------------------------------------------
# Before anything starts


def _check_call(
    fn: Any, world_size: Any, timeout_s: Any, threads: Any, args: tuple, kwargs: dict
) -> int:
    if sys.platform == "win32":
        raise RuntimeError(
            "run_ranks needs Linux or macOS. On Windows, open the course in WSL: run "
            "`wsl --install` once, then start Jupyter inside Ubuntu"
        )
    if _rank_process.current_rank is not None:
        raise RuntimeError(
            f"run_ranks was called inside rank {_rank_process.current_rank}, which is already "
            "one of several processes. Call it from the notebook only; to use some of the ranks, "
            "make a group with torch.distributed.new_group"
        )
    if not callable(fn):
        raise TypeError(
            f"run_ranks needs a function, got {type(fn).__name__}. Pass the function itself, "
            "without calling it: run_ranks(train, 4, batch), not run_ranks(train(batch), 4)"
        )
    counts = []
    for name, value in (("world_size", world_size), ("threads", threads)):
        try:
            counts.append(0 if isinstance(value, bool) else operator.index(value))
        except TypeError:
            counts.append(0)
        if counts[-1] < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not (number and math.isfinite(timeout_s) and 0 < timeout_s <= 1e7):
        raise ValueError(
            f"timeout_s is {timeout_s!r}; it must be seconds, more than 0, at most 1e7"
        )
    with contextlib.suppress(ValueError):  # some built-in functions have no signature
        signature = inspect.signature(fn)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(fn, "__name__", type(fn).__name__)
            raise TypeError(
                f"run_ranks would call {name}{signature}: {error}{_misspelt(kwargs, signature)}"
            ) from None
    return counts[0]


def _misspelt(kwargs: dict, signature: inspect.Signature) -> str:
    """Name the options of run_ranks that look like arguments the function does not have."""
    options = ("timeout_s", "backend", "threads")
    found = {
        name: difflib.get_close_matches(name, options, n=1)
        for name in kwargs
        if name not in signature.parameters
    }
    told = [f"{close[0]} instead of {name}" for name, close in found.items() if close]
    return f". If you meant the option of run_ranks, write {', '.join(told)}" if told else ""


def _choose_backend(backend: str, world_size: int) -> tuple[str, bool]:
    """Choose what init_process_group gets, and whether each rank has a GPU."""
    import torch

    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; use 'auto', 'gloo' or 'nccl'")
    gpus = torch.cuda.device_count()  # asks the driver; does not initialise CUDA here
    if backend == "nccl" and gpus < world_size:
        raise ValueError(
            f"backend 'nccl' needs one GPU a rank: {world_size} ranks, {gpus} GPUs found. "
            "Use 'gloo', or 'auto'"
        )
    if backend == "gloo" or gpus < world_size or not torch.distributed.is_nccl_available():
        return "gloo", False
    return "cpu:gloo,cuda:nccl", True


def _pack_call(fn: Any, args: tuple, kwargs: dict) -> bytes:
    try:
        return _rank_process.pack((fn, args, kwargs))
    except Exception as error:
        culprit = next(_unsendable(fn, args, kwargs), "the call")
        raise TypeError(
            f"{culprit} cannot be sent to the ranks ({error}). Ranks are other processes: pass "
            "numbers, strings, tensors or plain containers, and open files, make generators, "
            "locks and connections inside the function"
        ) from None


def _unsendable(fn: Any, args: tuple, kwargs: dict) -> Iterator[str]:
    parts = [(f"argument {place} of the function", value) for place, value in enumerate(args, 1)]
    parts += [(f"argument {name!r} of the function", value) for name, value in kwargs.items()]
    with contextlib.suppress(TypeError, ValueError):
        read = inspect.getclosurevars(fn)
        variables = {**read.globals, **read.nonlocals}
        parts += [(f"the variable {name!r} that it uses", it) for name, it in variables.items()]
    for name, value in parts:
        try:
            _rank_process.pack(value)
        except Exception:
            yield f"{name} (a {type(value).__name__})"


@contextlib.contextmanager
def _store() -> Iterator[int]:
    """Host the store through which ranks find each other; give its port."""
    import torch.distributed as dist

    # On a socket that is ours from the start: no port to guess, none to lose to another launch,
    # and nothing that other machines can reach.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=START_LIMIT_S)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store  # at once, even where a traceback would keep this frame


def _jobs(
    world_size: int, port: int, backend: str, on_gpus: bool, threads: int, timeout_s: float
) -> list[Job]:
    sources = _cell_sources()
    return [
        Job(
            rank=rank,
            world_size=world_size,
            store_port=port,
            backend=backend,
            device=rank if on_gpus else None,
            threads=operator.index(threads),
            timeout_s=timeout_s,
            directory=os.getcwd(),
            environment=dict(os.environ),
            path=[entry or os.getcwd() for entry in sys.path],
            sources=sources,
        )
        for rank in range(world_size)
    ]


def _cell_sources() -> dict[str, tuple[str, str]]:
    """Collect the text of cells: file name -> (label, source). Pickling a function loses it."""
    inputs = getattr(sys.modules["__main__"], "In", [])
    numbers = {str(text).strip(): number for number, text in enumerate(inputs)}
    sources = {}
    for name, entry in list(linecache.cache.items()):
        cell = "ipykernel_" in name or name.startswith("<ipython-input")
        if len(entry) == 4 and (cell or entry[1] is None):
            text = "".join(entry[2])
            number = numbers.get(text.strip())
            sources[name] = (f"Cell In[{number}]" if number else name, text)
    return sources


@contextlib.contextmanager
def _ranks(world_size: int) -> Iterator[Watch]:
    """Start processes, and see to it that none is left, however the call ends."""
    try:
        processes = _rank_start.start_ranks(world_size, KEEP_RANKS)
    except OSError as error:
        raise RankError(f"could not start {world_size} ranks: {error}. Try fewer") from None
    watch = Watch(processes)
    try:
        yield watch
    finally:
        with _uninterrupted():
            if not watch.end(keep=KEEP_RANKS) and KEEP_RANKS:
                _rank_start.replace_ranks(world_size)  # they import torch while the report is read


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off an interrupt: a second one must not stop the work that the first one made."""
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts come to the main thread only
        return
    came: list[tuple] = []
    handler = signal.signal(signal.SIGINT, lambda *signum_and_frame: came.append(signum_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler if handler is not None else signal.SIG_DFL)
        if came and callable(handler):
            handler(*came[0])


def _unpack(value: bytes, rank: int) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        name, message = type(error).__name__, str(error)
        report = f"what rank {rank} returned cannot be rebuilt here: {name}: {message}"
        raise RankError(report, rank, name, message) from None
