"""Rules on a chapter's code and on its stored outputs."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from .lint import Page, Problem, output_text, rule

TAGS = {"nbval-ignore-output", "raises-exception"}
PASTED_LINES = 6

_PATHS = re.compile(r"(?<![\w.:/])(/home/|/root/|/tmp/|/Users/|/content/|/usr/lib|/var/|[A-Z]:\\)")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_WARNING = re.compile(r"\b\w*Warning\b:|^\[?W\d{4}|^WARNING", re.MULTILINE)
_LONG_NUMBER = re.compile(r"\d\.\d{6,}")
_CLOCK = re.compile(r"perf_counter|time\.time\(|%%?timeit|monotonic\(")


@rule("syntax")
def code_can_be_read(page: Page) -> Iterator[Problem]:
    """Cells hold plain Python: no magics, no shell lines."""
    for at, cell in page.code():
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield at, f"not plain Python ({error.msg}, line {error.lineno})"


@rule("tags")
def only_known_tags(page: Page) -> Iterator[Problem]:
    """A tag that hides a cell from the tests would let its output go stale."""
    for at, cell in enumerate(page.notebook.cells):
        for tag in cell.metadata.get("tags", []):
            if tag not in TAGS:
                yield at, f"the tag {tag!r} is not allowed; known: {', '.join(sorted(TAGS))}"
        if cell.cell_type == "code" and re.search(r"#\s*NBVAL_", cell.source):
            yield at, "an NBVAL comment; use a tag"


@rule("pasted")
def no_copy_of_the_library(page: Page) -> Iterator[Problem]:
    """The library's code is shown from the library: `show(thing)`."""
    library = _library_runs(page.root / "course_lib")
    for at, cell in enumerate(page.notebook.cells):
        if cell.get("id") == "setup":
            continue
        for run in _runs(cell.source):
            if run in library:
                yield (
                    at,
                    (
                        f"{PASTED_LINES} lines are a copy of {library[run]} (“{run[0]}” …); "
                        "use show(…)"
                    ),
                )
                break


@rule("figures")
def figures_have_texts(page: Page) -> Iterator[Problem]:
    """Each picture has an alt text and, below it, a printed line with its finding."""
    for at, cell in page.code():
        outputs = cell.get("outputs", [])
        for number, output in enumerate(outputs):
            if "image/png" not in output.get("data", {}):
                continue
            said = "".join(output_text(later) for later in outputs[number + 1 :])
            if not output.get("metadata", {}).get("image/png", {}).get("alt"):
                yield at, "a picture without alt text; show it with figures.show(fig, alt, finding)"
            elif not said.startswith("Figure: "):
                yield at, "a picture without its printed finding; use figures.show"
        if re.search(r"\bplt\.show\(|\bfrom matplotlib|\bimport matplotlib", cell.source):
            yield at, "figures are made with figures.subplots and shown with figures.show"


@rule("stored")
def outputs_are_stored_in_order(page: Page) -> Iterator[Problem]:
    """The notebook was executed from top to bottom in one go."""
    counts = [
        (at, cell.get("execution_count"))
        for at, cell in enumerate(page.notebook.cells)
        if cell.cell_type == "code"
    ]
    for position, (at, count) in enumerate(counts, 1):
        if count != position:
            what = "was not executed" if count is None else f"was executed as number {count}"
            yield at, f"code cell {position} {what}; run `notebooks run`"
            return


@rule("errors")
def no_unexpected_errors(page: Page) -> Iterator[Problem]:
    """A stored error is there on purpose and tagged so."""
    for at, cell in page.code():
        failed = any(output.output_type == "error" for output in cell.get("outputs", []))
        tagged = "raises-exception" in cell.metadata.get("tags", [])
        if failed and not tagged:
            yield at, "a stored error; repair the cell, or use expect_failure"
        if tagged and not failed:
            yield at, "tagged raises-exception, but nothing was raised"


@rule("noise")
def outputs_are_clean(page: Page) -> Iterator[Problem]:
    """Outputs read the same on every machine and hold nothing that a reader must ignore."""
    for at, cell in page.code():
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        for output in cell.get("outputs", []):
            text = output_text(output)
            if output.get("name") == "stderr":
                yield at, f"something was written to stderr: {text.strip()[:60]!r}"
            if "\x1b" in text:
                yield at, "colour codes in the output; print plain text"
            for pattern, what in (
                (_PATHS, "a path of one machine"),
                (_ADDRESS, "an address"),
                (_WARNING, "a warning"),
            ):
                found = pattern.search(text)
                if found:
                    yield at, f"{what} in the output: {text[found.start() :][:50]!r}"
            if not ignored and _LONG_NUMBER.search(text):
                yield at, f"{_LONG_NUMBER.search(text)[0]}…: print at most 4 digits"


@rule("validated")
def only_unstable_outputs_are_ignored(page: Page) -> Iterator[Problem]:
    """Timings and progress differ each time and are tagged; nothing else is."""
    for at, cell in page.code():
        tagged = "nbval-ignore-output" in cell.metadata.get("tags", [])
        printed = any(output_text(output).strip() for output in cell.get("outputs", []))
        unstable = _CLOCK.search(cell.source) or re.search(r"^progress\(", cell.source, re.M)
        if unstable and printed and not tagged:
            yield at, "its output differs each time; tag the cell nbval-ignore-output"


@rule("empty-cache")
def empty_cache_needs_a_reason(page: Page) -> Iterator[Problem]:
    """Emptying the allocator's cache in a loop slows training (mlx-lm #986, NeMo RL #1074)."""
    for at, cell in page.code():
        for line in _calls_in_loops(cell.source, "empty_cache"):
            if not any("reason:" in comment for comment in _comments(cell.source, line)):
                yield (
                    at,
                    (
                        f"line {line}: empty_cache in a loop; take it out, or state why with "
                        "`# reason: …` on that line or the one above"
                    ),
                )


def _calls_in_loops(source: str, name: str) -> list[int]:
    """Return the lines on which a function of this name is called inside a loop."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    return sorted(
        {
            node.lineno
            for loop in loops
            for node in ast.walk(loop)
            if isinstance(node, ast.Call)
            and (getattr(node.func, "attr", None) == name or getattr(node.func, "id", None) == name)
        }
    )


def _comments(source: str, line: int) -> list[str]:
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.start[0] in (line - 1, line)
    ]


def _runs(source: str) -> list[tuple[str, ...]]:
    """Return every run of normalised lines that is long enough to count as a copy."""
    lines = [line.strip() for line in source.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("#", "import ", "from "))]
    return [tuple(lines[at : at + PASTED_LINES]) for at in range(len(lines) - PASTED_LINES + 1)]


@lru_cache(maxsize=4)
def _library_runs(folder: Path) -> dict[tuple[str, ...], str]:
    return {
        run: path.relative_to(folder.parent).as_posix()
        for path in sorted(folder.rglob("*.py"))
        if path.name != "notebook_sync.py"
        for run in _runs(path.read_text(encoding="utf-8"))
    }
