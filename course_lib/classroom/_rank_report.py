"""What a learner reads when ranks fail: short tracebacks, stacks of a hang, one first cause.

A rank describes its own failure or its own stack (`describe_failure`, `describe_stack`); the
notebook puts the descriptions together (`failure_report`, `death_report`, `hang_report`). Every
text keeps only the learner's lines: frames of the launcher, of Python and of installed packages
are left out, because the mistake is hardly ever there.
"""

import linecache
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# Set in each rank by `remember_sources`: cell file name -> "Cell In[3]".
_labels: dict[str, str] = {}

_COURSE = str(Path(__file__).parent.parent)
_LAUNCHER = tuple(str(Path(__file__).parent / name) for name in ("_rank_", "launch.py"))
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_COLLECTIVE_FILES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")

# How the peers of a rank that died complain. Their errors are true but never the first cause.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|recvValue failed|sendBytes failed"
    r"|remote process exited|Socket closed|Connection was likely closed|Read error|Write error",
    re.IGNORECASE,
)


class RankError(RuntimeError):
    """A rank failed. The message is the whole report, on the learner's own lines.

    Attributes:
        rank: the rank that failed first, or None where no single rank did.
        type_name: the name of the exception raised there, or None if the process died.
        message: that exception's message.
    """

    __module__ = "course_lib.classroom.launch"  # where everybody imports it from

    def __init__(
        self, report: str, rank: int | None = None, type_name: str | None = None, message: str = ""
    ) -> None:
        super().__init__(report)
        self.rank = rank
        self.type_name = type_name
        self.message = message

    def _render_traceback_(self, *_: Any) -> list[str]:
        """Show the report alone in a notebook: the launcher's own frames teach nothing."""
        return f"{type(self).__name__}: {self}".splitlines()


class RankTimeout(RankError):
    """Ranks were not done at the time limit. The message shows what each was doing.

    Attributes:
        waiting: for each unfinished rank the collective that it waited in, or None.
        finished: the ranks that had returned.
    """

    __module__ = RankError.__module__

    def __init__(
        self,
        report: str,
        waiting: dict[int, str | None] | None = None,
        finished: tuple[int, ...] = (),
    ) -> None:
        super().__init__(report)
        self.waiting = waiting or {}
        self.finished = finished


class RanksInterrupted(KeyboardInterrupt):
    """The call was interrupted; all its processes have been ended."""

    __module__ = RankError.__module__

    def _render_traceback_(self, *_: Any) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


@dataclass(frozen=True)
class Failure:
    """An exception in a rank, in words."""

    type_name: str
    message: str
    text: str  # the traceback, trimmed to the learner's lines
    when: float  # time.monotonic(), the same clock for all processes of a machine
    peer_lost: bool  # only says that another rank went away


@dataclass(frozen=True)
class Stack:
    """Where a rank is now."""

    text: str
    waits_in: str | None  # the collective on its stack, as torch.distributed names it


def remember_sources(sources: Mapping[str, tuple[str, str]]) -> None:
    """Give this process the text of the notebook's cells: file name -> (label, source)."""
    for name, (label, source) in sources.items():
        # A None in the place of the time stamp keeps linecache from looking for a file.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        _labels[name] = label


def describe_failure(error: BaseException) -> Failure:
    """Describe an exception caught in a rank.

    Args:
        error: the exception, with its traceback.

    Returns:
        Its name, message and the learner's part of its traceback.
    """
    summary = traceback.TracebackException.from_exception(error)
    for part in _chain(summary):
        own = _learner_frames(part.stack or [])
        part.stack = traceback.StackSummary.from_list(own) if own else None
    message = _without_native_frames(str(error))
    return Failure(
        type_name=type(error).__qualname__,
        message=message,
        text=_without_native_frames("".join(summary.format())).rstrip("\n"),
        when=time.monotonic(),
        peer_lost=any(_PEER_LOST.search(str(part)) for part in _causes(error)),
    )


