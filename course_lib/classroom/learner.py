"""Call the learner's function, and find the learner's own line in an error.

That line is the one of a traceback that helps.
"""

import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

AGAIN = "run this cell again"

_LIBRARY = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")
)


def learners_line(error: BaseException) -> str:
    """Return "in square, line 3: return rnk ** 2" for the deepest line that is the learner's.

    Returns "" where no line is: then the fault is not in the learner's code.
    """
    frame = learners_frame(error)
    if frame is None:
        return ""
    where = (
        f"line {frame.lineno}"
        if frame.name == "<module>"
        else (f"in {frame.name}, line {frame.lineno}")
    )
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"  {where}: {source}" if source else f"  {where}"


def learners_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the deepest frame of the error that lies outside the course and installed code."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_learners(frame)), None)


def _is_learners(frame: traceback.FrameSummary) -> bool:
    filename = frame.filename
    if filename == "<string>" and frame.name.startswith("__"):
        return False  # a method that `dataclass` has made
    # Not resolved for "<...>": the learner's code may come from a string or a cell.
    path = filename if filename.startswith("<") else str(Path(filename).resolve())
    if path.startswith("<frozen"):
        return False
    return not path.startswith((_LIBRARY, *_INSTALLED)) and "site-packages" not in path


def ask(function: Callable, at: Sequence) -> list:
    """Return a function's values at the given sizes."""
    return [function(*(size if isinstance(size, tuple) else (size,))) for size in at]


def ask_learner(function: Callable, at: Sequence) -> tuple[list | None, str]:
    """Return the values of the learner's function, and what is wrong with it ("" if nothing)."""
    problem = _wrong_parameters(function, at)
    if problem:
        return None, problem
    try:
        values = ask(function, at)
    except (Exception, SystemExit) as error:
        if _is_stub(error):
            return None, no_prediction("`raise NotImplementedError`")
        told = f"Your function raised {type(error).__name__}: {error}\n{learners_line(error)}"
        return None, f"{told.rstrip()}\nNo prediction was kept: correct it, then {AGAIN}."
    if any(value is None for value in values):
        problem = "Your function gave back nothing: use `return` in front of its result"
        return None, f"{problem}, then {AGAIN}."
    if any(value is Ellipsis for value in values):
        return None, no_prediction("the ...")
    return values, ""


def _wrong_parameters(function: Callable, at: Sequence) -> str:
    """Say that a function cannot be called with one of the sizes; "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return ""
    for size in at:
        given = size if isinstance(size, tuple) else (size,)
        try:
            signature.bind(*given)
        except TypeError as error:
            name = getattr(function, "__name__", type(function).__name__)
            call = f"{len(given)} argument{'s' if len(given) != 1 else ''}"
            return (
                f"Your function is {name}{signature}, but it is called with {call}: {error}. "
                f"Let it take {call}, then {AGAIN}."
            )
    return ""


def _is_stub(error: BaseException) -> bool:
    """Tell the chapter's placeholder from a NotImplementedError that torch raises."""
    frame = learners_frame(error)
    unknown = frame is None or not frame.line
    return isinstance(error, NotImplementedError) and (
        unknown or "NotImplementedError" in frame.line
    )


def no_prediction(placeholder: str) -> str:
    """Say what to replace where nothing has been predicted yet."""
    return f"No prediction yet: replace {placeholder} with your own, then {AGAIN}."
