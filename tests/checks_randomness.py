"""Checks of what is random about a model: dropout by position, initial values by name.

Shared by the tests and by the mutants; each raises AssertionError where something is wrong.
"""

import copy
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn

from course_lib.model import (
    ModelConfig,
    Noise,
    ParameterSpec,
    Transformer,
    build,
    initial_rows,
    parameter_spec,
)
from course_lib.model.randomness import BLOCK_ROWS
from tests.checks_model import (
    GPT,
    LLAMA,
    assert_close,
    gradients,
    lively,
    random_tokens,
    total_norm,
)

WIDE = replace(GPT, width=512, heads=8, vocab=600, context=256, mlp_width=512)  # to judge spread

# ----------------------------------------------------------------------- dropout in the model


def assert_masks_follow_the_sample(config: ModelConfig):
    """Gradients of a batch are the sum over its samples in any split and order."""
    model = lively(replace(config, dropout=0.4)).train()
    tokens, samples = random_tokens(config, batch=5), torch.tensor([11, 3, 8, 20, 5])
    whole = gradients(model, tokens, samples=samples, step=2)
    least = 1e-3 * total_norm(whole)
    for parts in (([0, 1], [2, 3, 4]), ([4], [2, 0], [3, 1]), ([3, 4, 1, 0, 2],)):
        split = [gradients(model, tokens[p], samples=samples[p], step=2) for p in parts]
        for name, gradient in whole.items():
            total = sum(part[name] for part in split)
            assert_close(total, gradient, 1e-12, f"split {parts}: gradient of {name}", least)


def assert_masks_differ(config: ModelConfig):
    """Another step, seed or sample index gives other logits; the same ones the same bits."""
    model = lively(replace(config, dropout=0.3)).train()
    tokens = random_tokens(config, batch=1).expand(3, -1)
    samples = torch.tensor([4, 5, 4])
    with torch.no_grad():
        first = model(tokens, samples=samples, step=1)
        assert torch.equal(first, model(tokens, samples=samples, step=torch.tensor(1)))
        assert_close(first[2], first[0], 1e-12, "masks of one sample in two rows")
        change = float((first[1] - first[0]).norm() / first[0].norm())
        assert change > 1e-3, "two samples have the same masks"
        assert not torch.equal(first, model(tokens, samples=samples, step=2)), "step is ignored"
        model.seed += 1
        assert not torch.equal(first, model(tokens, samples=samples, step=1)), "seed is ignored"


def assert_no_dropout_in_evaluation(config: ModelConfig):
    """In evaluation mode the model equals one without dropout, and needs no sample indices."""
    dropping, plain = lively(replace(config, dropout=0.5)), lively(config)
    tokens = random_tokens(config)
    with torch.no_grad():
        assert torch.equal(dropping(tokens), plain(tokens)), "dropout in evaluation"
        plain.train()
        assert torch.equal(dropping(tokens), plain(tokens))


def assert_head_shards_sum_to_the_whole(config: ModelConfig):
    """Attention cut into shards of heads, as tensor parallelism does, sums to the whole.

    Dropout is on: each shard must draw the masks of its own heads.
    """
    config = replace(config, dropout=0.3)
    whole = lively(config).blocks[1].attention
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 6, config.width, generator=generator, dtype=torch.float64)
    noise = Noise(config.dropout, 5, 1, torch.arange(2), torch.arange(6))
    total, shards = torch.zeros_like(x), config.key_value_heads
    with torch.no_grad():
        for shard in range(shards):
            part = copy.deepcopy(whole)
            for layer in (part.query, part.key, part.value):
                layer.weight = nn.Parameter(layer.weight.chunk(shards)[shard])
                if layer.bias is not None:
                    layer.bias = nn.Parameter(layer.bias.chunk(shards)[shard])
            part.output.weight = nn.Parameter(part.output.weight.chunk(shards, dim=1)[shard])
            if part.output.bias is not None and shard:
                part.output.bias = None
            part.head_offset = shard * config.heads // shards
            total += part(x, None, None, noise, None)
        assert_close(total, whole(x, None, None, noise, None), 1e-12, "sum of the shards of heads")


def assert_sequence_shards_are_parts_of_the_whole(config: ModelConfig, first: int = 5):
    """What enters the blocks is the same for a shard of the sequence that knows its offset."""
    model = lively(replace(config, dropout=0.3)).train()
    entered: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    tokens, samples = random_tokens(config), torch.arange(3)
    with torch.no_grad():
        model(tokens, samples=samples, step=0)
        model.sequence_offset = first
        model(tokens[:, first:], samples=samples, step=0)
    whole, shard = entered
    assert torch.equal(whole[:, first:], shard), "the shard is not a part of the whole"


