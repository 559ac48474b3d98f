"""A rule on the library's code that a chapter shows: what is stored is what it is now."""

import ast
import contextlib
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from .cell_imports import Import, imports_of, statements_of
from .lint import Page, Problem, output_text, rule
from .teaching import show


@rule("shown")
def shown_code_is_up_to_date(page: Page) -> Iterator[Problem]:
    """The stored output of every `show(…)` of the library is what `show` prints today.

    Nothing is executed but the imports of the shown names: a name that the notebook itself
    assigns is left alone.
    """
    imported: dict[str, Import] = {}
    shown: dict[int, list[ast.Call]] = {}
    run = f"run: python -m course_lib.classroom.notebooks run chapters/{page.chapter.filename}"
    for at, statement in statements_of(page.notebook):
        found = imports_of(at, statement)
        imported.update((one.bound, one) for one in found)
        for name in _assigned(statement) if not found else ():
            imported.pop(name, None)
        for one in found:
            if one.module.partition(".")[0] == "course_lib":
                try:
                    _value(one)
                except (ImportError, AttributeError) as error:
                    yield at, f"`{one}` fails ({error}); repair the cell, then {run}"
        call = _show_call(statement)
        if call is None:
            continue
        shown.setdefault(at, []).append(call)
        try:
            now = _printed(call, imported)
        except (ImportError, AttributeError, TypeError) as error:
            yield at, f"`{ast.unparse(call)}` fails ({error}); repair the cell, then {run}"
            continue
        stored = _stored(page.notebook.cells[at])
        number = len(shown[at]) - 1
        if now is not None and stored and (stored[number : number + 1] != [now]):
            yield at, f"the stored output of `{ast.unparse(call)}` is not the code of today; {run}"


def _show_call(statement: ast.stmt) -> ast.Call | None:
    """The call, where a statement is nothing but `show(name)` or `show(name.part, …)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    plain = isinstance(call, ast.Call) and getattr(call.func, "id", None) == "show"
    return call if plain and len(call.args) == 1 else None


def _printed(call: ast.Call, imported: dict[str, Import]) -> str | None:
    """What the call prints now; None where its name is no import of the notebook."""
    root, parts = call.args[0], []
    while isinstance(root, ast.Attribute):
        parts.append(root.attr)
        root = root.value
    if not isinstance(root, ast.Name) or root.id not in imported:
        return None
    thing = _value(imported[root.id])
    for part in reversed(parts):
        thing = getattr(thing, part)
    settings = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(thing, **settings)
    return out.getvalue().rstrip("\n")


def _value(found: Import) -> Any:
    """The thing that an import line gives."""
    module = import_module(found.module)
    if found.name is None or found.name == "*":
        return module
    try:
        return getattr(module, found.name)
    except AttributeError:
        try:
            return import_module(f"{found.module}.{found.name}")
        except ModuleNotFoundError:
            raise ImportError(f"{found.module} has no {found.name}") from None


def _stored(cell) -> list[str]:
    """The texts that `show` has left in a cell, in order."""
    outputs = [o for o in cell.get("outputs", []) if "text/markdown" in o.get("data", {})]
    return [text.rstrip("\n") for text in map(output_text, outputs) if text.startswith("# ")]


def _assigned(statement: ast.stmt) -> set[str]:
    """Names that a statement of the notebook gives another meaning."""
    names = {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names | ({statement.name} if hasattr(statement, "name") else set())
