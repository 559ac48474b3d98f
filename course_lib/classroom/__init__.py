"""What notebooks use to teach: real ranks behind a cell, predictions, exercises, figures.

`from course_lib.classroom import run_ranks, show, predict, expect_failure, check, hint, solution,
progress` is all that most chapters need. Each name is imported when it is first used, so that
`import course_lib.classroom` costs nothing (torch and matplotlib take seconds).
"""

from importlib import import_module

# Public name -> the module of this package that defines it.
_HOME = {
    "run_ranks": "launch",
    "show": "teaching",
    "predict": "prediction",
    "expect_failure": "teaching",
    "check": "checks",
    "hint": "checks",
    "solution": "checks",
    "progress": "journal",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
