"""What learners do otherwise in "From text to tokens": each mistake, and what to say to it.

A mistake is a rule that makes it. Whoever gives the same answers as the rule has made the mistake.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from course_lib.data.bpe import SINGLE_BYTES, Pair, apply_merges, merge, split


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


def _by_value(pair: Pair, ids: dict) -> tuple[int, ...]:
    """The ids of a pair, with a byte's value for its id."""
    return tuple(symbol[0] if len(symbol) == 1 else ids[symbol] for symbol in pair)


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
LEARNERS: tuple[tuple[str, Callable[[str, int], list[Pair]]], ...] = (
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
        "A byte's id is its place in SINGLE_BYTES, not its value: the space, for example, comes "
        "late in that list. The library orders its alphabet so.",
        lambda text, merges: _learn(text, merges, tie=lambda pair, ids, seen: _by_value(pair, ids)),
    ),
    (
        f"You compare the left symbols only. {_TIE}: where the left ids are equal, the right ones "
        "decide.",
        lambda text, merges: _learn(text, merges, tie=lambda pair, ids, seen: (ids[pair[0]], seen)),
    ),
    (
        f"You compare the right symbols first. {_TIE}: the left ids decide, then the right ones.",
        lambda text, merges: _learn(
            text, merges, tie=lambda pair, ids, seen: (ids[pair[1]], ids[pair[0]])
        ),
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
        "You cut the text with `text.split()`, and the spaces are lost. `split(text)` keeps each "
        "with the word behind it.",
        lambda text, merges: _learn(
            text, merges, cut=lambda text: [word.encode() for word in text.split()]
        ),
    ),
    (
        "You count a pair once in each word. A pair that occurs twice in a word counts twice.",
        lambda text, merges: _learn(text, merges, count=lambda symbols: [*{*pairwise(symbols)}]),
    ),
    (
        "You count once, and take the most frequent pairs of that count. Each merge changes the "
        "counts: merge, then count again.",
        _never_again,
    ),
    (
        "You return one merge too few: `merges` of them are asked for.",
        lambda text, merges: _learn(text, max(0, merges - 1)),
    ),
    (
        "You return one merge too many: `merges` of them are asked for.",
        lambda text, merges: _learn(text, merges + 1),
    ),
    (
        "You go on with pairs that occur only once. Stop when no pair occurs twice.",
        lambda text, merges: _learn(text, merges, at_least=1),
    ),
    (
        "You stop too early. A pair that occurs twice is still merged.",
        lambda text, merges: _learn(text, merges, at_least=3),
    ),
)


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


ENCODERS: tuple[tuple[str, Callable[[str, Sequence[Pair]], list[bytes]]], ...] = (
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
        "A merge goes over the border of two words. Cut the text with `split` first, and merge "
        "inside each word.",
        lambda text, merges: _uncut(text, merges),
    ),
    (
        "A symbol is used twice: in aaa you merge both pairs. After a merge, go on behind it.",
        lambda text, merges: [
            symbol for word in split(text) for symbol in _joined_overlapping(word, merges)
        ],
    ),
)


def _uncut(text: str, merges: Sequence[Pair]) -> list[bytes]:
    symbols = _bytes(text.encode())
    for pair in merges:
        symbols = merge(symbols, pair)
    return symbols


def _joined_overlapping(word: bytes, merges: Sequence[Pair]) -> list[bytes]:
    symbols = _bytes(word)
    for pair in merges:
        symbols = _join_overlapping(symbols, pair)
    return symbols


def explained(mistakes: Sequence[tuple], cases: Sequence[tuple], given: list, right: list) -> str:
    """The words of the mistake that gives the same on all cases; "" where none does.

    A mistake that explains more than half of the wrong cases, the first among them, is named too:
    a second one may be mixed in. One that fits a single case only would be a guess.
    """
    wrong = [i for i, (one, other) in enumerate(zip(given, right)) if one != other]
    best, most = "", len(wrong) / 2
    for words, rule in mistakes:
        same = [i for i, case in enumerate(cases) if rule(*case) == given[i]]
        if len(same) == len(cases):
            return words
        explains = len({*wrong} & {*same})
        if wrong[0] in same and explains > most:
            best, most = words, explains
    return best


def first_difference(text: str, mine: Sequence[Pair], theirs: Sequence[Pair]) -> str:
    """Say how often the two pairs occur where two lists of merges part: that tells the fault."""
    place = next(
        i for i, both in enumerate(zip([*mine, None], [*theirs, None])) if len({*both}) > 1
    )
    words = [_bytes(word) for word in split(text)]
    for pair in theirs[:place]:
        words = [merge(word, pair) for word in words]
    times = Counter(pair for word in words for pair in pairwise(word))
    if place == len(theirs):
        return "There the list is complete, or no pair occurs twice any more: stop."
    wanted = times[theirs[place]]
    if place == len(mine):
        return f"But {theirs[place]} still occurs {wanted} times there: go on."
    yours = times[mine[place]]
    told = f"At that point yours occurs {_often(yours)}, {theirs[place]} {_often(wanted)}. "
    if yours == wanted:
        return f"{told}{_TIE}: the bytes have theirs from SINGLE_BYTES, a new symbol the next."
    if yours == 0:
        return told + "Merge each chosen pair in all words, then count again, and keep that order."
    return told + "Count the pairs inside all words, and take the one that occurs most often."


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
