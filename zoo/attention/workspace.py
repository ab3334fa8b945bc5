"""A buffer that the blocks of a call reuse."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """One buffer for all blocks: allocating one per block costs more than its arithmetic.

    Every view begins at the buffer's start: it overwrites the one before, and its values are
    whatever that left.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(0, dtype=dtype, device=device)

    def view(self, *shape: int) -> Tensor:
        """A tensor of this shape over the buffer, which grows where it is too small."""
        count = math.prod(shape)
        if count > self.buffer.numel():
            self.buffer = self.buffer.new_empty(count)
        return self.buffer[:count].view(shape)
