"""What runs inside the processes behind a cell: the fork server, and the ranks.

On Linux one *fork server* imports torch once and forks a fresh process for each rank of each
call: about 30 ms instead of seconds. It is a clean process of its own, so neither CUDA in the
notebook nor its threads can be inherited. Elsewhere each rank is a new interpreter that is kept
for the next call. Both run the same `run_rank`, and both end as soon as the notebook is gone.

Never imported for its contents by course code: `launch.run_ranks` is the door.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import marshal
import os
import pickle
import queue
import random
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from course_lib.classroom._rank_report import describe_failure, describe_stack, remember_sources

PRELOAD = (
    "numpy",
    "cloudpickle",
    "torch",
    "torch.distributed",
    "safetensors",
    "tokenizers",
    "tqdm",
)
# The first optimizer of a process imports it, for a second and more.
PRELOAD_ONCE = ("torch._dynamo",)

STATUS = struct.Struct("q")  # what the fork server writes on a rank's status pipe
PARENT_CHECK_S = 1.0

current_rank: int | None = None  # set while this process runs a rank's function


@dataclass(frozen=True)
class Job:
    """One rank's part of one call; the pickled function and arguments follow separately."""

    rank: int
    world_size: int
    store_port: int
    backend: str
    device: int | None  # the GPU of this rank
    threads: int
    timeout_s: float
    directory: str
    environment: dict[str, str] = field(repr=False)
    path: list[str] = field(repr=False)
    sources: dict[str, tuple[str, str]] = field(repr=False)


