"""Checks of the plain model, shared by its tests and by its mutants (faults that are put back).

Each check raises AssertionError where the model is wrong. Shapes are odd, biases are not zero, and
weights are large enough that every part of the model moves the result.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from course_lib import training
from course_lib.model import (
    KVCache,
    ModelConfig,
    Noise,
    Transformer,
    attend,
    build,
    generate,
)
from course_lib.training import IGNORE

# norm_eps is large, so that its place in the formula shows.
GPT = ModelConfig(layers=3, width=30, heads=5, vocab=41, context=17, mlp_width=44, norm_eps=1e-2)
LLAMA = ModelConfig(
    layers=3, width=36, heads=6, kv_heads=2, vocab=43, context=19, mlp_width=50, norm="rmsnorm",
    mlp="swiglu", positions="rope", bias=False, tie_embeddings=False, norm_eps=1e-2, rope_base=500,
)  # fmt: skip
SHAPES = {
    "gpt": GPT,
    "gpt-untied": replace(GPT, tie_embeddings=False),
    "llama": LLAMA,
    "llama-biases-tied": replace(LLAMA, bias=True, tie_embeddings=True),
    "llama-one-kv-head": replace(LLAMA, kv_heads=1, mlp_width=None),
}
MIXED = replace(GPT, heads=6, kv_heads=3, mlp="swiglu", norm="rmsnorm")  # of both families
BOUND = {torch.float32: 1e-5, torch.float64: 1e-12}


def lively(config: ModelConfig, dtype=torch.float64, seed: int = 0) -> Transformer:
    """A model whose parameters, biases and norm weights too, are far from their initial values."""
    model = build(config, seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            matrix = parameter.dim() > 1
            scale = 1.2 / parameter.shape[-1] ** 0.5 if matrix else 0.3
            parameter.copy_(parameter * (not matrix) + noise * scale)
    return model.eval()


def random_tokens(config: ModelConfig, batch: int = 3, sequence: int | None = None, seed: int = 1):
    """(batch, sequence) int64; the sequence is the whole context unless said otherwise."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, sequence or config.context)
    return torch.randint(config.vocab, shape, generator=generator)


def assert_close(found: Tensor, wanted: Tensor, bound: float, what: str, least: float = 0.0):
    """The difference's norm is at most bound times the norm of what is wanted (or `least`)."""
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, not {wanted.shape}"
    found, wanted = found.detach(), wanted.detach()
    error = float((found - wanted).double().norm())
    scale = max(float(wanted.double().norm()), least)
    assert error <= bound * scale, f"{what}: off by {error / max(scale, 1e-300):.2e}"


# ---------------------------------------------------------------- the same as transformers'


def assert_equals_transformers(config: ModelConfig, dtype=torch.float32):
    """Logits, the loss and every gradient equal those of transformers' model with these weights.

    transformers shifts the labels itself, ours come shifted.
    """
    model = lively(config, dtype)
    theirs = _transformers_model(model)
    tokens = random_tokens(config)
    unshifted = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, IGNORE)
    labels = F.pad(unshifted[:, 1:], (0, 1), value=IGNORE)

    output = theirs(input_ids=tokens, labels=unshifted)
    wanted_loss = output.loss
    if dtype == torch.float64:  # theirs is computed in fp32
        scores, targets = output.logits[:, :-1].flatten(0, 1), unshifted[:, 1:].flatten()
        wanted_loss = F.cross_entropy(scores, targets, ignore_index=IGNORE)
    wanted_loss.backward()
    logits = model(tokens)
    loss = training.loss_sum(logits, labels) / (labels != IGNORE).sum()
    loss.backward()

    bound = BOUND[dtype]
    assert_close(logits, output.logits, bound, "logits")
    assert_close(loss, wanted_loss, bound, "loss")
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    found = _in_their_names({n: p.grad for n, p in model.named_parameters()}, config)
    assert found.keys() == wanted.keys(), f"names differ: {found.keys() ^ wanted.keys()}"
    least = 1e-3 * total_norm(wanted)  # a key's bias has no gradient at all, for example
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, bound, f"gradient of {name}", least)


def total_norm(tensors: Mapping[str, Tensor]) -> float:
    """Norm of all tensors together."""
    return float(torch.stack([t.double().norm() for t in tensors.values()]).norm())


