"""The forward and decoding kernels by themselves, against float64: widths, lanes, documents, splits of keys, far memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.device import DEVICE, some
from zoo import Positions
from zoo.attention import triton
from zoo.attention.base import AttentionCall
from zoo.attention.reference import attend
from zoo.attention.triton import common, decode
from zoo.attention.triton.common import Operands
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.op import operands
from zoo.attention.triton.plan import make_plan
from zoo.priors.base import PriorTerms, RelativeTable

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls have several tiles."""
    monkeypatch.setattr(common, "TILE", 16)


@dataclass(frozen=True)
class Case:
    """A call; documents of batch row b are S/(2 + b) long."""

    queries: int
    keys: int
    heads: int = 2
    groups: int = 1
    width: int = 8
    width_v: int = 0
    lanes: int = 0
    table: bool = True
    scale: bool = False
    documents: bool = False
    causal: bool = True
    window: int | None = None
    planned: bool = False

    def call(self, dtype: torch.dtype = torch.float32) -> AttentionCall:
        """k and v are views into buffers with room for more, whose rest is NaN."""
        torch.manual_seed(0)
        batch, k_pos = 1 + self.documents, Positions.line(self.keys)
        q = torch.randn(batch, self.queries, self.heads, self.width, device=DEVICE).to(dtype).transpose(1, 2)
        k, v = (
            torch.full((batch, self.groups, self.keys + 5, w + 8), math.nan, device=DEVICE, dtype=dtype)
            for w in (self.width, self.width_v or self.width)
        )
        k, v = k[:, :, : self.keys, : self.width], v[:, :, : self.keys, : self.width_v or self.width]
        k.copy_(torch.randn(k.shape))
        v.copy_(torch.randn(v.shape))
        terms = PriorTerms()
        if self.lanes:
            terms += PriorTerms(*(torch.randn(1, 1, n, self.lanes, device=DEVICE) for n in (self.queries, self.keys)))
        if self.table:
            values = torch.randn(self.heads, self.queries + self.keys - 1, device=DEVICE)
            q_pos = Positions.line(self.queries, offset=max(0, self.keys - self.queries))
            table = RelativeTable.line(values, q_pos, k_pos, center=self.keys - 1 - q_pos.offset)
            terms += PriorTerms(table=table)
        scale = 1.0 + 0.3 * torch.randn(1, self.heads, self.queries, device=DEVICE) if self.scale else None
        segments = None
        if self.documents:
            rows = 2 + torch.arange(batch, device=DEVICE)[:, None]
            segments = torch.arange(self.keys, device=DEVICE) * rows // self.keys
            segments[0, 8:16] = 5  # an id that comes again is not taken for the same stretch
        return AttentionCall(q, k, v, terms, self.causal, scale, segments, self.window)


def flat(call: AttentionCall) -> Operands:
    """What the kernels take."""
    q, k, v, row_scale, segments = triton._operands(call)
    table = None if call.table is None else call.table.table.float()
    return operands(q, k, v, table, row_scale, segments, None, *triton._scalars(call))


def check(out: Tensor, call: AttentionCall) -> None:
    """A logit is a sum of some 20 products, an output one of some 100 weights, each rounded: 2^−24 for each."""
    exact = attend(replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()))[0]
    assert float((out.double() - exact).abs().max()) <= 200 * 2**-24 * max(1.0, float(exact.abs().max()))


DECODED = {
    "one query": Case(1, 49, groups=2),
    "eight, several tiles of rows": Case(8, 47, heads=10, width=16, scale=True),
    "window": Case(5, 75, window=19, scale=True),
    "no table, scaled rows": Case(3, 40, table=False, scale=True),
    "documents": Case(5, 50, heads=4, groups=2, documents=True),
    "lanes, odd widths": Case(2, 37, heads=4, groups=2, width=19, width_v=21, lanes=2),
    "both directions": Case(3, 35, causal=False, window=9),
    "fewer keys than queries": Case(5, 3, causal=False),
}
# Columns of q: lanes, then content. Where the two together would double the padded width, lanes are multiplied apart.
CASES = {
    "2 + 16 columns, apart": Case(21, 37, width=16, lanes=2),
    "16 + 16 columns, nothing padded": Case(35, 35, groups=2, width=16, lanes=16),
    "2 + 6 columns, together": Case(21, 21, heads=1, width=6, width_v=16, lanes=2, scale=True, planned=True),
    "8 + 64 columns, apart": Case(20, 34, heads=1, width=64, lanes=8, scale=True),
    "5 + 60 columns": Case(34, 34, heads=1, width=60, width_v=48, lanes=5),
    "4 + 64 columns without a table": Case(34, 34, width=64, lanes=4, table=False),
    "1 token": Case(1, 1),
    "a block": Case(16, 16, scale=True, causal=False, planned=True),
    "a block and one": Case(17, 33, scale=True, planned=True),
    "fewer queries": Case(3, 48, scale=True, causal=False),
    "documents of many tiles": Case(100, 112, heads=1, documents=True, planned=True),
    "documents, both directions": Case(100, 112, heads=1, documents=True, causal=False, window=30),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(DECODED, 3))
def test_few_queries_in_splits_of_keys(name: str) -> None:
    call = DECODED[name].call()
    for splits in (1, 2, 7):
        check(decode.decode(flat(call), splits=splits), call)


@pytest.mark.parametrize("name", some(CASES, 4))
def test_forward_is_attention(name: str) -> None:
    call = CASES[name].call()
    inputs = flat(call)
    check(attention_forward(inputs, make_plan(inputs) if CASES[name].planned else None)[0], call)


def far_apart(count: int, width: int, stride: int, path: Path) -> list[Tensor]:
    """Three (1, 1, count, width) matrices in one memory, whose rows are `stride` numbers apart; on the CPU in a sparse file."""
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
    call = Case(36, 36, heads=1, width=16, table=False).call(torch.bfloat16)
    heads = far_apart(36, 16, 2**26, tmp_path / "rows")
    for memory, x in zip(heads, (call.q, call.k, call.v), strict=True):
        memory.copy_(x)
    far = AttentionCall(*heads, PriorTerms(), True)
    assert torch.equal(attention_forward(flat(far))[0], attention_forward(flat(call))[0])
    one, far_one = (AttentionCall(x.q[:, :, -1:], x.k, x.v, PriorTerms(), True) for x in (call, far))
    assert torch.equal(decode.decode(flat(far_one), splits=2), decode.decode(flat(one), splits=2))
