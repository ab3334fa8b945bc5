"""Calls of the fused kernel at real tile sizes, each compared with float64 of the same rounded inputs.

`python tools/gpu/check.py` runs them as a command, tests/gpu as tests. On a GPU the calls of tests/zoo have one tile, and
test_triton_backward.py is skipped; 1,031 tokens have whole tiles inside, which take the paths without a mask (`part == 1` of
_dkdv and _dq, `full` blocks of _forward). Needs torch, triton, numpy and safetensors, and no installation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo import Positions
from zoo.attention import prior_attention
from zoo.attention.selfcheck import BOUNDS, CANCELLING, relative_error
from zoo.attention.triton import TRITON, WIDEST, common, skipping
from zoo.priors import Ggd
from zoo.priors.base import PriorTerms, RelativeTable

__all__ = ["CASES", "LENGTH", "QUICK", "Call", "Case", "Comparison", "build", "compare", "nan_filled", "too_wide"]

BATCH, HEADS = 2, 4
LENGTH = 1031  # odd: a tail in every tile; 16 tiles of 64, so whole tiles inside
SMALL_GRID, SMALL_WINDOW = (5, 7, 2), 20  # at another length than LENGTH
TILE = 64  # tokens over which the worst error of a gradient is taken
WORST_TILES = {name: f"{name}, worst tile" for name in ("q", "k", "v")}
# Bounds are CANCELLING times as wide: gradients of these are sums that cancel, and a row is not averaged with others.
LOOSE = {
    "theta_alpha",
    "theta_beta",
    "theta_mu",
    "table",
    "bias",
    "query_scale",
    "q_lanes",
    "k_lanes",
    "out, worst row",
    *WORST_TILES.values(),
}


@dataclass(frozen=True)
class Case:
    """One call; what is not given is absent.

    Attributes:
        table: over distances: "random", "decay" (it falls linearly) or "hidden" (some entries are −∞).
        parametric: the table is GGD's. mu: its θμ is trained too.
        grid: height, width and prefix of a grid, with a table over displacements.
        bias: batch rows and heads of a dense bias.
        lanes: columns of lanes. narrow: columns by which content is narrower than values, such as those that lanes take.
        scale: a row scale like SSMax's.
        skip: tiles of negligible weight are skipped; GGD and a grid's table decay for it, so that there are some.
        documents: three in each batch row, not at the same places.
        groups: key heads.
        queries: the last ones of the keys.
        even: lengths are a multiple of every tile.
        packed: heads are beside one another in memory, as a model's projection leaves them.
    """

    table: str = ""
    parametric: bool = False
    mu: bool = False
    grid: tuple[int, int, int] | None = None
    bias: tuple[int, int] | None = None
    lanes: int = 0
    narrow: int = 0
    scale: bool = False
    skip: bool = False
    documents: bool = False
    window: int | None = None
    causal: bool = True
    groups: int = HEADS
    queries: int | None = None
    even: bool = False
    packed: bool = False

    def sizes(self, length: int | None) -> tuple[Positions, Positions]:
        """Of queries and of keys, at LENGTH (None) or another length."""
        if self.grid is not None:
            height, width, prefix = self.grid if length is None else SMALL_GRID
            return (Positions.grid(height, width, num_prefix=prefix),) * 2
        keys = LENGTH if length is None else length
        if self.even:
            most = 2 * common.TILE  # tokens of the largest tile that a plan takes
            keys = max(most, keys // most * most)
        queries = keys
        if self.queries is not None:
            queries = min(self.queries, keys - 7) if length is None else max(9, keys // 3)
        return Positions.line(queries, offset=keys - queries), Positions.line(keys)


CASES = {
    "bare": Case(),
    "lanes": Case(lanes=16),
    "lanes-odd": Case(lanes=5),
    "lanes-inside": Case(lanes=9, narrow=9),
    "table": Case(table="random"),
    "table-even": Case(table="random", even=True),
    "parametric": Case(parametric=True),
    "parametric-skip": Case(parametric=True, skip=True),
    "parametric-scale-skip": Case(parametric=True, skip=True, scale=True),
    "parametric-mu": Case(parametric=True, mu=True),
    "table-skip": Case(table="decay", skip=True),
    "scale": Case(table="random", scale=True),
    "scale-bare": Case(scale=True),
    "documents": Case(table="random", documents=True),
    "documents-lanes-skip": Case(lanes=5, documents=True, skip=True),
    "window": Case(table="random", window=200),
    "both-ways": Case(table="random", causal=False),
    "window-both-ways": Case(table="random", causal=False, window=150),
    "grouped": Case(table="random", groups=2),
    "grouped-parametric-scale": Case(parametric=True, groups=1, scale=True),
    "offset": Case(table="random", queries=300),
    "offset-parametric": Case(parametric=True, queries=300),
    "grid": Case(grid=(31, 32, 3), causal=False),
    "grid-scale": Case(grid=(31, 32, 3), causal=False, scale=True),
    "grid-skip": Case(grid=(16, 60, 1), causal=False, skip=True),
    "everything": Case(
        table="random", lanes=5, scale=True, documents=True, window=300, groups=2, queries=700, skip=True
    ),
    "packed-qkv": Case(table="random", packed=True),
    "bias": Case(bias=(1, 1), causal=False),
    "bias-everything": Case(bias=(2, 4), table="random", lanes=5, scale=True, documents=True, groups=2, queries=700),
    "plus-infinity-hidden": Case(table="hidden"),
}
QUICK = ["bare", "lanes", "table", "parametric-scale-skip", "documents", "grouped", "grid", "bias"]


def too_wide(case: Case, width: int) -> bool:
    """Whether content of a width and the lanes beside it are more columns than the kernel serves."""
    return bool(case.lanes) and width + case.lanes > WIDEST


@dataclass(frozen=True)
class Call:
    """The tensors of a case.

    Attributes:
        leaves: what gets a gradient, by name: q, k, v, what stands beside them, and the parameters of `prior`.
        prior: it makes the table from its parameters; None: a table is among the leaves, or there is none.
        positions: of queries and of keys.
        segments: (B, S) document ids.
    """

    leaves: dict[str, Tensor]
    prior: Ggd | None
    positions: tuple[Positions, Positions]
    causal: bool
    window: int | None
    segments: Tensor | None

    def wide(self) -> Call:
        """The same in float64."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.leaves.items()}
        if self.prior is None:
            return replace(self, leaves=leaves)
        prior = copy.deepcopy(self.prior).double()
        leaves |= {name: parameter for name, parameter in prior.named_parameters() if name in leaves}
        return replace(self, leaves=leaves, prior=prior)

    def terms(self) -> PriorTerms:
        """Lanes, table and bias as a prior gives them."""
        leaves, (queries, keys) = self.leaves, self.positions
        table = None
        if self.prior is not None:
            table = self.prior(queries, keys, causal=self.causal).table
        elif "table" in leaves and queries.is_grid:
            table = RelativeTable.grid(leaves["table"], queries)
        elif "table" in leaves:
            table = RelativeTable.line(leaves["table"], queries, keys, center=queries.length - 1)
        return PriorTerms(leaves.get("q_lanes"), leaves.get("k_lanes"), table=table, bias=leaves.get("bias"))

    def attend(self, kernel: str) -> Tensor:
        """(B, H, T, D)."""
        leaves = self.leaves
        return prior_attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            self.terms(),
            causal=self.causal,
            query_scale=leaves.get("query_scale"),
            segments=self.segments,
            window=self.window,
            kernel=kernel,
        )


