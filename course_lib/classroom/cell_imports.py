"""What the cells of a chapter import, and which of them a rename in the library breaks."""

import ast
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat

from .syllabus import repository_root


class Import(NamedTuple):
    """One name that a cell imports."""

    cell: int  # counted from 0
    module: str
    name: str | None  # None: the module itself
    bound: str  # the name by which the notebook knows it

    def __str__(self) -> str:
        return f"from {self.module} import {self.name}" if self.name else f"import {self.module}"


def statements_of(notebook) -> Iterator[tuple[int, ast.stmt]]:
    """Yield (cell, statement) for the top level of every code cell that can be read."""
    for at, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.get("id") != "setup":
            try:
                yield from ((at, statement) for statement in ast.parse(cell.source).body)
            except SyntaxError:
                continue  # the rule "syntax" says so


def imports_of(at: int, statement: ast.stmt) -> list[Import]:
    """Return what one statement of a cell imports."""
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        names = [(alias.name, alias.asname or alias.name) for alias in statement.names]
        return [Import(at, statement.module, name, bound) for name, bound in names]
    if isinstance(statement, ast.Import):
        return [
            # `import a.b` binds a, `import a.b as c` binds a.b
            Import(at, a.name if a.asname else a.name.partition(".")[0], None, a.asname or a.name)
            for a in statement.names
        ]
    return []


def explain(error: ImportError, files: Iterable[Path]) -> str:
    """Say in one line where an import failed, and which cells of chapters it breaks too.

    files: the notebooks to look through.
    """
    root = repository_root()
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if f.is_relative_to(root) and "site-packages" not in f.parts]
    where = own[-1].relative_to(root).as_posix() if own else "an import"
    missing = re.search(r"import name '(\w+)'", error.msg or "")
    places = []
    for path in files:
        cells = sorted(
            {
                at + 1
                for at, statement in statements_of(nbformat.read(path, as_version=4))
                for found in imports_of(at, statement)
                if (missing is None or found.name == missing[1]) and _is_of(found, error.name)
            }
        )
        if cells:
            places.append(f"{path.name} (cell {', '.join(map(str, cells))})")
    reason = re.sub(r" \(/[^)]*\)", "", error.msg or str(error))  # without the machine's path
    return f"{where}: {reason}; imported too by {', '.join(places) or 'no chapter'}"


def _is_of(found: Import, module: str | None) -> bool:
    return module in (found.module, f"{found.module}.{found.name}")
