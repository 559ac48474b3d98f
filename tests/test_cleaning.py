"""Cleaning: what a page shows stays, how it was marked up goes."""

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
    *("p", " ", "  ", "\t", "\n", "\r", "\u2028", "\xa0", "\u200b", "e\u0301", "\u0338", "/", "="),
]


def test_the_text_of_a_page_is_what_it_shows():
    checks.check_what_is_shown()


@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
@settings(deadline=None, max_examples=300)
def test_cleaning_twice_is_cleaning_once(text):
    checks.check_cleaning_twice([text])


def test_plain_text_stays_as_it_is():
    for text in ("To be, or not to be:\n    that is the question.", "x < y && y > z", "練習 🎭"):
        assert clean(text) == text


@pytest.mark.parametrize(
    "unit", ["<", "<a ", "<!--", "<script>", " ", " \n", "&amp;", "\t", "&lt;b"]
)
def test_text_made_to_be_slow_is_not(unit):
    """40 KB that would take minutes if a pattern tried everything everywhere."""
    assert isinstance(clean(unit * (40_000 // len(unit)) + "x"), str)
