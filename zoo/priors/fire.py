"""FIRE: a learned function of the distance relative to the query's own position (arXiv
2310.04418)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_grid, check_number, check_whole
from zoo.positions import Positions
from zoo.priors.base import GridPrior, Prior, linear_in, prior_dtype, without_autocast
from zoo.priors.tables import BlockedBias, whole_bias
from zoo.priors.terms import PriorTerms


class Fire(Prior):
    """K[h,i,j] = f_θ( ψ(i − j) / ψ(max(L, i)) ), ψ(x) = log(c·x + 1), f_θ an MLP 1 → 32 → H with
    ReLU.

    L is a fixed number of tokens times a learned multiplier: Adam would hardly move a parameter of
    some hundreds. Past L the prior depends on i and j and not on their difference alone, so it is
    neither a table nor lanes: attention asks for it a block of rows at a time.

    Args:
        train_context: tokens seen in training.
        hidden: width of f_θ.
        init_scale: c at the start; it is learned.
        length: L at the start, in tokens; None: the training context.
    """

    length: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        train_context: int,
        hidden: int = 32,
        init_scale: float = 0.1,
        length: float | None = None,
    ) -> None:
        super().__init__(num_heads)
        check_whole("train_context", train_context, 1)
        check_whole("hidden of fire", hidden, 1)
        check_number("init_scale of fire", init_scale, above=0)
        if length is not None:
            check_number("length of fire", length, above=0)
        self.hidden = hidden
        self.start = float(train_context if length is None else length)
        # A buffer, since the weights belong to it.
        self.register_buffer("length", torch.tensor(self.start, dtype=torch.float64))
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, num_heads))
        self.scale = nn.Parameter(torch.tensor([init_scale]))
        self.multiplier = nn.Parameter(torch.ones(1))

    def _apply(self, fn, recurse=True):
        # float64 whatever the model is cast to.
        length = self.length
        super()._apply(fn, recurse)
        if length.is_meta:
            length = torch.tensor(self.start, dtype=torch.float64)
        self.length = length.to(self.length.device)
        return self

    def _bias(
        self, q_pos: Positions, k_pos: Positions, causal: bool, dtype: torch.dtype
    ) -> BlockedBias:
        device = self.scale.device
        grad = any(p.requires_grad for p in self.parameters())
        return BlockedBias(
            self._curve(dtype),
            q_pos.row_index(device),
            k_pos.row_index(device),
            q_pos.index(device),
            causal,
            range(self.num_heads),
            dtype,
            grad,
            self.hidden,
        )

    def _curve(self, dtype: torch.dtype) -> _Curve:
        scale = self.scale.to(dtype).abs()
        threshold = self.length.to(dtype) * self.multiplier.to(dtype).abs()
        inner = _copied(self.mlp[0], dtype)
        outer = _copied(self.mlp[2], dtype)
        return _Curve(scale, threshold, inner, outer)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        bias = self._bias(q_pos, k_pos, causal, prior_dtype(self))
        return PriorTerms(bias=bias, causal=causal or None, offset=q_pos.offset - k_pos.offset)

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        return whole_bias(self._bias(q_pos, k_pos, causal, torch.float64))


@dataclass(eq=False)
class _Curve:
    """f_θ( ψ(distance) / ψ(max(L, extent)) ) of c, L and f_θ's two layers."""

    scale: Tensor
    threshold: Tensor
    inner: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor], Tensor]

    def __call__(self, distance: Tensor, extent: Tensor) -> Tensor:
        """(…, H), the two broadcast."""
        longest = torch.maximum(extent, self.threshold)
        ratio = torch.log1p(self.scale * distance) / torch.log1p(self.scale * longest)
        return self.outer(self.inner(ratio[..., None]).relu())


@dataclass(eq=False)
class _CopiedLinear:
    """A linear layer of copied parameters. A plain object, which torch.compile traces."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def _copied(layer: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A linear layer with copies of its parameters (see `BlockedBias`); what is in its place, such
    as an adapter, as it is."""
    if type(layer) is not nn.Linear:
        return partial(linear_in, layer)
    weight = layer.weight.to(dtype, copy=True)
    bias = layer.bias.to(dtype, copy=True)
    return _CopiedLinear(weight, bias)


class Fire2d(GridPrior, Fire):
    """K = f_θ( ψ(r) / ψ(max(L, R)) ), r = √(dy² + dx²), R the longest r of the present grid; prefix
    tokens get 0.

    R is one number per image, where FIRE on a line has one per query, so this is a function of the
    displacement: a table.

    Args:
        train_grid: (height, width) in patches; L starts at its longest r.
        hidden: width of f_θ.
        init_scale: c at the start.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_grid: tuple[int, int] = (14, 14),
        hidden: int = 32,
        init_scale: float = 0.1,
    ) -> None:
        check_grid("train_grid", train_grid)
        longest = max(math.dist((1, 1), train_grid), 1.0)
        Fire.__init__(
            self, num_heads, train_context=1, hidden=hidden, init_scale=init_scale, length=longest
        )

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        distance = torch.hypot(dy, dx)
        longest = dy.new_full((), math.dist((1, 1), grid))
        by_head_last = self._curve(distance.dtype)(distance, longest)
        return by_head_last.movedim(-1, 0)
