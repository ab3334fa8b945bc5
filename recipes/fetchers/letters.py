"""The capitals of font files: how large they are, what they look like, and the fonts that matplotlib ships."""

from __future__ import annotations

import string
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CLASSES: tuple[str, ...] = tuple(string.ascii_uppercase)
PAD = 16  # pixels
_MEASURED = 1024.0  # font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel
# Of matplotlib's font files, those that have letters.
_BUILTIN = {"train": ("DejaVuSans*", "DejaVuSerif*", "cm*"), "heldout": ("STIXGeneral*",)}
_NO_LETTERS = ("DejaVuSansDisplay", "DejaVuSerifDisplay", "cmex10")


@lru_cache(maxsize=64)
def _face(font: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def letter_box(font: str, letter: str) -> tuple[float, float]:
    """Width and height of a letter's ink, in cap heights (the height of the font's H)."""
    left, top, right, bottom = _face(font, _MEASURED).getbbox(letter, anchor="ls")
    cap = cap_ratio(font) * _MEASURED
    return (right - left) / cap, (bottom - top) / cap


@lru_cache(maxsize=4096)
def cap_ratio(font: str) -> float:
    """Cap height over font size."""
    _, top, _, bottom = _face(font, _MEASURED).getbbox("H", anchor="ls")
    return (bottom - top) / _MEASURED


@lru_cache(maxsize=64)
def letter_mask(font: str, letter: str, size: float) -> tuple[Image.Image, tuple[float, float]]:
    """An upright letter at a font size in pixels: its ink as coverage (mode L), and where the ink box's centre is.

    At least PAD empty pixels are on every side, and width and height are multiples of PAD: `reduce` by 2, 4, 8 or PAD
    loses nothing at the edges.
    """
    face = _face(font, size)
    left, top, right, bottom = (round(side) for side in face.getbbox(letter, anchor="ls"))
    sides = [-(-side // PAD) * PAD + 2 * PAD for side in (right - left, bottom - top)]
    picture = Image.new("L", (sides[0], sides[1]))
    ImageDraw.Draw(picture).text((PAD - left, PAD - top), letter, fill=255, font=face, anchor="ls")
    return picture, (PAD + (right - left) / 2, PAD + (bottom - top) / 2)


def builtin_fonts(split: str) -> list[str]:
    """The font files with letters that matplotlib ships: "train" DejaVu and Computer Modern, "heldout" STIX."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    files = [path for pattern in _BUILTIN[split] for path in sorted(folder.glob(f"{pattern}.ttf"))]
    return [str(path) for path in files if path.stem not in _NO_LETTERS]
