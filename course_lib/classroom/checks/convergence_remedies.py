"""How "judge two remedies by experiment" is checked: in made-up laboratories of known truth.

A verdict is refused only where the numbers that the answer has asked for do not justify it. So any
seeds will do. In two laboratories bad luck is dealt on purpose, to whichever seeds come first: it
looks like an effect to an answer that only counts signs, or takes one seed for two.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, stdev

from .exercise import WrongAnswer, require_function

# The first four and five effects have one sign, but are only 1.6 standard errors from 0.
ONE_SIGN = (0.2, 0.1, 1.6, 0.3, 0.2, -0.9, -0.6, -0.9)
# 2.1 to 2.3 standard errors after 4 to 8 seeds. Each counted twice: 3.1 and more.
COUNTED_TWICE = (1.2, 1.2, -0.1, 0.5, 0.2, 0.0, 0.2, 0.1)
VERDICTS = ("helps", "hurts", "not shown")
REMEDIES = ("warm-up", "clipping")


@dataclass
class World:
    """A laboratory in which each remedy lowers the loss by so much (bits per byte)."""

    warm_up: float
    clipping: float
    chance: float  # what comes on top in each pair of runs
    seed_spread: float = 0.2  # how much seeds differ, whatever the remedies
    dealt: tuple[float, ...] = ()  # luck with warm-up of the first seeds; by default it is drawn
    seeds: dict[object, int] = field(default_factory=dict)  # in the order in which they came
    asked: dict[tuple[bool, bool, object], float] = field(default_factory=dict)

    def train(self, warm_up: bool, clipping: bool, seed: int) -> float:
        """Held-out loss of a run, in bits per byte; a pure function, which notes what was asked."""
        used = bool(warm_up), bool(clipping)
        loss = 4 + self.seed_spread * _drawn("level", seed)
        for remedy, effect, on in zip(REMEDIES, (self.warm_up, self.clipping), used):
            part = effect + self.chance * self._luck(remedy, seed)
            loss += -part / 2 if on else part / 2
        self.asked[*used, seed] = loss
        return loss

    def _luck(self, remedy: str, seed: object) -> float:
        """Good or bad luck of a seed: between 0.7 and 1.3, of either sign, unless it is dealt."""
        place = self.seeds.setdefault(seed, len(self.seeds))
        if self.dealt and remedy == "warm-up":
            again, at = divmod(place, len(self.dealt))
            return self.dealt[at] * (-1) ** again  # the next ones are as lucky as these unlucky
        drawn = _drawn(f"luck with {remedy}", seed)
        return (0.7 + 1.2 * abs(drawn)) * (1 if drawn > 0 else -1)

    def truth(self, remedy: str) -> str:
        """The verdict on a remedy."""
        effect = self.warm_up if remedy == "warm-up" else self.clipping
        return "not shown" if effect == 0 else "helps" if effect > 0 else "hurts"

    def effects(self, remedy: str) -> list[float]:
        """What the asked runs show: the loss without the remedy minus that with it, by seed."""
        found = {}
        for (w, c, seed), loss in self.asked.items():
            off = (False, c, seed) if remedy == "warm-up" else (w, False, seed)
            if (w if remedy == "warm-up" else c) and off in self.asked:
                found.setdefault(seed, []).append(self.asked[off] - loss)
        return [mean(differences) for differences in found.values()]


def _drawn(what: str, seed: object) -> float:
    return random.Random(f"{what} {seed}").random() - 0.5


def worlds() -> tuple[World, ...]:
    """Fresh laboratories: nothing has been asked of them."""
    return (
        World(warm_up=0.3, clipping=0.0, chance=0.05),
        World(warm_up=0.0, clipping=0.3, chance=0.05),
        World(warm_up=0.0, clipping=0.0, chance=0.5),
        World(warm_up=0.0, clipping=0.0, chance=1.0),
        World(warm_up=-0.3, clipping=0.3, chance=0.05),
        World(warm_up=0.05, clipping=0.0, chance=0.004),
        World(warm_up=0.3, clipping=0.0, chance=0.05, seed_spread=3.0),
        World(warm_up=0.0, clipping=0.3, chance=0.05, dealt=ONE_SIGN),
        World(warm_up=0.0, clipping=0.3, chance=0.05, dealt=COUNTED_TWICE),
    )


def grade_remedies(answer: Callable) -> None:
    """Give the answer laboratories in which it is known which remedy helps."""
    require_function(answer)
    for world in worlds():
        said = answer(world.train)
        _check_form(said)
        _check_plan(world)
        for remedy in REMEDIES:
            if said[remedy] != world.truth(remedy) and not _justified(world, remedy, said[remedy]):
                raise WrongAnswer(_misjudged(world, remedy, said[remedy]))


def _check_form(said: object) -> None:
    good = isinstance(said, dict) and set(said) == set(REMEDIES)
    if not good or not all(isinstance(v, str) and v in VERDICTS for v in said.values()):
        raise WrongAnswer(
            'return {"warm-up": …, "clipping": …}, each "helps", "hurts" or "not shown"; '
            f"yours: {said!r}."
        )


def _check_plan(world: World) -> None:
    """Judge the experiment itself: cells, seeds, repetitions."""
    seeds = {seed for _, _, seed in world.asked}
    if not seeds:
        raise WrongAnswer("you concluded without a single run: call train(warm_up, clipping, seed)")
    if len(seeds) == 1:
        raise WrongAnswer(
            "you ran one seed. What it shows may be chance, and the same seed again only repeats "
            "it. Use several."
        )
    if {cell[:2] for cell in world.asked} <= {(True, True), (False, False)}:
        raise WrongAnswer(
            "you always change both remedies together, so you can't tell which one worked. Run "
            "also the cells with one of them."
        )
    for remedy in REMEDIES:
        pairs = len(world.effects(remedy))
        if pairs == 0:
            raise WrongAnswer(
                f"no two of your runs differ in {remedy} alone. Run it on and off, with the same "
                "seed and the other remedy unchanged."
            )
        if pairs < 4:
            raise WrongAnswer(
                f"{pairs} seeds with and without {remedy} give no idea of the spread. Use at "
                "least 4."
            )


def _standard_errors(effects: list[float]) -> float:
    """How many standard errors the mean is away from 0."""
    return mean(effects) / (stdev(effects) / len(effects) ** 0.5)


def _justified(world: World, remedy: str, said: str) -> bool:
    """Whether the asked numbers allow a verdict that is not the truth."""
    away = _standard_errors(world.effects(remedy))
    if said == "not shown":
        return abs(away) < 4
    return away > 2.4 if said == "helps" else away < -2.4


def _differences_of_means(world: World, remedy: str) -> float:
    """How many standard errors apart all runs with and without the remedy are, seeds unpaired."""
    at = REMEDIES.index(remedy)
    used, without = (
        [x for cell, x in world.asked.items() if cell[at] is on] for on in (True, False)
    )
    error = sum(stdev(part) ** 2 / len(part) for part in (used, without)) ** 0.5
    return (mean(without) - mean(used)) / error


def _misjudged(world: World, remedy: str, said: str) -> str:
    truth, effects = world.truth(remedy), world.effects(remedy)
    where = f"in a laboratory where {remedy} {'has no effect' if truth == 'not shown' else truth}"
    if {said, truth} == {"helps", "hurts"}:
        return f"{where}, you say {said!r}. A remedy helps if the loss is LOWER with it."
    numbers = (
        f"the mean of your {len(effects)} differences is {mean(effects):.2f}, its standard error "
        f"{stdev(effects) / len(effects) ** 0.5:.3f}. "
    )
    if truth == "not shown":
        return f"{where}, you say {said!r}: {numbers}{_overrated(effects)}"
    told = f"{where}, you say {said!r}"
    if abs(_differences_of_means(world, remedy)) < 4:
        told += ". " if world.seed_spread > 1 else f": {numbers}That is far beyond chance. "
        return told + (
            "Seeds differ more from each other than runs with and without the remedy. Take the "
            "difference for the SAME seed first; then the seed's own level drops out."
        )
    return (
        f"{told}: {numbers}That is far beyond chance. A fixed limit does not know the spread; 3 "
        "standard errors are enough."
    )


def _overrated(effects: list[float]) -> str:
    """Why these numbers, one a seed, do not show an effect."""
    same_sign = len({effect > 0 for effect in effects}) == 1
    if same_sign and len(effects) < 6:
        return (
            f"All {len(effects)} have the same sign, but chance alone does that once in "
            f"{2 ** (len(effects) - 1)} times. Compare the mean with its standard error."
        )
    if abs(_standard_errors(effects)) > 2:
        return (
            f"That is {abs(_standard_errors(effects)):.1f} standard errors, and within 3 it may be "
            "chance. Two differences of the same seed do not count twice: take their mean first, "
            "one number a seed."
        )
    return (
        "The mean must be compared with its spread over the seeds, divided by the root of their "
        "number."
    )
