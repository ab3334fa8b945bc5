"""Liger's cross-entropy of features and an unembedding, where it is installed: kernels of others that are kept well."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LIGER", "fused_losses", "serves"]

LIGER = (0, 8, 5)  # the oldest version tried; its reduction "none" weighs the gradient of each token by its own


@functools.cache
def _installed() -> bool:
    try:
        version = importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [int(part) for part in version.split(".")[:3] if part.isdigit()]
    return tuple(numbers) >= LIGER


def serves(features: Tensor, unembedding: nn.Module) -> bool:
    """Whether `fused_losses` takes the weight of an embedding or of a linear layer without bias: on a GPU, uncompiled.

    Not where something stands around the layer, such as LoRA's, nor where ZeRO-3 leaves each rank a part of the weight.
    """
    return (
        features.is_cuda
        and type(unembedding) in (nn.Embedding, nn.Linear)
        and getattr(unembedding, "bias", None) is None
        and not hasattr(unembedding.weight, "ds_id")
        and not torch.compiler.is_compiling()
        and _installed()
    )


def fused_losses(features: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """−ln softmax(features · weightᵀ)[target], (N,) float32; 0 where a target is `ignored`.

    Logits are those of the features' format and of a part of the tokens at a time; in the backward pass they are made again
    and their gradient takes their place. The unembedding's gradient is summed in float32.

    Args:
        features: (N, C).
        weight: (V, C).
        targets: (N,) int64.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

    plain: tuple[Any, ...] = (None, None, ignored, 0.0, 0.0)  # no bias, no weights of classes, no z-loss, no smoothing
    losses, *_ = Fused.apply(features, weight, targets, *plain, "none", None, False, torch.float32)
    return losses
