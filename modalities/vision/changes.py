"""Changes of a picture with objects that training never had: of its colours, its sharpness, its
size, its angle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from modalities.vision.objects import Objects
from modalities.vision.rings import CHROMA

COLOURS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "inverted": ImageOps.invert,
    "grey": lambda image: image.convert("L").convert("RGB"),
    "pastel": lambda image: ImageEnhance.Color(image).enhance(0.5),
    "black-lines": lambda image: _blackened(image),
    "flat": lambda image: ImageEnhance.Contrast(image).enhance(0.5),
    "dark": lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(1.0)),
}
SIZES = {"smaller": 0.85, "larger": 1.35}
TURN = 30.0  # degrees
CHANGES = (*COLOURS, *SIZES, "turned")


def changed(image: Image.Image, objects: Objects, name: str) -> tuple[Image.Image, Objects]:
    """A picture, and its objects where they are then. "turned" keeps the middle, which has no empty
    corner."""
    image = image.convert("RGB")
    if name in COLOURS:
        return COLOURS[name](image), objects
    if name in SIZES:
        size = [round(side * SIZES[name]) for side in image.size]
        scale = np.tile(np.divide(size, image.size), 2)
        return image.resize((size[0], size[1]), Image.Resampling.BICUBIC), replace(
            objects, boxes=objects.boxes * scale
        )
    angle = math.radians(TURN)
    side = min(image.size)
    inner = int(side / (math.cos(angle) + math.sin(angle)))
    middle = np.array(image.size) / 2
    corner = (np.array(image.size) - inner) // 2
    offset = objects.boxes[:, :2] + objects.boxes[:, 2:] / 2 - middle
    turn = np.array(
        [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    )  # y points down
    sizes = objects.boxes[:, 2:] @ np.abs(turn).T
    boxes = np.hstack([offset @ turn.T + middle - sizes / 2 - corner, sizes])
    left, top = corner.tolist()
    image = image.rotate(TURN, Image.Resampling.BICUBIC).crop(
        (left, top, left + inner, top + inner)
    )
    return image, replace(objects, boxes=boxes).in_window((0, 0, inner, inner))


def _blackened(image: Image.Image) -> Image.Image:
    """Saturated pixels black."""
    pixels = np.array(image)
    pixels[np.ptp(pixels.astype(np.int16), axis=2) > CHROMA] = 0
    return Image.fromarray(pixels)
