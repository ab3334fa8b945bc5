"""Held-out images under what a model takes them for."""

from __future__ import annotations

import math
from typing import Any

import torch

from modalities.figures import panels
from modalities.loading import first_heldout
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader
from modalities.vision.model import VisionTransformer
from modalities.vision.sources import class_names

__all__ = ["draw_predictions"]

COLUMNS = 4


@torch.no_grad()
def draw_predictions(model: VisionTransformer, data: VisionDataConfig, count: int) -> Any:
    """A matplotlib figure of the first `count` held-out images, as the model is given them: above each its likeliest class with
    the probability, green where it is right, and red with the true one where it is not.

    Raises ValueError where classes are not what the model is asked for, and as `build_loader` does.
    """
    if data.target != "label":
        raise ValueError(f"pictures show classes of whole images, and data.target is {data.target!r}; expected 'label'")
    batches = list(first_heldout(build_loader, data, samples=count, rank=0, world=1, micro_batch=count))
    images, targets = (torch.cat([batch[name] for batch in batches]) for name in ("images", "targets"))
    images, labels = images[targets >= 0][:count], targets[targets >= 0][:count].tolist()
    device = next(model.parameters()).device
    chances, found = model(images.to(device)).float().softmax(-1).max(-1)
    names = class_names(data.source)
    names = names if len(names) == model.num_classes else tuple(map(str, range(model.num_classes)))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (data.mean, data.std))
    columns = min(COLUMNS, len(images))
    figure, axes = panels(math.ceil(len(images) / columns), columns, width=1.9, height=2.1)
    for axis in axes:
        axis.axis("off")
    for axis, image, label, guess, chance in zip(axes, images, labels, found.tolist(), chances.tolist(), strict=False):
        axis.imshow((image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy())
        right = guess == label
        title = f"{names[guess]} {chance:.0%}" + ("" if right else f"\nis {names[label]}")
        axis.set_title(title, fontsize=9, color="tab:green" if right else "tab:red")
    return figure
