"""Answers to the exercises of "From tokens to batches"."""

import random
from functools import partial

from course_lib.data import TokenDataset, permuted

from . import Cases, Wrong

# tokens-to-batches/1: the learner's answer is written out; a mistake changes one line of it.


def locate_stub(dataset, step, index, global_batch):
    raise NotImplementedError


def locate(dataset, step, index, global_batch, mistake: str = ""):
    count, seed = len(dataset), dataset.seed
    n = step * global_batch + index
    if mistake == "exchanges step and index":
        n = index * global_batch + step
    if mistake == "adds step and index":
        n = step + index
    if mistake == "multiplies step and index":
        n = step * index
    if mistake == "forgets both":
        n = 0
    if mistake == "forgets the index":
        n = step * global_batch
    if mistake == "forgets the step":
        n = index
    epoch, position = divmod(n, count)
    if mistake == "an epoch ends with its last full batch":
        steps = count // global_batch
        epoch, position = step // steps, step % steps * global_batch + index
    if mistake == "epoch of the step's first sample":
        epoch = step * global_batch // count
    if mistake == "step taken for the epoch":
        epoch, position = step, index
    key = {"same order each epoch": 0, "key by the step": step}.get(mistake, epoch)
    if mistake == "seed ignored":
        seed = 0
    if mistake == "seed by global batch":
        seed = 100 * seed + global_batch
    if mistake == "hash of a text":
        seed = hash(f"seed {seed}") % 1000
    if mistake == "permutes the sample's number":
        position = n
    window = permuted(position, count, seed, key)
    if mistake == "order of the text":
        window = position
    if mistake == "each epoch shifted by one":
        window = (permuted(position, count, seed, 0) + epoch) % count
    if mistake == "drawn with replacement":
        window = random.Random(f"{seed} {n}").randrange(count)
    if mistake == "drawn from the shared generator":
        window = random.randrange(count)
    if mistake == "position never restarts":
        window = n
    if mistake == "window only":
        return window
    if mistake == "floats":
        return float(epoch), window
    if mistake == "window first":
        return window, epoch
    return epoch, window


def locating(mistake: str):
    return lambda dataset, step, index, global_batch: locate(
        dataset, step, index, global_batch, mistake
    )


calls = []


def counts_its_calls(dataset, step, index, global_batch):
    calls.append(1)
    epoch, position = divmod(len(calls), len(dataset))
    return epoch, permuted(position, len(dataset), dataset.seed, epoch)


orders: dict = {}


def shuffles_when_an_epoch_begins(dataset, step, index, global_batch):
    epoch, position = divmod(step * global_batch + index, len(dataset))
    if orders.get("epoch") != (epoch, len(dataset), dataset.seed):
        orders["epoch"] = (epoch, len(dataset), dataset.seed)
        order = orders.setdefault(len(dataset), list(range(len(dataset))))
        random.Random(epoch).shuffle(order)
    return epoch, orders[len(dataset)][position]


# tokens-to-batches/2: packing by hand, in a style of its own.


def pack_stub(documents, length):
    raise NotImplementedError


