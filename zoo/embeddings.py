"""Positions added to the embedding: sinusoidal and learned, along a line and over a grid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import check_grid, check_number, check_whole
from zoo.positions import Positions
from zoo.rotary import axis_frequencies, check_quarters


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
        columns = torch.arange(0, self.dim, step, dtype=torch.float64, device=like.device)
        omega = self.theta ** -(columns / self.dim)
        angle = positions.index(like.device).double()[..., None] * omega
        if self.columns == "alternating":
            pairs = torch.stack([angle[..., ::2].sin(), angle[..., 1::2].cos()], dim=-1)
            return pairs.flatten(-2).to(like.dtype)
        return torch.cat([angle.sin(), angle.cos()], dim=-1).to(like.dtype)


class Sinusoidal2d(nn.Module):
    """Fixed sines and cosines of row and column added to the patches, nothing on prefix tokens: the
    quarters of the columns hold sin y, cos y, sin x, cos x at the angles
    coordinate·10000^(−4n/C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_quarters("a grid's sinusoidal position", dim)
        self.dim = dim

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1, T, C) in the dtype of `like`."""
        omega = axis_frequencies(self.dim, 10000.0, like.device)
        row, column = positions.yx(like.device)
        y = row.double()[:, None] * omega
        x = column.double()[:, None] * omega
        patches = torch.cat([y.sin(), y.cos(), x.sin(), x.cos()], dim=-1)
        return _with_prefix(patches[None], positions).to(like.dtype)


class Learned(nn.Module):
    """One learned vector per position, added to the embedding; a position beyond the training
    context is a ValueError."""

    def __init__(self, dim: int, *, train_context: int) -> None:
        super().__init__()
        check_whole("train_context", train_context, 1)
        self.weight = nn.Parameter(torch.randn(train_context, dim) * 0.02)

    def forward(self, positions: Positions, like: Tensor) -> Tensor:
        """(1 or B, T, C) in the dtype of `like`."""
        size = len(self.weight)
        end = f"learned positions, unlike other methods, end at {size} tokens"
        index = positions.index_below(size, end, self.weight.device)
        return self.weight[index].to(like.dtype)


class Learned2d(nn.Module):
    """One learned vector per patch of the training grid; none on prefix tokens.

    It is resized to the present grid as timm's `resample_abs_pos_embed` does: bicubic with
    antialiasing, which takes another cubic than without (a = −1/2).
    """

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
        patches = weight.flatten(2).transpose(1, 2)
        return _with_prefix(patches, positions).to(like.dtype)


def _with_prefix(patches: Tensor, positions: Positions) -> Tensor:
    """(1, T, C) of all tokens from the vectors of the patches: 0 for prefix tokens."""
    return F.pad(patches, (0, 0, positions.num_prefix, 0))