def assert_every_site_is_its_own(config: ModelConfig):
    """A forward pass drops at 1 + 3 x layers places, each with a number of its own."""
    model = lively(replace(config, dropout=0.3)).train()
    sites = []
    with (
        mock.patch.multiple(
            Noise,
            drop=lambda _, x, site: sites.append(site) or x,
            drop_attention=lambda _, x, site, head_offset: sites.append(site) or x,
        ),
        torch.no_grad(),
    ):
        model(random_tokens(config), samples=torch.arange(3), step=0)
    assert len(sites) == 1 + 3 * config.layers, f"dropout at {len(sites)} places"
    assert len(set(sites)) == len(sites), f"two places share their masks: {sites}"


# --------------------------------------------------------------------------- the masks alone


def masks(
    p: float, seed=0, step=0, samples=(0,), first=0, positions=64, channels=64, site=0, heads=None
) -> Tensor:
    """What dropout makes of ones: (samples, positions, channels).

    With heads: (samples, heads, positions, keys) of attention.
    """
    index = torch.arange(first, first + positions)
    noise = Noise(p, seed, step, torch.as_tensor(samples), index)
    ones = torch.ones(len(samples), positions, channels, dtype=torch.float64)
    if heads is None:
        return noise.drop(ones, site)
    ones = ones[:, None].expand(-1, len(heads), -1, -1)
    return noise.drop_attention(ones, site, heads[0])


def assert_compiled_masks_are_the_same():
    """torch.compile may fuse what it likes: the bits are those of the uncompiled model."""

    def draw(samples, index):
        noise = Noise(0.3, 5, 1, samples, index)
        ones = torch.ones(len(samples), 4, len(index), len(index))
        return noise.drop_attention(ones, 1, 0).softmax(-1), noise.drop(ones[:, 0], 0)

    given = torch.tensor([4, 9, 2]), torch.arange(16)
    for plain, compiled in zip(draw(*given), torch.compile(draw)(*given)):
        other = float(((plain - compiled).abs() > 1e-5).double().mean())
        assert other == 0, f"{other:.1%} of the elements differ"


def assert_rate_and_scale(p: float):
    """The right share of elements is dropped; the others are scaled so that the mean stays."""
    for drawn in (masks(p, samples=range(64)), masks(p, samples=range(8), heads=range(8))):
        values = drawn.unique().tolist()
        wanted = [0.0, 1 / (1 - p)] if p else [1.0]
        torch.testing.assert_close(values, wanted, rtol=1e-12, atol=0)
        rate = float((drawn == 0).double().mean())
        deviation = (p * (1 - p) / drawn.numel()) ** 0.5
        assert abs(rate - p) <= 4.5 * deviation, f"{rate:.4f} are dropped, not {p}"


def assert_masks_are_independent():
    """Neighbours along every axis agree as often as coins do, and bytes of bits are uniform."""
    size = {"samples": range(32), "positions": 64, "channels": 64}
    many = masks(0.5, **size)
    attention = masks(0.5, samples=range(8), heads=range(16), site=2)
    pairs = {
        f"{name} {distance} apart along {axis}": (
            drawn.narrow(axis, distance, drawn.shape[axis] - distance),
            drawn.narrow(axis, 0, drawn.shape[axis] - distance),
        )
        for name, drawn in (("hidden", many), ("attention", attention))
        for axis in range(drawn.dim())
        for distance in (1, 2, 4)
    }
    rows, columns = torch.triu_indices(64, 64, offset=1)
    pairs |= {
        "seeds": (many, masks(0.5, seed=1, **size)),
        "steps": (many, masks(0.5, step=1, **size)),
        "far steps": (many, masks(0.5, step=10**6, **size)),
        "sites": (many, masks(0.5, site=1, **size)),
        "layers": (many, masks(0.5, site=3, **size)),
        "channels and positions": (many[:, rows, columns], many[:, columns, rows]),
        "hidden and attention": (many[:8], attention[:, 0]),
    }
    for what, (a, b) in pairs.items():
        differ = (a != b).double()
        z = abs(float(differ.mean()) - 0.5) * 2 * differ.numel() ** 0.5
        assert z < 6, f"masks are correlated: {what} (z = {z:.1f})"
    for what, drawn in (("channels", many), ("positions", many.transpose(1, 2))):
        bits = (drawn.reshape(-1, 8) == 0).long() @ (2 ** torch.arange(8))
        counts = bits.bincount(minlength=256).double()
        expected = counts.sum() / 256
        chi2 = float(((counts - expected) ** 2 / expected).sum())
        assert 255 - 5 * 510**0.5 < chi2 < 255 + 5 * 510**0.5, f"{what}: chi2 {chi2:.0f} of 255"
    shares = (many == 0).double().mean((0, 1)), (many == 0).double().mean((0, 2))
    for share in shares:  # no channel and no position is favoured
        deviation = 0.5 / (many.numel() / len(share)) ** 0.5
        assert float((share - 0.5).abs().max()) < 5 * deviation


