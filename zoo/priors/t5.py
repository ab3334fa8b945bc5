"""T5's learned bias per bucket of distances (arXiv 1910.10683)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from zoo.errors import check_grid, check_whole
from zoo.priors.base import GridPrior, TablePrior


class T5(TablePrior):
    """K[h,i,j] = bias[h, bucket(i − j)]: exact for short distances, then logarithmic up to
    `max_distance`, then one bucket.

    Causal all buckets serve d >= 0; bidirectional half of them serve each side.

    Args:
        num_buckets: 32 as published.
        max_distance: 128 as published; everything further shares the last bucket.
    """

    by_head = ("bias",)

    def __init__(self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(num_heads)
        check_whole("num_buckets of t5", num_buckets, 4)
        check_whole("max_distance of t5", max_distance, 1)
        if num_buckets % 2 or max_distance <= num_buckets // 2:
            raise ValueError(
                "t5 needs an even number of buckets >= 4 and max_distance > buckets/2, "
                f"got {num_buckets}, {max_distance}"
            )
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.constant_from = max_distance
        self.bias = nn.Parameter(torch.zeros(num_heads, num_buckets))

    def bucket(self, distance: Tensor, *, causal: bool) -> Tensor:
        """int64 bucket of each distance d = i − j."""
        if causal:
            return one_sided_bucket(distance.clamp(min=0), self.num_buckets, self.max_distance)
        return two_sided_bucket(distance, self.num_buckets, self.max_distance)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        return self.bias.to(distance.dtype)[:, self.bucket(distance, causal=causal)]


class T52d(GridPrior):
    """K = bias[h, bucket(dy), bucket(dx)]: T5's signed buckets on each axis, one learned value per
    pair; prefix tokens get 0.

    Displacements beyond the longest one of the training grid share its bucket, so no image indexes
    an untrained one.

    Args:
        num_buckets: per axis, half of them for each sign.
        train_grid: (height, width) in patches.
    """

    max_distance: Tensor

    def __init__(
        self, num_heads: int, *, num_buckets: int = 16, train_grid: tuple[int, int] = (14, 14)
    ) -> None:
        super().__init__(num_heads)
        check_whole("num_buckets of t5_2d", num_buckets, 4)
        if num_buckets % 2:
            raise ValueError(f"t5_2d needs an even number of buckets, got {num_buckets}")
        check_grid("train_grid", train_grid)
        self.num_buckets = num_buckets
        # A buffer, so that weights keep their buckets in a model built for another grid.
        self.register_buffer("max_distance", torch.tensor([side - 1 for side in train_grid]))
        self.bias = nn.Parameter(torch.zeros(num_heads, num_buckets, num_buckets))

    def surface(self, dy: Tensor, dx: Tensor, *, grid: tuple[int, int]) -> Tensor:
        far_y, far_x = self.max_distance.to(dy.dtype).unbind()
        bucket_y = two_sided_bucket(dy.clamp(-far_y, far_y), self.num_buckets, far_y)
        bucket_x = two_sided_bucket(dx.clamp(-far_x, far_x), self.num_buckets, far_x)
        return self.bias.to(dy.dtype)[:, bucket_y, bucket_x]


def one_sided_bucket(distance: Tensor, num_buckets: int, max_distance: int | Tensor) -> Tensor:
    """int64 bucket of distances >= 0: half of the buckets exact, the others logarithmic up to
    `max_distance`.

    A one-element tensor stays on its device: reading it back would synchronise.
    """
    exact = num_buckets // 2
    if isinstance(max_distance, Tensor):
        span: float | Tensor = (max_distance.double().clamp(min=exact + 1) / exact).log()
    else:
        span = math.log(max(max_distance, exact + 1) / exact)
    scale = (num_buckets - exact) / span
    # float64: bucket edges fall on integers, and a float32 logarithm puts some on the wrong side.
    far = distance.double()
    coarse = exact + ((far.clamp(min=1) / exact).log() * scale + 1e-9).floor()
    return torch.where(far < exact, far, coarse.clamp(max=num_buckets - 1)).long()


def two_sided_bucket(distance: Tensor, num_buckets: int, max_distance: int | Tensor) -> Tensor:
    """int64 bucket of signed distances: the first half of the buckets for d >= 0, the second for d
    < 0."""
    side = num_buckets // 2
    return one_sided_bucket(distance.abs(), side, max_distance) + side * (distance < 0)
