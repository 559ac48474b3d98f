"""A run's configuration: TOML and command line in, frozen dataclasses out, faults all at once.

Each module owns the dataclass of its section: fields annotated with their type and, in words,
their meaning and unit; `faults()` for values; `presets()` for named starting points. This module
only reads them, so it knows none of their keys, and stands below all others.
"""

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; `faults` lists everything that is wrong."""

    def __init__(self, faults: list[str], source: str = "configuration"):
        self.faults = faults
        super().__init__(
            "\n".join([f"{source}: {len(faults)} fault(s)", *(f"- {f}" for f in faults)])
        )


Judge = Callable[[dict[str, Any]], list[str]]


def load(
    path, overrides: list[str], sections: Mapping[str, type], judge: Judge | None = None
) -> dict[str, Any]:
    """Read a TOML file and `--section.key=value` overrides into one dataclass a section.

    judge: says what does not fit together in the sections, however wrong single values are.
    Raises ConfigError with every fault found: unreadable file, unknown section or key (with the
    nearest name), wrong type, value that is not allowed, and what the judge finds.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(path)) from error
    faults = _apply(overrides, tables, sections)
    return build(tables, sections, faults, str(path), judge)


def build(
    tables: Mapping[str, Any],
    sections: Mapping[str, type],
    faults: list[str] | None = None,
    source: str = "configuration",
    judge: Judge | None = None,
) -> dict[str, Any]:
    """Make one dataclass a section from plain tables; see `load`."""
    faults, built, stand_ins = list(faults or ()), {}, []
    for name in tables:
        if name not in sections:
            faults.append(f"unknown section [{name}]{_nearest(name, sections)}")
    for name, kind in sections.items():
        built[name], found, misfits = _build_section(name, kind, tables.get(name, {}))
        faults += found
        stand_ins += [(key, getattr(built[name], key)) for key in misfits]
    if judge:
        faults += _independent(judge(built), stand_ins)
    if faults:
        raise ConfigError(faults, source)
    return built


def _build_section(name: str, kind: type, table: Any) -> tuple[Any, list[str], list[str]]:
    """A section, its faults, and its fields that have their default as what is given misfits."""
    hints = typing.get_type_hints(kind)
    if not isinstance(table, Mapping):
        return kind(), [f"[{name}] is a section; write its keys below it"], list(hints)
    values, faults, misfits, table = {}, [], [], dict(table)
    presets = kind.presets() if hasattr(kind, "presets") else {}
    if presets and "preset" in table:
        preset = table.pop("preset")
        if preset in list(presets):  # a list: what TOML gives may have no hash
            values = dict(vars(presets[preset]))
        else:
            faults.append(f"{name}.preset {preset!r} is unknown{_nearest(str(preset), presets)}")
            misfits = list(hints)
    for key, value in table.items():
        if key not in hints:
            known = [*hints, "preset"] if presets else hints
            faults.append(f"unknown key {name}.{key}{_nearest(key, known)}")
            continue
        value, fault = _fit(value, hints[key])
        if fault:
            faults.append(f"{name}.{key} = {json.dumps(value, default=str)}: {fault}")
            misfits.append(key)
        else:
            values[key] = value
    section = kind(**values)
    found = section.faults() if hasattr(section, "faults") else []
    found = _independent(found, [(key, getattr(section, key)) for key in misfits])
    return section, faults + [f"[{name}] {fault}" for fault in found], misfits


def _independent(faults: list[str], stand_ins: list[tuple[str, Any]]) -> list[str]:
    """The faults that do not come from defaults, which stand where a value did not fit.

    One that does names such a field and its default, both as whole words: "warmup 200 exceeds the
    100 steps". A fault of min_lr, "a fraction of lr", stays where only lr did not fit.
    """
    return [
        fault
        for fault in faults
        if not any(
            re.search(rf"\b{key}\b", fault)
            and (value is None or re.search(rf"(?<![\w.]){re.escape(str(value))}(?!\w)", fault))
            for key, value in stand_ins
        )
    ]


def type_faults(section: Any) -> list[str]:
    """Fields of a section whose value is not of the annotated type, or not among its choices.

    For sections that are built in Python, where nothing else looks at types.
    """
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    hints = typing.get_type_hints(type(section))
    found = {name: _fit(value, hints[name])[1] for name, value in values.items()}
    return [f"{name} {values[name]!r} {fault}" for name, fault in found.items() if fault]


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"


