"""The capitals of font files: how large they are, what they look like, and which files can be trained on.

Fonts of many packages cannot be told apart by name. Fonts for Bengali or Thai carry the Latin letters of DejaVu or
Liberation; others keep another script's letters, or little pictures, where A–Z belong. So the pictures decide.
"""

from __future__ import annotations

import hashlib
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import networkx  # which torch brings
import numpy as np
from PIL import Image, ImageDraw, ImageFont

CLASSES: tuple[str, ...] = tuple(string.ascii_uppercase)
PAD = 16  # pixels
_MEASURED = 1024.0  # font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel
_COMPARED = 256.0  # font size at which pictures are compared
_BUILTIN = {"train": ("DejaVu", "cm"), "heldout": ("STIX",)}  # how the names of matplotlib's font files begin


# ---- letters


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
    """Whether a font file draws 26 different capitals, none of them blank, absurdly long, or the missing-glyph box."""
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


# ---- fonts

SIDE = 24  # of the small pictures that fonts are compared by, in pixels
LEGIBLE = 20  # capitals, of 26, that another package's font must confirm
MIN_STROKE = 0.04  # cap heights; thinner strokes all but vanish in small pictures
COPY = 0.99  # likeness above which the second font adds nothing to the first
LOOKALIKE = 0.97  # likeness above which two fonts belong to one family, whatever they are called
FONTS_PER_NAME = 6  # so that a name with forty weights and widths does not outweigh the others
LARGE = 16  # a family of more fonts is never held out: it would cost too much training data
_INK = 96.0  # font size at which strokes are measured, in pixels


@dataclass(frozen=True)
class Font:
    """A font file, the package it came in, the name it gives itself.

    stroke: thickness in cap heights. pictures: (26, SIDE²), each capital fitted to SIDE × SIDE, mean 0 and length 1.
    """

    path: str
    package: str
    name: str
    stroke: float
    pictures: np.ndarray


def read_font(job: tuple[str, str]) -> Font | None:
    """The font of (path, package), or None where it does not draw 26 different capitals."""
    path, package = job
    if not usable(path):
        return None
    glyphs = [letter_mask(path, letter, _INK)[0] for letter in CLASSES]
    name = ImageFont.truetype(path, 16).getname()[0] or ""
    name = name if name.isprintable() and name else Path(path).stem  # a few files hold none, or rubbish
    stroke = float(np.median([_stroke(glyph) for glyph in glyphs])) / (_INK * cap_ratio(path))
    return Font(path, package, name, stroke, np.stack([_fit(glyph) for glyph in glyphs]))


def _stroke(glyph: Image.Image) -> float:
    """Thickness in pixels: twice the area over the length of the outline, exact for a long thin bar."""
    ink = np.asarray(glyph, np.float32) / 255
    down, across = np.gradient(ink)
    return float(2 * ink.sum() / max(float(np.hypot(down, across).sum()), 1e-6))


def _fit(glyph: Image.Image) -> np.ndarray:
    glyph = glyph.crop(glyph.getbbox())
    scale = SIDE / max(glyph.size)
    small = glyph.resize([max(1, round(side * scale)) for side in glyph.size], Image.Resampling.BOX)
    square = Image.new("L", (SIDE, SIDE))
    square.paste(small, ((SIDE - small.width) // 2, (SIDE - small.height) // 2))
    flat = np.asarray(square, np.float32).ravel()
    flat = flat - flat.mean()
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def likeness(fonts: Sequence[Font], others: Sequence[Font]) -> np.ndarray:
    """(fonts, others): the mean over the letters of the cosine of their pictures, 1 for equal shapes."""
    one, two = (np.stack([font.pictures.ravel() for font in side]) for side in (fonts, others))
    return one @ two.T / len(CLASSES)


def legible(fonts: Sequence[Font]) -> list[Font]:
    """The fonts whose letters are what they stand for, as far as the other packages' fonts can tell.

    References are fonts of which 23 letters are nearest to the mean picture of that letter: plain designs. A font is
    legible if for LEGIBLE of its letters the nearest letter of a reference from another package is the same one, and
    its strokes are at least MIN_STROKE thick.
    """
    means = np.mean([font.pictures for font in fonts], axis=0)
    letters = np.arange(len(CLASSES))
    for _ in range(2):
        plain = [font for font in fonts if ((font.pictures @ means.T).argmax(axis=1) == letters).sum() >= 23]
        means = np.mean([font.pictures for font in plain], axis=0)
    references = list({(font.package, font.name): font for font in plain}.values())
    pictures = np.concatenate([font.pictures for font in references])
    packages = np.repeat([font.package for font in references], len(CLASSES))
    chosen = []
    for font in fonts:
        near = np.where(packages == font.package, -1, font.pictures @ pictures.T).argmax(axis=1) % len(CLASSES)
        if (near == letters).sum() >= LEGIBLE and font.stroke >= MIN_STROKE:
            chosen.append(font)
    return chosen


def distinct(fonts: Sequence[Font], *, unlike: Sequence[Font] = ()) -> list[Font]:
    """The fonts without copies of one another or look-alikes of `unlike`, at most FONTS_PER_NAME of a name."""
    order = sorted(fonts, key=lambda font: _hash(font.package + "/" + Path(font.path).name))
    same = likeness(order, order) > COPY
    barred = np.asarray((likeness(order, unlike) > LOOKALIKE).any(axis=1)) if unlike else np.zeros(len(order), bool)
    names: Counter[str] = Counter()
    chosen: list[int] = []
    for number, font in enumerate(order):
        if not barred[number] and not same[number, chosen].any() and names[font.name] < FONTS_PER_NAME:
            names[font.name] += 1
            chosen.append(number)
    return [order[number] for number in chosen]


def families(fonts: Sequence[Font]) -> list[list[Font]]:
    """Fonts that share a package or a name, or look alike, directly or over others, are one family; in hash order."""
    graph = networkx.Graph()
    for number, font in enumerate(fonts):
        graph.add_edges_from((number, key) for key in (("package", font.package), ("name", font.name)))
    graph.add_edges_from(np.argwhere(np.triu(likeness(fonts, fonts), 1) > LOOKALIKE).tolist())
    groups = [
        [fonts[number] for number in sorted(node for node in component if isinstance(node, int))]
        for component in networkx.connected_components(graph)
    ]
    return sorted(groups, key=lambda group: _hash(min(font.package for font in group)))


def split(fonts: Sequence[Font], heldout: int) -> tuple[list[Font], list[Font]]:
    """(training fonts, held-out fonts): of the first `heldout` families of at most LARGE fonts, in hash order, one each.

    The other fonts of those families are in neither. Raises ValueError when there are too few families.
    """
    groups = families(fonts)
    small = [group for group in groups if len(group) <= LARGE][:heldout]
    if len(small) < heldout:
        raise ValueError(f"{heldout} families were to be held out, and only {len(small)} are small enough")
    out = {font.path for group in small for font in group}
    return [font for font in fonts if font.path not in out], [group[0] for group in small]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
