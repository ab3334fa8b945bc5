"""An exponential moving average of the weights, kept in float32 beside the model that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.config import ConfigError
from zoo.inputs import read_tensors


class WeightAverage:
    """a ← d·a + (1 − d)·w after every step, d = min(decay, (1 + t)/(10 + t)) at step t: short runs forget their start too.

    Every rank keeps the whole average, so it serves ZeRO stages 0 to 2, whose ranks hold all weights. In bf16 w is what the
    model computes with, rounded; the average is float32 all the same, since bf16 would lose a step of 1 − d = 1e−4.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        weights = [p.detach().float() for p in model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for a `with` block."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._copy(model, self.average)
        try:
            yield
        finally:
            self._copy(model, own)

    @staticmethod
    @torch.no_grad()
    def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])

    def save(self, folder: Path) -> None:
        save_file({k: v.contiguous() for k, v in self.average.items()}, folder / self.FILE, metadata={"format": "pt"})

    def load(self, folder: Path, *, steps: int) -> None:
        """The average as `save` left it after `steps` steps."""
        if not (folder / self.FILE).is_file():
            raise ConfigError(f"{folder} was written without train.ema: resume with --set train.ema=0, or start anew")
        stored = read_tensors(folder / self.FILE)
        for name, value in self.average.items():
            value.copy_(stored[name])
        self.steps = steps
