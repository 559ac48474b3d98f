"""The check of "find exact and near duplicates": small groups of texts, one for each mistake."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from numbers import Integral
from typing import Any, NamedTuple

from course_lib.data.deduplication import jaccard

from ..learner import learners_frame, learners_line
from .exercise import WrongAnswer

THRESHOLD = 0.8
Verdict = tuple[str, int | None]


def find_duplicates(texts: Sequence[str], threshold: float) -> list[Verdict]:
    """For each text ("new", None), ("exact", i) or ("near", i), where text i was kept.

    Every text is compared with all kept ones: right, but only for few texts. `Deduplicator` finds
    the same ones in an index.
    """
    verdicts: list[Verdict] = []
    kept: dict[str, int] = {}  # text -> its place, in order
    for place, text in enumerate(texts):
        near = (i for other, i in kept.items() if jaccard(other, text) >= threshold)
        if text in kept:
            verdicts.append(("exact", kept[text]))
        elif (first := next(near, None)) is not None:
            verdicts.append(("near", first))
        else:
            verdicts.append(("new", None))
            kept[text] = place
    return verdicts


def grade_deduplication(answer: Callable[[list[str], float], list[Verdict]]) -> None:
    """Ask the answer about groups of texts, each made to show one mistake."""
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")
    for group in groups():
        given = _asked(answer, group)
        _must_be_verdicts(given, len(group.texts))
        given = [(kind, of) for kind, of in given]
        right = find_duplicates(group.texts, group.threshold)
        if given != right:
            place = next(i for i, (one, other) in enumerate(zip(given, right)) if one != other)
            raise WrongAnswer(_told(group, place, given[place], right[place]))


def _asked(answer: Callable, group: "Group") -> Any:
    """Ask the answer; say in words what `jaccard` takes."""
    try:
        return answer(list(group.texts), group.threshold)
    except AttributeError as error:
        if learners_frame(error) is None or "attribute 'lower'" not in str(error):
            raise
        given = str(error).split("'")[1]
        raise WrongAnswer(
            f"`jaccard(a, b)` takes two texts; yours gave it a {given}. It cuts the shingles "
            f"itself: give it the texts as they are.\n{learners_line(error)}"
        ) from error


class Group(NamedTuple):
    """Texts that are looked at together, and what they are."""

    what: str
    texts: tuple[str, ...]
    threshold: float = THRESHOLD


@cache
def groups() -> tuple[Group, ...]:
    """The hidden texts; the tests hold that their similarities are what the words say."""
    story, poem, header = _words(1, 60), _words(2, 60), _words(3, 48)
    first, second = _edited(story, 30), _edited(story, 30, 45)
    above, below = _words(13, 60), _words(8, 60)  # MinHash puts them on the other side of 0.8
    notice = " ".join(header)
    return (
        Group("copies", (" ".join(story), " ".join(poem), " ".join(story), " ".join(story))),
        Group("an edited copy", (" ".join(poem), _edited(poem, 59), " ".join(story))),
        Group("a copy in capitals", (" ".join(poem), " ".join(poem).upper(), " ".join(poem))),
        Group(
            "a common license header",
            (
                f"{notice} {' '.join(_words(4, 90))}",
                f"{notice} {' '.join(_words(5, 9))}",
                f"{notice} {' '.join(_words(6, 40))}",
            ),
        ),
        Group("texts that share three quarters", (" ".join(story), _edited(story, 20, 40, 41))),
        Group("a chain of edits", (" ".join(story), first, second)),
        Group(_COPY, (" ".join(poem), *[" ".join(poem).upper()] * 2)),
        Group(_DROPPED, (" ".join(poem), " ".join(poem), " ".join(story), first)),
        Group(_BETWEEN, (" ".join(story), _edited(story, 30, 58), first)),
        Group(_LOWER, (" ".join(story), _edited(story, 20, 40, 41)), threshold=0.6),
        Group(_HALF, ("a b c d e f x", "a b c d e f y"), threshold=0.5),
        Group(
            _CLOSE,
            (" ".join(above), _edited(above, 30), " ".join(below), _edited(below, 30, 57)),
        ),
    )


_COPY = "a copy of a dropped text"
_DROPPED = "texts behind a dropped one"
_BETWEEN = "a text between two kept ones"
_LOWER = "three quarters shared, with the threshold 0.6"
_HALF = "a similarity of exactly 0.5, with the threshold 0.5"
_CLOSE = "similarities close to the threshold"


def _words(seed: int, count: int) -> list[str]:
    """Words that occur nowhere else."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghijklmnoprstuvw", k=6)) for _ in range(count)]


def _edited(words: list[str], *places: int) -> str:
    return " ".join("edited" if place in places else w for place, w in enumerate(words))


