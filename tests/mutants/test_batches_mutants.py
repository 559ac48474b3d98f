"""Faults of public training code, put back into samples, batches and mixtures: each must be seen.

A row: its name, the trap, what puts it back, and the check that must fail.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from course_lib.data import TokenDataset, batches, loading, mixtures, samples
from tests import checks_batches as checks

Put = Callable[[object, str, object], None]


@dataclass(frozen=True)
class Fault:
    """A fault, put back by `put_back(put)` with put(object, name, value) = setattr."""

    name: str
    trap: str  # id of the public report; "" where there is none
    put_back: Callable[[Put], None]
    check: Callable[[], None]


def on_data(check: Callable, *arguments, packing="stream") -> Callable[[], None]:
    """A check of a data set: 10 windows of 16, the last one partly filled."""

    def run() -> None:
        with checks.dataset_of(checks.counting(155, 4), 16, packing) as data:
            check(data, *arguments)

    return run


# ------------------------------------------------------------------------ windows and their order


def last_window_dropped(put: Put) -> None:
    put(samples, "window_counts", lambda targets, length: targets // length)


def labels_shifted_twice(put: Put) -> None:
    right = TokenDataset.window

    def shifted(self, number):
        sample = right(self, number)
        return sample._replace(labels=np.append(sample.labels[1:], -100))

    put(TokenDataset, "window", shifted)


def same_order_in_each_epoch(put: Put) -> None:
    right = samples.permuted
    put(samples, "permuted", lambda position, count, seed, epoch: right(position, count, seed, 0))


def drawn_with_replacement(put: Put) -> None:
    put(samples, "permuted", lambda place, count, *rest: samples.scrambled(place, *rest) % count)


def order_by_the_machine(put: Put) -> None:
    """What `hash` of a text or a set does: another order in each process."""
    put(samples, "permuted", lambda place, count, *_: random.randrange(count))


def samples_follow_a_stream(put: Put) -> None:
    def next_one(self, step, index, global_batch):
        self.position = getattr(self, "position", -1) + 1
        return 0, samples.permuted(self.position % len(self), len(self), self.seed, 0)

    put(TokenDataset, "locate", next_one)


def check_ranks_of_their_own_seed() -> None:
    with (
        checks.dataset_of(checks.counting(155), seed=0) as one,
        checks.dataset_of(checks.counting(155), seed=1) as two,
    ):
        checks.check_ranks_share(lambda rank: (one, two)[rank], 2)


def check_purity() -> None:
    with checks.dataset_of(checks.counting(155)) as data:
        again = (data.shards, 16)
        checks.check_sample_is_pure(lambda: TokenDataset(*again))


# --------------------------------------------------------------------------------------- documents


def places(put: Put, change: Callable) -> None:
    right = TokenDataset._places
    put(TokenDataset, "_places", lambda *arguments: change(*right(*arguments)))


def positions_not_reset(put: Put) -> None:
    def change(positions, documents):
        return np.broadcast_to(np.arange(positions.shape[1]), positions.shape).copy(), documents

    places(put, change)


def attention_over_documents(put: Put) -> None:
    places(
        put,
        lambda positions, documents: (positions, documents if documents is None else documents * 0),
    )


def documents_forgotten_in_the_batch(put: Put) -> None:
    right = batches.to_batch
    for module in (batches, checks):
        put(module, "to_batch", lambda rows, *a, **b: right(rows._replace(documents=None), *a, **b))


def document_one_token_late(put: Put) -> None:
    def change(positions, documents):
        if documents is None:
            return positions, documents
        late = np.roll(documents, 1, axis=1)
        late[:, 0] = 0
        return positions, late

    places(put, change)


# -------------------------------------------------------------------------------------- evaluation


def repeats_fill_up(put: Put) -> None:
    right = batches.evaluation_windows

    def windows(count, *rest):
        return ([number % count for number in some] for some in right(count, *rest))

    put(batches, "evaluation_windows", windows)


def rest_dropped(put: Put) -> None:
    right = batches.evaluation_windows

    def windows(count, rank, world_size, size):
        return right(count - count % (world_size * size), rank, world_size, size)

    put(batches, "evaluation_windows", windows)


def ranks_stop_at_their_own_end(put: Put) -> None:
    right = batches.evaluation_windows

    def windows(count, *rest):
        return (some for some in right(count, *rest) if some[0] < count)

    put(batches, "evaluation_windows", windows)


# ---------------------------------------------------------------------------------------- mixtures


def place_drawn_by_chance(put: Put) -> None:
    """Shares right on average, in a state that a resumed run does not have."""
    generator = random.Random(0)

    def place(self, number):
        source = generator.choices(range(len(self.datasets)), [3, 1][: len(self.datasets)])[0]
        return source, number

    put(mixtures.Mixture, "place", place)


def place_drawn_by_position(put: Put) -> None:
    """Pure, but only right on average."""

    def place(self, number):
        return samples.scrambled(number) % len(self.datasets), number // len(self.datasets)

    put(mixtures.Mixture, "place", place)


def sources_share_one_count(put: Put) -> None:
    """All sources look up their order by the number of the sample in the mixture."""
    right = mixtures.Mixture.place
    put(mixtures.Mixture, "place", lambda self, number: (right(self, number)[0], number))


def shares_rounded(put: Put) -> None:
    right = mixtures.Fraction
    put(mixtures, "Fraction", lambda weight: right(round(weight * 10), 10))


# ----------------------------------------------------------------------------------------- workers


def batches_as_they_come(put: Put) -> None:
    """The order of the workers, here the worst, instead of that of the steps."""

    def reversed_pairs(make, steps, *_):
        steps = iter(steps)
        for one, two in zip(steps, steps):
            yield make(two)
            yield make(one)

    put(checks, "fetch_ahead", reversed_pairs)


def workers_have_their_own_share(put: Put) -> None:
    """Each worker makes whole parts of the data, so the order depends on how many there are."""
    right = loading.fetch_ahead

    def by_worker(make, steps, workers, *rest):
        numbers = (step // max(workers, 1) + 97 * (step % max(workers, 1)) for step in steps)
        return right(make, numbers, workers, *rest)

    put(checks, "fetch_ahead", by_worker)


def resumed_after_what_was_read_ahead(put: Put) -> None:
    right = loading.fetch_ahead

    def later(make, steps, workers, kind, depth):
        first = steps.start + depth if steps.start else 0
        return right(make, range(first, steps.stop), workers, kind, depth)

    put(checks, "fetch_ahead", later)


once = on_data(checks.check_every_token_is_a_target_once)
padded = on_data(checks.check_every_token_is_a_target_once, packing="pad")
order = on_data(checks.check_order)
evaluated = on_data(checks.check_evaluation, 3, 1)
metric = on_data(checks.check_bits_per_byte)
resumed = on_data(checks.check_resume, (2, 2), (3, 1), 4)
gpt2 = partial(checks.check_documents_do_not_leak, "gpt2", 0.0)
llama = partial(checks.check_documents_do_not_leak, "llama", 1e-9)
shares = partial(checks.check_shares, [0.7, 0.2, 0.1])

FAULTS = [
    Fault("the last window dropped", "DA-03", last_window_dropped, once),
    Fault("the last window of a document dropped", "DA-03", last_window_dropped, padded),
    Fault("labels shifted twice", "ACC-10", labels_shifted_twice, once),
    Fault("the same order in each epoch", "DA-06", same_order_in_each_epoch, order),
    Fault("samples drawn with replacement", "", drawn_with_replacement, order),
    Fault("an order of this process only", "DA-09", order_by_the_machine, resumed),
    Fault("a seed by rank", "DA-09", lambda put: None, check_ranks_of_their_own_seed),
    Fault("samples follow a stream", "CK-01", samples_follow_a_stream, check_purity),
    Fault("positions run on", "DA-04", positions_not_reset, gpt2),
    Fault("positions run on (numbers)", "DA-04", positions_not_reset,
          checks.check_documents_are_told_apart),
    Fault("attention over documents", "DA-04", attention_over_documents, gpt2),
    Fault("attention over documents (rotary, explicit)", "DA-04", attention_over_documents, llama),
    Fault("documents lost on the way", "DA-04", documents_forgotten_in_the_batch, gpt2),
    Fault("documents lost in evaluation", "DA-04", documents_forgotten_in_the_batch,
          checks.check_evaluation_keeps_documents_apart),
    Fault("an opening token seen from before", "DA-04", document_one_token_late, gpt2),
    Fault("repeats fill up an evaluation", "DA-07", repeats_fill_up, evaluated),
    Fault("repeats in the metric", "DA-07", repeats_fill_up, metric),
    Fault("an evaluation drops the rest", "DA-07", rest_dropped, evaluated),
    Fault("the metric drops the rest", "DA-07", rest_dropped, metric),
    Fault("ranks stop at their own end", "", ranks_stop_at_their_own_end, evaluated),
    Fault("a source drawn by chance", "", place_drawn_by_chance, checks.check_mixture_is_pure),
    Fault("a source drawn by position", "", place_drawn_by_position, shares),
    Fault("sources share one count", "", sources_share_one_count,
          checks.check_sources_have_their_own_epochs),
    Fault("shares rounded", "", shares_rounded, partial(checks.check_shares, [0.96, 0.04])),
    Fault("batches in the order of workers", "CK-01", batches_as_they_come, resumed),
    Fault("an order by the number of workers", "CK-01", workers_have_their_own_share, resumed),
    Fault("resumed after what was read ahead", "CK-01", resumed_after_what_was_read_ahead, resumed),
]  # fmt: skip
ROWS = [
    pytest.param(f, id=f.name, marks=[pytest.mark.trap(f.trap)] if f.trap else []) for f in FAULTS
]


@pytest.mark.parametrize("fault", ROWS)
def test_a_check_fails_on(fault, monkeypatch):
    fault.put_back(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        fault.check()


def test_all_checks_pass_without_a_fault():
    for check in {repr(fault.check): fault.check for fault in FAULTS}.values():
        if check is not check_ranks_of_their_own_seed:
            check()
