"""Positions of tokens: a line of tokens, or a grid of patches with prefix tokens; and methods that are not priors.

Positions are data, passed on every call. No module stores a length, so a longer text or a larger image needs no resizing.
These methods act on queries and keys (RoPE) or on the embedding (sinusoidal, learned).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_grid, check_number, check_whole, nearest

__all__ = [
    "Learned",
    "Learned2d",
    "NormalisedRotary2d",
    "Positions",
    "Rotary",
    "Rotary2d",
    "Rotation",
    "Sinusoidal",
    "Sinusoidal2d",
    "check_runs",
    "document_starts",
    "slices",
]


def document_starts(segments: Tensor) -> Tensor:
    """bool like the document ids `segments` (…, T): the first token of each run of equal ids."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return starts


def check_runs(rows: Tensor) -> None:
    """Raise ValueError where not all `rows`, bool, show one run of tokens: places of tokens behind a gap would count it.

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
        """Positions that restart at 0 wherever the document id in `segments` (B, T) changes along a row.

        Documents are runs: an id does not recur after another one. `offset` is the row index of the first column; it does not
        shift the restarted positions.
        """
        if not isinstance(segments, Tensor) or segments.ndim != 2:
            got = f"shape {tuple(segments.shape)}" if isinstance(segments, Tensor) else repr(segments)
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
        if self.is_grid or count > self.length:
            raise ValueError(f"the last {count} of {self.length} positions: expected 1 to all, of a line")
        return self.slice(self.length - count, self.length)

    def slice(self, start: int, stop: int) -> Positions:
        """Positions [start, stop) of a line's, counted from its first."""
        if self.is_grid or not 0 <= start < stop <= self.length:
            raise ValueError(f"positions [{start}, {stop}) of {self.length}: expected some of them, of a line")
        within = None if self.within is None else self.within[:, start:stop]
        return Positions(stop - start, self.offset + start, within=within)

    @property
    def is_grid(self) -> bool:
        return self.shape is not None

    def row_index(self, device: torch.device | str | None = None) -> Tensor:
        """(T,) int64 index in the row, as used by relative tables."""
        return torch.arange(self.offset, self.offset + self.length, device=device)

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """(1 or B, T) int64 position of each token inside its document, as used by absolute terms."""
        if self.within is not None:
            return self.within.to(device) if device is not None else self.within
        return self.row_index(device)[None]

    def yx(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Row and column of each patch, both (height·width,) int64, prefix tokens left out.

        Raises:
            ValueError: for a line.
        """
        if self.shape is None:
            raise ValueError("a line of tokens has no grid; make the positions with Positions.grid(height, width)")
        height, width = self.shape
        y = torch.arange(height, device=device)[:, None].expand(-1, width)
        x = torch.arange(width, device=device).expand(height, -1)
        return y.flatten(), x.flatten()


def slices(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of `size`, the last one shorter: positions, a few at a time."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# As transformers names them; "ntk" is "dynamic" with the factor given instead of read off the length.
SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn")
UNLIMITED = ("none", "linear", "ntk")  # those that need no training context, and those of grids


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn column pairs (n, n + D/2) of x (B, H, T, D) by angle (1 or B, 1 or H, T, D/2), float64; result in x's dtype.

    Columns beyond the first D of a wider x stay as they are.
    """
    if (width := 2 * angle.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], angle), x[..., width:]], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class Rotation(nn.Module):
    """What turns queries and keys, called as rotation(x, positions)."""

    def both(
        self, q: Tensor, q_positions: Positions, k: Tensor, k_positions: Positions, **line: int
    ) -> tuple[Tensor, Tensor]:
        """q and k of one attention call, turned alike: their products depend on where they are and on nothing that is drawn for
        one of them."""
        return self(q, q_positions, **line), self(k, k_positions, **line)


