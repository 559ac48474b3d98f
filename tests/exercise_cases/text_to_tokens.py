"""Answers to the exercises of "From text to tokens"."""

from collections import Counter, defaultdict

from course_lib.data.bpe import SINGLE_BYTES, split
from course_lib.data.deduplication import jaccard, signature, similarity

from . import Cases, Wrong

# text-to-tokens/1: a learner's own loop over a list of all words; a mistake changes one line.


def merges_stub(text, merges):
    raise NotImplementedError


def learn(text, merges, mistake=""):
    pieces = [text.encode()] if mistake == "no words" else split(text)
    if mistake == "text.split()":
        pieces = [word.encode() for word in text.split()]
    if mistake == "each word once":
        pieces = list(dict.fromkeys(pieces))
    words = [[piece[i : i + 1] for i in range(len(piece))] for piece in pieces]
    if mistake in ("characters", "characters with ids"):
        words = [list(piece.decode()) for piece in pieces]
    if mistake == "numbers for bytes":
        words = [list(piece) for piece in pieces]
    number = {symbol: place for place, symbol in enumerate(SINGLE_BYTES)}
    if mistake == "ids by value":
        number = {bytes([value]): value for value in range(256)}
    learned = kept_between_calls if mistake == "one list for all calls" else []
    for _ in range(merges):
        counts = defaultdict(int)
        for word in words:
            last, met = None, set()
            for place in range(len(word) - 1):
                pair = word[place], word[place + 1]
                if mistake == "runs once" and pair[0] == pair[1] and last == place - 1:
                    continue
                if mistake == "once in a word" and pair in met:
                    continue
                met.add(pair)
                last = place if pair[0] == pair[1] else None
                counts[pair] += 1
        most = max(counts.values(), default=0)
        if mistake == "second most frequent":
            most = max((times for times in counts.values() if 1 < times < most), default=most)
        if most < {"never stops": 1, "stops at two": 3}.get(mistake, 2):
            break
        tied = [pair for pair in counts if counts[pair] == most]
        if mistake == "ties as met" or mistake == "characters":
            pair = tied[0]
        elif mistake == "ties by bytes":
            pair = sorted(tied)[0]
        elif mistake == "left id only":
            pair = min(tied, key=lambda pair: number[pair[0]])
        elif mistake == "right id first":
            pair = min(tied, key=lambda pair: (number[pair[1]], number[pair[0]]))
        elif mistake == "the longest of the tied":
            pair = max(tied, key=lambda pair: (len(pair[0] + pair[1]), -number[pair[0]]))
        else:
            tied.sort(key=lambda pair: [number[symbol] for symbol in pair])
            pair = tied[-1] if mistake == "last of the tied" else tied[0]
        learned.append(pair)
        if mistake != "no id for a new symbol":
            number.setdefault(pair[0] + pair[1], len(number))
        if mistake != "never merges":
            words = [joined(word, pair, mistake) for word in words]
    return learned


kept_between_calls = []


def joined(word, pair, mistake=""):
    out, place = [], 0
    while place < len(word):
        if tuple(word[place : place + 2]) == pair:
            out.append(pair[0] + pair[1])
            place += 2
            if mistake == "symbol used twice" and tuple(word[place - 1 : place + 1]) == pair:
                place -= 1
        else:
            out.append(word[place])
            place += 1
    return out


def learning(mistake):
    return lambda text, merges: learn(text, merges, mistake)


def counted_once(text, merges):
    number = {symbol: place for place, symbol in enumerate(SINGLE_BYTES)}
    counts = Counter()
    for word in split(text):
        counts.update((word[i : i + 1], word[i + 1 : i + 2]) for i in range(len(word) - 1))
    order = sorted(counts, key=lambda p: (-counts[p], number[p[0]], number[p[1]]))
    return [pair for pair in order if counts[pair] > 1][:merges]


def one_more_than_asked(text, merges):
    return learn(text, merges + 1)


def one_less_than_asked(text, merges):
    return learn(text, merges - 1)


def repeats_the_last(text, merges):
    learned = learn(text, merges)
    return learned + learned[-1:] * 3


