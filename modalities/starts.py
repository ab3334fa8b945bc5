"""How the weights of a model start: the project's own way, and the papers'."""

from __future__ import annotations

import math

from torch import nn

from zoo.errors import nearest
from zoo.priors.base import Prior

# "small": variance 2/(5·fan_in), divided in what enters the residual stream; "gpt2": 0.02, divided
# there too (CABLE); "normal": 0.02 (GOAT); "torch": as torch makes layers, and embeddings of
# deviation 1 (BAM, GOAT on DNA).
STARTS = ("small", "gpt2", "normal", "torch")


def check_start(start: str) -> None:
    """Raise ValueError for an unknown one."""
    if start not in STARTS:
        raise ValueError(f"weight_init={start!r}: {nearest(start, STARTS)}")


def start_weights(model: nn.Module, start: str, *, depth: int) -> None:
    """Draw the weights of linear layers as `start`, one of `STARTS`, says, and set biases to 0.
    Priors stay as they are.

    Layers named `out` and `down` enter the residual stream: "small" and "gpt2" divide them by
    √(2·depth).
    """
    if start == "torch":
        return
    inside_priors: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Prior):
            inside_priors.update(module.modules())
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or layer in inside_priors:
            continue
        std = deviation(start, layer.in_features)
        if start != "normal" and name.endswith((".out", ".down")):
            std /= math.sqrt(2 * depth)
        nn.init.normal_(layer.weight, std=std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def deviation(start: str, fan_in: int) -> float:
    """The standard deviation of a layer's weights at the start, or of an embedding with `fan_in`
    columns."""
    # torch's embeddings have deviation 1; its layers are uniform.
    if start == "torch":
        return 1.0
    return math.sqrt(2 / (5 * fan_in)) if start == "small" else 0.02