class Rotary(Rotation):
    """RoPE (arXiv 2104.09864): column pair n of q and k turns by position·ω_n, ω_n = theta^(−2n/D), angles formed in float64.

    Args:
        head_dim: D, even.
        theta: 10000 as published, 500000 for Llama 3.
        train_context: L, tokens seen in training, which all scalings but "linear" and "ntk" need.
        scaling: how positions beyond L are read; an evaluation-time option, of the names that transformers has; None: "none".
            "linear": ω/factor (arXiv 2306.15595).
            "ntk": theta·factor^(D/(D−2)) for theta.
            "dynamic": theta·(factor·T/L − factor + 1)^(D/(D−2)) for theta, T the tokens read so far and at least L.
            "yarn" (arXiv 2309.00071): ω/factor for pairs slower than `slow`, ω for those faster than `fast`, between them a
            ramp over the pairs' numbers, as all released code has it; q and k times 0.1·ln factor + 1.
        factor: target length / training length, at least 1.
        slow, fast: turns within L, as published. At 128 tokens the fastest pair makes 20 turns: use less.

    With "dynamic" a row's logits depend on its length, and keys in a KV cache keep the angles they were read at.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        train_context: int | None = None,
        scaling: str | None = "none",
        factor: float = 1.0,
        slow: float = 1.0,
        fast: float = 32.0,
    ) -> None:
        super().__init__()
        scaling = "none" if scaling is None else scaling
        check_number("theta", theta, above=1)
        check_number("factor", factor, least=1)
        if train_context is not None:
            check_whole("train_context", train_context, 1 if scaling in UNLIMITED else 2)
        if head_dim % 2:
            raise ValueError(f"RoPE turns pairs of columns: the head width must be even, got {head_dim}")
        if scaling not in SCALINGS:
            raise ValueError(f"unknown RoPE scaling {scaling!r}; known: {', '.join(SCALINGS)}")
        if scaling == "none" and factor != 1:
            raise ValueError(f"RoPE scaling 'none' does not take factor={factor}; known: {', '.join(SCALINGS)}")
        if scaling not in UNLIMITED and train_context is None:
            raise ValueError(f"RoPE scaling {scaling!r} needs train_context, the number of tokens seen in training")
        check_number("slow", slow, above=0)
        check_number("fast", fast, above=0)
        if slow >= fast:
            raise ValueError(f"slow and fast must be two increasing positive numbers of turns, got {slow} and {fast}")
        self.head_dim, self.theta, self.train_context = head_dim, theta, train_context
        self.scaling, self.factor, self.slow, self.fast = scaling, factor, slow, fast

    def frequencies(self, device: torch.device | str | None = None, *, length: int = 0) -> Tensor:
        """(D/2,) float64, after scaling; `length`, in tokens, is read by "dynamic" alone."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        grown = self.head_dim / max(self.head_dim - 2, 1)
        context, theta = self.train_context or 0, self.theta
        if self.scaling == "ntk":
            theta *= self.factor**grown
        elif self.scaling == "dynamic":
            theta *= (self.factor * max(length, context) / context - (self.factor - 1)) ** grown
        omega = theta**-pairs
        if self.scaling == "linear":
            return omega / self.factor
        if self.scaling == "yarn":

            def column(turns: float) -> float:
                return self.head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(self.theta))

            first, last = max(math.floor(column(self.fast)), 0), min(math.ceil(column(self.slow)), self.head_dim - 1)
            steps = torch.arange(len(omega), dtype=omega.dtype, device=omega.device)
            whole = 1 - ((steps - first) / max(last - first, 1e-3)).clamp(0, 1)  # the share that is not divided
            return omega * whole + omega / self.factor * (1 - whole)
        return omega

    def forward(self, x: Tensor, positions: Positions, *, length: int | None = None) -> Tensor:
        """x (B, H, T, D), rotated by the positions of its T tokens; length: tokens read so far, if those are not the last."""
        omega = self.frequencies(x.device, length=length or positions.offset + positions.length)
        turned = rotate(x, positions.index(x.device).double()[:, None, :, None] * omega)
        return turned * (0.1 * math.log(self.factor) + 1) if self.scaling == "yarn" else turned


