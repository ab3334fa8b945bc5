"""Kerple's logarithmic kernel (arXiv 2205.09921)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zoo.priors.base import IsotropicPrior, TablePrior, prior_dtype
from zoo.priors.tables import ParametricTable

__all__ = ["Kerple", "Kerple2d", "KerpleTable"]

_MINIMUM = 1e-2


@dataclass(frozen=True)
class KerpleTable(ParametricTable):
    """t = −r1·log(1 + r2·d), d = |i − j| or √(dy² + dx²), and so ∂t/∂log r1 = t, ∂t/∂r2 = −r1·d/(1 + r2·d).

    Attributes:
        theta: (2, H) log r1 and r2.
    """

    theta: Tensor
    log_factor = True

    @property
    def params(self) -> Tensor:
        return self.theta

    def of_heads(self, heads: slice | Tensor | Sequence[int]) -> KerpleTable:
        return replace(self, theta=self.theta[:, heads])

    def jacobian(self, displacements: dict[str, Tensor]) -> Tensor:
        line = "d" in displacements
        distance = displacements["d"].abs() if line else torch.hypot(displacements["y"], displacements["x"])
        log_r1, r2 = self.theta.detach()[..., None]
        along = r2 * distance
        return torch.stack([torch.log1p(along), distance / (1 + along)]) * -log_r1.exp()


class Kerple(TablePrior):
    """K[h,i,j] = −r1_h·log(1 + r2_h·|i − j|), r1, r2 > 0 learned, (H,) each.

    They start uniform in (0, 2) and (0, 1), as the released `bias_p` and `bias_a`, and are read no lower than 0.01, which keeps
    them positive.

    Args:
        num_heads: H.
    """

    by_head = ("r1", "r2")

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.r1 = nn.Parameter(torch.rand(num_heads) * 2)
        self.r2 = nn.Parameter(torch.rand(num_heads))

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        lead = (self.num_heads,) + (1,) * distance.ndim
        r1, r2 = (r.to(distance.dtype).clamp(min=_MINIMUM).view(lead) for r in (self.r1, self.r2))
        return -r1 * torch.log1p(r2 * distance.abs())

    def parametric(self) -> KerpleTable:
        r1, r2 = (r.to(prior_dtype(self)).clamp(min=_MINIMUM) for r in (self.r1, self.r2))
        return KerpleTable(torch.stack([r1.log(), r2]))

    def head_parameters(self) -> dict[str, Tensor]:
        return {"r1": self.r1, "r2": self.r2}


class Kerple2d(IsotropicPrior, Kerple):
    """K = −r1_h·log(1 + r2_h·√(dy² + dx²)) over the grid of patches; prefix tokens get 0.

    Args:
        num_heads: H.
    """
