"""Answers to the exercises of "Collectives and the network"."""

import math

import torch
import torch.distributed as dist

from course_lib.collectives import all_reduce, exchange

from . import Cases, Wrong

# collectives/1: the ring is written out; a mistake changes one line of it.


def ring_stub(tensor, group):
    raise NotImplementedError


def ring(tensor, group, mistake=""):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = tensor if mistake == "in place" else tensor.clone()
    if mistake == "tail dropped":
        chunks = own[: len(own) // ranks * ranks].view(ranks, -1).unbind()
    else:
        chunks = own.tensor_split(ranks)
    first = rank if mistake in ("wrong chunk", "wrong chunk, kept") else rank - 1
    steps = ranks - 1
    steps += {"one step short": -1, "one step more": 1}.get(mistake, 0)
    for step in range(steps):
        going = chunks[(first - step) % ranks]
        coming = chunks[(first - step - 1) % ranks]
        if mistake == "chunks mixed":
            coming = chunks[(first - step + 1) % ranks]
        if mistake == "sends the original":
            going = tensor.tensor_split(ranks)[(first - step) % ranks]
        arriving = torch.zeros_like(coming)
        on_its_way = exchange(
            going, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group, "mine"
        )
        if mistake != "never waits":
            on_its_way.wait()
        if mistake == "overwrites":
            coming.copy_(arriving)
        elif mistake != "never adds":
            coming.add_(arriving)
    if mistake == "returns everything":
        return own
    if mistake == "returns nothing":
        return None
    if mistake == "returns a list":
        return chunks[rank].tolist()
    if mistake == "wrong chunk":
        return chunks[(rank + 1) % ranks]
    result = chunks[rank]
    return result / ranks if mistake == "average" else result


def mistaken(mistake):
    return lambda tensor, group: ring(tensor, group, mistake)


def ring_to_the_left(tensor, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.clone().tensor_split(ranks)
    for step in range(1, ranks):
        coming = chunks[(rank + step + 1) % ranks]
        arriving = torch.zeros_like(coming)
        going = chunks[(rank + step) % ranks]
        exchange(going, (rank - 1) % ranks, arriving, (rank + 1) % ranks, group, "mine").wait()
        coming.add_(arriving)
    return chunks[rank]


def direct(tensor, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.clone().tensor_split(ranks)
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        arriving = torch.zeros_like(chunks[rank])
        exchange(chunks[to], to, arriving, source, group, "mine").wait()
        chunks[rank].add_(arriving)
    return chunks[rank]


def torchs_sum(tensor, group):
    whole = all_reduce(tensor.clone(), group, "mine").wait()
    return whole.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def torchs_own_sum(tensor, group):
    whole = tensor.clone()
    dist.all_reduce(whole, group=group)
    return whole.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def receives_too_little(tensor, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunk, arriving = tensor.clone().tensor_split(ranks)[0], torch.empty(1, dtype=tensor.dtype)
    exchange(chunk, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group, "mine").wait()
    return arriving


def never_ends(tensor, group):
    while True:
        pass


def whole_tensors(tensor, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total, going = tensor.clone(), tensor.clone()
    for _ in range(ranks - 1):
        arriving = torch.empty_like(going)
        exchange(going, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group, "mine").wait()
        total, going = total + arriving, arriving
    return total.tensor_split(ranks)[rank]


def first_rank_only_receives(tensor, group):
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty(1, dtype=tensor.dtype)
    exchange(None, (rank + 1) % ranks, arriving, (rank - 1) % ranks, group, "mine").wait()
    return arriving


# collectives/2


def time_stub(kind, payload_bytes, ranks, link):
    raise NotImplementedError


def seconds(kind, payload_bytes, ranks, link, mistake=""):
    n = ranks if mistake in ("n for n - 1", "n steps") else ranks - 1
    n_bytes = ranks if mistake in ("n for n - 1", "n in the bytes") else ranks - 1
    if kind == "broadcast":
        steps = moved = math.ceil(math.log2(ranks))
        if mistake == "broadcast by turns":
            steps = moved = ranks - 1
        if mistake == "not rounded":
            steps = moved = math.log2(ranks)
        if mistake == "rounded down":
            steps = moved = math.floor(math.log2(ranks))
        if mistake == "broadcast's bytes once":
            moved = 1
        if mistake == "broadcast in chunks":
            moved = (ranks - 1) / ranks
        if mistake == "something else":
            moved = 0.5
    else:
        passes = 2 if kind == "all_reduce" or mistake == "always two" else 1
        passes = 1 if mistake == "always one" else passes
        steps, moved = passes * n, passes * n_bytes / ranks
        if mistake == "payload of a rank":
            moved = passes * n_bytes
    steps = {"no latency": 0, "latency once": 1}.get(mistake, steps)
    size = payload_bytes * {"bits": 8, "bytes as bits": 1 / 8}.get(mistake, 1)
    result = steps * link.latency_s + moved * size / link.bytes_per_s
    result *= 1e3 if mistake == "milliseconds" else 1
    return str(result) if mistake == "text" else result


def timing(mistake):
    return lambda kind, payload, ranks, link: seconds(kind, payload, ranks, link, mistake)


CASES = {
    "collectives/1": Cases(
        ring_stub,
        (
            Wrong("owns the next chunk", mistaken("wrong chunk"), "Begin one chunk earlier"),
            Wrong(
                "the order of the all-gather",
                mistaken("wrong chunk, kept"),
                "the sum that is completed on it is that of chunk 1, not chunk 0",
            ),
            Wrong("never waits", mistaken("never waits"), "never waits for them"),
            Wrong("a ring to the left", ring_to_the_left, "rank 0 sends to rank 3. In this ring"),
            Wrong("directly to each rank", direct, "rank 0 sends to ranks 1, 2, 3. In"),
            Wrong("drops the tail", mistaken("tail dropped"), "tail of the tensor"),
            Wrong("one step short", mistaken("one step short"), "one step short"),
            Wrong("one step too many", mistaken("one step more"), "The last one brings"),
            Wrong("overwrites", mistaken("overwrites"), "you overwrite it"),
            Wrong("never adds", mistaken("never adds"), "its own numbers only"),
            Wrong("sends the original", mistaken("sends the original"), "not your original one"),
            Wrong("mixes chunks", mistaken("chunks mixed"), "different chunks were added"),
            Wrong("averages", mistaken("average"), "that is the average"),
            Wrong("returns everything", mistaken("returns everything"), "It owns only chunk"),
            Wrong("returns nothing", mistaken("returns nothing"), "returns nothing"),
            Wrong("returns a list", mistaken("returns a list"), "return one tensor"),
            Wrong("changes its argument", mistaken("in place"), "changes its argument"),
            Wrong("calls all_reduce", torchs_sum, "you call all_reduce"),
            Wrong("calls torch's all_reduce", torchs_own_sum, "you call torch's all_reduce"),
            Wrong("receives too little", receives_too_little, "of another length"),
            Wrong("never ends", never_ends, "Does a loop never end?"),
            Wrong("sends whole tensors", whole_tensors, "each chunk but its own once"),
            Wrong("never sends", first_rank_only_receives, "wait for each other"),
            Wrong("gives a value, not a function", torch.zeros(2), "without calling it"),
        ),
    ),
    "collectives/2": Cases(
        time_stub,
        (
            Wrong("takes bytes for bits", timing("bits"), "counts bytes already"),
            Wrong("n for n - 1", timing("n for n - 1"), "You use n where the ring has n - 1"),
            Wrong("no latency", timing("no latency"), "The latency is missing"),
            Wrong("latency once", timing("latency once"), "count the latency once"),
            Wrong("n steps", timing("n steps"), "n - 1 steps, not n"),
            Wrong("n in the bytes", timing("n in the bytes"), "The number of steps is right"),
            Wrong("one pass", timing("always one"), "count both"),
            Wrong("two passes", timing("always two"), "Only an all-reduce has two"),
            Wrong("payload of a rank", timing("payload of a rank"), "one chunk, 1 / n of it"),
            Wrong("broadcast by turns", timing("broadcast by turns"), "doubles the ranks"),
            Wrong("not rounded", timing("not rounded"), "must be rounded up: 3"),
            Wrong("rounded down", timing("rounded down"), "rounded up, not down"),
            Wrong("broadcast's bytes once", timing("broadcast's bytes once"), "count once a step"),
            Wrong("broadcast in chunks", timing("broadcast in chunks"), "not a chunk of it"),
            Wrong("milliseconds", timing("milliseconds"), "in milliseconds"),
            Wrong("returns text", timing("text"), "return a number of seconds"),
            Wrong("gives a number", 0.5, "write its name without calling"),
        ),
    ),
}
