"""The fused backward pass under Triton's interpreter, against float64 autograd of the dense formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("its blocks of 16 and its budgets are for the interpreter", allow_module_level=True)

from tests.device import some  # noqa: E402
from zoo.attention.triton import common, table_grad  # noqa: E402
from zoo.attention.triton.backward import DQ_16, attention_backward, block_sizes, output_gradient  # noqa: E402
from zoo.attention.triton.common import Geometry, Operands  # noqa: E402
from zoo.attention.triton.table_grad import table_gradient  # noqa: E402

LOG2E = math.log2(math.e)
TILE = 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(common, "TILE", TILE)
    monkeypatch.setattr(table_grad, "PROGRAMS", 1)  # whole diagonals: idle programs cost the interpreter time


@dataclass(frozen=True)
class Case:
    """One call. documents: where each batch row's second document starts, or None; scale: None, "shared" or "batch"."""

    queries: int = 37
    keys: int = 37
    batch: int = 1
    heads: int = 2
    groups: int = 2
    width_k: int = 16
    width_v: int = 16
    lanes: int = 0
    causal: bool = True
    window: int = 0
    documents: tuple[int, ...] | None = None
    scale: str | None = None
    table: bool = True
    params: int = 0
    log_factor: bool = False  # the first param's derivative is the table
    grid: tuple[int, int, int] | None = None  # height, width, prefix
    planned: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def geometry(self) -> Geometry:
        height, width, prefix = self.grid or (0, 0, 0)
        return Geometry(
            self.batch, self.heads, self.groups, self.queries, self.keys, self.width_k, self.width_v, self.lanes, self.causal,
            window=self.window, origin=0 if self.grid else self.keys - 1, grid_height=height, grid_width=width, prefix=prefix,
            softmax_scale=0.3,
        )  # fmt: skip


def on_grid(height: int, width: int, prefix: int, **options) -> Case:
    length = height * width + prefix
    return Case(length, length, causal=False, grid=(height, width, prefix), **options)


CASES = {
    "odd": Case(width_k=19, width_v=24, scale="shared", params=2, log_factor=True),
    "no-table": Case(table=False, queries=21, keys=21),
    "scale-alone": Case(table=False, queries=21, keys=21, scale="shared", lanes=2, width_k=18, heads=1, groups=1),
    "lanes-apart": Case(queries=19, keys=45, width_k=19, lanes=3, groups=1, scale="shared", params=1),
    "one": Case(queries=1, keys=1),
    "grouped-offset": Case(queries=19, keys=45, heads=4),
    "bidirectional": Case(causal=False, queries=33, keys=33, scale="batch", params=1, batch=2, heads=1, groups=1),
    "bidirectional-offset": Case(queries=19, keys=45, causal=False, heads=1, groups=1),
    "more-queries": Case(queries=45, keys=19, causal=False, scale="shared", heads=1, groups=1),
    "documents": Case(documents=(20, 5), batch=2, scale="batch", heads=1, groups=1),
    "documents-offset": Case(queries=19, keys=45, documents=(30,), causal=False, params=1, heads=1, groups=1),
    "documents-of-many-tiles": Case(queries=84, keys=96, documents=(66,), params=1, heads=1, groups=1),
    "documents-of-many-tiles-bidirectional": Case(
        70, 70, documents=(17,), causal=False, table=False, heads=1, groups=1
    ),
    "window": Case(queries=40, keys=40, window=7, scale="shared", params=1, heads=1, groups=1),
    "window-bidirectional": Case(queries=40, keys=40, window=20, causal=False, heads=1, groups=1),
    "window-of-nothing": Case(queries=45, keys=19, window=4, causal=False, heads=1, groups=1),
    "grid": on_grid(2, 5, 0, batch=2),
    "grid-prefix": on_grid(2, 18, 3, heads=1, groups=1, scale="shared", params=2, log_factor=True),
    "planned": Case(queries=70, keys=80, planned=True, scale="shared", params=1, heads=1, groups=1),
}


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    table: Tensor | None
    jacobian: Tensor | None
    params: Tensor | None
    row_scale: Tensor | None
    segments: Tensor | None


