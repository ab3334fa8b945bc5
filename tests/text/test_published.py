"""The papers' models against dense transcriptions of their formulas, layer by layer, at their own shapes of head."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.registry import find_recipe
from recipes.text import BAM, BAM_METHODS, CABLE_METHODS
from zoo import create_model
from zoo.model import ZooModel

LENGTH = 21


def small(recipe: str) -> ZooModel:
    """The recipe's model, narrower and with two layers; everything else as it is."""
    given = find_recipe(recipe)
    torch.manual_seed(0)
    options = given.model.options | {"train_context": given.data.context, "vocab_size": 50, "tokenizer": "bytes"}
    model = create_model(given.model.name, **options | {"dim": 128, "num_heads": 4, "hidden_dim": 96, "num_layers": 2})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def slopes(heads: int) -> Tensor:
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE on pairs (n, n + D/2) as complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * theta ** -(torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def bias(prior: nn.Module, x: Tensor, context: int) -> Tensor:
    """(1 or B, H, T, T): what the papers add to the logits."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    d, name, heads = (i - j).double(), type(prior).__name__, prior.num_heads
    if name == "Ggd":
        a, b = (p[:, None, None] for p in (prior.theta_alpha, prior.theta_beta))
        return (-a.exp() * (d.abs() + 1e-5) ** b)[None]
    if name == "Alibi":
        return (-slopes(heads)[:, None, None] * d)[None]
    if name == "Kerple":
        r1, r2 = (r.clamp(min=0.01)[:, None, None] for r in (prior.r1, prior.r2))
        return (-r1 * (1 + r2 * d.abs()).log())[None]
    if name == "Fire":
        ratio = (1 + prior.scale.abs() * d.clamp(min=0)).log()
        ratio = ratio / (1 + prior.scale.abs() * torch.maximum(i.double(), context * prior.multiplier.abs())).log()
        return prior.mlp(ratio[..., None]).permute(2, 0, 1)[None]
    if name == "T5":
        exact = d.clamp(min=0)
        far = 16 + (exact.clamp(min=1) / 16).log() / math.log(128 / 16) * 16
        bucket = torch.where(exact < 16, exact, far.floor().clamp(max=31)).long()
        return prior.bias[:, bucket][None]
    if name == "Cable":
        rate = (x @ prior.decay.weight.T + prior.decay.bias).relu().transpose(1, 2).cumsum(-1)
        weight = F.softplus(x @ prior.weight.weight.T).transpose(1, 2)
        return -weight[..., None] * (rate[..., :, None] - rate[..., None, :])
    if name == "Goat":
        spectral, key = prior.spectral, prior.key_bias
        omega = 10000.0 ** -torch.tensor([0.0, 1.0], dtype=torch.float64)
        angle = d[..., None] * omega
        relative = (spectral.alpha[:, None, None] * angle.cos() + spectral.beta[:, None, None] * angle.sin()).sum(-1)
        at, ramp = torch.arange(LENGTH).double()[:, None], 10000.0 ** (-torch.arange(8).double() / 7)
        z = torch.cat([(at * ramp).cos(), (at * ramp).sin(), at / context, (1 + at).log() / math.log(1 + context)], -1)
        u = key.gain[:, None] * key.mlp(z)[:, 0] + key.bump[:, None] * (at[:, 0] == 0)
        u = u + (1 + key.raw_slope.exp()).log()[:, None] * at[:, 0]
        return (relative + u[:, None])[None]
    assert name == "Uniform"
    return torch.zeros(1, 1, 1, 1, dtype=torch.float64)


def transcribed(model: ZooModel, tokens: Tensor) -> Tensor:
    """Logits by the papers' formulas with dense matrices, from the model's parameters alone."""
    config = model.config
    x = model.embedding.weight[tokens]
    if config.position == "sinusoidal":
        at, column = torch.arange(LENGTH).double()[:, None], torch.arange(config.dim).double()
        if config.position_options:  # BAM's code: sines and cosines in turn, each with a frequency of its own
            angle = at * 10000.0 ** -(column / config.dim)
            x = x + torch.where(column % 2 == 0, angle.sin(), angle.cos())
        else:
            angle = at * 10000.0 ** -(column[::2] / config.dim)
            x = x + torch.cat([angle.sin(), angle.cos()], dim=-1)
    theta = config.position_options.get("theta", 10000.0)
    for layer in model.layers:
        attention, y = layer.attention, normed(layer.attention_norm, x)
        q, k, v = (
            part(y).unflatten(2, (config.num_heads, -1)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        if config.position == "rope":
            q, k = turned(q, theta), turned(k, theta)
        scores, prior = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), bias(attention.prior, y, config.train_context)
        seen = torch.arange(1, LENGTH + 1).double().log()[:, None]
        if attention.ssmax is None:
            logits = scores + prior
        elif config.position == "alibi":  # as released: the bias outside the scale
            logits = attention.ssmax.s[:, None, None] * seen * scores + prior
        else:
            logits = attention.ssmax.s[:, None, None] * seen * (scores + prior)
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + attention.out(out.transpose(1, 2).flatten(2))
        y, mlp = normed(layer.mlp_norm, x), layer.mlp
        if config.style == "gpt2":
            up = mlp.up(y)
            inner = 0.5 * up * (1 + (math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)).tanh())
        else:
            gate = mlp.gate(y)
            inner = gate / (1 + (-gate).exp()) * mlp.up(y)
        x = x + mlp.down(inner)
    return normed(model.norm, x) @ (model.embedding.weight if model.head is None else model.head.weight).T


RECIPES = [
    *(f"text.goat_c4_{method}_125m" for method in ("goat", "alibi", "rope")),
    *(f"text.bam_{method}{ssmax}_120m" for method in BAM_METHODS for ssmax in ("", "_ssmax")),
    *(f"text.cable_{method}_124m" for method in CABLE_METHODS),
]


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_the_models_are_the_published_formulas(recipe: str) -> None:
    model, tokens = small(recipe), torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens).double(), transcribed(model, tokens), atol=2e-5, rtol=1e-5)


def parameters(recipe: str, part: Callable[[str], bool] = lambda name: True) -> int:
    from recipes.estimate import build_on_meta

    model = build_on_meta(find_recipe(recipe))
    return sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and part(name))


@pytest.mark.parametrize(
    ("recipe", "millions"),
    [
        ("text.bam_ggd_ssmax_120m", 121.1),
        ("text.bam_rope_432m", 431.0),
        ("text.bam_nope_ssmax_1100m", 1141.0),
        ("text.cable_rope_44m", 44.7),
        ("text.cable_cable_124m", 123.8),
        ("text.cable_alibi_354m", 353.8),
        ("text.goat_c4_rope_125m", 123.6),
    ],
)
def test_parameter_counts(recipe: str, millions: float) -> None:
    assert parameters(recipe) / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize(("size", "trained"), [("120m", 384), ("432m", 672), ("1100m", 960)])
def test_bams_prior_has_the_published_number_of_parameters(size: str, trained: int) -> None:
    """Two a head and layer; the third, μ, is not trained (BAM, table 1)."""
    assert parameters(f"text.bam_ggd_{size}", lambda name: ".prior." in name) == trained
    assert all(f"bam_{method}_{size}" in find_recipe(f"text.bam_{method}_{size}").name for method in BAM_METHODS)
    assert set(BAM) == {"120m", "432m", "1100m"}
