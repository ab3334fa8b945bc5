"""Lanes of any prior in half precision, and `doctor`'s check of registered priors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import zoo
from zoo import Positions, Prior, PriorTerms
from zoo.decoding import KVCache
from zoo.prior_check import check_prior
from zoo.priors import PRIORS, create_prior
from zoo.priors.compose import Compose
from zoo.priors.lanes import product_pieces

SLOPE = 0.37


class Ramp(Prior):
    """K = 0.37·j, by one lane that grows with position."""

    num_lanes = 1

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        q_lanes = torch.full((1, 1, q_pos.length, 1), SLOPE)
        return PriorTerms(q_lanes, k_pos.index().float()[:, None, :, None], causal=True)

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        row = SLOPE * k_pos.index().double()[:, None, None, :]
        return row.expand(1, self.num_heads, q_pos.length, -1)


class WrongRamp(Ramp):
    """Its formula is another one."""

    def log_prior(self, *positions: Positions, causal: bool, x: Tensor | None = None) -> Tensor:
        return 2 * super().log_prior(*positions, causal=causal)


def draw(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 16, generator=generator).to(dtype) for _ in range(3)]


def exact_last_rows(q: Tensor, k: Tensor, v: Tensor, prior: Prior, rows: int) -> Tensor:
    line = Positions.line(k.shape[2])
    last = q[:, :, -rows:].double()
    logits = last @ k.double().mT / math.sqrt(q.shape[-1])
    logits = logits + prior.log_prior(line.tail(rows), line, causal=True)
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(k.shape[2] - rows + 1)
    return logits.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [128, 2048])
def test_growing_lane_is_exact(length, dtype):
    """Rounded to bfloat16 as it is, position 2,047 would be off by up to 8."""
    q, k, v = draw(length, dtype)
    prior = Ramp(2)
    line = Positions.line(length)
    out = zoo.prior_attention(q, k, v, prior(line, line, causal=True), causal=True)
    expected = exact_last_rows(q, k, v, prior, 8)
    assert (out[:, :, -8:] - expected).abs().max() < 0.02


@torch.no_grad()
def test_cached_lane_is_exact():
    """Keys are stored with their lanes in pieces."""
    q, k, v = draw(1500, torch.bfloat16)
    prior = Compose(ramp=Ramp(2), alibi=create_prior("alibi", num_heads=2))
    cache = KVCache(1)
    start = 0
    for length in (1400, 99, 1):
        part = slice(start, start + length)
        cache.reserve(length)
        positions, _ = cache.positions(length, None)
        out = cache.layers[0].attend(
            prior, torch.zeros(1, length, 4), q[:, :, part], k[:, :, part], v[:, :, part], positions
        )
        cache.advance(length)
        start += length
    expected = exact_last_rows(q, k, v, prior, 1)
    assert (out - expected).abs().max() < 0.02


def test_pieces_have_product_and_gradient():
    q_lanes = torch.tensor([[0.37, -3.3e-3]], requires_grad=True)
    k_lanes = torch.tensor([[1999.7, 12345.6]], requires_grad=True)
    q_pieces, k_pieces = product_pieces(q_lanes, k_lanes)
    assert torch.equal(q_pieces, q_pieces.bfloat16().float())
    product = (q_pieces.double() * k_pieces.double()).sum()
    assert product.item() == pytest.approx(
        (q_lanes.double() * k_lanes.double()).sum().item(), rel=1e-6
    )
    (gradient,) = torch.autograd.grad(product, q_lanes)
    assert torch.allclose(gradient, k_lanes, rtol=1e-5)


@pytest.fixture
def registered() -> Iterator[None]:
    zoo.register_prior("ramp", Ramp)
    zoo.register_prior("wrong_ramp", WrongRamp)
    yield
    del PRIORS["ramp"]
    del PRIORS["wrong_ramp"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("registered")
def test_registered_prior_is_checked(dtype):
    assert not check_prior("ramp", "cpu", dtype).wrong
    (line,) = check_prior("wrong_ramp", "cpu", dtype).wrong
    assert "from log_prior" in line
