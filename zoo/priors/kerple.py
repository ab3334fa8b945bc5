"""Kerple's logarithmic kernel of the distance (arXiv 2205.09921)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.priors.base import (
    IsotropicPrior,
    TablePrior,
)

# r1 and r2 are read no lower than this.
LEAST = 1e-2


class Kerple(TablePrior):
    """K[h,i,j] = −r1_h·log(1 + r2_h·|i − j|), r1, r2 > 0 learned, (H,) each.

    They start uniform in (0, 2) and (0, 1), as the released `bias_p` and `bias_a`, and are read no
    lower than 0.01, which keeps them positive.
    """

    by_head = ("r1", "r2")

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.r1 = nn.Parameter(torch.rand(num_heads) * 2)
        self.r2 = nn.Parameter(torch.rand(num_heads))

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        lead = (self.num_heads,) + (1,) * distance.ndim
        r1 = self.r1.to(distance.dtype).clamp(min=LEAST).view(lead)
        r2 = self.r2.to(distance.dtype).clamp(min=LEAST).view(lead)
        return -r1 * torch.log1p(r2 * distance.abs())


class Kerple2d(IsotropicPrior, Kerple):
    """K = −r1_h·log(1 + r2_h·√(dy² + dx²)) over the grid of patches; prefix tokens get 0."""
