"""Rotations of queries and keys (RoPE): along a line of tokens, and over a grid of patches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_number, check_whole
from zoo.positions import Positions

# As transformers names them, but for "ntk": its "dynamic" with a fixed factor.
SCALINGS = ("none", "linear", "ntk", "yarn", "proportional")


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn column pairs (n, n + D/2) of x (B, H, T, D) by angle (1 or B, 1 or H, T, D/2), float64;
    result in x's dtype.

    Columns beyond the first D of a wider x stay as they are.
    """
    width = 2 * angle.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], angle), x[..., width:]], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos = angle.cos().to(wide)
    sin = angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Rotation(nn.Module):
    """A rotation of queries and keys, called as rotation(x, positions)."""

    def both(
        self, q: Tensor, q_positions: Positions, k: Tensor, k_positions: Positions
    ) -> tuple[Tensor, Tensor]:
        """Rotate q and k of one attention call, with the same random numbers where there are
        any."""
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
            released code has it; q and k times 0.1·ln factor + 1.
            "proportional": a `partial` rotation keeps the frequencies of the whole head, of which
            the slow pairs do not turn.
        factor: target length / training length, at least 1.
        partial: the share of columns that turn, the first of each head. D above is their number.
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
        tempers = {
            "attention_factor": attention_factor,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
        }
        _check_yarn(scaling, tempers, truncate)
        width = head_dim if scaling == "proportional" else int(head_dim * partial)
        if partial > 1 or width % 2 or not width:
            raise ValueError(
                f"partial={partial}: expected a share of 1 or less, "
                f"an even number of {head_dim} columns"
            )
        self.head_dim = width
        self.theta = theta
        self.train_context = train_context
        self.scaling = scaling
        self.factor = factor
        self.partial = partial
        self.truncate = truncate
        self.temperature = _yarn_temperature(factor, **tempers)

    def frequencies(self, device: torch.device | str | None = None) -> Tensor:
        """(D/2,) float64, after scaling."""
        columns = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        theta = self.theta
        if self.scaling == "ntk":
            theta *= self.factor ** (self.head_dim / max(self.head_dim - 2, 1))
        omega = theta ** -(columns / self.head_dim)
        if self.scaling == "proportional":
            turning = int(self.partial * self.head_dim // 2)
            omega[turning:] = 0
        if self.scaling in ("linear", "proportional"):
            return omega / self.factor
        if self.scaling == "yarn":
            kept = self._undivided(omega)
            return omega * kept + omega / self.factor * (1 - kept)
        return omega

    def _undivided(self, omega: Tensor) -> Tensor:
        """(D/2,) the share of each frequency that YaRN does not divide by the factor: 1 for fast
        pairs, 0 for slow ones, a ramp between them."""
        first = self._pair_of_turns(32)
        last = self._pair_of_turns(1)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, self.head_dim - 1)
        pairs = torch.arange(len(omega), dtype=omega.dtype, device=omega.device)
        ramp = (pairs - first) / max(last - first, 1e-3)
        return 1 - ramp.clamp(0, 1)

    def _pair_of_turns(self, turns: float) -> float:
        """The number of the pair, a fraction, that turns so often within the training context."""
        context = self.train_context or 1
        log_period = math.log(context / (2 * math.pi * turns))
        return self.head_dim * log_period / (2 * math.log(self.theta))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x (B, H, T, D), rotated by the positions of its T tokens."""
        index = positions.index(x.device).double()
        rotated = rotate(x, index[:, None, :, None] * self.frequencies(x.device))
        if self.scaling != "yarn":
            return rotated
        if x.shape[-1] == self.head_dim:
            return rotated * self.temperature
        tempered = rotated[..., : self.head_dim] * self.temperature
        return torch.cat([tempered, rotated[..., self.head_dim :]], dim=-1)


def _check_yarn(scaling: str, tempers: dict[str, float | None], truncate: bool) -> None:
    """ValueError for options of "yarn" that another scaling does not take, or that exclude each
    other."""
    present = {name for name, value in tempers.items() if value is not None}
    for name in tempers:
        if name in present:
            check_number(name, tempers[name], least=0)
    if scaling != "yarn" and (present or not truncate):
        raise ValueError(
            f"RoPE scaling {scaling!r} takes no {', '.join(tempers)} or truncate: 'yarn' does"
        )
    if present not in (set(), {"attention_factor"}, {"mscale", "mscale_all_dim"}):
        raise ValueError(
            "'yarn' takes attention_factor, or mscale and mscale_all_dim, or none of them"
        )


def _yarn_temperature(
    factor: float,
    *,
    attention_factor: float | None,
    mscale: float | None,
    mscale_all_dim: float | None,
) -> float:
    """The number that YaRN multiplies queries and keys by."""
    if attention_factor is not None:
        return attention_factor
    log = 0.1 * math.log(factor)
    scale = 1.0 if mscale is None else mscale
    all_dim_scale = mscale_all_dim or 0.0
    return (scale * log + 1) / (all_dim_scale * log + 1)


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
        if theta is None:
            theta = 100.0 if form == "axial" else 10.0
        check_number("theta", theta, above=1)
        self.theta = theta
        if form == "mixed":
            size = axis_frequencies(head_dim, self.theta).float()
            turn = torch.rand(num_heads, 1) * 2 * math.pi
            omega_y = torch.cat([size * turn.cos(), size * -turn.sin()], dim=-1)
            omega_x = torch.cat([size * turn.sin(), size * turn.cos()], dim=-1)
            # (2, H, D/2)
            self.omega = nn.Parameter(torch.stack([omega_y, omega_x]))

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x (B, H, T, D)."""
        row, column = positions.yx(x.device)
        row = row.double()[:, None]
        column = column.double()[:, None]
        if self.form == "mixed":
            omega_y, omega_x = self.omega.double()[:, :, None, :]
            angle = (row * omega_y + column * omega_x)[None]
        else:
            size = axis_frequencies(self.head_dim, self.theta, x.device)
            angle = torch.cat([row * size, column * size], dim=-1)[None, None]
        return rotate(x, _with_prefix(angle, positions))


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
        if self.training and self.rescale != 1:
            # Drawn on the device: nothing is read back.
            exponent = 2 * torch.rand((), dtype=torch.float64, device=q.device) - 1
            scale = (exponent * math.log(self.rescale)).exp()
        return self(q, q_positions, scale), self(k, k_positions, scale)

    def forward(self, x: Tensor, positions: Positions, scale: Tensor | float = 1.0) -> Tensor:
        """x (B, H, T, D), the coordinates of its patches times `scale`."""
        omega = 2 * math.pi * axis_frequencies(self.head_dim, self.theta, x.device)
        # `yx` is an error for a line, which has no shape.
        axes = positions.yx(x.device)
        sides = positions.shape or (1, 1)
        angles = []
        for index, side in zip(axes, sides, strict=True):
            coordinate = (2 * (index.double() + 0.5) / side - 1) * scale
            angles.append(coordinate[:, None] * omega)
        angle = torch.cat(angles, dim=-1)[None, None]
        return rotate(x, _with_prefix(angle, positions))


def _with_prefix(angle: Tensor, positions: Positions) -> Tensor:
    """Angles of all tokens (…, T, D/2) from those of the patches: 0 for prefix tokens."""
    return F.pad(angle, (0, 0, positions.num_prefix, 0))


def check_quarters(what: str, width: int) -> None:
    """ValueError unless a width is a multiple of 4, so that two axes have the same pairs."""
    if width % 4:
        raise ValueError(
            f"{what} splits the pairs between two axes: "
            f"expected a width that is a multiple of 4, got {width}"
        )


def axis_frequencies(width: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """(D/4,) float64 theta^(−4n/D): the frequencies of one axis of a grid."""
    columns = torch.arange(0, width, 4, dtype=torch.float64, device=device)
    return theta ** -(columns / width)
