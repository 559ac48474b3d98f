"""Answers to the exercises of "Data parallelism"."""

from dataclasses import replace

import torch
import torch.distributed as dist

from course_lib.collectives import all_reduce
from course_lib.data_parallel import agree, keep_in_step, without_targets
from course_lib.training import loss_sum

from . import Cases, Wrong

# data-parallelism/1: the learner's answer is written out; a mistake changes one place of it.


def buckets_stub(model, micro_batches, tokens, bucket_bytes, mesh):
    raise NotImplementedError


def in_buckets(model, micro_batches, tokens, bucket_bytes, mesh, mistake=""):
    group, ranks = mesh.group("dp"), mesh.size("dp")
    if mistake in ("own tokens", "own tokens, summed"):
        tokens = max(sum(batch.valid for batch in micro_batches), 1)
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for number, batch in enumerate(micro_batches):
        if mistake == "only the last" or (mistake == "loses the first" and number == 1):
            model.zero_grad()
        if mistake == "only the first" and number:
            continue
        if mistake in ("own micro-batch", "means of means"):
            tokens = max(batch.valid, 1)
        if mistake == "zero tokens":
            tokens = float(batch.valid > 99)
        if mistake == "the last counts half" and number == 2:
            tokens *= 2
        nats = loss_sum(model(**batch.inputs()), batch.labels)
        (nats if mistake == "not divided" else nats / tokens).backward()
        if mistake == "every micro-batch":
            summed(model, group, bucket_bytes)
            for total, p in zip(kept, model.parameters()):
                if p.requires_grad:
                    total += p.grad
            model.zero_grad()
        if mistake == "sums sums":
            summed(model, group, bucket_bytes)
    if mistake == "every micro-batch":
        for total, p in zip(kept, model.parameters()):
            p.grad = total
    elif mistake != "sums sums":
        summed(model, group, bucket_bytes, mistake)
    if mistake in ("average", "own tokens", "means of means"):
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= ranks * (len(micro_batches) if mistake == "means of means" else 1)


def summed(model, group, bucket_bytes, mistake=""):
    parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    if mistake == "order of forward":
        parameters.reverse()
    if mistake == "frozen too":
        parameters = list(model.parameters())
    if mistake == "unused left out":
        parameters = [p for p in parameters if p.grad is not None]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    filling = []
    for p in parameters:
        if mistake == "one bucket of two" and len(filling) == 2:
            send(filling, group, "")
            filling, mistake = [], "one each"
        full = sum(q.grad.nbytes for q in (*filling, p)) > bucket_bytes
        if filling and (full or mistake == "one each") and mistake != "one for all":
            send(filling, group, mistake)
            filling = []
        filling.append(p)
    if mistake != "forgets the last":
        send(filling, group, mistake)


def send(bucket, group, mistake):
    order = reversed(bucket) if mistake == "mixed up" else bucket
    flat = torch.cat([p.grad.flatten() for p in order])
    if mistake == "torch's own":
        dist.all_reduce(flat, group=group)
    else:
        all_reduce(flat, group, "gradients").wait()
    if mistake == "not copied back":
        return
    for p, piece in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad.copy_(piece.view_as(p))


def with_mistake(mistake):
    def answer(model, micro_batches, tokens, bucket_bytes, mesh):
        return in_buckets(model, micro_batches, tokens, bucket_bytes, mesh, mistake)

    return answer


def changes_weights(model, micro_batches, tokens, bucket_bytes, mesh):
    in_buckets(model, micro_batches, tokens, bucket_bytes, mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * (0 if p.grad is None else p.grad))


def empties_its_list(model, micro_batches, tokens, bucket_bytes, mesh):
    in_buckets(model, micro_batches, tokens, bucket_bytes, mesh)
    micro_batches.clear()


def does_nothing(model, micro_batches, tokens, bucket_bytes, mesh):
    pass


def never_ends(model, micro_batches, tokens, bucket_bytes, mesh):
    while True:
        pass


def sends_unlike_sizes(model, micro_batches, tokens, bucket_bytes, mesh):
    for batch in micro_batches:
        (loss_sum(model(**batch.inputs()), batch.labels) / tokens).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    dist.all_reduce(torch.cat(gradients), group=mesh.group("dp"))


# data-parallelism/2


def in_step_stub(steps, mesh, blank):
    raise NotImplementedError
    yield


def only_own(steps, mesh, blank):
    yield from steps


def skips(steps, mesh, blank):
    yield from keep_in_step((s for s in steps if sum(b.valid for b in s)), mesh, blank)


def skips_after_asking(steps, mesh, blank):
    while True:
        own = next(steps, None)
        if not agree(own is not None, mesh):
            return
        own = [without_targets(blank)] if own is None else own
        if any(batch.valid for batch in own):
            yield own


def drops_the_tail(steps, mesh, blank):
    while True:
        own = next(steps, None)
        if agree(own is None, mesh):
            return
        yield own


