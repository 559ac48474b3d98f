"""Predict before measuring.

`predict(name, guess)` keeps the learner's guess before a cell measures; `.compare(measured)` then
says how good it was.
"""

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from . import journal
from .learner import AGAIN, ask, ask_learner, no_prediction

_BEGINS_AS_NUMBER = re.compile(r"\s*[-+≈~]?\s*\.?\d")


def predict(
    name: str, guess: Any = None, *, at: Sequence | None = None, unit: str = "",
    of: Sequence | None = None, words: Collection[str] | None = None,
):  # fmt: skip
    """Keep a prediction before anything is measured; return a `Prediction`.

    Arguments:
        name: "topic/what", for the progress file.
        guess: a number, a word, a list of them, or a function. `...` or None: no prediction yet.
        at: for a function, the arguments at which it is asked: `[(2, 100), (8, 100)]` or `[2, 8]`.
        unit: printed behind each number.
        of: what a list or a dictionary is asked for, one item each (for a dictionary, its keys):
            a guess with other items is not kept.
        words: the words to choose from; a guess with another word is not kept.
    """
    if callable(guess) and at is None:
        problem = f"You predicted a function, but a value is asked for: call it, then {AGAIN}."
    elif callable(guess):
        guess, problem = ask_learner(guess, at)
    else:
        problem = _missing(guess, at, unit, of, words)
    prediction = Prediction(name, None if problem else guess, at, unit)
    if prediction.made:
        journal.note_prediction(name, _plain(prediction.guess))
    print(problem or "Prediction kept. Run on and compare.")
    return prediction


