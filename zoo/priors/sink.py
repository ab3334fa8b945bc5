"""A learned sink: a key without value, in every row's denominator (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.errors import check_number
from zoo.positions import Positions
from zoo.priors.base import prior_dtype
from zoo.priors.terms import PriorTerms
from zoo.priors.uniform import Uniform


class Sink(Uniform):
    """K = 0, and a learned sink: p_ij = exp z_ij / (exp b_h + Σ_j exp z_ij), so that a head may
    attend to nothing (gpt-oss, arXiv 2508.10925). A part of sums: "rope+sink", "ggd+sink".

    Args:
        start: b at the start; at 0, a row whose n logits are 0 gives each key the weight 1/(n + 1).
    """

    by_head = ("logit",)

    def __init__(self, num_heads: int, *, start: float = 0.0) -> None:
        super().__init__(num_heads)
        check_number("start", start)
        self.logit = nn.Parameter(torch.full((num_heads,), float(start)))

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None
    ) -> PriorTerms:
        return PriorTerms(sink=self.logit.to(prior_dtype(self)))