def _fit(value: Any, hint: Any) -> tuple[Any, str | None]:
    """The value as the hinted type, and what is wrong with it if it does not fit."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value in options and not isinstance(value, bool):
            return value, None
        close = difflib.get_close_matches(str(value).lower(), map(str, options), n=1)
        advice = f"; did you mean {close[0]}?" if close else ""
        return value, f"must be one of {', '.join(map(str, options))}{advice}"
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "none":
            return None, None
        value, fault = _fit(value, next(option for option in options if option is not type(None)))
        return value, fault and fault.replace(", not ", " or none, not ")
    if origin is dict:
        return _fit_table(value, options[1])
    is_bool = isinstance(value, bool)  # which Python counts among the whole numbers
    if hint is float and isinstance(value, int) and not is_bool:
        return float(value), None
    if isinstance(value, hint) and is_bool == (hint is bool):
        return value, None
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return value, f"must be {names.get(hint, hint)}, not {type(value).__name__}"


def _fit_table(value: Any, hint: Any) -> tuple[Any, str | None]:
    """A table with values of the hinted type."""
    if not isinstance(value, Mapping):
        return value, f"must be a table such as {{name = 0.5}}, not {type(value).__name__}"
    fitted = {key: _fit(item, hint) for key, item in value.items()}
    faults = [f"{key} {fault}" for key, (_, fault) in fitted.items() if fault]
    return {key: item for key, (item, _) in fitted.items()}, "; ".join(faults) or None


def _apply(overrides: list[str], tables: dict, sections: Mapping[str, type]) -> list[str]:
    """Write `--section.key=value` into the tables; returns what could not be understood."""
    faults = []
    for text in overrides:
        if any("\ud800" <= character <= "\udfff" for character in text):
            faults.append(f"argument {text!r} is not UTF-8")
            continue
        path, separator, raw = text.removeprefix("--").partition("=")
        section, dot, key = path.partition(".")
        if not text.startswith("--") or not separator or not dot:
            faults.append(f"argument {text!r} is not of the form --section.key=value")
            continue
        if section not in sections:
            faults.append(f"unknown section in {text!r}{_nearest(section, sections)}")
            continue
        table = tables.setdefault(section, {})
        if isinstance(table, dict):
            hint = typing.get_type_hints(sections[section]).get(key)
            bare = hint in (str, str | None) and not raw.startswith(('"', "'"))
            table[key] = raw if bare else _parse(raw)  # --run.directory=7 is a name
    return faults


def _parse(raw: str) -> Any:
    """A TOML value; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def to_toml(sections: Mapping[str, Any]) -> str:
    """The resolved configuration as TOML, each key with its meaning; `load` reads it back."""
    lines = []
    for name, section in sections.items():
        lines.append(f"[{name}]")
        docs = typing.get_type_hints(type(section), include_extras=True)
        for field in fields(section):
            value = getattr(section, field.name)
            lines.append(f"{field.name} = {as_toml(value)}  # {docs[field.name].__metadata__[0]}")
        lines.append("")
    return "\n".join(lines)


def list_keys(sections: Mapping[str, type]) -> str:
    """All keys for a reader, one a line: what the command line takes, the meaning, the default."""
    lines = []
    for name, kind in sections.items():
        rows = []
        if hasattr(kind, "presets"):
            rows.append(("preset", "|".join(sorted(kind.presets())), PRESET))
        hints, default = typing.get_type_hints(kind, include_extras=True), kind()
        for field in fields(kind):
            value = as_toml(getattr(default, field.name)).strip('"')
            meaning = f"{hints[field.name].__metadata__[0]} (default: {value})"
            rows.append((field.name, _form(typing.get_args(hints[field.name])[0]), meaning))
        lines += [f"[{name}]", *(f"{f'--{name}.{k}={form}':<35}  {m}" for k, form, m in rows)]
    return "\n".join(lines)


PRESET = "starting point, whose keys the others change"


def _form(hint: Any) -> str:
    """What a value of the hinted type looks like."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "|".join(map(str, options))
    if origin in (types.UnionType, typing.Union):
        return f"{_form(options[0])}|none"
    if origin is dict:
        return f"{{NAME = {_form(options[1])}, …}}"
    return {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT"}[hint]


def as_toml(value: Any) -> str:
    """A value as TOML; None, which TOML does not have, as the text "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{as_toml(key)} = {as_toml(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, float):
        return repr(value)  # also inf and nan, which JSON writes otherwise
    # TOML has no surrogate pairs, and wants DEL escaped, which JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