class Rotary2d(Rotation):
    """RoPE on a grid of patches; prefix tokens are not turned.

    Both forms (arXiv 2403.13298) have D/4 sizes of frequency, theta^(−4n/D). "axial": each turns one pair with y and one with
    x. "mixed": the frequencies are learned per head, angle = y·omega_y + x·omega_x; they start as the axial ones, both axes
    turned together by a random angle per head.

    Args:
        head_dim: D, a multiple of 4.
        num_heads: H.
        form: "axial" or "mixed".
        theta: the slowest frequency is about 1/theta; None: 100 for axial and 10 for mixed, as published.
        scaling: how patches beyond the training grid are read, each axis by its own factor; an evaluation-time option; None:
            "none".
            "linear": coordinates / factor, position interpolation (arXiv 2306.15595).
            "ntk": theta·factor^(D/(D−4)) for theta, so that the slowest pair turns as far as in training and the fastest
            as fast; of "axial" alone.
        factor: target side / training side, at least 1; None: of the grid that is read and `train_grid`.
        train_grid: (height, width) in patches, which a factor of None needs.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        num_heads: int,
        form: str = "axial",
        theta: float | None = None,
        scaling: str | None = "none",
        factor: float | None = None,
        train_grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        scaling = "none" if scaling is None else scaling
        if head_dim % 4:
            raise ValueError(f"2-D RoPE splits the pairs between two axes: head width a multiple of 4, got {head_dim}")
        if form not in ("axial", "mixed"):
            raise ValueError(f"unknown form {form!r} of 2-D RoPE; known: axial, mixed")
        if scaling not in UNLIMITED:
            raise ValueError(f"scaling={scaling!r} of 2-D RoPE: {nearest(str(scaling), UNLIMITED)}")
        if scaling == "ntk" and (form != "axial" or head_dim == 4):
            raise ValueError(
                "scaling='ntk' of 2-D RoPE changes theta: expected form='axial' and a head width of 8 or more"
            )
        if factor is not None:
            check_number("factor", factor, least=1)
        if train_grid is not None:
            check_grid("train_grid", train_grid)
        if scaling == "none" and factor is not None:
            raise ValueError(f"factor={factor} of 2-D RoPE: expected none without scaling='linear' or 'ntk'")
        if scaling != "none" and factor is None and train_grid is None:
            raise ValueError(f"scaling={scaling!r} of 2-D RoPE needs a factor, or train_grid to read it off the grid")
        self.form, self.head_dim = form, head_dim
        self.scaling, self.factor, self.train_grid = scaling, factor, train_grid
        self.theta = theta if theta is not None else 100.0 if form == "axial" else 10.0
        check_number("theta", self.theta, above=1)
        if form == "mixed":
            size = self._sizes(None).float()
            turn = torch.rand(num_heads, 1) * 2 * math.pi
            omega_y = torch.cat([size * turn.cos(), size * -turn.sin()], dim=-1)
            omega_x = torch.cat([size * turn.sin(), size * turn.cos()], dim=-1)
            self.omega = nn.Parameter(torch.stack([omega_y, omega_x]))  # (2, H, D/2)

    def _sizes(self, device: torch.device | None, factor: float = 1.0) -> Tensor:
        """(D/4,) float64; factor: by which an axis is longer, where theta follows it."""
        grown = self.head_dim / max(self.head_dim - 4, 1)
        theta = self.theta if factor == 1.0 else self.theta * factor**grown
        return theta ** -(torch.arange(0, self.head_dim, 4, dtype=torch.float64, device=device) / self.head_dim)

    def _factors(self, positions: Positions) -> tuple[float, float]:
        """By which rows and columns are more than in training."""
        if self.scaling == "none":
            return 1.0, 1.0
        if self.factor is not None:
            return self.factor, self.factor
        assert self.train_grid is not None and positions.shape is not None
        down, across = (max(1.0, now / then) for now, then in zip(positions.shape, self.train_grid, strict=True))
        return down, across

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """x (B, H, T, D)."""
        at_y, at_x = (c.double()[:, None] for c in positions.yx(x.device))
        down, across = self._factors(positions)
        if self.scaling == "linear":
            at_y, at_x = at_y / down, at_x / across
        if self.form == "mixed":
            omega_y, omega_x = self.omega.double()[:, :, None, :]
            angle = (at_y * omega_y + at_x * omega_x)[None]
        else:
            size_y, size_x = (self._sizes(x.device, f if self.scaling == "ntk" else 1.0) for f in (down, across))
            angle = torch.cat([at_y * size_y, at_x * size_x], dim=-1)[None, None]
        return rotate(x, F.pad(angle, (0, 0, positions.num_prefix, 0)))


class NormalisedRotary2d(Rotation):
    """RoPE of DINOv3 (arXiv 2508.10104): coordinates in −1…1 whatever the grid, and in training a box of random size.

    angle = 2π·c·theta^(−4n/D), n = 0 … D/4 − 1, a pair with y and one with x each; c = 2·(p + 1/2)/side − 1, p from 0. In
    training mode every attention call draws c ← (c + s)·j·r, the same for q and k, s uniform in ±shift and ln j in ±ln jitter
    for each axis, ln r uniform in ±ln rescale for both. Prefix tokens are not turned.

    Args:
        head_dim: D, a multiple of 4.
        theta: longest period / shortest, 100 as released.
        shift, jitter, rescale: 0, 1 and 1 draw nothing; DINOv3 is trained with a rescale of 2.
    """

    def __init__(
        self, head_dim: int, *, theta: float = 100.0, shift: float = 0.0, jitter: float = 1.0, rescale: float = 2.0
    ) -> None:
        super().__init__()
        if head_dim % 4:
            raise ValueError(f"2-D RoPE splits the pairs between two axes: head width a multiple of 4, got {head_dim}")
        check_number("theta", theta, above=1)
        check_number("shift", shift, least=0)
        check_number("jitter", jitter, least=1)
        check_number("rescale", rescale, least=1)
        self.head_dim, self.theta, self.shift, self.jitter, self.rescale = head_dim, theta, shift, jitter, rescale

    def box(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor] | None:
        """(2,) shift and (2,) size of y and x, drawn for one attention call in training; None outside it."""
        if not self.training or (self.shift, self.jitter, self.rescale) == (0, 1, 1):
            return None
        drawn = 2 * torch.rand(5, dtype=torch.float64, device=device) - 1  # on the device: nothing is read back
        return self.shift * drawn[:2], (drawn[2:4] * math.log(self.jitter) + drawn[4] * math.log(self.rescale)).exp()

    def coordinates(
        self,
        positions: Positions,
        device: torch.device | str | None = None,
        box: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """y and x of the patches, (height·width,) float64 each, in a box that was drawn or −1…1."""
        if positions.shape is None:
            raise ValueError("normalised 2-D RoPE needs the positions of a grid of patches")
        y, x = (
            2 * (at.double() + 0.5) / side - 1 for at, side in zip(positions.yx(device), positions.shape, strict=True)
        )
        if box is None:
            return y, x
        shift, size = box
        return (y + shift[0]) * size[0], (x + shift[1]) * size[1]

    def both(
        self, q: Tensor, q_positions: Positions, k: Tensor, k_positions: Positions, **line: int
    ) -> tuple[Tensor, Tensor]:
        box = self.box(q.device)
        return self(q, q_positions, box), self(k, k_positions, box)

    def forward(self, x: Tensor, positions: Positions, box: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x (B, H, T, D), its patches in a box of `box`; without one as they are, in training too."""
        omega = torch.arange(0, self.head_dim, 4, dtype=torch.float64, device=x.device) / self.head_dim
        omega = 2 * math.pi * self.theta**-omega
        at_y, at_x = (c[:, None] * omega for c in self.coordinates(positions, x.device, box))
        angle = torch.cat([at_y, at_x], dim=-1)[None, None]
        return rotate(x, F.pad(angle, (0, 0, positions.num_prefix, 0)))


