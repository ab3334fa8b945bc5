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
    of_priors = {
        id(layer)
        for prior in model.modules()
        if isinstance(prior, Prior)
        for layer in prior.modules()
    }
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and id(layer) not in of_priors:
            std = deviation(start, layer.in_features)
            if start != "normal" and name.endswith((".out", ".down")):
                std /= math.sqrt(2 * depth)
            nn.init.normal_(layer.weight, std=std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def deviation(start: str, fan_in: int) -> float:
    """The standard deviation of a layer's weights at the start, or of an embedding with `fan_in`
    columns."""
    if start == "torch":
        return 1.0  # embeddings; layers are uniform
    return math.sqrt(2 / (5 * fan_in)) if start == "small" else 0.02
