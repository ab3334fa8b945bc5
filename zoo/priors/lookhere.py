"""LookHere: heads that look in one direction each, and less the farther (arXiv 2405.13985)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zoo.errors import check_depth
from zoo.positions import Positions
from zoo.priors.base import GridPrior, PriorTerms, grid_table

__all__ = ["Lookhere2d"]

HIDDEN = -1e30  # of keys outside a field of view; every patch sees itself, so no row is without a key
FIELDS = ("up", "down", "left", "right")  # in the order in which heads take them


class Lookhere2d(GridPrior):
    """K[h] = −s_l·m_h·√(dy² + dx²) inside the head's field of view, a cone that opens at the query; −1e30 outside.

    Fields of 90°, their edges included, as in the released code: up, down, left and right, which heads take in turn. The last
    third of heads, as far as whole fours allow, sees everything: of 12 heads 8 look somewhere, of 6 heads 4, of 4 heads all.
    Slopes m: of the n-th four that look 2^(−n) from n = 1 on; 1/4, 1/16, 1/64, 1/256 of those that see everything. Prefix
    tokens see all and are seen, with 0.

    Args:
        num_heads: H.
        depth: (layer from 0, number of layers), which models give: s_l falls from 1.5 to 0.5; None: it is 1.

    Raises:
        ValueError: for a layer that there is not.
    """

    def __init__(self, num_heads: int, *, depth: tuple[int, int] | None = None) -> None:
        super().__init__(num_heads)
        self.head_slopes: Tensor
        check_depth(depth)
        layer, layers = (1, 3) if depth is None else depth
        share = layer / (layers - 1) if layers > 1 else 0.0
        self.layer_slope = 1.5 - share
        looking = min(num_heads, 4 * math.ceil(num_heads / 6))
        self.fields = [FIELDS[head % 4] for head in range(looking)]
        all_seeing = num_heads - looking
        ahead = [2.0 ** -(1 + head // 4) for head in range(looking)]
        each = max(1, all_seeing // 4)
        heads = ahead + [4.0 ** -(1 + head // each) for head in range(all_seeing)]
        # Powers of two, exact in every dtype that a model is cast to.
        self.register_buffer("head_slopes", torch.tensor(heads), persistent=False)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        slopes = self.head_slopes  # there are no parameters that would tell device and dtype
        dtype = torch.promote_types(slopes.dtype, torch.float32)
        return PriorTerms(table=grid_table(self.surface, q_pos, k_pos, device=slopes.device, dtype=dtype))

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        slopes = self.layer_slope * self.head_slopes.to(dy).view(-1, *[1] * dy.ndim)
        logits = -slopes * torch.hypot(dy, dx)
        towards = {
            "up": (dy, dx),
            "down": (-dy, dx),
            "left": (dx, dy),
            "right": (-dx, dy),
        }  # the key is at query − (dy, dx)
        hidden = torch.stack([along < across.abs() for along, across in (towards[field] for field in self.fields)])
        unseen = logits[: len(self.fields)].masked_fill(hidden, HIDDEN)
        return torch.cat([unseen, logits[len(self.fields) :]])
