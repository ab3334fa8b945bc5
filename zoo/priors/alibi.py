"""Penalties on distance: ALiBi's linear one (arXiv 2108.12409), whose slopes seed other priors,
Kerple's logarithmic kernel (arXiv 2205.09921), scale-invariant attention, and LookHere's heads that
look in one direction each (arXiv 2405.13985)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_number, check_whole
from zoo.positions import Positions
from zoo.priors.base import (
    GridPrior,
    IsotropicPrior,
    Prior,
    PriorTerms,
    TablePrior,
    bf16_pieces,
    prior_dtype,
)

# Four bfloat16 pieces carry 36 significant bits: a ramp of slope 1 has error 2^-16 at position
# 2^20. One more lane subtracts the bulk of the ramp at the query's own position, which keeps a
# kernel's float32 sums small.
RAMP_PIECES = 4
RAMP_LANES = RAMP_PIECES + 1
HIDDEN = (
    -1e30
)  # of keys outside LookHere's field of view; every patch sees itself, so no row is without a key
LEAST = 1e-2  # that Kerple's parameters are read as


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """(H,) float64 slopes m_h = 2^(−8(h+1)/H); for H not a power of two those of the power below
    it, then every other one of the power above, as published. Computed on the device, since copying
    them there would synchronise."""
    below = 2 ** math.floor(math.log2(num_heads))
    n = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    return torch.exp2(
        torch.where(n <= below, n * (-8 / below), (2 * (n - below) - 1) * (-4 / below))
    )


def inverse_softplus(value: Tensor) -> Tensor:
    """x with softplus(x) = value > 0."""
    return value + torch.log(-torch.expm1(-value))


def ramp_lanes(ramp: Tensor, at_query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lanes of K[i,j] = ramp[j], exact to bfloat16 pieces, less a row constant near ramp at the
    query.

    Args:
        ramp: (1 or B, H, S) float64, differentiable; it may grow without bound.
        at_query: (1 or B, H, T) float64, the ramp's value at each query.
    Returns:
        q_lanes (1 or B, H, T, RAMP_LANES), k_lanes (1 or B, H, S, RAMP_LANES), in `dtype`.
    """
    pieces = bf16_pieces(ramp, RAMP_PIECES, dtype)
    bulk = -(pieces[0] if at_query is ramp else at_query.to(torch.bfloat16).to(dtype)).detach()
    ones = torch.ones_like(bulk)
    # Largest first: bulk cancels the leading piece before the smaller ones are summed.
    q_lanes = torch.stack([bulk, *[ones] * RAMP_PIECES], dim=-1)
    return q_lanes, torch.stack(
        [ones if at_query is ramp else torch.ones_like(pieces[0]), *pieces], dim=-1
    )


class Alibi(TablePrior):
    """K[h,i,j] = −m_h·|i − j|.

    Causal it is K ≡ m_h·j up to a row constant, so lanes; bidirectional a table.

    Args:
        learnable: train the slopes, m = softplus(raw_slope), (H,); else they are constants.
        mean_lag: slopes ln(1 + 1/μ), at which the prior over an endless past has the mean distance
            μ: a number of tokens, or a number for each head (GOAT, arXiv 2601.15380, th. 3: of all
            priors of that mean it has most entropy). None: ALiBi's.
    """

    num_lanes = RAMP_LANES
    by_head = ("raw_slope",)
    raw_slope: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        *,
        learnable: bool = False,
        mean_lag: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(num_heads)
        check_flags(learnable=learnable)
        self.fixed: list[float] | None = None  # slopes
        if mean_lag is not None:
            lags = list(mean_lag) if isinstance(mean_lag, Sequence) else [mean_lag] * num_heads
            if len(lags) != num_heads:
                raise ValueError(
                    f"mean_lag={mean_lag!r}: expected a distance, or one for each of {num_heads} heads"
                )
            for lag in lags:
                check_number("mean_lag", lag, above=0)
            self.fixed = [math.log1p(1 / lag) for lag in lags]
        if learnable:
            self.raw_slope = nn.Parameter(inverse_softplus(self._start(None)).float())
        self.learnable = learnable

    def _start(self, device: torch.device | str | None) -> Tensor:
        if self.fixed is None:
            return alibi_slopes(self.num_heads, device)
        return torch.tensor(self.fixed, dtype=torch.float64, device=device)

    def of_heads(self, heads: Sequence[int]) -> Prior:
        some = super().of_heads(heads)
        some.__dict__["fixed"] = self._start("cpu")[list(heads)].tolist()
        return some

    def slopes(self, device: torch.device | str | None = None) -> Tensor:
        """(H,) float64."""
        return F.softplus(self.raw_slope.double()) if self.learnable else self._start(device)

    def retrieval_heads(self, turned: Tensor | None = None) -> Tensor:
        """(H,) bool: none, but where K is turned round all."""
        return torch.zeros(self.num_heads, dtype=torch.bool) if turned is None else turned.clone()

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        """(H, *distance.shape) −m_h·|d|, formed in float64 and returned in the dtype of
        `distance`."""
        slopes = self.slopes(distance.device).view(-1, *[1] * distance.ndim)
        return (-slopes * distance.abs()).to(distance.dtype)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        if not causal:
            return super().forward(q_pos, k_pos, causal=causal, x=x)
        self.require_line(q_pos, k_pos)
        slopes = self.slopes(None if x is None else x.device)
        dtype = prior_dtype(self)
        j = k_pos.index(slopes.device).double()
        i = j if q_pos is k_pos else q_pos.index(slopes.device).double()
        ramp = slopes[:, None] * j[:, None]
        q_lanes, k_lanes = ramp_lanes(ramp, ramp if i is j else slopes[:, None] * i[:, None], dtype)
        return PriorTerms(q_lanes, k_lanes, causal=True, offset=q_pos.offset - k_pos.offset)