def assert_offsets_cut_the_same_masks():
    """A shard of heads, positions or samples holds exactly that part of the whole mask."""
    whole = masks(0.3, samples=range(4), heads=range(6), positions=8, channels=8)
    assert torch.equal(
        masks(0.3, samples=range(4), heads=range(2, 5), positions=8, channels=8), whole[:, 2:5]
    )
    whole = masks(0.3, samples=range(4), positions=16)
    assert torch.equal(masks(0.3, samples=range(4), positions=6, first=10), whole[:, 10:])
    assert torch.equal(masks(0.3, samples=[3, 1], positions=16), whole[[3, 1]])


# ----------------------------------------------------------------------------- initial values


def assert_parts_equal_the_whole():
    """Any range of rows drawn alone equals that range of the whole."""
    spec, shape = ParameterSpec(std=0.02), (3 * BLOCK_ROWS + 5, 7)
    whole = initial_rows("blocks.0.mlp.up.weight", spec, shape, 0, shape[0], 3)
    edges = (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS, shape[0])
    for first in edges:
        for last in edges:
            if first <= last:
                part = initial_rows("blocks.0.mlp.up.weight", spec, shape, first, last, 3)
                assert torch.equal(part, whole[first:last]), f"rows {first} to {last} differ"


def assert_initial_values_depend_on_names_alone():
    """Equal for every dtype and order; different between names, blocks and seeds."""
    for config in (GPT, LLAMA):
        single, double = build(config, 5), build(config, 5, dtype=torch.float64)
        other = build(config, 6)
        deeper = build(replace(config, layers=config.layers + 1), 5)
        weights = dict(deeper.named_parameters())
        for name, value in single.named_parameters():
            assert torch.equal(value, double.get_parameter(name).float()), f"{name} by dtype"
            spec = parameter_spec(single, name)
            if spec.std:
                assert not torch.equal(value, other.get_parameter(name)), f"{name} by seed"
                ratio = parameter_spec(deeper, name).std / spec.std  # residual projections
                assert_close(weights[name].double(), value.double() * ratio, 1e-6, name)
        drawn = [p.flatten()[:8] for p in single.parameters() if p.dim() > 1]
        scaled = [tuple((d / d.norm()).tolist()) for d in drawn]
        assert len(set(scaled)) == len(drawn), "two parameters start with the same numbers"
        rows = build(replace(config, vocab=200)).embedding.weight
        assert not torch.equal(rows[:8], rows[64:72]), "two blocks of rows are alike"


def assert_initial_spread(config: ModelConfig, least: int = 100_000):
    """Each big parameter has mean 0 and its own std within 2 %; others are constants."""
    model = build(config)
    residual = 0.02 / (2 * config.layers) ** 0.5
    seen = set()
    for name, value in model.named_parameters():
        if value.dim() == 1:
            norm_weight = "norm" in name and name.endswith("weight")
            assert (value == float(norm_weight)).all(), f"{name} is not constant"
            continue
        ends_in_residual = name.endswith(("output.weight", "down.weight"))
        wanted = residual if ends_in_residual else 0.02
        seen.add(wanted)
        assert value.numel() >= least, f"{name} is too small to judge"
        wide = value.detach().double()
        std, mean = float(wide.std()), float(wide.mean())
        assert abs(std / wanted - 1) < 0.02, f"{name}: std {std / wanted:.3f} of what it should be"
        assert abs(mean) < 5 * wanted / value.numel() ** 0.5, f"{name}: mean {mean}"
    assert seen == {residual, 0.02}


def assert_specs_say_what_decays(config: ModelConfig):
    """Matrices and embeddings decay; biases and norm weights do not; none is undeclared."""
    with torch.device("meta"):
        model = Transformer(config)
    for name, value in model.named_parameters():
        assert parameter_spec(model, name).decay == (value.dim() > 1), name
