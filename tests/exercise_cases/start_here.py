"""Answers to the exercise of "Start here"."""

from functools import partial

import torch
import torch.distributed as dist

from . import Cases, Wrong

rank = 3  # as a notebook may hold it from an earlier cell
found = []


def stub():
    raise NotImplementedError


def prints():
    print(dist.get_rank() ** 2)


def uses_the_notebooks_variable():
    return rank**2


def fills_the_notebooks_list():
    found.append(dist.get_rank() ** 2)


def forgets_to_return():
    dist.get_rank() ** 2


def squares_the_world():
    return dist.get_world_size() ** 2


def returns_the_rank():
    return dist.get_rank()


def doubles():
    return 2 * dist.get_rank()


def powers_of_two():
    return 2 ** dist.get_rank()


def counts_from_one():
    return (dist.get_rank() + 1) ** 2


def returns_text():
    return f"rank {dist.get_rank()}"


def asks_for_its_rank(rank):
    return rank**2


def returns_the_list_of_all():
    return [number**2 for number in range(dist.get_world_size())]


def xors():
    return dist.get_rank() ^ 2


def forgets_the_brackets():
    return dist.get_rank


def forgets_the_brackets_and_squares():
    return dist.get_rank**2


def adds_up_the_squares():
    total = torch.tensor(dist.get_rank() ** 2)
    dist.all_reduce(total)
    return total.item()


def takes_the_largest():
    largest = torch.tensor(dist.get_rank() ** 2)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


CASES = {
    "start-here/1": Cases(
        stub,
        (
            Wrong("prints instead of returns", prints, "Print shows a value to people"),
            Wrong("uses the notebook's variable", uses_the_notebooks_variable, "the same value"),
            Wrong("changes the notebook's list", fills_the_notebooks_list, "its own copy"),
            Wrong("forgets to return", forgets_to_return, "returns nothing. Use"),
            Wrong("gives a partial that returns nothing", partial(forgets_to_return), "nothing."),
            Wrong("squares the world size", squares_the_world, "the world size squared"),
            Wrong("does not square", returns_the_rank, "That is the rank itself"),
            Wrong("doubles", doubles, "2 × rank"),
            Wrong("swaps base and exponent", powers_of_two, "2 to the power of rank"),
            Wrong("counts from one", counts_from_one, "count from 0"),
            Wrong("returns a text", returns_text, "one int"),
            Wrong("expects its rank as argument", asks_for_its_rank, "asks for an argument"),
            Wrong("returns the list of all", returns_the_list_of_all, "Return one number"),
            Wrong("gives a value, not a function", [0, 1, 4, 9], "the function itself, not a list"),
            Wrong("gives a number", 9, "not an int"),
            Wrong("writes ^ for the power", xors, "(XOR)"),
            Wrong("forgets the brackets", forgets_the_brackets, "returned a function"),
            Wrong("squares a function", forgets_the_brackets_and_squares, "Call it: `dist.get_ran"),
            Wrong("all-reduces the squares", adds_up_the_squares, "after an all-reduce"),
            Wrong("all-reduces the largest", takes_the_largest, "Nothing needs to be sent"),
        ),
    )
}
