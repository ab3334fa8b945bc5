"""A buffer that blocks share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """One buffer reused by all blocks: allocating per block costs more than the arithmetic on
    it."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(0, dtype=dtype, device=device)

    def view(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        if count > self.buffer.numel():
            self.buffer = self.buffer.new_empty(count)
        return self.buffer[:count].view(shape)
