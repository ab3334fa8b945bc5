"""A log-prior as numbers over the distance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from zoo.errors import Options, check_flags, check_whole, nearest
from zoo.priors.base import TablePrior

# log 0, finite so that a query whose visible keys are all impossible still has a softmax: e^−10000
# is 0 in every dtype.
IMPOSSIBLE = -1e4
BEYOND = ("last", "zero", "linear")

Numbers: TypeAlias = Tensor | np.ndarray | Sequence[object]
Curve: TypeAlias = Callable[[Tensor], Tensor]


class Table(TablePrior):
    """K[h,i,j] = log π_h(abs(i − j)), from log-values at the distances 0 … N−1; −∞ is a weight of
    0.

    Args:
        values: (N,) for all heads or (H, N); or a function from distances (N,) float64 to such
            log-values.
        length: N of a function, or of a table without numbers; the training context by default.
        beyond: K at distances of N and more: "last", as at N−1; "zero", weight 0; "linear", the
            line through the first and the last value, level where that rises.
        learnable: train the values. Without numbers they start at 0 and are trained unless this is
            False: a learned bias per distance.
    """

    by_head = ("values",)

    def __init__(
        self,
        num_heads: int,
        *,
        values: Numbers | Curve | None = None,
        length: int | None = None,
        beyond: str = "last",
        learnable: bool | None = None,
        train_context: int | None = None,
    ) -> None:
        super().__init__(num_heads)
        if beyond not in BEYOND:
            raise ValueError(
                f"unknown beyond={beyond!r} of a table prior; {nearest(beyond, BEYOND)}"
            )
        learnable = values is None if learnable is None else learnable
        check_flags(learnable=learnable)
        if values is None or callable(values):
            length = length or train_context
            if length is None:
                raise ValueError(
                    "a table prior without numbers needs its length, the number of distances"
                )
            check_whole("length of a table prior", length, 1)
            distance = torch.arange(length, dtype=torch.float64, device="cpu")
            values = torch.zeros_like(distance) if values is None else values(distance)
        numbers = _by_head(values, num_heads)
        if length not in (None, numbers.shape[-1]):
            raise ValueError(
                f"a table prior of length {length} cannot hold {numbers.shape[-1]} numbers"
            )
        self.beyond = beyond
        self.values = nn.Parameter(numbers, requires_grad=learnable)

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        length = self.values.shape[1]
        values = self.values.to(distance.dtype)
        away = distance.abs()
        inside = values[:, away.clamp(max=length - 1).long()]
        if self.beyond == "zero":
            return torch.where(away < length, inside, IMPOSSIBLE)
        if self.beyond == "linear":
            slope = ((values[:, -1] - values[:, 0]) / max(length - 1, 1)).clamp(max=0)
            past_the_end = (away - (length - 1)).clamp(min=0)
            return inside + slope.view(-1, *[1] * distance.ndim) * past_the_end
        return inside

    def stored_options(self, options: Options) -> Options:
        """The length in place of the numbers, which the state dict holds."""
        if "values" not in options:
            return dict(options)
        others = {key: value for key, value in options.items() if key != "values"}
        return others | {"length": self.values.shape[1], "learnable": self.values.requires_grad}


def _by_head(values: object, num_heads: int) -> Tensor:
    """(H, N) float32 copy of log-values for all heads or by head; −∞ becomes `IMPOSSIBLE`."""
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "values of a prior must be an array of numbers or a function from distances to "
            f"log-values, got {type(values).__name__}: {error}"
        ) from error
    wrong = numbers.isnan() | (numbers == math.inf)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        value = float(numbers[tuple(place)])
        raise ValueError(f"values of a prior must be finite or −∞, got {value:g} at {place}")
    if numbers.ndim not in (1, 2) or (numbers.ndim == 2 and len(numbers) != num_heads):
        raise ValueError(
            f"a prior of {num_heads} heads needs numbers of shape (N,) or ({num_heads}, N), "
            f"got {tuple(numbers.shape)}"
        )
    if not bool(numbers.isfinite().any()):
        raise ValueError(f"values of a prior must be finite at least once, of {numbers.numel()}")
    numbers = numbers.clamp(min=IMPOSSIBLE).float()
    return numbers if numbers.ndim == 2 else numbers.expand(num_heads, -1).clone()
