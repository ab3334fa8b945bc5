"""Which font files can be trained on: those that draw A–Z legibly, in families, without copies of one another.

Fonts of many packages cannot be told apart by name alone. Fonts for Bengali or Thai carry the Latin letters of DejaVu
or Liberation; others keep another script's letters, or little pictures, where A–Z belong. So the pictures decide.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx  # which torch brings
import numpy as np
from PIL import Image, ImageFont

from recipes.fetchers.glyphs.letters import CLASSES, cap_ratio, letter_mask, usable

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
    pictures = np.stack([_fitted(glyph) for glyph in glyphs])
    name = ImageFont.truetype(path, 16).getname()[0] or ""
    name = name if name.isprintable() and name else Path(path).stem  # a few files hold none, or rubbish
    return Font(
        path, package, name, float(np.median([_stroke(glyph) for glyph in glyphs])) / (_INK * cap_ratio(path)), pictures
    )


def _stroke(glyph: Image.Image) -> float:
    """Thickness in pixels: twice the area over the length of the outline, exact for a long thin bar."""
    ink = np.asarray(glyph, np.float32) / 255
    down, across = np.gradient(ink)
    return float(2 * ink.sum() / max(float(np.hypot(down, across).sum()), 1e-6))


def _fitted(glyph: Image.Image) -> np.ndarray:
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
    kept = []
    for font in fonts:
        near = np.where(packages == font.package, -1, font.pictures @ pictures.T).argmax(axis=1) % len(CLASSES)
        if (near == letters).sum() >= LEGIBLE and font.stroke >= MIN_STROKE:
            kept.append(font)
    return kept


def distinct(fonts: Sequence[Font], *, unlike: Sequence[Font] = ()) -> list[Font]:
    """The fonts without copies of one another or look-alikes of `unlike`, at most FONTS_PER_NAME of a name."""
    order = sorted(fonts, key=lambda font: _hash(font.package + "/" + Path(font.path).name))
    same = likeness(order, order) > COPY
    barred = np.asarray((likeness(order, unlike) > LOOKALIKE).any(axis=1)) if unlike else np.zeros(len(order), bool)
    names: Counter[str] = Counter()
    kept: list[int] = []
    for number, font in enumerate(order):
        if not barred[number] and not same[number, kept].any() and names[font.name] < FONTS_PER_NAME:
            names[font.name] += 1
            kept.append(number)
    return [order[number] for number in kept]


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
