"""Faults of public training code, by trap: how to put each back, and the check that must see it.

A later part of the course adds its rows to a table of its own and runs it the same way.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from course_lib import collectives, data_parallel, gradients, model, parameters, training
from course_lib.engines import pytorch
from course_lib.mesh import Mesh
from course_lib.model import Transformer
from course_lib.model.randomness import Noise
from course_lib.trainer import step
from tests import checks_core as core
from tests import checks_records as records
from tests import checks_replicas as replicas

Put = core.Put


@dataclass(frozen=True)
class Fault:
    """A fault, put back by `put_back(put)` with put(object, name, value) = setattr."""

    name: str
    trap: str  # id of the public report; "" where there is none
    put_back: Callable[[Put], None]
    check: Callable
    sizes: Mapping[str, int] = field(default_factory=lambda: core.TWO)  # of the mesh
    symptom: str = ""  # what the check's message must contain


# ------------------------------------------------------------------------- sums and the divisor


def average_over_ranks(put: Put) -> None:
    right = data_parallel.sum_flattened

    def average(records, mesh):
        right(records, mesh)
        for record in records:
            record.parameter.grad /= mesh.size("dp")

    put(data_parallel, "sum_flattened", average)


def divide_by_accumulation_too(put: Put) -> None:
    right = training.accumulate

    def twice(model, micro_batches, divisor, *rest):
        micro_batches = list(micro_batches)
        loss = right(model, micro_batches, divisor * len(micro_batches), *rest)
        return loss * len(micro_batches)  # what is reported looks right

    put(step, "accumulate", twice)
    put(core, "accumulate", twice)


def mean_of_means(put: Put) -> None:
    def accumulate(model, micro_batches, divisor, *_):
        micro_batches = list(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro_batches:
            nats = training.loss_sum(model(**batch.inputs()), batch.labels)
            mean = nats / max(batch.valid, 1) / len(micro_batches)
            mean.backward()
            total += mean.detach()
        return total

    put(step, "accumulate", accumulate)
    put(core, "accumulate", accumulate)


def leave_out(put: Put, purpose: str) -> None:
    right = collectives.all_reduce

    def all_reduce(tensor, group, purpose_of_call, *rest, **named):
        group = None if purpose_of_call == purpose else group
        return right(tensor, group, purpose_of_call, *rest, **named)

    put(collectives, "all_reduce", all_reduce)


def divisor_of_this_rank_only(put: Put) -> None:
    leave_out(put, "token count")


def loss_of_this_rank_only(put: Put) -> None:
    leave_out(put, "loss")


def mean_over_no_tokens(put: Put) -> None:
    def loss_sum(logits, labels, in_place=False):
        flat = labels.flatten()
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), flat, ignore_index=-100)
        return mean * (flat != -100).sum()

    put(training, "loss_sum", loss_sum)


def labels_shifted_again(put: Put) -> None:
    right = training.loss_sum

    def loss_sum(logits, labels, in_place=False):
        return right(logits[:, :-1], labels[:, 1:], in_place)

    put(training, "loss_sum", loss_sum)
    put(core, "loss_sum", loss_sum)


def loss_kept_with_its_graph(put: Put) -> None:
    put(Tensor, "detach", lambda tensor: tensor)


def figures_kept(put: Put) -> None:
    right, history = step.training_step, []

    def training_step(state, micro_batches, *rest):
        history.append(torch.zeros(1))
        return right(state, micro_batches, *rest)

    put(core, "training_step", training_step)


def one_gradient_forgotten(put: Put) -> None:
    right = data_parallel.sum_flattened
    put(data_parallel, "sum_flattened", lambda records, mesh: right(records[1:], mesh))


def partial_gradients_forgotten(put: Put) -> None:
    right = parameters._record

    def record(*arguments):
        found = right(*arguments)
        kept = {axis: group for axis, group in found.summed_over.items() if axis == "dp"}
        return replace(found, summed_over=kept)

    put(parameters, "_record", record)


def sharded_gradients_summed(put: Put) -> None:
    right = parameters._record

    def record(*arguments):
        found = right(*arguments)
        too_much = found.name == "layer.pieces"  # others have no equal shapes to sum
        return replace(found, summed_over=arguments[-2].groups) if too_much else found

    put(parameters, "_record", record)


def rank_without_targets_returns(put: Put) -> None:
    right = step.training_step

    def training_step(state, micro_batches, *rest):
        if not any(batch.valid for batch in micro_batches):  # "continue", on this rank alone
            state.data_step += 1
            return None
        return right(state, micro_batches, *rest)

    put(core, "training_step", training_step)


def strided_gradients_sent_as_they_are(put: Put) -> None:
    put(collectives.operations, "_require_contiguous", lambda tensor: None)

    def sum_over_ranks(records, mesh):
        for record in records:
            collectives.all_reduce(record.parameter.grad, mesh.group("dp"), "gradients").wait()

    put(records, "sum_flattened", sum_over_ranks)


def strided_tensors_accepted(put: Put) -> None:
    put(collectives.operations, "_require_contiguous", lambda tensor: None)


# -------------------------------------------------------------------------- norm, clip and skip


def clip(records, norm: float) -> None:
    found = math.sqrt(sum(float(r.parameter.grad.double().square().sum()) for r in records))
    for record in records:
        record.parameter.grad *= min(1.0, norm / (found + 1e-6))


def clip_before_sum(put: Put) -> None:
    right = data_parallel.sum_flattened

    def sum_clipped(records, mesh):
        clip(records, 0.05)
        right(records, mesh)

    put(data_parallel, "sum_flattened", sum_clipped)


def clip_every_micro_batch(put: Put) -> None:
    right = training.accumulate

    def clipping(model, micro_batches, *rest):
        total = 0.0
        for batch in micro_batches:
            total = total + right(model, [batch], *rest)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return total

    put(step, "accumulate", clipping)


def norm_of_this_rank_only(put: Put) -> None:
    leave_out(put, "gradient norm")


def replicated_counted_on_every_rank(put: Put) -> None:
    right = gradients.gradient_norm

    def norm(records, mesh):
        return right([replace(record, owner=True) for record in records], mesh)

    put(gradients, "gradient_norm", norm)
    put(records, "gradient_norm", norm)


def padding_counted(put: Put) -> None:
    right = gradients.gradient_norm

    def norm(records, mesh):
        held = [parameters.whole(record.parameter.shape) for record in records]
        return right([replace(r, boxes=(box,)) for r, box in zip(records, held)], mesh)

    put(records, "gradient_norm", norm)


def tied_weight_counted_twice(put: Put) -> None:
    right = gradients.gradient_norm

    def norm(records, mesh):
        return right([record for r in records for record in [r] * (1 + len(r.tied))], mesh)

    put(gradients, "gradient_norm", norm)


def owned_by_all_first_ranks(put: Put) -> None:
    right = parameters._record

    def record(*arguments):
        found = right(*arguments)
        return replace(found, owner=arguments[-2].rank("dp") == 0)  # forgets "tp"

    put(parameters, "_record", record)


def axis_shared_by_nobody(put: Put) -> None:
    """Along an axis on which a parameter is cut, every rank owns what it holds."""
    right = parameters._record

    def record(*arguments):
        found = right(*arguments)
        return replace(found, owner=found.owner or len(found.replicas) < arguments[-2].world_size)

    put(parameters, "_record", record)


def axis_summed_as_a_whole(put: Put) -> None:
    put(Mesh, "group_of", lambda mesh, axis, ranks: mesh.groups[axis])


def stages_not_summed(put: Put) -> None:
    right = parameters._sum_groups

    def sum_groups(*arguments):
        return {axis: group for axis, group in right(*arguments).items() if axis != "pp"}

    put(parameters, "_sum_groups", sum_groups)


def tied_named_by_its_path(put: Put) -> None:
    put(parameters._Held, "name", property(lambda held: held.names[0]))


def tied_drawn_by_its_path(put: Put) -> None:
    right = parameters.initialise

    def initialise(records, seed):
        copies = {r.name: r.tied[0] for r in records if r.tied and not r.owner}
        right([replace(r, name=copies.get(r.name, r.name)) for r in records], seed)

    put(parameters, "initialise", initialise)


def absent_stages_take_turns(put: Put) -> None:
    right = parameters._record

    def record(name, number, holders, groups, mesh, parameter):
        found = right(name, number, holders, groups, mesh, parameter)
        return replace(found, owner=mesh.world_rank == number % mesh.world_size)

    put(parameters, "_record", record)


def boxes_not_compared(put: Put) -> None:
    put(parameters, "tiling_fault", lambda shape, boxes: None)


def ddp_sums_only_over_dp(put: Put) -> None:
    put(pytorch, "sum_flattened", lambda records, mesh: None)


def finish(put: Put, order: str) -> None:
    """Unscale never, or after clipping."""
    right = gradients.finish_gradients

    def finish_gradients(records, mesh, clip_norm=None, loss_scale=1.0, reduce=None):
        done = right(records, mesh, clip_norm, 1.0, reduce)
        if order == "after":
            for record in records:
                record.parameter.grad /= loss_scale
        return done

    put(core, "finish_gradients", finish_gradients)


def never_unscaled(put: Put) -> None:
    finish(put, "never")


def unscaled_after_clipping(put: Put) -> None:
    finish(put, "after")


def skip_decided_by_each_rank(put: Put) -> None:
    right, local = gradients.finish_gradients, []

    def sum_over_ranks(found, mesh):
        local.append(all(bool(r.parameter.grad.isfinite().all()) for r in found))
        for record in found:  # what torch's GradScaler would leave to add
            record.parameter.grad.nan_to_num_(0, 0, 0)
        total(found, mesh)

    total = data_parallel.sum_flattened

    def finish_gradients(*arguments, **named):
        done = right(*arguments, **named)
        return replace(done, finite=local.pop())

    put(step, "replicate", lambda *arguments: None)
    put(data_parallel, "sum_flattened", sum_over_ranks)
    put(step, "finish_gradients", finish_gradients)


def overflow_applied(put: Put) -> None:
    right = gradients.finish_gradients
    put(step, "finish_gradients", lambda *a, **k: replace(right(*a, **k), finite=True))


def schedule_moves_on_a_skipped_step(put: Put) -> None:
    right = step._count_step

    def count(state, applied):
        right(state, applied)
        state.optimizer_step += not applied

    put(step, "_count_step", count)


def data_waits_for_a_skipped_step(put: Put) -> None:
    right = step._count_step

    def count(state, applied):
        right(state, applied)
        state.data_step -= not applied

    put(step, "_count_step", count)


def scale_never_halved(put: Put) -> None:
    put(training.LossScaler, "update", lambda self, finite: None)


# ------------------------------------------------------------------- precision, rates and decay


def bf16_weights(put: Put) -> None:
    def dtype(precision):
        return torch.bfloat16 if precision == "bf16" else torch.float32

    for module in (training, step, core):
        put(module, "weight_dtype", dtype)


def raw_sums_under_fp16(put: Put) -> None:
    right = training.accumulate

    def accumulate(model, micro_batches, divisor, *rest):
        loss = right(model, micro_batches, 1, *rest) / divisor
        for parameter in model.parameters():
            parameter.grad /= divisor
        return loss

    put(step, "accumulate", accumulate)


def warmup_from_zero(put: Put) -> None:
    right = training.learning_rate

    def learning_rate(config, step):
        return right(config, step - 1) if step else 0.0

    put(core, "learning_rate", learning_rate)


def tied_weight_recorded_twice(put: Put) -> None:
    right = parameters.build_records

    def build_records(*arguments):
        return [record for r in right(*arguments) for record in [r] * (1 + len(r.tied))]

    put(parameters, "build_records", build_records)


def cosine_without_end(put: Put) -> None:
    def rate(config, step):
        fall = (1 - math.cos(math.pi * step / config.steps)) / 2
        return config.lr * (1 - (1 - config.min_lr) * fall)

    put(core, "learning_rate", rate)


def floor_by_max(put: Put) -> None:
    def rate(config, step):
        progress = min(step / config.steps, 1)
        return max(config.lr * (1 + math.cos(math.pi * progress)) / 2, config.min_lr)

    put(core, "learning_rate", rate)


def everything_decays(put: Put) -> None:
    right = training.make_optimizer
    put(step, "make_optimizer", lambda c, pairs: right(c, [(p, True) for p, _ in pairs]))


def parameter_in_no_group(put: Put) -> None:
    right = training.make_optimizer
    put(step, "make_optimizer", lambda config, pairs: right(config, pairs[1:]))


# ------------------------------------------------------------- initial weights, ties, randomness


def weights_drawn_by_rank(put: Put) -> None:
    right = model.initial_rows

    def rows(name, spec, shape, first, last, seed):
        return right(name, spec, shape, first, last, seed + torch.distributed.get_rank())

    put(parameters, "initial_rows", rows)


def shards_drawn_by_their_own_shape(put: Put) -> None:
    right = model.initial_rows

    def rows(name, spec, shape, first, last, seed):
        return right(name, spec, (last - first, *shape[1:]), 0, last - first, seed)

    put(parameters, "initial_rows", rows)


def spread_by_shard_width(put: Put) -> None:
    right = model.initial_rows

    def rows(name, spec, shape, first, last, seed):
        wider = math.sqrt(shape[0] / max(last - first, 1))
        return right(name, spec, shape, first, last, seed) * wider

    put(parameters, "initial_rows", rows)


def never_tied_again(put: Put) -> None:
    put(Transformer, "tie", lambda self: self)


def optimizer_made_too_early(put: Put) -> None:
    right = parameters.materialise

    def materialise(plain, mesh, *rest):
        found = right(plain, mesh, *rest)
        old = [nn.Parameter(record.parameter.detach().clone()) for record in found]
        return [replace(record, parameter=p) for record, p in zip(found, old)]

    put(step, "materialise", materialise)


def dropout_by_place_in_the_micro_batch(put: Put) -> None:
    right = Noise.__init__

    def init(self, p, seed, step, samples, index):
        right(self, p, seed, step, torch.arange(len(samples)), index)

    put(Noise, "__init__", init)


def replicas_not_compared(put: Put) -> None:
    put(records, "assert_replicas_agree", lambda *arguments: None)


FAULTS = [
    Fault("average over ranks", "ACC-04", average_over_ranks, core.check_one_step,
          symptom="1/2: averaged over ranks"),
    Fault("average over ranks, clipped", "ACC-04", average_over_ranks, core.check_clipped_step,
          symptom="gradient norm differs: 0.5 x"),
    Fault("division twice", "ACC-03", divide_by_accumulation_too, core.check_one_step,
          symptom="1/3: averaged over micro-batches"),
    Fault("division twice, counts", "ACC-03", divide_by_accumulation_too,
          core.check_accumulation_counts, core.ALONE),
    Fault("mean of means", "ACC-01", mean_of_means, core.check_one_step, symptom="loss differs"),
    Fault("mean of means, numbers", "ACC-01", mean_of_means, core.check_uneven_micro_batches,
          core.ALONE, "loss 5.0"),
    Fault("divisor of one rank", "ACC-04", divisor_of_this_rank_only, core.check_one_step),
    Fault("loss of one rank", "ACC-04", loss_of_this_rank_only, core.check_one_step,
          symptom="loss differs"),
    Fault("mean over no tokens", "ACC-09", mean_over_no_tokens, core.check_masked_rank,
          symptom="loss nan"),
    Fault("labels shifted twice", "ACC-10", labels_shifted_again, core.check_labels_shifted_once,
          core.ALONE),
    Fault("labels shifted twice, oracle", "ACC-10", labels_shifted_again, core.check_one_step,
          core.ALONE, "loss differs"),
    Fault("loss with its graph", "ACC-12", loss_kept_with_its_graph, core.check_nothing_kept,
          core.ALONE),
    Fault("figures kept", "ACC-12", figures_kept, core.check_nothing_kept, core.ALONE,
          "live tensors"),
    Fault("one gradient forgotten", "", one_gradient_forgotten, core.check_one_step,
          symptom="1 of "),
    Fault("partial gradients not summed", "TP-14", partial_gradients_forgotten,
          records.check_sums, records.TP),
    Fault("sharded gradients summed", "TP-14", sharded_gradients_summed, records.check_sums,
          records.TP),
    Fault("masked rank skips its step", "DP-06", rank_without_targets_returns,
          core.check_masked_batch_keeps_ranks_together),
    Fault("strided gradients sent", "COM-02", strided_gradients_sent_as_they_are,
          records.check_strided_gradients_are_summed),
    Fault("strided tensors accepted", "COM-02", strided_tensors_accepted,
          records.check_strided_refused),
    Fault("clip before the sum", "CLIP-02", clip_before_sum, core.check_clipped_step),
    Fault("clip every micro-batch", "CLIP-09", clip_every_micro_batch, core.check_clipped_once,
          core.ALONE),
    Fault("norm of one rank", "CLIP-02", norm_of_this_rank_only,
          records.check_replicated_and_sharded_norm, records.TP),
    Fault("norm of one rank, oracle", "CLIP-02", norm_of_this_rank_only, core.check_clipped_step),
    Fault("replicated counted twice", "CLIP-01", replicated_counted_on_every_rank,
          records.check_replicated_and_sharded_norm, records.TP, "norm 13.928"),
    Fault("replicated counted twice, oracle", "CLIP-01", replicated_counted_on_every_rank,
          core.check_one_step, symptom="gradient norm differs: 1.414"),
    Fault("padding counted", "CLIP-01", padding_counted,
          records.check_each_element_counted_once, records.TP),
    Fault("tied weight in the norm twice", "CLIP-01", tied_weight_counted_twice,
          core.check_one_step, core.ALONE, "gradient norm differs"),
    Fault("two owners", "CLIP-01", owned_by_all_first_ranks, records.check_one_owner, records.TP),
    Fault("shared part counted by all", "CLIP-01", axis_shared_by_nobody,
          replicas.check_kv_numbers, replicas.TP4, "norm 25.29"),
    Fault("shared part counted by all, owners", "CLIP-01", axis_shared_by_nobody,
          replicas.check_kv_heads, replicas.TP4, "owners [2.0]"),
    Fault("all heads' gradients summed", "TP-14", axis_summed_as_a_whole,
          replicas.check_kv_numbers, replicas.TP4, "'key': [4.0]"),
    Fault("all heads' gradients summed, plain", "TP-14", axis_summed_as_a_whole,
          replicas.check_kv_heads, replicas.TP4),
    Fault("shared gradients not summed", "TP-14", partial_gradients_forgotten,
          replicas.check_kv_heads, replicas.TP4),
    Fault("tied stages not summed", "PP-04", stages_not_summed, replicas.check_tied_stages,
          replicas.PP),
    Fault("tied head under its own name", "PP-04", tied_named_by_its_path,
          replicas.check_tied_stages, replicas.PP, "records: "),
    Fault("tied head drawn by its own name", "PP-04", tied_drawn_by_its_path,
          replicas.check_tied_stages, replicas.PP),
    Fault("owned by a stage without it", "CLIP-01", absent_stages_take_turns,
          replicas.check_tied_stages, replicas.PP, "owners [0.0]"),
    Fault("boxes not compared", "", boxes_not_compared, replicas.check_refusals, records.TP,
          "overlap"),
    Fault("DDP sums over dp only", "TP-14", ddp_sums_only_over_dp,
          replicas.check_ddp_sums_partial_gradients, records.DP_TP),
    Fault("never unscaled", "CLIP-06", never_unscaled, core.check_unscaled_before_clipping,
          core.ALONE, "norm 5120"),
    Fault("unscaled after clipping", "CLIP-06", unscaled_after_clipping,
          core.check_unscaled_before_clipping, core.ALONE, "norm 5120"),
    Fault("skip by each rank alone", "CLIP-08", skip_decided_by_each_rank,
          core.check_overflow_skipped_together),
    Fault("overflow applied", "MP-04", overflow_applied, core.check_overflow_skipped_together,
          core.ALONE),
    Fault("schedule moves on a skip", "MP-04", schedule_moves_on_a_skipped_step,
          core.check_overflow_skipped_together, core.ALONE, "learning rate"),
    Fault("data waits for a skip", "MP-04", data_waits_for_a_skipped_step,
          core.check_overflow_skipped_together, core.ALONE),
    Fault("scale never halved", "MP-04", scale_never_halved,
          core.check_overflow_skipped_together, core.ALONE),
    Fault("bf16 weights, small updates", "MP-01", bf16_weights, core.check_small_updates_arrive,
          core.ALONE, "weight 1.0"),
    Fault("bf16 weights, small gradients", "MP-02", bf16_weights,
          core.check_small_gradients_add_up, core.ALONE, "256"),
    Fault("bf16 weights, dtypes", "MP-01", bf16_weights, core.check_state_is_fp32, core.ALONE),
    Fault("fp16 sees raw sums", "", raw_sums_under_fp16, core.check_overflow_skipped_together,
          core.ALONE, "step 0: applied False"),
    Fault("warm-up from zero", "LR-01", warmup_from_zero, core.check_first_update_moves,
          core.ALONE),
    Fault("cosine without an end", "LR-03", cosine_without_end, core.check_decay_ends, core.ALONE),
    Fault("lowest rate by max()", "LR-03", floor_by_max, core.check_decay_ends, core.ALONE),
    Fault("norms and biases decay", "LR-07", everything_decays, core.check_decay_groups,
          core.ALONE),
    Fault("tied weight decays twice", "LR-07", tied_weight_recorded_twice, core.check_decay_groups,
          core.ALONE),
    Fault("parameter in no group", "LR-07", parameter_in_no_group, core.check_decay_groups,
          core.ALONE),
    Fault("weights drawn by rank", "TP-15", weights_drawn_by_rank, core.check_one_step),
    Fault("shards drawn by their shape", "TP-15", shards_drawn_by_their_own_shape,
          records.check_cut_starts_as_plain, records.TP),
    Fault("spread by shard width", "TP-15", spread_by_shard_width,
          records.check_cut_starts_as_plain, records.TP),
    Fault("not tied again", "DP-13", never_tied_again, core.check_materialised, core.ALONE),
    Fault("optimizer holds old parameters", "DP-13", optimizer_made_too_early,
          core.check_materialised, core.ALONE),
    Fault("dropout by place", "TP-17", dropout_by_place_in_the_micro_batch, core.check_dropout),
    Fault("replicas not compared", "", replicas_not_compared,
          records.check_replicas_are_compared),
]  # fmt: skip