def _in_their_names(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    from course_lib.checkpoint.hugging_face import export_weights

    return export_weights(weights, config)


def _transformers_model(model: Transformer):
    import transformers

    from course_lib.checkpoint.hugging_face_config import config_to_hugging_face

    config = config_to_hugging_face(model.config)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="sdpa"
    )
    dtype = model.head.weight.dtype
    theirs.to(dtype).eval()
    tied = model.config.tie_embeddings
    weights = _in_their_names(model.state_dict(), model.config)
    misfits = theirs.load_state_dict(weights, strict=False)
    assert set(misfits.missing_keys) == ({"lm_head.weight"} if tied else set())
    assert not misfits.unexpected_keys
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == tied
    if dtype == torch.float64 and model.config.norm == "rmsnorm":
        _use_float64_throughout(theirs)
    return theirs


def _use_float64_throughout(llama) -> None:
    """transformers' Llama computes norms and rotary angles in fp32 whatever its dtype."""

    def norm(module):
        def forward(x):
            return module.weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()

        eps = module.variance_epsilon
        return forward

    def rotary(x, position_ids):
        pairs = torch.arange(0, width, 2, dtype=torch.float64) / width
        angle = position_ids[..., None] / base**pairs
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    width = llama.config.head_dim
    base = llama.config.rope_parameters["rope_theta"]
    llama.model.rotary_emb.forward = rotary
    for module in llama.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = norm(module)


# ------------------------------------------------------------------------------ the KV cache


def assert_cache_changes_nothing(config: ModelConfig, chunks=(5, 1, 3, 1, 1), dtype=torch.float32):
    """Logits of a sequence given in chunks with a cache equal those of the whole."""
    model = lively(config, dtype)
    tokens = random_tokens(config, sequence=sum(chunks))
    cache = KVCache(config, len(tokens), sum(chunks), dtype=dtype)
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split(chunks, dim=1)]
        whole = model(tokens)
    first = 0
    for index, piece in enumerate(pieces):
        last = first + piece.shape[1]
        assert_close(piece, whole[:, first:last], BOUND[dtype], f"logits of chunk {index}")
        first = last
    assert cache.length == sum(chunks)


def assert_greedy_is_the_same_with_a_cache(config: ModelConfig):
    """Greedy tokens in fp64 are equal with and without a cache, and follow the logits."""
    model = lively(config)
    prompt = random_tokens(config, batch=4, sequence=3)
    new = config.context - 3
    cached = generate(model, prompt, new, temperature=0)
    plain = generate(model, prompt, new, temperature=0, use_cache=False)
    assert torch.equal(cached, plain), "the cache changes the text"
    assert torch.equal(cached[:, :3], prompt)
    likeliest = model(cached[:, :-1]).argmax(-1)[:, 2:]
    assert torch.equal(cached[:, 3:], likeliest), "a token is not the likeliest"
    assert len(cached.unique()) > 3, "the text is too dull to prove anything"


# ---------------------------------------------------------------------- who may see whom


def assert_no_token_sees_the_future(config: ModelConfig, path: str = "fused"):
    """Changing token t leaves all logits before t bit-identical, and moves those from t on.

    path: "fused", "dropout" (the explicit path), "documents" (a mask, fused) or "cache" (a prompt
    of 4 tokens, then the rest in one piece).
    """
    config = replace(config, dropout=0.2 if path == "dropout" else 0.0)
    model = lively(config).train(path == "dropout")
    tokens = random_tokens(config, batch=2)
    before = _logits_on(model, tokens, path)
    for t in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, t] = (tokens[:, t] + 1) % config.vocab
        after = _logits_on(model, changed, path)
        assert torch.equal(after[:, :t], before[:, :t]), f"{path}: token {t} is seen before it"
        moved = (after[:, t:] != before[:, t:]).any(-1)
        assert moved.all(), f"{path}: token {t} is not seen after it"


def _logits_on(model: Transformer, tokens: Tensor, path: str) -> Tensor:
    with torch.no_grad():
        if path == "cache":
            cache = KVCache(model.config, len(tokens), tokens.shape[1], dtype=torch.float64)
            parts = tokens[:, :4], tokens[:, 4:]
            return torch.cat([model(part, cache=cache) for part in parts], dim=1)
        if path == "documents":
            return model(tokens, documents=torch.zeros_like(tokens))
        return model(tokens, samples=torch.arange(len(tokens)), step=3)


def assert_documents_are_isolated(config: ModelConfig, dropout: float = 0.0):
    """Packed documents do not see each other; packed, each gives its logits when alone."""
    config = replace(config, dropout=dropout)
    model = lively(config).train(dropout > 0)
    sizes = (4, 1, 6)
    tokens = random_tokens(config, batch=2, sequence=sum(sizes))
    documents = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    positions = torch.cat([torch.arange(size) for size in sizes])
    more = {
        "documents": documents.expand_as(tokens), "positions": positions.expand_as(tokens),
        "samples": torch.arange(2), "step": 0,
    }  # fmt: skip
    with torch.no_grad():
        packed = model(tokens, **more)
        for index in range(len(sizes)):
            own = documents == index
            changed = torch.where(own, (tokens + 1) % config.vocab, tokens)
            after = model(changed, **more)
            assert torch.equal(after[:, ~own], packed[:, ~own]), f"document {index} is seen"
            assert not torch.equal(after[:, own], packed[:, own])
            if not dropout:  # masks depend on the place in the sample
                alone = model(tokens[:, own])
                assert_close(packed[:, own], alone, 1e-12, f"document {index} alone")


