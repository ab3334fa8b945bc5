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
# (where a field lies, the side of that axis where it is only an eighth), in the order in which heads take them.
FIELDS: dict[int, tuple[tuple[str, ...], ...]] = {
    180: (("up",), ("down",), ("left",), ("right",)),
    90: (("up",), ("down",), ("left",), ("right",)),
    45: (
        *(("up", "left"), ("down", "left"), ("left", "up"), ("right", "up")),
        *(("up", "right"), ("down", "right"), ("left", "down"), ("right", "down")),
    ),
}


class Lookhere2d(GridPrior):
    """K[h] = −s_l·m_h·√(dy² + dx²) inside the head's field of view, a cone that opens at the query; −1e30 outside.

    Fields, their edges included, as in the released code: of 180° up, down, left and right; of 90° the same; of 45° the eight
    between an axis and a diagonal. Heads take them in turn; the last third, as far as whole fours allow, sees everything:
    of 12 heads 8 look somewhere, of 6 heads 4, of 4 heads all. Slopes m: of the n-th four that look 2^(−n) from n = 1 on, and
    2^(−1) for all eighths; 1/4, 1/16, 1/64, 1/256 of those that see everything. Prefix tokens see all and are seen, with 0.

    Args:
        num_heads: H.
        fov: degrees: 180, 90 or 45.
        depth: (layer from 0, number of layers), which models give: s_l falls from 1.5 to 0.5; None: it is 1.

    Raises:
        ValueError: for another field of view, or a layer that there is not.
    """

    def __init__(self, num_heads: int, *, fov: int = 90, depth: tuple[int, int] | None = None) -> None:
        super().__init__(num_heads)
        self.head_slopes: Tensor
        if fov not in FIELDS:
            raise ValueError(f"fov={fov!r} of LookHere: expected 180, 90 or 45 degrees")
        check_depth(depth)
        layer, layers = (1, 3) if depth is None else depth
        share = layer / (layers - 1) if layers > 1 else 0.0
        self.fov, self.layer_slope = fov, 1.5 - share
        looking = min(num_heads, 4 * math.ceil(num_heads / 6))
        self.fields = [FIELDS[fov][head % len(FIELDS[fov])] for head in range(looking)]
        all_seeing = num_heads - looking
        ahead = [2.0 ** -(1 if fov == 45 else 1 + head // 4) for head in range(looking)]
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
        hidden = torch.stack([~self._sees(field, dy, dx) for field in self.fields])
        unseen = logits[: len(self.fields)].masked_fill(hidden, HIDDEN)
        return torch.cat([unseen, logits[len(self.fields) :]])

    def _sees(self, field: tuple[str, ...], dy: Tensor, dx: Tensor) -> Tensor:
        """Whether the key, at query − (dy, dx), lies in a field."""
        towards = {"up": dy, "down": -dy, "left": dx, "right": -dx}
        along, across = towards[field[0]], dx if field[0] in ("up", "down") else dy
        seen = along >= 0 if self.fov == 180 else along >= across.abs()
        for side in field[1:]:
            seen = seen & (towards[side] >= 0)
        return seen

    def head_parameters(self) -> dict[str, Tensor]:
        return {"slope": self.layer_slope * self.head_slopes}
