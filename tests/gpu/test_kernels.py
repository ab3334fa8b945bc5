"""The fused kernel at real tile sizes: near float64 of the same inputs, on memory filled with NaN, the same bits in each run.

On a GPU the calls of tests/zoo have one tile; 1,031 tokens have whole tiles inside, which take the paths without a mask. In the
interpreter, which runs one program after another, once at 40 tokens in tiles of 16.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device import DEVICE, some
from zoo import Positions
from zoo.attention import prior_attention, skipping
from zoo.attention.selfcheck import BOUNDS, CANCELLING, relative_error
from zoo.priors import Alibi, Ggd
from zoo.priors.base import Prior, PriorTerms, RelativeTable

pytest.importorskip("triton")
from zoo.attention.triton import TRITON, common, table_grad

pytestmark = pytest.mark.gpu

CUDA = DEVICE.type == "cuda"
LENGTH, GRID, TILE = (1031, (31, 32, 3), 64) if CUDA else (40, (5, 7, 2), 16)
FORMATS = [(16, torch.float32)]
if CUDA:
    FORMATS = [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16), (64, torch.float32)]
BATCH, HEADS = 2, 4


@dataclass(frozen=True)
class Case:
    """One call; what is not set is absent.

    `table`: "random", "decay" or "hidden" (some are −∞), over distances or displacements of the grid; `prior`: "ggd", "ggd mu"
    (θμ trained too) or "ramp" (ALiBi's lanes); `bias`: batch rows and heads; `narrow`: columns by which content is narrower
    than values; `skip`: skip tiles of negligible weight; `queries`: the last, as a share of the keys (0: one); `packed`: heads
    side by side in memory; `gradients`: else forward alone, which a kernel for few queries serves.
    """

    table: str = ""
    prior: str = ""
    grid: bool = False
    bias: tuple[int, int] | None = None
    lanes: int = 0
    narrow: int = 0
    scale: bool = False
    skip: bool = False
    documents: bool = False
    window: bool = False
    causal: bool = True
    groups: int = HEADS
    queries: float = 1.0
    packed: bool = False
    gradients: bool = True


EVERYTHING = Case("random", lanes=5, scale=True, documents=True, window=True, groups=2, queries=0.6, skip=True)
CASES = {
    "bare": Case(),
    "lanes": Case(lanes=16),
    "lanes-inside": Case(lanes=9, narrow=9),
    "table": Case("random"),
    "parametric": Case(prior="ggd"),
    "parametric-scale-skip": Case(prior="ggd", skip=True, scale=True),
    "parametric-mu": Case(prior="ggd mu"),
    "table-skip": Case("decay", skip=True),
    "scale": Case("random", scale=True),
    "scale-bare": Case(scale=True),
    "documents": Case("random", documents=True),
    "documents-lanes-skip": Case(lanes=5, documents=True, skip=True),
    "both-ways": Case("random", causal=False),
    "window-both-ways": Case("random", causal=False, window=True),
    "grouped": Case("random", groups=2),
    "grouped-parametric-scale": Case(prior="ggd", groups=1, scale=True),
    "offset-parametric": Case(prior="ggd", queries=0.3),
    "grid": Case("random", grid=True, causal=False),
    "grid-scale": Case("random", grid=True, causal=False, scale=True),
    "grid-skip": Case("decay", grid=True, causal=False, skip=True),
    "everything": EVERYTHING,
    "packed-qkv": Case("random", packed=True),
    "bias": Case(bias=(1, 1), causal=False),
    "bias-everything": replace(EVERYTHING, bias=(2, 4), window=False, skip=False),
    "plus-infinity-hidden": Case("hidden"),
    "ramp": Case(prior="ramp"),
    "decode": Case("random", queries=0, gradients=False),
    "decode-ramp": Case(prior="ramp", queries=0, groups=2, gradients=False),
    "decode-everything": replace(EVERYTHING, queries=0.15 if not CUDA else 0.007, gradients=False),
}
QUICK = ["bare", "lanes", "table", "parametric-scale-skip", "documents", "grouped", "grid", "bias", "ramp", "decode"]


@dataclass(frozen=True)
class Call:
    """The tensors of a case; `leaves` get a gradient: q, k, v, parts of terms, the row scale, and parameters of `prior`."""

    case: Case
    leaves: dict[str, Tensor]
    prior: Prior | None
    positions: tuple[Positions, Positions]
    segments: Tensor | None

    def wide(self) -> Call:
        """The same in float64."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in self.leaves.items()}
        prior = None if self.prior is None else copy.deepcopy(self.prior).double()
        if prior is not None:
            leaves |= {name: parameter for name, parameter in prior.named_parameters() if name in leaves}
        return replace(self, leaves=leaves, prior=prior)

    def terms(self) -> PriorTerms:
        leaves, (queries, keys) = self.leaves, self.positions
        if self.prior is not None:
            return self.prior(queries, keys, causal=self.case.causal, x=leaves["q"][:, 0])
        table = None
        if "table" in leaves and self.case.grid:
            table = RelativeTable.grid(leaves["table"], queries)
        elif "table" in leaves:
            table = RelativeTable.line(leaves["table"], queries, keys, center=queries.length - 1)
        return PriorTerms(leaves.get("q_lanes"), leaves.get("k_lanes"), table=table, bias=leaves.get("bias"))

    def attend(self, kernel: str, direction: Tensor | None = None) -> dict[str, Tensor]:
        """The output and, with gradients, those of the leaves along a direction of the output (None: draw it)."""
        case, leaves = self.case, self.leaves
        window = LENGTH // 4 if case.window else None
        options: dict[str, Any] = dict(causal=case.causal, segments=self.segments, window=window, kernel=kernel)
        out = prior_attention(
            leaves["q"], leaves["k"], leaves["v"], self.terms(), query_scale=leaves.get("query_scale"), **options
        )
        results = {"out": out.detach()}
        if direction is not None and out.requires_grad:
            grads = torch.autograd.grad(out, list(leaves.values()), direction.to(out.dtype))
            results |= dict(zip(leaves, grads, strict=True))
        return results


def build(case: Case, width: int, dtype: torch.dtype) -> Call:
    """Draw the tensors of a case with heads of `width`."""
    torch.manual_seed(0)
    if case.grid:
        q_pos = k_pos = Positions.grid(*GRID[:2], num_prefix=GRID[2])
    else:
        k_pos = Positions.line(LENGTH)
        q_pos = k_pos.tail(max(1, int(case.queries * LENGTH)))
    queries, keys, content = q_pos.length, k_pos.length, width - case.narrow

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()

    def heads(count: int, length: int, width: int) -> Tensor:
        if case.packed:
            return leaf(BATCH, length, count, width, dtype=dtype).detach().transpose(1, 2).requires_grad_()
        return leaf(BATCH, count, length, width, dtype=dtype)

    groups = case.groups
    leaves = {"q": heads(HEADS, queries, content), "k": heads(groups, keys, content), "v": heads(groups, keys, width)}
    if case.lanes:  # rounded as the kernel rounds them
        for name, shape in (("q_lanes", (1, HEADS, queries, case.lanes)), ("k_lanes", (1, 1, keys, case.lanes))):
            leaves[name] = (0.3 * torch.randn(shape, device=DEVICE)).to(dtype).float().requires_grad_()
    prior: Prior | None = Alibi(HEADS) if case.prior == "ramp" else None
    if case.prior.startswith("ggd"):
        prior = Ggd(HEADS, init="alibi", train_mu=case.prior == "ggd mu").to(DEVICE).float()
        with torch.no_grad():
            prior.theta_beta.add_(0.1 * torch.randn_like(prior.theta_beta))
            prior.theta_alpha.add_(float(case.skip))
        leaves |= {name: parameter for name, parameter in prior.named_parameters() if parameter.requires_grad}
    if case.table:
        leaves["table"] = table_of(case, queries, keys).requires_grad_()
    if case.scale:
        leaves["query_scale"] = (0.5 + torch.rand(HEADS, queries, device=DEVICE)).requires_grad_()
    if case.bias is not None:
        leaves["bias"] = leaf(*case.bias, queries, keys)
    segments = None
    if case.documents:  # three, not at the same places
        cut = torch.tensor([[keys // 5], [keys // 2]], device=DEVICE)
        index = torch.arange(keys, device=DEVICE)[None]
        segments = (index >= cut).long() + (index >= cut + keys // 4).long()
    return Call(case, leaves, prior, (q_pos, k_pos), segments)


def table_of(case: Case, queries: int, keys: int) -> Tensor:
    """(H, N) over distances or displacements."""
    distance = (torch.arange(queries + keys - 1, device=DEVICE) - (queries - 1)).float()
    if case.grid:
        y, x = (torch.arange(1 - n, n, device=DEVICE).float() for n in GRID[:2])
        distance = torch.hypot(y[:, None], x).flatten()
    if case.table == "decay":
        return -torch.tensor([2.0, 0.5, 0.1, 0.01], device=DEVICE)[:, None] * distance.abs()
    table = torch.randn(HEADS, len(distance), device=DEVICE)
    if case.table == "hidden":
        table[:, (distance > min(70, keys // 3)) & (distance % 3 == 0)] = -math.inf
    return table


def worst_tile(value: Tensor, exact: Tensor, tokens: int) -> float:
    """The largest error of so many tokens of a head relative to their norm: the norm of all hides one wrong tile of many.

    A norm counts as at least that of the smallest normal numbers of the dtype, below which it has no relative precision.
    """
    if not torch.isfinite(value).all():
        return math.inf
    errors, norms = (
        torch.stack([tile.norm(dim=(-2, -1)) for tile in x.double().split(tokens, dim=-2)], -1)
        for x in (value.double() - exact, exact)
    )
    least = torch.finfo(value.dtype).smallest_normal * math.sqrt(min(tokens, value.shape[-2]) * value.shape[-1])
    return float((errors / norms.clamp(min=max(least, 1e-30))).max())


@contextmanager
def nan_filled() -> Iterator[None]:
    """torch.empty is filled with NaN and the largest integers, and float32 products are not rounded to tf32."""
    matmul: Any = torch.backends.cuda.matmul
    settings = torch.are_deterministic_algorithms_enabled(), matmul.allow_tf32
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        matmul.allow_tf32 = False
        yield
    finally:
        torch.use_deterministic_algorithms(settings[0])
        matmul.allow_tf32 = settings[1]


@pytest.mark.parametrize(("width", "dtype"), FORMATS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES if CUDA else some(QUICK, 3))
def test_a_case_is_as_exact_as_rounding_allows(
    name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TRITON, "least_keys", 1)
    if not CUDA:
        monkeypatch.setattr(common, "TILE", TILE)
        monkeypatch.setattr(table_grad, "PROGRAMS", 16)  # idle programs cost the interpreter time
    case = CASES[name]
    with nan_filled(), torch.set_grad_enabled(case.gradients), skipping(case.skip):
        call = build(case, width, dtype)
        direction = torch.randn(BATCH, HEADS, call.positions[0].length, width, device=DEVICE).to(dtype)
        exact = call.wide().attend("reference", direction)
        results, *again = (call.attend("triton", direction) for _ in range(2 if CUDA else 1))
    for key, value in results.items():
        bound = BOUNDS[dtype] * (1.0 if key in ("out", "q", "k", "v") else CANCELLING)
        assert relative_error(value, exact[key]) <= bound, key
        if key in ("out", "q", "k", "v"):  # a tile is not averaged with others
            assert worst_tile(value, exact[key], 1 if key == "out" else TILE) <= BOUNDS[dtype] * CANCELLING, key
        assert all(torch.equal(run[key], value) for run in again), key


@pytest.mark.parametrize("dtype", [torch.float32] if not CUDA else [torch.bfloat16, torch.float16, torch.float32])
def test_ligers_loss_agrees_with_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel")
    from modalities.decoder import fused_loss

    fused_loss.agrees.cache_clear()
    with torch.inference_mode():
        assert fused_loss.agrees(DEVICE, dtype)
    right = fused_loss.fused_losses
    for words, wrong in (("off by 0.1", lambda *args: right(*args) * 1.1), ("fails on .*zero", lambda *args: 1 / 0)):
        fused_loss.agrees.cache_clear()
        monkeypatch.setattr(fused_loss, "fused_losses", wrong)
        with pytest.warns(UserWarning, match=words):
            assert not fused_loss.agrees(DEVICE, dtype)
    fused_loss.agrees.cache_clear()
