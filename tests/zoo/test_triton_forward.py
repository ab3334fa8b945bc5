"""The forward and decoding kernels by themselves, against float64: widths, lanes, documents, splits of keys, far memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.device import DEVICE, some
from tests.zoo.test_attention import Case, build, terms_of
from zoo.attention import triton
from zoo.attention.base import AttentionCall
from zoo.attention.reference import attend
from zoo.attention.triton import common, decode
from zoo.attention.triton.common import Operands
from zoo.attention.triton.forward import attention_forward
from zoo.attention.triton.op import operands
from zoo.attention.triton.plan import make_plan
from zoo.priors.base import PriorTerms

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls have several tiles."""
    monkeypatch.setattr(common, "TILE", 16)


def call_of(case: Case, realised: str = "table", **sizes: int) -> AttentionCall:
    leaves, options = build(case, realised, **{"heads": 2} | sizes)
    leaves = {name: x.detach().to(DEVICE).float() for name, x in leaves.items()}
    scale, segments = leaves.get("query_scale"), options.pop("segments")
    scale = scale[None] if scale is not None and scale.ndim == 2 else scale
    segments = None if segments is None else segments.to(DEVICE)
    q, k, v = (leaves[name] for name in "qkv")
    return AttentionCall(q, k, v, terms_of(leaves), query_scale=scale, segments=segments, **options)


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
    "one query": call_of(Case(1, 49)),
    "eight, several tiles of rows": call_of(Case(8, 47, 1, scale="shared"), heads=10, width=16),
    "window": call_of(Case(5, 75, window=19, scale="batch")),
    "no table, scaled rows": call_of(Case(3, 40, 1, scale="shared"), "none"),
    "documents": call_of(Case(5, 50, 2, documents=(30, 47)), heads=4),
    "lanes, odd widths": call_of(Case(2, 37, 2), "both", heads=4, width=19, lanes=2),
    "both directions": call_of(Case(3, 35, 1, causal=False, window=9)),
    "fewer keys than queries": call_of(Case(5, 3, causal=False)),
}
# Where lanes and content together would double the padded width, lanes are multiplied apart.
FORWARD = {
    "2 + 16 columns, apart": call_of(Case(21, 37, 1), "both", width=16, lanes=2),
    "16 + 16 columns, nothing padded": call_of(Case(35, 35), "both", width=16, lanes=16),
    "2 + 6 columns, together": call_of(Case(21, 21, scale="shared"), "both", heads=1, width=6, lanes=2),
    "5 + 60 columns": call_of(Case(34, 34), "both", heads=1, width=60, lanes=5),
    "4 + 64 columns without a table": call_of(Case(34, 34, 1), "lanes", width=64, lanes=4),
    "1 token": call_of(Case(1, 1)),
    "a block": call_of(Case(16, 16, 1, scale="shared", causal=False)),
    "a block and one": call_of(Case(17, 33, 1, scale="shared")),
    "documents of many tiles": call_of(Case(100, 112, documents=(37, 50)), heads=1),
    "documents, both directions": call_of(Case(100, 112, documents=(37, 50), causal=False, window=30), heads=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(DECODED, 3))
def test_few_queries_in_splits_of_keys(name: str) -> None:
    for splits in (1, 2, 7):
        check(decode.decode(flat(DECODED[name]), splits=splits)[0], DECODED[name])


@pytest.mark.parametrize("name", some(FORWARD, 4))
def test_forward_is_attention(name: str) -> None:
    call, inputs = FORWARD[name], flat(FORWARD[name])
    check(attention_forward(inputs)[0], call)
    if DEVICE.type != "cpu" or name.startswith("doc"):
        check(attention_forward(inputs, make_plan(inputs))[0], call)


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
    call = call_of(Case(36, 36), "none", heads=1, width=16)
    call = replace(call, q=call.q[:1].bfloat16(), k=call.k[:1].bfloat16(), v=call.v[:1].bfloat16())
    heads = far_apart(36, 16, 2**26, tmp_path / "rows")
    for memory, x in zip(heads, (call.q, call.k, call.v), strict=True):
        memory.copy_(x)
    far = AttentionCall(*heads, PriorTerms(), True)
    assert torch.equal(attention_forward(flat(far))[0], attention_forward(flat(call))[0])
    one, far_one = (AttentionCall(x.q[:, :, -1:], x.k, x.v, PriorTerms(), True) for x in (call, far))
    assert torch.equal(decode.decode(flat(far_one), splits=2)[0], decode.decode(flat(one), splits=2)[0])
