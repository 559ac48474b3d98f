"""The exercises of "From text to tokens": learn merges, apply them, find duplicates."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from course_lib.data.bpe import SINGLE_BYTES, Pair, apply_merges, learn_merges, merge, split

from .exercise import Exercise, WrongAnswer
from .text_to_tokens_duplicates import grade_deduplication

_LESSONS = (
    ("zq zq ab ab cd cd", 4),  # equally often: zq is met first, " a" has the smallest byte
    ("the then the the other other then they", 9),  # words that come more than once
    ("low low low lower lower newest newest newest widest", 8),
    ("xaaa", 3),  # a run of one letter: two pairs
    ("yaaaa zaaaaa aab aab", 5),
    ("naïve café naïve 你好 café 你好, 好你", 9),  # characters of two and three bytes
    ("bcd bcd bcd bcd ab ab ab", 3),  # the tokens of abcd are a and bcd, not ab, c and d
    ("abab", 6),  # after one merge nothing occurs twice
    ("", 3),
)


def grade_merges(answer: Callable[[str, int], list[Pair]]) -> None:
    """Compare the answer with the library's merges on texts that the chapter does not show."""
    _must_be_a_function(answer)
    given = []
    for lesson in _LESSONS:
        merges = answer(*lesson)
        _must_be_pairs(merges)
        given.append([tuple(pair) for pair in merges])
    right = [learn_merges(*lesson) for lesson in _LESSONS]
    if given != right:
        raise WrongAnswer(_wrong_merges(given, right))


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


# What learners do otherwise: each mistake is one change of the rule below, and what to say to it.


def _learn(
    text: str,
    merges: int,
    cut: Callable[[str], list[bytes]] = split,
    weigh: bool = True,
    count: Callable[[list[bytes]], list[Pair]] = lambda symbols: [*pairwise(symbols)],
    tie: Callable[[Pair, dict, int], Any] = lambda pair, ids, seen: (ids[pair[0]], ids[pair[1]]),
    join: Callable[[Sequence[bytes], Pair], list[bytes]] = merge,
    at_least: int = 2,
) -> list[Pair]:
    """Learn merges by a rule of which any part can be changed."""
    times = Counter(cut(text))
    words = [([bytes([byte]) for byte in word], times[word]) for word in times]
    ids = {symbol: number for number, symbol in enumerate(SINGLE_BYTES)}
    learned: list[Pair] = []
    while len(learned) < merges:
        counts: Counter[Pair] = Counter()
        for symbols, often in words:
            for pair in count(symbols):
                counts[pair] += often if weigh else 1
        seen = {pair: number for number, pair in enumerate(counts)}
        best = min(counts, key=lambda p: (-counts[p], tie(p, ids, seen[p])), default=None)
        if best is None or counts[best] < at_least:
            break
        learned.append(best)
        ids.setdefault(best[0] + best[1], len(ids))
        words = [(join(symbols, best), often) for symbols, often in words]
    return learned