def draw(case: Case) -> Inputs:
    """Rounded to the case's dtype, held in float64: both sides see the same values."""
    g = case.geometry
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    columns = (2 * g.grid_height - 1) * (2 * g.grid_width - 1) if case.grid else g.queries + g.keys - 1
    scale = {None: None, "shared": (1, g.heads, g.queries), "batch": (g.batch, g.heads, g.queries)}[case.scale]
    segments = None
    if case.documents is not None:
        starts = torch.tensor(case.documents)[:, None]
        segments = (torch.arange(g.keys)[None] >= starts).int()
        if g.keys > 64:  # the first one comes again within the second
            segments[:, -6:-4] = 0
    given = Inputs(
        normal(g.batch, g.heads, g.queries, g.width_k, dtype=case.dtype),
        normal(g.batch, g.groups, g.keys, g.width_k, dtype=case.dtype),
        normal(g.batch, g.groups, g.keys, g.width_v, dtype=case.dtype),
        normal(g.batch, g.heads, g.queries, g.width_v, dtype=case.dtype),
        normal(g.heads, columns) if case.table else None,
        normal(case.params, g.heads, columns) if case.params else None,
        normal(case.params, g.heads) if case.params else None,
        None if scale is None else normal(*scale).abs() + 0.25,
        segments,
    )
    if case.log_factor:
        given.jacobian[0] = given.table
    return given


