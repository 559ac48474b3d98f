"""The command line of the lab: `python -m course_lib.lab`, which is what `make lab` runs."""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from course_lib.data import CorpusUnavailable, default_cache, load_corpus
from course_lib.lab.report import write_report
from course_lib.lab.stations import (
    Lab,
    LaunchError,
    Station,
    agreement,
    machine,
    resume,
    training,
)

FALLBACK = "python-docs"  # text that lies on every machine, for where there is no network
MARKER = ".lab"  # marks a directory that a lab may empty


def run_lab(lab: Lab) -> list[Station]:
    """Run every station; one that breaks is a failed station, not the end of the lab."""
    stations = []
    for number, work in enumerate((machine, agreement, resume, training), 1):
        print(f"\nStation {number}: {work.__doc__.splitlines()[0]}", flush=True)
        start = time.perf_counter()
        station = _attempt(work, lab)
        if station.name != "machine":  # which takes none
            station.figures["seconds"] = round(time.perf_counter() - start, 1)
        print(f"  {station.verdict.upper()}: {station.finding}", flush=True)
        stations.append(station)
    return stations


def _attempt(work: Callable[[Lab], Station], lab: Lab) -> Station:
    try:
        return work(lab)
    except (LaunchError, OSError, LookupError, ValueError) as error:
        return Station(work.__name__, "fail", finding=f"{type(error).__name__}: {error}")


def choose_processes() -> tuple[list[int], str]:
    """1, 2, 4, 8 … processes as far as there are GPUs; with fewer than 2, 1 and 2 on the CPU."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        return [1, 2], "cpu"
    return [2**i for i in range(gpus.bit_length()) if 2**i <= gpus], "cuda"


def choose_corpus() -> str:
    """Shakespeare; where it cannot be fetched, text that is on every machine, and say so."""
    try:
        load_corpus("shakespeare", default_cache())
        return "shakespeare"
    except CorpusUnavailable as error:
        print(f"warning: {error}\nwarning: the lab goes on with {FALLBACK!r}", flush=True)
        return FALLBACK


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 0 if every station passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.lab", description=__doc__)
    parser.add_argument("--directory", default="runs/lab", help="where everything is written")
    parser.add_argument("--steps", type=int, default=500, help="steps of the training station")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    directory = Path(options.directory)
    try:
        make_room(directory)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the trainer is ended too
    try:
        return rehearse(directory, options.steps)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing runs any more", flush=True)
        return 130


def make_room(directory: Path) -> None:
    """An empty directory for this lab; an earlier lab's is emptied. Raises OSError for others."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; choose another --directory")
    if directory.is_dir() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise FileExistsError(
                f"{directory} is not empty and not of an earlier lab; choose another --directory"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).write_text("Written by the lab, which empties this directory.\n")


def rehearse(directory: Path, steps: int) -> int:
    """Run all stations and write the report; returns the exit code."""
    start = time.perf_counter()
    ranks, device = choose_processes()
    lab = Lab(directory, ranks, device, choose_corpus(), steps)
    stations = run_lab(lab)
    sample = stations[-1].figures.get("sample")
    if sample:
        print(f"\nA sample (the first words are the prompt):\n{'-' * 60}\n{sample}{'-' * 60}")
    summary = {
        "stations": [
            {"name": s.name, "verdict": s.verdict, "finding": s.finding, "figures": s.figures}
            for s in stations
        ],
        "corpus": lab.corpus,
        "seconds": round(time.perf_counter() - start, 1),
    }
    (directory / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_report(directory / "report.html", stations, summary)
    passed = sum(s.verdict == "pass" for s in stations)
    print(f"\n{passed} of {len(stations)} stations passed in {summary['seconds']:.0f} s.")
    print(f"Report: {directory / 'report.html'} and {directory / 'report.json'}")
    return 0 if passed == len(stations) else 1


if __name__ == "__main__":
    sys.exit(main())
