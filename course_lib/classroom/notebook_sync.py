"""Everything that is generated from the syllabus: names, headers, set-up cells, links, tables.

A notebook has three generated cells, known by their ids: `header`, `setup` and `next`. The README
and the glossary may hold generated blocks between `<!-- sync:NAME -->` and `<!-- /sync -->`.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from .checks import card, exercises_of
from .syllabus import Chapter, Syllabus

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"

_TIER_WORDS = {
    "CPU": "runs on a CPU, no GPU needed",
    "1 GPU": "better with one GPU",
    "N GPUs": "needs several GPUs",
}

_SETUP = """\
# Set-up: finds the course library; on Colab it fetches the course first.
# "No module named 'course_lib'" here? Start Jupyter inside the course's folder.
import subprocess
import sys
from pathlib import Path

here, clone = Path.cwd(), Path.cwd() / "one-gpu-to-many"
root = next((p for p in (here, *here.parents) if (p / "course_lib").is_dir()), clone)
if "google.colab" in sys.modules and not root.exists():
    source = ["--branch", "{branch}", "{repository}"]
    subprocess.run(["git", "clone", "--quiet", "--depth=1", *source, str(root)], check=True)
sys.path.insert(0, str(root))
from course_lib.classroom.colab import prepare

prepare()"""


@dataclass
class Changes:
    """What `sync` changed (or would change), and what only an author can repair."""

    changed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def sync(course: Syllabus, root: Path, *, check: bool = False) -> Changes:
    """Bring file names, generated cells, links and the README in line with the syllabus.

    Arguments:
        course: the syllabus; root: the repository.
        check: only report, write nothing.
    Returns: `Changes`; empty when everything already agrees.
    """
    folder, changes = root / "chapters", Changes()
    found = _find(course, folder, changes)
    _rename(course, folder, found, changes, check)
    for chapter in course.chapters:
        now, wanted = found.get(chapter.topic), folder / chapter.filename
        if now is None:
            changes.changed.append(f"chapters/{chapter.filename}: new, a skeleton to fill in")
            if not check:
                write_notebook(wanted, skeleton(course, chapter))
            continue
        path = now if check else wanted
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
        refresh(notebook, course, chapter)
        # Compared as data, so that an editor's other JSON style is no difference.
        if json.loads(notebook_text(notebook)) != json.loads(before):
            changes.changed.append(f"chapters/{chapter.filename}: header, set-up cell or links")
            if not check:
                write_notebook(path, notebook)
    for path in (root / "README.md", folder / "glossary.md"):
        _sync_text(path, course, changes, check)
    return changes


def header(course: Syllabus, chapter: Chapter) -> str:
    """Return the Markdown of a chapter's first cell."""
    before, after = course.neighbours(chapter)
    place = f"chapter {chapter.number} of {len(course.chapters)}"
    glossary = f"{course.repository}/blob/{course.branch}/chapters/glossary.md"
    return "\n\n".join(
        (
            f"# {chapter.title}",
            f"[![Open in Colab]({BADGE})]({colab_link(course, chapter)})",
            f"**{course.title}** · {place} · {_TIER_WORDS[chapter.tier]} · "
            f"{chapter.study_minutes} minutes of study · "
            f"“Run all” takes about {chapter.run_seconds} s",
            f"Previous: {_link(course, before)} · Next: {_link(course, after)} · "
            f"[Glossary](glossary.md) ([on the web]({glossary}))",
        )
    )


def setup_cell(course: Syllabus) -> str:
    """Return the code of the set-up cell: the same in every chapter."""
    return _SETUP.format(branch=course.branch, repository=course.repository)


def footer(course: Syllabus, chapter: Chapter) -> str:
    """Return the Markdown of a chapter's last cell."""
    _, after = course.neighbours(chapter)
    if after is None:
        return "**Next:** this is the last chapter so far."
    return f"**Next:** {_link(course, after)}: {after.outcome}."


def colab_link(course: Syllabus, chapter: Chapter) -> str:
    """Return the address that opens a chapter in Colab."""
    path = course.repository.removeprefix("https://github.com/")
    return (
        f"https://colab.research.google.com/github/{path}/blob/{course.branch}"
        f"/chapters/{chapter.filename}"
    )


def refresh(notebook, course: Syllabus, chapter: Chapter) -> None:
    """Write the three generated cells and the links of one notebook, in place."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, course)
    _put(notebook, "header", new_markdown_cell, header(course, chapter), lambda cells: 0)
    _put(notebook, "setup", new_code_cell, setup_cell(course), _place_of_setup)
    _put(notebook, "next", new_markdown_cell, footer(course, chapter), len)


def relink(text: str, course: Syllabus) -> str:
    """Return text in which links to chapters carry the chapters' present file names."""
    for chapter in course.chapters:
        name = re.escape(chapter.filename.partition("_")[2])
        text = re.sub(rf"(?<![\w-])\d+_{name}", chapter.filename, text)
    return text


