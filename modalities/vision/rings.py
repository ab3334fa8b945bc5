"""A control that learns nothing: where the one closed ring of a picture of `scenes` is, by its
colour and its shape."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

# Largest less least of red, green and blue: backgrounds and ink of `scenes` stay below.
CHROMA = 140
# Pixels.
RADII = range(15, 21)
ANGLES = 48


def ring_centre(pixels: np.ndarray) -> tuple[int, int]:
    """(x, y) round which most of a circle of RADII is saturated, within a pixel, of pixels uint8
    (height, width, 3)."""
    height, width = pixels.shape[:2]
    saturated = np.ptp(pixels.astype(np.int16), axis=2) > CHROMA
    # Within a pixel of a saturated one.
    neighbours = np.lib.stride_tricks.sliding_window_view(np.pad(saturated, 1), (3, 3))
    near = neighbours.any((2, 3))
    margin = max(RADII)
    padded = np.pad(near, margin).astype(np.uint8)
    best = -1
    centre = (0, 0)
    for radius in RADII:
        hits = np.zeros((height, width), np.uint8)
        for x, y in _circle(radius):
            hits += padded[margin + y : margin + y + height, margin + x : margin + x + width]
        place = int(np.argmax(hits))
        if hits.flat[place] > best:
            best = int(hits.flat[place])
            centre = (place % width, place // width)
    return centre


@lru_cache(maxsize=len(RADII))
def _circle(radius: int) -> tuple[tuple[int, int], ...]:
    """Whole (x, y) at ANGLES even angles."""
    points = []
    for n in range(ANGLES):
        turn = 2 * math.pi * n / ANGLES
        points.append((round(radius * math.cos(turn)), round(radius * math.sin(turn))))
    return tuple(points)
