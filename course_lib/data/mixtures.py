"""Mixtures: several sources of text in fixed shares, each with its own epochs.

Drawing a source by chance for each sample would have to be remembered, and its shares would only
be right on average. Here a rule decides: of two sources, sample n comes from the one with share p
where ⌊(n + 1) · p + u⌋ passes a whole number, and ⌊n · p + u⌋ such samples came before it. The
others go to the rest, which is divided in the same way. So what the n-th sample is follows from
n alone, and the shares hold over every stretch: of any N samples in a row, a source gets N times
its share, give or take less than 2 · (sources - 1).
"""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from course_lib.data.config import DataConfig, weight_faults
from course_lib.data.preparation import Prepared
from course_lib.data.samples import Packing, Sample, TokenDataset, Windows, ordinal, scrambled
from course_lib.data.shards import TokenShards


class Mixture(Windows):
    """Data sets mixed by weights; it gives samples as a `TokenDataset` does.

    weights: one each, in any unit, none negative; a source of weight 0 is only evaluated.
    seed: shifts the pattern in which the sources take turns.
    Each source goes through its own epochs, so a small one with a large weight repeats often:
    see `drawn`. As held-out data (`len`, `window`), a mixture is all its windows, once each,
    whatever the weights.
    """

    def __init__(
        self, datasets: Sequence[TokenDataset], weights: Sequence[float], seed: int = 0
    ) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} data sets need as many weights, not {len(weights)}")
        if faults := weight_faults(dict(enumerate(weights))):
            raise ValueError("; ".join(faults))
        if len({data.sequence_length for data in datasets}) > 1:
            raise ValueError("the sources of a mixture need windows of one length")
        self.datasets = list(datasets)
        self.sequence_length = datasets[0].sequence_length
        self.text_bytes = sum(data.text_bytes for data in datasets)
        self._ends = np.cumsum([len(data) for data in datasets])  # (sources,) windows up to here
        self._apart = any(data.packing == "documents" for data in datasets)
        exact = [Fraction(weight) for weight in weights]
        self._rules = []  # (numerator, denominator, shift): share of what earlier sources left
        for source, weight in enumerate(exact):
            share = weight / (sum(exact[source:]) or 1)
            shift = scrambled(seed, source) % share.denominator
            self._rules.append((share.numerator, share.denominator, shift))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, number: int) -> tuple[int, int]:
        """Which source the n-th sample of training is from, and how many came from it before."""
        for source, (part, whole, shift) in enumerate(self._rules):
            before = (number * part + shift) // whole
            if (number * part + part + shift) // whole > before:
                return source, before
            number -= before
        raise AssertionError("the last source of positive weight takes all that is left")

    def drawn(self, samples: int) -> list[int]:
        """How many of the first so many samples each source gives; over its len: its epochs."""
        counts = []
        for part, whole, shift in self._rules:
            counts.append((samples * part + shift) // whole)
            samples -= counts[-1]
        return counts

    def locate(self, step: int, index: int, global_batch: int) -> tuple[int, int]:
        """The (epoch of its source, window) of sample `index` of the global batch at a step."""
        source, before = self.place(ordinal(step, index, global_batch))
        epoch, window = self.datasets[source].locate(before, 0, 1)
        return epoch, int(self._ends[source]) - len(self.datasets[source]) + window

    def windows(self, numbers: Sequence[int]) -> Sample:
        """Several windows, stacked; numbers go through the first source, then the second, …"""
        numbers = self.checked(numbers)
        sources = self._ends.searchsorted(numbers, side="right")  # (rows,)
        parts = []
        for source in np.unique(sources).tolist() or [0]:
            first = int(self._ends[source]) - len(self.datasets[source])
            part = self.datasets[source].windows(numbers[sources == source] - first)
            if self._apart and part.documents is None:  # each of these windows is one document
                part = part._replace(documents=np.zeros_like(part.tokens))
            parts.append(part)
        place = np.argsort(np.argsort(sources, kind="stable"))  # of each row among the parts
        return Sample(
            *(None if some[0] is None else np.concatenate(some)[place] for some in zip(*parts))
        )


def open_datasets(
    prepared: Prepared, config: DataConfig
) -> tuple[TokenDataset | Mixture, TokenDataset | Mixture | None]:
    """The training and the held-out data (None without any), their files verified.

    prepared: what `prepare` returned for this configuration.
    Each source is a `TokenDataset`; several are a `Mixture`. Held-out text that is too short for
    a window of the stream is read with packing "pad".
    """

    def opened(folder: Path, short: Packing) -> TokenDataset:
        shards = TokenShards(folder, prepared.vocab)
        packing = config.packing if len(shards) > config.sequence_length else short
        return TokenDataset(shards, config.sequence_length, packing, config.seed)

    def together(datasets: list, weights: list) -> TokenDataset | Mixture:
        return datasets[0] if len(datasets) == 1 else Mixture(datasets, weights, config.seed)

    train = [opened(source.train, config.packing) for source in prepared.sources]
    held_out = [opened(source.held_out, "pad") for source in prepared.sources if source.held_out]
    whole = together(held_out, [1.0] * len(held_out)) if held_out else None
    return together(train, [source.weight for source in prepared.sources]), whole