def build(
    case: Case, width: int, dtype: torch.dtype, device: torch.device, *, length: int | None = None, seed: int = 0
) -> Call:
    """Draw the tensors of a case.

    Args:
        width: of heads.
        length: tokens; None: LENGTH. A case with a grid, a window or fewer queries has small ones at any other.
    """
    torch.manual_seed(seed)
    positions = case.sizes(length)
    queries, keys = (x.length for x in positions)

    def leaf(*shape: int, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Tensor:
        return (factor * torch.randn(*shape, device=device)).to(dtype).requires_grad_()

    if case.packed:
        q, k, v = (
            torch.randn(BATCH, keys, HEADS, width, device=device).to(dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
    else:
        content = width - case.narrow
        q = leaf(BATCH, HEADS, queries, content, dtype=dtype)
        k = leaf(BATCH, case.groups, keys, content, dtype=dtype)
        v = leaf(BATCH, case.groups, keys, width, dtype=dtype)
    leaves = {"q": q, "k": k, "v": v}
    if case.lanes:
        leaves["q_lanes"] = leaf(1, HEADS, queries, case.lanes)
        leaves["k_lanes"] = leaf(1, 1, keys, case.lanes, factor=0.3)
        with torch.no_grad():  # what both sides see is what the kernel rounds to
            for name in ("q_lanes", "k_lanes"):
                leaves[name].copy_(leaves[name].to(dtype).float())
    prior = None
    if case.parametric:
        prior = _parametric(case, device)
        leaves |= {name: parameter for name, parameter in prior.named_parameters() if parameter.requires_grad}
    elif case.grid is not None or case.table:
        leaves["table"] = (_grid_table if case.grid else _line_table)(case, *positions, device).requires_grad_()
    if case.scale:
        leaves["query_scale"] = (0.5 + torch.rand(HEADS, queries, device=device)).requires_grad_()
    if case.bias is not None:
        leaves["bias"] = leaf(*case.bias, queries, keys)
    segments = None
    if case.documents:
        cut = torch.tensor([[keys // 5], [keys // 2]], device=device)
        at = torch.arange(keys, device=device)[None]
        segments = (at >= cut).long() + (at >= cut + keys // 4).long()
    window = case.window if length is None or case.window is None else SMALL_WINDOW
    return Call(leaves, prior, positions, case.causal, window, segments)


def _parametric(case: Case, device: torch.device) -> Ggd:
    prior = Ggd(HEADS, init="alibi", train_mu=case.mu).to(device).float()
    with torch.no_grad():
        prior.theta_beta.add_(0.1 * torch.randn_like(prior.theta_beta))
        if case.skip:
            prior.theta_alpha.add_(1.0)
    return prior


def _line_table(case: Case, queries: Positions, keys: Positions, device: torch.device) -> Tensor:
    columns = queries.length + keys.length - 1
    table = torch.randn(HEADS, columns, device=device)
    distance = torch.arange(columns, device=device) - (queries.length - 1)
    if case.table == "decay":
        table = -torch.tensor([2.0, 0.5, 0.1, 0.01], device=device)[:, None] * distance.abs()
    if case.table == "hidden":
        table[:, (distance > min(70, keys.length // 3)) & (distance % 3 == 0)] = -math.inf
    return table


def _grid_table(case: Case, queries: Positions, keys: Positions, device: torch.device) -> Tensor:
    assert queries.shape is not None
    height, width = queries.shape
    table = torch.randn(HEADS, (2 * height - 1) * (2 * width - 1), device=device)
    if case.skip:
        y, x = torch.arange(1 - height, height, device=device), torch.arange(1 - width, width, device=device)
        table = (-1.5 * torch.hypot(y[:, None].float(), x.float()).flatten()).expand(HEADS, -1).clone()
    return table


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        errors: of the output and of each gradient, the norm of the error over that of the truth; inf where not finite.
        bad: those that are beyond their bound.
        same_bits: whether all runs agree.
    """

    errors: dict[str, float]
    bad: dict[str, float]
    same_bits: bool

    @property
    def ok(self) -> bool:
        return not self.bad and self.same_bits


def compare(
    case: Case,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    length: int | None = None,
    tile: int | None = None,
    repeat: int = 2,
    seed: int = 0,
) -> Comparison:
    """Run a case forward and backward, `repeat` times, beside float64.

    Args:
        width, dtype, device, length: see `build`.
        tile: tokens of a tile; None: the kernel's own.
    """
    with nan_filled(), _planning(tile):
        call = build(case, width, dtype, device, length=length, seed=seed)
        wide = call.wide()
        truth = wide.attend("reference")
        direction = torch.randn_like(truth).to(dtype).double()
        exact = _gradients(wide, truth, direction)
        runs = []
        for _ in range(repeat):
            with skipping(case.skip):
                out = call.attend("triton")
            runs.append(_gradients(call, out, direction.to(dtype)))
        first = runs[0]
        errors = {name: relative_error(first[name], exact[name]) for name in exact}
        errors["out, worst row"] = worst_tile(first["out"], exact["out"], 1)
        errors |= {
            WORST_TILES[name]: worst_tile(first[name], exact[name], min(TILE, tile or TILE)) for name in WORST_TILES
        }
        same = all(torch.equal(run[name], first[name]) for run in runs[1:] for name in run)
    bad = {n: e for n, e in errors.items() if not e <= BOUNDS[dtype] * (CANCELLING if n in LOOSE else 1.0)}
    return Comparison(errors, bad, same)


def _gradients(call: Call, out: Tensor, direction: Tensor) -> dict[str, Tensor]:
    """Gradients of the leaves, and the output, by name."""
    found = torch.autograd.grad(out, list(call.leaves.values()), direction)
    return dict(zip(call.leaves, found, strict=True)) | {"out": out.detach()}


def worst_tile(found: Tensor, exact: Tensor, tokens: int) -> float:
    """The largest error of so many tokens of a head relative to their norm: the norm of all hides one wrong tile of many.

    A norm counts as at least that of the smallest normal numbers of `found`'s dtype, below which it has no relative precision:
    in float16, 6e-5, gradients of keys that hardly any query sees are all 0.
    """
    if not torch.isfinite(found).all():
        return math.inf
    errors, norms = (
        torch.stack([tile.norm(dim=(-2, -1)) for tile in x.double().split(tokens, dim=-2)], -1)
        for x in (found.double() - exact, exact)
    )
    least = torch.finfo(found.dtype).smallest_normal * math.sqrt(min(tokens, found.shape[-2]) * found.shape[-1])
    return float((errors / norms.clamp(min=max(least, 1e-30))).max())


@contextmanager
def nan_filled() -> Iterator[None]:
    """torch.empty is filled with NaN and the largest integers, and float32 products are not rounded to tf32."""
    matmul: Any = torch.backends.cuda.matmul
    fill: Any = torch.utils.deterministic
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    before = fill.fill_uninitialized_memory, matmul.allow_tf32
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        fill.fill_uninitialized_memory, matmul.allow_tf32 = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        fill.fill_uninitialized_memory, matmul.allow_tf32 = before


@contextmanager
def _planning(tile: int | None) -> Iterator[None]:
    """The kernel with tiles of `tile` tokens, or its own, and a plan of them at any length."""
    before = common.TILE, TRITON.least_keys
    try:
        common.TILE, TRITON.least_keys = tile or common.TILE, 1
        yield
    finally:
        common.TILE, TRITON.least_keys = before