def _must_be_verdicts(given: object, texts: int) -> None:
    form = '("new", None), ("exact", i) or ("near", i), i the place of a text in the list'
    if not isinstance(given, (list, tuple)):
        kind = "nothing" if given is None else type(given).__name__
        raise WrongAnswer(f"return a list with one verdict a text, {form}; yours returned {kind}.")
    for verdict in given:
        if not _in_form(verdict):
            raise WrongAnswer(f"each verdict is {form}; one of yours is {repr(verdict)[:40]}.")
    if len(given) != texts:
        raise WrongAnswer(f"return one verdict a text: {texts}; yours returned {len(given)}.")


def _in_form(verdict: object) -> bool:
    if not isinstance(verdict, (list, tuple)) or len(verdict) != 2:
        return False
    kind, of = verdict
    if isinstance(kind, str) and kind in ("exact", "near"):
        return isinstance(of, Integral) and not isinstance(of, bool)
    return isinstance(kind, str) and kind == "new" and of is None


def _told(group: Group, place: int, given: Verdict, right: Verdict) -> str:
    """Name the mistake behind a wrong verdict."""
    told = f"{group.what}: text {place} is {_said(right)}, yours says {_said(given)}. "
    (kind, of), (wanted, _) = given, right
    if of == place:
        return told + "It is compared with itself. Compare with earlier texts only."
    if of is not None and of > place:
        return told + (
            "The last copy is kept. Keep the first: a text is judged by what came before it, so "
            "that the result does not depend on how many follow."
        )
    if reason := _reason_of_the_group(group, place, given, right):
        return told + reason
    if kind != wanted and {kind, wanted} == {"exact", "near"}:
        return told + (
            "Exact means that all characters are equal; near means that the texts differ and "
            "their shingles are alike. Ask for exact first."
        )
    return told + _facts(group, place, given, right)


def _reason_of_the_group(group: Group, place: int, given: Verdict, right: Verdict) -> str:
    """The mistake that this group was made for, where the verdict shows it; else ""."""
    (kind, of), (wanted, first), what = given, right, group.what
    if what == _COPY and kind == "exact" and wanted == "near":
        return "Text 1 is dropped: it must not be compared with, not even for equal texts."
    verdicts = find_duplicates(group.texts, group.threshold)
    kept = [i for i, (it, _) in enumerate(verdicts) if it == "new"]
    if kind == wanted and first in kept and of == kept.index(first):
        return (
            "You name the place in a list of the kept texts. A text that is dropped keeps its "
            "place, too: i is the place in `texts`."
        )
    if what == "a common license header" and (kind, wanted) == ("near", "new"):
        return (
            "A license header does not make two texts the same. Divide the common shingles by all "
            "shingles of both texts, not by those of the shorter text, and compare whole texts."
        )
    if what == "texts that share three quarters" and (kind, wanted) == ("near", "new"):
        return (
            "Their Jaccard similarity is below the threshold. Divide the common shingles by those "
            "of the union: each shingle counts once, not once for each text."
        )
    if what == "a chain of edits" and (kind, of, wanted) == ("near", 1, "new"):
        return (
            "It is like a text that was dropped, but not like any text that is kept. Compare with "
            "kept texts only; otherwise a chain of small edits removes a different text."
        )
    return ""


def _facts(group: Group, place: int, given: Verdict, right: Verdict) -> str:
    """What is true of the two texts: it shows which comparison went wrong, whatever the reason."""
    (kind, of), (wanted, first) = given, right
    if wanted == "exact":
        return f"All its characters are those of text {first}, which is kept."
    if kind == "exact":
        return f"It differs from text {of}: exact means that all characters are equal."
    if wanted == "new" or (wanted == kind and of != first):
        value = jaccard(group.texts[of], group.texts[place])
        told = f"`jaccard` of the texts {of} and {place} is {value:.2f}, the threshold "
        told += f"{group.threshold}"
        if value >= group.threshold:
            return (
                f"{told}. Several are near. Name the first of them that is kept, not the nearest."
            )
        return f"{told}: it is not reached. {_estimates(group)}".rstrip()
    value = jaccard(group.texts[first], group.texts[place])
    told = (
        f"`jaccard` of the texts {first} and {place} is {value:.2f}, which reaches the threshold "
    )
    told += f"{group.threshold}. "
    if group.what == _HALF:
        return told + "Reaching it is enough: take >=, and the threshold given."
    if group.what == _LOWER:
        return told + "Compare with the threshold that your function is given, not with 0.8."
    return told + (
        _estimates(group)
        or (
            "An edited copy is a near duplicate: compare the shingles of each text with those of "
            "every kept text."
        )
    )


def _estimates(group: Group) -> str:
    near = "Take `jaccard` itself: MinHash only estimates the similarity, and may be off by 0.1."
    return near if group.what == _CLOSE else ""


def _said(verdict: Verdict) -> str:
    return "new" if verdict[0] == "new" else f"{verdict[0]} of {verdict[1]}"