class Sinusoidal(nn.Module):
    """Fixed sines and cosines added to the embedding (Vaswani et al. 2017, §3.5).

    Args:
        dim: C, even.
        theta: the slowest frequency is about 1/theta.
        columns: "halves": columns n and n + C/2 hold sin and cos of position·theta^(−2n/C). "alternating": column c holds the
            sine (c even) or the cosine (c odd) of position·theta^(−c/C), as BAM's released code has it: a cosine's frequency
            is between those of two sines.
    """

    def __init__(self, dim: int, *, theta: float = 10000.0, columns: str = "halves") -> None:
        super().__init__()
        check_number("theta", theta, above=1)
        if dim % 2:
            raise ValueError(f"sinusoidal positions need an even width, got {dim}")
        if columns not in ("halves", "alternating"):
            raise ValueError(f"unknown columns {columns!r} of sinusoidal positions; known: halves, alternating")
        self.dim, self.theta, self.columns = dim, theta, columns

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1 or B, T, C) in the dtype of `like`."""
        step = 2 if self.columns == "halves" else 1
        omega = self.theta ** -(torch.arange(0, self.dim, step, dtype=torch.float64, device=like.device) / self.dim)
        angle = positions.index(like.device).double()[..., None] * omega
        if self.columns == "alternating":
            return torch.stack([angle[..., ::2].sin(), angle[..., 1::2].cos()], dim=-1).flatten(-2).to(like.dtype)
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(like.dtype)


class Sinusoidal2d(nn.Module):
    """Fixed sines and cosines of row and column added to the patches, nothing on prefix tokens: the quarters of the columns
    hold sin y, cos y, sin x, cos x at the angles coordinate·10000^(−4n/C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(f"sinusoidal positions of a grid need a width that is a multiple of 4, got {dim}")
        self.dim = dim

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1, T, C) in the dtype of `like`."""
        omega = 10000.0 ** -(torch.arange(0, self.dim, 4, dtype=torch.float64, device=like.device) / self.dim)
        y, x = (c.double()[:, None] * omega for c in positions.yx(like.device))
        patches = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()], dim=-1)
        return F.pad(patches, (0, 0, positions.num_prefix, 0))[None].to(like.dtype)


class Learned(nn.Module):
    """One learned vector per position, added to the embedding; it ends at the training context.

    Raises:
        ValueError: for a position beyond the training context.
    """

    def __init__(self, dim: int, *, train_context: int) -> None:
        super().__init__()
        check_whole("train_context", train_context, 1)
        self.weight = nn.Parameter(torch.randn(train_context, dim) * 0.02)

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1 or B, T, C) in the dtype of `like`."""
        index = positions.index(self.weight.device)
        last = positions.offset + positions.length - 1
        if last >= len(self.weight) and positions.within is not None:
            last = int(index.max())  # positions restart in documents; reading them back synchronises
        if last >= len(self.weight):
            raise ValueError(
                f"learned positions end at {len(self.weight)} tokens, got position {last}; "
                "another position method extrapolates"
            )
        return self.weight[index].to(like.dtype)


class Learned2d(nn.Module):
    """One learned vector per patch of the training grid, resized to the present grid as timm's `resample_abs_pos_embed`
    does: bicubic with antialiasing, which takes another cubic than without (a = −1/2). None on prefix tokens."""

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
            weight = F.interpolate(weight.to(wide), size=positions.shape, mode="bicubic", antialias=True)
        return F.pad(weight.flatten(2).transpose(1, 2), (0, 0, positions.num_prefix, 0)).to(like.dtype)
