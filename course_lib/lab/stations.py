"""The stations of the lab: each launches the trainer and proves one thing about it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from course_lib.model import ModelConfig, count_parameters
from course_lib.trainer.loop import STOPPED
from course_lib.trainer.metrics import read_lines

CONFIGS = Path(__file__).resolve().parents[2] / "chapters" / "lab" / "configs"
AGREEMENT_STEPS = 20
# fp64, uneven masks, several micro-batches and clipping that binds: what hides no fault.
EXACT = {
    "training_precision": "fp64", "training_steps": AGREEMENT_STEPS, "training_micro_batch": 2,
    "training_clip_norm": 0.5, "data_packing": "pad", "run_log_every": 1, "run_keep": 10,
    "run_sample_tokens": 0, "run_deterministic": "true",
}  # fmt: skip


@dataclass
class Station:
    """One part of the lab: what was looked at, what was found, whether it is as it must be."""

    name: str
    verdict: str = "pass"
    figures: dict = field(default_factory=dict)
    finding: str = ""
    curves: dict = field(default_factory=dict)  # metrics.jsonl's lines by label, to be drawn
    drawn: tuple[str, ...] = ("loss",)  # metrics that the report draws

    def require(self, condition: bool, fault: str) -> None:
        """Fail the station, with a reason, where a condition does not hold."""
        if not condition:
            self.verdict = "fail"
            self.finding = f"{self.finding} {fault}".strip()


class LaunchError(RuntimeError):
    """A trainer that did not end as it should; carries the end of its output."""


@dataclass
class Lab:
    """Where the lab writes, and what it runs on."""

    directory: Path
    ranks: list[int]  # numbers of processes to compare, the first is 1
    device: str  # for what is compared: "cuda" where there are several GPUs, else "cpu"
    corpus: str
    steps: int  # of the training station

    def train(self, config: str, name: str, ranks: int, expect: int = 0, **settings) -> Path:
        """Run the trainer to its end on some processes; returns its run directory.

        settings: section_key=value, for `--section.key=value`. Raises LaunchError.
        """
        directory = self.directory / name
        options = {
            "run_directory": directory,
            "run_device": self.device,
            "data_corpus": self.corpus,
            **settings,
        }
        overrides = [f"--{key.replace('_', '.', 1)}={value}" for key, value in options.items()]
        module = ["-m", "course_lib.trainer", str(CONFIGS / config), *overrides]
        # One process needs no launcher; with several, torchrun finds a free port by itself.
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks > 1 else []), *module]
        environment = {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic products on GPUs
            **os.environ,
        }
        print(f"  {name}: {processes(ranks)} …", flush=True)
        run_trainer(command, environment, expect, directory.with_suffix(".log"))
        return directory


def run_trainer(command: list[str], environment: dict, expect: int, log: Path) -> None:
    """Run a command and keep its output in a log, showing its plain lines as they come."""
    log.parent.mkdir(parents=True, exist_ok=True)
    root = str(CONFIGS.parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    tail: list[str] = []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with log.open("w") as file, subprocess.Popen(command, env=environment, **pipe) as process:
        try:
            for line in process.stdout:
                file.write(line)
                tail = [*tail[-14:], line]
                if line.startswith(("step ", "held-out", "resumed", "preparing")):
                    print(f"    {line}", end="", flush=True)
                elif line.startswith("stopped"):  # as planned; it also says "run it again"
                    print(f"    {line.partition(';')[0]}; the lab goes on by itself", flush=True)
        except BaseException:
            process.terminate()  # it saves and leaves
            raise
    # torchrun reports a rank's own exit code as 1.
    if process.returncode not in ({0} if expect == 0 else {expect, 1}):
        raise LaunchError(f"exit code {process.returncode}; see {log}\n{''.join(tail)}")


# ------------------------------------------------------------------------------- the stations


def machine(lab: Lab) -> Station:
    """What there is to run on, and whether there is room to write."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free = shutil.disk_usage(lab.directory).free
    station = Station("machine")
    station.figures = {
        "gpus": gpus,
        "cpu_cores": os.cpu_count(),
        "torch": torch.__version__,
        "free_disk_bytes": free,
        "processes": lab.ranks,
    }
    where = ", ".join(gpus) if gpus else f"{os.cpu_count()} CPU cores, no GPU"
    station.finding = f"{where}; torch {torch.__version__}; runs on {listed(lab.ranks)}."
    station.require(free > 2e8, f"Only {free / 1e6:.0f} MB of disk are free; 200 MB are needed.")
    return station


