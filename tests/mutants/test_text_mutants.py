"""Faults put back on the way from text to shards: its checks must find each one."""

import re
from dataclasses import dataclass

import pytest

from course_lib.data import cleaning, deduplication, pipeline
from tests import checks_data, checks_text


@dataclass(frozen=True)
class Fault:
    """A fault, put back by `put(monkeypatch)`, and the check that must see it."""

    name: str
    put: object
    check: object
    symptom: str = ""  # what the check's message must contain


def near_called_exact(put):
    verdict, kinds = deduplication.Verdict, {"near": "exact"}
    put.setattr(deduplication, "Verdict", lambda kind, *rest: verdict(kinds.get(kind, kind), *rest))


def the_last_one_kept(put):
    judge = deduplication.Deduplicator.judge

    def replaced(self, name, made):
        verdict = judge(self, name, made)
        if verdict.kind == "near":
            self._rows.execute("UPDATE texts SET name = ? WHERE name = ?", (name, verdict.of))
        return verdict

    put.setattr(deduplication.Deduplicator, "judge", replaced)


def candidates_not_verified(put):
    put.setattr(deduplication, "_jaccard", lambda one, other: 1.0)
    put.setattr(deduplication, "band_rows", lambda threshold: 2)


def only_equal_texts_found(put):
    put.setattr(deduplication.Deduplicator, "_nearest", lambda self, made: None)


def copies_of_the_first_dropped_with_it(put):
    put.setattr(pipeline, "KINDS", ("near", "exact", "new"))


def references_decoded_before_tags_go(put):
    tidy = cleaning._tidy
    put.setattr(cleaning, "_tidy", lambda text: tidy(cleaning.html.unescape(text)))


def everything_in_angle_brackets_is_a_tag(put):
    put.setattr(cleaning, "_shown", lambda tag: tag[2])


def tags_that_join_words(put):
    put.setattr(cleaning, "_TAGS", dict.fromkeys(cleaning._TAGS, ""))


def compatibility_forms_folded(put):
    normalize = cleaning.unicodedata.normalize
    put.setattr(cleaning.unicodedata, "normalize", lambda form, text: normalize("NFKC", text))


def references_decoded_twice(put):
    blanks = cleaning._blanks
    put.setattr(cleaning, "_blanks", lambda text: blanks(cleaning.html.unescape(text)))


def references_decoded_in_part(put):
    put.setattr(cleaning, "_REFERENCE", re.compile("&(?!lt)[a-z]+;"))


def anything_after_a_known_name_is_attributes(put):
    put.setattr(cleaning, "_TAG", re.compile(r"</?([a-z]+)(?:[\s/][^<>]*)?>([ \t]*)", re.I))


def blanks_before_references_only(put):
    blanks = cleaning._blanks
    put.setattr(cleaning, "_tidy", lambda text, tidy=cleaning._tidy: blanks(tidy(text)))
    put.setattr(cleaning, "_blanks", lambda text: text)


def indentation_lost(put):
    put.setattr(cleaning, "_GAP", re.compile(r"[ \t]{2,}|\t"))


def held_out_by_position(put):
    numbers = iter(range(10**9))
    put.setattr(pipeline, "drawn", lambda text, seed: next(numbers) % 3 * 2**62)


def held_out_text_trained_on_too(put):
    parts = pipeline.Split.parts

    def leaking(self, text, draw):
        found = parts(self, text, draw)
        return [*found, *((text, False) for text, out in found if out)]

    put.setattr(pipeline.Split, "parts", leaking)


def shown(_) -> None:
    checks_text.check_what_is_shown()


def escaped(_) -> None:
    checks_text.check_escaped_text_is_shown("<p> &lt; &amp;amp; <!-- x -->")


def code(_) -> None:
    checks_text.check_code_stays()


def twice(_) -> None:
    checks_text.check_cleaning_twice(["a&nbsp; <br>", "<b> <i>", *checks_text.PAGES])


FAULTS = [
    Fault("near called exact", near_called_exact, checks_text.check_verdicts),
    Fault("the last one kept", the_last_one_kept, checks_text.check_verdicts, "not kept"),
    Fault("candidates not verified", candidates_not_verified, checks_text.check_verdicts),
    Fault("near ones missed", only_equal_texts_found, checks_text.check_verdicts, "not found"),
    Fault("kinds swapped", copies_of_the_first_dropped_with_it, checks_text.check_first_is_kept),
    Fault("references before tags", references_decoded_before_tags_go, shown),
    Fault("all brackets are tags", everything_in_angle_brackets_is_a_tag, shown),
    Fault("words joined", tags_that_join_words, shown),
    Fault("NFKC", compatibility_forms_folded, shown),
    Fault("references decoded twice", references_decoded_twice, escaped, "becomes"),
    Fault("references decoded in part", references_decoded_in_part, escaped, "becomes"),
    Fault("code taken for tags", anything_after_a_known_name_is_attributes, code, "becomes"),
    Fault("blanks left behind", blanks_before_references_only, twice, "cleaned again"),
    Fault("indentation lost", indentation_lost, shown),
    Fault("held out by position", held_out_by_position, checks_data.check_split),
    Fault("held out and trained on", held_out_text_trained_on_too, checks_data.check_split),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed(fault, tmp_path, monkeypatch):
    fault.put(monkeypatch)
    with pytest.raises(AssertionError, match=fault.symptom or None):
        fault.check(tmp_path)
