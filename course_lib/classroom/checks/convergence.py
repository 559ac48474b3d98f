"""The exercises of "Why doesn't it converge?": name six faults; judge two remedies over seeds."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..broken_runs import FAULTS, Curves, Setting, broken, repaired, run_all
from .exercise import Exercise, WrongAnswer

NAMES = ("healthy", *FAULTS, "no clipping")
VERDICTS = ("helps", "hurts", "not shown")
REMEDIES = ("warm-up", "clipping")
FRESH_SEED, REFERENCE_SEED = 2, 4  # the notebook shows others


def grade_diagnosis(answer: Callable[[Curves, Curves], str]) -> None:
    """Show the answer runs of seeds that it has not seen, healthy ones among them."""
    _require_function(answer)
    runs = fresh_runs()
    for title, run in runs.items():
        if title == "reference":
            continue
        truth, said = title.partition(":")[0], answer(run, runs["reference"])
        if said not in NAMES:
            raise WrongAnswer(f"return one of {', '.join(map(repr, NAMES))}; yours: {said!r}.")
        if said != truth:
            raise WrongAnswer(_misread(title, said, run))


@lru_cache(maxsize=1)
def fresh_runs() -> dict[str, Curves]:
    """One run of each fault, two sound ones, and a sound one to compare with: ten seconds."""
    settings = {
        "schedule runs on": broken("schedule runs on", FRESH_SEED),
        "healthy": Setting(seed=FRESH_SEED),
        "healthy: in fp16": repaired("schedule runs on", FRESH_SEED),
    }
    for fault in FAULTS:
        settings.setdefault(fault, broken(fault, FRESH_SEED))
    settings["reference"] = Setting(seed=REFERENCE_SEED)
    return run_all(settings)


def _misread(title: str, said: str, run: Curves) -> str:
    """What the learner has overlooked in this run."""
    truth = title.partition(":")[0]
    told = f"a run of {truth!r} is called {said!r}. "
    if title == "healthy: in fp16":
        return told + (
            "It skips updates while its loss scale falls. That is what fp16 does; the schedule "
            "waits, so nothing is wrong."
        )
    if truth == "healthy":
        return told + "Its curves are those of the reference up to chance: widen your limits."
    if truth == "preprocessing":
        return told + (
            "Its training loss falls as it should. Only text that was not trained on looks bad: "
            "compare held_out[-1] with the training loss late in the run."
        )
    if truth == "schedule runs on":
        return told + (
            f"{run.skipped.sum()} updates were skipped, so its gradient overflowed in fp16 and "
            "nothing diverged. Look at what schedule does in the skipped steps."
        )
    if truth == "no warm-up" and said == "no clipping":
        return told + (
            "The gradient norm jumps right after the first update, and no batch is damaged there. "
            "Read schedule[0]."
        )
    if truth == "no warm-up":
        return told + "The norm jumps after the first update, and schedule[0] shows the cause."
    if truth == "high learning rate":
        return told + (
            "Its schedule warms up, yet the norm jumps after the first update, and the loss "
            "stays far above the reference, in training and on held-out text alike."
        )
    if truth == "small batch":
        return told + (
            "Its loss jumps from step to step several times as much as the reference's: look at "
            "the spread of np.diff(loss), not at its level."
        )
    return told + (
        f"Its gradient norm jumps once, just after the restart at step {run.resumed}: compare "
        "grad_norm[resumed + 1] with the steps before. Later nothing is seen."
    )


@dataclass(frozen=True)
class World:
    """A made-up laboratory whose truth is known: each remedy lowers the loss by so much."""

    warm_up: float
    clipping: float
    seed_spread: float  # how much seeds differ, whatever the remedies
    chance: float  # what comes on top in each single run

    def train(self, warm_up: bool, clipping: bool, seed: int) -> float:
        """Held-out loss of a run: bits per byte."""
        level = self.seed_spread * (random.Random(f"seed {seed}").random() - 0.5)
        return 4 + level + self._part("w", self.warm_up, warm_up, seed) + self._part(
            "c", self.clipping, clipping, seed
        )  # fmt: skip

    def _part(self, name: str, effect: float, used: bool, seed: int) -> float:
        """What a remedy takes off, and its chance: seeds 2k and 2k + 1 have opposite luck."""
        size = random.Random(f"{name} {seed // 2}").uniform(0.7, 1.3)
        luck = self.chance * size * (1 if seed % 2 == 0 else -1)
        return -(effect + luck) / 2 if used else (effect + luck) / 2

    def truth(self) -> dict[str, str]:
        """The verdict on each remedy."""
        return {
            name: "not shown" if effect == 0 else "helps" if effect > 0 else "hurts"
            for name, effect in zip(REMEDIES, (self.warm_up, self.clipping))
        }


WORLDS = (
    World(warm_up=0.3, clipping=0.0, seed_spread=0.2, chance=0.05),
    World(warm_up=0.0, clipping=0.3, seed_spread=0.2, chance=0.05),
    World(warm_up=0.0, clipping=0.0, seed_spread=0.2, chance=0.25),
    World(warm_up=-0.3, clipping=0.3, seed_spread=0.2, chance=0.05),
    World(warm_up=0.3, clipping=0.0, seed_spread=3.0, chance=0.05),
)


def grade_remedies(answer: Callable) -> None:
    """Give the answer laboratories in which it is known which remedy helps."""
    _require_function(answer)
    for world in WORLDS:
        asked: Counter = Counter()

        def train(warm_up: bool, clipping: bool, seed: int, world=world, asked=asked) -> float:
            asked[bool(warm_up), bool(clipping), seed] += 1
            return world.train(bool(warm_up), bool(clipping), seed)

        said = answer(train)
        _check_form(said)
        _check_plan(asked)
        for remedy, truth in world.truth().items():
            if said[remedy] != truth:
                raise WrongAnswer(_misjudged(world, remedy, said[remedy], truth))


def _require_function(answer: object) -> None:
    if not callable(answer):
        raise WrongAnswer("give the function itself: write its name without calling it.")


def _check_form(said: object) -> None:
    good = isinstance(said, dict) and set(said) == set(REMEDIES)
    if not good or not all(value in VERDICTS for value in said.values()):
        raise WrongAnswer(
            'return {"warm-up": …, "clipping": …}, each "helps", "hurts" or "not shown"; '
            f"yours: {said!r}."
        )


def _check_plan(asked: Counter) -> None:
    """Judge the experiment itself: cells, seeds, repetitions."""
    if not asked:
        raise WrongAnswer("you concluded without a single run: call train(warm_up, clipping, seed)")
    seeds = {seed for _, _, seed in asked}
    if len(seeds) == 1:
        raise WrongAnswer(
            "you ran one seed. What it shows may be chance, and the same seed again only repeats "
            "it. Use several."
        )
    if len(seeds) < 4:
        raise WrongAnswer(f"{len(seeds)} seeds give no idea of the spread. Use at least 4.")
    cells = {(warm_up, clipping) for warm_up, clipping, _ in asked}
    if cells <= {(True, True), (False, False)}:
        raise WrongAnswer(
            "you always change both remedies together, so you can't tell which one worked. Run "
            "also the cells with one of them."
        )


def _misjudged(world: World, remedy: str, said: str, truth: str) -> str:
    where = f"in a laboratory where {remedy} {'has no effect' if truth == 'not shown' else truth}"
    if {said, truth} == {"helps", "hurts"}:
        return f"{where}, you say {said!r}. A remedy helps if the loss is LOWER with it."
    if truth == "not shown":
        return (
            f"{where}, you say {said!r}. The difference changes its sign from seed to seed: its "
            "mean must be compared with its spread, divided by the root of the number of seeds."
        )
    if world.seed_spread > 1:
        return (
            f"{where}, you say {said!r}. Seeds differ much from each other here. Take the "
            "difference for the SAME seed first; then the seed's own level drops out."
        )
    return f"{where} by 0.3 bits per byte with every seed, you say {said!r}: a limit too strict."


EXERCISES = (
    Exercise(
        name="convergence/1",
        title="diagnose six runs",
        difficulty=2,
        minutes=15,
        hints=(
            "Follow the decision table from top to bottom: it asks first for what only one fault "
            "can do. For each line, compute one number from the curves.",
            "Five numbers suffice: does schedule change after a skipped step; held_out[-1] minus "
            "the late training loss; the spread of np.diff(loss); grad_norm after the first "
            "applied update over the one before; grad_norm[resumed + 1] over the median before "
            "the restart.",
            "Limits that work: any change; 0.4; 1.8 × healthy; 2 ×; 1.5 ×. Between “no warm-up” "
            "and “high learning rate”, schedule[0] == 1 decides. Leave skipped steps out with "
            "~run.skipped before you look for the first update.",
        ),
        solution="course_lib.classroom.diagnosis:diagnose",
        grade=grade_diagnosis,
    ),
    Exercise(
        name="convergence/2",
        title="judge two remedies by experiment",
        difficulty=2,
        minutes=15,
        hints=(
            "How many cells has the experiment, and how often must each be filled? Which two runs "
            "differ only in warm-up?",
            "For each seed, take the loss without the remedy minus the loss with it, as a mean "
            "over the other remedy on and off. That is one number a seed.",
            "The standard error of n numbers is statistics.stdev(numbers) / n ** 0.5. If their "
            "mean is within 3 standard errors of 0, nothing is shown.",
        ),
        solution="course_lib.classroom.diagnosis:judge_remedies",
        grade=grade_remedies,
    ),
)
