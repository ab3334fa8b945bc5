"""GOAT's relative part: a short trigonometric series in the distance (arXiv 2601.15380, eq. 12 to
18)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_grid, check_number, check_whole
from zoo.positions import Positions
from zoo.priors.base import Prior, prior_dtype
from zoo.priors.terms import PriorTerms


def frequencies(rank: int, base: float) -> Tensor:
    """(R,) float64: ω_r = base^(−r/max(R−1,1)) radians a step, r = 0 … R−1, both ends included."""
    return base ** (-torch.arange(rank, dtype=torch.float64) / max(rank - 1, 1))


class Spectral(Prior):
    """K[h,i,j] = Σ_r α_hr cos(ω_r (i−j)) + β_hr sin(ω_r (i−j)), by 2R lanes; the key lanes are the
    same for all heads.

    Args:
        rank: R frequencies, ω_r = base^(−r/max(R−1,1)).
        base: the slowest frequency is 1/base.
        init: "uniform" starts at K = 0; "seeded" draws α with mean 0 and standard deviation 0.01.
    """

    is_relative = True
    by_head = ("alpha", "beta")
    omega: Tensor

    def __init__(
        self, num_heads: int, *, rank: int = 2, base: float = 10000.0, init: str = "uniform"
    ) -> None:
        super().__init__(num_heads)
        check_whole("rank of a spectral prior", rank, 1)
        check_number("base of a spectral prior", base, least=1)
        if init not in ("uniform", "seeded"):
            raise ValueError(f"unknown init {init!r} of a spectral prior; known: uniform, seeded")
        self.rank = rank
        self.base = base
        self.num_lanes = 2 * rank
        self.alpha = nn.Parameter(torch.zeros(num_heads, rank))
        self.beta = nn.Parameter(torch.zeros(num_heads, rank))
        if init == "seeded":
            nn.init.normal_(self.alpha, std=0.01)
        self.register_buffer("omega", frequencies(rank, base))

    def _apply(self, fn, recurse=True):
        # Frequencies stay float64 whatever the model is cast to: in bfloat16, 2^20 · ω has no
        # fractional bits. Their values are saved in checkpoints, so that weights keep the
        # frequencies they were trained with.
        omega = self.omega
        super()._apply(fn, recurse)
        if omega.is_meta:
            omega = frequencies(self.rank, self.base)
        self.omega = omega.double().to(self.omega.device)
        return self

    def lanes(self, q_at: Tensor, k_at: Tensor) -> tuple[Tensor, Tensor]:
        """q_lanes (1 or B, H, T, 2R), k_lanes (1 or B, 1, S, 2R) at positions (1 or B, T) and (1 or
        B, S)."""
        dtype = prior_dtype(self)
        alpha = self.alpha.to(dtype)[:, None]
        beta = self.beta.to(dtype)[:, None]
        k_lanes = self._waves(k_at).to(dtype)
        q_waves = k_lanes if q_at is k_at else self._waves(q_at).to(dtype)
        cos, sin = q_waves.chunk(2, dim=-1)
        # cos ω(i−j) and sin ω(i−j) by the addition theorems, with the key's waves as they are.
        q_lanes = torch.cat([alpha * cos + beta * sin, alpha * sin - beta * cos], dim=-1)
        return q_lanes, k_lanes

    def _waves(self, at: Tensor) -> Tensor:
        """(1 or B, 1, L, 2R) float64: cosine and sine of ω·position."""
        angle = at[:, None, :, None] * self.omega
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def series(self, distance: Tensor) -> Tensor:
        """(H, *distance.shape) float64: the sum itself."""
        angle = distance.double()[..., None] * self.omega
        lead = (self.num_heads,) + (1,) * distance.ndim + (self.rank,)
        alpha = self.alpha.double().view(lead)
        beta = self.beta.double().view(lead)
        return (alpha * angle.cos() + beta * angle.sin()).sum(-1)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        k_at = k_pos.index(self.omega.device)
        q_at = k_at if q_pos is k_pos else q_pos.index(self.omega.device)
        q_lanes, k_lanes = self.lanes(q_at, k_at)
        offset = q_pos.offset - k_pos.offset
        # Waves are bounded.
        return PriorTerms(q_lanes, k_lanes, offset=offset, in_pieces=True)

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        i = q_pos.row_index(self.omega.device)
        j = k_pos.row_index(self.omega.device)
        return self.series(i[:, None] - j)[None]


class Spectral2d(Prior):
    """K = K_y(dy) + K_x(dx), one spectral series per axis, both over the same frequencies; 4R
    lanes, none on prefix tokens.

    The frequencies fall geometrically from 1 radian a patch to π / (reach · longer side of the
    training grid), both included. A cosine falls monotonically over its half period and then rises
    again, so at sizes beyond it far patches look near.

    Args:
        rank: R frequencies per axis.
        train_grid: (height, width) in patches.
        init: as in `Spectral`.
        reach: half period of the slowest frequency, in multiples of the training grid's longer
            side.
    """

    by_head = ()

    def __init__(
        self,
        num_heads: int,
        *,
        rank: int = 8,
        train_grid: tuple[int, int] = (14, 14),
        init: str = "uniform",
        reach: float = 1.0,
    ) -> None:
        super().__init__(num_heads)
        check_number("reach of spectral2d", reach, above=0)
        check_grid("train_grid", train_grid)
        base = max(reach * max(train_grid) / math.pi, 1.0)
        self.y = Spectral(num_heads, rank=rank, base=base, init=init)
        self.x = Spectral(num_heads, rank=rank, base=base, init=init)
        self.num_lanes = 4 * rank

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        device = self.y.omega.device
        q_y, q_x = q_pos.yx(device)
        k_y, k_x = k_pos.yx(device)
        q_lanes_y, k_lanes_y = self.y.lanes(q_y[None], k_y[None])
        q_lanes_x, k_lanes_x = self.x.lanes(q_x[None], k_x[None])
        q_lanes = torch.cat([q_lanes_y, q_lanes_x], dim=-1)
        k_lanes = torch.cat([k_lanes_y, k_lanes_x], dim=-1)
        return PriorTerms(
            F.pad(q_lanes, (0, 0, q_pos.num_prefix, 0)),
            F.pad(k_lanes, (0, 0, k_pos.num_prefix, 0)),
            in_pieces=True,
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        device = self.y.omega.device
        q_y, q_x = q_pos.yx(device)
        k_y, k_x = k_pos.yx(device)
        patches = self.y.series(q_y[:, None] - k_y) + self.x.series(q_x[:, None] - k_x)
        return F.pad(patches, (k_pos.num_prefix, 0, q_pos.num_prefix, 0))[None]