def tokens_instead(text, merges):
    return [left + right for left, right in learn(text, merges)]


# text-to-tokens/2


def encoding_stub(text, merges):
    raise NotImplementedError


def encode(text, merges, mistake=""):
    tokens = []
    order = {"reversed": lambda m: m[::-1], "sorted": sorted}.get(mistake, list)(list(merges))
    for word in split(text):
        symbols = [word[i : i + 1] for i in range(len(word))]
        for pair in order:
            if mistake == "once a word":
                place = next(
                    (i for i in range(len(symbols)) if tuple(symbols[i : i + 2]) == pair), -1
                )
                if place >= 0:
                    symbols = [*symbols[:place], pair[0] + pair[1], *symbols[place + 2 :]]
            else:
                symbols = joined(symbols, pair, mistake)
        tokens += symbols
    return tokens


def encoding(mistake):
    return lambda text, merges: encode(text, merges, mistake)


def only_the_first_merge(text, merges):
    return encode(text, merges[:1])


def longest_token(text, merges):
    known = {pair[0] + pair[1] for pair in merges} | set(SINGLE_BYTES)
    tokens = []
    for word in split(text):
        start = 0
        while start < len(word):
            stop = len(word)
            while word[start:stop] not in known:
                stop -= 1
            tokens.append(word[start:stop])
            start = stop
    return tokens


def words_not_cut(text, merges):
    data = text.encode()
    symbols = [data[i : i + 1] for i in range(len(data))]
    for pair in merges:
        symbols = joined(symbols, pair)
    return symbols


def without_spaces(text, merges):
    return encode(text.replace(" ", ""), merges)


def as_text(text, merges):
    return [token.decode(errors="replace") for token in encode(text, merges)]


# text-to-tokens/3


def duplicates_stub(texts, threshold):
    raise NotImplementedError


def duplicates(texts, threshold, mistake=""):
    verdicts = []
    for place, text in enumerate(texts):
        verdict = "new", None
        for other in range(place):
            dropped = verdicts[other][0] != "new"
            same = text == texts[other]
            if dropped and mistake != "compares with dropped texts":
                continue
            if mistake == "capitals do not count":
                same = text.lower() == texts[other].lower()
            if mistake == "near is called exact":
                same = jaccard(text, texts[other]) >= threshold
            if same and mistake != "copies are called near":
                verdict = "exact", other
                break
            reaches = 0.8 if mistake == "always 0.8" else threshold
            found = alike(text, texts[other], mistake)
            if found > reaches or (found == reaches and mistake != "above"):
                verdict = "near", other
                if mistake != "the last similar":
                    break
        verdicts.append(verdict)
    return verdicts


def alike(text, other, mistake):
    """Similarity; the wrong ones are made of the words, which are all different in a text."""
    one, two = set(text.split()), set(other.split())
    if mistake == "shared by the shorter":
        return max(jaccard(text, other), len(one & two) / min(len(one), len(two)))
    if mistake == "same beginning":
        return float(text[:200] == other[:200])
    if mistake == "twice the common part":
        true = jaccard(text, other)
        return 2 * true / (1 + true)
    if mistake == "MinHash":
        return similarity(signature(text), signature(other))
    if mistake == "only exact":
        return 0
    return jaccard(text, other)


def finding(mistake):
    return lambda texts, threshold: duplicates(texts, threshold, mistake)


def comparing(similarity_of):
    """A learner's own loop over the kept texts, with another similarity."""

    def answer(texts, threshold):
        verdicts = []
        for text in texts:
            kept = [i for i, (kind, _) in enumerate(verdicts) if kind == "new"]
            same = [("exact", i) for i in kept if texts[i] == text]
            near = (("near", i) for i in kept if similarity_of(texts[i], text) >= threshold)
            verdicts.append(same[0] if same else next(near, ("new", None)))
        return verdicts

    return answer


def common_letters(one, other):
    return len({*one} & {*other}) / len({*one} | {*other})


def all_new(texts, threshold):
    return [("new", None) for _ in texts]


