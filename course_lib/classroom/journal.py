"""The learner's progress: one local JSON file, and the figure that draws it.

The file never leaves the machine. It holds, for each exercise, how often it was tried, whether it
passed and which help was used, and for each prediction the first guess and how good it was. Two
notebooks may write at once (a lock file orders them), a write is all or nothing (a rename). The
learner's own file, once damaged, is set aside under another name; no other file is ever moved, and
none that cannot be read is overwritten.
"""

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

FORMAT = 1

# Validating a notebook must not count as a learner's attempt: `notebooks run` and the tests point
# this variable at a throw-away file. Nothing else reads the environment.
VARIABLE = "ONE_GPU_TO_MANY_PROGRESS"

_chosen: Path | None = None


class _Unusable(OSError):
    """There is a file, but no record can be read from it, and it must stay as it is."""


def progress(path: str | Path | None = None, draw: bool = True) -> None:
    """Print and draw chapters × exercises, and how good the predictions were.

    Arguments:
        path: the progress file (default: the learner's own).
        draw: also draw the figure.
    """
    from . import checks
    from .syllabus import load

    try:
        record = _load(path)
    except OSError as problem:
        print(f"No progress to show: {_reason(problem, path)}.")
        return
    rows = []
    for chapter in load().chapters:
        names = [exercise.name for exercise in checks.exercises_of(chapter.topic)]
        states = [state_of(record["exercises"].get(name, {})) for name in names]
        rows.append((chapter.title, states))
        print(f"{chapter.title:<32} {_count(states)}")
    print(_predictions_line(record["predictions"]))
    if draw and any(states for _, states in rows):
        _draw(rows)


def keep_progress_in(folder: str | Path) -> None:
    """Keep the progress file in another folder from now on (on Colab: a folder of your Drive)."""
    global _chosen
    _chosen = Path(folder).expanduser() / "progress.json"


def location(path: str | Path | None = None) -> Path:
    """Return the progress file in use: the argument, the chosen folder, or the home folder."""
    if path is not None:
        return Path(path)
    if _chosen is not None:
        return _chosen
    return Path(os.environ.get(VARIABLE) or Path.home() / ".one-gpu-to-many" / "progress.json")


def read(path: str | Path | None = None) -> dict:
    """Return the record `{"format", "exercises", "predictions"}`; empty if there is no file yet.

    Never raises: where a file cannot be read, the learner is told. The learner's own file, if
    damaged, is renamed (progress.damaged-1.json); a file given as `path` is left as it is.
    """
    try:
        return _load(path)
    except OSError as problem:
        print(f"This session starts without your earlier progress: {_reason(problem, path)}.")
        return _empty()


def _load(path: str | Path | None) -> dict:
    """Return the record. Raises OSError for a file that cannot be read and stays as it is."""
    file = location(path)
    if file.exists() and not file.is_file():
        raise _Unusable(f"{file} is not a file")
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return _empty()
    if not content.strip(b"\0 \t\r\n"):  # what a crash may leave: it holds nothing to lose
        return _empty()
    try:
        return _parsed(content, file)
    except (ValueError, RecursionError) as error:  # also what json and utf-8 raise
        if not _looks_ours(content):
            raise _Unusable(
                f"{file} is not a progress file of this course ({error}); it was left as it is. "
                "Move it away, or choose another folder with keep_progress_in"
            ) from None
        if path is not None:
            raise _Unusable(
                f"{file} is a damaged progress file ({error}); it was left as it is, because "
                "only the course's own file is set aside. Give another file, or repair this one"
            ) from None
        _set_aside(file, error)
        return _empty()


def _empty() -> dict:
    return {"format": FORMAT, "exercises": {}, "predictions": {}}


def _parsed(content: bytes, file: Path) -> dict:
    record = json.loads(content.decode("utf-8"))
    if not isinstance(record, dict):
        raise ValueError("it holds no record")
    version = record.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise _Unusable(
            f"{file} was written by a newer version of the course (format {version}; this version "
            f"knows {FORMAT}); it was left as it is. Update the course, then try again"
        )
    if version != FORMAT:
        raise ValueError(f"its format is {version!r}, not {FORMAT}")
    if not any(isinstance(record.get(key), dict) for key in ("exercises", "predictions")):
        raise ValueError("exercises and predictions are missing")
    return {
        **record,
        "exercises": _good_ones(record.get("exercises"), _is_exercise),
        "predictions": _good_ones(record.get("predictions"), _is_prediction),
    }


def _looks_ours(content: bytes) -> bool:
    """Say whether damaged content starts as we write it, perhaps cut short, or has our keys."""
    text = content.decode("utf-8", errors="replace").lstrip()
    if re.match(r'\{\s*"(exercises|format|predictions)"\s*:', text):
        return re.search(r'"(exercises|predictions)', text) is not None
    begun = re.fullmatch(r'\{\s*("exe\w*"?)\s*', text)  # we write the exercises first
    return begun is not None and '"exercises"'.startswith(begun[1])


def _good_ones(entries: object, is_good: Callable[[object], bool]) -> dict:
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if is_good(entry)}


def _is_exercise(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and all(type(entry.get(key)) is int for key in ("attempts", "hints"))
        and all(type(entry.get(key)) is bool for key in ("passed", "solution"))
    )


def _is_prediction(entry: object) -> bool:
    return isinstance(entry, dict) and all(_is_guess(entry.get(key)) for key in ("first", "last"))


def _is_guess(guess: object) -> bool:
    return (
        isinstance(guess, dict)
        and guess.keys() >= {"guess", "right", "error"}
        and (guess["right"] is None or type(guess["right"]) is bool)
        and (guess["error"] is None or type(guess["error"]) in (int, float))
    )


