"""What models may set of attention beside its prior: SSMax of the content alone, grouped heads, one
prior for all layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import pairs
from tests.zoo.priors_table import WIDTH, decoded, inputs, make
from zoo import Positions, create_model, create_prior, prior_attention
from zoo.layers import Attention, SSMax

HEADS = 3
LENGTH = 11


def attention(
    prior: str, *, ssmax: bool, groups: int, extras: bool, scale_prior: bool, scale_content: bool
) -> Attention:
    torch.manual_seed(3)
    options: dict[str, Any] = dict(lanes="beside", scale_prior=scale_prior, num_kv_heads=groups)
    options["ssmax"] = SSMax(HEADS, train_context=16, positive=extras) if ssmax else None
    layer = Attention(WIDTH, HEADS, prior=make(prior), **options)
    if extras:
        layer.norm_heads()
        layer.gate_output()
        torch.nn.init.normal_(layer.q_norm.weight)
    layer = layer.double()
    layer.scale_content = scale_content
    return layer


def by_definition(layer: Attention, x: Tensor) -> Tensor:
    """The layer's output from dense logits; lanes beside the heads leave all columns to content."""
    line = Positions.line(LENGTH)
    width = WIDTH // HEADS
    q, k, v = (
        linear(x).unflatten(2, (-1, width)).transpose(1, 2)
        for linear in (layer.query, layer.key, layer.value)
    )
    if layer.q_norm is not None:
        q, k = (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        q = q * layer.q_norm.weight
        k = k * layer.k_norm.weight
    k, v = (heads.repeat_interleave(HEADS // heads.shape[1], dim=1) for heads in (k, v))
    log_prior = layer.prior.log_prior(line, line, causal=True, x=x)
    content = q @ k.mT / (math.sqrt(width) if layer.scale_content else 1.0)
    rows: float | Tensor = 1.0
    if layer.ssmax is not None:
        s = layer.ssmax.s.exp().log1p() if layer.ssmax.positive else layer.ssmax.s
        rows = s[:, None, None] * torch.arange(1, LENGTH + 1).double().log()[:, None]
    logits = (content + log_prior) * rows if layer.scale_prior else content * rows + log_prior
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    out = (logits.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return layer.out(out if layer.gate is None else out / (1 + (-layer.gate(x)).exp()))


@pytest.mark.parametrize(
    ("prior", "ssmax", "extras", "scale_prior", "scale_content", "kernel", "groups"),
    pairs(["ggd", "goat", "fire"], *[[True, False]] * 4, ["auto", "sdpa"], [HEADS, 1]),
)
def test_attention_by_definition(
    prior: str,
    ssmax: bool,
    extras: bool,
    scale_prior: bool,
    scale_content: bool,
    kernel: str,
    groups: int,
) -> None:
    """Outputs and every gradient."""
    scales = {"scale_prior": scale_prior, "scale_content": scale_content}
    layer = attention(prior, ssmax=ssmax, groups=groups, extras=extras, **scales)
    x = inputs(LENGTH).requires_grad_()
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    outputs = layer(x, Positions.line(LENGTH), kernel=kernel), by_definition(layer, x)
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-9)
    options: dict[str, Any] = dict(allow_unused=True, materialize_grads=True)
    grads = (torch.autograd.grad(y.square().sum(), leaves, **options) for y in outputs)
    torch.testing.assert_close(*grads, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("name", ["text_ggd_goat_tiny", "vision_goat_tiny_patch8"])
def test_one_prior_for_all_layers(name: str) -> None:
    model = create_model(name, share_prior=True)
    separate = create_model(name)
    assert len({id(layer.attention.prior) for layer in model.layers}) == 1
    assert not any(
        ".prior." in key and not key.startswith("layers.0.") for key in model.state_dict()
    )
    others = sum(
        p.numel() for layer in separate.layers[1:] for p in layer.attention.prior.parameters()
    )
    assert (
        sum(p.numel() for p in separate.parameters()) - sum(p.numel() for p in model.parameters())
        == others
    )


def test_positive_row_scale_and_gates() -> None:
    """A positive row scale starts as the other and a decoder has norms and gates."""
    plain, positive = (SSMax(2, train_context=64, positive=p) for p in (False, True))
    torch.testing.assert_close(positive.scales(), plain.scales())
    with torch.no_grad():
        positive.s.fill_(-9.0)
    assert (positive.scales() > 0).all()
    window = SSMax(1, train_context=64, window=4)  # counts that end where the line does
    for line, counts in (
        (Positions.line(9), [4, 5, 6, 7, 7, 7, 6, 5, 4]),
        (Positions.line(9).tail(3), [6, 5, 4]),
    ):
        assert (window(line, causal=False) / window.s).exp()[0, 0].tolist() == pytest.approx(
            counts, rel=1e-5
        )
    extras = {"qk_norm": True, "output_gate": True, "ssmax_positive": True}
    model = create_model("text_rope_ssmax_tiny", **extras).eval()
    layer = model.layers[0].attention
    assert layer.ssmax.positive
    assert layer.gate is not None
    assert "layers.0.attention.q_norm.weight" in model.no_weight_decay()
    tokens = torch.arange(33)[None]
    torch.testing.assert_close(decoded(model, tokens), model(tokens), atol=1e-5, rtol=1e-5)


def test_bad_options() -> None:
    for options, message in [
        ({"logit_options": {"temperature": 2.0}}, "gone since 0.6"),
        ({"lanes": "besides"}, r"lanes='besides': did you mean 'beside'"),
        ({"lanes": "inside", "dim": 32, "num_heads": 4}, r"takes 9 of 8 columns.*lanes='beside'"),
        (
            {"position": ["ggd", "goat"], "num_layers": 2, "share_prior": True},
            "one position method for all layers",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            create_model("text_ggd_goat_tiny", **options)


def scale_gradients(seed: int, kernel: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(H,) ∂L/∂s and what it is a sum of, Σ over rows of abs(∂L/∂ρ_i · ln n_i), float64; inputs are
    rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    prior = create_prior("key_bias", num_heads=4, train_context=64)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(3 * torch.randn(parameter.shape, generator=generator))
    given = [torch.randn(1, 4, 300, 32, generator=generator).bfloat16().to(dtype) for _ in range(4)]
    prior = copy.deepcopy(prior)
    ssmax = SSMax(4, train_context=64)
    if dtype == torch.float64:
        prior = prior.double()
        ssmax = ssmax.double()
    line = Positions.line(300)
    scale = ssmax(line, causal=True)
    scale.retain_grad()
    out = prior_attention(
        *given[:3], prior(line, line, causal=True), causal=True, query_scale=scale, kernel=kernel
    )
    out.backward(given[3])
    assert ssmax.s.grad is not None
    assert scale.grad is not None
    return ssmax.s.grad.double(), (
        scale.grad[0] * (scale / ssmax.s[:, None])[0]
    ).detach().double().abs().sum(-1)


@pytest.mark.parametrize(
    "kernel", ["reference", "sdpa", "toeplitz", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_row_scale_gradient_in_bfloat16(kernel: str) -> None:
    """The rows' gradients cancel, to a hundredth of their sum or less: what rounding leaves is a
    share of that sum, and not of the gradient. It is 0.001; with δ of a rounded output it was up to
    0.2."""
    for seed in range(1) if kernel == "triton" else range(6):  # its programs are interpreted
        wanted, size = scale_gradients(seed, "reference", torch.float64)
        found, _ = scale_gradients(seed, kernel, torch.bfloat16)
        assert (found - wanted).abs().max() < (
            1e-4 if kernel == "reference" else 2**-9
        ) * size.max(), seed
