"""What a run reports: one JSON object a logged step, and a progress bar or plain lines.

A figure that is not known on this device is null, never invented.
"""

import json
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from course_lib.model import ModelConfig, count_flops

FIELDS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "peak_memory_bytes",
    "comm_fraction", "skipped",
)  # fmt: skip

# Dense 16-bit matrix-product peaks in FLOP/s, from the makers' data sheets, by whole words of the
# device's name; a variant that is not here is not known.
PEAK_FLOPS = {
    "H200": 989e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A100": 312e12,
    "V100-SXM2": 125e12, "V100-PCIE": 112e12, "L4": 121e12, "T4": 65e12,
}  # fmt: skip


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's 16-bit peak in FLOP/s; None where it is not known (CPUs, other precisions)."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\bNVL\b", name):
        return None  # slower than its namesakes
    found = [peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)]
    return found[0] if found else None


def model_flops_utilisation(
    config: ModelConfig, sequence: int, tokens_per_s: float, ranks: int, peak: float | None
) -> float | None:
    """MFU: FLOPs of the model's matrix products a second, over the peak of all ranks.

    The definition of PaLM (arXiv 2204.02311, appendix B): full attention scores, nothing for
    recomputation, the embedding look-up not counted. None where the peak is not known.
    """
    if peak is None:
        return None
    flops_per_token = count_flops(config, 1, sequence)["total"] / sequence
    return flops_per_token * tokens_per_s / (ranks * peak)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux reports kibibytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Window:
    """Sums over the steps since the last logged one, evaluations and checkpoints left out."""

    tokens: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0  # in collectives

    def add(self, tokens: int, seconds: float, waiting_s: float) -> None:
        """Add one step."""
        self.tokens += tokens
        self.seconds += seconds
        self.waiting_s += waiting_s


class JsonLines:
    """A file of one JSON object a line, that a resumed run continues where it left off."""

    def __init__(self, path: Path, last_step: int):
        """Keep what an earlier run wrote up to last_step; what it wrote after is trained again."""
        kept = [line for line in read_lines(path) if line["step"] <= last_step]
        self.last_step = kept[-1]["step"] if kept else None
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def write(self, line: dict) -> None:
        """Append one object."""
        self.last_step = line["step"]
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON-lines file; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def shown(value: float | None, form: str) -> str:
    """A figure as text; "-" where it is not known or not finite."""
    return "-" if value is None else format(value, form)


class Progress:
    """A bar on a terminal; otherwise one plain line a logged step."""

    def __init__(self, total: int, done: int, shown: bool):
        self._bar = None
        self._total, self._shown = total, shown
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    def step(self, applied: bool) -> None:
        """Move on by one step, if it was applied."""
        if self._bar is not None and applied:
            self._bar.update()

    def log(self, line: dict) -> None:
        """Show the metrics of a logged step."""
        figures = {
            "loss": shown(line["loss"], ".4f"),
            "tokens/s": shown(line["tokens_per_s"], ",.0f"),
            "MFU": shown(line["mfu"], ".1%"),
        }
        if self._bar is not None:
            self._bar.set_postfix(figures)
        elif self._shown:
            words = "  ".join(f"{key} {value}" for key, value in figures.items())
            print(f"step {line['step'] - line['skipped']}/{self._total}  {words}", flush=True)

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