def index_and_mask(case: Case, segments: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """(T, S) columns of the table, which of them exist (None: all), and (B, 1, T, S) what is visible."""
    g = case.geometry
    i, j = torch.arange(g.queries)[:, None], torch.arange(g.keys)[None, :]
    on = None
    if case.grid:
        y, x = torch.div(i - g.prefix, g.grid_width, rounding_mode="floor"), (i - g.prefix) % g.grid_width
        code = y * (2 * g.grid_width - 1) + x
        index = code - code.T + ((2 * g.grid_height - 1) * (2 * g.grid_width - 1)) // 2
        on = (i >= g.prefix) & (j >= g.prefix)
        index = index.where(on, torch.zeros_like(index))
    else:
        index = g.origin + i - j
    distance = i + g.offset - j
    seen = torch.ones_like(distance, dtype=torch.bool)
    if g.causal:
        seen &= distance >= 0
    if g.window:
        seen &= distance.abs() < g.window
    seen = seen[None, None].expand(g.batch, 1, -1, -1)
    if segments is not None:
        seen = seen & (segments[:, None, g.offset :, None] == segments[:, None, None, :])
    return index, on, seen


def dense(case: Case, inputs: Inputs, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (B,H,T,Dv) and the natural log-sum-exp (B,H,T); rows that see nothing give zeros."""
    index, on, seen = index_and_mask(case, inputs.segments)
    repeat = case.heads // case.groups
    z = case.geometry.softmax_scale * inputs.q @ inputs.k.repeat_interleave(repeat, 1).mT
    if table is not None:
        bias = table[:, index][None]
        if on is not None:
            bias = bias * on
        z = z + bias
    if inputs.row_scale is not None:
        z = z * inputs.row_scale[..., None]
    z = z.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(z, -1)
    weights = torch.exp(z - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return weights @ inputs.v.repeat_interleave(repeat, 1), lse


def oracle(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Float64 gradients by name, and the forward pass's out and lse."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.table is not None:
        leaves["table"] = inputs.table
    if inputs.row_scale is not None:
        leaves["row_scale"] = inputs.row_scale.expand(case.batch, -1, -1).clone()
    if inputs.params is not None:
        leaves["params"] = inputs.params
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    given = Inputs(
        leaves["q"], leaves["k"], leaves["v"], inputs.grad_out, None, None, None, leaves.get("row_scale"), inputs.segments
    )  # fmt: skip
    table = leaves.get("table")
    if inputs.params is not None:
        # A table that is inputs.table at these params and has the jacobian as its derivatives.
        change = (leaves["params"] - inputs.params)[..., None]
        table = table + (change * inputs.jacobian).sum(0)
    out, lse = dense(case, given, table)
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad_out)
    return dict(zip(leaves, grads, strict=True)) | {"out": out.detach(), "lse": lse.detach()}


def plan_of(case: Case, keep: Tensor) -> SimpleNamespace:
    """The plan whose intervals hold the tiles of `keep` (H, query tiles, key tiles), for a batch of one."""

    def intervals(keep: Tensor) -> Tensor:
        number = torch.arange(keep.shape[-1])
        lo = torch.where(keep, number, keep.shape[-1]).amin(-1)
        hi = torch.where(keep, number + 1, 0).amax(-1)
        return torch.stack([lo, hi]).int().contiguous()

    return SimpleNamespace(rows=intervals(keep), cols=intervals(keep.mT))


def fused(
    case: Case, inputs: Inputs, want: dict[str, Tensor], plan=None, fixed_order: bool = True
) -> dict[str, Tensor]:
    g, dtype = case.geometry, case.dtype
    q, k, v, grad_out, out = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out, want["out"]))
    if not fixed_order:  # heads beside one another in memory, as a model's projections leave them
        q, k, v, grad_out, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad_out, out))
    lse2 = (want["lse"] * LOG2E).masked_fill(want["lse"] == -math.inf, math.inf).float()
    table, row_scale = (None if x is None else x.float() for x in (inputs.table, inputs.row_scale))
    jacobian = None if inputs.jacobian is None else inputs.jacobian[case.log_factor :].float()
    call = Operands(q, k, v, table, row_scale, inputs.segments, g)
    upstream = output_gradient(grad_out, out, lse2, g)
    grads = attention_backward(call, upstream, plan, jacobian, case.log_factor)
    got = dict(zip(("q", "k", "v", "row_scale", "params"), grads, strict=True))
    if table is not None:
        got["table"] = table_gradient(call, upstream, plan)
    return {name: x for name, x in got.items() if x is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], share: float) -> None:
    """Errors relative to the largest entry of each gradient."""
    assert set(got) == set(want) - {"out", "lse"}
    for name, x in got.items():
        assert x.shape == want[name].shape, name
        error = (x.double() - want[name]).abs().max().item()
        # Entries that cancel to nothing (one key: ds = 0) are small against the terms they are made of, not exactly 0.
        assert error <= share * max(want[name].abs().max().item(), 1.0), (name, error)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CASES, 5))
def test_every_gradient_matches_float64_autograd(name):
    case = CASES[name]
    inputs = draw(case)
    plan = None
    if case.planned:
        # Tiles that weigh nothing: a table that falls to −400 beyond 20 keys, of which the plan keeps those within.
        distance = torch.arange(case.queries + case.keys - 1) - case.geometry.origin + case.geometry.offset
        inputs.table[:, distance >= 20] = -400.0
        inputs.row_scale.clamp_(min=0.5)
        index, _, seen = index_and_mask(case, None)
        near = (seen[0] & (inputs.table[:, index] > -400.0)).float()
        plan = plan_of(case, torch.nn.functional.max_pool2d(near, TILE, ceil_mode=True) > 0)
        assert (plan.rows[0] > 0).any() and (plan.cols[1] < -(-case.queries // TILE)).any()
    want = oracle(case, inputs)
    # 2^−24 for every rounding of float32: sums over at most 80 terms, logits of at most 2^4.
    assert_close(fused(case, inputs, want, plan), want, 80 * 2.0**-24)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_rounding_allows():
    case = Case(
        queries=37, keys=45, heads=2, groups=1, width_k=32, width_v=32, dtype=torch.bfloat16, scale="shared", params=1
    )
    inputs = draw(case)
    want = oracle(case, inputs)
    got = fused(case, inputs, want, fixed_order=False)
    rounded = {name: x.to(torch.bfloat16).double() for name, x in eager(case, inputs, want).items()}
    for name, x in got.items():
        error, eager_error = ((y.double() - want[name]).abs().max().item() for y in (x, rounded[name]))
        assert error <= 2 * eager_error, (name, error, eager_error)
        assert x.dtype == (torch.bfloat16 if name in "qkv" else torch.float32)


def eager(case: Case, inputs: Inputs, want: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same formulas with out, p and ds rounded to bfloat16 where they enter a product, all else in float64."""
    index, _, seen = index_and_mask(case, inputs.segments)
    repeat = case.heads // case.groups

    def rounded(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double()

    k, v = inputs.k.repeat_interleave(repeat, 1), inputs.v.repeat_interleave(repeat, 1)
    bias, scale, c = inputs.table[:, index][None], inputs.row_scale[..., None], case.geometry.softmax_scale
    y = c * inputs.q @ k.mT + bias
    p = torch.exp((scale * y).masked_fill(~seen, -math.inf) - want["lse"][..., None])
    ds = p * (inputs.grad_out @ v.mT - (inputs.grad_out * rounded(want["out"])).sum(-1, keepdim=True))
    grads = {
        "q": scale * c * rounded(ds) @ k,
        "k": c * (rounded(scale * ds).mT @ inputs.q).unflatten(1, (-1, repeat)).sum(2),
        "v": (rounded(p).mT @ inputs.grad_out).unflatten(1, (-1, repeat)).sum(2),
        "row_scale": (ds * y).sum(-1),
        "params": (ds * scale * inputs.jacobian[:, :, index][:, None]).sum((1, 3, 4)),
    }
    flat = index.expand(case.batch, case.heads, -1, -1).transpose(0, 1).flatten(1)
    terms = (ds * scale).transpose(0, 1).flatten(1)
    grads["table"] = torch.zeros_like(inputs.table).scatter_add_(1, flat, terms)
    return grads


@pytest.mark.slow
def test_two_runs_agree_to_the_bit_and_split_diagonals_with_whole_ones(monkeypatch):
    case = Case(queries=33, keys=33, batch=2, heads=1, groups=1, scale="shared", params=1)
    inputs = draw(case)
    want = oracle(case, inputs)
    whole = fused(case, inputs, want)
    monkeypatch.setattr(table_grad, "PROGRAMS", 12)  # 3 diagonals in 4 parts: of the batch, and of each diagonal
    first, second = (fused(case, inputs, want) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["table"], whole["table"])  # another order of the same sums
    assert_close(first, want, 80 * 2.0**-24)


def test_strided_operands_and_a_broadcast_gradient():
    case = Case(queries=20, keys=33, heads=2, groups=1)
    inputs = draw(case)
    inputs.grad_out = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand_as(inputs.grad_out)
    want = oracle(case, inputs)
    q, k, v, out = (x.float().mT.contiguous().mT for x in (inputs.q, inputs.k, inputs.v, want["out"]))
    call = Operands(q, k, v, inputs.table.float(), None, None, case.geometry)
    upstream = output_gradient(inputs.grad_out.float(), out, (want["lse"] * LOG2E).float(), case.geometry)
    grads = attention_backward(call, upstream)
    wanted = {name: want[name] for name in "qkv"}
    assert_close(dict(zip("qkv", grads[:3], strict=True)), wanted, 80 * 2.0**-24)
    assert grads[3] is None and grads[4] is None


def test_a_jacobian_needs_its_table():
    case = Case(queries=3, keys=3, params=1)
    inputs = draw(case)
    inputs.table = None
    with pytest.raises(
        ValueError, match=r"the jacobian must be \(P, H, N\) over a table \(H, N\), got \(1, 2, 5\) over None"
    ):
        fused(case, inputs, {"out": inputs.grad_out, "lse": torch.zeros(1, 2, 3)})


def test_blocks_shrink_to_the_shared_memory_there_is(monkeypatch):
    monkeypatch.setattr(common, "TILE", 64)
    assert block_sizes(DQ_16[128], 0, 256, 2, 227 * 1024) == (128, 64, 8, 2)
    bm, bn, _, stages = block_sizes(DQ_16[128], 0, 256, 2, 99 * 1024)
    assert (bm, bn) == (64, 64) and (bm + stages * bn) * 256 * 2 <= 99 * 1024
