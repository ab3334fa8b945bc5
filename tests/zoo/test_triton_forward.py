"""The forward and decoding kernels by themselves, against float64: widths, lanes, documents, splits of keys, far memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.device import DEVICE, some
from zoo.attention.triton import common, decode
from zoo.attention.triton.common import Geometry, Operands
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.plan import make_plan

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls have several tiles."""
    monkeypatch.setattr(common, "TILE", 16)


@dataclass
class Case:
    """A call of one kernel."""

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

    def excess(self, ours: Tensor) -> float:
        """The largest error, as a share of what float32 may do to it."""
        wanted, room = self.oracle()
        return ((ours.double() - wanted).abs() / room).max().item()

    def oracle(self) -> tuple[Tensor, Tensor]:
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
@pytest.mark.parametrize("name", some(CASES, 3))
def test_dense_is_attention(name: str) -> None:
    case = CASES[name]
    for splits in (1, 2, 7):
        ours = case.dense(splits)
        assert ours.dtype == case.q.dtype
        assert case.excess(ours) <= 1, splits


def ours(case: Case, planned: bool = False) -> Tensor:
    segments = None if case.segments is None else case.segments[:, : case.g.keys].contiguous()
    call = Operands(case.q, case.k, case.v, case.table, case.row_scale, segments, case.g)
    return attention_forward(call, make_plan(call) if planned else None)[0]


# Columns of q: lanes, then content. Where the two together would double the padded width, lanes are multiplied apart.
WIDTHS = {
    "2 + 16, apart": make(1, 2, 1, 21, 37, 16, lanes=2),
    "16 + 16, apart, nothing padded": make(1, 2, 2, 35, 35, 16, lanes=16),
    "2 + 6, together": make(1, 1, 1, 21, 21, 6, width_v=16, lanes=2, scale=1),
    "8 + 64, apart": make(1, 1, 1, 20, 34, 64, lanes=8, scale=1),
    "16 + 64, apart, nothing padded": make(1, 1, 1, 20, 34, 64, lanes=16),
    "5 + 60, apart, no column at sixteen": make(1, 1, 1, 34, 34, 60, width_v=48, lanes=5),
    "4 + 64 without a table": make(1, 2, 1, 34, 34, 64, lanes=4, table=False),
    "scaled rows without a table": make(1, 2, 1, 34, 34, 19, lanes=4, table=False, scale=1),
}


@pytest.mark.parametrize("name", some(WIDTHS, 3))
def test_lanes_and_widths(name: str) -> None:
    assert WIDTHS[name].excess(ours(WIDTHS[name])) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    some([(1, 1, 1), (1, 17, 0), (5, 5, 1), (16, 16, 0), (17, 33, 1), (3, 48, 0), (16, 16, 1), (17, 33, 0)], 3),
)
def test_lengths_around_a_block(queries: int, keys: int, causal: int) -> None:
    case = make(1, 2, 1, queries, keys, scale=1, causal=causal)
    assert case.excess(ours(case)) <= 1 and case.excess(ours(case, planned=True)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "planned"),
    some([({}, True), ({"causal": 0}, False), ({"causal": 0, "window": 30}, True), ({"lanes": 2}, False)], 2),
)
def test_documents_of_many_tiles(options: dict[str, int], planned: bool) -> None:
    """Blocks inside one document need no mask: the documents of batch row b are S/(2 + b) long, and ids that come again
    after others are not taken for the same stretch of keys."""
    case = make(2, 1, 1, 100, 112, documents=True, **options)
    assert case.segments is not None
    case.segments[0, 40:48] = 5
    assert case.excess(ours(case, planned)) <= 1


def far_apart(count: int, width: int, stride: int, path: Path) -> list[Tensor]:
    """Three (1, 1, count, width) matrices in one memory, whose rows are `stride` numbers apart. On the CPU it is a file with
    holes."""
    size = (count - 1) * stride + 3 * width
    if DEVICE.type == "cpu":
        with path.open("wb") as file:
            file.truncate(2 * size)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)
    else:
        memory = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    return [memory.as_strided((1, 1, count, width), (0, 0, stride, 1), part * width) for part in range(3)]


def test_rows_may_lie_past_the_range_of_32_bits(tmp_path: Path) -> None:
    """Rows of 2^26 numbers: the 33rd starts at 2^31, as the 524289th of 4096 numbers does."""
    case = make(1, 1, 1, 36, 36, 16, dtype=torch.bfloat16)
    near = ours(case)
    last = make(1, 1, 1, 1, 36, 16, dtype=torch.bfloat16)
    last.q, last.k, last.v, last.table = case.q[:, :, -1:], case.k, case.v, case.table
    one = last.dense(2)
    far = far_apart(36, 16, 2**26, tmp_path / "rows")
    for memory, x in zip(far, (case.q, case.k, case.v), strict=True):
        memory.copy_(x)
    case.q, case.k, case.v = far
    last.q, last.k, last.v = far[0][:, :, -1:], *far[1:]
    assert torch.equal(ours(case), near)
    assert torch.equal(last.dense(2), one)