def describe_stack(frame: FrameType) -> Stack:
    """Describe what a running thread does, from its innermost frame."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame))
    frames.reverse()  # walk_stack starts at the innermost
    collective = _collective(frames)
    own = _learner_frames(frames)
    if collective is None and own and re.search(r"\.wait\(", own[-1].line or ""):
        collective = "wait"  # an asynchronous collective: its handle is compiled code
    return Stack("".join(traceback.format_list(own)).rstrip("\n"), collective)


def failure_report(first: int, failures: Mapping[int, Failure], world_size: int) -> str:
    """Tell the first cause in full and the other exceptions in a line each."""
    cause = failures[first]
    same = [rank for rank, failure in failures.items() if _same_error(rank, failure, first, cause)]
    lines = [f"rank {first} raised {_headline(cause)}"]
    if "\n" in cause.text:  # else the launcher raised it, and the headline is all
        lines += ["", cause.text]
    notes = []
    if len(same) == world_size > 1:
        everyone = "Both" if world_size == 2 else f"All {world_size}"
        notes.append(f"{everyone} ranks raised the same error.")
    elif len(same) > 1:
        notes.append(f"{name_ranks(sorted(same)).capitalize()} raised the same error.")
    notes += [
        f"rank {rank} also raised {_headline(failure)}"
        for rank, failure in sorted(failures.items())
        if rank not in same and not failure.peer_lost
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def death_report(rank: int, exit_code: int | None) -> str:
    """Tell how a process ended that never returned nor raised."""
    if exit_code is None:
        how = "ended, and nobody could say how: the process that starts ranks is gone too"
    elif exit_code < 0:
        how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
        if exit_code == -signal.SIGKILL:
            how += ": often because memory ran out; try fewer ranks or smaller tensors"
        elif exit_code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
            how += ": compiled code crashed; its last words are in the printed output"
    else:
        how = f"left with exit code {exit_code} before its function returned (os._exit?)"
    return f"rank {rank} {how}"


def hang_report(stacks: Mapping[int, Stack | None], finished: Iterable[int], limit_s: float) -> str:
    """Tell what each rank was doing at the time limit.

    Args:
        stacks: for each unfinished rank its stack, or None where it gave no answer.
        finished: the ranks whose function had returned.
        limit_s: the time limit in seconds.

    Returns:
        Ranks with equal stacks together, then who has finished.
    """
    finished = sorted(finished)
    total = len(stacks) + len(finished)
    lines = [f"{len(stacks)} of {total} ranks did not finish within {limit_s:g} s"]
    for stack, ranks in _equal_stacks(stacks):
        lines += ["", f"{name_ranks(ranks)} {_activity(stack, plural=len(ranks) > 1)}"]
        lines += [stack.text] if stack and stack.text else []
    if finished:
        others_wait = any(stack and stack.waits_in for stack in stacks.values())
        lines += ["", _finished_line(finished, others_wait)]
    return "\n".join(lines)


def name_ranks(ranks: list[int]) -> str:
    """Write "rank 2", or "ranks 0, 1 and 3", or "ranks 0 to 63"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        few = ", ".join(map(str, ranks[:4]))
        whole = ranks == list(range(ranks[0], ranks[-1] + 1))
        return f"ranks {ranks[0]} to {ranks[-1]}" if whole else f"{len(ranks)} ranks ({few}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _headline(failure: Failure) -> str:
    first_line = failure.message.splitlines()[0] if failure.message else ""
    return f"{failure.type_name}: {first_line}" if first_line else failure.type_name


def _same_error(rank: int, one: Failure, other_rank: int, other: Failure) -> bool:
    if one.type_name != other.type_name:
        return False
    return one.message == other.message or (
        _without_own_number(rank, one.message) == _without_own_number(other_rank, other.message)
    )


def _without_own_number(rank: int, message: str) -> str:
    # "rank 3: no data" and "rank 0: no data" are one error. Other numbers mean something else.
    return re.sub(rf"\b(rank[ :=]*){rank}\b", r"\1#", message, flags=re.IGNORECASE)


def _finished_line(finished: list[int], others_wait: bool) -> str:
    many = len(finished) > 1
    words = (
        "have finished: their functions returned" if many else "has finished: its function returned"
    )
    if others_wait:  # a rank whose tensor had another shape did make the call, and came back
        words += f"; {'they' if many else 'it'} skipped this call, or made it with another shape"
    return f"{name_ranks(finished)} {words}"


def _activity(stack: Stack | None, plural: bool) -> str:
    ending = "" if plural else "s"
    if stack is None:
        return (
            f"give{ending} no answer: stopped, or in compiled code that holds Python's lock "
            "(what could be read of the stack is in the printed output)"
        )
    if stack.waits_in == "wait":
        return f"wait{ending} in .wait() for an asynchronous collective"
    if stack.waits_in:
        return f"wait{ending} in {stack.waits_in}"
    return ("are" if plural else "is") + " still running"


def _equal_stacks(stacks: Mapping[int, Stack | None]) -> list[tuple[Stack | None, list[int]]]:
    groups: dict[Stack | None, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(stack, []).append(rank)
    return list(groups.items())


def _collective(frames: Iterable[traceback.FrameSummary]) -> str | None:
    # The outermost such frame is the function that the learner called: all_gather_object, say,
    # and not the all_gather inside it.
    for frame in frames:
        if frame.filename.endswith(_COLLECTIVE_FILES) and frame.name != "wrapper":
            return frame.name.lstrip("_")
    return None


def _learner_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    frames = list(frames)
    # A rank's stack starts with the launcher, down to the call of the learner's function.
    inside = [place for place, it in enumerate(frames) if it.filename.startswith(_LAUNCHER[0])]
    frames = frames[inside[-1] + 1 :] if inside else frames
    frames = [frame for frame in frames if not frame.filename.startswith(_LAUNCHER)]
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    for frame in own:
        _ = frame.line  # read now, while the frame still has its file name
        frame.filename = _labels.get(frame.filename, frame.filename)
    return own


def _is_library(filename: str) -> bool:
    if filename.startswith(_COURSE):
        return False
    return (
        filename.startswith((_STANDARD_LIBRARY, "<frozen"))
        or "/site-packages/" in filename
        or "/dist-packages/" in filename
    )


def _chain(summary: traceback.TracebackException) -> list[traceback.TracebackException]:
    parts, waiting = [], [summary]
    while waiting:
        part = waiting.pop()
        parts.append(part)
        linked = [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or [])]
        waiting += [other for other in linked if other is not None]
    return parts


def _causes(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    return causes


def _without_native_frames(text: str) -> str:
    """Drop the C++ stack that torch appends to some messages: it has addresses, and no news."""
    return re.sub(
        r"\n(Exception raised from|C\+\+ CapturedTraceback).*?(?=\n\n|\Z)", "", text, flags=re.S
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
