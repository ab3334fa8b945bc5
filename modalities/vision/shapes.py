"""Heights and widths that evaluators measure at: sizes of the shorter side, at an aspect, in whole patches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from modalities.evaluation import Settings, counts, option
from modalities.vision.architectures import not_multiples
from modalities.vision.images import MAX_PIXELS

__all__ = ["Shape", "SizeSettings", "check_sizes", "lowest_terms", "shape_at", "width_to_height"]

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


@dataclass(frozen=True)
class SizeSettings(Settings):
    """Settings of evaluators over sizes.

    Attributes:
        sizes: ascending, of the shorter side.
        aspect: (width, height) in lowest terms.
    """

    sizes: tuple[int, ...] | None = option(
        None, "pixels of the shorter side, as 96,192,384; default 1x to 4x trained", parse=counts
    )
    aspect: tuple[int, int] | None = option(None, "width:height, as 2:1; default as trained", parse=width_to_height)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1:
                raise ValueError(f"sizes must be pixel counts of at least 1, got {list(self.sizes)}")
            object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        if self.aspect is not None:
            if min(self.aspect) < 1:
                raise ValueError(f"aspect must be width:height, both at least 1, got {self.aspect[0]}:{self.aspect[1]}")
            object.__setattr__(self, "aspect", lowest_terms(*self.aspect))
        side, aspect = max(self.sizes or (1,)), self.aspect or (1, 1)
        if (pixels := side**2 * max(aspect) // min(aspect)) > MAX_PIXELS:
            raise ValueError(
                f"images of {pixels:,} pixels (sizes {side}, aspect {aspect[0]}:{aspect[1]}); at most {MAX_PIXELS:,}"
            )