class Prediction:
    """A guess that was made before the measurement. `made` says whether there is one."""

    def __init__(self, name: str, guess: Any, at: Sequence | None, unit: str):
        self.name, self.guess, self.unit = name, guess, unit
        self.at = None if at is None else list(at)

    @property
    def made(self) -> bool:
        """Whether the learner has predicted anything."""
        return self.guess is not None

    def compare(self, measured: Any, tolerance: float = 0.05) -> bool | None:
        """Print how good the prediction was; return whether it was right (None: not made).

        Arguments:
            measured: the true value, in the form of the guess; for a function its values at `at`,
                or a function that is asked at the same sizes.
            tolerance: the largest relative error of a number that counts as right.
        """
        if self.at is not None and callable(measured):
            measured = ask(measured, self.at)
        if not self.made:
            # A function is asked at hidden sizes: its values stay hidden until one is written.
            print(
                "No prediction was made."
                if self.at is not None
                else f"No prediction was made. Measured: {self._text(measured)}."
            )
            return None
        pairs = _pairs(self.guess, measured)
        if pairs is None:
            print(
                f"You predicted {self._form(self.guess)}. Measured: {self._form(measured)}. "
                f"These are not of the same form.{_unit_remark([(self.guess, 0)])}"
            )
            right, error = False, None
        else:
            judged = [_judge(guess, true, tolerance) for guess, true in pairs]
            right = all(good for good, _ in judged)
            errors = [off for _, off in judged if off is not None]
            error = max(errors) if errors else None
            print(self._verdict(measured, pairs, judged))
        journal.note_prediction(self.name, _plain(self.guess), right, error)
        return right

    def _verdict(self, measured: Any, pairs: list, judged: list) -> str:
        good = sum(ok for ok, _ in judged)
        wrong = [pair for pair, (ok, _) in zip(pairs, judged) if not ok]
        remark = _percent_remark(wrong) + _unit_remark(wrong)
        if self.at is not None:
            if good == len(pairs):
                return f"Right: your function agrees at all {len(pairs)} sizes."
            first = next(at for at, (ok, _) in enumerate(judged) if not ok)
            return (
                f"Right at {good} of {len(pairs)} sizes. At {self.at[first]} your function "
                f"gives {self._text(pairs[first][0])}; measured: {self._text(pairs[first][1])}."
                f"{remark}"
            )
        told = f"You predicted {self._text(self.guess)}; measured: {self._text(measured)}."
        if good == len(pairs):
            return f"Right. {told}"
        if len(pairs) > 1:
            return f"{good} of {len(pairs)} right. {told}{remark}"
        return f"Not quite. {told}{remark or _how_far(*pairs[0])}"

    def _form(self, value: Any) -> str:
        """Return the text of a value with its brackets."""
        value = _number(value)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self._form(it)}" for key, it in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._form, value)) + "]"
        return self._text(value)

    def _text(self, value: Any) -> str:
        value = _number(value)
        if isinstance(value, dict):
            return ", ".join(f"{key} {self._text(item)}" for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return ", ".join(self._text(item) for item in value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return str(value)
        number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        return f"{number} {self.unit}".rstrip()

    def __bool__(self) -> bool:
        return self.made

    def __repr__(self) -> str:
        return f"Prediction({self.name!r}, {self.guess!r})"

    def _ipython_display_(self) -> None:
        """Show nothing more when it is a cell's last line: `predict` has already spoken."""


def _missing(
    guess: Any, at: Sequence | None, unit: str, of: Sequence | None = None,
    words: Collection[str] | None = None,
) -> str:  # fmt: skip
    """Say why a guess is none; "" if it is one."""
    if of is not None and guess is not None and guess is not Ellipsis:
        problem = _other_form(guess, of)
        if problem:
            return f"{problem}, then {AGAIN}."
    if not _made(guess):
        return no_prediction("the ..." if at is None else "`raise NotImplementedError`")
    for item in _items(guess):
        text = isinstance(item, str)
        if words is not None and not (text and _same_word(item, words)):
            return f"You predicted {item!r}: choose among {', '.join(words)}, then {AGAIN}."
        if unit and text and _BEGINS_AS_NUMBER.match(item):
            form = "a list in brackets" if "," in item else "a number without a unit or quotes"
            return f"You predicted {item!r}: give {form}, then {AGAIN}."
    return ""


def _other_form(guess: Any, of: Sequence) -> str:
    """Say what is missing from a guess of one item each, or too much in it; "" if nothing is."""
    guess, asked = _number(guess), ", ".join(map(str, of))
    if isinstance(guess, dict):
        missing = [str(key) for key in of if key not in guess]
        more = [str(key) for key in guess if key not in of]
        told = f"Your prediction has nothing for {', '.join(missing)}" if missing else ""
        told += f"{' and' if told else 'Your prediction has'} {', '.join(more)} too" if more else ""
        return f"{told}: give one item each for {asked}" if told else ""
    if isinstance(guess, (list, tuple)) and len(guess) == len(of):
        return ""
    given = f"{len(guess)} items" if isinstance(guess, (list, tuple)) else f"{guess!r}"
    return f"You predicted {given}: give a list of {len(of)}, in brackets, for {asked}"


def _items(guess: Any) -> list:
    """The items of a list or of a dictionary, or the guess itself."""
    if isinstance(guess, dict):
        return list(guess.values())
    return list(guess) if isinstance(guess, (list, tuple)) else [guess]


def _same_word(item: str, words: Collection[str]) -> bool:
    return " ".join(item.casefold().split()) in {word.casefold() for word in words}


def _made(guess: Any) -> bool:
    if isinstance(guess, (list, tuple, dict)):
        items = guess.values() if isinstance(guess, dict) else guess
        return len(guess) > 0 and all(_made(item) for item in items)
    return guess is not None and guess is not Ellipsis


def _pairs(guess: Any, measured: Any) -> list[tuple[Any, Any]] | None:
    """Pair up a guess with the measurement, item by item; None if their forms differ.

    A list of one item counts as the item.
    """
    guess, measured = _number(guess), _number(measured)
    if not _alike(guess, measured):
        guess, measured = _single(guess), _single(measured)
    if isinstance(measured, dict):
        if not isinstance(guess, dict) or guess.keys() != measured.keys():
            return None
        return [(_single(guess[key]), _single(measured[key])) for key in measured]
    if isinstance(measured, (list, tuple)):
        if not isinstance(guess, (list, tuple)) or len(guess) != len(measured):
            return None
        return list(zip(map(_single, guess), map(_single, measured)))
    return None if isinstance(guess, (list, tuple, dict)) else [(guess, measured)]


def _alike(one: Any, other: Any) -> bool:
    lists = isinstance(one, (list, tuple)) and isinstance(other, (list, tuple))
    return lists and len(one) == len(other)


def _judge(guess: Any, true: Any, tolerance: float) -> tuple[bool, float | None]:
    """Return (right, relative error); words have no error and match without regard to case."""
    numbers = not isinstance(guess, (str, bool)) and not isinstance(true, (str, bool))
    try:
        guess_value, true_value = (float(guess), float(true)) if numbers else (None, None)
    except (TypeError, ValueError):
        numbers = False
    if not numbers:
        same = " ".join(str(guess).casefold().split()) == " ".join(str(true).casefold().split())
        return same, None
    if not math.isfinite(guess_value):
        return guess_value == true_value, None
    error = abs(guess_value - true_value) / max(abs(true_value), 1e-12)
    return error <= tolerance, error


def _percent_remark(wrong: list[tuple[Any, Any]]) -> str:
    """Say so where each wrong number is 100 × or 1/100 of the measured one."""
    for factor, words in ((100, "100 ×"), (0.01, "1/100 of")):
        if wrong and all(_is_multiple(guess, true, factor) for guess, true in wrong):
            whose = "Yours is" if len(wrong) == 1 else "Your wrong ones are"
            return f" {whose} {words} the measured value: percent, or a fraction of 1?"
    return ""


def _is_multiple(guess: Any, true: Any, factor: float) -> bool:
    if isinstance(guess, (str, bool)) or isinstance(true, (str, bool)):
        return False
    try:
        guess_value, wanted = float(guess), float(true) * factor
    except (TypeError, ValueError):
        return False
    return wanted != 0 and math.isclose(guess_value, wanted, rel_tol=1e-2)


def _unit_remark(wrong: list[tuple[Any, Any]]) -> str:
    """Say so where a text was given for a number."""
    for guess, true in wrong:
        true_is_number = not isinstance(true, (str, bool))
        if isinstance(guess, str) and true_is_number and _BEGINS_AS_NUMBER.match(guess):
            return f" {guess!r} is a text: give a number without a unit or quotes."
    return ""


def _how_far(guess: Any, true: Any) -> str:
    """Say the factor between two positive numbers: it often names the mistake."""
    try:
        ratio = float(guess) / float(true)
    except (TypeError, ValueError, ZeroDivisionError):
        return ""
    if not math.isfinite(ratio) or ratio <= 0:
        return ""
    return (
        f" Yours is {ratio:.3g} × the measured value."
        if ratio > 1
        else (f" The measured value is {1 / ratio:.3g} × yours.")
    )


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold."""
    value = _number(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _number(value: Any) -> Any:
    """Return a tensor or array as a plain number or list; anything else as it is."""
    return value.tolist() if hasattr(value, "shape") and hasattr(value, "tolist") else value


def _single(value: Any) -> Any:
    """Return the item of a list of one item; anything else as it is."""
    value = _number(value)
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = _number(value[0])
    return value
