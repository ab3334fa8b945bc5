"""A control that learns nothing: where the one closed ring of a picture of `scenes` is, by its colour and its shape."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHROMA = 140  # largest less least of red, green and blue: backgrounds and ink of `scenes` stay below
RADII = range(15, 21)  # pixels
ANGLES = 48


def ring_centre(pixels: np.ndarray) -> tuple[int, int]:
    """(x, y) round which most of a circle of RADII is saturated, of pixels uint8 (height, width, 3); a miss of a pixel counts
    as hit."""
    saturated = torch.from_numpy(np.ptp(pixels.astype(np.int16), axis=2) > CHROMA)
    near = F.max_pool2d(saturated[None, None].float(), 3, stride=1, padding=1)
    hits = F.conv2d(near, _circles(), padding=max(RADII))[0].numpy()
    _, y, x = np.unravel_index(hits.argmax(), hits.shape)
    return int(x), int(y)


@lru_cache(maxsize=1)
def _circles() -> Tensor:
    """(radii, 1, side, side) float32: how many of ANGLES even angles of a circle lie on a pixel."""
    most = max(RADII)
    circles = torch.zeros(len(RADII), 1, 2 * most + 1, 2 * most + 1)
    for circle, radius in zip(circles, RADII, strict=True):
        for turn in (2 * math.pi * n / ANGLES for n in range(ANGLES)):
            circle[0, most + round(radius * math.sin(turn)), most + round(radius * math.cos(turn))] += 1
    return circles
