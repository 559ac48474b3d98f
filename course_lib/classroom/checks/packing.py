"""How the exercise "pack whole documents" is checked, and its model answer."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import index
from typing import Any

import torch

from course_lib.data import NO_TARGET
from course_lib.model import ModelConfig, Transformer, build

from .exercise import WrongAnswer

Row = dict[str, list[int]]  # tokens, labels, positions, documents: `length` numbers each

FIELDS = ("tokens", "labels", "positions", "documents")


def pack(documents: Sequence[list[int]], length: int) -> list[Row]:
    """Put whole documents into rows of `length` positions, in order, as many as fit in each.

    documents: token ids of each, at most `length`. Nothing marks their ends, so a document's last
    token has no target. Returns rows in which no document sees, continues or predicts another.

    The library packs a stream instead (`TokenDataset`, packing "documents"): it cuts documents at
    a window's end, and a token that opens each document is the target of the one before.
    """
    rows: list[Row] = []
    for number, tokens in enumerate(documents):
        if not rows or len(rows[-1]["tokens"]) + len(tokens) > length:
            rows.append({name: [] for name in FIELDS})
        rows[-1]["tokens"] += tokens
        rows[-1]["labels"] += [*tokens[1:], NO_TARGET]
        rows[-1]["positions"] += range(len(tokens))
        rows[-1]["documents"] += [number] * len(tokens)
    for row in rows:
        for name, filler in zip(FIELDS, (0, NO_TARGET, 0, -1)):
            row[name] += [filler] * (length - len(row[name]))
    return rows


_LENGTHS = (12, 15)
_SIZES = (5, 4, 3, 6, 1, 4, 12, 2, 7)  # full rows, a row with room left, one token, a whole row


def _examples() -> list[list[int]]:
    """Documents of distinct tokens, so that each token of a row tells where it comes from."""
    tokens = iter(range(1, 1 + sum(_SIZES)))
    return [[next(tokens) for _ in range(size)] for size in _SIZES]


def grade_packing(answer: Callable[[Sequence[list[int]], int], list[Row]]) -> None:
    """Pack documents; compare labels, positions and, through a model, who sees whom."""
    must_be_a_function(answer)
    documents = _examples()
    for length in _LENGTHS:
        given = answer([list(tokens) for tokens in documents], length)
        _check(_in_form(given, length), documents, length)


def must_be_a_function(answer: Any) -> None:
    """Raise WrongAnswer for a value and for a class, whose call makes an object."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    if isinstance(answer, type):
        raise WrongAnswer(f"give a function; yours is the class {answer.__name__}.")


def as_whole(number: Any) -> int | None:
    """A whole number of Python, numpy or torch as int; None for anything else."""
    try:
        return None if isinstance(number, bool) else index(number)
    except TypeError:
        return None


def _check(rows: list[Row], documents: list[list[int]], length: int) -> None:
    """All that makes rows of the right form a right answer."""
    places = _places(rows, documents)
    _check_order(places)
    _check_rows(rows, documents, places, length)
    for tokens, (row, first) in zip(documents, places):
        _check_labels(rows[row]["labels"], tokens, first, rows[row]["tokens"])
    _check_fillers(rows, documents, places)
    for tokens, (row, first) in zip(documents, places):
        _check_positions(rows[row]["positions"], tokens, first)
    _check_attention(rows, documents, places)


