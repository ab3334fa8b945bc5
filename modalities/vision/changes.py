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


def _blackened(image: Image.Image) -> Image.Image:
    """Saturated pixels black."""
    pixels = np.array(image)
    pixels[np.ptp(pixels.astype(np.int16), axis=2) > CHROMA] = 0
    return Image.fromarray(pixels)


COLOURS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "inverted": ImageOps.invert,
    "grey": lambda image: image.convert("L").convert("RGB"),
    "pastel": lambda image: ImageEnhance.Color(image).enhance(0.5),
    "black-lines": _blackened,
    "flat": lambda image: ImageEnhance.Contrast(image).enhance(0.5),
    "dark": lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(1.0)),
}
SIZES = {"smaller": 0.85, "larger": 1.35}
# Degrees.
TURN = 30.0
CHANGES = (*COLOURS, *SIZES, "turned")


def changed(image: Image.Image, objects: Objects, name: str) -> tuple[Image.Image, Objects]:
    """A picture, and its objects where they are then. "turned" keeps the middle, which has no empty
    corner."""
    image = image.convert("RGB")
    if name in COLOURS:
        return COLOURS[name](image), objects
    if name in SIZES:
        width = round(image.width * SIZES[name])
        height = round(image.height * SIZES[name])
        scale = np.divide((width, height), image.size)
        boxes = objects.boxes * np.tile(scale, 2)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        return image, replace(objects, boxes=boxes)
    return _turned(image, objects)


def _turned(image: Image.Image, objects: Objects) -> tuple[Image.Image, Objects]:
    """By TURN, cut to the largest square without an empty corner; boxes become those around the
    turned ones."""
    angle = math.radians(TURN)
    size = np.array(image.size)
    inner = int(min(image.size) / (math.cos(angle) + math.sin(angle)))
    corner = (size - inner) // 2
    offsets = objects.boxes[:, :2] + objects.boxes[:, 2:] / 2 - size / 2
    # y points down.
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    box_sizes = objects.boxes[:, 2:] @ np.abs(turn).T
    box_corners = offsets @ turn.T + size / 2 - box_sizes / 2 - corner
    boxes = np.hstack([box_corners, box_sizes])
    left, top = corner.tolist()
    image = image.rotate(TURN, Image.Resampling.BICUBIC)
    image = image.crop((left, top, left + inner, top + inner))
    return image, replace(objects, boxes=boxes).in_window((0, 0, inner, inner))
