"""Preprocessing of a generated corpus: memory of all processes, MB/s by step and by processes.

    python tests/bench/preprocess.py [--megabytes 1000] [--processes 2] [--tokenising 1 2]

The corpus is JSONL: pages of HTML, of which a tenth repeat an earlier one exactly and a tenth
nearly. It is cleaned, de-duplicated and tokenized while the private memory (USS) of the process
and its workers is summed again and again. Goal: at most 500 MB, whatever the size of the corpus.
The last line is one JSON object.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from course_lib.data import train_tokenizer  # noqa: E402
from course_lib.data.loading import fetch_ahead  # noqa: E402

BOUND_MB = 500
VOCAB = 8192
_PROGRAM = """
import json, sys, time
from course_lib.data import DataConfig, prepare
start = time.perf_counter()
prepared = prepare(DataConfig(**json.loads(sys.argv[1])), int(sys.argv[2]))
print(json.dumps({
    "seconds": time.perf_counter() - start, "counts": prepared.counts,
    "torch": "torch" in sys.modules,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokenising", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure_memory(Path(folder), options.megabytes, options.processes)
    print("corpus MB  processes  seconds  MB/s  peak USS MB  bound  kept of documents")
    counts = found["counts"]
    print(
        f"{options.megabytes:9d} {options.processes:10d} {found['seconds']:8.0f}"
        f" {found['mb_per_s']:5.1f} {found['peak_uss_mb']:12.0f} {BOUND_MB:6d}"
        f"  {counts['kept']} of {counts['documents']}"
    )
    found["tokenising_mb_per_s"] = {}
    print("processes  tokenising MB/s")
    for processes in options.tokenising:
        speed = measure_tokenising(processes, 16)
        found["tokenising_mb_per_s"][str(processes)] = speed
        print(f"{processes:9d} {speed:16.2f}")
    print(json.dumps(found))


def measure_memory(folder: Path, megabytes: int, processes: int, vocab: int = VOCAB) -> dict:
    """Prepare a generated corpus in a program of its own and watch the memory meanwhile."""
    corpus = folder / "pages.jsonl"
    write_corpus(corpus, megabytes)
    options = {
        "corpus": str(corpus), "cache": str(folder / "cache"), "clean": True,
        "deduplicate": "near", "processes": processes,
    }  # fmt: skip
    command = [sys.executable, "-c", _PROGRAM, json.dumps(options), str(vocab)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    peak = seen = 0
    while process.poll() is None:
        family = [process.pid, *_children(process.pid)]
        peak, seen = max(peak, sum(map(_uss_bytes, family))), max(seen, len(family))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"preparing ended with exit code {process.returncode}")
    found = json.loads(process.stdout.read())
    return found | {
        "megabytes": megabytes, "processes": processes, "processes_seen": seen,
        "peak_uss_mb": peak / 1e6, "bound_mb": BOUND_MB,
        "mb_per_s": megabytes / found["seconds"],
    }  # fmt: skip


def measure_tokenising(processes: int, megabytes: float) -> float:
    """MB of text a second that so many processes turn into token ids, once they are running."""
    texts = [page_text(random.Random(seed), 2_000) for seed in range(50)]
    tokenizer = train_tokenizer(texts, VOCAB)
    chunk = ("\n".join(texts) * 100)[:1_000_000]
    count = max(int(megabytes), 1)
    encode = partial(_encoded, tokenizer.core.to_str(), chunk)
    workers = processes if processes > 1 else 0
    results = fetch_ahead(encode, range(count + max(workers, 1)), workers, "process", workers + 1)
    for _ in range(max(workers, 1)):
        next(results)  # each process is running
    start = time.perf_counter()
    tokens = sum(results)
    return count * len(chunk.encode()) / 1e6 / (time.perf_counter() - start) if tokens else 0.0


def _encoded(definition: str, chunk: str, _: int) -> int:
    from tokenizers import Tokenizer

    from course_lib.data import TextTokenizer

    return TextTokenizer(Tokenizer.from_str(definition)).encode_document(chunk, at_once=1).size


def write_corpus(path: Path, megabytes: float) -> None:
    """Pages of about 4 KB as JSONL; the same for every run."""
    chance, written, earlier = random.Random(0), 0, []
    sentences = [page_text(chance, 60) for _ in range(min(20_000, int(megabytes * 200) + 20))]
    with path.open("w") as file:
        while written < megabytes * 1e6:
            kind = chance.random()
            if earlier and kind < 0.1:
                text = chance.choice(earlier)
            elif earlier and kind < 0.2:
                text = chance.choice(earlier) + page_text(chance, 9)
            else:
                text = "\n".join(chance.choices(sentences, k=12))
                if len(earlier) < 500:
                    earlier.append(text)
            page = f"<html><p>{text}&amp; so on.</p></html>"
            written += file.write(json.dumps({"text": page}) + "\n")


def page_text(chance: random.Random, words: int) -> str:
    """Words of which the n-th most frequent one has a share of about 1 / n, as in a language."""
    return "".join(chance.choices(_WORDS, cum_weights=_SHARES, k=words))


_PARTS = ["".join(pair) for pair in itertools.product("bdfgklmnprst", "aeiou")]
_WORDS = ["".join(parts) + " " for n in (1, 2, 3) for parts in itertools.product(_PARTS, repeat=n)]
_WORDS = _WORDS[:50_000]
_SHARES = list(itertools.accumulate(1 / n for n in range(1, len(_WORDS) + 1)))


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _uss_bytes(pid: int) -> int:
    """Private memory of a process, in bytes; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
