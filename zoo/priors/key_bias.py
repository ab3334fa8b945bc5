"""GOAT's sink: a learned bias for each key, a function of its absolute position (arXiv 2601.15380,
eq. 19)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_whole
from zoo.positions import Positions
from zoo.priors.alibi import RAMP_LANES, alibi_slopes, inverse_softplus, ramp_lanes
from zoo.priors.base import Prior, linear_in, prior_dtype
from zoo.priors.terms import PriorTerms


class _Sink(Prior):
    """Base of both: u_h(j) = g_h·MLP(z_j) + b_h·bump_j."""

    by_head: tuple[str, ...] | None = ("gain", "bump")

    def __init__(self, num_heads: int, rank: int) -> None:
        super().__init__(num_heads)
        check_whole("rank of a key bias", rank, 0)
        self.rank = rank
        self.gain = nn.Parameter(torch.ones(num_heads))
        self.bump = nn.Parameter(torch.zeros(num_heads))
        last = nn.Linear(4, 1)
        # The sink starts at 0, so a fresh prior is its relative part alone.
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.mlp = nn.Sequential(nn.Linear(2 * rank + 2, 4), nn.SiLU(), last)

    def sink(self, features: Tensor, bump: Tensor) -> Tensor:
        """(1 or B, H, S) from features (1 or B, S, 2M+2) and bump, (1 or B, S) bool."""
        dtype = features.dtype
        value = linear_in(self.mlp[2], F.silu(linear_in(self.mlp[0], features)))[..., 0][:, None]
        return self.gain.to(dtype)[:, None] * value + self.bump.to(dtype)[:, None] * bump[:, None]


class KeyBias(_Sink):
    """K[h,i,j] = u_h(j) = g_h·MLP(z_j) + b_h·[j = 0] + slope_h·j, the last causal only.

    z_j = (cos ω_m j, sin ω_m j for m = 1 … M; j/L_train; log1p(j)/log1p(L_train)), ω_m
    = 10000^(−(m−1)/max(M−1,1)); one MLP (2M+2) → 4 → 1 for all heads. Normalising by L_train and
    not by the present length keeps a prefix independent of what follows it. The bounded part is one
    lane, the slope its own.

    Args:
        train_context: L_train, in tokens.
        rank: M.
        init: "seeded" starts slope = softplus(raw_slope) at the ALiBi slopes, "uniform" at (all but
            exactly) 0, where softplus has no gradient: it stays there.
    """

    num_lanes = RAMP_LANES
    by_head = ("gain", "bump", "raw_slope")

    def __init__(
        self, num_heads: int, *, train_context: int, rank: int = 8, init: str = "seeded"
    ) -> None:
        super().__init__(num_heads, rank)
        check_whole("train_context", train_context, 1)
        if init not in ("uniform", "seeded"):
            raise ValueError(f"unknown init {init!r} of a key bias; known: uniform, seeded")
        self.train_context = train_context
        if init == "seeded":
            raw_slope = inverse_softplus(alibi_slopes(num_heads))
        else:
            raw_slope = torch.full((num_heads,), -40.0)
        self.raw_slope = nn.Parameter(raw_slope.float())

    def slopes(self) -> Tensor:
        """(H,) float64."""
        return F.softplus(self.raw_slope.double())

    def features(self, at: Tensor) -> Tensor:
        """(1 or B, S, 2M+2) float64 z_j at positions (1 or B, S)."""
        j = at.double()[..., None]
        m = torch.arange(self.rank, device=at.device, dtype=torch.float64)
        omega = 10000.0 ** (m / -max(self.rank - 1, 1))
        angle = j * omega
        linear = j / self.train_context
        logarithm = torch.log1p(j) / math.log1p(self.train_context)
        return torch.cat([angle.cos(), angle.sin(), linear, logarithm], dim=-1)

    def bias(self, at: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
        """(1 or B, H, S) float64 u_h at positions (1 or B, S); the MLP runs in `dtype`."""
        at = at.double()
        value = self.sink(self.features(at).to(dtype), at == 0)
        return value + self.slopes()[:, None] * at[:, None] if causal else value.double()

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        dtype = prior_dtype(self)
        ramp = self.bias(k_pos.index(self.gain.device), causal, dtype)
        at_query = ramp
        if q_pos is not k_pos:
            with torch.no_grad():
                at_query = self.bias(q_pos.index(self.gain.device), causal, dtype)
        q_lanes, k_lanes = ramp_lanes(ramp, at_query, dtype)
        return PriorTerms(
            q_lanes,
            k_lanes,
            causal=causal,
            offset=q_pos.offset - k_pos.offset,
            in_pieces=True,
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        bias = self.bias(k_pos.index(self.gain.device), causal, torch.float64)
        return bias[:, :, None].expand(-1, -1, q_pos.length, -1)

    def next_row(self, length: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(length, device=self.gain.device)
        return -self.slopes()[:, None] * at, self.bias(at[None], False, prior_dtype(self))[0]


class KeyBias2d(_Sink):
    """The sink of an image: u_h(patch) = g_h·MLP(z), and b_h on prefix tokens; no slope; 1 lane.

    z holds, for each axis, cos(π m c), sin(π m c) for m = 1 … M/2, and c itself, where c in [−1, 1]
    is the patch's coordinate over the present grid. Images have no prefix to protect.

    Args:
        rank: M, even.
    """

    num_lanes = 1

    def __init__(self, num_heads: int, *, rank: int = 8) -> None:
        super().__init__(num_heads, rank)
        if rank % 2:
            raise ValueError(
                f"key_bias2d shares its rank between two axes: rank must be even, got {rank}"
            )

    def _axis(self, coordinate: Tensor, size: int) -> list[Tensor]:
        """The features of one axis: cos(π m c), sin(π m c) and c, (patches, ·) each."""
        m = torch.arange(1, self.rank // 2 + 1, device=coordinate.device, dtype=coordinate.dtype)
        harmonics = math.pi * m
        # The only patch of an axis of one patch is at 0.
        middle = 1 if size > 1 else 0
        c = (2 * coordinate / max(size - 1, 1) - middle)[:, None]
        return [(c * harmonics).cos(), (c * harmonics).sin(), c]

    def _bias(self, k_pos: Positions, dtype: torch.dtype) -> Tensor:
        """(1, H, S) u_h of prefix tokens and patches."""
        height, width = k_pos.shape or (1, 1)
        y, x = k_pos.yx(self.gain.device)
        no_bump = torch.zeros_like(y, dtype=torch.bool)
        features = [*self._axis(y.to(dtype), height), *self._axis(x.to(dtype), width)]
        patches = self.sink(torch.cat(features, dim=-1)[None], no_bump[None])
        prefix = self.bump.to(dtype)[None, :, None].expand(1, -1, k_pos.num_prefix)
        return torch.cat([prefix, patches], dim=-1)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        dtype = prior_dtype(self)
        q_lane = torch.ones(1, 1, q_pos.length, 1, device=self.gain.device, dtype=dtype)
        return PriorTerms(q_lane, self._bias(k_pos, dtype)[..., None], in_pieces=True)

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        return self._bias(k_pos, torch.float64)[:, :, None].expand(-1, -1, q_pos.length, -1)
