"""The exercises of "From text to tokens": learn merges, apply them, find duplicates."""

from collections.abc import Callable, Sequence
from typing import Any

from course_lib.data.bpe import Pair, apply_merges, learn_merges

from ..learner import learners_frame, learners_line
from .exercise import Exercise, WrongAnswer
from .text_to_tokens_duplicates import grade_deduplication
from .text_to_tokens_mistakes import ENCODERS, LEARNERS, explained, first_difference

_LESSONS = (
    ("zq zq ab ab cd cd", 4),  # equally often: zq is met first, " a" has the smallest byte
    ("the then the the other other then they", 9),  # words that come more than once
    ("low low low lower lower newest newest newest widest", 8),
    ("xaaa", 3),  # a run of one letter: two pairs
    ("yaaaa zaaaaa aab aab", 5),
    ("naïve café naïve 你好 café 你好, 好你", 9),  # characters of two and three bytes
    ("bcd bcd bcd bcd ab ab ab", 3),  # the tokens of abcd are a and bcd, not ab, c and d
    ("abab", 6),  # after one merge nothing occurs twice
    ("ab ab bc bc da da", 5),  # equally often: the left symbol decides, then the right one
    ("a    b    c    d e f", 2),  # runs of spaces, which are words of their own
    ("ab\nab\n cd\n cd, cd, ab.", 6),  # words that end at other signs than spaces
    ("abcab abcab ab", 4),  # a pair that occurs twice in a word
    ("", 3),
)


def grade_merges(answer: Callable[[str, int], list[Pair]]) -> None:
    """Compare the answer with the library's merges on texts that the chapter does not show."""
    _must_be_a_function(answer)
    given = []
    for lesson in (*_LESSONS, _LESSONS[0]):
        merges = _learned(answer, *lesson)
        _must_be_pairs(merges)
        given.append([tuple(pair) for pair in merges])
    if given.pop() != given[0]:
        raise WrongAnswer(
            f"{_LESSONS[0][0]!r}: asked again, your function returns other merges. It keeps "
            "something from call to call: begin with an empty list inside the function."
        )
    right = [learn_merges(*lesson) for lesson in _LESSONS]
    if given != right:
        raise WrongAnswer(_wrong_merges(given, right))


def _learned(answer: Callable, text: str, merges: int) -> Any:
    """Ask the answer; say in words why a symbol has no id."""
    try:
        return answer(text, merges)
    except KeyError as error:
        symbol = error.args[0] if error.args else None
        if learners_frame(error) is None or not isinstance(symbol, (int, str, bytes)):
            raise
        told = f"KeyError: there is no id for the symbol {symbol!r}. "
        if isinstance(symbol, bytes):
            told += "Each new symbol gets the next id: ids[left + right] = len(ids)."
        else:
            told += (
                f"It is of type {type(symbol).__name__}; each symbol must be of type bytes. Begin "
                "each word as `[bytes([byte]) for byte in word]`."
            )
        raise WrongAnswer(f"{told}\n{learners_line(error)}") from error


def grade_encoding(answer: Callable[[str, Sequence[Pair]], list[bytes]]) -> None:
    """Compare the answer's tokens with the library's, for merges of several texts."""
    _must_be_a_function(answer)
    learned = [learn_merges(*lesson) for lesson in _LESSONS]
    cases = [*zip(_NEW_TEXTS, learned, strict=True)]
    given = []
    for text, merges in cases:
        tokens = answer(text, [*merges])
        if not isinstance(tokens, (list, tuple)) or any(type(it) is not bytes for it in tokens):
            raise WrongAnswer(
                f"return a list of tokens, each of type bytes; yours returned {_kind(tokens)}."
            )
        given.append([*tokens])
    right = [apply_merges(text, merges) for text, merges in cases]
    if given != right:
        raise WrongAnswer(_wrong_tokens(cases, given, right))


_NEW_TEXTS = (
    "zqzq abcd cdef",
    "there another bother the",
    "slowest low lowest flower",
    "aaaaa",
    "aaaaaaa baaab",
    "naïf 你好你好 café",
    "abcd xbcd ab",
    "aabb ababab",
    "db da bd ac",
    "one  two   three    d e",
    "ab\ncd, ab",
    "abcabc ab",
    "one two",
)


def _must_be_a_function(answer: Any) -> None:
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")


