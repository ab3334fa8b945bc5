"""Sums of priors, and GOAT, which is one (arXiv 2601.15380): a sink as a function of absolute
position (eq. 19), and a short trigonometric series in the distance (eq. 12–18)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_grid, check_number, check_whole
from zoo.positions import Positions
from zoo.priors.alibi import RAMP_LANES, alibi_slopes, inverse_softplus, ramp_lanes
from zoo.priors.base import Prior, PriorTerms, linear_in, prior_device, prior_dtype


class Compose(Prior):
    """K = Σ_n K_n of the named parts; part names are submodule names. State goes to the part that
    has one."""

    by_head = ()

    def __init__(self, **parts: Prior) -> None:
        for name, part in parts.items():
            if not isinstance(part, Prior):
                raise ValueError(
                    f"part {name!r} of a composed prior must be a zoo.Prior, got {part!r}"
                )
        heads = {part.num_heads for part in parts.values()}
        if len(heads) != 1:
            raise ValueError(
                f"composed priors need the same number of heads, got {sorted(heads) or 'no part'}"
            )
        super().__init__(heads.pop())
        for name, part in parts.items():
            self.add_module(name, part)
        self.num_lanes = sum(part.num_lanes for part in parts.values())
        self.has_state = any(part.has_state for part in parts.values())

    def forward(
        self,
        q_pos: Positions,
        k_pos: Positions,
        *,
        causal: bool,
        x: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> PriorTerms:
        terms = PriorTerms()
        for part in self.parts():
            state = {"carry": carry} if carry is not None and part.has_state else {}
            terms = terms + part(q_pos, k_pos, causal=causal, x=x, **state)
        return terms

    def beside_lanes(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        parts = (part.beside_lanes(q_pos, k_pos, causal=causal, x=x) for part in self.parts())
        return sum(
            (PriorTerms(table=x.table, bias=x.bias, gain=x.gain) for x in parts), PriorTerms()
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        # A part without parameters, such as ALiBi of fixed slopes, is not told the device of the
        # others'.
        device = prior_device(self)
        first, *others = (
            part.log_prior(q_pos, k_pos, causal=causal, x=x).to(device=device)
            for part in self.parts()
        )
        return sum(others, first)


def compose(*priors: Prior) -> Compose:
    """The sum of priors, as parts `0`, `1`, …"""
    return Compose(**{str(n): prior for n, prior in enumerate(priors)})


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
            exactly) 0, where
            softplus has no gradient: it stays there.
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
        seed = (
            inverse_softplus(alibi_slopes(num_heads))
            if init == "seeded"
            else torch.full((num_heads,), -40.0)
        )
        self.raw_slope = nn.Parameter(seed.float())

    def slopes(self) -> Tensor:
        """(H,) float64."""
        return F.softplus(self.raw_slope.double())

    def features(self, at: Tensor) -> Tensor:
        """(1 or B, S, 2M+2) float64 z_j at positions (1 or B, S)."""
        j = at.double()[..., None]
        omega = 10000.0 ** (
            torch.arange(self.rank, device=at.device, dtype=torch.float64) / -max(self.rank - 1, 1)
        )
        ramps = [j / self.train_context, torch.log1p(j) / math.log1p(self.train_context)]
        angle = j * omega
        return torch.cat([angle.cos(), angle.sin(), *ramps], dim=-1)

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
        with torch.no_grad():
            at_query = (
                ramp if q_pos is k_pos else self.bias(q_pos.index(self.gain.device), causal, dtype)
            )
        q_lanes, k_lanes = ramp_lanes(ramp, at_query, dtype)
        return PriorTerms(q_lanes, k_lanes, causal=causal, offset=q_pos.offset - k_pos.offset)

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

    def _bias(self, k_pos: Positions, dtype: torch.dtype) -> Tensor:
        height, width = k_pos.shape or (1, 1)
        y, x = (c.to(dtype) for c in k_pos.yx(self.gain.device))
        harmonics = math.pi * torch.arange(1, self.rank // 2 + 1, device=y.device, dtype=dtype)
        parts = []
        for coordinate, size in ((y, height), (x, width)):
            c = (2 * coordinate / max(size - 1, 1) - (1 if size > 1 else 0))[:, None]
            parts += [(c * harmonics).cos(), (c * harmonics).sin(), c]
        patches = self.sink(
            torch.cat(parts, dim=-1)[None], torch.zeros_like(y, dtype=torch.bool)[None]
        )
        prefix = self.bump.to(dtype)[None, :, None].expand(1, -1, k_pos.num_prefix)
        return torch.cat([prefix, patches], dim=-1)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        dtype = prior_dtype(self)
        q_lane = torch.ones(1, 1, q_pos.length, 1, device=self.gain.device, dtype=dtype)
        return PriorTerms(q_lane, self._bias(k_pos, dtype)[..., None])

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        return self._bias(k_pos, torch.float64)[:, :, None].expand(-1, -1, q_pos.length, -1)


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
        alpha, beta = (x.to(dtype)[:, None] for x in (self.alpha, self.beta))
        k_lanes = self._waves(k_at).to(dtype)
        waves = k_lanes if q_at is k_at else self._waves(q_at).to(dtype)
        cos, sin = waves.chunk(2, dim=-1)
        return torch.cat([alpha * cos + beta * sin, alpha * sin - beta * cos], dim=-1), k_lanes

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
        return PriorTerms(*self.lanes(q_at, k_at), offset=q_pos.offset - k_pos.offset)

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
        (q_y, q_x), (k_y, k_x) = q_pos.yx(device), k_pos.yx(device)
        qy, ky = self.y.lanes(q_y[None], k_y[None])
        qx, kx = self.x.lanes(q_x[None], k_x[None])
        q_lanes = torch.cat([qy, qx], dim=-1)
        k_lanes = torch.cat([ky, kx], dim=-1)
        pad = nn.functional.pad
        return PriorTerms(
            pad(q_lanes, (0, 0, q_pos.num_prefix, 0)), pad(k_lanes, (0, 0, k_pos.num_prefix, 0))
        )

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        device = self.y.omega.device
        (q_y, q_x), (k_y, k_x) = q_pos.yx(device), k_pos.yx(device)
        patches = self.y.series(q_y[:, None] - k_y) + self.x.series(q_x[:, None] - k_x)
        return nn.functional.pad(patches, (k_pos.num_prefix, 0, q_pos.num_prefix, 0))[None]


class Goat(Compose):
    """GOAT on a line: key_bias + spectral (arXiv 2601.15380; C4 settings R = 2, M = 8).

    Args:
        train_context, sink_rank: L_train, in tokens, and M of `.key_bias`.
        rank: R of `.spectral`.
        init: "seeded" starts near ALiBi; "uniform" starts at plain attention (the slope then has no
            gradient, see `KeyBias`).
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_context: int,
        rank: int = 2,
        sink_rank: int = 8,
        init: str = "seeded",
    ) -> None:
        super().__init__(
            key_bias=KeyBias(num_heads, train_context=train_context, rank=sink_rank, init=init),
            spectral=Spectral(num_heads, rank=rank, init=init),
        )


class Goat2d(Compose):
    """GOAT on a grid of patches: key_bias2d + spectral2d; 16 frequency pairs in all.

    Args:
        train_grid, rank, init, reach: of the spectral part, as in `Spectral2d`.
        sink_rank: M of `.key_bias`.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        train_grid: tuple[int, int] = (14, 14),
        rank: int = 8,
        sink_rank: int = 8,
        init: str = "seeded",
        reach: float = 1.0,
    ) -> None:
        super().__init__(
            key_bias=KeyBias2d(num_heads, rank=sink_rank),
            spectral=Spectral2d(
                num_heads, rank=rank, train_grid=train_grid, init=init, reach=reach
            ),
        )
