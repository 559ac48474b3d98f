"""The directory of a run: it can be written to, and one run at a time does so."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from course_lib.checkpoint.errors import first_decides
from course_lib.config import ConfigError
from course_lib.mesh import Mesh

LOCK = ".lock"  # in the directory, held while the run lasts


class RunInUse(RuntimeError):
    """Another run writes to the same directory."""


def make_directory(directory: Path, mesh: Mesh) -> None:
    """Make a run's directory, before anything costs time. Collective.

    Raises ConfigError on all ranks where the first one cannot write there.
    """

    def fault() -> str | None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / LOCK).open("a").close()
        except OSError as error:
            reason = error.strerror or error
            return f"run.directory {directory} cannot be written to: {reason}; choose another"

    if words := first_decides(mesh, fault):
        raise ConfigError([words])


@contextmanager
def only_run_in(directory: Path, mesh: Mesh) -> Iterator[None]:
    """Hold the directory for this run, where the file system has locks. Collective.

    Raises RunInUse on all ranks alike: one that went on would wait in vain for the first.
    """
    with (directory / LOCK).open("a") if mesh.is_first else nullcontext() as file:
        if first_decides(mesh, lambda: _held_by_another(file)):
            raise RunInUse(f"another run uses {directory}; choose another run.directory")
        yield


def _held_by_another(file: TextIO) -> bool:
    """Lock a file; whether another process holds it already."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        pass  # a file system without locks
    return False
