"""T5's learned bias per bucket of distances (arXiv 1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.priors.base import TablePrior

__all__ = ["T5"]


class T5(TablePrior):
    """K[h,i,j] = bias[h, bucket(i − j)]: exact for short distances, then logarithmic up to `max_distance`, then one bucket.

    Causal all buckets serve d >= 0; bidirectional half of them serve each side.

    Args:
        num_heads: H.
        num_buckets: 32 as published.
        max_distance: 128 as published; everything further shares the last bucket.
    """

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(num_heads)
        if num_buckets < 4 or num_buckets % 2 or max_distance <= num_buckets // 2:
            raise ValueError(
                f"t5 needs an even number of buckets >= 4 and max_distance > buckets/2, got {num_buckets}, {max_distance}"
            )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bias = nn.Parameter(torch.zeros(num_heads, num_buckets))

    def bucket(self, distance: Tensor, *, causal: bool) -> Tensor:
        """int64 bucket of each distance d = i − j."""
        buckets = self.num_buckets if causal else self.num_buckets // 2
        first = torch.zeros_like(distance) if causal else torch.where(distance < 0, float(buckets), 0.0)
        far = distance.clamp(min=0) if causal else distance.abs()
        exact = buckets // 2
        scale = (buckets - exact) / math.log(self.max_distance / exact)
        # float64: the edges fall on round numbers, and a float32 logarithm puts some on the wrong side.
        coarse = exact + ((far.double().clamp(min=1) / exact).log() * scale + 1e-9).floor()
        return (first + torch.where(far < exact, far.double(), coarse.clamp(max=buckets - 1))).long()

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        return self.bias.to(distance.dtype)[:, self.bucket(distance, causal=causal)]
