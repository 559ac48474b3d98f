"""The command line: `python -m course_lib.trainer CONFIG.toml`, or many of it under torchrun."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from course_lib.checkpoint import CheckpointError
from course_lib.collectives import CollectiveError
from course_lib.config import ConfigError, list_keys
from course_lib.data import CorpusUnavailable, DataError, DataWorkerDied
from course_lib.memory import keep_freed_memory
from course_lib.mesh import Mesh, make_mesh
from course_lib.trainer.directory import RunInUse
from course_lib.trainer.loop import Trainer, TrainingDiverged
from course_lib.trainer.settings import SECTIONS, Config, Layout, load_config

USAGE = """usage: python -m course_lib.trainer CONFIG.toml [--section.key=value …]
       torchrun --nproc-per-node N -m course_lib.trainer CONFIG.toml [--section.key=value …]"""
EXPECTED = (
    ConfigError, DataError, DataWorkerDied, CorpusUnavailable, CheckpointError, CollectiveError,
    TrainingDiverged, RunInUse, OSError,
)  # fmt: skip
ALIKE = (ConfigError, TrainingDiverged, RunInUse)  # on all ranks: one of them speaks for all


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code. 2: bad configuration, 1: failed, 75: stopped."""
    if "-h" in arguments or "--help" in arguments:
        print(f"{USAGE}\n\n{list_keys(SECTIONS)}")
        return 0
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\n       --help lists all keys", file=sys.stderr)
        return 2
    process = Process.from_environment()
    try:
        config, layout = load_config(arguments[0], arguments[1:], process.world_size)
        mesh = start(config, layout, process)
        return Trainer(config, layout, mesh).run()
    except EXPECTED as error:
        if process.rank == 0 or not isinstance(error, ALIKE):
            # A bare "No space left on device" does not say where.
            where = f" (run.directory {config.run.directory})" if isinstance(error, OSError) else ""
            print(f"error: {error}{where}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Process:
    """torchrun's description of this process; the only place where the environment is read."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int

    @classmethod
    def from_environment(cls) -> "Process":
        """One process alone where torchrun did not start this one."""
        names = {
            "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        return cls(*(int(os.environ.get(name, default)) for name, default in names.items()))


def start(config: Config, layout: Layout, process: Process) -> Mesh:
    """Choose this rank's device, join the process group, arrange the mesh."""
    device = choose_device(config, process)
    if device.type == "cpu":
        keep_freed_memory()
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
    if process.world_size == 1:
        return Mesh.single(device)
    join_group(process, "nccl" if device.type == "cuda" else "gloo", config.run.timeout_s)
    return make_mesh({"dp": layout.dp}, device)


def join_group(process: Process, backend: str, timeout_s: float) -> None:
    """Join the other processes.

    After a restart torchrun's store still holds the addresses of the processes that died, and a
    rank that reads one cannot connect. So each attempt has its own corner of the store. Agents
    of several nodes do not count restarts alike: there, start torchrun with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if process.local_world_size == process.world_size:
        store = dist.PrefixStore(f"attempt-{process.restarts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def choose_device(config: Config, process: Process) -> torch.device:
    """A GPU for each process of this machine, or the CPU for all of them."""
    wanted, found = config.run.device, torch.cuda.device_count()
    enough = found >= process.local_world_size
    if wanted == "cuda" and not enough:
        count = process.local_world_size
        needs = (
            "1 process here needs a GPU"
            if count == 1
            else f"{count} processes here need {count} GPUs"
        )
        raise ConfigError([f"run.device cuda: {needs}, found {found or 'none'}"])
    if wanted == "cpu" or not enough:
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    if config.training.precision == "bf16" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name()
        raise ConfigError([f"{name} has no bf16; use training.precision fp16"])
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