def keeps_targets(steps, mesh, blank):
    for own in keep_in_step(steps, mesh, blank):
        yield own if own[0].samples is not blank.samples else [blank]


def repeats_the_last(steps, mesh, blank):
    last = [without_targets(blank)]
    while True:
        own = next(steps, None)
        if not agree(own is not None, mesh):
            return
        last = last if own is None else own
        yield last


def changes_blank(steps, mesh, blank):
    for own in keep_in_step(steps, mesh, blank):
        if not sum(batch.valid for batch in own):
            blank.labels.fill_(-100)
            own = [blank]
        yield own


def only_labels(steps, mesh, blank):
    for own in keep_in_step(steps, mesh, blank):
        unused = own[0].samples is blank.samples
        yield [replace(own[0], valid=blank.valid)] if unused else own


def yields_nothing(steps, mesh, blank):
    for own in keep_in_step(steps, mesh, blank):
        yield [] if own[0].samples is blank.samples else own


def returns_nothing(steps, mesh, blank):
    list(keep_in_step(steps, mesh, blank))


def yields_a_batch(steps, mesh, blank):
    for own in keep_in_step(steps, mesh, blank):
        yield own[0]


def one_step_more(steps, mesh, blank):
    yield from keep_in_step(steps, mesh, blank)
    yield [without_targets(blank)]


CASES = {
    "data-parallelism/1": Cases(
        buckets_stub,
        (
            Wrong("average", with_mistake("average"), "that is an average"),
            Wrong("unused left out", with_mistake("unused left out"), "leaves it out there"),
            Wrong("sends often", with_mistake("every micro-batch"), "in each of the 3 micro-"),
            Wrong("sums what was summed", with_mistake("sums sums"), "what was summed before"),
            Wrong("divides by its own tokens", with_mistake("own tokens"), "by its own tokens"),
            Wrong("its own tokens, summed", with_mistake("own tokens, summed"), "A rank with few"),
            Wrong(
                "tokens of one", with_mistake("own micro-batch"), "by its own tokens. One with few"
            ),
            Wrong("means of means", with_mistake("means of means"), "these means are averaged"),
            Wrong("loses the first", with_mistake("loses the first"), "micro-batches 2 to 3 are"),
            Wrong("only the first", with_mistake("only the first"), "only the first of the 3"),
            Wrong("divides by zero", with_mistake("zero tokens"), "They are not finite"),
            Wrong("half", with_mistake("the last counts half"), "0.50 on rank 1. By what"),
            Wrong("forgets to divide", with_mistake("not divided"), "not divided at all"),
            Wrong("only the last", with_mistake("only the last"), "only the last of the 3"),
            Wrong("does not copy back", with_mistake("not copied back"), "not copied back"),
            Wrong("mixes up pieces", with_mistake("mixed up"), "in the same order?"),
            Wrong("sends the frozen one", with_mistake("frozen too"), "travels too"),
            Wrong("one message for all", with_mistake("one for all"), "far more than bucket_bytes"),
            Wrong("one message each", with_mistake("one each"), "one message a parameter"),
            Wrong("does not count", with_mistake("torch's own"), "no message was counted"),
            Wrong("unlike sizes without check", sends_unlike_sizes, "the ranks call different"),
            Wrong("order of forward", with_mistake("order of forward"), "The first parameters of"),
            Wrong("nearly one each", with_mistake("one bucket of two"), "bytes need"),
            Wrong("forgets the last", with_mistake("forgets the last"), "bucket never sent"),
            Wrong("changes the weights", changes_weights, "changes the weights"),
            Wrong("empties its list", empties_its_list, "changes the list"),
            Wrong("does nothing", does_nothing, "no parameter has a gradient"),
            Wrong("never ends", never_ends, "Does a loop never end?"),
            Wrong("gives no function", 3, "give the function itself"),
        ),
    ),
    "data-parallelism/2": Cases(
        in_step_stub,
        (
            Wrong("hangs", only_own, "it hangs: a rank without batches leaves the loop"),
            Wrong("skips on one rank", skips, "skips its batch 1"),
            Wrong("skips a step alone", skips_after_asking, "not at the same place"),
            Wrong("drops the tail", drops_the_tail, "is never used"),
            Wrong("blank keeps its targets", keeps_targets, "uses `blank` with its targets"),
            Wrong("repeats its last batch", repeats_the_last, "repeats a batch"),
            Wrong("changes blank", changes_blank, "your function changes `blank`"),
            Wrong("only the labels", only_labels, "but `valid` says"),
            Wrong("yields an empty list", yields_nothing, "yields an empty list"),
            Wrong("is no generator", returns_nothing, "your function returned NoneType"),
            Wrong("yields a batch", yields_a_batch, "you yield Batch"),
            Wrong("one step too many", one_step_more, "at last no rank has a batch"),
        ),
    ),
}
