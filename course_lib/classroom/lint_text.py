"""Rules on what a chapter says: short sentences, links that lead somewhere, honest advice."""

import re
from collections.abc import Iterator

from .lint import Page, Problem, rule, without_code
from .lint_structure import prose

_HTML = re.compile(
    r"</?(div|span|style|table|tr|td|font|center|img|details|summary|script|br|"
    r"iframe|p|b|i|h[1-6])\b[^>]*>",
    re.IGNORECASE,
)


@rule("sentences")
def sentences_are_short(page: Page) -> Iterator[Problem]:
    """Many readers are not native speakers: about 20 words; only gross cases are reported."""
    for at, cell in page.text():
        for sentence in sentences(cell.source):
            if len(sentence.split()) > page.limit("max_sentence_words"):
                yield (
                    at,
                    (
                        f"a sentence of {len(sentence.split())} words; split it: "
                        f"“{' '.join(sentence.split()[:8])} …”"
                    ),
                )


@rule("html")
def plain_markdown(page: Page) -> Iterator[Problem]:
    """HTML is shown differently on GitHub, Colab and Jupyter, and cannot be translated."""
    for at, cell in page.text():
        tag = _HTML.search(re.sub(r"`[^`\n]*`", "", without_code(cell.source)))
        if tag:
            yield at, f"raw HTML {tag[0]}; write plain Markdown"


@rule("links")
def links_lead_somewhere(page: Page) -> Iterator[Problem]:
    """Links to the glossary and to other files of the course resolve."""
    folder = page.root / "chapters"
    glossary_links = 0
    for at, cell in page.text():
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(cell.source)):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            name, _, anchor = target.partition("#")
            path = folder / name
            glossary_links += name == "glossary.md"
            if not path.exists():
                yield at, f"the link to {target} leads nowhere: chapters/{name} does not exist"
            elif (
                anchor
                and path.suffix == ".md"
                and (anchor not in anchors(path.read_text(encoding="utf-8")))
            ):
                yield at, f"the link to {target}: {name} has no heading with the anchor #{anchor}"
    if glossary_links < page.limit("min_glossary_links"):
        yield (
            None,
            (
                f"{glossary_links} links to glossary.md; link at least "
                f"{page.limit('min_glossary_links')} terms at their first use"
            ),
        )


@rule("references")
def references_can_be_found(page: Page) -> Iterator[Problem]:
    """References are paper titles with arXiv ids (or another address)."""
    first, last = page.section("References")
    source = "\n".join(cell.source for at, cell in page.text() if first <= at < last)
    if last and not re.search(r"arXiv:\d{4}\.\d{4,5}|https?://", source):
        yield first, "give titles with arXiv ids, as in `arXiv:1706.03762`"


@rule("allocator-advice")
def allocator_advice_is_in_order(page: Page) -> Iterator[Problem]:
    """expandable_segments comes first; a split size is an older cure (PyTorch #113481)."""
    new = None
    for at, cell in enumerate(page.notebook.cells):
        new = at if new is None and "expandable_segments" in cell.source else new
        if "max_split_size_mb" in cell.source and new is None:
            yield at, "max_split_size_mb is advised before expandable_segments; turn them round"
            return


def sentences(markdown: str) -> list[str]:
    """Return the sentences of Markdown, without headings, tables and code."""
    text = without_code(markdown)
    kept = [line for line in text.splitlines() if not re.match(r"\s*(\||#)", line)]
    # A blank line or a bullet ends a sentence even without a full stop.
    blocks = re.split(r"\n\s*(?:[-*]|\d+\.) |\n\s*\n", "\n" + "\n".join(kept))
    return [
        sentence
        for block in blocks
        for sentence in re.split(r"(?<=[.!?:;])[\s)”\"*]+(?=\S)", prose(block))
    ]


def anchors(markdown: str) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")
        for heading in re.findall(r"^#+ +(.+)$", markdown, re.MULTILINE)
    }
