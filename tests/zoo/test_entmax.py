"""α-entmax attention against a search for its threshold, with priors, masks, cache and blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import zoo
from zoo.attention import entmax as entmax_file
from zoo.attention import prior_attention
from zoo.layers import EntmaxScale
from zoo.positions import Positions
from zoo.priors import create_prior

pytest.importorskip("entmax")

ALPHAS = (1.25, 1.5, 2.0)


def threshold_weights(logits: torch.Tensor, alpha: float) -> torch.Tensor:
    """entmax_α of the last axis: τ by bisection until the weights sum to 1, in float64."""
    scaled = (alpha - 1) * logits
    low = scaled.amax(-1, keepdim=True) - 1
    high = scaled.amax(-1, keepdim=True)
    for _ in range(100):
        middle = (low + high) / 2
        total = (scaled - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True)
        low = torch.where(total >= 1, middle, low)
        high = torch.where(total >= 1, high, middle)
    return (scaled - low).clamp(min=0).pow(1 / (alpha - 1))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=generator)


def call_inputs(length: int = 12) -> list[torch.Tensor]:
    return [draw(2, 4, length, 8, seed=seed).requires_grad_() for seed in range(3)]


def dense(q, k, v, prior: torch.Tensor, alpha: float, visible: torch.Tensor) -> torch.Tensor:
    """The formula: a row at a time over the keys that it sees."""
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + prior
    rows = []
    for i in range(q.shape[2]):
        keys = visible[i].nonzero().flatten()
        weights = threshold_weights(logits[:, :, i, keys], alpha)
        rows.append(torch.einsum("bhk,bhkd->bhd", weights, v[:, :, keys]))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ["uniform", "alibi", "nape", "t5"])
def test_equals_formula(name, alpha):
    q, k, v = call_inputs()
    line = Positions.line(12)
    prior = create_prior(name, num_heads=4).double()
    terms = prior(line, line, causal=True)
    kernel = entmax_file.EntmaxKernel(alpha)
    out = prior_attention(q, k, v, terms, causal=True, kernel=kernel)
    expected = dense(
        q, k, v, prior.log_prior(line, line, causal=True), alpha, torch.ones(12, 12).tril().bool()
    )
    assert torch.allclose(out, expected, atol=1e-9)


def test_window_hides_keys():
    q, k, v = call_inputs()
    kernel = entmax_file.EntmaxKernel()
    out = prior_attention(q, k, v, causal=True, window=3, kernel=kernel)
    visible = torch.ones(12, 12).tril().bool() & ~torch.ones(12, 12).tril(-3).bool()
    expected = dense(q, k, v, torch.zeros(()), 1.5, visible)
    assert torch.allclose(out, expected, atol=1e-12)


@pytest.mark.parametrize("with_prior", [False, True])
def test_gradients_of_inputs(with_prior):
    """By finite differences, of q, k and v."""
    terms = None
    if with_prior:
        line = Positions.line(6)
        terms = create_prior("alibi", num_heads=4).double()(line, line, causal=True)
    kernel = entmax_file.EntmaxKernel()

    def attend(q, k, v):
        return prior_attention(q, k, v, terms, causal=True, kernel=kernel)

    inputs = [draw(1, 4, 6, 3, seed=seed).requires_grad_() for seed in range(3)]
    assert torch.autograd.gradcheck(attend, inputs, eps=1e-6, atol=1e-6)


def test_blocks_change_nothing(monkeypatch):
    """Outputs and gradients of rows computed in blocks of two."""
    results = []
    for limit in (entmax_file.BLOCK_LOGITS, 2 * 2 * 4 * 12):
        monkeypatch.setattr(entmax_file, "BLOCK_LOGITS", limit)
        q, k, v = call_inputs()
        line = Positions.line(12)
        prior = create_prior("nape", num_heads=4).double()
        terms = prior(line, line, causal=True)
        out = prior_attention(q, k, v, terms, causal=True, kernel=entmax_file.EntmaxKernel())
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for whole, blocked in zip(*results, strict=True):
        assert torch.allclose(whole, blocked, atol=1e-12)


def test_row_without_key_is_zero():
    q, k, v = call_inputs()
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask[:, :, 4] = False
    out = prior_attention(q, k, v, causal=True, mask=mask, kernel=entmax_file.EntmaxKernel())
    assert out[:, :, 4].abs().max() == 0
    assert out.isfinite().all()


def test_far_keys_have_weight_zero():
    kernel = entmax_file.EntmaxKernel()
    logits = torch.tensor([[[[4.0, 0.0, -1.0, -math.inf]]]])
    assert kernel.weights(logits).flatten().tolist() == [1.0, 0.0, 0.0, 0.0]


def test_sink_is_refused():
    line = Positions.line(12)
    terms = create_prior("sink", num_heads=4).double()(line, line, causal=True)
    q, k, v = call_inputs()
    with pytest.raises(ValueError, match="learned sink"):
        prior_attention(q, k, v, terms, causal=True, kernel=entmax_file.EntmaxKernel())


def test_scale_follows_formula():
    scale = EntmaxScale(5, 3)
    x = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    rows = scale(Positions.line(7), x)
    for i in range(7):
        beta = (scale.beta(x[:, i]).exp() + 1).log()
        gamma = 3 * scale.gamma(x[:, i]).tanh()
        expected = 1 + beta * math.log(max(i + 1, 2)) ** gamma
        assert torch.allclose(rows[:, :, i], expected, rtol=1e-5)


def small_model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "dim": 32, "num_heads": 4, "hidden_dim": 32}
    return zoo.create_model("text_nape_tiny", normaliser="entmax", **sizes)


@torch.no_grad()
def test_cache_equals_one_pass():
    model = small_model()
    tokens = torch.randint(0, 1024, (2, 30))
    cache = model.new_cache()
    parts = [tokens[:, :17], *tokens[:, 17:].split(1, dim=1)]
    features = [model.forward_features(part, cache=cache) for part in parts]
    assert torch.allclose(torch.cat(features, 1), model.forward_features(tokens), atol=1e-5)


@torch.no_grad()
def test_packed_documents_are_apart():
    model = small_model()
    tokens = torch.randint(0, 1024, (1, 24))
    segments = torch.tensor([[0] * 10 + [1] * 14])
    packed = model.forward_features(tokens, segments=segments)
    assert torch.allclose(packed[:, :10], model.forward_features(tokens[:, :10]), atol=1e-5)
    assert torch.allclose(packed[:, 10:], model.forward_features(tokens[:, 10:]), atol=1e-5)


def test_named_kernel_is_refused():
    with pytest.raises(ValueError, match="computes softmax"):
        small_model()(torch.zeros(1, 4, dtype=torch.long), kernel="sdpa")


def test_ssmax_is_refused():
    with pytest.raises(ValueError, match="leave out ssmax"):
        zoo.create_model("text_nape_ssmax_tiny", normaliser="entmax")


def test_saved_model_is_the_same(tmp_path):
    model = small_model()
    model.save_pretrained(tmp_path)
    loaded = zoo.load_model(tmp_path)
    tokens = torch.randint(0, 1024, (1, 9))
    assert loaded.config == replace(model.config)
    assert torch.equal(loaded(tokens), model(tokens))