def agreement(lab: Lab) -> Station:
    """Train on each number of processes in fp64: the losses must be the same."""
    station, losses = Station("agreement"), {}
    for ranks in lab.ranks:
        half = {"run_checkpoint_every": AGREEMENT_STEPS // 2}
        run = lab.train("tiny.toml", f"agreement-{ranks}", ranks, **EXACT, **half)
        station.curves[processes(ranks)] = lines = read_lines(run / "metrics.jsonl")
        losses[ranks] = [line["loss"] for line in lines]
    worst = max(largest_difference(losses[lab.ranks[0]], other) for other in losses.values())
    station.figures = {"steps": AGREEMENT_STEPS, "precision": "fp64", "largest_difference": worst}
    station.finding = (
        f"{AGREEMENT_STEPS} steps in fp64 on {listed(lab.ranks)}: losses are "
        f"{difference(worst, 1e-10)}."
    )
    station.require(worst <= 1e-10, "They must not.")
    return station


def resume(lab: Lab) -> Station:
    """Go on from the middle of the last agreement run: every figure must repeat to the bit."""
    ranks, half = lab.ranks[-1], AGREEMENT_STEPS // 2
    whole, copy = lab.directory / f"agreement-{ranks}", lab.directory / "resumed"
    shutil.copytree(whole / "checkpoints" / f"step_{half}", copy / "checkpoints" / f"step_{half}")
    lab.train("tiny.toml", "resumed", ranks, **EXACT)
    unbroken, resumed = (read_lines(run / "metrics.jsonl") for run in (whole, copy))
    same = [
        all(line[key] == other[key] for key in ("step", "loss", "grad_norm", "lr"))
        for line, other in zip(unbroken[half:], resumed, strict=True)
    ]
    station = Station("resume", figures={"stopped_at": half, "equal_steps": sum(same)})
    station.finding = (
        f"Stopped after step {half} and resumed: {sum(same)} of {len(same)} steps repeat loss, "
        "gradient norm and learning rate to the last bit."
    )
    station.require(all(same) and len(same) == AGREEMENT_STEPS - half, "All must.")
    return station


def training(lab: Lab) -> Station:
    """Train a model that writes plays; a short run on fewer processes must follow it."""
    station = Station("training", drawn=("loss", "tokens_per_s", "peak_memory_bytes"))
    # One GPU alone trains the model, and two CPU processes check it; else all processes train.
    one_gpu = torch.cuda.device_count() == 1
    few, many = (2, 1) if one_gpu else (1, lab.ranks[-1])
    allowed, compared = 1e-3 if one_gpu else 1e-4, min(40, lab.steps // 2)
    plan = {
        "training_steps": lab.steps,
        "training_warmup": min(50, lab.steps),
        "run_log_every": 5 if lab.steps >= 50 else 1,
    }
    short = lab.train("play.toml", "play-short", few, STOPPED, run_stop_after=compared, **plan)
    share = {"training_micro_batch": 32 // many, "run_device": "cuda" if one_gpu else lab.device}
    run = lab.train("play.toml", "play", many, **share, **plan)

    short, full = (read_lines(path / "metrics.jsonl") for path in (short, run))
    station.curves = {processes(few): short, processes(many): full}
    losses = [[line["loss"] for line in lines[: len(short)]] for lines in (short, full)]
    worst = largest_difference(*losses)
    bits = read_lines(run / "evaluation.jsonl")[-1]["bits_per_byte"]
    parameters = count_parameters(ModelConfig.presets()["playwright"])["total"]
    speeds = {label: median(lines, "tokens_per_s") for label, lines in station.curves.items()}
    station.figures = {
        "parameters": parameters,
        "steps": lab.steps,
        "first_loss": full[0]["loss"],
        "last_loss": full[-1]["loss"],
        "bits_per_byte": bits,
        "tokens_per_s": speeds,
        "logged_lines": {label: len(lines) for label, lines in station.curves.items()},
        "peak_memory_bytes": full[-1]["peak_memory_bytes"],
        "largest_difference": worst,
        "sample": (run / "sample.txt").read_text(encoding="utf-8"),
    }
    station.finding = (
        f"{parameters / 1e6:.1f} M parameters, {lab.steps} steps: {bits:.2f} bits a byte on "
        f"held-out text. Over the first {compared} steps the losses on {processes(few)} and on "
        f"{processes(many)} are {difference(worst, allowed)}."
    )
    station.require(worst <= allowed, "They disagree.")
    station.require(full[-1]["loss"] < full[0]["loss"], "The loss did not fall.")
    return station


def processes(ranks: int) -> str:
    """A number of processes in words."""
    return "1 process" if ranks == 1 else f"{ranks} processes"


def listed(ranks: list[int]) -> str:
    """Several numbers of processes in words."""
    return f"{', '.join(map(str, ranks[:-1]))} and {processes(ranks[-1])}"


def largest_difference(reference: list[float], other: list[float]) -> float:
    """Largest relative difference of two equally long lists of losses."""
    return max(abs(a - b) / abs(a) for a, b in zip(reference, other, strict=True))


def difference(worst: float, allowed: float) -> str:
    """The largest relative difference of losses, in words."""
    if worst == 0:
        return "equal to the last bit"
    return f"equal to within {worst:.1e} of their value (allowed {allowed:.0e})"


def median(lines: list[dict], key: str) -> float:
    """Median of a metric over the logged steps."""
    values = sorted(line[key] for line in lines)
    return values[len(values) // 2]
