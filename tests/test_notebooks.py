"""The notebooks' machinery: each lint rule on a page that breaks it; sync; run; the chapters."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib.classroom import lint_code, syllabus
from course_lib.classroom.checks import card, find
from course_lib.classroom.lint import LIMITS, RULES, lint, lint_file
from course_lib.classroom.lint_text import anchors, sentences
from course_lib.classroom.notebook_sync import refresh, setup_cell, sync
from course_lib.classroom.notebooks import chapter_files, execute, main, normalise

ROOT = syllabus.repository_root()

SYLLABUS = """
[course]
title = "A course"
repository = "https://github.com/OWNER/a-course"
branch = "main"
[[chapters]]
topic = "start-here"
title = "Start here"
module = "classroom"
tier = "CPU"
study_minutes = 15
run_seconds = 10
outcome = "start"
lint = {min_words = 5, min_code_cells = 3, min_exercises = 1, min_glossary_links = 1}
[[chapters]]
topic = "transformer"
title = "The Transformer"
module = "model"
tier = "1 GPU"
study_minutes = 70
run_seconds = 30
outcome = "build one"
"""


@pytest.fixture
def root(tmp_path):
    """A repository with a syllabus, a small library, a glossary and exercise cases."""
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "glossary.md").write_text("# Glossary\n\n### world size\n")
    (tmp_path / "course_lib").mkdir()
    body = "\n".join(f"    x{n} = {n} + len(items)" for n in range(8))
    (tmp_path / "course_lib" / "thing.py").write_text(f"def thing(items):\n{body}\n")
    (tmp_path / "tests" / "exercise_cases").mkdir(parents=True)
    (tmp_path / "tests" / "exercise_cases" / "a.py").write_text('CASES = {"start-here/1": 0}\n')
    (tmp_path / "syllabus.toml").write_text(SYLLABUS)
    return tmp_path


@pytest.fixture
def course(root):
    return syllabus.load(root / "syllabus.toml")


PICTURE = {"image/png": "iVBORw0KGgo=", "text/plain": "A bar chart."}


def _code(source, *outputs, name="", tags=()):
    cell = new_code_cell(source, outputs=list(outputs))
    cell.metadata = {"tags": list(tags)} if tags else {}
    if name:
        cell.id = name
    return cell


def _printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def good_page(course):
    """A chapter in which every rule holds, as short as the rules of its syllabus entry allow."""
    picture = new_output("display_data", PICTURE, metadata={"image/png": {"alt": "A bar chart."}})
    cells = [
        new_markdown_cell("## After this chapter you can\n\n- one\n- two\n- three"),
        new_markdown_cell("## The question\n\nWhat is a [world size](glossary.md#world-size)?"),
        _code("figures.show(fig, alt, finding)", picture, _printed("Figure: 4 ranks.\n")),
        new_markdown_cell("## A section\n\nText."),
        new_markdown_cell("## Predict\n\nText."),
        _code('guess = predict("start-here/x", ...)', _printed("No prediction yet.\n")),
        _code("guess.compare(3)\nassert x == 3", name="measure"),
        new_markdown_cell("## Break it\n\nText."),
        new_markdown_cell(f"## Exercises\n\n{card(find('start-here/1'))}"),
        _code("def squares():\n    raise NotImplementedError", name="stub"),
        _code('check("start-here/1", squares)', _printed("start-here/1 · not attempted: …\n")),
        new_markdown_cell('Stuck? Run `hint("start-here/1")`.', id="help"),
        new_markdown_cell("## In real systems\n\nText.", id="systems"),
        new_markdown_cell("## Summary\n\nText."),
        new_markdown_cell("## References\n\n*Attention Is All You Need*, arXiv:1706.03762"),
    ]
    page = new_notebook(cells=cells)
    refresh(page, course, course.chapters[0])
    number = 0
    for cell in page.cells:
        if cell.cell_type == "code":
            number += 1
            cell.execution_count = number
    return page


def _cell(page, name):
    return next(cell for cell in page.cells if cell.get("id") == name)


def found(page, course, root):
    return lint(page, course.chapters[0], course, root)


def test_good_page_has_no_findings(course, root):
    assert [str(f) for f in found(good_page(course), course, root)] == []


# Each rule: how a page breaks it, and words of the message.


def _holding(page, text):
    return next(cell for cell in page.cells if text in cell.source)


def _replace(text, new):
    def change(page, root):
        cell = _holding(page, text)
        cell.source = cell.source.replace(text, new)

    return change


def _add_output(output, tags=None):
    def change(page, root):
        cell = _cell(page, "measure")
        cell.outputs.append(output)
        cell.metadata = {"tags": tags} if tags else {}

    return change


def _source(text, cell="measure"):
    def change(page, root):
        _cell(page, cell).source += "\n" + text

    return change


def _add_shown(call, text):
    """A cell that shows `agree` of the library, with the output that is stored of it."""

    def change(page, root):
        _source(f"from course_lib.data_parallel import agree\n{call}")(page, root)
        data = {"text/markdown": f"```python\n{text}\n```", "text/plain": text}
        _cell(page, "measure").outputs.append(new_output("display_data", data))

    return change


def _move_systems_first(page, root):
    cell = _cell(page, "systems")
    page.cells.remove(cell)
    page.cells.insert(3, cell)


def _drop(text):
    def change(page, root):
        page.cells.remove(_holding(page, text))

    return change


def _paste(page, root):
    lines = (root / "course_lib" / "thing.py").read_text().splitlines()[1:]
    # Other indentation and comments between the lines do not hide a copy.
    _cell(page, "measure").source += "\n" + "\n# mine\n".join(line.strip() for line in lines)


def _forget_cases(page, root):
    (root / "tests" / "exercise_cases" / "a.py").write_text("CASES = {}\n")


def _picture_without_alt(page, root):
    _holding(page, "figures.show").outputs[0].metadata = {}


def _picture_without_finding(page, root):
    del _holding(page, "figures.show").outputs[1]


def _second_picture(page, root):
    cell = _holding(page, "figures.show")
    cell.outputs += copy.deepcopy(cell.outputs)


LOOP = "for step in range(3):\n    torch.cuda.empty_cache()"
LONG = " ".join(["word"] * 36) + "."

BROKEN = [
    ("generated", _source("import os", "setup"), "'setup' differs"),
    ("generated", _replace("15 minutes", "16 minutes"), "'header' differs"),
    ("generated", _drop("**Next:**"), "'next' is missing"),
    ("order", _drop("## Summary"), "no heading `## Summary`"),
    ("order", _move_systems_first, "stands before"),
    ("order", _replace("## A section", "# A section"), "a second title"),
    ("order", _replace("## A section", "## Predict"), "a second heading"),
    ("outcomes", _replace("- one\n", ""), "2 bullets; give 3 to 5"),
    ("outcomes", _replace("- one\n", "- a\n- b\n- c\n- d\n"), "6 bullets"),
    ("question-figure", _drop("figures.show"), "0 figures"),
    ("question-figure", _second_picture, "2 figures"),
    ("size", _source("word " * 2600, "help"), "words; 5 to 2500"),
    ("size", _source("x = 1\n" * 45), "split the cell"),
    ("predict", _replace("guess.compare(3)", "print(3)"), "no prediction is compared"),
    ("predict", _replace("assert x == 3", "x"), "no claim is asserted"),
    ("predict", _replace("start-here/x", "here/x"), "is not named start-here/"),
    ("exercises", _replace("●○○", "●●○"), "card is missing or differs"),
    ("exercises", _replace("raise NotImplementedError", "return 3"), "no stub"),
    ("exercises", _replace('check("start-here/1"', 'check("start-here/7"'), "no such exercise"),
    ("exercises", _replace("hint(", "help("), "tell the reader about hint"),
    ("exercises", _source('hint("start-here/1")'), "give the answer away"),
    ("exercises", _forget_cases, "no wrong answers in tests"),
    (
        "exercises",
        lambda page, root: _holding(page, "check(").outputs.__setitem__(0, _printed("passed\n")),
        "not that of the stub",
    ),
    ("sentences", _source(LONG, "help"), "a sentence of 36 words"),
    ("html", _source("<div>soup</div>", "help"), "raw HTML <div>"),
    ("links", _replace("#world-size", "#world-sise"), "no heading with the anchor #world-sise"),
    ("links", _replace("glossary.md#world-size", "glosary.md"), "chapters/glosary.md does not"),
    ("links", _replace("(glossary.md#world-size)", ""), "0 links to glossary.md"),
    ("references", _replace("arXiv:1706.03762", "2017"), "arXiv ids"),
    ("allocator-advice", _source("Set `max_split_size_mb`.", "help"), "before expandable"),
    ("syntax", _source("%matplotlib inline"), "not plain Python"),
    ("tags", _add_output(_printed("1\n"), ["nbval-skip"]), "'nbval-skip' is not allowed"),
    ("tags", _source("# NBVAL_SKIP"), "use a tag"),
    ("pasted", _paste, "a copy of course_lib/thing.py"),
    ("figures", _picture_without_alt, "without alt text"),
    ("figures", _picture_without_finding, "without its printed finding"),
    ("figures", _source("import matplotlib.pyplot as plt"), "figures.subplots"),
    ("stored", lambda page, root: _cell(page, "stub").update(execution_count=9), "as number 9"),
    ("stored", lambda page, root: _cell(page, "stub").update(execution_count=None), "was not exec"),
    ("errors", _add_output(new_output("error", ename="E", evalue="x")), "a stored error"),
    ("errors", _add_output(_printed("1\n"), ["raises-exception"]), "nothing was raised"),
    ("noise", _add_output(_printed("100 %\n", "stderr")), "written to stderr"),
    ("noise", _add_output(_printed("\x1b[31mred\n")), "colour codes"),
    ("noise", _add_output(_printed("saved /home/somebody/run\n")), "a path of one machine"),
    ("noise", _add_output(_printed("<object at 0x7f12ab34cd56>\n")), "an address"),
    ("noise", _add_output(_printed("x.py:3: UserWarning: careful\n")), "a warning"),
    ("noise", _add_output(_printed("loss 3.14159265\n")), "at most 4 digits"),
    (
        "validated",
        lambda page, root: (
            _source("import time\nprint(time.perf_counter())")(page, root),
            _add_output(_printed("12.5\n"))(page, root),
        ),
        "tag the cell nbval-ignore-output",
    ),
    ("empty-cache", _source(LOOP), "empty_cache in a loop"),
    ("shown", _add_shown("show(agree)", "# course_lib/old.py\ndef agree(): ..."), "code of today"),
    (
        "shown",
        _source("from course_lib.data_parallel import agreed"),
        "data_parallel has no agreed",
    ),
    ("shown", _add_shown("show(agree.gone)", "# x"), "has no attribute 'gone'"),
]


@pytest.mark.parametrize(
    "name, breaks, says", [pytest.param(*case, id=f"{case[0]}: {case[2]}") for case in BROKEN]
)
def test_rule_reports_a_page_that_breaks_it(name, breaks, says, course, root):
    lint_code._library_runs.cache_clear()
    page = good_page(course)
    breaks(page, root)
    findings = found(page, course, root)
    assert any(f.rule == name and says in f.message for f in findings), [str(f) for f in findings]


def test_every_rule_has_a_page_that_breaks_it():
    assert {name for name, _, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize(
    "source",
    [
        "from course_lib.data_parallel import agree\nshow(agree)",
        "from course_lib.data_parallel import agree as told\nshow(told)",
        "from course_lib import data_parallel\nshow(data_parallel.agree, docstring=True)",
        "import course_lib.data_parallel as ways\nshow(ways.agree)",
    ],
)
def test_shown_code_is_compared_however_it_is_imported(source, course, root, capsys):
    from course_lib.classroom.teaching import show
    from course_lib.data_parallel import agree

    show(agree)
    now = capsys.readouterr().out.rstrip("\n")
    for text, known in ((now, []), (now.replace("op=", "how="), ["shown"])):
        page = good_page(course)
        cell = _cell(page, "measure")
        cell.source += "\n" + source
        data = {"text/markdown": f"```python\n{text}\n```", "text/plain": text}
        cell.outputs.append(new_output("display_data", data))
        findings = found(page, course, root)
        assert [finding.rule for finding in findings] == known
    assert "notebooks run chapters/01_start_here.ipynb" in findings[0].message


def test_code_that_the_notebook_itself_defines_is_not_compared(course, root):
    page = good_page(course)
    source = "from course_lib.data_parallel import agree\ndef agree(): ...\nshow(agree)\nshow(x[0])"
    _cell(page, "measure").source += "\n" + source
    text = "# your notebook\ndef agree(): ..."
    data = {"text/markdown": f"```python\n{text}\n```", "text/plain": text}
    _cell(page, "measure").outputs.append(new_output("display_data", data))
    assert found(page, course, root) == []


def test_a_name_that_the_library_lost_is_one_clear_line(tmp_path, monkeypatch, capsys):
    """Instead of a traceback: the file, the name, and the chapters that import it too."""

    def exercises_of(topic):
        from course_lib.data_parallel import agreed  # noqa: F401

    monkeypatch.setattr("course_lib.classroom.lint.exercises_of", exercises_of)
    chapters = [tmp_path / "01_start_here.ipynb", tmp_path / "02_transformer.ipynb"]
    for path, name in zip(chapters, ("agree", "agreed")):
        cell = new_code_cell(f"from course_lib.data_parallel import DataParallel, {name}\n")
        nbformat.write(new_notebook(cells=[new_markdown_cell("x"), cell]), path)
    monkeypatch.setattr("course_lib.classroom.notebooks.chapter_files", lambda: chapters)
    assert main(["lint"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "tests/test_notebooks.py: cannot import name 'agreed' from 'course_lib.data_parallel'; "
        "imported too by 02_transformer.ipynb (cell 2) [library]",
        "2 notebooks, 1 findings",
    ]


@pytest.mark.trap("PR-05")
def test_empty_cache_with_a_stated_reason_is_allowed(course, root):
    for allowed in (
        LOOP.replace("()", "()  # reason: shown to be slow"),
        "# reason: the point of this cell\n" + LOOP.splitlines()[1].strip(),
        "torch.cuda.empty_cache()",
    ):
        page = good_page(course)
        _source(allowed)(page, root)
        assert not found(page, course, root)


@pytest.mark.trap("PR-05")
def test_expandable_segments_may_be_followed_by_the_split_size(course, root):
    page = good_page(course)
    _source("Use `expandable_segments`; `max_split_size_mb` is older.", "help")(page, root)
    assert not found(page, course, root)


def test_a_chapter_may_do_without_a_part(course, root):
    page = good_page(course)
    page.cells.remove(_cell(page, "systems"))
    course.chapters[0].lint["without"] = ["In real systems"]
    assert not found(page, course, root)


def test_unknown_lint_setting_is_refused(course, root):
    course.chapters[0].lint["min_word"] = 3
    with pytest.raises(ValueError, match="unknown min_word"):
        found(good_page(course), course, root)


def test_message_names_cell_and_rule(course, root):
    page = good_page(course)
    _replace("●○○", "●●○")(page, root)
    _source(LOOP)(page, root)
    said = [str(f) for f in found(page, course, root)]
    assert any(s.startswith("01_start_here.ipynb: cell 9 (guess.compare(3)): [empty") for s in said)


def test_strange_notebook_is_named_with_the_nearest(course, root):
    (finding,) = lint_file(root / "chapters" / "01_start_her.ipynb", course, root)
    assert "did you mean 01_start_here.ipynb" in finding.message


def test_sentences_are_told_apart():
    text = "One two. Three (four)!\n\n- five\n- six\n\n## Heading\n| a | table |\n```\ncode\n```\n"
    assert [s.split() for s in sentences(text) if s.split()] == [
        ["One", "two."],
        ["Three", "(four)!"],
        ["five"],
        ["six"],
    ]


def test_anchors_are_those_of_github():
    assert anchors("# MFU and HFU\n### all-reduce\n## α–β (time)\n") == {
        "mfu-and-hfu",
        "all-reduce",
        "αβ-time",
    }


# sync


def _names(root):
    return sorted(path.name for path in (root / "chapters").glob("*.ipynb"))


def _snapshot(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_sync_makes_skeletons_and_is_idempotent(course, root):
    first = sync(course, root)
    assert len(first.changed) == 2
    assert _names(root) == ["01_start_here.ipynb", "02_transformer.ipynb"]
    before = _snapshot(root)
    assert not sync(course, root).changed
    assert _snapshot(root) == before
    skeleton = nbformat.read(root / "chapters" / "01_start_here.ipynb", as_version=4)
    nbformat.validate(skeleton)
    assert any(card(find("start-here/1")) in cell.source for cell in skeleton.cells)


def test_inserting_a_chapter_renames_and_relinks(course, root):
    sync(course, root)
    first = root / "chapters" / "01_start_here.ipynb"
    page = nbformat.read(first, as_version=4)
    page.cells[3].source += "\n\nSee [the model](02_transformer.ipynb)."
    nbformat.write(page, first)
    # Swap the two and put a new one between them: file names meet on the way.
    head, one, two = SYLLABUS.partition("[[chapters]]")[0], *SYLLABUS.split("[[chapters]]")[1:]
    new = two.replace('"transformer"', '"batches"').replace("The Transformer", "Batches")
    (root / "syllabus.toml").write_text("[[chapters]]".join([head, two, new, one]))
    course = syllabus.load(root / "syllabus.toml")
    checked = sync(course, root, check=True)
    assert "chapters/01_start_here.ipynb: renamed to 03_start_here.ipynb" in checked.changed
    sync(course, root)
    assert _names(root) == ["01_transformer.ipynb", "02_batches.ipynb", "03_start_here.ipynb"]
    text = (root / "chapters" / "03_start_here.ipynb").read_text()
    assert "[the model](01_transformer.ipynb)" in text
    assert "Previous: [Batches](02_batches.ipynb)" in text
    assert not sync(course, root).changed


def test_fork_changes_one_line(course, root):
    (root / "README.md").write_text(
        "<!-- sync:commands -->\nold\n<!-- /sync -->\nmine\n"
        "<!-- sync:chapters -->\nold\n<!-- /sync -->\n"
    )
    sync(course, root)
    (root / "syllabus.toml").write_text(SYLLABUS.replace("OWNER/a-course", "me/fork"))
    sync(syllabus.load(root / "syllabus.toml"), root)
    for path in [root / "README.md", *(root / "chapters").glob("*.ipynb")]:
        text = path.read_text()
        assert "me/fork" in text
        assert "OWNER" not in text
    assert "\nmine\n" in (root / "README.md").read_text()


def test_check_reports_and_writes_nothing(course, root):
    sync(course, root)
    path = root / "chapters" / "02_transformer.ipynb"
    path.write_text(path.read_text().replace("70 minutes", "71 minutes"))
    before = _snapshot(root)
    assert sync(course, root, check=True).changed == [
        "chapters/02_transformer.ipynb: header, set-up cell or links"
    ]
    assert _snapshot(root) == before


def test_sync_keeps_what_an_author_wrote(course, root):
    sync(course, root)
    path = root / "chapters" / "02_transformer.ipynb"
    page = nbformat.read(path, as_version=4)
    page.cells.insert(5, _code("print(1)", _printed("1\n"), name="mine"))
    page.cells.append(new_markdown_cell("written below the last cell", id="late"))
    nbformat.write(page, path)
    sync(course, root)
    page = nbformat.read(path, as_version=4)
    assert _cell(page, "mine").outputs[0].text == "1\n"
    assert [page.cells[0].id, page.cells[-2].id, page.cells[-1].id] == ["header", "late", "next"]


def test_stray_and_double_notebooks_are_reported(course, root):
    sync(course, root)
    folder = root / "chapters"
    for name in ("07_lost.ipynb", "notes.ipynb", "09_transformer.ipynb"):
        (folder / name).write_text((folder / "02_transformer.ipynb").read_text())
    faults = " ".join(sync(course, root, check=True).faults)
    assert "07_lost.ipynb: not in syllabus.toml" in faults
    assert "notes.ipynb: not in syllabus.toml" in faults
    assert "09_transformer.ipynb: a second notebook" in faults


def test_syllabus_names_all_its_faults(root):
    bad = SYLLABUS.replace('tier = "CPU"', 'tier = "TPU"').replace('module = "model"\n', "")
    (root / "syllabus.toml").write_text(bad.replace('branch = "main"\n', ""))
    with pytest.raises(ValueError, match="branch is missing") as error:
        syllabus.load(root / "syllabus.toml")
    assert "tier 'TPU'; use one of CPU, 1 GPU, N GPUs" in str(error.value)
    assert "chapter transformer: module is missing" in str(error.value)


# The set-up cell and run


def test_setup_cell_finds_the_library_from_any_folder_of_the_course(course, tmp_path):
    code = setup_cell(course) + "\nimport course_lib\nprint(course_lib.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "chapters", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()).parent == ROOT / "course_lib"


def test_setup_cell_on_colab_clones_once_and_installs_nothing_that_is_there(
    course, tmp_path_factory
):
    tmp_path = tmp_path_factory.mktemp("colab")  # no course_lib/ above it
    origin, session = tmp_path / "origin", tmp_path / "content"
    session.mkdir()
    (origin / "course_lib" / "classroom").mkdir(parents=True)
    for name in ("__init__.py", "classroom/__init__.py", "classroom/colab.py"):
        (origin / "course_lib" / name).write_text((ROOT / "course_lib" / name).read_text())
    for name in ("syllabus.py", "syllabus.toml"):
        text = (ROOT / "course_lib" / "classroom" / name).read_text()
        (origin / "course_lib" / "classroom" / name).write_text(text)
    (origin / "requirements.txt").write_text("torch>=2.11\nnumpy\nnbval\npip\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", *identity, *arguments], cwd=origin, check=True)
    cell = setup_cell(course).replace(course.repository, f"file://{origin}")
    code = "import sys\nsys.modules['google.colab'] = sys\n" + "\n".join([cell] * 2)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=session, capture_output=True, text=True, env=clean
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert (session / "one-gpu-to-many" / "course_lib").is_dir()


def _small(root, *sources):
    path = root / "small.ipynb"
    cells = [new_code_cell(source, id=f"c{n}") for n, source in enumerate(sources)]
    cells[0].metadata = {"tags": [], "execution": {"iopub.status.busy": "2026-01-01"}}
    nbformat.write(
        new_notebook(
            cells=cells, metadata={"kernelspec": {"name": "mine", "display_name": "Mine"}}
        ),
        path,
    )
    return path


def test_run_stores_outputs_and_nothing_of_the_machine(tmp_path):
    source = (
        "import sys\nfrom course_lib.classroom import check, figures, journal\n"
        "print('one')\nsys.stdout.flush()\nprint('two')\n"
    )
    drawing = (
        "fig, ax = figures.subplots()\n_ = ax.plot([1, 2], **figures.line_style('compute'))\n"
        "_ = ax.set(title='T', xlabel='x (s)', ylabel='y (MB)')\n"
        "figures.show(fig, 'A rising line.', 'It rises to 2 MB.')"
    )
    path = _small(tmp_path, f"import sys; sys.path.insert(0, {str(ROOT)!r})", source, drawing)
    execute(path)
    page = nbformat.read(path, as_version=4)
    assert page.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell.execution_count for cell in page.cells] == [1, 2, 3]
    assert [cell.metadata for cell in page.cells] == [{}, {}, {}]
    assert [output.text for output in page.cells[1].outputs] == ["one\ntwo\n"]
    picture, finding = page.cells[2].outputs
    assert picture.metadata["image/png"]["alt"] == "A rising line."
    assert picture.data["text/plain"] == "A rising line."
    assert finding.text == "Figure: It rises to 2 MB.\n"
    before = json.loads(path.read_text())
    normalise(page)
    assert json.loads(nbformat.writes(page)) == before, "normalising twice changes nothing"


@pytest.mark.trap("ENV-09")
@pytest.mark.parametrize(
    "fault, says",
    [("1 / 0", "ZeroDivisionError"), ("import os\nos._exit(3)", "died")],
    ids=["error", "dead kernel"],
)
def test_failing_cell_is_named_and_the_file_left_alone(tmp_path, fault, says, capsys):
    path = _small(tmp_path, "print('new')", fault)
    before = path.read_bytes()
    assert main(["run", str(path)]) == 1
    said = capsys.readouterr().err
    assert "small.ipynb: cell 2 (c1:" in said
    assert says.lower() in said.lower()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["small.ipynb"]


# The chapters themselves


def test_repository_is_in_sync():
    changes = sync(syllabus.load(), ROOT, check=True)
    assert not changes.changed, "run `make notebooks`"
    assert not changes.faults


@pytest.mark.parametrize("path", chapter_files(), ids=lambda path: path.stem)
def test_chapter_follows_the_rules(path):
    assert [str(finding) for finding in lint_file(path)] == []


def test_limits_are_those_of_the_design():
    assert (LIMITS["min_words"], LIMITS["max_words"]) == (1200, 2500)
    assert (LIMITS["min_code_cells"], LIMITS["max_code_cells"]) == (15, 35)
    assert LIMITS["median_cell_lines"] == 10
