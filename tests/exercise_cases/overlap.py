"""Answers to the exercises of "Overlap"."""

from functools import partial

import torch.distributed as dist

from . import Cases, Wrong

# overlap/1: one answer, written out; a mistake changes one line of it.


def hooks_stub(layers, launch):
    raise NotImplementedError


def sending(mistake, layers, launch):
    missing, handles, old = [len(layer) for layer in layers], {}, []

    def complete(index):
        if mistake == "never the first layer" and index == 0:
            return
        if mistake == "order of forward":  # hold each layer until those before it are complete
            while len(handles) < len(layers) and missing[len(handles)] == 0:
                handles[len(handles)] = launch(len(handles))
        elif mistake == "one layer late":
            if index + 1 < len(layers):
                handles[index + 1] = launch(index + 1)
            if index == 0:
                handles[0] = launch(0)
        elif mistake == "another order on each rank" and dist.get_rank() == 1:
            if index == 0:
                handles.update((i, launch(i)) for i in range(len(layers)))
        elif not (mistake == "one rank sends" and dist.get_rank() == 1):
            handles[index] = launch(index)
        if mistake == "waits at once":
            handles[index].wait()

    def arrived(index, parameter):
        missing[index] -= 1
        first = missing[index] == len(layers[index]) - 1
        if (mistake == "at the first gradient" and first) or missing[index] == 0:
            complete(index)
        if mistake == "twice" and missing[index] == 0:
            complete(index)

    for index, layer in enumerate(layers if mistake != "after backward" else []):
        for parameter in layer:
            if mistake == "only weights":
                layer[0].register_post_accumulate_grad_hook(lambda _, index=index: complete(index))
                break
            if mistake == "before .grad is set":
                parameter.register_hook(partial(arrived, index))
            else:
                parameter.register_post_accumulate_grad_hook(partial(arrived, index))

    def finish():
        if mistake == "after backward":
            handles.update((i, launch(i)) for i in reversed(range(len(layers))))
        for handle in [*handles.values(), *old]:
            one_of_two = mistake == "rank 1 never waits" and dist.get_rank() == 1
            if mistake != "never waits" and not one_of_two:
                handle.wait()
            if mistake == "averages" and handle is list(handles.values())[-1]:
                for layer in layers:
                    for parameter in layer:
                        parameter.grad /= dist.get_world_size()
        if mistake == "keeps old handles":
            old.extend(handles.values())
        if mistake != "counts once":
            handles.clear()
            missing[:] = [len(layer) for layer in layers]

    if mistake == "handles, not finish":
        return handles
    return None if mistake == "returns nothing" else finish


def sent(mistake):
    return partial(sending, mistake)


def before_backward(layers, launch):
    """Sends all layers when it is called."""
    handles = [launch(index) for index in range(len(layers))]
    return lambda: [handle.wait() for handle in handles]


def late_bound(order, hooked_once=True):
    """Hooks made in a loop that read the loop's variable when they run."""

    def answer(layers, launch):
        missing, handles = [len(layer) for layer in layers], []
        for index, layer in order(list(enumerate(layers))):
            for parameter in layer:

                def hook(_):
                    missing[index] -= 1
                    if missing[index] == 0 or not hooked_once:
                        handles.append(launch(index))

                parameter.register_post_accumulate_grad_hook(hook)

        def finish():
            for handle in handles:
                handle.wait()
            handles.clear()
            missing[:] = [len(layer) for layer in layers]

        return finish

    return answer


# overlap/2


def sizes_stub(sizes, ready_s, link, ranks):
    raise NotImplementedError


def exposed_s(sizes, ready_s, link, ranks, first, size):
    step, free, filled, first_bucket = 2 * (ranks - 1), 0.0, 0, True
    for place, own in enumerate(sizes):
        filled += own
        limit = first if first_bucket else size
        if place + 1 == len(sizes) or filled >= limit:
            moved = 2 * (ranks - 1) / ranks * filled / link.bytes_per_s
            free = max(free, ready_s[place]) + step * link.latency_s + moved
            filled, first_bucket = 0, False
    return free - ready_s[-1]