def _must_be_pairs(given: Any) -> None:
    if not isinstance(given, (list, tuple)):
        raise WrongAnswer(f"return a list of pairs; yours returned {_kind(given)}.")
    for pair in given:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise WrongAnswer(f"each merge is a pair (left, right); one of yours is {pair!r}.")
        if any(type(symbol) is not bytes for symbol in pair):
            raise WrongAnswer(
                f"each symbol is of type bytes, such as b'e'; one of your pairs is {pair!r}. "
                "Begin each word as `[bytes([byte]) for byte in word]`."
            )


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a list with {next(type(it).__name__ for it in value if type(it) is not bytes)}"
    return "nothing" if value is None else type(value).__name__


def _wrong_merges(given: list[list[Pair]], right: list[list[Pair]]) -> str:
    """Say where the merges part from the right ones, and the mistake that explains them."""
    at = next(i for i, both in enumerate(zip(given, right)) if both[0] != both[1])
    mine, theirs = [*given[at], "the end"], [*right[at], "the end"]
    place = next(i for i, both in enumerate(zip(mine, theirs)) if both[0] != both[1])
    told = (
        f"{_LESSONS[at][0]!r}: merge {place + 1} is {mine[place]} in your list, expected is "
        f"{theirs[place]}. "
    )
    known = explained(LEARNERS, _LESSONS, given, right)
    return told + (known or first_difference(_LESSONS[at][0], given[at], right[at]))


def _wrong_tokens(cases: list[tuple], given: list[list[bytes]], right: list[list[bytes]]) -> str:
    at = next(i for i, both in enumerate(zip(given, right)) if both[0] != both[1])
    text = cases[at][0]
    told = f"{text!r}: your tokens are {_shown(given[at])}, expected are {_shown(right[at])}. "
    general = "In each word of `split(text)`, apply merge after merge, from the first."
    if all(len(token) == 1 for tokens in given for token in tokens):
        general = (
            "No pair was merged. `merge(symbols, pair)` takes the pair as it is in `merges` and "
            "returns a new list: keep it."
        )
    if b"".join(given[at]) != text.encode():
        general = "Your tokens joined are not the text any more: nothing may be lost or added."
    return told + (explained(ENCODERS, cases, given, right) or general)


def _shown(tokens: list[bytes]) -> str:
    text = ", ".join(map(repr, tokens[:14]))
    return f"[{text}{', …' if len(tokens) > 14 else ''}]"


EXERCISES = (
    Exercise(
        name="text-to-tokens/1",
        title="learn the merges of byte-level BPE",
        difficulty=2,
        minutes=15,
        hints=(
            "Keep each different word of `split(text)` as a list of symbols, and how often it "
            "occurs. Then repeat: count the pairs of neighbors, choose one, merge it in all words.",
            "Keep a dictionary of ids: `{symbol: number for number, symbol in "
            "enumerate(SINGLE_BYTES)}`; a new symbol gets the number len(ids). Choose by "
            "`min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))`.",
            "To merge, walk through the symbols with `place`. Where the pair is, append the "
            "joined symbol and go on at place + 2; otherwise append the symbol and go on at "
            "place + 1. Stop when the best pair occurs less than twice.",
        ),
        solution="course_lib.data.bpe:learn_merges",
        grade=grade_merges,
    ),
    Exercise(
        name="text-to-tokens/2",
        title="encode a text with learned merges",
        difficulty=1,
        minutes=8,
        hints=(
            "Cut the text with `split(text)`. Begin each word as a list of single bytes.",
            "For each word, go through the merges once, from the first to the last, and merge "
            "every occurrence. `merge(symbols, pair)` of course_lib.data.bpe does one of them.",
        ),
        solution="course_lib.data.bpe:apply_merges",
        grade=grade_encoding,
    ),
    Exercise(
        name="text-to-tokens/3",
        title="find exact and near duplicates",
        difficulty=2,
        minutes=15,
        hints=(
            "Go through the texts once, in order, and keep a list of the places that are new. "
            "First ask whether the text equals an earlier one. Only then compare shingles.",
            "Compare with kept texts only, and take the first that is similar enough. "
            "`jaccard(a, b)` divides the common shingles by all shingles of both texts.",
            "The first text of a group is always new: it is kept, whatever comes later. A common "
            "header alone gives a small Jaccard similarity, so such texts are new.",
        ),
        solution="course_lib.classroom.checks.text_to_tokens_duplicates:find_duplicates",
        grade=grade_deduplication,
    ),
)
