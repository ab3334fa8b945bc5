"""ALiBi: a linear penalty on distance (arXiv 2108.12409). Its slopes seed other priors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_number
from zoo.positions import Positions
from zoo.priors.base import IsotropicPrior, Prior, TablePrior, prior_dtype
from zoo.priors.lanes import RAMP_LANES, ramp_lanes
from zoo.priors.terms import PriorTerms


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """(H,) float64 slopes m_h = 2^(−8(h+1)/H); for H not a power of two those of the power below
    it, then every other one of the power above, as published. Computed on the device, since copying
    them there would synchronise."""
    below = 2 ** math.floor(math.log2(num_heads))
    n = torch.arange(1, num_heads + 1, dtype=torch.float64, device=device)
    exponents_below = n * (-8 / below)
    exponents_above = (2 * (n - below) - 1) * (-4 / below)
    return torch.exp2(torch.where(n <= below, exponents_below, exponents_above))


def inverse_softplus(value: Tensor) -> Tensor:
    """x with softplus(x) = value > 0."""
    return value + torch.log(-torch.expm1(-value))


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
        # Slopes by head; None for ALiBi's.
        self.fixed: list[float] | None = None
        if mean_lag is not None:
            lags = list(mean_lag) if isinstance(mean_lag, Sequence) else [mean_lag] * num_heads
            if len(lags) != num_heads:
                raise ValueError(
                    f"mean_lag={mean_lag!r}: expected a distance, or one for each of {num_heads} "
                    "heads"
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
        ramp = slopes[:, None] * j[:, None]
        at_query = ramp
        if q_pos is not k_pos:
            i = q_pos.index(slopes.device).double()
            at_query = slopes[:, None] * i[:, None]
        q_lanes, k_lanes = ramp_lanes(ramp, at_query, dtype)
        return PriorTerms(
            q_lanes,
            k_lanes,
            causal=True,
            offset=q_pos.offset - k_pos.offset,
            in_pieces=True,
        )


class Alibi2d(IsotropicPrior, Alibi):
    """K = −m_h·√(dy² + dx²) over the grid of patches, with `Alibi`'s slopes m and options; prefix
    tokens get 0."""
