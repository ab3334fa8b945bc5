"""What torch may be asked about tensors and devices, also while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zoo.priors.tables import BlockedBias

P = ParamSpec("P")


R = TypeVar("R")


def traced_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.assume_constant_result, which would import the compiler with this module."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@traced_as_constant
def cuda_capability(device: str) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) on ROCm, whose devices torch also calls
    "cuda"."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def needs_grad(*tensors: Tensor | BlockedBias | None) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def has_values(x: Tensor) -> bool:
    """Whether the values of a tensor can be read: torch's fake tensors, and those on "meta", have
    shapes alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))
