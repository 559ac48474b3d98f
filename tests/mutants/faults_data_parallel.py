"""Faults of data parallelism and of overlap, and the check that must see each."""

from contextlib import nullcontext
from types import SimpleNamespace

from torch.nn.parallel import DistributedDataParallel

from course_lib import collectives, data_parallel, overlap
from course_lib.collectives import Handle, operations
from course_lib.data_parallel import Buckets
from course_lib.engines import pytorch
from course_lib.overlap import Overlap
from tests import checks_data_parallel as checks
from tests import checks_records as records
from tests.mutants.faults_core import Fault, Put


def averaged(put: Put) -> None:
    right = Buckets.complete

    def complete(self, index, handle):
        right(self, index, handle)
        self.flats[index] /= self.mesh.size("dp")

    put(Buckets, "complete", complete)


def divided_before_sending(put: Put) -> None:
    right = Buckets.launch

    def launch(self, index):
        self.collect(index)
        self.flats[index] /= self.mesh.size("dp")
        return right(self, index)

    put(Buckets, "launch", launch)


def ddp_averages(put: Put) -> None:
    """As DDP does by itself, where no hook says otherwise."""
    right = pytorch.all_reduce

    def all_reduce(tensor, group, purpose):
        return right(tensor.div_(group.size()), group, purpose)

    put(pytorch, "all_reduce", all_reduce)


def sent_in_every_micro_batch(put: Put) -> None:
    """What was summed is summed again with the next micro-batch's gradient."""

    def watch(self, micro_batches, count):
        for batch in micro_batches:
            self._begin()
            self._sending = True
            yield batch
            self.reduce(records_of(self), self.buckets.mesh)
        self._sending = False
        self._handles = [Handle(flat) for flat in self.buckets.flats]

    put(Overlap, "watch", watch)


def records_of(hooks: Overlap) -> list:
    """Enough of records for `Buckets.require`."""
    held = [parameter for members in hooks.buckets.members for parameter, _ in members]
    return [SimpleNamespace(name="", parameter=parameter) for parameter in held]


def no_sync_left_out(put: Put) -> None:
    put(DistributedDataParallel, "no_sync", lambda self: nullcontext())


def forward_outside_no_sync(put: Put) -> None:
    """DDP arms itself in forward: here only backward runs without it."""
    right = pytorch.data_parallelize

    def data_parallelize(*arguments, **named):
        replicas = right(*arguments, **named)
        wrapped = replicas.model
        forward = DistributedDataParallel.forward

        def armed(*inputs, **kwargs):
            before, wrapped.require_backward_grad_sync = wrapped.require_backward_grad_sync, True
            try:
                return forward(wrapped, *inputs, **kwargs)
            finally:
                wrapped.require_backward_grad_sync = before

        wrapped.forward = armed
        return replicas

    put(pytorch, "data_parallelize", data_parallelize)


def sent_in_the_first_micro_batch(put: Put) -> None:
    def watch(self, micro_batches, count):
        self._begin()
        for number, batch in enumerate(micro_batches, 1):
            self._sending = number == 1
            yield batch
            self._sending = False

    put(Overlap, "watch", watch)
    put(overlap.Overlap, "_arrived", unguarded(Overlap._arrived))


def unguarded(right):
    """`_arrived` without its refusal of late gradients."""

    def arrived(self, index, view, parameter):
        if index >= len(self._handles):
            right(self, index, view, parameter)

    return arrived


def sent_by_the_first_gradient(put: Put) -> None:
    right = Overlap._begin

    def begin(self):
        right(self)
        self._missing = [set(list(missing)[:1]) for missing in self._missing]

    put(Overlap, "_begin", begin)
    put(Overlap, "_arrived", unguarded(Overlap._arrived))


def sent_as_they_are_ready(put: Put) -> None:
    """Without waiting for the buckets before: an unused parameter on one rank mixes the order."""

    def arrived(self, index, view, parameter):
        data_parallel.adopt(parameter, view)
        if self._sending:
            self._missing[index].discard(id(parameter))
            if not self._missing[index]:
                self.times[index].in_backward = True
                self._early = [*getattr(self, "_early", []), (index, self.buckets.launch(index))]

    def reduce(self, rows, mesh):
        early, self._early = dict(getattr(self, "_early", [])), []
        for index in range(len(self.buckets.plan)):
            handle = early.get(index) or self.buckets.launch(index)
            self.buckets.complete(index, handle)

    put(Overlap, "_arrived", arrived)
    put(Overlap, "reduce", reduce)


def not_waited_for(put: Put) -> None:
    put(Buckets, "complete", lambda self, index, handle: None)


def launched_in_forward_order(put: Put) -> None:
    right = data_parallel.plan_buckets

    def plan(rows, *arguments):
        return right(rows, *arguments)[::-1]

    for module in (data_parallel, overlap, checks):
        put(module, "plan_buckets", plan)


def launched_after_backward(put: Put) -> None:
    right = Overlap._arrived

    def arrived(self, index, view, parameter):
        self._sending = False
        right(self, index, view, parameter)

    put(Overlap, "_arrived", arrived)


def strided_sent_as_they_are(put: Put) -> None:
    put(operations, "_require_contiguous", lambda tensor: None)

    def sum_each(rows, mesh):
        for record in rows:
            collectives.all_reduce(record.parameter.grad, mesh.group("dp"), "gradients").wait()

    def with_it(model, rows, mesh):
        return data_parallel.DataParallel(model, sum_each)

    checks.METHODS["each"] = with_it


