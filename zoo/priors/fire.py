"""FIRE: a learned function of the distance relative to the query's own position (arXiv 2310.04418)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.positions import Positions
from zoo.priors.base import Prior, PriorTerms, linear_in, prior_dtype

__all__ = ["Fire"]


class Fire(Prior):
    """K[h,i,j] = f_θ( ψ(i − j) / ψ(max(L, i)) ), ψ(x) = log(c·x + 1), f_θ an MLP 1 → 32 → H with ReLU.

    c and the threshold L are learned. Past L the prior depends on i and j and not on their difference alone, so it is neither
    a table nor lanes: it hands over the dense (H, T, S) matrix, and costs that memory.

    Args:
        num_heads: H.
        hidden: width of f_θ.
        init_scale: c at the start.
        init_threshold: L at the start, in tokens.
    """

    def __init__(
        self, num_heads: int, *, hidden: int = 32, init_scale: float = 0.1, init_threshold: float = 512.0
    ) -> None:
        super().__init__(num_heads)
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, num_heads))
        self.scale = nn.Parameter(torch.tensor([init_scale]))
        self.threshold = nn.Parameter(torch.tensor([init_threshold]))

    def _bias(self, q_pos: Positions, k_pos: Positions, causal: bool, dtype: torch.dtype) -> Tensor:
        device = self.scale.device
        # Distances count along the row, positions inside the document; the two differ only across documents, which are masked.
        distance = (q_pos.row_index(device)[:, None] - k_pos.row_index(device)).to(dtype)
        distance = distance.clamp(min=0) if causal else distance.abs()
        reach = torch.maximum(q_pos.index(device).to(dtype), self.threshold.to(dtype).abs())
        scale = self.scale.to(dtype).abs()
        ratio = torch.log1p(scale * distance) / torch.log1p(scale * reach)[..., None]
        hidden = linear_in(self.mlp[0], ratio[..., None]).relu()
        return linear_in(self.mlp[2], hidden).permute(0, 3, 1, 2)

    def forward(
        self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None, carry: Tensor | None = None
    ) -> PriorTerms:
        self.require_line(q_pos, k_pos)
        return PriorTerms(bias=self._bias(q_pos, k_pos, causal, prior_dtype(self)))

    def log_prior(self, q_pos: Positions, k_pos: Positions, *, causal: bool, x: Tensor | None = None) -> Tensor:
        return self._bias(q_pos, k_pos, causal, torch.float64)