def _in_form(rows: Any, length: int) -> list[Row]:
    """Raise WrongAnswer unless the answer is a list of rows with four lists of whole numbers."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        what = "nothing" if rows is None else type(rows).__name__
        what = "an empty list" if rows == [] else what
        raise WrongAnswer(f"return a list of rows, each a dict; yours: {what}.")
    for number, row in enumerate(rows):
        if missing := [name for name in FIELDS if name not in row]:
            raise WrongAnswer(f"row {number} has no {', '.join(missing)}.")
    return [
        {name: _numbers(row[name], f"row {number}: {name}", length) for name in FIELDS}
        for number, row in enumerate(rows)
    ]


def _numbers(given: Any, where: str, length: int) -> list[int]:
    """One field of a row as a list of int."""
    if isinstance(given, str) or not hasattr(given, "__len__"):
        what = "None" if given is None else type(given).__name__
        raise WrongAnswer(f"{where} must be a list of {length} whole numbers; yours: {what}.")
    if len(given) != length:
        raise WrongAnswer(
            f"{where} has {len(given)} numbers, but a row has {length} positions. Fill it up, and "
            "begin a new row before it is too long."
        )
    for number in given:
        if as_whole(number) is None:
            raise WrongAnswer(f"{where} must hold whole numbers (int); one of yours is {number!r}.")
    return [index(number) for number in given]


def _places(rows: list[Row], documents: list[list[int]]) -> list[tuple[int, int]]:
    """The (row, first position) of each document, which must lie there whole."""
    stand = [(t, (r, p)) for r, row in enumerate(rows) for p, t in enumerate(row["tokens"]) if t]
    where = dict(stand[::-1])  # the first place of each token
    places = []
    for number, tokens in enumerate(documents):
        told = f"document {number} ({_tokens(len(tokens))}) "
        if not any(token in where for token in tokens):
            rest = [token for later in documents[number:] for token in later]
            last = "" if any(token in where for token in rest) else " Is the last row kept?"
            raise WrongAnswer(f"{told}is in no row.{last}")
        row, first = where.get(tokens[0], (0, 0))
        if rows[row]["tokens"][first : first + len(tokens)] != tokens:
            raise WrongAnswer(
                f"{told}does not lie whole in one row. When it does not fit in what is left of a "
                "row, begin a new row for it."
            )
        places.append((row, first))
    for row, at in _fillers(rows, documents, places):
        if (token := rows[row]["tokens"][at]) and [t for t, _ in stand].count(token) > 1:
            raise WrongAnswer(
                f"row {row}, position {at}: the token {token} stands in the rows twice. Each "
                "document belongs in one row, and the rest of a row is filled with tokens 0."
            )
        if token:
            raise WrongAnswer(
                f"row {row}, position {at} is filler, but has the token {token}. Fill up with "
                "tokens 0."
            )
    return places


def _check_rows(rows: list[Row], documents: list[list[int]], places, length: int) -> None:
    """Documents lie in order: is each in the first row that has room for it?"""
    if empty := [number for number, row in enumerate(rows) if not any(row["tokens"])]:
        raise WrongAnswer(f"row {empty[0]} holds no document. Begin a row only for a document.")
    if len(rows) == len(documents):
        raise WrongAnswer(
            f"each document has a row of its own: {len(rows)} rows, mostly filler. Put the next "
            f"document into the same row while it fits; {len(pack(documents, length))} rows are "
            "enough."
        )
    for number, ((row, first), after) in enumerate(pairwise(places), start=1):
        left = length - first - len(documents[number - 1])
        size = len(documents[number])
        if after[0] > row and size <= left:
            exactly = " A document that fills a row exactly fits." if size == left else ""
            raise WrongAnswer(
                f"document {number} ({_tokens(size)}) begins a new row, but row {row} has "
                f"room for {_tokens(left)}.{exactly} Begin a new row only when the next document "
                "does not fit."
            )


def _check_order(places: list[tuple[int, int]]) -> None:
    for number, (before, after) in enumerate(pairwise(places)):
        if after < before:
            raise WrongAnswer(
                f"document {number + 1} lies before document {number}. Take the documents in "
                "order: look only at the last row, and begin a new one when it has no room."
            )


def _check_labels(labels: list[int], tokens: list[int], first: int, row: list[int]) -> None:
    """Labels of one document: each token's successor, and none for the last."""
    given = labels[first : first + len(tokens)]
    if given == [*tokens[1:], NO_TARGET]:
        return
    told = f"a document with the tokens {_listed(tokens)} has the labels {_listed(given)}. "
    after = [*row[first + 1 :], 0][len(tokens) - 1]
    if len(tokens) > 1 and given[:-1] == tokens[:-1]:
        raise WrongAnswer(told + "Labels are not shifted: the label of a token is the next token.")
    if len(tokens) > 2 and given[:-2] == tokens[2:]:
        raise WrongAnswer(told + "Labels are shifted twice.")
    if given[:-1] != tokens[1:]:
        if len(tokens) > 1 and given[0] == NO_TARGET and given[1:-1] == tokens[2:]:
            raise WrongAnswer(
                f"{told}-100 stands one place too far: the first token of a document has a "
                "target, the last token has none."
            )
        raise WrongAnswer(f"{told}Expected: {_listed([*tokens[1:], NO_TARGET])}.")
    if given[-1] == after and after:
        raise WrongAnswer(
            f"{told}The last one crosses the boundary: {after} is the first token of the next "
            "document. The last token of a document has no target: -100."
        )
    raise WrongAnswer(
        f"{told}The last token of a document has no target. Its label must be -100; yours: "
        f"{given[-1]}."
    )


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _fillers(rows: list[Row], documents, places) -> list[tuple[int, int]]:
    """The (row, position) of everything that belongs to no document."""
    taken = {
        (row, first + at) for tokens, (row, first) in zip(documents, places)
        for at in range(len(tokens))
    }  # fmt: skip
    everywhere = [(row, at) for row, it in enumerate(rows) for at in range(len(it["tokens"]))]
    return [place for place in everywhere if place not in taken]