def best(pairs, *model):
    return min(pairs, key=lambda pair: exposed_s(*model, *pair))


def tried(sizes):
    return [2.0**power for power in range(12, 30) if 2**power < 2 * sum(sizes)]


def best_of_equal(sizes, ready_s, link, ranks):
    pairs = [(count * sizes[0],) * 2 for count in range(1, len(sizes))]
    return best(pairs, sizes, ready_s, link, ranks)


def best_behind_a_tiny_first(sizes, ready_s, link, ranks):
    pairs = [(1, count * sizes[0]) for count in range(1, 3 * len(sizes))]
    return best(pairs, sizes, ready_s, link, ranks)


def both(sizes, ready_s, link, ranks):
    pairs = [(a, b) for a in tried(sizes) for b in tried(sizes)]
    return best(pairs, sizes, ready_s, link, ranks)


def other_way_round(*model):
    return both(*model)[::-1]


def in_megabytes(*model):
    return tuple(size / 1e6 for size in both(*model))


CASES = {
    "overlap/1": Cases(
        hooks_stub,
        (
            Wrong("order of forward", sent("order of forward"), "order of the forward pass"),
            Wrong("at the first gradient", sent("at the first gradient"), "before all its grad"),
            Wrong("before .grad is set", sent("before .grad is set"), "`register_hook` runs bef"),
            Wrong("waits at once", sent("waits at once"), "wait inside backward"),
            Wrong("after backward", sent("after backward"), "when backward has ended"),
            Wrong("one layer late", sent("one layer late"), "only after layer 2 is too"),
            Wrong("never waits", sent("never waits"), "nobody waits for layer"),
            Wrong("never the first layer", sent("never the first layer"), "is never sent"),
            Wrong("twice", sent("twice"), "more than once"),
            Wrong("counts once", sent("counts once"), "first step was right"),
            Wrong("rank 1 never waits", sent("rank 1 never waits"), "on rank 1, nobody waits"),
            Wrong("only weights", sent("only weights"), "is sent before all its"),
            Wrong("keeps old handles", sent("keeps old handles"), "waits for more handles"),
            Wrong("averages", sent("averages"), "0.5 × the sum over ranks"),
            Wrong("returns nothing", sent("returns nothing"), "yours returned nothing"),
            Wrong("returns handles", sent("handles, not finish"), "yours returned dict"),
            Wrong("other order", sent("another order on each rank"), "in the same order"),
            Wrong("one rank sends", sent("one rank sends"), "ranks must start the same"),
            Wrong("late-bound index", late_bound(list), "only layer 3 is sent. Do all"),
            Wrong("and from the end", late_bound(reversed), "only layer 0 is sent. Do all"),
            Wrong("and not counted", late_bound(list, hooked_once=False), "only layer 3 is sent"),
            Wrong("before backward", before_backward, "while you set up"),
            Wrong("gives a value", [1, 2], "without calling it"),
        ),
    ),
    "overlap/2": Cases(
        sizes_stub,
        (
            Wrong("one bucket", lambda s, r, k, n: (sum(s), sum(s)), "One bucket is ready when"),
            Wrong("one a gradient", lambda s, r, k, n: (1, 1), "latencies alone take"),
            Wrong("a late first bucket", best_of_equal, "first bucket is late"),
            Wrong("a tiny first bucket", best_behind_a_tiny_first, "first bucket is too small"),
            Wrong(
                "the default", lambda s, r, k, n: (2**20, 25 * 2**20), "last bucket is too large"
            ),
            Wrong("other way round", other_way_round, "other way round"),
            Wrong("in MB", in_megabytes, "not in MB"),
            Wrong("one number", lambda s, r, k, n: 1e6, "two positive numbers"),
            Wrong("nothing", lambda s, r, k, n: None, "yours returned nothing"),
            Wrong("gives a value", (1, 2), "without calling it"),
        ),
    ),
}
