"""Cleaning: what a page shows stays, how it was marked up goes."""

import html
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.data import clean
from tests import checks_text as checks

PIECES = [
    *(
        "<p>",
        "</p>",
        "<b",
        "<i>",
        "<a href='",
        ">",
        "<",
        "&lt;",
        "&gt;",
        "&amp;",
        "&",
        "amp;",
        "lt;",
    ),
    *("&#60;", "&#769;", "&#13;", "&nbsp;", "&#x200b;", "<!--", "-->", "<script>", "</script>"),
    *("<?xml ", "<!DOCTYPE ", "<input checked", "?>", '"', "'"),
    *("p", " ", "  ", "\t", "\n", "\r", "\u2028", "\xa0", "\u200b", "e\u0301", "\u0338", "/", "="),
]


def test_the_text_of_a_page_is_what_it_shows():
    checks.check_what_is_shown()


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
@settings(deadline=None, max_examples=300)
def test_cleaning_twice_is_cleaning_once_where_no_markup_is_shown(text):
    checks.check_cleaning_twice([text])


LETTERS = st.sampled_from([*map(chr, range(33, 127)), *"éß練習🎭", "<b>", "</p>", "&lt;", "<!--"])
WORDS = st.lists(LETTERS, min_size=1, max_size=6).map("".join)
TIDY = st.lists(WORDS, max_size=8).map(" ".join)  # single blanks only


@given(TIDY)
@settings(deadline=None, max_examples=300)
def test_escaped_text_is_shown_as_it_was(text):
    checks.check_escaped_text_is_shown(text)


@given(TIDY)
@settings(deadline=None, max_examples=300)
def test_text_without_markup_stays_as_it_is(text):
    text = re.sub(r"<(?=[a-z/!?])|&", "< ", text, flags=re.I)
    assert clean(text) == " ".join(text.split())


NAMES = st.sampled_from(["b", "i", "code", "a", "SPAN", "sup"])
ATTRIBUTES = st.sampled_from(
    ["", " id=x", " class='a>b'", ' title="a<b" lang = en', " hidden", "\n\tdata-x style=''"]
)


@given(st.lists(st.tuples(NAMES, ATTRIBUTES, TIDY), max_size=8))
@settings(deadline=None, max_examples=200)
def test_all_that_the_parser_of_the_standard_library_calls_text_is_shown(parts):
    page = "".join(f"<{name}{some}>{html.escape(text)}</{name}>" for name, some, text in parts)
    shown, parser = [], HTMLParser()
    parser.handle_data = shown.append
    parser.feed(page)
    parser.close()
    assert clean(page) == " ".join("".join(shown).split())


def test_code_that_is_not_html_stays_as_it_is():
    checks.check_code_stays()


def test_plain_text_stays_as_it_is():
    for text in ("To be, or not to be:\n    that is the question.", "x < y && y > z", "練習 🎭"):
        assert clean(text) == text


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "<",
            "<a ",
            "<!--",
            "<!doctype ",
            "<?xml ",
            "<script>",
            " ",
            " \n",
            "&amp;",
            "\t",
            "&lt;b",
        ),
        *("<a b=", "<a b='", "<a b='\"", " b='<a c=\"' d=\"", "<a b=c ", "<a\n\n", "<a hidden "),
    ],
)
def test_text_made_to_be_slow_is_not(unit):
    """40 KB that would take minutes if a pattern tried everything everywhere."""
    assert isinstance(clean(unit * (40_000 // len(unit)) + "x"), str)
