"""Positions of tokens: a line of tokens, or a grid of patches with prefix tokens; and methods that
are not priors.

Positions are data, passed on every call. No module stores a length, so a longer text or a larger
image needs no resizing. These methods act on queries and keys (RoPE) or on the embedding
(sinusoidal, learned).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_flags, check_grid, check_number, check_whole


def document_starts(segments: Tensor) -> Tensor:
    """bool like the document ids `segments` (…, T): the first token of each run of equal ids."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return starts


def check_runs(rows: Tensor) -> None:
    """Raise ValueError where not all `rows`, bool, show one run of tokens: places of tokens behind
    a gap would count it.

    A compiled graph asserts it, as a RuntimeError.
    """
    message = (
        "attention_mask hides tokens between tokens that it shows, whose positions would count the gap: pad before the first "
        "token of a row (tokenizer.padding_side='left'), and read a further turn without its padding"
    )
    if torch.compiler.is_compiling():
        torch._assert_async(rows.all(), message)
    elif not rows.all():
        raise ValueError(message)


@dataclass(frozen=True)
class Positions:
    """Positions of the tokens of one attention axis. Make one with `line`, `documents` or `grid`.

    Attributes:
        length: number of tokens, prefix tokens included.
        offset: row index of the first token; only a line has one.
        within: (B, T) position of each token inside its document, or None if that is the row index.
        shape: (height, width) of the patch grid, or None for a line.
        num_prefix: CLS and register tokens before the patches. They are not on the grid.
    """

    length: int
    offset: int = 0
    within: Tensor | None = None
    shape: tuple[int, int] | None = None
    num_prefix: int = 0

    @staticmethod
    def line(length: int, *, offset: int = 0) -> Positions:
        """`length` tokens in a row, the first at position `offset`."""
        check_whole("length", length, 1)
        check_whole("offset", offset, 0)
        return Positions(length, offset)

    @staticmethod
    def documents(segments: Tensor, *, offset: int = 0) -> Positions:
        """Positions that restart at 0 wherever the document id in `segments` (B, T) changes along a
        row.

        Documents are runs: an id does not recur after another one. `offset` is the row index of the
        first column; it does not shift the restarted positions.
        """
        if not isinstance(segments, Tensor) or segments.ndim != 2:
            got = (
                f"shape {tuple(segments.shape)}" if isinstance(segments, Tensor) else repr(segments)
            )
            raise ValueError(f"segments must be a tensor (B, T) of document ids, got {got}")
        if segments.is_floating_point() or segments.dtype == torch.bool:
            raise ValueError(f"segments must be whole numbers, got {segments.dtype}")
        check_whole("offset", offset, 0)
        index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
        first = torch.where(document_starts(segments), index, 0).cummax(dim=1).values
        return Positions(segments.shape[1], offset, within=index - first)

    @staticmethod
    def grid(height: int, width: int, *, num_prefix: int = 0) -> Positions:
        """`num_prefix` prefix tokens, then `height`·`width` patches in row-major order."""
        check_whole("height", height, 1)
        check_whole("width", width, 1)
        check_whole("num_prefix", num_prefix, 0)
        return Positions(num_prefix + height * width, shape=(height, width), num_prefix=num_prefix)

    def tail(self, count: int) -> Positions:
        """The last `count` positions of a line."""
        check_whole("count", count, 1)
        return self.slice(self.length - count, self.length)

    def slice(self, start: int, stop: int) -> Positions:
        """Positions [start, stop) of a line's, counted from its first."""
        if self.is_grid or not 0 <= start < stop <= self.length:
            raise ValueError(
                f"positions [{start}, {stop}) of {self.length}: expected some of them, of a line"
            )
        within = None if self.within is None else self.within[:, start:stop]
        return Positions(stop - start, self.offset + start, within=within)

    @property
    def is_grid(self) -> bool:
        return self.shape is not None

    def row_index(self, device: torch.device | str | None = None) -> Tensor:
        """(T,) int64 index in the row, as used by relative tables."""
        return torch.arange(self.offset, self.offset + self.length, device=device)

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """(1 or B, T) int64 position of each token inside its document, as used by absolute
        terms."""
        if self.within is not None:
            return self.within.to(device) if device is not None else self.within
        return self.row_index(device)[None]

    def index_below(self, size: int, what: str, device: torch.device | str | None) -> Tensor:
        """`index`; ValueError where a position is `size` or more, beyond `what`."""
        index = self.index(device)
        last = self.offset + self.length - 1
        if last >= size and self.within is not None:
            last = int(
                index.max()
            )  # positions restart in documents; reading them back synchronises
        if last >= size:
            raise ValueError(f"{what}, got position {last}")
        return index

    def yx(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, both (height·width,) int64, prefix tokens left out.

        Raises:
            ValueError: for a line.
        """
        if self.shape is None:
            raise ValueError(
                "a line of tokens has no grid; make the positions with Positions.grid(height, width)"
            )
        height, width = self.shape
        x = torch.arange(width, device=device).expand(height, -1)
        return torch.arange(height, device=device)[:, None].expand(-1, width).flatten(), x.flatten()


def slices(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of `size`, the last one shorter: positions, a few at a time."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


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
        _check_quarters("2-D RoPE", head_dim)
        if form not in ("axial", "mixed"):
            raise ValueError(f"unknown form {form!r} of 2-D RoPE; known: axial, mixed")
        self.form = form
        self.head_dim = head_dim
        self.theta = theta if theta is not None else 100.0 if form == "axial" else 10.0
        check_number("theta", self.theta, above=1)
        if form == "mixed":
            size = _quarters(head_dim, self.theta).float()
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
            size = _quarters(self.head_dim, self.theta, x.device)
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
        _check_quarters("2-D RoPE", head_dim)
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
        omega = 2 * math.pi * _quarters(self.head_dim, self.theta, x.device)
        sides = positions.shape or (1, 1)  # of a line `yx` is an error
        places = zip(positions.yx(x.device), sides, strict=True)
        y_x = [(2 * (at.double() + 0.5) / side - 1) * scale for at, side in places]
        angle = torch.cat([at[:, None] * omega for at in y_x], dim=-1)[None, None]
        return rotate(x, F.pad(angle, (0, 0, positions.num_prefix, 0)))


def _check_quarters(what: str, width: int) -> None:
    if width % 4:
        raise ValueError(
            f"{what} splits the pairs between two axes: a width that is a multiple of 4, got {width}"
        )


def _quarters(width: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """(D/4,) float64 theta^(−4n/D)."""
    return theta ** -(torch.arange(0, width, 4, dtype=torch.float64, device=device) / width)


class Sinusoidal(nn.Module):
    """Fixed sines and cosines added to the embedding (Vaswani et al. 2017, §3.5).

    Args:
        dim: C, even.
        theta: the slowest frequency is about 1/theta.
        columns: "halves": columns n and n + C/2 hold sin and cos of position·theta^(−2n/C).
            "alternating": column c holds the sine (c even) or the cosine (c odd) of
            position·theta^(−c/C), as BAM's released code has it: a cosine's frequency is between
            those of two sines.
    """

    def __init__(self, dim: int, *, theta: float = 10000.0, columns: str = "halves") -> None:
        super().__init__()
        check_number("theta", theta, above=1)
        if dim % 2:
            raise ValueError(f"sinusoidal positions need an even width, got {dim}")
        if columns not in ("halves", "alternating"):
            raise ValueError(
                f"unknown columns {columns!r} of sinusoidal positions; known: halves, alternating"
            )
        self.dim = dim
        self.theta = theta
        self.columns = columns

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1 or B, T, C) in the dtype of `like`."""
        step = 2 if self.columns == "halves" else 1
        omega = self.theta ** -(
            torch.arange(0, self.dim, step, dtype=torch.float64, device=like.device) / self.dim
        )
        angle = positions.index(like.device).double()[..., None] * omega
        if self.columns == "alternating":
            return (
                torch.stack([angle[..., ::2].sin(), angle[..., 1::2].cos()], dim=-1)
                .flatten(-2)
                .to(like.dtype)
            )
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(like.dtype)


class Sinusoidal2d(nn.Module):
    """Fixed sines and cosines of row and column added to the patches, nothing on prefix tokens: the
    quarters of the columns hold sin y, cos y, sin x, cos x at the angles
    coordinate·10000^(−4n/C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        _check_quarters("a grid's sinusoidal position", dim)
        self.dim = dim

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1, T, C) in the dtype of `like`."""
        omega = _quarters(self.dim, 10000.0, like.device)
        y, x = (c.double()[:, None] * omega for c in positions.yx(like.device))
        patches = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()], dim=-1)
        return F.pad(patches, (0, 0, positions.num_prefix, 0))[None].to(like.dtype)