def _join_overlapping(symbols: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Merge every occurrence, also those that share a symbol."""
    joined, skip = [], False
    for place, symbol in enumerate(symbols):
        if tuple(symbols[place : place + 2]) == pair:
            joined.append(pair[0] + pair[1])
            skip = True
        elif skip:
            skip = False
        else:
            joined.append(symbol)
    return joined


def _apart(symbols: Sequence[bytes]) -> list[Pair]:
    """The pairs of a word, a run of equal symbols counted without overlap."""
    pairs, free = [], 0
    for place, pair in enumerate(pairwise(symbols)):
        if pair[0] != pair[1] or place >= free:
            pairs.append(pair)
            free = place + 2 if pair[0] == pair[1] else free
    return pairs


def _never_again(text: str, merges: int) -> list[Pair]:
    """Take the most frequent pairs of single bytes, without counting again."""
    first = _learn(text, 1)
    counts = Counter(pair for word in split(text) for pair in pairwise(_bytes(word)))
    ids = {symbol: number for number, symbol in enumerate(SINGLE_BYTES)}
    order = sorted(counts, key=lambda p: (-counts[p], ids[p[0]], ids[p[1]]))
    return first + [pair for pair in order if counts[pair] >= 2 and pair not in first][: merges - 1]


def _bytes(word: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in word]


_TIE = "Of pairs that occur equally often, take the one with the smallest pair of ids"
_LEARNERS: tuple[tuple[str, Callable[[str, int], list[Pair]]], ...] = (
    (
        f"A tie is broken by the order in which the pairs were met. {_TIE}: then every machine "
        "learns the same merges.",
        lambda text, merges: _learn(text, merges, tie=lambda pair, ids, seen: seen),
    ),
    (
        f"A tie is broken by the bytes themselves. {_TIE}: the place of a byte in SINGLE_BYTES, "
        "and for a new symbol the next free number.",
        lambda text, merges: _learn(text, merges, tie=lambda pair, ids, seen: pair),
    ),
    (
        f"Of equally frequent pairs you take the last. {_TIE}.",
        lambda text, merges: _learn(
            text, merges, tie=lambda pair, ids, seen: (-ids[pair[0]], -ids[pair[1]])
        ),
    ),
    (
        "A symbol is used twice: in aaa you merge the first pair, and then the second one with "
        "the same middle byte. After a merge, go on behind it.",
        lambda text, merges: _learn(text, merges, join=_join_overlapping),
    ),
    (
        "In a run such as aaa you count the pair once. It has two pairs of neighbors; the library "
        "counts both, although only one of them can be merged.",
        lambda text, merges: _learn(text, merges, count=_apart),
    ),
    (
        "You count each different word once. A word that occurs five times counts five times.",
        lambda text, merges: _learn(text, merges, weigh=False),
    ),
    (
        "A pair goes over the border of two words. Cut the text with `split` first, and count "
        "inside each word.",
        lambda text, merges: _learn(text, merges, cut=lambda text: [text.encode()]),
    ),
    (
        "You count once, and take the most frequent pairs of that count. Each merge changes the "
        "counts: merge, then count again.",
        _never_again,
    ),
    (
        "You go on with pairs that occur only once. Stop when no pair occurs twice.",
        lambda text, merges: _learn(text, merges, at_least=1),
    ),
)


def _wrong_merges(given: list[list[Pair]], right: list[list[Pair]]) -> str:
    """Say where the merges part from the right ones, and the mistake that explains them."""
    at = next(i for i, both in enumerate(zip(given, right)) if both[0] != both[1])
    mine, theirs = [*given[at], "the end"], [*right[at], "the end"]
    place = next(i for i, both in enumerate(zip(mine, theirs)) if both[0] != both[1])
    told = (
        f"{_LESSONS[at][0]!r}: merge {place + 1} is {mine[place]} in your list, expected is "
        f"{theirs[place]}. "
    )
    general = "Count all pairs inside words, merge the most frequent one, and count again."
    return told + (_explained(_LEARNERS, _LESSONS, given, at) or general)


def _explained(mistakes: Sequence[tuple], cases: Sequence[tuple], given: list, at: int) -> str:
    """The words of the mistake that gives the same on all cases, or at least on case `at`."""
    for some in (range(len(cases)), [at]):
        for words, rule in mistakes:
            if all(rule(*cases[i]) == given[i] for i in some):
                return words
    return ""


def _one_per_word(text: str, merges: Sequence[Pair]) -> list[bytes]:
    tokens = []
    for word in split(text):
        symbols = _bytes(word)
        for pair in merges:
            at = next((i for i, two in enumerate(pairwise(symbols)) if two == pair), None)
            if at is not None:
                symbols[at : at + 2] = [pair[0] + pair[1]]
        tokens += symbols
    return tokens


def _longest_first(text: str, merges: Sequence[Pair]) -> list[bytes]:
    known = {left + right for left, right in merges} | {*SINGLE_BYTES}
    tokens = []
    for word in split(text):
        while word:
            size = next(size for size in range(len(word), 0, -1) if word[:size] in known)
            tokens.append(word[:size])
            word = word[size:]
    return tokens


_ENCODERS: tuple[tuple[str, Callable[[str, Sequence[Pair]], list[bytes]]], ...] = (
    (
        "You apply the last merge first. A merge needs the symbols that earlier merges make: "
        "go through the list from its beginning.",
        lambda text, merges: apply_merges(text, [*reversed(merges)]),
    ),
    (
        "You take the longest known token at each place. BPE does not search for long tokens: it "
        "repeats the merges in the order in which they were learned.",
        _longest_first,
    ),
    (
        "You merge a pair only once in a word. Merge every occurrence before the next merge.",
        _one_per_word,
    ),
    (
        "You apply the merges in the order of their bytes. Their order in the list counts.",
        lambda text, merges: apply_merges(text, sorted(merges)),
    ),
    (
        "A symbol is used twice: in aaa you merge both pairs. After a merge, go on behind it.",
        lambda text, merges: [
            symbol for word in split(text) for symbol in _joined_overlapping(word, merges)
        ],
    ),
)


def _joined_overlapping(word: bytes, merges: Sequence[Pair]) -> list[bytes]:
    symbols = _bytes(word)
    for pair in merges:
        symbols = _join_overlapping(symbols, pair)
    return symbols


def _wrong_tokens(cases: list[tuple], given: list[list[bytes]], right: list[list[bytes]]) -> str:
    at = next(i for i, both in enumerate(zip(given, right)) if both[0] != both[1])
    text = cases[at][0]
    told = f"{text!r}: your tokens are {_shown(given[at])}, expected are {_shown(right[at])}. "
    general = "In each word of `split(text)`, apply merge after merge, from the first."
    if b"".join(given[at]) != text.encode():
        general = "Your tokens joined are not the text any more: nothing may be lost or added."
    return told + (_explained(_ENCODERS, cases, given, at) or general)


def _shown(tokens: list[bytes]) -> str:
    text = " ".join(repr(token)[2:-1] for token in tokens[:14])
    return f"[{text}{' …' if len(tokens) > 14 else ''}]"


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
