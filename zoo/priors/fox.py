"""FoX: forgetting attention (arXiv 2503.02130)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from zoo.errors import check_number
from zoo.priors.cable import Cable


class Fox(Cable):
    """K[h,i,j] = Σ_{l = j+1 … i} log sigmoid(w_h·x_l + b_h): forgetting attention (FoX, arXiv
    2503.02130); causal only. It is `cable` with gate "logsigmoid" and no weights, in 5 lanes.

    Args:
        d_model: C, the width of the layer's input.
        half_lives: the first and last head's at the start, in tokens, geometric between them; None:
            b = 0 as published.
    """

    def __init__(
        self, num_heads: int, *, d_model: int, half_lives: Sequence[float] | None = None
    ) -> None:
        super().__init__(num_heads, d_model=d_model, weighted=False, gate="logsigmoid")
        nn.init.zeros_(self.decay.bias)
        if half_lives is not None:
            if not isinstance(half_lives, list | tuple) or len(half_lives) != 2:
                raise ValueError(f"half_lives must be two numbers of tokens, got {half_lives!r}")
            for tokens in half_lives:
                check_number("half_lives", tokens, least=0.01)
            first = math.log2(half_lives[0])
            last = math.log2(half_lives[1])
            lives = torch.logspace(first, last, num_heads, base=2.0, dtype=torch.float64)
            # sigmoid(b) = 2^(−1/life) at x = 0.
            self.decay.bias.data.copy_(-torch.expm1(math.log(2) / lives).log())
