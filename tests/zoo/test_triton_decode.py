"""Decoding kernels beside dense attention in float64: how keys are split, what queries see, and pages that are missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.device import DEVICE, some
from zoo.attention.triton import common, decode
from zoo.attention.triton.common import Geometry, Operands

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of 16 keys, so that short calls have several."""
    monkeypatch.setattr(common, "TILE", 8)
    yield


@dataclass
class Case:
    """A call; `kept` (B, G, S) bool below is which keys a cache still holds."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    row_scale: Tensor | None
    segments: Tensor | None
    g: Geometry

    @property
    def call(self) -> Operands:
        return Operands(self.q, self.k, self.v, self.table, self.row_scale, self.segments, self.g)

    def dense(self, splits: int | None = None) -> Tensor:
        return decode.decode(self.call, splits=splits)

    def excess(self, ours: Tensor, kept: Tensor | None = None) -> float:
        """The largest error, as a share of what float32 may do to it."""
        wanted, room = self.oracle(kept)
        return ((ours.double() - wanted).abs() / room).max().item()

    def oracle(self, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B,H,T,Dv) float64 output, and the error that float32 may make.

        Each logit is a sum of Dk products and a few more numbers, rounded that often, and goes into exp2; each weight is then
        part of sums of S in the numerator and in the denominator:  2·2^-24·((Dk + 6)·max Σ|terms of z| + S + 8)·Σ p|v|.
        """
        g = self.g
        k, v = (x.double().repeat_interleave(g.heads // g.groups, 1) for x in (self.k, self.v))
        q = g.softmax_scale * self.q.double()
        logits, terms = q @ k.mT, q.abs() @ k.abs().mT
        i, j = torch.arange(g.queries, device=DEVICE)[:, None], torch.arange(g.keys, device=DEVICE)[None]
        distance = i + g.offset - j
        seen = torch.ones(g.batch, 1, g.queries, g.keys, dtype=torch.bool, device=DEVICE)
        if g.causal:
            seen = seen & (distance >= 0)
        if g.window:
            seen = seen & (distance.abs() < g.window)
        if self.segments is not None:
            ids = self.segments[:, : g.keys]
            seen = seen & (ids[:, None, g.offset :, None] == ids[:, None, None, :])
        if kept is not None:
            seen = seen & kept.repeat_interleave(g.heads // g.groups, 1)[:, :, None]
        if self.table is not None:
            column = (g.origin + i - j).clamp(0, self.table.shape[1] - 1)
            bias = self.table.double()[:, column]
            logits, terms = logits + bias, terms + bias.abs()
        if self.row_scale is not None:
            scale = self.row_scale.double()[..., None]
            logits, terms = logits * scale, terms * scale.abs()
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        rounding = 2.0**-23 * ((g.width_k + 6) * terms.max() + g.keys + 8)
        return weights @ v, rounding * (weights @ v.abs())


def make(
    batch: int, heads: int, groups: int, queries: int, keys: int, width: int = 8, *, width_v: int | None = None,
    table: bool = True, scale: int = 0, documents: bool = False, lanes: int = 0, dtype: torch.dtype = torch.float32, **seen: int
) -> Case:  # fmt: skip
    """Random numbers; k and v are views into buffers with room for more, whose rest is not a number."""
    torch.manual_seed(0)
    width_v = width_v or width

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    k, v = (
        torch.full((batch, groups, keys + 5, w + 8), math.nan, device=DEVICE, dtype=dtype)[:, :, :keys, :w]
        for w in (lanes + width, width_v)
    )
    k.copy_(numbers(*k.shape))
    v.copy_(numbers(*v.shape))
    if lanes:
        k[..., 0], k[..., 1:lanes] = 1.0, 0.01 * torch.arange(keys, device=DEVICE)[:, None]
    q = numbers(batch, queries, heads, lanes + width).to(dtype).transpose(1, 2)
    origin = keys - queries + 3
    far = 0 if seen.get("causal", 1) else queries
    g = Geometry(
        batch, heads, groups, queries, keys, lanes + width, width_v, lanes,
        causal=bool(seen.get("causal", 1)), window=seen.get("window", 0), origin=origin + far,
        softmax_scale=1 / math.sqrt(width),
    )  # fmt: skip
    segments = None
    if documents:
        segments = (
            torch.arange(keys + 7, device=DEVICE)[None] * (2 + torch.arange(batch, device=DEVICE))[:, None]
        ) // keys
        segments = segments.to(torch.int32)
    return Case(
        q, k, v, numbers(heads, keys + queries + 8) if table else None,
        1.0 + 0.3 * numbers(scale, heads, queries) if scale else None, segments, g,
    )  # fmt: skip


CASES = {
    "one query": make(2, 2, 2, 1, 49),
    "grouped": make(1, 6, 2, 2, 65, scale=1),
    "eight, several tiles of rows": make(1, 10, 1, 8, 47, 16, scale=1),
    "window": make(2, 2, 1, 5, 75, window=19, scale=2),
    "no table": make(1, 3, 3, 5, 40, table=False),
    "no table, scaled rows": make(1, 2, 1, 3, 40, table=False, scale=1),
    "documents": make(2, 4, 2, 5, 50, documents=True),
    "lanes, odd widths": make(1, 4, 2, 2, 37, 19, width_v=21, lanes=2),
    "both directions": make(1, 2, 2, 3, 35, causal=0, window=9),
    "fewer keys than queries": make(1, 2, 2, 5, 3, causal=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, 4))
def test_dense_is_attention(name: str) -> None:
    case = CASES[name]
    for splits in (1, 2, 7):
        ours = case.dense(splits)
        assert ours.dtype == case.q.dtype
        assert case.excess(ours) <= 1, splits


def test_the_same_from_run_to_run() -> None:
    case = CASES["grouped"]
    assert torch.equal(case.dense(3), case.dense(3))


@pytest.mark.parametrize("splits", some([3, 1], 1))
def test_a_key_of_nan_in_one_split_is_not_left_out(splits: int) -> None:
    case = make(1, 2, 2, 1, 49)
    case.k[:, :, 20, 3] = math.nan
    assert case.dense(splits).isnan().all()


@pytest.mark.parametrize("splits", some([3, 1], 1))
def test_bfloat16_rounds_weights_and_output_once(splits: int) -> None:
    """Each weight and the output are rounded to 8 bits, a relative 2^-9 each; the sum of the weights is not rounded."""
    case = make(1, 4, 2, 2, 45, 24, dtype=torch.bfloat16, scale=1)
    ours, (wanted, room) = case.dense(splits).double(), case.oracle()
    case.v = case.v.abs()
    size = case.oracle()[0]  # Σ p|v|
    assert ((ours - wanted).abs() <= 2.0**-9 * (1 + 2.0**-7) * (size + wanted.abs()) + room).all()


def test_splits_fill_the_device_without_needless_ones() -> None:
    assert decode.split_count(12, 1 << 19, 264) == 22  # 264 programs at once: one whole wave
    assert decode.split_count(300, 1 << 19, 264) == 3  # four waves over a third of the keys, not two over all
    assert decode.split_count(264, 1 << 19, 264) == 1
    assert decode.split_count(1, 1000, 264) == 3  # no fewer than 256 keys each
    assert decode.split_count(1, 1, 264) == 1
    for programs in (1, 7, 40, 133, 265, 5000):
        for keys in (1, 300, 5000, 1 << 20):
            assert 1 <= decode.split_count(programs, keys, 264) <= decode.MOST_SPLITS


def test_what_the_kernels_do_not_serve_is_named() -> None:
    case = CASES["one query"]
    with pytest.raises(ValueError, match="grid of 2 × 3"):
        decode.decode(replace(case.call, geometry=Geometry(2, 2, 2, 1, 49, 8, 8, grid_height=2, grid_width=3)))
    with pytest.raises(ValueError, match="k's last stride is 49"):
        decode.decode(replace(case.call, k=case.k.mT.contiguous().mT))
    with pytest.raises(ValueError, match="table of 50 columns: expected columns 3 to 51"):
        decode.decode(replace(case.call, table=torch.zeros(2, 50, device=DEVICE)))
    with pytest.raises(ValueError, match=r"v's dtype is torch\.float64"):
        decode.decode(replace(case.call, v=case.v.double()))
    with pytest.raises(ValueError, match="0 splits"):
        case.dense(0)
