"""Find the learner's own line in an error: the one line of a traceback that helps."""

import linecache
import sysconfig
import traceback
from pathlib import Path

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
    return next((frame for frame in reversed(frames) if _is_learners(frame.filename)), None)


def _is_learners(filename: str) -> bool:
    # Not resolved for "<...>": the learner's code may come from a string or a cell.
    path = filename if filename.startswith("<") else str(Path(filename).resolve())
    if path.startswith("<frozen"):
        return False
    return not path.startswith((_LIBRARY, *_INSTALLED)) and "site-packages" not in path
