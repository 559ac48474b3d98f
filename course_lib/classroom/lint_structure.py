"""Rules on the build of a chapter: its parts, their order, its size, its exercises."""

import re
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from .checks import card
from .lint import Page, Problem, output_text, rule, without_code
from .notebook_sync import footer, header, setup_cell

# The parts of a chapter, by the words their heading starts with, in order. Sections with other
# headings may stand anywhere after the question.
PARTS = (
    "After this chapter you can",
    "The question",
    "Predict",
    "Break it",
    "Exercises",
    "In real systems",
    "Summary",
    "References",
)


@rule("generated")
def generated_cells_are_in_sync(page: Page) -> Iterator[Problem]:
    """Header, set-up cell and next link are exactly what the syllabus makes of them."""
    wanted = {
        "header": header(page.course, page.chapter),
        "setup": setup_cell(page.course),
        "next": footer(page.course, page.chapter),
    }
    places = {cell.get("id"): at for at, cell in enumerate(page.notebook.cells)}
    for name, source in wanted.items():
        at = places.get(name)
        if at is None:
            yield None, f"the generated cell {name!r} is missing; run `notebooks sync`"
        elif page.notebook.cells[at].source != source:
            yield at, f"the generated cell {name!r} differs from the syllabus; run `notebooks sync`"


@rule("order")
def parts_are_there_and_in_order(page: Page) -> Iterator[Problem]:
    """Header, outcomes, set-up, question, …, references, next: as in every other chapter."""
    cells, headings = page.notebook.cells, page.headings()
    if not cells or cells[0].get("id") != "header":
        yield 0 if cells else None, "the first cell must be the generated header"
    if cells and cells[-1].get("id") != "next":
        yield len(cells) - 1, "the last cell must be the generated next link"
    wanted = [part for part in PARTS if part not in page.limit("without")]
    found = []
    for part in wanted:
        places = [at for at, heading in headings if heading.startswith(part)]
        if not places:
            yield None, f"there is no heading `## {part}`"
        elif len(places) > 1:
            yield places[1], f"a second heading `## {part}`; one is enough"
        found += [(places[0], part)] if places else []
    for (at, part), (after, following) in pairwise(found):
        if at > after:
            yield after, f"`## {following}` stands before `## {part}`; the order is {wanted}"
    yield from _set_up_in_its_place(page)
    for at, cell in page.text():
        if re.search(r"^# ", without_code(cell.source), re.MULTILINE):
            yield at, "a second title; use `##` for sections"


def _set_up_in_its_place(page: Page) -> Iterator[Problem]:
    setup = [at for at, cell in enumerate(page.notebook.cells) if cell.get("id") == "setup"]
    start, question = page.section("After this chapter you can")[0], page.section("The question")[0]
    if setup and start and question and not start < setup[0] < question:
        yield setup[0], "the set-up cell belongs between the outcomes and the question"


@rule("outcomes")
def outcomes_are_few(page: Page) -> Iterator[Problem]:
    """Three to five bullets say what the reader can do afterwards."""
    first, _ = page.section("After this chapter you can")
    if not first:
        return  # the rule "order" has said so
    bullets = len(re.findall(r"^\s*[-*] ", page.notebook.cells[first].source, re.MULTILINE))
    low, high = page.limit("min_outcomes"), page.limit("max_outcomes")
    if not low <= bullets <= high:
        yield first, f"{bullets} bullets; give {low} to {high}, in the same cell as the heading"


@rule("question-figure")
def the_question_has_a_figure(page: Page) -> Iterator[Problem]:
    """The question that drives the chapter comes with one figure."""
    first, last = page.section("The question")
    if not last:
        return
    cells = page.notebook.cells[first:last]
    pictures = sum(
        "image/png" in output.get("data", {})
        for cell in cells
        for output in cell.get("outputs", [])
    )
    pictures += sum(
        len(re.findall(r"!\[[^\]]+\]\(", cell.source))
        for cell in cells
        if cell.cell_type == "markdown"
    )
    if pictures != 1:
        yield first, f"{pictures} figures under the question; show exactly one (figures.show)"


