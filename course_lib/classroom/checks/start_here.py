"""The exercise of "Start here": a return value from every rank."""

import dis
import inspect
import re
from collections.abc import Callable

import torch.distributed as dist

from ..launch import RankError
from ..teaching import tidy
from .exercise import Exercise, RankRun, WrongAnswer, on_ranks

_NOT_CALLED = (
    "A function without brackets is the function itself, not its result. Call it: "
    "`dist.get_rank()`."
)
_A_FUNCTION = re.compile(r"'(builtin_)?function(_or_method)?'")  # as Python names its type
_COLLECTIVES = {
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "broadcast_object_list", "reduce_scatter", "scatter", "gather",
}  # fmt: skip


def squared_rank() -> int:
    """Return this rank's number, squared: the value travels back to the notebook.

    Every rank runs this same function (SPMD); only `dist.get_rank()` differs between them.
    """
    return dist.get_rank() ** 2


def grade_squared_rank(answer: Callable[[], int]) -> None:
    """Run the answer on 4 and on 5 ranks and compare each return value with rank²."""
    if not callable(answer):
        raise WrongAnswer(
            f"give the function itself, not {_article(answer)}: write the name without "
            "calling it. Each rank calls it on its own."
        )
    if _needs_arguments(answer):
        raise WrongAnswer(
            "your function asks for an argument, but every rank calls it without one. Ask "
            "`dist.get_rank()` inside the function instead."
        )
    for world_size in (4, 5):
        run = _run(answer, world_size)
        wanted = [rank**2 for rank in range(world_size)]
        if run.values != wanted:
            raise WrongAnswer(_diagnose(answer, run.values, run.printed, wanted))


def _run(answer: Callable, world_size: int) -> RankRun:
    """Run the answer on ranks; name a call whose brackets were forgotten."""
    try:
        return on_ranks(answer, world_size)
    except RankError as error:
        if error.type_name == "TypeError" and _A_FUNCTION.search(str(error)):
            raise WrongAnswer(f"{_NOT_CALLED}\n{tidy(str(error))}") from error
        raise


def _diagnose(answer: Callable, values: list, printed: str, wanted: list[int]) -> str:
    """Name the mistake behind wrong return values, as far as they show it."""
    world_size = len(wanted)
    ranks = list(range(world_size))
    told = f"on {world_size} ranks yours returned {values}, expected {wanted}. "
    if all(value is None for value in values):
        if printed.strip():
            return told + (
                "Your function prints its result. Print shows a value to people; only "
                "`return` brings it back to the notebook."
            )
        if _stores_elsewhere(answer):
            return told + (
                "Your function stores its result, but returns nothing. Each rank has its own copy "
                "of the notebook's variables; the notebook never sees a change. Use `return`."
            )
        return told + "Your function returns nothing. Use `return`."
    if all(callable(value) for value in values):
        return f"every rank returned a function, not a number. {_NOT_CALLED}"
    if all(isinstance(value, (list, tuple, dict)) for value in values):
        return told + (
            "Every rank returned a whole collection. Return one number: `run_ranks` puts those of "
            "all ranks into a list."
        )
    if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        return told + f"Each rank must return one int, its own number squared; yours: {kinds}."
    if values == ranks:
        return told + "That is the rank itself. Square it."
    if values == [2 * rank for rank in ranks]:
        return told + "That is 2 × rank. The square is rank × rank."
    if values == [2**rank for rank in ranks]:
        return told + "That is 2 to the power of rank. The square is rank to the power of 2."
    if values == [rank ^ 2 for rank in ranks]:
        return told + "In Python ^ is not a power: it compares bits (XOR). Write rank ** 2."
    if values == [(rank + 1) ** 2 for rank in ranks]:
        return told + "Ranks count from 0, not from 1."
    if values == [world_size**2] * world_size:
        return told + "That is the world size squared. Each rank must use its own number."
    if len(set(values)) == 1 and (values[0] in _sums(world_size) or _communicates(answer)):
        return told + (
            "Every rank returned the same value, as after an all-reduce or another collective. "
            "Nothing needs to be sent here: return the rank's own number, squared."
        )
    if len(set(values)) == 1:
        return told + (
            "Every rank returned the same value. It comes from a variable of the "
            "notebook or from a constant, which all ranks copy. Ask "
            "`dist.get_rank()` inside the function."
        )
    return told + "Look at the first rank that differs."


def _article(answer) -> str:
    """Return the answer's type with its article: "an int", "a list"."""
    name = type(answer).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def _sums(world_size: int) -> set[int]:
    """What every rank holds after an all-reduce: of the ranks, or of their squares."""
    ranks = range(world_size)
    return {sum(ranks), sum(ranks) ** 2, sum(rank**2 for rank in ranks)}


def _communicates(answer: Callable) -> bool:
    """Whether the function's own code names a collective."""
    return bool(_COLLECTIVES & set(getattr(getattr(answer, "__code__", None), "co_names", ())))


def _needs_arguments(answer: Callable) -> bool:
    """Whether the function cannot be called without arguments."""
    try:
        inspect.signature(answer).bind()
    except TypeError:
        return True
    except ValueError:  # some built-in functions have no signature
        return False
    return False


def _stores_elsewhere(answer: Callable) -> bool:
    """Whether the function's code assigns to a global, an outer variable, or into a container."""
    stores = {"STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR"}
    code = getattr(answer, "__code__", None)
    if code is None:  # a partial, a callable object: nothing to read
        return False
    used, methods = {step.opname for step in dis.get_instructions(code)}, code.co_names
    return bool(used & stores) or bool({"append", "insert", "update", "add"} & set(methods))


EXERCISES = (
    Exercise(
        name="start-here/1",
        title="return rank² from every rank",
        difficulty=1,
        minutes=5,
        hints=(
            "The same function runs on every rank. What differs between the ranks?",
            "`dist.get_rank()` tells a rank its own number. Call it inside your function.",
            "The notebook only gets what your function returns: `return ... ** 2`.",
        ),
        solution="course_lib.classroom.checks.start_here:squared_rank",
        grade=grade_squared_rank,
    ),
)
