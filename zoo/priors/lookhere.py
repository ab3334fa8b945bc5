"""LookHere: heads that look in one direction each (arXiv 2405.13985)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.errors import check_whole
from zoo.priors.base import (
    GridPrior,
)

# Of keys outside the field of view. Every patch sees itself, so no row is without a key.
HIDDEN = -1e30


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
        self.layer_slope = 1.0 if depth is None else _layer_slope(depth)
        self.looking = min(num_heads, 4 * math.ceil(num_heads / 6))
        self.each = max(1, (num_heads - self.looking) // 4)

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        head = torch.arange(self.num_heads, device=dy.device)
        halvings_looking = 1 + head // 4
        halvings_others = 2 + 2 * ((head - self.looking) // self.each)
        halvings = torch.where(head < self.looking, halvings_looking, halvings_others)
        slopes = self.layer_slope * torch.exp2(-halvings.to(dy.dtype)).view(-1, *[1] * dy.ndim)
        logits = -slopes * torch.hypot(dy, dx)
        # (along, across) of the fields up, down, left, right; the key is at query − (dy, dx).
        fields = [(dy, dx), (-dy, dx), (dx, dy), (-dx, dy)]
        outside = [along < across.abs() for along, across in fields]
        hidden = torch.stack([outside[head % 4] for head in range(self.looking)])
        looking = logits[: self.looking].masked_fill(hidden, HIDDEN)
        return torch.cat([looking, logits[self.looking :]])


def _layer_slope(depth: tuple[int, int]) -> float:
    """s_l of (layer from 0, number of layers): from 1.5 in the first layer to 0.5 in the last."""
    if not isinstance(depth, tuple | list) or len(depth) != 2:
        raise ValueError(f"depth must be (layer from 0, number of layers), got {depth!r}")
    layer, num_layers = depth
    check_whole("the number of layers in depth", num_layers, 1)
    if layer not in range(num_layers):
        raise ValueError(f"depth must be (layer from 0, number of layers), got {depth!r}")
    fraction = layer / (num_layers - 1) if num_layers > 1 else 0.0
    return 1.5 - fraction
