"""Cleaning: HTML and untidy Unicode become plain text, with nothing guessed.

What a page shows stays, how it was marked up goes: tags, comments, scripts, character references,
control characters, blanks at line ends. A tag is what HTML's grammar lets an author write: the
name of a known element, attributes with values, and without a value only attributes that need
none (https://html.spec.whatwg.org/multipage/syntax.html). So `a<b && c>d`, `vector<T>` and
`<bucket-name>` stay; only code that is a tag to the letter, as `vector<object>` is, loses it.
Text is composed (NFC), not folded (NFKC turns 10² into 102).

References are decoded once, after the tags are gone, so escaped markup becomes the text that it
shows: `&lt;p&gt;` is `<p>`. Therefore clean once: a second time, `<p>` is a tag. Bytes that are no
UTF-8 never come this far: corpora refuse them by file and place, since whoever replaces them by
U+FFFD or drops them has lost the text for good.
"""

import html
import re
import unicodedata

# What HTML and the documentation of AWS use, by what it becomes.
_PARAGRAPHS = (
    "address article aside blockquote center div dl fieldset figure footer form h1 h2 h3 h4 h5 h6"
    " header hr important main nav note ol p pre section table ul"
)
_LINES = "body br caption dd dt figcaption head html li option tbody td tfoot th thead title tr"
_INLINE = (
    "a abbr acronym b bdi bdo big button cite code col colgroup data del dfn em filename"
    " font fullname i iframe img input ins kbd label legend link map mark meta object param picture"
    " q replaceable s samp script select small source span strike strong style sub summary sup svg"
    " template textarea time tt u var video wbr xhtml zonbook"
)
_TAGS = dict.fromkeys(_PARAGRAPHS.split(), "\n\n") | dict.fromkeys(_LINES.split(), "\n")
_TAGS |= dict.fromkeys(_INLINE.split(), "")

_HIDDEN = [
    (re.compile(opening, re.I), re.compile(closing, re.I))
    for opening, closing in (
        ("<!--", "-->"),
        (r"<(?:!doctype|\?xml)\s", ">"),
        (r"<script\b[^<>]{0,2000}>", r"</script\s{0,9}>"),
        (r"<style\b[^<>]{0,2000}>", r"</style\s{0,9}>"),
    )
]
_NO_VALUE = (  # attributes that need none
    "allowfullscreen|async|autofocus|autoplay|checked|compact|controls|default|defer|disabled|"
    "download|formnovalidate|hidden|inert|ismap|itemscope|loop|multiple|muted|nomodule|noshade|"
    r"novalidate|nowrap|open|playsinline|readonly|required|reversed|selected|data-[\w-]+"
)
_VALUE = r"""(?:"[^"]{0,2000}"|'[^']{0,2000}'|[^\s"'<>]++)"""
_ATTRIBUTE = rf"(?:[a-z_:@][\w:.-]*+\s*+=\s*+{_VALUE}|(?:{_NO_VALUE})(?=[\s/>]))"
_TAG = re.compile(rf"</?([a-z][a-z0-9]*+)(?:\s++{_ATTRIBUTE})*+\s*+/?>([ \t]*+)", re.I)
_REFERENCE = re.compile(r"&(?:#[0-9]{1,8}|#[xX][0-9a-fA-F]{1,8}|[a-zA-Z][a-zA-Z0-9]{1,31});")

_UNSEEN = re.compile(r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x9f\xad\u200b\u2060\ufeff\ufff9-\ufffb]")
_SPACES = re.compile(r"[\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_GAP = re.compile(r" (?<=\S )[ \t]+|\t(?<=\S\t)[ \t]*")  # within lines; indentation is code
_LINE_END = re.compile(r"(?<![ \t])[ \t]+\n")
_EMPTY_LINES = re.compile(r"\n{3,}")


def clean(text: str) -> str:
    """Plain text of a text that may hold HTML; text without markup and spare blanks stays.

    Paragraphs are set apart by one empty line, other blocks by a new line. Indentation stays,
    other blanks in a row become one space. ZWJ and ZWNJ stay, since scripts and emoji need them.
    """
    text = _tidy(text)
    if "<" in text:
        for opening, closing in _HIDDEN:
            text = _without(text, opening, closing)
        text = _TAG.sub(_shown, text)
    if "&" in text:
        text = _tidy(_REFERENCE.sub(lambda found: html.unescape(found[0]), text))
    return _blanks(text)


def _tidy(text: str) -> str:
    """One kind of line end, no control and zero-width characters, only plain blanks, NFC."""
    text = _UNSEEN.sub("", "\n".join(text.splitlines()))
    return text if text.isascii() else unicodedata.normalize("NFC", _SPACES.sub(" ", text))


def _without(text: str, opening: re.Pattern, closing: re.Pattern) -> str:
    """The text outside of what is opened and closed. One search each, so that it stays linear."""
    kept, at = [], 0
    while (start := opening.search(text, at)) and (stop := closing.search(text, start.end())):
        kept.append(text[at : start.start()])
        at = stop.end()
    return "".join([*kept, text[at:]])


def _blanks(text: str) -> str:
    """No blanks at line ends, single ones within lines, at most one empty line."""
    if "  " in text or "\t" in text:
        text = _GAP.sub(" ", text)
    return _EMPTY_LINES.sub("\n\n", _LINE_END.sub("\n", text)).strip()


def _shown(tag: re.Match) -> str:
    """What a tag becomes; blanks after it stay only where no new line starts."""
    shown = _TAGS.get(tag[1].lower())
    return tag[0] if shown is None else shown or tag[2]
