"""The gradient of SSMax's scale in half precision, beside lanes that have grown."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from zoo import Positions, create_prior, prior_attention
from zoo.layers import SSMax

HEADS, WIDTH, LENGTH, CONTEXT = 4, 32, 300, 64


def gradients(seed: int, kernel: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(H,) ∂L/∂s and what it is a sum of, Σ over rows of abs(∂L/∂ρ_i · ln n_i), float64; inputs are rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    prior = create_prior("key_bias", num_heads=HEADS, train_context=CONTEXT)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(3 * torch.randn(parameter.shape, generator=generator))
    given = [torch.randn(1, HEADS, LENGTH, WIDTH, generator=generator).bfloat16().to(dtype) for _ in range(4)]
    exact = dtype == torch.float64
    prior, ssmax = copy.deepcopy(prior), SSMax(HEADS, train_context=CONTEXT)
    if exact:
        prior, ssmax = prior.double(), ssmax.double()
    line = Positions.line(LENGTH)
    scale = ssmax(line, causal=True)
    scale.retain_grad()
    out = prior_attention(*given[:3], prior(line, line, causal=True), causal=True, query_scale=scale, kernel=kernel)
    out.backward(given[3])
    assert ssmax.s.grad is not None and scale.grad is not None
    rows = scale.grad[0] * (scale / ssmax.s[:, None])[0]
    return ssmax.s.grad.double(), rows.detach().double().abs().sum(-1)


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "toeplitz", pytest.param("triton", marks=pytest.mark.slow)])
def test_the_gradient_is_as_good_as_rounded_queries_allow(kernel: str) -> None:
    """The rows' gradients cancel, to a hundredth of their sum or less: what rounding leaves is a share of that sum, and not of
    the gradient. It is 0.001; with δ of a rounded output it was up to 0.2."""
    for seed in range(1) if kernel == "triton" else range(6):  # its programs are interpreted
        wanted, size = gradients(seed, "reference", torch.float64)
        found, _ = gradients(seed, kernel, torch.bfloat16)
        assert (found - wanted).abs().max() < (1e-4 if kernel == "reference" else 2**-9) * size.max(), seed
