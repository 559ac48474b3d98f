"""What the set-up cell of every notebook does on Colab, and nowhere else.

Colab comes with its own torch, numpy and Jupyter, which its machines need as they are: replacing
one of them breaks the session. So only what cannot be imported is installed, and a constraint file
holds everything else that the requirements touch at the version that is there.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .syllabus import repository_root

# Never installed from a notebook: part of the machine, or only for authors and tests.
NEVER = {"torch", "numpy", "ipython", "ipykernel", "jupyterlab", "jupyter", "notebook", "nbval"}


def prepare() -> None:
    """Install on Colab what cannot be imported; do nothing on any other machine."""
    if "google.colab" not in sys.modules:
        return
    missing = missing_requirements((repository_root() / "requirements.txt").read_text("utf-8"))
    if missing:
        print("Installing", ", ".join(missing))
        install(missing)


def missing_requirements(requirements: str) -> list[str]:
    """Return the lines of a requirements file that are needed here and cannot be imported."""
    return [
        line
        for line in _lines(requirements)
        if _name(line) not in NEVER and find_spec(_name(line).replace("-", "_")) is None
    ]


def install(requirements: Iterable[str]) -> None:
    """Install with pip, holding the machine's own packages at the versions that are there."""
    with tempfile.TemporaryDirectory() as folder:
        held = Path(folder) / "held.txt"
        held.write_text("\n".join(held_versions()), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "-c", str(held), *requirements],
            check=True,
        )


def held_versions() -> list[str]:
    """Return "name==version" for each installed package that an installation must not move."""
    names = {
        *NEVER,
        *(
            _name(line)
            for line in _lines((repository_root() / "requirements.txt").read_text("utf-8"))
        ),
    }
    held = []
    for name in sorted(names):
        try:
            # A local part such as +cu128 is on no index; pip compares without it.
            held.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            continue
    return held


def _lines(requirements: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in requirements.splitlines())
    return [line for line in lines if line and not line.startswith("-")]


def _name(line: str) -> str:
    return re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0].strip().lower()
