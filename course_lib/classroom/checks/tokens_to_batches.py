"""The exercises of "From tokens to batches": find a sample by arithmetic; pack whole documents."""

import traceback
from collections import Counter
from collections.abc import Callable

from ..learner import learners_line
from .exercise import Exercise, WrongAnswer, on_ranks
from .packing import as_whole, grade_packing, must_be_a_function


class Windows:
    """What an answer may ask of a data set: how many windows it has, and its seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self.seed = count, seed

    def __len__(self) -> int:
        return self._count


_BATCH = 8
_CASES = ((37, 3), (24, 4))  # windows, seed; 8 does not divide 37: a step may lie in two epochs
_EPOCHS = 3

Place = tuple[int, int]  # (step, index)


def grade_locate(answer: Callable[[Windows, int, int, int], tuple[int, int]]) -> None:
    """Ask for every sample of three epochs: pure, complete, disjoint, another order each epoch."""
    must_be_a_function(answer)
    cases = [Windows(*case) for case in _CASES]  # new ones: an answer may change what it is given
    for windows in cases:
        places = [divmod(n, _BATCH) for n in range(_EPOCHS * len(windows))]
        found = {place: _asked(answer, windows, *place) for place in places}
        _check_purity(answer, windows, found)
        _check_epochs(windows, found)
        _check_orders(windows, found)
    _check_seed(answer)
    _check_batch(answer, *cases)
    _check_processes(answer, cases[0])


def _asked(
    answer: Callable, windows: Windows, step: int, index: int, batch: int = _BATCH
) -> tuple[int, int]:
    """One answer in its right form: (epoch, window), both int."""
    try:
        given = answer(windows, step, index, batch)
    except IndexError as error:
        if "permuted" not in {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
            raise
        raise WrongAnswer(
            f"{_where((step, index), batch)}you give `permuted` a position outside of the epoch. "
            f"Positions are 0 to {len(windows) - 1}: they start again in each epoch.\n"
            f"{learners_line(error)}".rstrip()
        ) from error
    if not isinstance(given, tuple) or len(given) != 2:
        raise WrongAnswer(f"return two numbers, (epoch, window); yours: {given!r}.")
    epoch, window = map(as_whole, given)
    if epoch is None or window is None:
        kinds = " and ".join(type(number).__name__ for number in given)
        raise WrongAnswer(f"epoch and window must be whole numbers (int); yours: {kinds}.")
    if not 0 <= window < len(windows):
        raise WrongAnswer(
            f"{_where((step, index), batch)}you return window {window}; there are only windows 0 "
            f"to {len(windows) - 1}. Positions start again in each epoch: divide by len(dataset) "
            "and keep the remainder."
        )
    return epoch, window


def _check_purity(answer: Callable, windows: Windows, found: dict) -> None:
    """Ask again: the last one first, and only every second one, as one of two workers would."""
    first = next(iter(found))
    if len({_asked(answer, windows, *first) for _ in range(4)}) > 1:
        raise WrongAnswer(
            f"{_where(first)}asked again at once, you return another window. Draw from no "
            "generator and count nothing: compute the window from step, index and seed."
        )
    for places in ([*found][::-1], [*found][1::2]):
        for place in places:
            again = _asked(answer, windows, *place)
            if again != found[place]:
                raise WrongAnswer(
                    f"{_where(place)}you return {found[place]}, and {again} when the samples are "
                    "asked for in another order. The answer depends on the calls before it, so "
                    "a second worker or a resumed run gets other samples."
                )


def _check_epochs(windows: Windows, found: dict) -> None:
    """Every window once in an epoch, and the epoch's number right."""
    count, places = len(windows), list(found)
    if all(window == n // count for n, (_, window) in enumerate(found.values())):
        raise WrongAnswer(
            f"the second number you return is the epoch. Return (epoch, window), in this order; "
            f"{_where((1, 0))}yours: {found[1, 0]}."
        )
    if _exchanged(windows, found):
        raise WrongAnswer(
            f"{_where((1, 0))}you return what belongs to step 0, sample 1: step and index are "
            "exchanged. Before this step there were step · global_batch samples."
        )
    for place in places[:count]:  # the first epoch
        same = [other for other in places[:count] if found[other][1] == found[place][1]]
        if len(same) > 1:
            raise WrongAnswer(_overlap(windows, found, same))
    for number, place in enumerate(places):
        if found[place][0] != number // count:
            told = f"{_where(place)}{number} samples come before it, and an epoch has {count}, so "
            raise WrongAnswer(
                f"{told}it lies in epoch {number // count}; you return epoch {found[place][0]}."
                f"{_about_epoch(windows, place, found[place][0])}"
            )
    for epoch in range(1, _EPOCHS):
        seen = Counter(found[place][1] for place in places[epoch * count : (epoch + 1) * count])
        if len(seen) < count:
            missing = min(set(range(count)) - set(seen))
            raise WrongAnswer(
                f"in epoch {epoch} window {missing} never comes, and window "
                f"{seen.most_common(1)[0][0]} comes twice. Within an epoch the epoch's number "
                "must not change: a step may lie in two epochs, so decide for each sample."
            )


def _exchanged(windows: Windows, found: dict) -> bool:
    """Whether the answer is a right one of index · global_batch + step."""
    numbers = {place: place[1] * _BATCH + place[0] for place in found}
    if any(found[place][0] != number // len(windows) for place, number in numbers.items()):
        return False
    return len({*found.values()}) == len({*numbers.values()})


def _overlap(windows: Windows, found: dict, same: list[Place]) -> str:
    """Two samples of the first epoch are one window: say how that comes about."""
    (step, index), (other_step, other_index) = same[:2]
    told = (
        f"sample {index} of step {step} and sample {other_index} of step {other_step} are both "
        f"window {found[same[0]][1]}, though the first epoch is not over. "
    )
    places = list(found)[: len(windows)]
    for words, part in _PARTS.items():
        given: dict[int, set] = {}
        for place in places:
            given.setdefault(part(*place), set()).add(found[place])
        if all(len(group) == 1 for group in given.values()):
            return told + words
    if all(found[place][0] == place[0] for place in places):
        return told + "You take the step for the epoch: each step begins a new permutation."
    if all(found[place][0] == place[0] // (len(windows) // _BATCH) for place in places):
        return told + _REMAINDER
    steps = range(len(windows) // _BATCH)
    if all(len({found[step, i][1] for i in range(_BATCH)}) == _BATCH for step in steps):
        return told + (
            "The permutation changes within the epoch. It may depend on the seed and the epoch, "
            "on nothing else."
        )
    return told + (
        "Drawing windows one by one gives some of them twice and others never. Permute the "
        "position in the epoch instead."
    )


# What the window depends on where the answer uses less than step and index.
_PARTS = {
    "Every sample is the same: neither step nor index makes a difference.": lambda step, index: 0,
    "Ranks overlap: the index in the global batch makes no difference.": lambda step, index: step,
    "Every step is the same: the step makes no difference.": lambda step, index: index,
    "Ranks overlap: you add step and index. Before this step there were step · global_batch "
    "samples, not step.": lambda step, index: step + index,
    "You multiply step and index. Before this step there were step · global_batch samples; add the "
    "index to them.": lambda step, index: step * index,
}

_REMAINDER = (
    "You let each epoch end with its last full batch, so the windows that are left over are never "
    "trained on."
)


def _about_epoch(windows: Windows, place: Place, given: int) -> str:
    step = place[0]
    if given == step // (len(windows) // _BATCH):
        return " " + _REMAINDER
    if given == step * _BATCH // len(windows):
        return " You decide by the first sample of the step: count the index too."
    return ""


def _check_orders(windows: Windows, found: dict) -> None:
    """The epochs' orders differ from each other and from the text's."""
    in_order = [window for _, window in found.values()]
    count = len(windows)
    orders = [in_order[epoch * count : (epoch + 1) * count] for epoch in range(_EPOCHS)]
    if orders[0] == list(range(count)) == orders[1]:
        raise WrongAnswer(
            "windows come in the order of the text. Use a permutation: "
            "permuted(position, len(dataset), seed, epoch)."
        )
    if orders[0] == orders[1] or orders[1] == orders[2]:
        raise WrongAnswer(
            "each window comes once an epoch, but in the same order each epoch. The permutation "
            "must depend on the epoch, too."
        )
    shifts = {(b - a) % count for a, b in zip(orders[0], orders[1])}
    if len(shifts) == 1:
        raise WrongAnswer(
            "each epoch is the first one with a number added to every window, so neighbors stay "
            "neighbors. Give the epoch to the permutation."
        )


def _check_seed(answer: Callable) -> None:
    by_seed = [
        [_asked(answer, Windows(37, seed), *divmod(n, _BATCH)) for n in range(37)]
        for seed in (1, 2)
    ]
    if by_seed[0] == by_seed[1]:
        raise WrongAnswer("seeds 1 and 2 give the same order: use dataset.seed.")


def _check_batch(answer: Callable, *cases: Windows) -> None:
    """The n-th sample is the same one whatever the size of the global batch."""
    for windows in cases:
        for n in range(len(windows)):
            by_batch = {size: _asked(answer, windows, *divmod(n, size), size) for size in (2, 4, 8)}
            if len(set(by_batch.values())) > 1:
                raise WrongAnswer(
                    f"{n} samples come before it, but with global batches of 2, 4 and 8 you "
                    f"return {', '.join(map(str, by_batch.values()))}. Only the number of "
                    "samples before it may count: step · global_batch + index."
                )


def _check_processes(answer: Callable, windows: Windows) -> None:
    """A rank is another process, and often another machine."""
    here = [_asked(answer, windows, *divmod(n, _BATCH)) for n in range(24)]

    def on_a_rank():
        return [_asked(answer, windows, *divmod(n, _BATCH)) for n in range(24)]

    if any(there != here for there in on_ranks(on_a_rank, 2).values):
        raise WrongAnswer(
            "another process returns other windows for the same step, index and seed. hash() of "
            "a text, id() and process numbers differ between processes. Compute with numbers."
        )


def _where(place: Place, batch: int = _BATCH) -> str:
    return f"step {place[0]}, sample {place[1]} of {batch}: "


EXERCISES = (
    Exercise(
        name="tokens-to-batches/1",
        title="the sample at (step, index)",
        difficulty=2,
        minutes=15,
        hints=(
            "How many samples came before this one in the whole of training? Each step before it "
            "took global_batch of them.",
            "divmod(that number, len(dataset)) gives the epoch and the position in it.",
            "permuted(position, len(dataset), dataset.seed, epoch) is the window. Keep no list "
            "and no counter.",
        ),
        solution="course_lib.data:TokenDataset.locate",
        grade=grade_locate,
    ),
    Exercise(
        name="tokens-to-batches/2",
        title="pack whole documents",
        difficulty=2,
        minutes=20,
        hints=(
            "Build a row as four lists that grow together. When the next document does not fit, "
            "fill the row up and begin a new one. Do not forget the last row.",
            "A document of n tokens brings labels tokens[1:] + [-100], positions 0 … n - 1, and n "
            "times its own number.",
            "Fill up with tokens 0, labels -100 and positions 0. In `documents` any number will "
            "do: filler stands last, so no document sees it.",
        ),
        solution="course_lib.classroom.checks.packing:pack",
        grade=grade_packing,
    ),
)
