"""Heights and widths that evaluators measure at: sizes of the shorter side, at an aspect, in whole patches."""

from __future__ import annotations

import re
from fractions import Fraction

from modalities.vision.model import not_multiples

__all__ = ["Shape", "check_sizes", "lowest_terms", "shape_at", "width_to_height"]

Shape = tuple[int, int]  # (height, width)


def width_to_height(text: str) -> tuple[int, int]:
    """ "2:1" to (2, 1)."""
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not found:
        raise ValueError(f"{text!r} is not width:height in whole numbers, such as 2:1 or 3:4")
    return int(found[1]), int(found[2])


def lowest_terms(width: int, height: int) -> tuple[int, int]:
    return Fraction(width, height).as_integer_ratio()


def shape_at(size: int, aspect: tuple[int, int]) -> Shape:
    """(height, width) with `size` pixels on the shorter side."""
    longer = size * max(aspect) // min(aspect)
    return (size, longer) if aspect[0] >= aspect[1] else (longer, size)


def check_sizes(sizes: tuple[int, ...], step: int, patch: int, aspect: tuple[int, int]) -> None:
    """ValueError unless both sides of every size are whole patches; it names the nearest sizes for which they are."""
    for size in sizes:
        if wrong := not_multiples([size], step):
            at = "" if max(aspect) == 1 else f" at aspect {aspect[0]}:{aspect[1]}"
            raise ValueError(f"size {size}{at} does not divide into patches of {patch}: {wrong}")
