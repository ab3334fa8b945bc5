"""The plan of the fused kernels: what it leaves out is provably nothing, and it leaves out what it should."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from zoo import Positions, create_prior

common = pytest.importorskip("zoo.attention.triton.common", reason="needs Triton")
from zoo.attention.triton.common import Geometry, Operands  # noqa: E402
from zoo.attention.triton.plan import Plan, make_plan, skipped_share  # noqa: E402

pytestmark = pytest.mark.gpu

TILE, HEADS, WIDTH = 16, 2, 8
BUDGET = 2.0**-24  # of a row's sum, for all that it skips


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "TILE", TILE)


@dataclass(frozen=True)
class Case:
    """One call. documents: where the second and third document of each batch row start."""

    queries: int = 90
    keys: int = 90
    causal: bool = True
    window: int = 0
    table: str | None = "decay"
    lanes: str | None = None
    scale: str | None = None
    documents: tuple[tuple[int, int], ...] | None = None
    grid: tuple[int, int, int] | None = None
    groups: int = HEADS
    needle: float = 11.0  # of the first head, the norm of a query and of a far key that point the same way
    dtype: torch.dtype = torch.float32
    skips: bool = True  # whether anything may be skipped; else nothing is
    seed: int = 0

    def geometry(self, lanes: int) -> Geometry:
        height, width, prefix = self.grid or (0, 0, 0)
        batch = len(self.documents) if self.documents else 1
        shape = (batch, HEADS, self.groups, self.queries, self.keys, lanes + WIDTH, WIDTH, lanes)
        origin = self.keys - 1 + 3 * (not self.grid)
        return Geometry(*shape, self.causal, self.window, origin, height, width, prefix, softmax_scale=0.5)


def on_grid(height: int, width: int, prefix: int, **options) -> Case:
    length = height * width + prefix
    return Case(length, length, causal=False, grid=(height, width, prefix), **options)


CASES = {
    "line": Case(),
    "offset": Case(38, 90),
    "grouped": Case(groups=1, lanes="random", needle=6.0),
    "bidirectional": Case(causal=False),
    "more-queries": Case(140, 90, causal=False),
    "window": Case(window=21, needle=0.0, skips=False),
    "documents": Case(documents=((40, 80), (5, 7))),
    "documents-offset": Case(50, 90, documents=((4, 88),), causal=False),
    "scale": Case(scale="positive"),
    "scale-negative": Case(scale="negative", causal=False, needle=6.0),
    "alibi-lanes": Case(table=None, lanes="alibi"),
    "random-lanes": Case(table=None, lanes="random", skips=False),
    "lanes-against-table": Case(lanes="against", needle=0.0),
    "levels": Case(38, 90, table=None, lanes="levels", needle=0.0, seed=27),
    "random-table": Case(table="random", causal=False, skips=False),
    "grid": on_grid(9, 9, 0),
    "grid-prefix": on_grid(9, 11, 5, scale="positive"),
    "grid-peak": on_grid(5, 9, 5, table="peak", needle=0.0),
    "bfloat16": Case(dtype=torch.bfloat16, lanes="random", scale="positive"),
}


def table_of(case: Case, g: Geometry) -> Tensor | None:
    """(H, N); heads decay faster and slower. On a line with three columns to spare at the front."""
    if case.table is None:
        return None
    slopes = torch.tensor([1.5, 0.4])[:, None]
    if case.grid:
        height, width, _ = case.grid
        y, x = torch.arange(1 - height, height), torch.arange(1 - width, width)
        distance = torch.hypot(y[:, None] * 4.0, x.float()).flatten()[None]
    else:
        distance = torch.arange(g.queries + g.keys + 2)[None].float() - (g.origin - g.offset)
    if case.table == "random":
        return torch.randn(HEADS, distance.shape[1]).expand(HEADS, -1)
    table = -slopes * distance.abs()
    if case.table == "peak":
        table[:, distance[0] == 0] = 60.0
    return table


def lanes_of(case: Case, g: Geometry) -> tuple[Tensor, Tensor]:
    """(1, H, T, R) and (1, G, S, R)."""
    i, j = torch.arange(g.queries).float() + g.offset, torch.arange(g.keys).float()
    ones = torch.ones(1, HEADS, g.queries, 1)
    if case.lanes == "alibi":
        terms = create_prior("alibi", num_heads=HEADS)(
            Positions.line(g.queries, offset=g.offset), Positions.line(g.keys), causal=True
        )
        return terms.q_lanes * 16.0, terms.k_lanes.expand(-1, HEADS, -1, -1)
    if case.lanes == "against":  # the slope of the table's first head
        keys = torch.stack([torch.ones_like(j), -j], -1).expand(1, g.groups, -1, -1)
        return 1.5 * torch.cat([i[:, None].expand(1, HEADS, -1, 1), ones], -1), keys
    if case.lanes == "levels":  # each tile of keys on its own level
        return ones, (40.0 * torch.randn(g.keys // TILE + 1)).repeat_interleave(TILE)[: g.keys, None].expand(
            1, HEADS, -1, 1
        )
    if case.lanes == "random":
        return torch.randn(1, HEADS, g.queries, 3), torch.randn(1, g.groups, g.keys, 3)
    return ones[..., :0], torch.ones(1, g.groups, g.keys, 0)


def build(case: Case) -> tuple[list[Tensor | None], Geometry]:
    """q, k, table, row_scale, segments; q and k with the strides of heads beside each other."""
    torch.manual_seed(case.seed)
    g = case.geometry({"alibi": 5, "random": 3, "against": 2, "levels": 1}.get(case.lanes or "", 0))
    q = 0.2 * torch.randn(g.batch, HEADS, g.queries, WIDTH)
    k = 0.2 * torch.randn(g.batch, g.groups, g.keys, WIDTH)
    direction = torch.eye(WIDTH)[0]
    q[:, 0, -3], k[:, 0, 1] = case.needle * direction, case.needle * direction
    q_lanes, k_lanes = lanes_of(case, g)
    q = torch.cat([q_lanes.expand(g.batch, -1, -1, -1), q], -1).transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.cat([k_lanes.expand(g.batch, -1, -1, -1), k], -1).transpose(1, 2).contiguous().transpose(1, 2)
    scale = None
    if case.scale:
        scale = (torch.arange(g.queries) + 1.0).log().expand(1, HEADS, -1) * 0.3
        scale = {"positive": scale, "negative": -scale, "any": torch.randn(g.batch, HEADS, g.queries)}[case.scale]
    segments = None
    if case.documents:
        place = torch.arange(g.keys)
        ids = [(place >= a).int() + (place >= b).int() for a, b in case.documents]
        segments = torch.stack(ids).to(torch.int32)
    given = [2.0 * q.to(case.dtype), k.to(case.dtype), table_of(case, g), scale, segments]
    return [None if x is None else x.to(DEVICE) for x in given], g


def logits(given: list[Tensor | None], g: Geometry) -> Tensor:
    """(B, H, T, S) float64 logits, −∞ where a key is hidden."""
    q, k, table, scale, segments = (None if x is None else x.double().cpu() for x in given)
    assert q is not None and k is not None
    z = g.softmax_scale * q @ k.repeat_interleave(g.heads // g.groups, 1).transpose(-1, -2)
    rows, cols = torch.arange(g.queries)[:, None], torch.arange(g.keys)[None]
    if table is not None:
        index, placed = g.origin + rows - cols, torch.ones(1, 1, dtype=torch.bool)
        if g.grid_width:
            patch = torch.arange(g.queries) - g.prefix
            code = patch.div(g.grid_width, rounding_mode="floor") * (2 * g.grid_width - 1) + patch % g.grid_width
            placed = (patch >= 0)[:, None] & (patch >= 0)[None]
            index = torch.where(placed, code[:, None] - code[None] + table.shape[1] // 2, 0)
        z = z + torch.where(placed, table[:, index], 0.0)
    if scale is not None:
        z = z * scale[..., None]
    distance = rows + g.offset - cols
    seen = torch.ones_like(distance, dtype=torch.bool)
    if g.causal:
        seen &= distance >= 0
    if g.window:
        seen &= distance.abs() < g.window
    if segments is not None:
        seen = seen & (segments[:, None, g.offset :, None] == segments[:, None, None])
    return z.masked_fill(~seen, -math.inf)


def plan_of(q: Tensor, k: Tensor, table: Tensor | None, scale: Tensor | None, ids: Tensor | None, g: Geometry) -> Plan:
    return make_plan(Operands(q, k, k, table, scale, ids, g))  # values do not matter to it


def by_tile(mask: Tensor) -> Tensor:
    """(B·H, tiles of queries, tiles of keys): whether any element of a tile is True."""
    mask = mask.flatten(0, 1)
    pads = (0, -mask.shape[2] % TILE, 0, -mask.shape[1] % TILE)
    return torch.nn.functional.pad(mask, pads).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).any(4).any(2)


def needed_tiles(plan: Plan) -> Tensor:
    """(B·H, tiles of queries, tiles of keys): inside the row intervals."""
    lo, hi = plan.rows.cpu()[..., None]
    tile = torch.arange(plan.cols.shape[2])
    return (lo <= tile) & (tile < hi)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, 6))
def test_what_is_left_out_is_below_the_budget(name: str) -> None:
    case = CASES[name]
    given, g = build(case)
    plan = plan_of(*given, g)
    z, inside = logits(given, g).flatten(0, 1), needed_tiles(plan)
    elements = inside.repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, : g.queries, : g.keys]
    weights = z.softmax(-1).nan_to_num()  # rows that see no key weigh nothing
    assert weights.masked_fill(elements, 0.0).sum(-1).max() <= BUDGET
    assert (plan.rows[0] <= plan.rows[1]).all() and plan.rows.max() <= plan.cols.shape[2]
    for head, (firsts, lasts) in enumerate(zip(*plan.cols.cpu().tolist(), strict=True)):
        for n, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
            needed = inside[head, :, n].nonzero().flatten().tolist()
            assert [first, last] == [needed[0], needed[-1] + 1] if needed else first == last
    visible = by_tile(logits([*given[:2], None, None, given[4]], g) > -math.inf)
    share = float((visible & ~inside).sum() / visible.sum())
    assert skipped_share(plan, g) == pytest.approx(share)
    assert (share > 0) == case.skips


def test_the_share_of_alibi_is_that_of_its_slopes() -> None:
    """Without content, tiles Δ apart are skipped where slope·(16Δ − 15) > 24·ln 2 + ln 128 = 21.5: the tables of a line put
    the nearest pair of tiles Δ apart at the edge of a chunk."""
    g = Geometry(1, HEADS, HEADS, 128, 128, WIDTH, WIDTH, origin=127)
    zero = torch.zeros(1, HEADS, 128, WIDTH, device=DEVICE)
    distance = torch.arange(255, device=DEVICE) - 127.0
    table = -torch.tensor([[1.0], [0.5]], device=DEVICE) * distance.abs()
    plan = plan_of(zero, zero, table, None, None, g)
    assert (plan.rows[1] - plan.rows[0]).tolist() == [[1, 2, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 4, 4, 4, 4]]
    assert skipped_share(plan, g) == (15 + 10) / 72

    # The same slopes as lanes: 16 times those of two heads' ALiBi are 1 and 1/16.
    terms = create_prior("alibi", num_heads=HEADS)(Positions.line(128), Positions.line(128), causal=True)
    q, k = (torch.cat([x.to(DEVICE), zero], -1) for x in (16.0 * terms.q_lanes, terms.k_lanes))
    g = replace(g, width_k=5 + WIDTH, lanes=5)
    plan = plan_of(q.bfloat16(), k.bfloat16(), None, None, None, g)
    assert (plan.rows[1] - plan.rows[0]).tolist() == [[1, 2, 3, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "value"), [("q", math.nan), ("k", math.inf), ("table", math.nan), ("row_scale", math.inf)]
)
def test_a_head_with_nan_or_infinity_skips_nothing(where: str, value: float) -> None:
    given, g = build(Case(40, 70, scale="positive", needle=0.0))
    given[2] *= 6.0
    clean = plan_of(*given, g)
    assert (clean.counts[1].sum(-1) > 0).all()  # both heads skip
    at = ["q", "k", "table", "row_scale"].index(where)
    given[at] = given[at].clone()
    place = {"table": (0, 2), "row_scale": (0, 0, 5)}.get(where, (0, 0, 5, 2))
    given[at][place] = value
    plan = plan_of(*given, g)
    assert plan.rows[:, 0].tolist() == [[0, 0, 0], [3, 4, 5]]
    assert torch.equal(plan.rows[:, 1], clean.rows[:, 1])
