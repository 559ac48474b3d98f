"""Byte-level BPE: any text to token ids and back, without loss.

Text is cut into bytes and the most frequent neighbours are merged, again and again, until the
vocabulary is full (Sennrich et al., arXiv:1508.07909; on bytes as in GPT-2). The merges are
learned by the `tokenizers` library. Training twice on the same text gives the same file.
"""

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from course_lib.data import DataError

END_OF_TEXT = "<|endoftext|>"  # opens every document
SMALLEST_VOCAB = 257  # the 256 bytes and END_OF_TEXT

# The library takes over 100 bytes of memory a character, so it gets texts in pieces.
_PIECE = 1 << 16  # characters of a piece that is encoded; 16 pieces at once, in parallel threads
LESSON = 1 << 13  # characters of a piece that is learned from; the library gathers 256 of them
_CUT = re.compile(r"(?<=\S)(?=[ \n]\S)")  # where a word starts; BPE never merges over it
_ENDLESS = re.compile(r"\w{257,}")  # no word; to learn from it takes very long


class TextTokenizer:
    """A tokenizer with a token that opens documents, which text never produces."""

    def __init__(self, core: Tokenizer) -> None:
        core.no_padding()
        core.no_truncation()
        core.encode_special_tokens = True  # special tokens spelled out in a text stay plain text
        self.core = core
        self.end: int = core.token_to_id(END_OF_TEXT)
        self.vocab: int = 1 + max(core.get_vocab(with_added_tokens=True).values())  # ids are below
        self.sha256: str = hashlib.sha256(core.to_str().encode()).hexdigest()  # of the saved form

    def encode(self, text: str) -> list[int]:
        """Token ids of a text (without an opening token)."""
        return self.encode_document(text)[1:].tolist()

    def encode_document(self, text: str, at_once: int = 16) -> np.ndarray:
        """Token ids of a whole document, opened by `end`: uint32, (tokens,).

        at_once: pieces of 65,536 characters that threads encode at once, each with up to 10 MB.
        """
        ids = array("I", [self.end])
        pieces = pieces_of(text, _PIECE)
        while some := list(islice(pieces, at_once)):
            for piece in self.core.encode_batch_fast(some, add_special_tokens=False):
                ids.extend(piece.ids)
        return np.frombuffer(ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. Opening tokens are left out; half a character becomes U+FFFD."""
        return self.core.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, which the `tokenizers` and `transformers` libraries read."""
        self.core.save(str(path))


def train_tokenizer(texts: Iterable[str], vocab: int) -> TextTokenizer:
    """Learn a byte-level BPE vocabulary.

    texts: read once, one at a time; what looks like a word of over 256 letters is left out.
    vocab: wanted number of entries, at least 257. A short text gives fewer.
    """
    if vocab < SMALLEST_VOCAB:
        raise DataError(f"vocab {vocab} is too small for all bytes; use >= {SMALLEST_VOCAB}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in pieces_of(text, LESSON))
    core.train_from_iterator((_ENDLESS.sub("", piece) for piece in pieces), trainer)
    return TextTokenizer(core)


def load_tokenizer(path: str | Path, vocab: int | None = None) -> TextTokenizer:
    """Read a tokenizer.json.

    Raises DataError where there is none, or without `<|endoftext|>`, or with more entries than
    `vocab`, the model's vocabulary.
    """
    try:
        tokenizer = TextTokenizer(Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
    except Exception as problem:  # the library raises plain Exception
        raise DataError(f"{path} is not a tokenizer.json: {problem}") from None
    if tokenizer.end is None:
        raise DataError(f"{path} has no token {END_OF_TEXT!r}, which opens each document; add it")
    if vocab is not None and tokenizer.vocab > vocab:
        raise DataError(f"{path} has more entries; use model.vocab >= {tokenizer.vocab}")
    return tokenizer


def pieces_of(text: str, size: int) -> Iterator[str]:
    """A text cut before words, into pieces of `size` to 2 · `size` characters.

    Only where no word starts in `size` characters is it cut within one, and merges end there.
    """
    start = 0
    while len(text) - start > 2 * size:
        cut = _CUT.search(text, start + size, start + 2 * size)
        stop = cut.start() if cut else start + 2 * size
        yield text[start:stop]
        start = stop
    yield text[start:]
