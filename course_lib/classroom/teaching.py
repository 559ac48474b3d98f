"""Two small tools of every chapter: show the library, expect a failure.

`show(thing)` prints the library's source, so that a notebook holds no second copy of it.
`expect_failure(Error)` catches a failure that the chapter produces on purpose and prints its
message, so that "Run all" goes on.
"""

import ast
import inspect
import re
import reprlib
import textwrap
from pathlib import Path
from typing import Any

from .syllabus import repository_root

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A cell's file, as the kernel names it: its number or hash is another one each time.
_CELL = re.compile(r"Cell In\[\d+\]|<ipython-input-\d+-\w+>|(?<!\w)\d{5,}\.py\b")
_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][\w.+@ -]+)+[/\\](?=[\w.<>-]+\.py\b)")


def show(thing: Any, *, docstring: bool = True, lines: int = 80) -> None:
    """Print the source of a function, class, method or module of the library.

    Arguments:
        thing: the object itself, as in `show(model.Transformer)`.
        docstring: False leaves out its docstring, where the notebook has just explained it.
        lines: the most lines to print; the rest is counted, and its file named.
    Raises: TypeError for something that has no source (a number, a built-in).
    """
    try:
        source = textwrap.dedent(inspect.getsource(thing)).rstrip()
        file = Path(inspect.getsourcefile(inspect.unwrap(thing)))  # a decorator has its own
    except (TypeError, OSError):
        raise TypeError(
            f"show({reprlib.repr(thing)}): there is no Python source for it; give a function, a "
            "class or a module of course_lib"
        ) from None
    if not docstring:
        source = _without_docstring(source)
    name = _readable_name(file)
    kept = source.splitlines()
    if len(kept) > lines:
        kept = [*kept[:lines], f"# … {len(kept) - lines} more lines in {name}"]
    _display_code(f"# {name}\n" + "\n".join(kept))


class expect_failure:
    """Context manager: the code below fails on purpose; print its message and go on.

    Arguments:
        kind: the exception type (or a tuple of types) that must be raised.
        match: a regular expression that must be found in its message.
        lines: the most lines of the message to print.
    Raises: AssertionError if nothing is raised or the message does not match, so that a chapter
        whose failure has been repaired is noticed. Any other exception passes through.
    After the block, `.error` is the exception.
    """

    def __init__(self, kind=Exception, match: str | None = None, lines: int = 20):
        self.kind, self.match, self.lines = kind, match, lines
        self.error: BaseException | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> bool:
        wanted = " or ".join(
            one.__name__ for one in (self.kind if isinstance(self.kind, tuple) else (self.kind,))
        )
        if error is None:
            raise AssertionError(f"this was expected to fail with {wanted}, but nothing was raised")
        if not isinstance(error, self.kind):
            return False
        message = tidy(str(error))
        if self.match is not None and not re.search(self.match, message):
            raise AssertionError(
                f"{type(error).__name__} was raised, but its message has no {self.match!r}: "
                f"{message}"
            ) from error
        self.error = error
        shown = message.splitlines()
        if len(shown) > self.lines:
            shown = [*shown[: self.lines], f"… {len(shown) - self.lines} more lines"]
        print(f"As expected, {type(error).__name__}: " + "\n".join(shown))
        return True


def tidy(text: str) -> str:
    """Return a message as it reads on every machine: no colours, no folders, no addresses."""
    text = _FOLDERS.sub("", _ANSI.sub("", text))
    return re.sub(r"\b0x[0-9a-fA-F]{6,}\b", "0x…", _CELL.sub("your cell", text)).strip()


def _readable_name(file: Path) -> str:
    """Return a source file's name as it is on every machine."""
    if _CELL.search(str(file)) or "ipykernel_" in str(file):
        return "your notebook"
    if file.is_relative_to(repository_root()):
        return file.relative_to(repository_root()).as_posix()
    return file.name


def _without_docstring(source: str) -> str:
    """Drop the docstring of the first definition (or of a module)."""
    tree = ast.parse(source)
    node = tree.body[0] if len(tree.body) == 1 else tree
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
        return source
    first = node.body[0]
    if (
        not (
            isinstance(first, ast.Expr)
            and isinstance(getattr(first, "value", None), ast.Constant)
            and isinstance(first.value.value, str)
        )
        or len(node.body) == 1
    ):
        return source
    lines = source.splitlines()
    rest = lines[first.end_lineno :]
    while rest and not rest[0].strip():
        rest = rest[1:]
    return "\n".join(lines[: first.lineno - 1] + rest)


def _display_code(code: str) -> None:
    """Show code with colours in a notebook (as Markdown), as plain text elsewhere."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(code)
        return
    display({"text/markdown": f"```python\n{code}\n```", "text/plain": code}, raw=True)
