"""No prior: K = 0."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.positions import Positions
from zoo.priors.base import Prior
from zoo.priors.terms import PriorTerms


class Uniform(Prior):
    """K = 0."""

    by_head: tuple[str, ...] | None = ()
    is_zero = True
    is_relative = True

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        return PriorTerms()

    def log_prior(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> Tensor:
        return torch.zeros(1, self.num_heads, q_pos.length, k_pos.length, dtype=torch.float64)
