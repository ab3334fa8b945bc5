"""Where tests of kernels place their tensors: the CPU, with Triton interpreted, or CUDA (see tests/conftest.py)."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("PRIORZOO_TEST_DEVICE", "cpu"))
