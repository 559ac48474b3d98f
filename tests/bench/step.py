"""One training step: ours against transformers' GPT-2, and against the CPU's sgemm peak.

    python tests/bench/step.py [--threads 1 2] [--batch 8] [--rounds 15]

Both models have the same shape, weights, data, loss and fused AdamW (fp32), and both may keep the
memory that they free, as the trainer does. One process runs the sgemm peak, our step and theirs in
turn, round by round; figures are medians over the rounds. Rounds in which other processes used the
CPUs are left out, where /proc/stat tells and enough are left.

FLOPs by two conventions: "full" counts all sequence x sequence attention scores (as PaLM's MFU and
FlopCounterMode do), "causal" half of them, the part that is needed. The fused attention kernel
skips most of the other half but computes the scores again in backward, so what it really executes
lies in between. The last line is one JSON object.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from course_lib.checkpoint.hugging_face import export_weights
from course_lib.checkpoint.hugging_face_config import config_to_hugging_face
from course_lib.memory import keep_freed_memory
from course_lib.model import ModelConfig, build, count_flops, parameter_spec
from course_lib.training import TrainingConfig, loss_sum, make_optimizer

SHAPE = ModelConfig(layers=6, width=384, heads=6, vocab=8192, context=256)
SGEMM_SIZES = (512, 768, 1024, 2048)
GOALS = {"ratio": 1.00, "share": 0.85}  # at most, at least (on one thread)
FOREIGN = 0.08  # share of a core that others may use in a round that counts
LEAST_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found = {}
    print("threads  ours ms  theirs ms  ratio  sgemm GF/s  share full  causal  quiet rounds")
    for threads in options.threads:
        row = found[str(threads)] = measure(threads, options.batch, options.rounds)
        print(
            f"{threads:7d} {row['ours_ms']:8.0f} {row['transformers_ms']:10.0f}"
            f" {row['ratio']:6.3f} {row['sgemm_gflops']:11.1f} {row['share_of_sgemm_full']:11.3f}"
            f" {row['share_of_sgemm_causal']:7.3f} {row['quiet_rounds']:8d} of {options.rounds}"
        )
    shape = {"layers": 6, "width": 384, "context": 256, "vocab": 8192, "batch": options.batch}
    print(json.dumps({"shape": shape, "goals": GOALS, "threads": found}))


def measure(threads: int, batch: int, rounds: int) -> dict[str, float]:
    """Medians of one interleaved run on so many threads."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    ours, theirs = steps(batch)
    agree(ours(), theirs())
    peaks = {size: sgemm(size) for size in SGEMM_SIZES}
    runs = {**peaks, "ours": ours, "theirs": theirs}
    for run in runs.values():
        run()
    timed = [time_round(runs) for _ in range(rounds)]
    quiet = [seconds for seconds, foreign in timed if foreign <= FOREIGN]
    used = quiet if len(quiet) >= LEAST_ROUNDS else [seconds for seconds, _ in timed]
    seconds = {name: median(r[name] for r in used) for name in runs}
    peak = max(sgemm_flops(size) / seconds[size] for size in SGEMM_SIZES)
    flops = {kind: count_flops(SHAPE, batch, SHAPE.context, kind)["total"] for kind in
             ("full", "causal")}  # fmt: skip
    return {
        "ours_ms": 1e3 * seconds["ours"],
        "transformers_ms": 1e3 * seconds["theirs"],
        "ratio": median(r["ours"] / r["theirs"] for r in used),
        "sgemm_gflops": peak / 1e9,
        "share_of_sgemm_full": flops["full"] / seconds["ours"] / peak,
        "share_of_sgemm_causal": flops["causal"] / seconds["ours"] / peak,
        "quiet_rounds": len(quiet),
    }


def steps(batch: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Our training step and transformers' on the same weights; each returns its loss."""
    ours = build(SHAPE)
    with torch.random.fork_rng():
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config_to_hugging_face(SHAPE)),
            attn_implementation="sdpa",
        ).train()
    theirs.load_state_dict(export_weights(ours.state_dict(), SHAPE), strict=False)
    decays = [(p, parameter_spec(ours, name).decay) for name, p in ours.named_parameters()]
    text = torch.randint(SHAPE.vocab, (batch, SHAPE.context + 1))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(forward, optimizer):
        def run() -> float:
            loss = loss_sum(forward(tokens), labels, in_place=True) / labels.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        return run

    def forward_theirs(tokens):
        return theirs(input_ids=tokens, use_cache=False).logits

    training = TrainingConfig(lr=1e-4)
    their_decays = [(p, p.dim() > 1) for p in theirs.parameters()]
    return (
        step(ours, make_optimizer(training, decays)),
        step(forward_theirs, make_optimizer(training, their_decays)),
    )


def agree(ours: float, theirs: float) -> None:
    """Both really compute the same."""
    if abs(ours - theirs) > 1e-4:
        raise SystemExit(f"the losses differ: ours {ours}, transformers' {theirs}")


def sgemm_flops(size: int) -> int:
    """FLOPs of one call of `sgemm(size)`: as many products as take about as long as a big one."""
    return repeats(size) * 2 * size**3


def repeats(size: int) -> int:
    return max(1, (1536 // size) ** 3)


def sgemm(size: int) -> Callable[[], None]:
    """Square products in fp32, without making new tensors."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)

    def run() -> None:
        for _ in range(repeats(size)):
            torch.mm(left, right, out=out)

    return run


def time_round(runs: Mapping[object, Callable]) -> tuple[dict[object, float], float]:
    """Seconds of each run, and the share of a core that other processes used meanwhile."""
    seconds = {}
    busy, own, start = busy_s(), time.process_time(), time.perf_counter()
    for name, run in runs.items():
        begin = time.perf_counter()
        run()
        seconds[name] = time.perf_counter() - begin
    foreign = busy_s() - busy - (time.process_time() - own)
    return seconds, foreign / (time.perf_counter() - start)


def busy_s() -> float:
    """Seconds that all CPUs of this machine have been busy; 0 where that is not told."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *others = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
