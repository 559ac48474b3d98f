"""The rules of a chapter, each small and with a name, and the loop that applies them.

A rule is a function that takes a `Page` (a notebook with what belongs to it) and yields
`(cell, message)` pairs, where cell is a number or None for the whole notebook. The rules live in
`lint_structure`, `lint_text`, `lint_code` and `lint_shown`. What may differ between chapters is a
number or a list in LIMITS, changed for one chapter under [chapters.lint] in syllabus.toml.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from . import syllabus
from .checks import Exercise, exercises_of
from .syllabus import Chapter, Syllabus

LIMITS: dict[str, object] = {
    "min_words": 1200,
    "max_words": 2500,
    "min_code_cells": 15,
    "max_code_cells": 35,
    "median_cell_lines": 10,
    "longest_cell_lines": 40,
    "min_outcomes": 3,
    "max_outcomes": 5,
    "min_exercises": 2,
    "max_exercises": 4,
    "max_sentence_words": 35,
    "min_glossary_links": 3,
    "without": [],  # parts of a chapter that this one does without
}

Problem = tuple[int | None, str]
RULES: dict[str, Callable[["Page"], Iterable[Problem]]] = {}


def rule(name: str) -> Callable:
    """Register a function as the rule of this name."""

    def register(function):
        RULES[name] = function
        return function

    return register


@dataclass(frozen=True)
class Finding:
    """One thing to repair, and where."""

    file: str
    rule: str
    cell: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.cell}[{self.rule}] {self.message}"


@dataclass(frozen=True)
class Page:
    """A notebook with everything that a rule may need to know about it."""

    notebook: nbformat.NotebookNode
    chapter: Chapter
    course: Syllabus
    root: Path
    exercises: tuple[Exercise, ...]

    def limit(self, name: str):
        """Return a limit, as this chapter sets it or as it is for all."""
        return self.chapter.lint.get(name, LIMITS[name])

    def code(self) -> Iterator[tuple[int, nbformat.NotebookNode]]:
        """Yield (number, cell) for the code cells that an author wrote."""
        for at, cell in enumerate(self.notebook.cells):
            if cell.cell_type == "code" and cell.get("id") != "setup":
                yield at, cell

    def text(self) -> Iterator[tuple[int, nbformat.NotebookNode]]:
        """Yield (number, cell) for the Markdown cells that an author wrote."""
        for at, cell in enumerate(self.notebook.cells):
            if cell.cell_type == "markdown" and cell.get("id") not in ("header", "next"):
                yield at, cell

    def headings(self) -> list[tuple[int, str]]:
        """Return (cell number, heading) of every heading of level two, in order."""
        return [
            (at, heading.strip())
            for at, cell in self.text()
            for heading in re.findall(r"^## +(.+)$", without_code(cell.source), re.MULTILINE)
        ]

    def section(self, heading: str) -> tuple[int, int]:
        """Return the cells (first, one past the last) under the heading that starts like this.

        (0, 0) if there is none.
        """
        headings = self.headings()
        for at, (first, text) in enumerate(headings):
            if text.startswith(heading):
                last = headings[at + 1][0] if at + 1 < len(headings) else len(self.notebook.cells)
                return first, max(last, first + 1)
        return 0, 0


def lint_file(
    path: Path, course: Syllabus | None = None, root: Path | None = None
) -> list[Finding]:
    """Apply every rule to a notebook; return what is to be repaired.

    Arguments: path: the notebook; course, root: the syllabus and repository (default: this one).
    """
    course, root = course or syllabus.load(), root or syllabus.repository_root()
    chapter = next((c for c in course.chapters if c.filename == path.name), None)
    if chapter is None:
        names = [c.filename for c in course.chapters]
        near = difflib.get_close_matches(path.name, names, n=1)
        message = "not a chapter of syllabus.toml" + (f"; did you mean {near[0]}?" if near else "")
        return [Finding(path.name, "syllabus", "", message)]
    return lint(nbformat.read(path, as_version=4), chapter, course, root)


def lint(notebook, chapter: Chapter, course: Syllabus, root: Path) -> list[Finding]:
    """Apply every rule to a notebook in memory; return what is to be repaired."""
    from . import (  # noqa: F401 - they register their rules
        lint_code,
        lint_shown,
        lint_structure,
        lint_text,
    )

    unknown = sorted(set(chapter.lint) - set(LIMITS))
    if unknown:
        raise ValueError(
            f"[chapters.lint] of {chapter.topic}: unknown {', '.join(unknown)}; "
            f"known: {', '.join(LIMITS)}"
        )
    page = Page(notebook, chapter, course, root, exercises_of(chapter.topic))
    return [
        Finding(chapter.filename, name, _cell_name(notebook, at), message)
        for name, function in RULES.items()
        for at, message in function(page)
    ]


def without_code(markdown: str) -> str:
    """Return Markdown without its fenced code."""
    return re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.DOTALL | re.MULTILINE)


def output_text(output) -> str:
    """Return the text of one stored output."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return output.get("data", {}).get("text/plain", "")


def _cell_name(notebook, at: int | None) -> str:
    if at is None:
        return ""
    cell = notebook.cells[at]
    first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "(empty)")
    return f"cell {at + 1} ({first[:40]}): "
