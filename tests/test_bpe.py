"""Byte-level BPE by hand is the `tokenizers` library's, merge by merge and token by token."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from course_lib.data import train_tokenizer
from course_lib.data.bpe import SINGLE_BYTES, apply_merges, learn_merges, merge

TEXTS = {
    "prose": "It is the east, and Juliet is the sun. Arise, fair sun, and kill the envious moon. "
    * 3,
    "scripts": "naïve café – 你好,世界 你好 🙂🙂 Привет, мир! Привет! مرحبا " * 2,
    "code": "for i in range(10):\n    for j in range(10):\n\tprint(i + j)  # 12345 12345\n\n" * 2,
    "repeats": "aaaa aaaaa baaab aaaaaaaaab bbbbbb abababab   \n\n\n ",
    "ties": "zq zq ef ef ab ab cd cd",
    "empty": "",
}
alphabets = st.sampled_from(["ab", "abc ", "aé b", "xyz.\n 1", "你好a "])
small_texts = alphabets.flatmap(lambda letters: st.text(letters, max_size=120))


def byte_names() -> dict[str, int]:
    """The library's visible character for each byte, found by asking it; 13 never occur."""
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ends = ((0, 0x800, 1), (0x800, 0xD800, 64), (0xE000, 0x10000, 64), (0x10000, 0x110000, 4096))
    names = {}
    for character in (chr(point) for start_stop_step in ends for point in range(*start_stop_step)):
        names.update(zip(cut.pre_tokenize_str(character)[0][0], character.encode()))
    return names


NAMES = byte_names()


def in_bytes(token: str) -> bytes:
    return bytes(NAMES[character] for character in token)


def librarys_merges(text: str, merges: int) -> list[tuple[bytes, bytes]]:
    core = train_tokenizer([text], 257 + merges).core
    pairs = json.loads(core.to_str())["model"]["merges"]
    return [(in_bytes(left), in_bytes(right)) for left, right in pairs]


@pytest.mark.parametrize("name", TEXTS)
def test_merges_are_the_librarys(name):
    assert learn_merges(TEXTS[name], 80) == librarys_merges(TEXTS[name], 80)


@settings(max_examples=150, deadline=None)
@given(st.one_of(small_texts, st.text(max_size=80)), st.integers(0, 40))
def test_merges_of_random_texts_are_the_librarys(text, merges):
    assert learn_merges(text, merges) == librarys_merges(text, merges)


@settings(max_examples=100, deadline=None)
@given(small_texts, small_texts)
def test_tokens_of_another_text_are_the_librarys(lesson, text):
    tokenizer = train_tokenizer([lesson], 257 + 30)
    tokens = apply_merges(text, learn_merges(lesson, 30))
    assert tokens == [in_bytes(tokenizer.core.id_to_token(i)) for i in tokenizer.encode(text)]
    assert b"".join(tokens) == text.encode()


def test_single_bytes_are_in_the_order_of_the_librarys_alphabet():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(SINGLE_BYTES) == [bytes([byte]) for byte in range(256)]
    assert len(NAMES) == 256 - 13
    known = [(NAMES[c], symbol[0]) for c, symbol in zip(alphabet, SINGLE_BYTES) if c in NAMES]
    assert all(asked == ours for asked, ours in known)


def test_three_in_a_row_are_counted_as_two_pairs_and_merged_once():
    assert learn_merges("xaaa", 5) == [(b"a", b"a")] == librarys_merges("xaaa", 5)
    assert merge([b"a", b"a", b"a"], (b"a", b"a")) == [b"aa", b"a"]


def test_merges_stop_when_no_pair_occurs_twice():
    assert learn_merges("abcdef", 5) == []
    assert learn_merges("abab", 5) == [(b"a", b"b")]