@rule("size")
def a_chapter_fits_one_sitting(page: Page) -> Iterator[Problem]:
    """Words, code cells and lines a cell stay within what a reader can take in."""
    words = sum(len(prose(cell.source).split()) for _, cell in page.text())
    if not page.limit("min_words") <= words <= page.limit("max_words"):
        yield None, f"{words} words; {page.limit('min_words')} to {page.limit('max_words')} allowed"
    sizes = [(at, len(cell.source.splitlines())) for at, cell in page.code()]
    low, high = page.limit("min_code_cells"), page.limit("max_code_cells")
    if not low <= len(sizes) <= high:
        yield None, f"{len(sizes)} code cells; {low} to {high} allowed"
    middle = median(lines for _, lines in sizes) if sizes else 0
    if middle > page.limit("median_cell_lines"):
        yield (
            None,
            (
                f"the median code cell has {middle:g} lines, more than "
                f"{page.limit('median_cell_lines')}; split cells, or move code to the library"
            ),
        )
    for at, lines in sizes:
        if lines > page.limit("longest_cell_lines"):
            yield at, f"{lines} lines, more than {page.limit('longest_cell_lines')}; split the cell"


@rule("predict")
def a_prediction_is_made_and_judged(page: Page) -> Iterator[Problem]:
    """Predict, then measure, compare and assert."""
    source = "\n".join(cell.source for _, cell in page.code())
    for needed, why in (
        ("predict(", 'the reader predicts nothing; add `guess = predict("topic/what", ...)`'),
        (".compare(", "no prediction is compared with its measurement; add `guess.compare(...)`"),
        ("assert ", "no claim is asserted; assert what was measured"),
    ):
        if needed not in source:
            yield None, why
    for name in re.findall(r"\bpredict\(\s*[\"']([^\"']+)[\"']", source):
        if not name.startswith(f"{page.chapter.topic}/"):
            yield None, f"the prediction {name!r} is not named {page.chapter.topic}/…"


@rule("exercises")
def exercises_are_complete(page: Page) -> Iterator[Problem]:
    """Every exercise has a record, a card, a stub, a check, hints and tested wrong answers."""
    low, high = page.limit("min_exercises"), page.limit("max_exercises")
    if not low <= len(page.exercises) <= high:
        yield (
            None,
            (
                f"{len(page.exercises)} exercises in checks/"
                f"{page.chapter.topic.replace('-', '_')}.py; {low} to {high} allowed"
            ),
        )
    known = {exercise.name for exercise in page.exercises}
    for at, cell in page.code():
        for name in _checked(cell.source):
            if name not in known:
                yield at, f'check("{name}"): no such exercise; known: {", ".join(sorted(known))}'
        if re.search(r"^\s*(hint|solution)\(", cell.source, re.MULTILINE):
            yield at, "“Run all” would give the answer away; name the call in Markdown instead"
    for exercise in page.exercises:
        yield from _exercise(page, exercise)


def _exercise(page: Page, exercise) -> Iterator[Problem]:
    cells = page.notebook.cells
    wanted = card(exercise)
    cards = [at for at, cell in page.text() if wanted in cell.source]
    checks = [at for at, cell in page.code() if exercise.name in _checked(cell.source)]
    if not cards:
        yield (
            None,
            f"{exercise.name}: its card is missing or differs; a Markdown cell needs: "
            + (wanted.replace("\n", "⏎")),
        )
    if not checks:
        yield None, f'{exercise.name}: nothing calls check("{exercise.name}", …)'
    elif cards:
        between = [
            cell.source for cell in cells[cards[0] : checks[0] + 1] if cell.cell_type == "code"
        ]
        if not any("raise NotImplementedError" in source for source in between):
            yield (
                checks[0],
                (
                    f"{exercise.name}: no stub between its card and its check; "
                    "write a function that only does `raise NotImplementedError`"
                ),
            )
        if checks[0] < cards[0]:
            yield checks[0], f"{exercise.name}: its check comes before its card"
    for at in checks:
        said = " ".join(output_text(output) for output in cells[at].get("outputs", []))
        if said and "not attempted" not in said:
            yield (
                at,
                (
                    f"{exercise.name}: the stored output is not that of the stub; put the stub "
                    "back and run the notebook again"
                ),
            )
    if not any(f'hint("{exercise.name}")' in cell.source for cell in cells):
        yield None, f'{exercise.name}: tell the reader about hint("{exercise.name}")'
    if not _has_cases(page, exercise.name):
        yield None, f"{exercise.name}: no wrong answers in tests/exercise_cases/"


def _has_cases(page: Page, name: str) -> bool:
    folder = page.root / "tests" / "exercise_cases"
    return any(f'"{name}"' in path.read_text(encoding="utf-8") for path in folder.glob("*.py"))


def _checked(source: str) -> list[str]:
    return re.findall(r"\bcheck\(\s*[\"']([^\"']+)[\"']", source)


def prose(markdown: str) -> str:
    """Return the words of Markdown: no code, no formulas, no tables' bars, no link targets."""
    text = without_code(markdown)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[|#*_>`]|^\s*[-:| ]+$", " ", text, flags=re.MULTILINE)