class Learned(nn.Module):
    """One learned vector per position, added to the embedding; a position beyond the training
    context is a ValueError."""

    def __init__(self, dim: int, *, train_context: int) -> None:
        super().__init__()
        check_whole("train_context", train_context, 1)
        self.weight = nn.Parameter(torch.randn(train_context, dim) * 0.02)

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1 or B, T, C) in the dtype of `like`."""
        end = f"learned positions, unlike other methods, end at {len(self.weight)} tokens"
        return self.weight[positions.index_below(len(self.weight), end, self.weight.device)].to(
            like.dtype
        )


class Learned2d(nn.Module):
    """One learned vector per patch of the training grid, resized to the present grid as timm's
    `resample_abs_pos_embed`
    does: bicubic with antialiasing, which takes another cubic than without (a = −1/2). None on
    prefix tokens."""

    def __init__(self, dim: int, *, train_grid: tuple[int, int]) -> None:
        super().__init__()
        check_grid("train_grid", train_grid)
        self.weight = nn.Parameter(torch.randn(1, dim, *train_grid) * 0.02)

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1, T, C) in the dtype of `like`."""
        if positions.shape is None:
            raise ValueError("a learned grid needs the positions of a grid of patches")
        weight: Tensor = self.weight
        if tuple(weight.shape[-2:]) != positions.shape:
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight = F.interpolate(
                weight.to(wide), size=positions.shape, mode="bicubic", antialias=True
            )
        return F.pad(weight.flatten(2).transpose(1, 2), (0, 0, positions.num_prefix, 0)).to(
            like.dtype
        )