def pack(documents, length, mistake: str = ""):
    if mistake == "always 12":
        length = 12
    if mistake == "backwards":
        documents = documents[::-1]
    if mistake == "sorted by length":
        documents = sorted(documents, key=len, reverse=True)
    rows, row = [], []  # a row is a list of (token, label, position, document)
    for number, tokens in enumerate(documents):
        left = length - len(row)
        full = len(tokens) > left
        if mistake == "never quite full":
            full = len(tokens) >= left
        if mistake == "too many rows":
            full = full or number % 3 == 1
        if row and (full or mistake == "one a row"):
            rows.append(row)
            row = []
        labels = [*tokens[1:], -100]
        if mistake == "not shifted":
            labels = [*tokens[:-1], -100]
        if mistake == "shifted twice":
            labels = [*tokens[2:], -100, -100][: len(tokens)]
        if mistake == "-100 in front":
            labels = [-100, *tokens[2:], -100][: len(tokens)] if len(tokens) > 1 else [-100]
        if mistake == "last label 0":
            labels[-1] = 0
        start = {"not reset": len(row), "from 1": 1}.get(mistake, 0)
        name = {"all alike": 0, "by turns": number % 2}.get(mistake, number)
        names = [name] * len(tokens)
        if mistake == "number changes too late" and row:
            names[0] = row[-1][3]
        if mistake == "a number for each token":
            names = [100 * number + at for at in range(len(tokens))]
        row += zip(tokens, labels, range(start, start + len(tokens)), names)
    if mistake != "forgets the last row":
        rows.append(row)
    if mistake == "an empty row in front":
        rows.insert(0, [])
    filler = (
        5 if mistake == "filler token 5" else 0,
        0 if mistake == "trains on filler" else -100,
        {"filler position -1": -1, "filler position 1000": 1000}.get(mistake, 0),
        -1,
    )
    fill = 0 if mistake == "no filler" else length
    rows = [row + [filler] * (fill - len(row)) for row in rows]
    if mistake == "documents twice":
        rows[-1][-2:] = rows[0][:2]
    made = [dict(zip(("tokens", "labels", "positions", "documents"), map(list, zip(*row))))
            for row in rows]  # fmt: skip
    if mistake == "crosses the boundary":
        for each in made:
            tokens = [*each["tokens"][1:], 0]
            each["labels"] = [token or -100 for token in tokens]
    if mistake in ("letters", "numbers as text", "None"):
        of = {"letters": lambda n: "ABCDEFGHIJ"[n], "numbers as text": str, "None": lambda n: None}
        made = [each | {"documents": [*map(of[mistake], each["documents"])]} for each in made]
    if mistake == "a field is None":
        made = [each | {"positions": None} for each in made]
    if mistake == "no documents":
        for each in made:
            del each["documents"]
    return made


def cuts_documents(documents, length):
    """One stream, cut every `length` tokens."""
    row = [(t, [*d[1:], -100][i], i, n) for n, d in enumerate(documents) for i, t in enumerate(d)]
    rows = [row[at : at + length] for at in range(0, len(row), length)]
    rows = [part + [(0, -100, 0, -1)] * (length - len(part)) for part in rows]
    return [dict(zip(("tokens", "labels", "positions", "documents"), map(list, zip(*part))))
            for part in rows]  # fmt: skip


def first_fit(documents, length):
    """Each document into the first row that has room: fewer rows, but another order."""
    rows = []
    for number, tokens in enumerate(documents):
        row = next((row for row in rows if len(row) + len(tokens) <= length), None)
        if row is None:
            rows.append(row := [])
        row += zip(tokens, [*tokens[1:], -100], range(length), [number] * len(tokens))
    rows = [part + [(0, -100, 0, -1)] * (length - len(part)) for part in rows]
    return [dict(zip(("tokens", "labels", "positions", "documents"), map(list, zip(*part))))
            for part in rows]  # fmt: skip


def packing(mistake: str):
    return partial(pack, mistake=mistake)


