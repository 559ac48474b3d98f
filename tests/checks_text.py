"""Checks of the way from text to shards, shared by its tests and by its mutants."""

import hashlib
import html
import os
import random
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

from course_lib.data import (
    DataConfig,
    Deduplicator,
    Prepared,
    Source,
    TokenShards,
    clean,
    load_tokenizer,
    prepare,
)

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "rl", "st")]
LICENCE = "Permission is hereby granted free of charge to any person obtaining a copy. " * 3


def small_corpus(folder: Path) -> Path:
    """A folder of ten small documents, in a folder that is to hold the cache too."""
    texts = folder / "texts"
    texts.mkdir()
    for i in range(10):
        (texts / f"{i}.txt").write_text(
            f"Scene {i}.\n" + f"Enter {('king', 'queen', 'fool')[i % 3]} {i}.\n" * 20
        )
    return texts


def configure(texts: Path, **options) -> DataConfig:
    cache = str(texts.parent / "cache")
    options = {"sequence_length": 16, "held_out": 0.2, "cache": cache} | options
    return DataConfig(corpus=str(texts), **options)


def words(count: int, seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def nearly(text: list[str], changed: int) -> list[str]:
    """The words of a text, of which a few in a row at its end are others."""
    kept = len(text) - changed
    return [*text[:kept], *(f"{word}{text[0]}" for word in text[kept:])]


def messy_corpus(folder: Path, documents: int = 60, size: int = 60) -> Path:
    """A folder of HTML, with exact copies, near copies, empty pages, all of them known."""
    folder.mkdir()
    for i in range(documents):
        text = words(size, i)
        if i % 10 == 7:
            text = words(size, i - 3)  # exact: i - 3
        if i % 10 == 8:
            text = nearly(words(size, i - 6), 3)  # near: i - 6
        page = "" if i % 10 == 9 else f"<p>{' '.join(text)} &amp; so on.</p>\r\n"
        (folder / f"{i:03d}.txt").write_text(page)
    return folder


def files(prepared: Prepared) -> dict[str, str]:
    """Every file of a preparation with a hash of its content."""
    return {
        path.relative_to(prepared.directory).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in sorted(prepared.directory.rglob("*"))
        if path.is_file()
    }


def documents(shards: TokenShards, tokenizer) -> list[str]:
    """The texts in shards."""
    ids = shards.read(0, len(shards)).tolist()
    bounds = [*shards.starts.tolist(), len(ids)]
    assert all(ids[start] == tokenizer.end for start in bounds[:-1])
    return [tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(bounds)]


def all_texts(prepared: Prepared) -> list[list[str]]:
    """The training and the held-out texts of a preparation of one corpus."""
    return sides(prepared, prepared.sources[0])


def sides(prepared: Prepared, source: Source) -> list[list[str]]:
    """The training and the held-out texts of one source."""
    tokenizer = load_tokenizer(prepared.tokenizer)
    folders = [source.train] + [source.held_out] * (source.held_out is not None)
    return [documents(TokenShards(folder), tokenizer) for folder in folders]


# ------------------------------------------------------------------------------ de-duplication


def check_verdicts(folder: Path) -> None:
    """Equal, nearly equal and merely related texts are told apart, and the first one is kept."""
    one, other = words(200, 1), words(200, 2)
    with Deduplicator(folder / "index") as index:

        def look(name: str, text: list[str] | str) -> tuple:
            return index.look(name, text if isinstance(text, str) else " ".join(text))[:2]

        assert look("first", one) == ("new", None)
        assert look("other", other) == ("new", None)
        assert look("copy", one) == ("exact", "first")
        assert look("edited", nearly(one, 5)) == ("near", "first"), "near copies are not found"
        assert look("edited again", nearly(one, 6)) == ("near", "first"), "the first is not kept"
        assert look("half", nearly(one, 100)) == ("new", None), "related texts are called near"
        assert look("spelled", " ".join(one).upper()) == ("near", "first"), "near is called exact"
        for name, seed in (("a.py", 3), ("b.py", 4)):
            kept = look(name, LICENCE + " ".join(words(60, seed)))
            assert kept == ("new", None), "texts are dropped for a licence that they share"


def check_first_is_kept(folder: Path) -> None:
    """Of repeated documents the first one is in the shards, whatever became of the others."""
    texts = [" ".join(words(100, 1)), "", " ".join(nearly(words(100, 1), 2)), " ".join(words(9, 5))]
    texts += [texts[0], texts[3]]
    source = folder / "texts"
    source.mkdir()
    for i, text in enumerate(texts):
        (source / f"{i}.txt").write_text(text)
    prepared = prepare(configure(source, deduplicate="near", held_out=0.0), 300)
    (kept,) = all_texts(prepared)
    assert kept == [texts[0], texts[3]], "another than the first one was kept"
    found = {
        name: prepared.counts[name] for name in ("documents", "empty", "exact", "near", "kept")
    }
    assert found == {"documents": 6, "empty": 1, "exact": 2, "near": 1, "kept": 2}


# ------------------------------------------------------------------------------------- cleaning


def check_cleaning_twice(texts: list[str]) -> None:
    """What a second cleaning does not take for markup, it leaves alone."""
    for text in texts:
        once = clean(text)
        if "<" not in once and "&" not in once:
            assert clean(once) == once, f"cleaned again, {once!r} becomes {clean(once)!r}"


def check_escaped_text_is_shown(text: str) -> None:
    """Tidy text that a page shows is what cleaning gives, markup and references in it too."""
    page = html.escape(text)
    assert clean(page) == text, f"{page!r} becomes {clean(page)!r}"


def check_code_stays() -> None:
    for code in CODE:
        assert clean(code) == code, f"{code!r} becomes {clean(code)!r}"


def check_what_is_shown() -> None:
    """A reader of the cleaned text reads what the page showed."""
    for page, text in PAGES.items():
        assert clean(page) == text, f"{page!r} becomes {clean(page)!r}, expected is {text!r}"


PAGES = {
    "<p>One</p> <p>two<br>three</p>": "One\n\ntwo\nthree",
    "Use <code>a &lt; b &amp;&amp; c</code> <b>now</b>.": "Use a < b && c now.",
    "if a < b and c > d: vector<T>, <bucket-name>": "if a < b and c > d: vector<T>, <bucket-name>",
    "write &lt;p&gt; for a paragraph": "write <p> for a paragraph",
    "write &amp;lt;p> for &lt;p>": "write &lt;p> for <p>",
    "<?xml version='1.0'?>\n<!DOCTYPE html PUBLIC '-//W3C//DTD'><HTML lang=en>x</HTML>": "x",
    "<input type=checkbox checked data-sort DISABLED>yes<br/><img alt='' src=/a?b=c />": "yes",
    "<i title='2 > 1' class=\"a<b\">so</i > <b\nid = x>it</b> is": "so it is",
    "<!-- gone --><script>if (a < b) x()</script><style>p {}</style>kept": "kept",
    "<ul><li>a</li>\n<li>b</li></ul>": "a\n\nb",
    "def f():\n    return  1 \n\n\n\n# end\t!": "def f():\n    return 1\n\n# end !",
    "cafe\u0301 10\u00b2 \ufb01": "caf\u00e9 10\u00b2 \ufb01",
    "a\u00a0b\u200bc\u00add\ufeff\r\ne\x00\x07f": "a bcd\nef",
    "\U0001f468\u200d\U0001f469": "\U0001f468\u200d\U0001f469",
    "&#8217; &#x2014; &euro; &nosuch; &#150;": "\u2019 \u2014 \u20ac &nosuch; \u2013",
    "a<a href='x?a=1&b=2' title='2 &gt; 1'>link</a> <unknown>tag</unknown>": (
        "alink <unknown>tag</unknown>"
    ),
    " \n\t ": "",
}
CODE = [
    "if (a<b && c>d) {}",
    "if a<b and c>d: a = b",
    "x = a<i or 7>a; y = b</2>/a",
    "std::map<std::string, U> m; List<?> l; Map<String, ?> n;",
    "template<class T> f<i == 1, std::size_t>(a<b, c>(d))",
    "a<!b && c>d; x <= y << 2; <!-- and <?",
    "PUT /<bucket>/<key-name> <user@host.org> <https://a.b>",
    "a &&b; x & y; &self; AT&T; ?a=1&copy=2",
]


# ------------------------------------------------------------------------------------ processes


def loaded_torch(_: object) -> bool:
    """For a worker to say."""
    import sys

    return any(name.partition(".")[0] == "torch" for name in sys.modules)


def check_counts(prepared: Prepared, total: int) -> None:
    """The counts of a messy corpus are those that it was made with."""
    tenth = total // 10
    expected = {"documents": total, "empty": tenth, "exact": tenth, "near": tenth}
    assert Counter(expected) == Counter({n: prepared.counts[n] for n in expected})
    assert prepared.counts["kept"] == total - 3 * tenth


KILLER = """
import os, sys
from pathlib import Path
from course_lib.data import pipeline, preparation, shards
from tests.checks_text import configure

moments, last = 0, int(sys.argv[2])

def count(function):
    def counted(*arguments, **options):
        global moments
        moments += 1
        if moments == last:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return counted

pipeline.CHUNK = 4_000
for owner, name in ((Path, "replace"), (Path, "rename"), (Path, "hardlink_to"), (Path, "open"),
                    (pipeline.Deduplicator, "note"), (pipeline.shutil, "rmtree"),
                    (pipeline.np, "savez")):  # by then the file is open
    setattr(owner, name, count(getattr(owner, name)))
config = configure(Path(sys.argv[1]), clean=True, deduplicate="near")
while True:  # each attempt gets one step further than the last
    moments = 0
    child = os.fork()
    if not child:
        preparation.prepare(config, 300)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        print(last)
        break
    assert os.WIFSIGNALED(status), f"attempt {last} failed by itself"
    last += int(sys.argv[3])
"""


def die(work: object, task: object) -> None:
    """As the kernel ends a process when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
