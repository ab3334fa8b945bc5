"""Many letters on one canvas, each of a fixed size in pixels: a larger canvas holds more of them, not larger ones.

A `Crowd` is what stands on a canvas, in pixels: letters of real fonts, some of them *marked* by a closed ring, and clutter
(arcs and lines in the colours of rings). What is asked: which letter the ring is round (find and read), how many rings there
are (count), which letter is where (a dense map). Reducing a picture four times leaves letters of five pixels, so nothing of
this can be answered from the reduced picture; and a canvas of the training size cut out of a larger one is what training
shows. Letters and clutter have one density on every canvas.

Ink is darker than the background, a photograph or a texture whose values are compressed into [BRIGHTEST_DARK, 255]: which of
the two is the letter is not part of the task.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from recipes.fetchers.glyphs.letters import CLASSES, cap_ratio, letter_mask

CAP = (17.0, 22.0)  # cap height in pixels, log-uniform
ROTATION = 10.0  # degrees at most, either way
AREA = 48.0**2  # pixels a letter, and as many a piece of clutter
DARKEST_INK, BRIGHTEST_DARK = 60, 120  # values of ink reach the first, those of backgrounds begin at the second
ROOM = 3.0  # pixels between the ink's circle and the middle of the ring's line
TRIES = 60  # places that are tried for a letter; where all overlap others it is left out
FINE = 4  # everything is drawn at so many times its size and averaged

Box = tuple[int, int, int, int]  # left, top, width, height in pixels
Background = Callable[
    [np.random.Generator, int, int], np.ndarray
]  # (generator, height, width) → uint8 (height, width, 3)


@dataclass(frozen=True)
class Letter:
    """A letter of a font: cap height in pixels, tilt in degrees counter-clockwise, where its middle is, and its ink."""

    font: str
    letter: str
    cap: float
    rotation: float
    at: tuple[int, int]  # x, y
    ink: tuple[int, int, int]
    marked: bool = False

    @property
    def radius(self) -> float:
        """Of a circle round the ink, in pixels, a widest letter of 1.5 cap heights taken for all."""
        return 0.5 * math.hypot(1.0, 1.1) * self.cap


@dataclass(frozen=True)
class Stroke:
    """Part of an ellipse's line, or all of it: the ring round a marked letter is an arc of 360 degrees."""

    at: tuple[int, int]
    radii: tuple[float, float]
    angles: tuple[float, float]
    width: float
    colour: tuple[int, int, int]


@dataclass(frozen=True)
class Crowd:
    """What stands on a canvas of (height, width) pixels."""

    size: tuple[int, int]
    letters: tuple[Letter, ...]
    strokes: tuple[Stroke, ...]


# ---- what stands where ----


def crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    *,
    marked: Sequence[tuple[str, str]],
    within: int,
) -> Crowd:
    """Letters and clutter on a canvas of (height, width) pixels.

    marked: (font, letter) of each marked one; the others are drawn from `fonts`. within: side of a square, in pixels, that
    holds all that are marked with their rings, anywhere on the canvas.

    Raises ValueError where the marked ones find no room.
    """
    height, width = size
    side = min(within, *size)
    inside = (int(rng.integers(0, width - side + 1)), int(rng.integers(0, height - side + 1)), side, side)
    letters = next((p for p in (_all_placed(rng, marked, inside) for _ in range(TRIES)) if p is not None), None)
    if letters is None:
        raise ValueError(f"{len(marked)} marked letters find no room in {side} pixels; expected fewer")
    strokes = [_ring(rng, letter) for letter in letters]
    for _ in range(max(0, round(height * width / AREA) - len(marked))):
        font, letter = fonts[int(rng.integers(len(fonts)))], CLASSES[int(rng.integers(len(CLASSES)))]
        if placed := _placed(rng, font, letter, letters, (0, 0, width, height)):
            letters.append(placed)
    clutter = (_clutter(rng, size) for _ in range(round(height * width / AREA)))
    order = rng.permutation(len(letters)).tolist()  # of the list, which then tells nothing
    return Crowd(size, tuple(letters[n] for n in order), (*clutter, *strokes))


def _all_placed(rng: np.random.Generator, marked: Sequence[tuple[str, str]], inside: Box) -> list[Letter] | None:
    """The marked letters within a box; None where one finds no room beside those before it."""
    found: list[Letter] = []
    for font, letter in marked:
        placed = _placed(rng, font, letter, found, inside, marked=True)
        if placed is None:
            return None
        found.append(placed)
    return found


def _placed(
    rng: np.random.Generator, font: str, letter: str, others: Sequence[Letter], inside: Box, *, marked: bool = False
) -> Letter | None:
    """A letter within a box where it, and the ring that it may have, overlaps none of the others."""
    cap = float(math.exp(rng.uniform(*np.log(CAP))))
    made = Letter(font, letter, cap, float(rng.uniform(-ROTATION, ROTATION)), (0, 0), _ink(rng), marked)
    reach = made.radius + ROOM + 2
    left, top, width, height = inside
    for _ in range(TRIES):
        x, y = (int(rng.integers(math.ceil(low + reach), math.floor(low + most - reach) + 1)) for low, most in
                ((left, width), (top, height)))  # fmt: skip
        if all(math.dist((x, y), other.at) >= reach + other.radius for other in others):
            return Letter(font, letter, cap, made.rotation, (x, y), made.ink, marked)
    return None