def last_left_out(put: Put) -> None:
    right = data_parallel.plan_buckets

    def plan(rows, *arguments):
        return right(rows, *arguments)[:-1]

    put(Buckets, "require", lambda self, rows: None)
    for module in (data_parallel, overlap, checks):
        put(module, "plan_buckets", plan)


def tied_left_out(put: Put) -> None:
    right = data_parallel._trainable
    put(Buckets, "require", lambda self, rows: None)
    put(data_parallel, "_trainable", lambda rows: [r for r in right(rows) if not r.tied])


def unused_left_out(put: Put) -> None:
    """A rank that has no gradient of a parameter keeps what the buffer held."""
    right = data_parallel.adopt

    def adopt(parameter, view):
        if parameter.grad is not None and bool((parameter.grad != 0).any()):
            right(parameter, view)

    put(data_parallel, "adopt", adopt)


def only_the_first_axis(put: Put) -> None:
    put(Buckets, "complete", lambda self, index, handle: handle.wait())


def gradient_kept_beside_the_buffer(put: Put) -> None:
    def adopt(parameter, view):
        view.copy_(parameter.grad)

    put(Buckets, "require_views", lambda self: None)
    for module in (data_parallel, overlap):
        put(module, "adopt", adopt)


def thawed_unnoticed(put: Put) -> None:
    put(Buckets, "require", lambda self, rows: None)


def short_ranks_stop(put: Put) -> None:
    """As many steps as the shortest rank has: the others' samples are dropped."""

    def keep_in_step(steps, mesh, blank):
        steps = iter(steps)
        while True:
            own = next(steps, None)
            if data_parallel.agree(own is None, mesh):
                return
            yield own

    put(checks, "keep_in_step", keep_in_step)


def short_ranks_repeat(put: Put) -> None:
    put(data_parallel, "without_targets", lambda batch: batch)


def decided_by_each_rank(put: Put) -> None:
    put(data_parallel, "agree", lambda condition, mesh: condition)


def late_gradients_accepted(put: Put) -> None:
    put(Overlap, "_arrived", unguarded(Overlap._arrived))


def check_decisions(mesh) -> None:
    """DP-04, as an assertion on each rank."""
    assert checks.check_decisions_are_agreed(mesh) == [True, False]


FAULTS = [
    Fault("average instead of sum", "ACC-04", averaged, checks.check_buckets_train,
          symptom="0.5 x"),
    Fault("average instead of sum, overlap", "ACC-04", averaged, checks.check_overlap_trains,
          symptom="0.5 x"),
    Fault("division twice", "ACC-04", divided_before_sending, checks.check_buckets_train,
          symptom="0.5 x"),
    Fault("DDP averages", "ACC-04", ddp_averages, checks.check_pytorch_trains, symptom="0.5 x"),
    Fault("sent in every micro-batch", "DP-01", sent_in_every_micro_batch,
          checks.check_overlap_trains),
    Fault("sent in every micro-batch, counted", "DP-01", sent_in_every_micro_batch,
          checks.check_one_message_a_bucket, symptom="bytes of gradients were sent"),
    Fault("no_sync left out", "DP-01", no_sync_left_out, checks.check_one_message_a_bucket,
          symptom="bytes of gradients were sent"),
    Fault("forward outside no_sync", "DP-01", forward_outside_no_sync,
          checks.check_one_message_a_bucket, symptom="bytes of gradients were sent"),
    Fault("sent in the first micro-batch", "", sent_in_the_first_micro_batch,
          checks.check_overlap_trains),
    Fault("sent in the first micro-batch, order", "", sent_in_the_first_micro_batch,
          checks.check_transfers_begin_in_backward, symptom="sent too early"),
    # Its values may still be right, where gloo comes to read them late: the order of events is not.
    Fault("sent by its first gradient", "", sent_by_the_first_gradient,
          checks.check_sent_when_complete, symptom="was sent too early"),
    Fault("sent as they are ready", "", sent_as_they_are_ready,
          checks.check_unused_keeps_the_order),
    Fault("read before the wait", "", not_waited_for, checks.check_buffers_rest_until_waited_for,
          symptom="read before the wait"),
    Fault("forward order", "", launched_in_forward_order, checks.check_leave_one_by_one,
          symptom="backward"),
    Fault("launched after backward", "", launched_after_backward,
          checks.check_transfers_begin_in_backward),
    Fault("strided gradient sent", "COM-02", strided_sent_as_they_are,
          checks.check_strided_gradients, symptom="each"),
    Fault("last bucket left out", "", last_left_out, checks.check_buckets_train,
          symptom="gradient of embedding.weight"),
    Fault("last bucket left out, overlap", "", last_left_out, checks.check_overlap_trains,
          symptom="gradient of embedding.weight"),
    Fault("tied weight left out", "", tied_left_out, checks.check_buckets_train,
          symptom="gradient of embedding.weight"),
    Fault("unused keeps old values", "", unused_left_out, checks.check_gradients_of_one_rank),
    Fault("only the first axis", "", only_the_first_axis, checks.check_sums, records.DP_TP),
    Fault("gradient beside the buffer", "", gradient_kept_beside_the_buffer,
          checks.check_overlap_trains),
    Fault("thawed parameter unnoticed", "", thawed_unnoticed,
          checks.check_thawed_parameter_is_refused),
    Fault("short ranks stop all", "DP-02", short_ranks_stop, checks.check_uneven_batches,
          symptom="steps"),
    Fault("short ranks repeat a batch", "DP-02", short_ranks_repeat, checks.check_uneven_batches,
          symptom="loss"),
    Fault("decided by each rank", "DP-04", decided_by_each_rank, check_decisions),
    Fault("late gradients accepted", "DP-07", late_gradients_accepted,
          checks.check_late_gradient_is_refused),
]  # fmt: skip
