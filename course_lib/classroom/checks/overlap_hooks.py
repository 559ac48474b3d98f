"""The check of "overlap/1": send each layer inside backward. It looks at the order of events.

Right numbers prove nothing here: a transfer that is waited for at once, or begun when backward has
ended, gives the same gradients. So each rank keeps a log of what happened, in order, in two steps.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives import Handle, all_reduce, check_agreement

from .collectives_ranks import run_together
from .exercise import WrongAnswer

LAYERS, RANKS, STEPS = 4, 2, 2
Layers = Sequence[Sequence[nn.Parameter]]

_SAME_ORDER = "All ranks must start the same transfers, in the same order."


def send_in_backward(layers: Layers, launch: Callable[[int], Handle]) -> Callable[[], None]:
    """Start summing each layer as soon as all its gradients are there; return what ends a step.

    layers: each layer's parameters, in the order of the forward pass. launch: starts summing one
    layer's gradients over ranks.
    """
    missing, handles = [len(layer) for layer in layers], []

    def arrived(index: int, parameter: nn.Parameter) -> None:
        missing[index] -= 1
        if missing[index] == 0:
            handles.append(launch(index))

    for index, layer in enumerate(layers):
        for parameter in layer:
            parameter.register_post_accumulate_grad_hook(partial(arrived, index))

    def finish() -> None:
        for handle in handles:
            handle.wait()
        handles.clear()
        missing[:] = [len(layer) for layer in layers]

    return finish


def grade_hooks(answer: Callable) -> None:
    """Train a small model for two steps on two ranks, and read the log of events."""
    by_rank = run_together(
        answer, _watched_steps, RANKS, hang=f"the ranks wait for each other. {_SAME_ORDER}",
        disagree=_SAME_ORDER,
    )  # fmt: skip
    for rank, found in enumerate(by_rank):
        where = f"on rank {rank}, " if rank else ""  # most mistakes are made on all
        if isinstance(found, str):
            raise WrongAnswer(where + found)
        for step, (events, ratio) in enumerate(found):
            if fault := _fault(events, step) or _wrong_sum(ratio):
                raise WrongAnswer(where + fault)


def _watched_steps(answer: Callable) -> list[tuple[list, float]] | str:
    """One rank's part: for each step its events, and the ratio of a gradient to the right one."""
    model = nn.Sequential(*(_Layer(3 + n, bias_first=n % 2 == 1) for n in range(LAYERS)))
    inputs = [[_input(step, rank) for rank in range(RANKS)] for step in range(STEPS)]
    wanted = [_summed(model, every) for every in inputs]  # before there are any hooks
    layers = [list(layer.parameters()) for layer in model]
    events: list = []
    for index, layer in enumerate(layers):
        arrivals = _Arrivals(events, index, len(layer))
        for parameter in layer:
            parameter.register_post_accumulate_grad_hook(arrivals)
    with check_agreement():
        finish = answer(layers, partial(_launch, layers, events))
        if not callable(finish):
            return (
                f"return the function that ends a step (finish); yours returned "
                f"{'nothing' if finish is None else type(finish).__name__}."
            )
        if events:
            return (
                f"layer {events[0][1]} is sent while you set up, and no gradient exists before "
                "backward. Call launch in a hook."
            )
        own = [every[dist.get_rank()] for every in inputs]
        return [_step(model, events, finish, x, want) for x, want in zip(own, wanted)]


class _Layer(nn.Module):
    """A linear layer of two kinds: backward makes the bias' gradient before the weight's, or after.

    So it does not help to guess which of a layer's gradients is the last one.
    """

    def __init__(self, width: int, bias_first: bool):
        super().__init__()
        self.bias_first = bias_first
        self.weight = nn.Parameter(torch.empty(width + 1, width, dtype=torch.float64))
        self.bias = nn.Parameter(torch.empty(width + (not bias_first), dtype=torch.float64))
        for number, parameter in enumerate(self.parameters()):
            nn.init.uniform_(parameter, 0.1, 0.5, torch.Generator().manual_seed(width + number))

    def forward(self, x: Tensor) -> Tensor:
        """bias_first: the bias is added to what comes in, so its gradient is made last."""
        if self.bias_first:
            return nn.functional.linear(x + self.bias, self.weight)
        return nn.functional.linear(x, self.weight) + self.bias


def _input(step: int, rank: int) -> Tensor:
    return torch.linspace(step + rank, 1, 6, dtype=torch.float64).view(2, 3)


def _summed(model: nn.Module, inputs: list[Tensor]) -> Sequence[Tensor]:
    """The gradients of all ranks' inputs together, in one process."""
    loss = sum(model(x).square().sum() for x in inputs)
    return torch.autograd.grad(loss, list(model.parameters()))


