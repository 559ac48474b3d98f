"""The notebooks as files: execute them, check them, keep them in line with the syllabus.

    python -m course_lib.classroom.notebooks sync [--check]
    python -m course_lib.classroom.notebooks run [files]
    python -m course_lib.classroom.notebooks lint [files]

Source and product are the same `.ipynb`: executed, outputs stored, and those outputs are validated
by the tests. `run` executes in place and writes nothing but what a reader should see: no
timestamps, no machine's own names. A notebook with a failing cell is left as it was.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from . import journal, syllabus
from .cell_imports import explain
from .notebook_sync import METADATA, sync, write_notebook

CELL_TIMEOUT_S = 120
SLOW_NOTEBOOK_S = 90  # a chapter may never take longer than this on two CPU cores


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: something is wrong)."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.classroom.notebooks",
        description="Execute, check and synchronise the chapters.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "execute in place and store the outputs"),
        ("lint", "check structure, sizes, texts, outputs and exercises"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("files", nargs="*", type=Path, help="default: every chapter")
    command = commands.add_parser("sync", help="write what follows from syllabus.toml")
    command.add_argument("--check", action="store_true", help="only report; exit 1 if anything is")
    chosen = parser.parse_args(arguments)
    if chosen.command == "sync":
        return _sync(chosen.check)
    files = chosen.files or chapter_files()
    return _run(files) if chosen.command == "run" else _lint(files)


def chapter_files() -> list[Path]:
    """Return the chapters' notebooks in the order of the syllabus (those that exist)."""
    folder = syllabus.repository_root() / "chapters"
    files = [folder / chapter.filename for chapter in syllabus.load().chapters]
    return [file for file in files if file.exists()]


def execute(path: Path) -> float:
    """Execute a notebook in place; return the seconds it took.

    Arguments: path: the notebook; its own folder is the working directory.
    Raises: RuntimeError naming cell and error; the file is then as it was before.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    started = time.perf_counter()
    at = 0
    with _throwaway_progress():
        try:
            # Outputs of the last execution must not survive in a cell that now prints nothing.
            client.reset_execution_trackers()
            with client.setup_kernel():
                for at, cell in enumerate(notebook.cells):
                    _show_progress(path, at, len(notebook.cells))
                    client.execute_cell(cell, at)
        except CellTimeoutError as error:
            raise RuntimeError(
                f"{path.name}: {_name(notebook, at)} ran longer than {CELL_TIMEOUT_S} s"
            ) from error
        except (CellExecutionError, DeadKernelError) as error:
            raise RuntimeError(f"{path.name}: {_name(notebook, at)} failed\n{error}") from error
        finally:
            _show_progress(path, None, 0)
    seconds = time.perf_counter() - started
    normalise(notebook)
    write_notebook(path, notebook)
    return seconds


def normalise(notebook) -> None:
    """Keep of a notebook's metadata only what a reader or a tool needs, in place.

    Cells keep their ids (they are made once) and their tags; the kernel is "python3" everywhere.
    """
    notebook.metadata = dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"cell-{number}")
        tags = cell.metadata.get("tags", [])
        cell.metadata = {"tags": sorted(tags)} if tags else {}
        for output in cell.get("outputs", []):
            if output.output_type == "display_data":
                output.metadata = {k: v for k, v in output.metadata.items() if k in output.data}
        if cell.cell_type == "code":
            cell.outputs = _merge_streams(cell.outputs)


def _run(files: list[Path]) -> int:
    expected = {chapter.filename: chapter for chapter in syllabus.load().chapters}
    failed = 0
    for path in files:
        try:
            seconds = execute(path.resolve())
        except (RuntimeError, OSError, ValueError) as error:
            print(f"{path}: left as it was\n{error}", file=sys.stderr)
            failed += 1
            continue
        chapter = expected.get(path.name)
        planned = f" (syllabus.toml says {chapter.run_seconds} s)" if chapter else ""
        print(f"{path.name}: executed in {seconds:.0f} s{planned}")
        if seconds > SLOW_NOTEBOOK_S:
            print(f"{path.name}: slower than {SLOW_NOTEBOOK_S} s; make its sizes smaller")
    return 1 if failed else 0


def _lint(files: list[Path]) -> int:
    findings: dict[str, None] = {}  # a name that is gone may stop the check of many chapters
    for path in files:
        try:
            from .lint import lint_file

            findings |= dict.fromkeys(map(str, lint_file(path.resolve())))
        except ImportError as error:
            findings[f"{explain(error, chapter_files())} [library]"] = None
    for finding in findings:
        print(finding)
    print(f"{len(files)} notebooks, {len(findings)} findings")
    return 1 if findings else 0


def _sync(check: bool) -> int:
    changes = sync(syllabus.load(), syllabus.repository_root(), check=check)
    for line in changes.changed:
        print(f"{'differs' if check else 'changed'}: {line}")
    for line in changes.faults:
        print(f"repair by hand: {line}")
    if check and changes.changed:
        print("run: python -m course_lib.classroom.notebooks sync")
    return 1 if changes.faults or (check and changes.changed) else 0


@contextlib.contextmanager
def _throwaway_progress():
    """Send what the exercises record to a file that is thrown away: an author is no learner."""
    before = os.environ.get(journal.VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[journal.VARIABLE] = str(Path(folder) / "progress.json")
        try:
            yield
        finally:
            if before is None:
                del os.environ[journal.VARIABLE]
            else:
                os.environ[journal.VARIABLE] = before


def _merge_streams(outputs: list) -> list:
    """Join neighbouring prints: how the kernel cut them into messages is chance."""
    merged: list = []
    for output in outputs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.output_type == output.output_type == "stream"
            and (last.name == output.name)
        ):
            last.text += output.text
        else:
            merged.append(output)
    return merged


def _name(notebook, at: int) -> str:
    cell = notebook.cells[at]
    first = next((line for line in cell.source.splitlines() if line.strip()), "(empty)")
    return f"cell {at + 1} ({cell.get('id', '')}: {first.strip()[:60]})"


def _show_progress(path: Path, at: int | None, cells: int) -> None:
    if sys.stderr.isatty():
        text = "" if at is None else f"{path.name}: cell {at + 1} of {cells}"
        print(f"\r{text:<78}", end="" if text else "\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
