"""Weights that accelerate keeps on the CPU or on disk, and loads for the call of their module alone.

A prior is used by other methods than `forward` too (tables, biases, caches), and so is the embedding of a tied head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["execution_device", "is_offloaded", "loaded"]

HOOK = "_hf_hook"  # accelerate's, an attribute of each module that it loads


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of this module, or of modules in it."""
    return any(HOOK in part.__dict__ for part in module.modules())


@contextmanager
def loaded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the context the weights of `modules` are in memory, whatever reads them."""
    parts: list[Any] = [part for module in modules for part in module.modules() if HOOK in part.__dict__]
    forwards = [part.forward for part in parts]
    try:
        for part in parts:
            part._hf_hook.pre_forward(part)
            part.forward = part._old_forward  # accelerate's own would put the weights away behind each call
        yield
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
            part._hf_hook.post_forward(part, None)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes, wherever its weights are meanwhile."""
    hooks = [part.__dict__[HOOK] for part in module.modules() if HOOK in part.__dict__]
    device = next(module.parameters()).device
    return torch.device(hooks[0].execution_device) if hooks and device.type == "meta" else device
