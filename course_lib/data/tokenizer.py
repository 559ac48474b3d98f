"""Byte-level BPE: any text to token ids and back, without loss.

Text is cut into bytes and the most frequent neighbours are merged, again and again, until the
vocabulary is full (Sennrich et al., arXiv:1508.07909; on bytes as in GPT-2). The merges are
learned by the ``tokenizers`` library. Training twice on the same text gives the same file.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from course_lib.data.errors import DataError

END_OF_TEXT = "<|endoftext|>"  # opens every document
SMALLEST_VOCAB = 257  # the 256 bytes and END_OF_TEXT

_PIECE = 1 << 16  # characters encoded at once; bounds memory on long documents
_PIECES = 16  # pieces encoded in one call of the library, in parallel threads
_LESSON = 1 << 13  # characters learned from at once: the library gathers 256 of them in memory


class TextTokenizer:
    """A tokenizer with the token that opens documents.

    Attributes:
        vocab: number of token ids that it knows; ids are 0 … vocab - 1.
        end: id of ``<|endoftext|>``. Text never produces it, even where it spells it out.
        sha256: hash of the saved form, equal for equal tokenizers.
    """

    def __init__(self, core: Tokenizer) -> None:
        end = core.token_to_id(END_OF_TEXT)
        if end is None:
            raise DataError(
                f"the tokenizer has no {END_OF_TEXT!r}, which opens each document: "
                "add it as a special token, or use tokenizer = 'bpe'"
            )
        core.no_padding()
        core.no_truncation()
        core.encode_special_tokens = True  # special tokens spelled out in a text stay plain text
        self.core = core
        self.end: int = end
        self.vocab: int = 1 + max(core.get_vocab(with_added_tokens=True).values())
        self.sha256: str = hashlib.sha256(core.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text (without an opening token)."""
        return [token for ids in self._encode(text) for token in ids]

    def encode_document(self, text: str) -> np.ndarray:
        """Token ids of a whole document, opened by ``end``: uint32, (tokens,)."""
        parts = [np.array([self.end], dtype=np.uint32)]
        parts += [np.array(ids, dtype=np.uint32) for ids in self._encode(text)]
        return np.concatenate(parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. Opening tokens are left out; half a character becomes U+FFFD."""
        return self.core.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, which the ``tokenizers`` and ``transformers`` libraries read."""
        self.core.save(str(path))

    def _encode(self, text: str) -> Iterator[list[int]]:
        pieces = list(_pieces(text, _PIECE))
        for first in range(0, len(pieces), _PIECES):
            chunk = pieces[first : first + _PIECES]
            for piece in self.core.encode_batch_fast(chunk, add_special_tokens=False):
                yield piece.ids


def train_tokenizer(texts: Iterable[str], vocab: int) -> TextTokenizer:
    """Learn a byte-level BPE vocabulary.

    Args:
        texts: the training texts; read once, one at a time.
        vocab: wanted number of entries, at least 257. A short text gives fewer.
    """
    if vocab < SMALLEST_VOCAB:
        raise ValueError(
            f"a byte-level tokenizer with {vocab} entries is impossible; use vocab >= "
            f"{SMALLEST_VOCAB} (256 bytes and {END_OF_TEXT})"
        )
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
    pieces = (piece for text in texts for piece in _pieces(text, _LESSON))
    core.train_from_iterator(pieces, trainer)
    return TextTokenizer(core)


def load_tokenizer(path: str | Path, vocab: int | None = None) -> TextTokenizer:
    """Read a tokenizer.json.

    Raises:
        DataError: no such file, not a tokenizer, no ``<|endoftext|>``, or more entries than
            ``vocab``, the model's vocabulary.
    """
    try:
        core = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataError(f"cannot read the tokenizer {path}: {problem}") from None
    except Exception as problem:  # the library raises plain Exception
        raise DataError(f"{path} is not a tokenizer.json: {problem}") from None
    tokenizer = TextTokenizer(core)
    if vocab is not None and tokenizer.vocab > vocab:
        raise DataError(
            f"{path} has {tokenizer.vocab} entries and the model's vocabulary only {vocab}; "
            f"use model.vocab >= {tokenizer.vocab}"
        )
    return tokenizer


def _pieces(text: str, size: int) -> Iterator[str]:
    """Cut a long text where BPE never merges: after a single line break between two words."""
    start = 0
    while len(text) - start > size:
        cut = text.find("\n", start + size)
        while cut != -1 and (text[cut - 1].isspace() or text[cut + 1 : cut + 2].strip() == ""):
            cut = text.find("\n", cut + 1)
        if cut == -1:
            break
        yield text[start : cut + 1]
        start = cut + 1
    yield text[start:]