def _check_fillers(rows: list[Row], documents, places) -> None:
    for row, at in _fillers(rows, documents, places):
        if rows[row]["labels"][at] != NO_TARGET:
            raise WrongAnswer(
                f"row {row}, position {at} is filler, but has the label {rows[row]['labels'][at]}. "
                "The loss must not train on filler: its label is -100."
            )
        position, length = rows[row]["positions"][at], len(rows[row]["positions"])
        if not 0 <= position < length:
            raise WrongAnswer(
                f"row {row}, position {at} is filler, but has the position {position}. The model "
                f"looks up filler too, so give it one from 0 to {length - 1}, for example 0."
            )


def _check_positions(positions: list[int], tokens: list[int], first: int) -> None:
    given = positions[first : first + len(tokens)]
    if given == list(range(len(tokens))):
        return
    told = f"a document of {len(tokens)} tokens has the positions {_listed(given)}. "
    if given == list(range(first, first + len(tokens))):
        raise WrongAnswer(
            f"{told}They are not reset: each document counts from 0, as if it were alone."
        )
    if given == list(range(1, len(tokens) + 1)):
        raise WrongAnswer(f"{told}Positions count from 0.")
    raise WrongAnswer(f"{told}Expected: {_listed(list(range(len(tokens))))}.")


def _check_attention(rows: list[Row], documents, places) -> None:
    """Change one document and look at the logits of the others; then at each one alone."""
    logits = [_logits(row["tokens"], row["positions"], row["documents"]) for row in rows]
    for number, (row, first) in enumerate(places):
        changed = list(rows[row]["tokens"])
        end = first + len(documents[number])
        changed[first:end] = [60 - token for token in documents[number]]
        moved = _logits(changed, rows[row]["positions"], rows[row]["documents"]) - logits[row]
        for other, (other_row, start) in enumerate(places):
            if other_row == row and other != number:
                most = moved[start : start + len(documents[other])].abs().max().item()
                if most > 1e-9:
                    raise WrongAnswer(_leak(rows[row], number, other, start, most))
    for number, (row, first) in enumerate(places):
        size = len(documents[number])
        alone = _logits(documents[number], range(size), [0] * size)
        if (logits[row][first : first + size] - alone).abs().max() > 1e-9:
            raise WrongAnswer(
                f"document {number} gets other logits in its row than alone: not all of its "
                "tokens have the same number in `documents`, so it does not see itself."
            )


def _leak(row: Row, number: int, other: int, start: int, most: float) -> str:
    told = (
        f"documents {number} and {other} lie in one row. A change of document {number} moves the "
        f"logits of document {other} by {most:.1f}: attention leaks. "
    )
    numbers = row["documents"]
    if len(set(numbers)) == 1:
        return told + "All tokens of the row have the same number in `documents`."
    if (
        start + 1 < len(numbers)
        and row["positions"][start + 1]
        and numbers[start] != numbers[start + 1]
    ):
        return told + "Their numbers in `documents` change at another place than the tokens do."
    return told + (
        f"Both have the number {numbers[start]} in `documents`. A number may not come again in a "
        "row."
    )


@lru_cache(maxsize=1)
def _model() -> Transformer:
    """A tiny model with learned positions and weights large enough to show a leak."""
    config = ModelConfig(2, 32, 4, vocab=64, context=64)
    model = build(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3 / parameter.std())
    return model


def _logits(tokens, positions, documents) -> torch.Tensor:
    """Logits of one row: (sequence, vocab)."""
    tensors = (torch.tensor([list(part)]) for part in (tokens, positions, documents))
    tokens, positions, documents = tensors
    with torch.no_grad():
        return _model()(tokens, positions=positions, documents=documents)[0]
