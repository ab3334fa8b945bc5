"""The cross-entropy of features and an unembedding by Liger's kernels, where these are installed."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIGER = (0, 8, 5)  # the oldest version tried; its reduction "none" multiplies each token's gradient by the incoming one


@functools.cache
def installed() -> bool:
    """Whether Liger of version `LIGER` or later is there."""
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [int(part) for part in version.split(".")[:3] if part.isdigit()]
    return tuple(numbers) >= LIGER


def serves(features: Tensor, unembedding: nn.Module) -> bool:
    """Whether `fused_losses` takes the weight of this embedding or linear layer: on a GPU, whole, plain and uncompiled."""
    return (
        features.is_cuda
        and type(unembedding) in (nn.Embedding, nn.Linear)
        and getattr(unembedding, "bias", None) is None
        and not hasattr(unembedding.weight, "ds_id")
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()  # Liger reads a count back
        and installed()
        and agrees(features.device, features.dtype)
    )


@functools.cache
def agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether losses and gradients of 70 tokens are those of float64, to rounding; a warning says where they are not."""
    from zoo.attention.selfcheck import BOUNDS, plain_call, relative_error

    try:
        with plain_call(str(device)), torch.enable_grad():
            features, weight = (torch.randn(n, 64).to(device, dtype).requires_grad_() for n in (70, 300))
            targets = torch.randint(0, 300, (70,)).index_fill(0, torch.tensor(3), -100).to(device)
            incoming = torch.rand(70).to(device)
            exact = F.cross_entropy(features.double() @ weight.double().T, targets, reduction="none")
            both = (fused_losses(features, weight, targets, -100), exact)
            fused, true = ((x, *torch.autograd.grad(x, (features, weight), incoming.to(x.dtype))) for x in both)
        off = max(map(relative_error, fused, true))
        if off <= BOUNDS[dtype]:
            return True
        problem = f"is off by {off:.1g} on {device} in {dtype}"
    except Exception as error:  # of a compiler, a driver, or Liger: whatever it is, our own chunks serve
        problem = f"fails on {device}: {error}"
    warnings.warn(f"the loss is computed without Liger, which {problem}", stacklevel=2)
    return False


def fused_losses(features: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """−ln softmax(features · weightᵀ)[target], (N,) float32, from (N, C), (V, C), (N,); 0 where a target is `ignored`.

    Logits are made for a part of the tokens at a time.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    plain: tuple[Any, ...] = (None, None, ignored, 0.0, 0.0)  # no bias, no weights of classes, no z-loss, no smoothing
    losses, *_ = Fused.apply(features, weight, targets, *plain, "none", None, False, torch.float32)
    return losses