def _reason(problem: OSError, path: str | Path | None) -> str:
    if isinstance(problem, _Unusable):
        return str(problem)
    return f"{location(path)} cannot be read ({problem.strerror or problem})"


def update(change: Callable[[dict], None], path: str | Path | None = None) -> bool:
    """Apply `change` to the record and save it; return whether it could be saved.

    The file is read, changed and replaced under a lock, so that no entry of another notebook is
    lost. A disk that is full or read-only never stops a lesson: the learner is told, no more.
    """
    given, path = path, location(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            record = _load(given)
            change(record)
            _replace(path, json.dumps(record, indent=1, sort_keys=True))
    except OSError as error:
        print(f"(Your progress could not be saved: {error.strerror or error}.)")
        return False
    return True


def note_exercise(name: str, *, passed: bool | None = None, hints: int = 0, solution: bool = False):
    """Record an attempt (`passed` True or False), the strongest hint seen, or a shown solution."""

    def change(record: dict) -> None:
        entry = record["exercises"].setdefault(
            name, {"attempts": 0, "passed": False, "hints": 0, "solution": False}
        )
        if passed is not None:
            entry["attempts"] += 1
            entry["passed"] = entry["passed"] or passed
        entry["hints"] = max(entry["hints"], hints)
        entry["solution"] = entry["solution"] or solution

    update(change)


def note_prediction(
    name: str, guess: object, right: bool | None = None, error: float | None = None
):
    """Record a guess, and after the measurement how good it was. The first measured guess counts.

    Arguments: error: relative error, None where there is none (a word, a list).
    """

    def change(record: dict) -> None:
        entry = record["predictions"].setdefault(name, {"first": None, "last": None})
        entry["last"] = {"guess": guess, "right": right, "error": error}
        if entry["first"] is None or entry["first"]["right"] is None:
            entry["first"] = entry["last"]

    update(change)


def state_of(entry: dict) -> str:
    """Return "untried", "tried" or "passed", with the help that was used."""
    state = "passed" if entry.get("passed") else "tried" if entry.get("attempts") else "untried"
    help_used = (
        [f"{entry['hints']} hints" if entry["hints"] > 1 else "1 hint"]
        if entry.get("hints")
        else []
    )
    help_used += ["solution seen"] if entry.get("solution") else []
    return f"{state} ({', '.join(help_used)})" if help_used else state


def _count(states: list[str]) -> str:
    if not states:
        return "no exercises"
    kinds = [state.split(" ")[0] for state in states]
    parts = [
        f"{kinds.count(kind)} {kind}" for kind in ("passed", "tried", "untried") if kind in kinds
    ]
    helped = sum("(" in state for state in states)
    return " · ".join(parts) + (f" · help used in {helped}" if helped else "")


def _predictions_line(predictions: dict) -> str:
    firsts = [entry["first"] for entry in predictions.values() if entry.get("first")]
    measured = [first for first in firsts if first["right"] is not None]
    if not measured:
        return "Predictions: none measured yet"
    right = sum(bool(first["right"]) for first in measured)
    errors = [first["error"] for first in measured if first["error"] is not None]
    line = f"Predictions: {right} of {len(measured)} right at the first guess"
    return line + (f", median error {median(errors):.0%}" if errors else "")


def _draw(rows: list[tuple[str, list[str]]]) -> None:
    from . import figures

    signs = {
        "passed": ("o", "#009E73", "#009E73"),
        "tried": ("^", "#E69F00", "#E69F00"),
        "untried": ("o", "white", "#8C8C8C"),
    }
    fig, ax = figures.subplots(height=0.9 + 0.42 * len(rows))
    drawn = set()
    for at, (_, states) in enumerate(rows):
        for column, state in enumerate(states, 1):
            kind, _, help_used = state.partition(" ")
            marker, face, edge = signs[kind]
            ax.plot(
                column,
                at,
                marker,
                markerfacecolor=face,
                markeredgecolor=edge,
                markersize=11,
                label=kind if kind not in drawn else None,
            )
            ax.text(column + 0.12, at, help_used.strip("()"), va="center", fontsize=8)
            drawn.add(kind)
    widest = max(len(states) for _, states in rows)
    ax.set(
        title="Your progress",
        xlabel="exercise (number)",
        ylabel="chapter",
        xlim=(0.5, widest + 1),
        xticks=range(1, widest + 1),
        ylim=(len(rows) - 0.5, -0.5),
        yticks=range(len(rows)),
        yticklabels=[title for title, _ in rows],
    )
    ax.grid(False)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    done = sum(state.startswith("passed") for _, states in rows for state in states)
    total = sum(len(states) for _, states in rows)
    figures.show(
        fig,
        alt="A grid of chapters and exercises: a filled circle is passed, a triangle "
        "tried, an empty circle untried; a note says which help was used.",
        finding=f"{done} of {total} exercises passed.",
    )


def _set_aside(path: Path, reason: Exception) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise _Unusable(
            f"{path} is damaged and could not be set aside ({error.strerror or error})"
        ) from error
    print(
        f"Your progress file was damaged ({reason}). It is kept as {aside.name}; a new one "
        "starts now."
    )


@contextlib.contextmanager
def _locked(path: Path, patience_s: float = 10.0) -> Iterator[None]:
    """Hold an exclusive lock on `path`.

    Some shared folders (a mounted Drive) know no locks: there the write goes on without one.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(path, "a") as lock:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError("another notebook has held the progress file too long") from None
                time.sleep(0.01)
            except OSError:
                break
        yield  # closing the file releases the lock


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
