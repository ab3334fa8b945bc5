"""The capitals of a font file: whether it has them, how large they are, what they look like. By Pillow's FreeType."""

from __future__ import annotations

import string
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CLASSES: tuple[str, ...] = tuple(string.ascii_uppercase)
_MEASURED = 1024.0  # font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel
_COMPARED = 256.0  # font size at which pictures are compared
PAD = 16  # pixels

_BUILTIN = {"train": ("DejaVu", "cm"), "heldout": ("STIX",)}  # how the names of matplotlib's font files begin


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
    """Cap height over font size. Raises ValueError for a font without an H."""
    _, top, _, bottom = _face(font, _MEASURED).getbbox("H", anchor="ls")
    if bottom <= top:
        raise ValueError(f"{font} has no H, so no cap height; `usable` says which fonts can be drawn")
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


def usable(font: str | Path) -> bool:
    """Whether a font file draws 26 different capitals, none of them blank, absurdly long, or the missing-glyph box.

    That the pictures are the letters they stand for it cannot say: fonts of other scripts may hold those under A–Z.
    """
    font = str(font)
    try:
        small = _face(font, _COMPARED / 4).getbbox("H", anchor="ls")
        if abs((small[3] - small[1]) / (_COMPARED / 4) - cap_ratio(font)) > 0.05:  # a bitmap font, which does not scale
            return False
        boxes = [letter_box(font, letter) for letter in CLASSES]
        if not all(0.05 < width < 2.2 and 0.7 < height < 1.6 for width, height in boxes):
            return False
        pictures = [letter_mask(font, letter, _COMPARED)[0] for letter in CLASSES]
        different = {(picture.size, picture.tobytes()) for picture in pictures}
        missing = letter_mask(font, "\uffff", _COMPARED)[0]
    except (OSError, ValueError):
        return False
    drawn = all(picture.getbbox() for picture in pictures)
    return drawn and len(different) == len(CLASSES) and (missing.size, missing.tobytes()) not in different


def builtin_fonts(split: str) -> list[Path]:
    """The usable fonts that matplotlib ships: "train" DejaVu and Computer Modern, "heldout" STIX."""
    import matplotlib

    files = sorted((Path(matplotlib.get_data_path()) / "fonts/ttf").glob("*.ttf"))
    return [path for path in files if path.name.startswith(_BUILTIN[split]) and usable(path)]