CASES = {
    "tokens-to-batches/1": Cases(
        locate_stub,
        (
            Wrong("same order each epoch", locating("same order each epoch"), "the same order"),
            Wrong("window first", locating("window first"), "(epoch, window), in this order"),
            Wrong("product", locating("multiplies step and index"), "You multiply step and index"),
            Wrong("forgets both", locating("forgets both"), "neither step nor index"),
            Wrong(
                "permutes the sample's number",
                locating("permutes the sample's number"),
                "outside of the epoch",
            ),
            Wrong("ranks overlap", locating("adds step and index"), "you add step and index"),
            Wrong("step and index", locating("exchanges step and index"), "index are exchanged"),
            Wrong("the library's class", TokenDataset, "yours is the class TokenDataset"),
            Wrong("forgets the index", locating("forgets the index"), "the index in the global"),
            Wrong("forgets the step", locating("forgets the step"), "step makes no difference"),
            Wrong("counts its calls", counts_its_calls, "count nothing"),
            Wrong("depends on history", shuffles_when_an_epoch_begins, "a second worker or a res"),
            Wrong("shared generator", locating("drawn from the shared generator"), "no generator"),
            Wrong("depends on the process", locating("hash of a text"), "another process"),
            Wrong("with replacement", locating("drawn with replacement"), "others never"),
            Wrong("order of the text", locating("order of the text"), "in the order of the text"),
            Wrong("step for epoch", locating("step taken for the epoch"), "step for the epoch"),
            Wrong(
                "remainder dropped",
                locating("an epoch ends with its last full batch"),
                "never trained on",
            ),
            Wrong(
                "epoch of the first sample",
                locating("epoch of the step's first sample"),
                "count the index too",
            ),
            Wrong("key by the step", locating("key by the step"), "changes within the epoch"),
            Wrong("shifted epochs", locating("each epoch shifted by one"), "stay neighbors"),
            Wrong("seed ignored", locating("seed ignored"), "use dataset.seed"),
            Wrong("global batch", locating("seed by global batch"), "with global batches of"),
            Wrong("never restarts", locating("position never restarts"), "keep the remainder"),
            Wrong("window only", locating("window only"), "return two numbers"),
            Wrong("floats", locating("floats"), "whole numbers"),
            Wrong("gives a value, not a function", (0, 3), "without calling it"),
        ),
    ),
    "tokens-to-batches/2": Cases(
        pack_stub,
        (
            Wrong("attention leaks", packing("all alike"), "the same number in `documents`."),
            Wrong("numbers by turns", packing("by turns"), "may not come again"),
            Wrong("number changes late", packing("number changes too late"), "at another place"),
            Wrong("a number each", packing("a number for each token"), "does not see itself"),
            Wrong("positions not reset", packing("not reset"), "They are not reset"),
            Wrong("positions from 1", packing("from 1"), "count from 0."),
            Wrong("crosses", packing("crosses the boundary"), "crosses the boundary"),
            Wrong("labels not shifted", packing("not shifted"), "are not shifted"),
            Wrong("labels shifted twice", packing("shifted twice"), "shifted twice"),
            Wrong("-100 in front", packing("-100 in front"), "one place too far"),
            Wrong("last label 0", packing("last label 0"), "must be -100; yours: 0"),
            Wrong("trains on filler", packing("trains on filler"), "not train on filler"),
            Wrong("forgets the last row", packing("forgets the last row"), "Is the last row kept"),
            Wrong("cuts documents", cuts_documents, "does not lie whole"),
            Wrong("one a row", packing("one a row"), "a row of its own"),
            Wrong("never quite full", packing("never quite full"), "fills a row exactly"),
            Wrong("too many rows", packing("too many rows"), "room for 7 tokens. Begin a new"),
            Wrong("sorted", packing("sorted by length"), "document 3 lies before document 2"),
            Wrong("an empty row", packing("an empty row in front"), "holds no document"),
            Wrong("documents twice", packing("documents twice"), "stands in the rows twice"),
            Wrong("no filler", packing("no filler"), "Fill it up"),
            Wrong("no documents", packing("no documents"), "has no documents"),
            Wrong("backwards", packing("backwards"), "document 1 lies before document 0"),
            Wrong("first fit", first_fit, "Take the documents in order"),
            Wrong("length ignored", packing("always 12"), "a row has 15 positions"),
            Wrong("numbers as text", packing("numbers as text"), "one of yours is '0'"),
            Wrong("letters", packing("letters"), "documents must hold whole numbers"),
            Wrong("None for numbers", packing("None"), "one of yours is None"),
            Wrong("a field is None", packing("a field is None"), "positions must be a list"),
            Wrong("filler position -1", packing("filler position -1"), "has the position -1"),
            Wrong("filler position 1000", packing("filler position 1000"), "the position 1000"),
            Wrong("filler token 5", packing("filler token 5"), "filled with tokens 0"),
            Wrong("no rows", lambda documents, length: [], "yours: an empty list"),
            Wrong("returns nothing", lambda documents, length: None, "yours: nothing"),
            Wrong("gives a value, not a function", [], "without calling it"),
        ),
    ),
}