def all_copies(texts, threshold):
    return [("exact", 0) if place else ("new", None) for place, _ in enumerate(texts)]


def only_the_first_kept(texts, threshold):
    verdicts = duplicates(texts, threshold)
    return [verdict if verdict[1] in (0, None) or verdict[0] == "exact" else ("new", None)
            for verdict in verdicts]  # fmt: skip


def keeps_the_last(texts, threshold):
    backwards = duplicates(texts[::-1], threshold)[::-1]
    turn = len(texts) - 1
    return [(kind, None if of is None else turn - of) for kind, of in backwards]


def copies_of_any(texts, threshold):
    """The verdicts, but with equal texts looked for among the dropped ones, too."""
    verdicts = duplicates(texts, threshold)
    earlier = [text in texts[:place] for place, text in enumerate(texts)]
    return [("exact", texts.index(text)) if again else verdict
            for text, verdict, again in zip(texts, verdicts, earlier)]  # fmt: skip


def place_among_the_kept(texts, threshold):
    verdicts = duplicates(texts, threshold)
    kept = [place for place, (kind, _) in enumerate(verdicts) if kind == "new"]
    return [(kind, None if of is None else kept.index(of)) for kind, of in verdicts]


def otherwise_written(change):
    return lambda texts, threshold: [change(texts, *it) for it in duplicates(texts, threshold)]


def with_itself(texts, threshold):
    return [("exact", texts.index(text)) for text in texts]


def kept_texts(texts, threshold):
    verdicts = duplicates(texts, threshold)
    return [text for text, verdict in zip(texts, verdicts) if verdict[0] == "new"]


def too_few(texts, threshold):
    return [verdict for verdict in duplicates(texts, threshold) if verdict[0] == "new"]