def skeleton(course: Syllabus, chapter: Chapter):
    """Return a notebook that holds every part of a chapter, for its author to fill in."""
    cells = [
        new_markdown_cell("## After this chapter you can\n\n- …\n- …\n- …"),
        new_markdown_cell("## The question\n\n…"),
        new_markdown_cell("## First section\n\n…"),
        new_markdown_cell("## Predict\n\n…"),
        new_markdown_cell("## Break it\n\n…"),
        new_markdown_cell("## Exercises\n\n…"),
    ]
    for exercise in exercises_of(chapter.topic):
        cells.append(new_markdown_cell(card(exercise)))
        cells.append(new_code_cell("def answer():\n    raise NotImplementedError"))
        cells.append(new_code_cell(f'check("{exercise.name}", answer)'))
        cells.append(new_markdown_cell(f'Stuck? Run `hint("{exercise.name}")` in a new cell.'))
    parts = ("In real systems", "Summary", "References")
    cells += [new_markdown_cell(f"## {part}\n\n…") for part in parts]
    notebook = new_notebook(cells=cells, metadata=METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"part-{number}"  # not random: the same skeleton each time
    refresh(notebook, course, chapter)
    return notebook


METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook_text(notebook) -> str:
    """Return a notebook as the text of its file."""
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def write_notebook(path: Path, notebook) -> None:
    """Write a notebook so that its file is the old one or the new one, never a part."""
    _write(path, notebook_text(notebook))


def blocks(course: Syllabus) -> dict[str, str]:
    """Return the generated blocks of the README by name."""
    rows = [
        "| | chapter | what you can do afterwards | hardware | study |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {c.number} | [{c.title}](chapters/{c.filename}) "
        f"[![Open in Colab]({BADGE})]({colab_link(course, c)}) "
        f"| {c.outcome} | {c.tier} | {c.study_minutes} min |"
        for c in course.chapters
    ]
    folder = course.repository.rpartition("/")[2]
    commands = (
        "```bash\n"
        f"git clone --branch {course.branch} {course.repository}\n"
        f"cd {folder}\n"
        "make lab    # trains a small model on 1 and on 2 processes, writes a report\n"
        "make test   # proves that everything works on your machine\n```"
    )
    return {"chapters": "\n".join(rows), "commands": commands}


def _link(course: Syllabus, chapter: Chapter | None) -> str:
    if chapter is None:
        return "–"
    # Colab does not follow links between notebooks, so both are given.
    return f"[{chapter.title}]({chapter.filename}) ([in Colab]({colab_link(course, chapter)}))"


def _find(course: Syllabus, folder: Path, changes: Changes) -> dict[str, Path]:
    """Return the notebook of each topic by the part of its name behind the number."""
    topics = {c.filename.partition("_")[2]: c.topic for c in course.chapters}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.ipynb")):
        topic = topics.get(path.name.partition("_")[2])
        if topic is None or not path.name.partition("_")[0].isdigit():
            changes.faults.append(
                f"chapters/{path.name}: not in syllabus.toml; add an entry there or remove the file"
            )
        elif topic in found:
            changes.faults.append(
                f"chapters/{path.name}: a second notebook on {topic!r}, beside "
                f"{found[topic].name}; keep one"
            )
        else:
            found[topic] = path
    return found


def _rename(course: Syllabus, folder: Path, found: dict[str, Path], changes: Changes, check: bool):
    moves = [
        (found[c.topic], folder / c.filename)
        for c in course.chapters
        if c.topic in found and found[c.topic].name != c.filename
    ]
    changes.changed += [f"chapters/{old.name}: renamed to {new.name}" for old, new in moves]
    if check:
        return
    # In two steps: two chapters may swap their numbers.
    for old, _ in moves:
        old.rename(old.with_suffix(".moving"))
    for old, new in moves:
        old.with_suffix(".moving").rename(new)


def _put(notebook, name: str, make: Callable, source: str, place: Callable[[list], int]) -> None:
    """Set the source of the cell with this id, in its own place; make the cell if there is none."""
    cells = notebook.cells
    cell = next((cell for cell in cells if cell.get("id") == name), None)
    if cell is None:
        cell = make(source, id=name)
    else:
        cells.remove(cell)
        cell.source = source
    cells.insert(place(cells), cell)


def _place_of_setup(cells: list) -> int:
    """Behind the cell that says what the reader can do afterwards, if there is one."""
    for at, cell in enumerate(cells):
        if "## After this chapter you can" in cell.source:
            return at + 1
    return 1


def _sync_text(path: Path, course: Syllabus, changes: Changes, check: bool) -> None:
    if not path.exists():
        return
    before = path.read_text(encoding="utf-8")
    after = relink(before, course)
    for name, content in blocks(course).items():
        pattern = re.compile(rf"(<!-- sync:{name} -->\n).*?(<!-- /sync -->)", re.DOTALL)
        after = pattern.sub(lambda m, c=content: f"{m[1]}{c}\n{m[2]}", after)
    if after != before:
        changes.changed.append(f"{path.name}: links or generated blocks")
        if not check:
            _write(path, after)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        os.chmod(temporary, mode)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
