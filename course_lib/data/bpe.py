"""Byte-level BPE by hand: how a vocabulary is learned, in a few lines and slowly.

Each word begins as single bytes. The pair of neighbors that occurs most often becomes a new
symbol, everywhere, and this is repeated (Sennrich et al., arXiv:1508.07909; on bytes as in GPT-2).
The list of merges, in their order, is all that a tokenizer has to know.

This is the teaching version, equal to the `tokenizers` library merge by merge; `train_tokenizer`
calls that library, which is a thousand times faster on real text.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from tokenizers import pre_tokenizers

Pair = tuple[bytes, bytes]

_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def learn_merges(text: str, merges: int) -> list[Pair]:
    """The first `merges` merges of a text; fewer when no pair occurs twice any more.

    Of pairs that occur equally often, the oldest is merged: the one whose first symbol, then
    whose second symbol, has the smaller id. `SINGLE_BYTES` have the first ids, each new symbol
    the next one.
    """
    times = Counter(split(text))
    words = {word: [bytes([byte]) for byte in word] for word in times}
    ids = {symbol: number for number, symbol in enumerate(SINGLE_BYTES)}
    learned: list[Pair] = []
    while len(learned) < merges:
        counts: Counter[Pair] = Counter()
        for word, symbols in words.items():
            for pair in pairwise(symbols):
                counts[pair] += times[word]  # three in a row are two pairs, as in the library
        if not counts or max(counts.values()) < 2:
            break
        pair = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        ids.setdefault(pair[0] + pair[1], len(ids))
        learned.append(pair)
        words = {word: merge(symbols, pair) for word, symbols in words.items()}
    return learned


def merge(symbols: Sequence[bytes], pair: Pair) -> list[bytes]:
    """Join every occurrence of a pair, from left to right; no symbol is used twice."""
    joined, place = [], 0
    while place < len(symbols):
        found = tuple(symbols[place : place + 2]) == pair
        joined.append(pair[0] + pair[1] if found else symbols[place])
        place += 2 if found else 1
    return joined


def apply_merges(text: str, merges: Sequence[Pair]) -> list[bytes]:
    """The tokens of a text: in each word, the merges in the order in which they were learned."""
    tokens: list[bytes] = []
    for word in split(text):
        symbols = [bytes([byte]) for byte in word]
        for pair in merges:
            symbols = merge(symbols, pair)
        tokens += symbols
    return tokens


def split(text: str) -> list[bytes]:
    """The words of a text as UTF-8, as GPT-2 cuts them: a space belongs to the word after it."""
    return [text[start:stop].encode() for _, (start, stop) in _WORDS.pre_tokenize_str(text)]


def _single_bytes() -> list[bytes]:
    """The 256 bytes in the library's order: first those that are visible characters of Latin-1.

    The library writes each byte as one visible character, and orders its alphabet by them.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    return [bytes([byte]) for byte in (*visible, *sorted({*range(256)} - {*visible}))]


SINGLE_BYTES = _single_bytes()
