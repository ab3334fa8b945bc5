"""The plan of the fused kernels: what it leaves out is provably nothing, and it leaves out what it
should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from tests.zoo.test_reach import CASES as LINES
from tests.zoo.test_reach import Case, build, weights_of
from zoo import Positions

common = pytest.importorskip("zoo.attention.triton.common", reason="needs Triton")
from zoo.attention import triton  # noqa: E402
from zoo.attention.call import AttentionCall  # noqa: E402
from zoo.attention.masks import visible  # noqa: E402
from zoo.attention.triton.common import Operands  # noqa: E402
from zoo.attention.triton.op import operands  # noqa: E402
from zoo.attention.triton.plan import Plan, make_plan, skipped_share  # noqa: E402
from zoo.priors.base import RelativeTable  # noqa: E402
from zoo.priors.terms import PriorTerms  # noqa: E402

pytestmark = pytest.mark.gpu

TILE = 16
BUDGET = 2.0**-24  # of a row's sum, for all that it skips
CASES = {
    **{name: LINES[name] for name in ("table", "lanes", "both", "lanes of content", "grouped")},
    "offset": Case(queries=70),
    "ssmax": Case(ssmax=True),
    "window": Case(window=130),
    "documents": Case(documents=(60, 0)),
    "both sides": Case(causal=False),
    "both sides, ssmax, documents": Case(causal=False, ssmax=True, documents=(10, 150)),
    "grid": None,
    "grid with a prefix": None,
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "TILE", TILE)


def call_of(name: str) -> AttentionCall:
    """A call of two heads that decay faster and slower, at 200 tokens or on a grid."""
    case = CASES[name]
    if case is not None:
        return build(replace(case, queries=min(case.queries, 200), keys=200), torch.float32)[0]
    pos = Positions.grid(15, 13, num_prefix=5 if "prefix" in name else 0)
    y = torch.arange(-14, 15)
    x = torch.arange(-12, 13)
    distance = torch.hypot(4.0 * y[:, None], x.float()).flatten()
    table = RelativeTable.grid(-torch.tensor([[3.0], [1.0]]) * distance, pos)
    q, k, v = torch.randn(3, 1, 2, pos.length, 16, generator=torch.Generator().manual_seed(0))
    return AttentionCall(q, k, v, PriorTerms(table=table), False)


def operands_of(call: AttentionCall) -> Operands:
    q, k, v, *others = triton._operands(call)
    others = [
        None if x is None else x.to(DEVICE)
        for x in (call.table and call.table.table.float(), *others)
    ]
    return operands(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), *others, *triton._scalars(call))


def plan_of(call: AttentionCall) -> Plan:
    return make_plan(operands_of(call))


def by_tile(mask: Tensor) -> Tensor:
    """(B·H, tiles of queries, tiles of keys): whether any element of a tile is True."""
    mask = mask.flatten(0, 1)
    pads = (0, -mask.shape[2] % TILE, 0, -mask.shape[1] % TILE)
    return (
        torch.nn.functional.pad(mask, pads)
        .unflatten(2, (-1, TILE))
        .unflatten(1, (-1, TILE))
        .any(4)
        .any(2)
    )


def needed_tiles(plan: Plan) -> Tensor:
    """(B·H, tiles of queries, tiles of keys): inside the row intervals."""
    first, last = plan.rows.cpu()[..., None]
    tile = torch.arange(plan.cols.shape[2])
    return (first <= tile) & (tile < last)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, 8))
def test_left_out_below_budget(name: str) -> None:
    """What is left out is below the budget."""
    call = call_of(name)
    plan = plan_of(call)
    weights = weights_of(call)
    inside = needed_tiles(plan)
    elements = inside.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[
        :, : call.num_queries, : call.num_keys
    ]
    assert weights.flatten(0, 1).masked_fill(elements, 0.0).sum(-1).max() <= BUDGET
    for head, (firsts, lasts) in enumerate(zip(*plan.cols.cpu().tolist(), strict=True)):
        for n, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            needed = inside[head, :, n].nonzero().flatten().tolist()
            assert [first, last] == [needed[0], needed[-1] + 1] if needed else first == last
    seen = visible(call)
    seen = by_tile(
        torch.ones_like(weights, dtype=torch.bool) if seen is None else seen.expand_as(weights)
    )
    share = float((seen & ~inside).sum() / seen.sum())
    assert share > 0
    assert skipped_share(operands_of(call)) == pytest.approx(share)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where, value", [("q", math.nan), ("k", math.inf), ("query_scale", math.inf)]
)
def test_nonfinite_tile_is_needed(where: str, value: float) -> None:
    """By all queries, one of keys; with all keys, one of queries."""
    call = build(Case(queries=100, keys=200, ssmax=True), torch.float32)[0]
    wrong = getattr(call, where).detach().clone()
    wrong[0, 0, 5] = value
    clean = plan_of(call)
    plan = plan_of(replace(call, **{where: wrong}))
    first = plan.rows[0, 0].cpu()
    assert (clean.rows[0, 0] > 0).any()
    assert not (first if where == "k" else first[:1]).any()
    assert where == "k" or plan.rows[1, 0, 0] == -(-(100 + TILE) // TILE)
    assert torch.equal(plan.rows[:, 1], clean.rows[:, 1])
