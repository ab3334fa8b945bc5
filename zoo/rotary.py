"""Rotations of queries and keys (RoPE): along a line of tokens, and over a grid of patches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_number, check_whole
from zoo.positions import Positions

# As transformers names them, but for "ntk", its "dynamic" with a factor that is given.
SCALINGS = ("none", "linear", "ntk", "yarn", "proportional")


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn column pairs (n, n + D/2) of x (B, H, T, D) by angle (1 or B, 1 or H, T, D/2), float64;
    result in x's dtype.

    Columns beyond the first D of a wider x stay as they are.
    """
    if (width := 2 * angle.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], angle), x[..., width:]], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos = angle.cos().to(wide)
    sin = angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Rotation(nn.Module):
    """What turns queries and keys, called as rotation(x, positions)."""

    def both(
        self, q: Tensor, q_positions: Positions, k: Tensor, k_positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """q and k of one attention call, turned alike: their products depend on where they are and
        on nothing that is drawn for one of them."""
        return self(q, q_positions), self(k, k_positions)


class Rotary(Rotation):
    """RoPE (arXiv 2104.09864): column pair n of q and k turns by position·ω_n, ω_n = theta^(−2n/D),
    angles formed in float64.

    Args:
        head_dim: D, even.
        theta: 10000 as published, 500000 for Llama 3.
        train_context: L, tokens seen in training, which "yarn" needs.
        scaling: how positions beyond L are read; an evaluation-time option.
            "linear": ω/factor (arXiv 2306.15595).
            "ntk": theta·factor^(D/(D−2)) for theta.
            "yarn" (arXiv 2309.00071): ω/factor for pairs that turn less than once within L, ω for
            those that turn more than 32 times, between them a ramp over the pairs' numbers, as all
            released code has it; q and k times 0.1·ln factor + 1. "proportional": a `partial`
            rotation keeps the frequencies of the whole head, of which the slow pairs do not turn.
        factor: target length / training length, at least 1.
        partial: the share of columns that turn, the first of each head; D is their number in all
            that is said here.
        attention_factor, mscale, mscale_all_dim, truncate: of "yarn", as in transformers: q and k
            times attention_factor; or times (0.1·mscale·ln factor + 1) / (0.1·mscale_all_dim·ln
            factor + 1); False leaves the ramp's ends unrounded.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        train_context: int | None = None,
        scaling: str = "none",
        factor: float = 1.0,
        partial: float = 1.0,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> None:
        super().__init__()
        check_number("theta", theta, above=1)
        check_number("factor", factor, least=1)
        check_number("partial", partial, above=0)
        check_flags(truncate=truncate)
        if train_context is not None:
            check_whole("train_context", train_context, 1)
        if head_dim % 2:
            raise ValueError(
                f"RoPE turns pairs of columns: the head width must be even, got {head_dim}"
            )
        if scaling not in SCALINGS:
            raise ValueError(f"unknown RoPE scaling {scaling!r}; known: {', '.join(SCALINGS)}")
        if scaling == "none" and factor != 1:
            raise ValueError(
                f"RoPE scaling 'none' does not take factor={factor}; known: {', '.join(SCALINGS)}"
            )
        if scaling == "yarn" and train_context is None:
            raise ValueError(
                "RoPE scaling 'yarn' needs train_context, the number of tokens seen in training"
            )
        of_yarn = dict(
            attention_factor=attention_factor, mscale=mscale, mscale_all_dim=mscale_all_dim
        )
        for name, value in of_yarn.items():
            if value is not None:
                check_number(name, value, least=0)
        if scaling != "yarn" and (
            not truncate or any(value is not None for value in of_yarn.values())
        ):
            raise ValueError(
                f"RoPE scaling {scaling!r} takes no {', '.join(of_yarn)} or truncate: 'yarn' does"
            )
        if (mscale is None) != (mscale_all_dim is None) or (
            mscale is not None and attention_factor is not None
        ):
            raise ValueError(
                "'yarn' takes attention_factor, or mscale and mscale_all_dim, or none of them"
            )
        width = head_dim if scaling == "proportional" else int(head_dim * partial)
        if partial > 1 or width % 2 or not width:
            raise ValueError(
                f"partial={partial}: expected a share of 1 or less, an even number of {head_dim} columns"
            )
        self.head_dim = width
        self.theta = theta
        self.train_context = train_context
        self.scaling = scaling
        self.factor = factor
        self.partial = partial
        self.truncate = truncate
        log = 0.1 * math.log(factor)
        tempered = (1.0 if mscale is None else mscale) * log + 1
        divided = (mscale_all_dim or 0.0) * log + 1
        self.temperature = tempered / divided if attention_factor is None else attention_factor

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """(D/2,) float64, after scaling."""
        pairs = (
            torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        )
        theta = self.theta
        if self.scaling == "ntk":
            theta *= self.factor ** (self.head_dim / max(self.head_dim - 2, 1))
        omega = theta**-pairs
        if self.scaling == "proportional":
            omega[int(self.partial * self.head_dim // 2) :] = 0
        if self.scaling in ("linear", "proportional"):
            return omega / self.factor
        if self.scaling == "yarn":

            def column(turns: float) -> float:
                context = self.train_context or 1
                return (
                    self.head_dim
                    * math.log(context / (2 * math.pi * turns))
                    / (2 * math.log(self.theta))
                )

            first, last = column(32), column(1)
            if self.truncate:
                first = math.floor(first)
                last = math.ceil(last)
            first = max(first, 0)
            last = min(last, self.head_dim - 1)
            steps = torch.arange(len(omega), dtype=omega.dtype, device=omega.device)
            whole = 1 - ((steps - first) / max(last - first, 1e-3)).clamp(
                0, 1
            )  # the share that is not divided
            return omega * whole + omega / self.factor * (1 - whole)
        return omega

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x (B, H, T, D), rotated by the positions of its T tokens."""
        turned = rotate(
            x, positions.index(x.device).double()[:, None, :, None] * self.frequencies(x.device)
        )
        if self.scaling != "yarn":
            return turned
        if x.shape[-1] == self.head_dim:
            return turned * self.temperature
        return torch.cat(
            [turned[..., : self.head_dim] * self.temperature, turned[..., self.head_dim :]], dim=-1
        )


class Rotary2d(Rotation):
    """RoPE on a grid of patches; prefix tokens are not turned.

    Both forms (arXiv 2403.13298) have D/4 sizes of frequency, theta^(−4n/D). "axial": each turns
    one pair with y and one with x. "mixed": the frequencies are learned per head, angle = y·omega_y
    + x·omega_x; they start as the axial ones, both axes turned together by a random angle per head.

    Args:
        head_dim: D, a multiple of 4.
        form: "axial" or "mixed".
        theta: the slowest frequency is about 1/theta; None: 100 for axial and 10 for mixed, as
            published.
    """

    def __init__(
        self, head_dim: int, *, num_heads: int, form: str = "axial", theta: float | None = None
    ) -> None:
        super().__init__()
        check_quarters("2-D RoPE", head_dim)
        if form not in ("axial", "mixed"):
            raise ValueError(f"unknown form {form!r} of 2-D RoPE; known: axial, mixed")
        self.form = form
        self.head_dim = head_dim
        self.theta = theta if theta is not None else 100.0 if form == "axial" else 10.0
        check_number("theta", self.theta, above=1)
        if form == "mixed":
            size = quarters(head_dim, self.theta).float()
            turn = torch.rand(num_heads, 1) * 2 * math.pi
            omega_y = torch.cat([size * turn.cos(), size * -turn.sin()], dim=-1)
            omega_x = torch.cat([size * turn.sin(), size * turn.cos()], dim=-1)
            self.omega = nn.Parameter(torch.stack([omega_y, omega_x]))  # (2, H, D/2)

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x (B, H, T, D)."""
        at_y, at_x = (c.double()[:, None] for c in positions.yx(x.device))
        if self.form == "mixed":
            omega_y, omega_x = self.omega.double()[:, :, None, :]
            angle = (at_y * omega_y + at_x * omega_x)[None]
        else:
            size = quarters(self.head_dim, self.theta, x.device)
            angle = torch.cat([at_y * size, at_x * size], dim=-1)[None, None]
        return rotate(x, F.pad(angle, (0, 0, positions.num_prefix, 0)))


class NormalisedRotary2d(Rotation):
    """RoPE of DINOv3 (arXiv 2508.10104): coordinates in −1…1 whatever the grid, scaled at random in
    training.

    angle = 2π·c·theta^(−4n/D), n = 0 … D/4 − 1, a pair with y and one with x each; c = 2·(p
    + 1/2)/side − 1, p from 0. In training mode every attention call draws c ← c·r, the same for q
    and k, ln r uniform in ±ln rescale. Prefix tokens are not turned.

    Args:
        head_dim: D, a multiple of 4.
        theta: longest period / shortest, 100 as released.
        rescale: 1 draws nothing; DINOv3 is trained with 2.
    """

    def __init__(self, head_dim: int, *, theta: float = 100.0, rescale: float = 2.0) -> None:
        super().__init__()
        check_quarters("2-D RoPE", head_dim)
        check_number("theta", theta, above=1)
        check_number("rescale", rescale, least=1)
        self.head_dim = head_dim
        self.theta = theta
        self.rescale = rescale

    def both(
        self, q: Tensor, q_positions: Positions, k: Tensor, k_positions: Positions
    ) -> tuple[Tensor, Tensor]:
        scale: Tensor | float = 1.0
        if self.training and self.rescale != 1:  # drawn on the device: nothing is read back
            drawn = 2 * torch.rand((), dtype=torch.float64, device=q.device) - 1
            scale = (drawn * math.log(self.rescale)).exp()
        return self(q, q_positions, scale), self(k, k_positions, scale)

    def forward(self, x: Tensor, positions: Positions, scale: Tensor | float = 1.0) -> Tensor:
        """x (B, H, T, D), the coordinates of its patches times `scale`."""
        omega = 2 * math.pi * quarters(self.head_dim, self.theta, x.device)
        sides = positions.shape or (1, 1)  # of a line `yx` is an error
        places = zip(positions.yx(x.device), sides, strict=True)
        y_x = [(2 * (at.double() + 0.5) / side - 1) * scale for at, side in places]
        angle = torch.cat([at[:, None] * omega for at in y_x], dim=-1)[None, None]
        return rotate(x, F.pad(angle, (0, 0, positions.num_prefix, 0)))


def check_quarters(what: str, width: int) -> None:
    if width % 4:
        raise ValueError(
            f"{what} splits the pairs between two axes: a width that is a multiple of 4, got {width}"
        )


def quarters(width: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """(D/4,) float64 theta^(−4n/D)."""
    return theta ** -(torch.arange(0, width, 4, dtype=torch.float64, device=device) / width)