def _ink(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = rng.integers(0, DARKEST_INK, 3).tolist()
    return red, green, blue


def _hue(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(float(rng.random()), 1.0, float(rng.uniform(0.6, 0.95)))
    return round(255 * red), round(255 * green), round(255 * blue)


def _ring(rng: np.random.Generator, letter: Letter) -> Stroke:
    radius = letter.radius + ROOM
    return Stroke(letter.at, (radius, radius), (0.0, 360.0), float(rng.uniform(2.0, 3.0)), _hue(rng))


def _clutter(rng: np.random.Generator, size: tuple[int, int]) -> Stroke:
    """An arc of less than half a turn, from the curvature of a ring to nearly straight; anywhere."""
    y, x = (int(rng.integers(0, most)) for most in size)
    radius = float(math.exp(rng.uniform(math.log(CAP[0]), math.log(4 * CAP[0]))))
    start, turn = float(rng.uniform(0, 360)), float(rng.uniform(30, 150)) * CAP[0] / radius
    return Stroke(
        (x, y),
        (radius, radius * float(rng.uniform(0.6, 1))),
        (start, start + turn),
        float(rng.uniform(1, 3)),
        _hue(rng),
    )


# ---- drawing ----


def draw(what: Crowd, background: np.ndarray) -> tuple[Image.Image, list[Box]]:
    """The picture, and the box round the ink of each letter, over a background of uint8 (height, width, 3)."""
    dim = BRIGHTEST_DARK + (255 - BRIGHTEST_DARK) / 255 * background.astype(np.float32)
    picture = Image.fromarray(np.round(dim).astype(np.uint8))
    for stroke in what.strokes:
        _paste(picture, *_stroke_mask(stroke), stroke.colour)
    boxes = []
    for letter in what.letters:
        mask, corner = _letter_mask(letter)
        _paste(picture, mask, corner, letter.ink)
        left, top, right, bottom = mask.getbbox() or (0, 0, *mask.size)
        boxes.append((corner[0] + left, corner[1] + top, right - left, bottom - top))
    return picture, boxes


def _paste(picture: Image.Image, mask: Image.Image, corner: tuple[int, int], colour: tuple[int, int, int]) -> None:
    x, y = corner
    picture.paste(colour, (x, y, x + mask.width, y + mask.height), mask)


def _letter_mask(letter: Letter) -> tuple[Image.Image, tuple[int, int]]:
    """Coverage of a letter, its ink's middle in the middle of the mask, and the mask's corner on the canvas.

    Hinting moves outlines by up to one fine pixel, a quarter of one.
    """
    glyph, (x, y) = letter_mask(letter.font, letter.letter, round(FINE * letter.cap / cap_ratio(letter.font)))
    half = math.ceil((max(glyph.size) / 2 + 1) / FINE)
    square = Image.new("L", (2 * half * FINE, 2 * half * FINE))
    square.paste(glyph, (round(half * FINE - x), round(half * FINE - y)))
    turned = square.rotate(letter.rotation, Image.Resampling.BICUBIC).reduce(FINE)
    return turned, (letter.at[0] - half, letter.at[1] - half)


def _stroke_mask(stroke: Stroke) -> tuple[Image.Image, tuple[int, int]]:
    half = math.ceil(max(stroke.radii) + stroke.width)
    mask = Image.new("L", (2 * half * FINE, 2 * half * FINE))
    middle, (across, down) = half * FINE, (FINE * (radius + stroke.width / 2) for radius in stroke.radii)
    box = (middle - across, middle - down, middle + across, middle + down)
    ImageDraw.Draw(mask).arc(box, *stroke.angles, fill=255, width=max(1, round(FINE * stroke.width)))
    return mask.reduce(FINE), (stroke.at[0] - half, stroke.at[1] - half)


# ---- backgrounds ----


def texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Coloured noise of several octaves: uint8 (height, width, 3). It needs no file; a photograph has more structure."""
    field, side = np.zeros((height, width), np.float32), max(height, width)
    for octave in range(int(rng.integers(3, 7))):
        cells = min(side, 2 ** (octave + 1))
        noise = rng.random((cells, cells), np.float32)
        grown = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
        field += np.asarray(grown)[:height, :width] * 0.6**octave
    field = (field - field.min()) / max(float(np.ptp(field)), 1e-6)
    ends = rng.integers(0, 256, (2, 3)).astype(np.float32)
    return np.round(ends[0] + field[..., None] * (ends[1] - ends[0])).astype(np.uint8)


@dataclass(frozen=True)
class Photographs:
    """Regions of photographs, `files` as their bytes or paths: at random, reduced by up to the picture's own size."""

    files: Sequence[bytes | Path]

    def __call__(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
        chosen = self.files[int(rng.integers(len(self.files)))]
        with Image.open(io.BytesIO(chosen) if isinstance(chosen, bytes) else chosen) as opened:
            photo = opened.convert("RGB")
        most = min(photo.width / width, photo.height / height)
        scale = float(rng.uniform(min(1.0, most), most))  # below 1 the whole of a small photograph is enlarged
        across, down = round(scale * width), round(scale * height)
        left, top = int(rng.integers(photo.width - across + 1)), int(rng.integers(photo.height - down + 1))
        region = photo.crop((left, top, left + across, top + down)).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(region)