def assert_explicit_attention_equals_fused(heads: int = 6, kv_heads: int = 2):
    """The path with dropout computes the same attention; here with a rate of 0 (grouped heads)."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, 7, 4, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads)
    )
    nothing = Noise(0.0, 0, 0, torch.arange(2), torch.arange(7))
    mask = (torch.rand(2, 1, 7, 7, generator=generator) < 0.5) | torch.eye(7, dtype=torch.bool)
    for name, which in (("causal", None), ("with a mask", mask)):
        explicit = attend(query, key, value, which, nothing, site=1)
        fused = attend(query, key, value, which, None, site=1)
        assert_close(explicit, fused, 1e-12, f"attention {name}")
    keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    full = attend(query, keys, values, None, None, site=1)
    assert_close(attend(query, key, value, None, None, site=1), full, 1e-12, "grouped heads")


# --------------------------------------------------------------------------- ties, recompute


def assert_tied(config: ModelConfig):
    """The head is the embedding where they are tied, from any way of building, and only there."""
    with torch.device("meta"):
        shell = Transformer(config)
    shell = shell.to_empty(device="cpu").tie()
    for model in (Transformer(config), shell, build(config), build(config, dtype=torch.float64)):
        same = model.head.weight is model.embedding.weight
        assert same == config.tie_embeddings, "the head's tie is not what the configuration says"
        count = sum(name.endswith("head.weight") for name, _ in model.named_parameters())
        assert count == (not config.tie_embeddings)


def gradients(model: Transformer, tokens: Tensor, **more) -> dict[str, Tensor]:
    """Gradients by name of the summed loss of predicting the next token."""
    model.zero_grad()
    logits = model(tokens[:, :-1], **more)
    training.loss_sum(logits, tokens[:, 1:]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_recompute_changes_nothing(config: ModelConfig):
    """With every block recomputed in backward the gradients are the same bits.

    The generator's state is not restored: the masks must not come from it.
    """
    model = lively(replace(config, dropout=0.5), torch.float32).train()
    tokens = random_tokens(config)
    more = {"samples": torch.arange(len(tokens)), "step": 7}
    plain = gradients(model, tokens, **more)
    for block in model.blocks:
        block.forward = _recomputed(block.forward)
    for name, gradient in gradients(model, tokens, **more).items():
        assert torch.equal(gradient, plain[name]), f"recompute changes the gradient of {name}"


def _recomputed(forward):
    def run(*inputs):
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run


# ------------------------------------------------------------------------------------ labels


def assert_loss_and_its_gradient_are_exact(ignored: str = "some"):
    """The sum of PyTorch's token losses, and its gradient, for logits with large entries too."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator, dtype=torch.float64) * 20
    labels = torch.randint(11, (3, 7), generator=generator)
    drawn = {"none": 0.0, "some": 0.4, "all": 1.1}[ignored]
    labels = labels.masked_fill(torch.rand(3, 7, generator=generator) < drawn, IGNORE)
    found, wanted = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = training.loss_sum(found, labels)
    tokens = [(row, label) for row, label in zip(wanted.flatten(0, 1), labels.flatten())]
    terms = [row.logsumexp(-1) - row[label] for row, label in tokens if label != IGNORE]
    expected = torch.stack(terms).sum() if terms else wanted.sum() * 0
    (loss * 0.3).backward()
    (expected * 0.3).backward()
    assert_close(loss, expected, 1e-12, "loss")
    assert_close(found.grad, wanted.grad, 1e-12, "gradient of the logits")
    assert (found.grad[labels == IGNORE] == 0).all(), "an ignored label has a gradient"


def assert_loss_scores_the_next_token():
    """Logits that are sure of the next token cost nothing; of the one after it, a lot."""
    tokens = torch.arange(12)[None] % 7
    logits = F.one_hot(tokens[:, 1:], 7) * 40.0  # sure of the right one, at positions 0 … 10
    labels = tokens[:, 1:]
    assert float(training.loss_sum(logits, labels)) < 1e-4, "the true next token costs something"
    assert float(training.loss_sum(logits.roll(-1, 1), labels)) > 100