def pack(value: Any) -> bytes:
    """Pickle by value what a cell defined; tensors travel as plain CPU tensors.

    So a result neither starts CUDA in the notebook nor drags along the storage that it is a
    view of, nor an autograd graph, which cannot leave its process. Code keeps its file name,
    by which tracebacks find its lines.
    """
    import cloudpickle
    import torch

    class Packer(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):  # cloudpickle would call its file <dynamic-code>
                return marshal.loads, (marshal.dumps(obj),)
            if type(obj) is torch.Tensor and obj.layout == torch.strided:
                return _plain(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    def _plain(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor if tensor.is_leaf else tensor.detach()
        if plain.device.type not in ("cpu", "meta"):
            plain = plain.detach().cpu().requires_grad_(plain.requires_grad)
        if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
            plain = plain.detach().clone().requires_grad_(plain.requires_grad)
        return plain

    buffer = io.BytesIO()
    Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------
# The fork server


def serve_forks(control_fd: int) -> None:
    """Fork a rank for each request on the control socket, until the notebook is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the notebook's to decide
    notebook = os.getppid()
    _preload(*PRELOAD, *PRELOAD_ONCE)
    gc.collect()
    gc.freeze()  # collections in the ranks then leave the shared pages alone
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control = socket.socket(fileno=control_fd)
    statuses: dict[int, int] = {}  # pid -> status pipe
    while os.getppid() == notebook:
        ready, _, _ = select.select([control, wake_r], [], [], PARENT_CHECK_S)
        if wake_r in ready:
            os.read(wake_r, 4096)
        _report_ended(statuses)
        if control in ready:
            request, fds, _, _ = socket.recv_fds(control, 16, 8)
            if not request:
                break
            _fork_rank(fds, statuses, [control.fileno(), wake_r, wake_w])
    for pid in statuses:
        _kill_group(pid)


def _fork_rank(fds: list[int], statuses: dict[int, int], servers_own: list[int]) -> None:
    link, out, err, status = fds
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # too many processes, or too little memory
        os.write(status, STATUS.pack(-(error.errno or 1)))
        for fd in fds:
            os.close(fd)
        return
    if pid == 0:
        try:
            for fd in (*servers_own, status, *statuses.values()):
                os.close(fd)
            _be_a_forked_rank(link, out, err, server)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the server's loop
    with contextlib.suppress(OSError):  # the child does it too: whoever comes first
        os.setpgid(pid, pid)
    statuses[pid] = status
    _write_status(status, pid)
    for fd in (link, out, err):
        os.close(fd)


def _be_a_forked_rank(link: int, out: int, err: int, server: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # a group of its own, so that its own children end with it
    for fd, standard in ((out, 1), (err, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    # Even a rank that is deep in compiled code ends with its server (1 = PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    run_rank(link, parent=server, keep_alive=False)


def _report_ended(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = statuses.pop(pid)
        _write_status(pipe, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _write_status(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the call was given up
        os.write(pipe, STATUS.pack(number))


# ---------------------------------------------------------------------------------------------
# A rank


def run_kept_rank(link: int) -> None:
    """Be a rank that is kept from call to call (where there is no fork server)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload(*PRELOAD)
    run_rank(link, parent=os.getppid(), keep_alive=True)


def run_rank(link: int, parent: int, keep_alive: bool) -> None:
    """Take a job from the socket `link`, run it, answer; with `keep_alive`, again and again."""
    os.set_inheritable(link, False)
    connection = Connection(link)
    sending = threading.Lock()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    main_thread = threading.get_ident()

    def send(*message: Any) -> None:
        with sending:
            connection.send_bytes(pickle.dumps(message))

    def listen() -> None:
        try:
            while True:
                if not connection.poll(PARENT_CHECK_S):
                    if os.getppid() != parent:
                        break
                    continue
                kind, *body = pickle.loads(connection.recv_bytes())
                if kind == "stack":
                    send("stack", describe_stack(sys._current_frames()[main_thread]))
                elif kind == "job":
                    inbox.put((*body, connection.recv_bytes()))
                else:
                    inbox.put(kind)
        except (EOFError, OSError):
            pass
        _kill_group(os.getpid())  # the notebook is gone: so are we, with all that we started

    _own_standard_streams()
    threading.Thread(target=listen, name="run_ranks", daemon=True).start()
    while True:
        job, call = inbox.get()
        send(*_answer(job, call, send, wait_for_go=inbox.get))
        # Stay until told to go. A peer that waits for us then hangs, and is reported so,
        # instead of failing with a "connection closed" that hides the cause.
        inbox.get()
        _leave_group()
        if not keep_alive:
            os._exit(0)
        send("left")


def _answer(
    job: Job, call: bytes, send: Callable[..., None], wait_for_go: Callable[[], Any]
) -> tuple:
    global current_rank
    try:
        _settle_in(job)
        _join_group(job)
        run = _unpack_call(call)
        send("ready")
        wait_for_go()  # until all are ready: then no rank fails or ends before others start
        current_rank = job.rank
        value = run()
        answer = ("finished", _pack_result(value))
    except BaseException as error:
        answer = ("raised", describe_failure(error))
    finally:
        current_rank = None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what compiled code printed
    return answer


def _settle_in(job: Job) -> None:
    """Make this process look like the notebook's own: directory, environment, paths, cells."""
    import numpy
    import torch

    own = {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "OMP_NUM_THREADS": str(job.threads),
        "MPLBACKEND": "agg",  # the notebook's own backend draws only in the notebook
    }
    # gloo else resolves the host's name, which fails on some laptops and guests.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted = {"GLOO_SOCKET_IFNAME": loopback, **job.environment, **own}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)
    with contextlib.suppress(OSError):
        os.chdir(job.directory)
    sys.path[:] = job.path
    sys.argv = [""]
    importlib.invalidate_caches()
    remember_sources(job.sources)
    torch.set_num_threads(job.threads)
    if job.device is not None:
        torch.cuda.set_device(job.device)
    # The same start in each rank and each call, so that results repeat.
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def _join_group(job: Job) -> None:
    import torch.distributed as dist

    # A little longer than the launcher's limit, so that its report comes first.
    limit = timedelta(seconds=job.timeout_s + 15)
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=limit)
    dist.init_process_group(
        job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit
    )


def _leave_group() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def _unpack_call(call: bytes) -> Callable[[], Any]:
    try:
        fn, args, kwargs = pickle.loads(call)
    except Exception as error:
        raise RuntimeError(
            "the function or its arguments could not be rebuilt in the rank. "
            "Modules that it needs must be importable there too"
        ) from error
    # Plain pickle (all_gather_object, DataLoader workers) looks a cell's classes up by name in
    # __main__, where the notebook has them.
    if getattr(fn, "__module__", None) == "__main__":
        vars(sys.modules["__main__"]).update(
            (name, value)
            for name, value in getattr(fn, "__globals__", {}).items()
            if isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"
        )
    return lambda: fn(*args, **kwargs)


def _pack_result(value: Any) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the function returned a value of type {type(value).__name__} that cannot be sent "
            f"back to the notebook ({error}). Return numbers, strings, tensors, or lists and "
            "dictionaries of them"
        ) from None


def _own_standard_streams() -> None:
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(fd, "wb", closefd=False)
        text = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    faulthandler.enable(file=sys.stderr, all_threads=False)
    # For a rank that cannot answer: the signal writes its stack without Python's lock.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)


def _preload(*names: str) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
