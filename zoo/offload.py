"""Weights that accelerate keeps on the CPU or on disk, and loads for the call of their module.

A prior is used by other methods than `forward` too (tables, biases, caches), and so is the
embedding of a tied head: `loaded` has their weights in memory for a block of code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# accelerate's attribute of each module whose weights it loads.
HOOK = "_hf_hook"


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of this module, or of modules in it."""
    return bool(_hooked(module))


@contextmanager
def loaded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the context the weights of `modules` are in memory, whatever reads them."""
    parts: list[Any] = []
    for module in modules:
        parts += _hooked(module)
    forwards = [part.forward for part in parts]
    try:
        for part in parts:
            part._hf_hook.pre_forward(part)
            # accelerate's own `forward` would put the weights away behind each call.
            part.forward = part._old_forward
        yield
    finally:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
            part._hf_hook.post_forward(part, None)


def execution_device(module: nn.Module) -> torch.device:
    """Where a module computes, wherever its weights are meanwhile."""
    device = next(module.parameters()).device
    hooked = _hooked(module)
    if device.type != "meta" or not hooked:
        return device
    return torch.device(hooked[0]._hf_hook.execution_device)


def _hooked(module: nn.Module) -> list[Any]:
    """The modules in `module`, itself included, whose weights accelerate loads."""
    return [part for part in module.modules() if HOOK in part.__dict__]