CASES = {
    "text-to-tokens/1": Cases(
        stub=merges_stub,
        wrong=(
            Wrong("ties in the order they were met", learning("ties as met"), "pairs were met"),
            Wrong("ties by the bytes", learning("ties by bytes"), "by the bytes themselves"),
            Wrong("the last of the tied", learning("last of the tied"), "you take the last"),
            Wrong("overlapping pairs merged", learning("symbol used twice"), "A symbol is used"),
            Wrong("a run counted once", learning("runs once"), "aaa you count the pair once"),
            Wrong("each word once", learning("each word once"), "each different word once"),
            Wrong("across words", learning("no words"), "over the border of two words"),
            Wrong("counted once", counted_once, "You count once, and take"),
            Wrong("ids by value", learning("ids by value"), "place in SINGLE_BYTES, not its value"),
            Wrong("left id only", learning("left id only"), "You compare the left symbols only"),
            Wrong("right id first", learning("right id first"), "the right symbols first"),
            Wrong("text.split()", learning("text.split()"), "with `text.split()`, and the spaces"),
            Wrong("once in a word", learning("once in a word"), "once in each word"),
            Wrong(
                "one list for all calls",
                learning("one list for all calls"),
                "keeps something from call to call",
            ),
            Wrong("stops at two", learning("stops at two"), "You stop too early"),
            Wrong("never stops", learning("never stops"), "Stop when no pair occurs twice"),
            Wrong("characters", learning("characters"), "each symbol is of type bytes"),
            Wrong(
                "characters with ids", learning("characters with ids"), "the symbol 'z'. It is of"
            ),
            Wrong("numbers for bytes", learning("numbers for bytes"), "It is of type int"),
            Wrong(
                "no new ids", learning("no id for a new symbol"), "Each new symbol gets the next"
            ),
            Wrong("one too few", one_less_than_asked, "one merge too few"),
            Wrong("one too many", one_more_than_asked, "one merge too many"),
            Wrong(
                "longest of the tied", learning("the longest of the tied"), "occurs 2 times, (b'c'"
            ),
            Wrong("never merges", learning("never merges"), "At that point yours occurs 0 times"),
            Wrong(
                "second", learning("second most frequent"), "take the one that occurs most often"
            ),
            Wrong("an empty list", lambda text, merges: [], "occurs 2 times there: go on"),
            Wrong("repeats the last", repeats_the_last, "There the list is complete"),
            Wrong("tokens instead of pairs", tokens_instead, "each merge is a pair"),
            Wrong("nothing returned", lambda text, merges: None, "yours returned nothing"),
            Wrong("not a function", learn("abab", 2), "give the function itself"),
        ),
    ),
    "text-to-tokens/2": Cases(
        stub=encoding_stub,
        wrong=(
            Wrong("the last merge first", encoding("reversed"), "You apply the last merge first"),
            Wrong("longest token first", longest_token, "BPE does not search for long tokens"),
            Wrong("one merge a word", encoding("once a word"), "only once in a word"),
            Wrong("merges sorted", encoding("sorted"), "in the order of their bytes"),
            Wrong("overlapping", encoding("symbol used twice"), "in aaa you merge both pairs"),
            Wrong("words not cut", words_not_cut, "over the border of two words"),
            Wrong("spaces lost", without_spaces, "Your tokens joined are not the text"),
            Wrong("text", as_text, "each of type bytes; yours returned a list with str"),
            Wrong("only bytes", lambda text, merges: encode(text, []), "No pair was merged"),
            Wrong("only the first", only_the_first_merge, "apply merge after merge"),
        ),
    ),
    "text-to-tokens/3": Cases(
        stub=duplicates_stub,
        wrong=(
            Wrong("near is called exact", finding("near is called exact"), "all characters are"),
            Wrong("copies are called near", finding("copies are called near"), "copies: text 2 is"),
            Wrong("capitals ignored", finding("capitals do not count"), "in capitals: text 1 is"),
            Wrong("the last is kept", keeps_the_last, "The last copy is kept"),
            Wrong(
                "a shared header", finding("shared by the shorter"), "not by those of the shorter"
            ),
            Wrong("same beginning", finding("same beginning"), "near duplicate: compare the shing"),
            Wrong("Dice for Jaccard", finding("twice the common part"), "those of the union"),
            Wrong(
                "chain", finding("compares with dropped texts"), "a chain of small edits removes"
            ),
            Wrong("only exact", finding("only exact"), "an edited copy: text 1 is near of 0"),
            Wrong("copy of a dropped text", copies_of_any, "not even for equal texts"),
            Wrong("place among the kept", place_among_the_kept, "i is the place in `texts`"),
            Wrong("the last similar", finding("the last similar"), "Name the first of them"),
            Wrong("always 0.8", finding("always 0.8"), "the threshold that your function is"),
            Wrong("above the threshold", finding("above"), "take >="),
            Wrong("sets", comparing(lambda a, b: jaccard(set(a), set(b))), "yours gave it a set"),
            Wrong("common letters", comparing(common_letters), "it is not reached"),
            Wrong("all new", all_new, "All its characters are those of text 0"),
            Wrong("all copies", all_copies, "It differs from text 0"),
            Wrong(
                "only the first kept", only_the_first_kept, "of the texts 2 and 3 is 0.84, which"
            ),
            Wrong("MinHash", finding("MinHash"), "MinHash only estimates the similarity"),
            Wrong(
                "a text for its place",
                otherwise_written(lambda texts, kind, of: (kind, of if of is None else texts[of])),
                "one of yours is ('exact', '",
            ),
            Wrong(
                "the place as text",
                otherwise_written(lambda texts, kind, of: (kind, of if of is None else str(of))),
                "one of yours is ('exact', '0')",
            ),
            Wrong(
                "the pair turned round",
                otherwise_written(lambda texts, kind, of: (of, kind)),
                "one of yours is (None, 'new')",
            ),
            Wrong(
                "another word",
                otherwise_written(lambda texts, kind, of: (kind.upper(), of)),
                "one of yours is ('NEW'",
            ),
            Wrong("compared with itself", with_itself, "It is compared with itself"),
            Wrong("texts returned", kept_texts, "each verdict is"),
            Wrong("only the kept", too_few, "return one verdict a text: 4"),
            Wrong("nothing returned", lambda texts, threshold: None, "yours returned nothing"),
        ),
    ),
}
