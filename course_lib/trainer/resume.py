"""Going on with an earlier run: what must be as it was, and what may have changed.

Model and data make a run what it is, and so does the part of the recipe that decides which samples
make a step and what is computed of them. The rest, such as the learning rate or the number of
steps, may be changed on purpose; then the run says so.

Settings are kept as text, as `config.toml` writes them: so they are shown as they were typed, and
are equal where their texts are.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from course_lib.checkpoint import CheckpointError
from course_lib.config import as_toml
from course_lib.trainer.settings import Config

# Settings of [training] that must stay, and those of [data] on which no sample depends.
RECIPE = ("training.global_batch_tokens", "training.precision", "training.optimizer",
          "training.seed")  # fmt: skip
SPEED = ("data.processes", "data.workers", "data.worker_kind", "data.cache")


def describe(config: Config, data_fingerprint: str) -> dict[str, Any]:
    """What a checkpoint keeps of a run, to be compared by `require_same_run`.

    Its "settings" leave out [run]: where a run writes, and how often, is free.
    """
    tables = {name: asdict(section) for name, section in config.sections().items()}
    del tables["run"]
    return {"settings": settings_of(tables), "data_fingerprint": data_fingerprint}


def settings_of(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Each setting as text: {"model.width": "128", "data.corpus": '"shakespeare"', …}."""
    return {
        f"{section}.{key}": as_toml(value)
        for section, table in tables.items()
        for key, value in table.items()
    }


def require_same_run(path: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Refuse to go on with another model, other data or another recipe than a checkpoint's run.

    saved: the run state of the checkpoint at path. now: of this run, from `describe`. Equal
    fingerprints mean equal samples, whatever the settings of the data.
    Returns in words each setting that is another now and may be. Raises CheckpointError naming
    each that may not, with both values; or, where no setting explains other data, the text itself.
    """
    before, saved_fingerprint = _stored(path, saved)
    settings, same_data = now["settings"], saved_fingerprint == now["data_fingerprint"]
    sections = {name.partition(".")[0] for name in before}
    faults, changes = [], []
    for name in {**settings, **before}:
        section, _, key = name.partition(".")
        old, new = before.get(name, "absent"), settings.get(name, "absent")
        if old == new or section not in sections:
            continue
        if _decides(name, same_data):
            faults.append(f"[{section}] {key} was {old}, is {new}")
        elif "absent" not in (old, new):  # else another edition of the course knew it
            changes.append(f"{name} {old} -> {new}")
    explained = any(fault.startswith(("[data]", "[model] vocab")) for fault in faults)
    if not same_data and not explained:
        faults.append(
            "[data] settings are as they were, but the text or the tokenizer itself is another: "
            "its files were changed, or another version of it was read"
            if "data" in sections
            else "[data] is not the same; this older checkpoint does not say in which setting"
        )
    if faults:
        advice = "set back what differs, or start a new run in another run.directory"
        raise CheckpointError(f"{path} is of another run: {'; '.join(faults)}; {advice}")
    return changes


def _stored(path: Any, saved: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The settings that a checkpoint knows of, and the fingerprint of its data."""
    if "settings" in saved:
        return saved["settings"], saved["data_fingerprint"]
    if "identity" not in saved:
        raise CheckpointError(f"{path} was not saved by the trainer: it has no settings of a run")
    old = saved["identity"]  # of an earlier edition: of the data only the fingerprint
    return settings_of({name: old[name] for name in ("model", "training")}), old["data"]


def _decides(name: str, same_data: bool) -> bool:
    """Whether another value of this setting makes another run."""
    if name.startswith("data."):
        return not same_data and name not in SPEED
    return name.startswith("model.") or name in RECIPE
