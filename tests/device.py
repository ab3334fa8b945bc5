"""Where tests of kernels place their tensors: the CPU, with Triton interpreted, or CUDA (see
tests/conftest.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import torch

DEVICE = torch.device(os.environ.get("PRIORZOO_TEST_DEVICE", "cpu"))
T = TypeVar("T")


def some(cases: Iterable[T], count: int) -> list[T]:
    """All cases on a GPU; interpreted on the CPU, where each takes a second, `count` of them,
    evenly spread."""
    every = list(cases)
    if DEVICE.type != "cpu" or len(every) <= count:
        return every
    return [every[n * len(every) // count] for n in range(count)]