class Alibi2d(IsotropicPrior, Alibi):
    """K = −m_h·√(dy² + dx²) over the grid of patches, with `Alibi`'s slopes m and options; prefix
    tokens get 0."""


class Kerple(TablePrior):
    """K[h,i,j] = −r1_h·log(1 + r2_h·|i − j|), r1, r2 > 0 learned, (H,) each.

    They start uniform in (0, 2) and (0, 1), as the released `bias_p` and `bias_a`, and are read no
    lower than 0.01, which keeps them positive.
    """

    by_head = ("r1", "r2")

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.r1 = nn.Parameter(torch.rand(num_heads) * 2)
        self.r2 = nn.Parameter(torch.rand(num_heads))

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        lead = (self.num_heads,) + (1,) * distance.ndim
        r1, r2 = (r.to(distance.dtype).clamp(min=LEAST).view(lead) for r in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * distance.abs())


class Kerple2d(IsotropicPrior, Kerple):
    """K = −r1_h·log(1 + r2_h·√(dy² + dx²)) over the grid of patches; prefix tokens get 0."""


class Lookhere2d(GridPrior):
    """K[h] = −s_l·m_h·√(dy² + dx²) inside the head's field of view, a cone that opens at the query;
    −1e30 outside.

    Fields of 90°, their edges included, as in the released code: up, down, left and right, which
    heads take in turn. The last third of heads, as far as whole fours allow, sees everything: of 12
    heads 8 look somewhere, of 6 heads 4, of 4 heads all.
    Slopes m: of the n-th four that look 2^(−n) from n = 1 on; 1/4, 1/16, 1/64, 1/256 of those that
    see everything. Prefix tokens see all and are seen, with 0.

    Args:
        depth: (layer from 0, number of layers), which models give: s_l falls from 1.5 to 0.5; None:
            it is 1.
    """

    def __init__(self, num_heads: int, *, depth: tuple[int, int] | None = None) -> None:
        super().__init__(num_heads)
        pair = isinstance(depth, tuple | list) and len(depth) == 2
        layer, layers = (1, 3) if depth is None else depth if pair else (-1, 1)
        check_whole("the number of layers in depth", layers, 1)
        if layer not in range(layers):
            raise ValueError(f"depth must be (layer from 0, number of layers), got {depth!r}")
        self.layer_slope = 1.5 - (layer / (layers - 1) if layers > 1 else 0.0)
        self.looking = min(num_heads, 4 * math.ceil(num_heads / 6))
        self.each = max(1, (num_heads - self.looking) // 4)

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        head = torch.arange(self.num_heads, device=dy.device)
        halvings = torch.where(
            head < self.looking, 1 + head // 4, 2 + 2 * ((head - self.looking) // self.each)
        )
        slopes = self.layer_slope * torch.exp2(-halvings.to(dy.dtype)).view(-1, *[1] * dy.ndim)
        logits = -slopes * torch.hypot(dy, dx)
        fields = (
            (dy, dx),
            (-dy, dx),
            (dx, dy),
            (-dx, dy),
        )  # up, down, left, right: the key is at query − (dy, dx)
        hidden = torch.stack(
            [fields[head % 4][0] < fields[head % 4][1].abs() for head in range(self.looking)]
        )
        return torch.cat(
            [logits[: self.looking].masked_fill(hidden, HIDDEN), logits[self.looking :]]
        )


class ScaleInvariant(TablePrior):
    """Scale-invariant attention (arXiv 2505.17083): logits a(d)·⟨q, k⟩/√d_c + m(d), a(d)² = 1
    + 2·ln(1 + d/τ), K = m(d) = 1 − a(d)², d = abs(i − j). Of Gaussian logits tokens 10 to 100 back
    weigh in all what those 100 to 1000 back do.

    The factor makes a T × S matrix for each head. The paper adds it to a partial rotation:
    "rope+scale_invariant".

    Args:
        tau: τ, in tokens.
    """

    by_head = ()

    def __init__(self, num_heads: int, *, tau: float = 10.0) -> None:
        super().__init__(num_heads)
        check_number("tau", tau, above=0)
        self.tau = float(tau)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        return (-2 * torch.log1p(distance.abs() / self.tau)).expand(self.num_heads, *distance.shape)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        terms = super().forward(q_pos, k_pos, causal=causal, x=x)
        assert terms.table is not None
        return replace(terms, gain=replace(terms.table, table=(1 - terms.table.table).sqrt()))

    def next_row(self, length: int) -> None:
        return None
