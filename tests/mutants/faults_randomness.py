"""Faults of dropout, initial values and counts: how to put each back, and what must see it."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from course_lib import model
from course_lib.model import Transformer, decoder, randomness
from course_lib.model.decoder import Block
from course_lib.model.randomness import Noise
from tests import checks_counting as counting
from tests import checks_model as proof
from tests import checks_randomness as chance
from tests.checks_model import GPT, LLAMA, MIXED
from tests.mutants.faults_model import Fault, Put

# ------------------------------------------------------------------------- dropout by position


def dropout_from_history(put: Put) -> None:
    def apply(self, x, rows, site, cells):
        return x * (torch.rand((rows + cells).shape) >= self.p) / (1 - self.p)

    put(Noise, "_apply", apply)


def dropout_not_rescaled(put: Put) -> None:
    put(Noise, "_apply", lambda self, x, *key: x * _kept(self, *key))


def dropout_keeps_what_it_should_drop(put: Put) -> None:
    put(Noise, "_apply", lambda self, x, *key: x * ~_kept(self, *key) / (1 - self.p))


def _kept(noise, *key):
    return randomness._draw(*key) >= round(noise.p * 2**24)


def dropout_in_evaluation(put: Put) -> None:
    def noise(self, samples, step, index, batch):
        rate = self.config.dropout
        return Noise(rate, 0, 0, torch.arange(3), index) if rate else None

    put(Transformer, "_noise", noise)


def noise_without(put: Put, **fixed) -> None:
    right = Noise.__init__

    def init(self, p, seed, step, samples, index):
        given = {"seed": seed, "step": step, "samples": samples, "index": index}
        given |= {key: value(given[key]) for key, value in fixed.items()}
        right(self, p, **given)

    put(Noise, "__init__", init)


def dropout_by_row_of_the_micro_batch(put: Put) -> None:
    noise_without(put, samples=lambda samples: torch.arange(len(samples)))


def dropout_without_step(put: Put) -> None:
    noise_without(put, step=lambda _: 0)


def dropout_without_seed(put: Put) -> None:
    noise_without(put, seed=lambda _: 0)


def dropout_by_local_position(put: Put) -> None:
    noise_without(put, index=lambda index: torch.arange(len(index)))


def dropout_by_local_head(put: Put) -> None:
    right = Noise.drop_attention
    put(Noise, "drop_attention", lambda self, x, site, head_offset: right(self, x, site, 0))


def one_mask_for_all_layers(put: Put) -> None:
    right = Block.__init__
    put(Block, "__init__", lambda self, config, layer: right(self, config, 0))


def attention_weights_kept(put: Put) -> None:
    put(Noise, "drop_attention", lambda self, x, site, head_offset: x)


def weak_hash(put: Put) -> None:
    put(randomness, "_mix", lambda x: x * 0x2545F4914F6CDD1D >> 3)


def half_a_hash(put: Put) -> None:
    """A multiplication and one shift: nearly enough, but neighbours show."""
    put(randomness, "_mix", lambda x: (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47)


# ------------------------------------------------------------------------------ initial values


def weights_from_one_stream(put: Put) -> None:
    stream = torch.Generator().manual_seed(0)

    def rows(name, spec, shape, first, last, seed):
        if spec.std == 0:
            return torch.full((last - first, *shape[1:]), spec.fill)
        return torch.randn(last - first, *shape[1:], generator=stream) * spec.std

    put(decoder, "initial_rows", rows)
    put(chance, "initial_rows", rows)


def weights_without_name(put: Put) -> None:
    right = randomness.initial_rows
    put(decoder, "initial_rows", lambda name, *rest: right("weight", *rest))


def shards_drawn_by_their_own_shape(put: Put) -> None:
    right = randomness.initial_rows

    def rows(name, spec, shape, first, last, seed):
        return right(name, spec, (last - first, *shape[1:]), 0, last - first, seed)

    put(chance, "initial_rows", rows)


def every_block_of_rows_alike(put: Put) -> None:
    right = randomness.initial_rows

    def rows(name, spec, shape, first, last, seed):
        block, parts = min(64, shape[0]), -(-last // 64)
        blocks = [right(name, spec, shape, 0, block, seed) for _ in range(parts)]
        return torch.cat([*blocks, torch.empty(0, *shape[1:])])[first:last]

    put(decoder, "initial_rows", rows)
    put(chance, "initial_rows", rows)


def residual_projections_not_scaled(put: Put) -> None:
    put(decoder, "_residual_std", lambda config: decoder.INITIAL_STD)


def spread_by_fan_in(put: Put) -> None:
    right = randomness.initial_rows

    def rows(name, spec, shape, *rest):
        return right(name, replace(spec, std=spec.std and 1 / math.sqrt(shape[-1])), shape, *rest)

    put(decoder, "initial_rows", rows)


def biases_decay(put: Put) -> None:
    right = decoder.declare

    def declare(module, **specs):
        return right(module, **{name: replace(s, decay=True) for name, s in specs.items()})

    put(decoder, "declare", declare)


# ----------------------------------------------------------------------------------- counting


def count_of(put: Put, what: str, change: Callable) -> None:
    right = getattr(model, what)

    def counted(config, *rest):
        return change(right, config, *rest)

    put(model, what, counted)


def _add(counts: dict, key: str, more: int) -> dict:
    return counts | {key: counts[key] + more, "total": counts["total"] + more}


def tied_head_counted_twice(put: Put) -> None:
    def change(right, config):
        return _add(right(config), "head", config.vocab * config.width * config.tie_embeddings)

    count_of(put, "count_parameters", change)


def keys_and_values_counted_at_full_width(put: Put) -> None:
    def change(right, config, *rest):
        return right(replace(config, kv_heads=None), *rest)

    count_of(put, "count_parameters", change)
    count_of(put, "count_flops", change)


def gate_not_counted(put: Put) -> None:
    def change(right, config, *rest):
        return right(replace(config, mlp="gelu"), *rest)

    count_of(put, "count_parameters", change)
    count_of(put, "count_flops", change)


def input_embedding_counted_as_a_product(put: Put) -> None:
    def change(right, config, batch, sequence, *rest):
        more = 2 * batch * sequence * config.width * config.vocab
        flops = right(config, batch, sequence, *rest)
        return flops | {"forward": flops["forward"] + more, "total": flops["total"] + 3 * more}

    count_of(put, "count_flops", change)


def causal_scores_called_full(put: Put) -> None:
    def change(right, config, batch, sequence, attention="full"):
        return right(config, batch, sequence, "causal")

    count_of(put, "count_flops", change)


# ---------------------------------------------------------------------------------- the table

FAULTS = [
    Fault(dropout_from_history, partial(chance.assert_masks_follow_the_sample, GPT), "TP-17"),
    Fault(dropout_from_history, partial(proof.assert_recompute_changes_nothing, GPT), "AC-01"),
    Fault(dropout_not_rescaled, partial(chance.assert_rate_and_scale, 0.3)),
    Fault(dropout_keeps_what_it_should_drop, partial(chance.assert_rate_and_scale, 0.3)),
    Fault(dropout_in_evaluation, partial(chance.assert_no_dropout_in_evaluation, GPT)),
    Fault(dropout_by_row_of_the_micro_batch,
          partial(chance.assert_masks_follow_the_sample, MIXED), "TP-17"),
    Fault(dropout_without_step, partial(chance.assert_masks_differ, GPT)),
    Fault(dropout_without_seed, partial(chance.assert_masks_differ, GPT)),
    Fault(dropout_by_row_of_the_micro_batch, partial(chance.assert_masks_differ, LLAMA), "TP-17"),
    Fault(dropout_by_local_position,
          partial(chance.assert_sequence_shards_are_parts_of_the_whole, LLAMA)),
    Fault(dropout_by_local_position, chance.assert_offsets_cut_the_same_masks),
    Fault(dropout_by_local_head, partial(chance.assert_head_shards_sum_to_the_whole, LLAMA),
          "TP-17"),
    Fault(dropout_by_local_head, chance.assert_offsets_cut_the_same_masks, "TP-17"),
    Fault(one_mask_for_all_layers, partial(chance.assert_every_site_is_its_own, GPT)),
    Fault(attention_weights_kept, partial(chance.assert_rate_and_scale, 0.3)),
    Fault(weak_hash, chance.assert_masks_are_independent),
    Fault(half_a_hash, chance.assert_masks_are_independent),
    Fault(weights_from_one_stream, chance.assert_initial_values_depend_on_names_alone),
    Fault(weights_from_one_stream, chance.assert_parts_equal_the_whole),
    Fault(weights_without_name, chance.assert_initial_values_depend_on_names_alone),
    Fault(shards_drawn_by_their_own_shape, chance.assert_parts_equal_the_whole, "TP-15"),
    Fault(every_block_of_rows_alike, chance.assert_initial_values_depend_on_names_alone),
    Fault(residual_projections_not_scaled, partial(chance.assert_initial_spread, chance.WIDE)),
    Fault(spread_by_fan_in, partial(chance.assert_initial_spread, chance.WIDE), "TP-15"),
    Fault(biases_decay, partial(chance.assert_specs_say_what_decays, GPT)),
    Fault(tied_head_counted_twice, partial(counting.assert_parameters_are_counted, GPT)),
    Fault(keys_and_values_counted_at_full_width,
          partial(counting.assert_parameters_are_counted, LLAMA)),
    Fault(keys_and_values_counted_at_full_width,
          partial(counting.assert_flops_are_counted, LLAMA, 2, 5)),
    Fault(gate_not_counted, partial(counting.assert_parameters_are_counted, LLAMA)),
    Fault(gate_not_counted, partial(counting.assert_flops_are_counted, LLAMA, 2, 5)),
    Fault(input_embedding_counted_as_a_product,
          partial(counting.assert_flops_are_counted, GPT, 2, 5), "PR-01"),
    Fault(input_embedding_counted_as_a_product,
          partial(counting.assert_small_model_has_the_flops_of_the_papers, "full", 49_152),
          "PR-01"),
    Fault(causal_scores_called_full, partial(counting.assert_flops_are_counted, GPT, 2, 5),
          "PR-01"),
]  # fmt: skip