class _Arrivals:
    """Notes when a layer is complete: hooked before the learner's own."""

    def __init__(self, events: list, index: int, count: int):
        self.events, self.index, self.count, self.seen = events, index, count, 0

    def __call__(self, parameter: nn.Parameter) -> None:
        self.seen += 1
        if self.seen % self.count == 0:
            self.events.append(("ready", self.index))


class _Sent:
    """A transfer of one layer; its wait puts the sums in place."""

    def __init__(self, events: list, index: int, gradients: list[Tensor]):
        self._events, self._index, self._gradients = events, index, gradients
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._handle: Handle | None = all_reduce(flat, dist.group.WORLD, "gradients")

    def wait(self) -> None:
        self._events.append(("wait", self._index))
        if self._handle is not None:
            sums = self._handle.wait().split([g.numel() for g in self._gradients])
            for gradient, part in zip(self._gradients, sums):
                gradient.copy_(part.view_as(gradient))
            self._handle = None


def _launch(layers: Layers, events: list, index: int) -> _Sent:
    absent = [p for p in layers[index] if p.grad is None]
    events.append(("early" if absent else "launch", index))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layers[index]]
    return _Sent(events, index, gradients)


def _step(
    model: nn.Module, events: list, finish: Callable, x: Tensor, wanted: Sequence[Tensor]
) -> tuple[list, float]:
    events.clear()
    model.zero_grad(set_to_none=True)
    loss = model(x).square().sum()
    loss.backward()
    events.append(("backward ends", -1))
    finish()
    ratios = [float((p.grad / want).median()) for p, want in zip(model.parameters(), wanted)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return list(events), worst


def _fault(events: list, step: int) -> str:
    """Say what is wrong with the order of one step's events; "" if nothing is."""
    place = {event: at for at, event in enumerate(events)}
    ends = place["backward ends", -1]
    started = [index for kind, index in events if kind in ("launch", "early")]
    again = (
        " The first step was right. Hooks stay for all steps, so finish must set your counters back"
        " and forget the old handles."
        if step
        else ""
    )
    if len(set(started)) == 1:
        return (
            f"only layer {started[0]} is sent. Do all hooks hold the same index? A function made "
            "in a loop reads the loop's variable when it runs, and then finds its last value. Bind "
            f"the index: partial(hook, index).{again}"
        )
    if early := [index for kind, index in events if kind == "early"]:
        return (
            f"layer {early[0]} is sent before all its gradients are there. A hook must count: a "
            f"layer has a weight and a bias. `register_post_accumulate_grad_hook` runs when .grad "
            f"is set; `register_hook` runs before.{again}"
        )
    if absent := sorted(set(range(LAYERS)) - set(started)):
        return f"layer {absent[0]} is never sent, so its gradient stays that of one rank.{again}"
    if len(started) > LAYERS:
        twice = next(index for index in started if started.count(index) > 1)
        return f"layer {twice} is sent more than once: its sum would be summed again.{again}"
    if any(at < ends for at, (kind, _) in enumerate(events) if kind == "wait"):
        return (
            "the numbers are right, but you wait inside backward: each transfer ends before the "
            "next gradient is computed, so nothing is hidden. Keep the handles; wait in finish."
        )
    if all(place["launch", index] > ends for index in range(LAYERS)):
        return "the numbers are right, but all transfers start when backward has ended. Use hooks."
    return _late(events, place) or _not_waited(events, again)


def _late(events: list, place: dict) -> str:
    started = [index for kind, index in events if kind == "launch"]
    if started == sorted(started):
        return (
            "you send in the order of the forward pass. Layer 0 is complete last, so all others "
            "wait for it. Backward goes from the last layer to the first."
        )
    for index in range(LAYERS - 1, 0, -1):
        if place["launch", index] > place["ready", index - 1]:
            return (
                f"layer {index} is complete, but it is sent only after layer {index - 1} is too. "
                "Start it in the hook that completes it."
            )
    return ""


def _not_waited(events: list, again: str) -> str:
    waited = {index for kind, index in events if kind == "wait"}
    if absent := sorted(set(range(LAYERS)) - waited):
        return (
            f"nobody waits for layer {absent[0]}: the optimizer would read a gradient that is "
            f"still on its way. finish must wait for every handle.{again}"
        )
    if sum(kind == "wait" for kind, _ in events) > LAYERS:
        return f"finish waits for more handles than the {LAYERS} of this step.{again}"
    return ""


def _wrong_sum(ratio: float) -> str:
    if abs(ratio - 1) < 1e-9:
        return ""
    return (
        f"the order is right, but a gradient is {ratio:.3g} × the sum over ranks. Let launch and "
        "wait do all the arithmetic."
    )
