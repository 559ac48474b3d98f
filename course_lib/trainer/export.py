"""The model of a run for transformers: `python -m course_lib.trainer.export RUN FOLDER`.

RUN is a run's directory: its newest checkpoint is taken, and the model that its config.toml
describes. FOLDER gets config.json, model.safetensors and tokenizer.json, which transformers'
`AutoModelForCausalLM` and `AutoTokenizer` load by `from_pretrained("FOLDER")`.
"""

import shutil
import sys
from pathlib import Path

from course_lib import checkpoint
from course_lib.checkpoint import CheckpointError, hugging_face
from course_lib.config import ConfigError, load
from course_lib.data import CorpusUnavailable, DataError, prepare
from course_lib.mesh import Mesh
from course_lib.trainer.settings import SECTIONS, Config
from course_lib.trainer.step import parallelize

USAGE = "usage: python -m course_lib.trainer.export RUN_DIRECTORY FOLDER"


def export_run(run: str | Path, folder: str | Path) -> Path:
    """Write the model of a run's newest checkpoint, and its tokenizer, for transformers.

    Weights keep their dtype; a model of any number of processes is written whole.
    Returns the checkpoint's path. Raises ConfigError or CheckpointError where the run is not
    complete, transformers has no such model, or the run's text has changed since.
    """
    run, folder, mesh = Path(run), Path(folder), Mesh.single()
    newest = checkpoint.latest(run / "checkpoints")
    if newest is None:
        raise CheckpointError(f"{run / 'checkpoints'} holds no checkpoint; name a run's directory")
    config = Config(**load(run / "config.toml", [], SECTIONS))
    hugging_face.family_of(config.model)  # refused before anything is read
    prepared = prepare(config.data, config.model.vocab)
    state = parallelize(config.model, config.training, mesh)
    saved = checkpoint.load(newest, state.records, None, mesh)
    if saved.get("data_fingerprint", prepared.fingerprint) != prepared.fingerprint:
        raise CheckpointError(
            f"the text that {run / 'config.toml'} names is not what {newest} was trained on, so "
            "its tokenizer may be another; put the text back as it was"
        )
    hugging_face.export_model(folder, state.model.state_dict(), config.model)
    shutil.copyfile(prepared.tokenizer, folder / "tokenizer.json")
    return newest


def main(arguments: list[str]) -> int:
    """The command line; returns 0, 1 where it failed, 2 where it was called wrongly."""
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        newest = export_run(*arguments)
    except (ConfigError, CheckpointError, DataError, CorpusUnavailable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{newest} is written to {arguments[1]} for transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
