"""Pictures of letters: one in a small scene ("glyphs"), or a crowd of them over photographs ("scenes", "scenes-count").

**One letter.** A `Scene` is a description in units of the canvas; `draw_scene` draws it, or a window of it, at any number of
pixels, so that a picture of 384 px reduced is one of 96 px. Held-out scenes are seen whole, with a cap height of 0.22 to 0.28
canvases; training scenes through a random window that holds the letter, with a cap height of 0.22 to 0.95 views.

**A crowd.** Letters keep their size in pixels: a larger canvas holds more of them, at one density. Some are *marked* by a
closed ring: which letter the ring is round (find), which letter is where (map). KEY.json has the boxes (modalities/vision/
objects.py). Training pictures are larger than what models are trained at: a window that holds the rings is cut out.

Ink is always darker than the background, so which of the two is the letter is not part of the task.
"""

from __future__ import annotations

import colorsys
import io
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont, features

from recipes.fetchers.common import Sample, write_shards

CLASSES: tuple[str, ...] = tuple(string.ascii_uppercase)
ROTATION = 10.0  # degrees at most, either way
Colour = tuple[int, int, int]
Point = tuple[float, float]
Box = tuple[int, int, int, int]  # left, top, width, height in pixels


def jpeg(picture: Image.Image) -> bytes:
    """Full colour resolution: halving it would blur small pictures more than large ones."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=92, subsampling=0)
    return stream.getvalue()


def versions() -> dict[str, str | None]:
    """The versions that decide on the pixels."""
    return {"pillow": PIL.__version__, "freetype": features.version("freetype2"), "numpy": np.__version__}


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


# ---- letters of font files

PAD = 16  # pixels
_MEASURED = 1024.0  # font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel


@lru_cache(maxsize=64)
def _face(font: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def _ink_size(font: str, letter: str) -> Point:
    """Width and height of a letter's ink over the font size."""
    left, top, right, bottom = _face(font, _MEASURED).getbbox(letter, anchor="ls")
    return (right - left) / _MEASURED, (bottom - top) / _MEASURED


def cap_ratio(font: str) -> float:
    """Cap height (of the font's H) over font size."""
    return _ink_size(font, "H")[1]


@lru_cache(maxsize=64)
def _letter_mask(font: str, letter: str, size: float) -> tuple[Image.Image, Point]:
    """An upright letter at a font size in pixels: its ink as coverage (mode L), and where the ink box's centre is.

    At least PAD empty pixels are on every side, and width and height are multiples of PAD: `reduce` by 2, 4, 8 or PAD
    loses nothing at the edges.
    """
    face = _face(font, size)
    left, top, right, bottom = (round(side) for side in face.getbbox(letter, anchor="ls"))
    width, height = (-(-side // PAD) * PAD + 2 * PAD for side in (right - left, bottom - top))
    picture = Image.new("L", (width, height))
    ImageDraw.Draw(picture).text((PAD - left, PAD - top), letter, fill=255, font=face, anchor="ls")
    return picture, (PAD + (right - left) / 2, PAD + (bottom - top) / 2)


# ---- one letter: what is seen

HELDOUT_CAP = (0.22, 0.28)  # cap height of a scene, in canvases
TRAIN_CAP = (0.22, 0.95)  # cap height of a training view, in views
MARGIN = 0.01  # free between a letter and the edge of a canvas or view
MIN_CONTRAST = 4.0  # of the letter against every colour of the background, as WCAG's ratio of luminances
MAX_CLUTTER_CONTRAST = 1.4
MASTER = 256.0  # cap height, in pixels, at which letters are drawn at least


@dataclass(frozen=True)
class Shape:
    """Clutter: "line" between two corners of `box`, filled "ellipse" in it, or "arc" of it over `angles` (degrees)."""

    kind: str
    box: tuple[float, float, float, float]
    colour: Colour
    width: float
    angles: Point


@dataclass(frozen=True)
class Scene:
    """A letter, its ink box's `centre` (x, y) before it is tilted by `rotation` (degrees, counter-clockwise), and a background
    that runs from paper[0] to paper[1] in the direction `slope` (degrees). Drawn is a square of side 1/zoom about `view`."""

    font: str
    letter: str
    cap_height: float
    centre: Point
    rotation: float
    ink: Colour
    paper: tuple[Colour, Colour]
    slope: float
    clutter: tuple[Shape, ...] = ()
    zoom: float = 1.0
    view: Point = (0.5, 0.5)

    @property
    def extent(self) -> Point:
        """Width and height of the upright box around the tilted letter."""
        width, height = (s / cap_ratio(self.font) * self.cap_height for s in _ink_size(self.font, self.letter))
        cos, sin = abs(math.cos(math.radians(self.rotation))), abs(math.sin(math.radians(self.rotation)))
        return width * cos + height * sin, width * sin + height * cos


def random_scene(rng: np.random.Generator, font: str, letter: str, *, training: bool) -> Scene:
    """A scene with a cap height log-uniform in HELDOUT_CAP, seen whole.

    training: seen through a window that holds its whole letter, with a cap height in the window log-uniform in TRAIN_CAP; wide
    and long letters stop where they fill the window.
    """
    seen = _log_uniform(rng, *TRAIN_CAP) if training else 1.0
    cap_height = _log_uniform(rng, HELDOUT_CAP[0], min(HELDOUT_CAP[1], seen))
    while True:  # until the ink stands out from both colours of the background
        first, ink = (tuple(rng.integers(low, high, 3).tolist()) for low, high in ((150, 256), (0, 120)))
        paper = first, _near(rng, first, 20.0)
        if min(contrast(ink, side) for side in paper) >= MIN_CONTRAST:
            break
    rotation = float(rng.uniform(-ROTATION, ROTATION))
    scene = Scene(font, letter, cap_height, (0.5, 0.5), rotation, ink, paper, float(rng.uniform(0, 360)))
    across, down = (float(rng.uniform(side / 2 + MARGIN, 1 - side / 2 - MARGIN)) for side in scene.extent)
    clutter = tuple(_shape(rng, paper) for _ in range(rng.integers(0, 7)))
    scene = replace(scene, centre=(across, down), clutter=clutter)
    if not training:
        return scene
    zoom = min(max(seen / cap_height, 1.0), (1 - 2 * MARGIN) / max(scene.extent))
    half, view = 0.5 / zoom, []
    for place, side in zip(scene.centre, scene.extent, strict=True):
        reach = side / 2 + MARGIN / zoom
        low, high = max(half, place + reach - half), min(1 - half, place - reach + half)
        view.append(float(rng.uniform(low, max(low, high))))  # equal, but for rounding, where the letter fills it
    return replace(scene, zoom=zoom, view=(view[0], view[1]))


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's ratio of luminances, the lighter above the darker: 1 to 21."""

    def luminance(colour: Colour) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _near(rng: np.random.Generator, colour: Colour, spread: float) -> Colour:
    red, green, blue = np.clip(np.asarray(colour) + rng.normal(0, spread, 3), 0, 255).round().astype(int).tolist()
    return red, green, blue


def _shape(rng: np.random.Generator, paper: tuple[Colour, Colour]) -> Shape:
    """A faint shape that may stick out of the canvas."""
    while True:
        colour = _near(rng, paper[int(rng.integers(2))], 30.0)
        if max(contrast(colour, side) for side in paper) <= MAX_CLUTTER_CONTRAST * contrast(*paper):
            break
    kind = ("line", "ellipse", "arc")[int(rng.integers(3))]
    x, y = rng.uniform(-0.1, 1.1, 2).tolist()
    width, height = (_log_uniform(rng, 0.08, 0.6) for _ in range(2))
    flip = -1 if kind == "line" and rng.random() < 0.5 else 1
    box = (x - width / 2, y - flip * height / 2, x + width / 2, y + flip * height / 2)
    start = float(rng.uniform(0, 360))
    angles = (start, start + float(rng.uniform(60, 300)))
    return Shape(kind, box, colour, _log_uniform(rng, 0.006, 0.04), angles)


# ---- one letter: how it is drawn


def draw_scene(scene: Scene, side: int) -> Image.Image:
    """A square RGB picture of a scene's window; equal arguments give equal pixels. Small pictures are drawn at up to four
    times their size and averaged."""
    fine = max(2, min(4, round(384 / side)))
    scale = scene.zoom * side * fine  # fine pixels to a unit of the scene

    def place(x: float, y: float) -> Point:
        return (x - scene.view[0]) * scale + side * fine / 2, (y - scene.view[1]) * scale + side * fine / 2

    x, y = ((np.arange(side) + 0.5 - side / 2) / (scene.zoom * side) + middle - 0.5 for middle in scene.view)
    cos, sin = math.cos(math.radians(scene.slope)), math.sin(math.radians(scene.slope))
    along = (x * cos + y[:, None] * sin) / (abs(cos) + abs(sin)) + 0.5  # 0 to 1, corner to corner
    first, second = (np.asarray(colour, np.float32) for colour in scene.paper)
    shares = np.clip(along, 0, 1).astype(np.float32)[..., None]
    picture = Image.fromarray((first + (second - first) * shares + 0.5).astype(np.uint8))
    for shape in scene.clutter:
        mask = Image.new("L", (side * fine, side * fine))
        pen, corners = ImageDraw.Draw(mask), [*place(*shape.box[:2]), *place(*shape.box[2:])]
        width = max(1, round(shape.width * scale))
        if shape.kind == "line":
            pen.line(corners, fill=255, width=width)
        elif shape.kind == "ellipse":
            pen.ellipse(corners, fill=255)
        else:
            pen.arc(corners, *shape.angles, fill=255, width=width)
        picture.paste(shape.colour, mask=mask.reduce(fine))
    picture.paste(scene.ink, mask=_tilted_letter(scene, side * fine, scale, place(*scene.centre)).reduce(fine))
    return picture


def _tilted_letter(scene: Scene, side: int, scale: float, centre: Point) -> Image.Image:
    """The letter, drawn upright and large, halved as often as it can be, and brought to its place by one affine map.

    Small letters would be shaped by hinting, which moves their outlines to whole pixels: strokes would be thicker in
    small pictures than in large ones. From MASTER pixels of cap height on, that is below 1% of a letter's ink.
    """
    mask = Image.new("L", (side, side))
    cap = scene.cap_height * scale  # in fine pixels
    master = 2.0 ** math.ceil(math.log2(max(cap, MASTER)))
    glyph, ink = _letter_mask(scene.font, scene.letter, master / cap_ratio(scene.font))
    halved = min(2 ** math.floor(math.log2(master / cap)), PAD)
    glyph, (u, v) = glyph.reduce(halved), (ink[0] / halved, ink[1] / halved)
    shrink = master / halved / cap  # glyph pixels to a fine pixel, 1 to 2
    (x, y), reach = centre, math.hypot(*glyph.size) / 2 / shrink
    left, top = max(0, math.floor(x - reach)), max(0, math.floor(y - reach))
    right, bottom = min(side, math.ceil(x + reach)), min(side, math.ceil(y + reach))
    cos, sin = (f(math.radians(scene.rotation)) * shrink for f in (math.cos, math.sin))
    x, y = x - left, y - top
    matrix = (cos, -sin, u - cos * x + sin * y, sin, cos, v - sin * x - cos * y)
    turned = glyph.transform((right - left, bottom - top), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    mask.paste(turned, (left, top))
    return mask


# ---- crowds: what stands where

CAP = (17.0, 22.0)  # cap height in pixels, log-uniform
AREA = 48.0**2  # pixels a letter, and as many a piece of clutter
DARKEST_INK, BRIGHTEST_DARK = 60, 120  # values of ink reach the first, those of backgrounds begin at the second
ROOM = 3.0  # pixels between the ink's circle and the middle of the ring's line
TRIES = 60  # places that are tried for a letter; where all overlap others it is left out
FINE = 4  # everything is drawn at so many times its size and averaged


@dataclass(frozen=True)
class Letter:
    """A letter of a font: cap height in pixels, tilt in degrees counter-clockwise, its middle (x, y), and its ink."""

    font: str
    letter: str
    cap: float
    rotation: float
    at: tuple[int, int]
    ink: Colour
    marked: bool = False

    @property
    def radius(self) -> float:
        """Of a circle round the ink, in pixels: 1.1 cap heights wide."""
        return 0.5 * math.hypot(1.0, 1.1) * self.cap


@dataclass(frozen=True)
class Stroke:
    """Part of an ellipse's line, or all of it: the ring round a marked letter is an arc of 360 degrees."""

    at: tuple[int, int]
    radii: Point
    angles: Point
    width: float
    colour: Colour


def crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    marked: Sequence[tuple[str, str]],
    within: int,
) -> tuple[list[Letter], list[Stroke]]:
    """Letters, and clutter and rings, on a canvas of (height, width) pixels.

    marked: (font, letter) of each marked one; the others are drawn from `fonts`. within: side of a square, in pixels, that
    holds all that are marked with their rings. Raises ValueError where they find no room.
    """
    (height, width), side = size, min(within, *size)
    inside = (int(rng.integers(0, width - side + 1)), int(rng.integers(0, height - side + 1)), side, side)
    letters: list[Letter] = []
    for _ in range(TRIES):
        letters = []
        for font, name in marked:
            if (letter := _place(rng, font, name, letters, inside, marked=True)) is None:
                break
            letters.append(letter)
        if len(letters) == len(marked):
            break
    else:
        raise ValueError(f"{len(marked)} marked letters find no room in {side} pixels; expected fewer")
    rings = [
        Stroke(letter.at, (letter.radius + ROOM,) * 2, (0.0, 360.0), float(rng.uniform(2.0, 3.0)), _hue(rng))
        for letter in letters
    ]
    for _ in range(max(0, round(height * width / AREA) - len(marked))):
        font, name = fonts[int(rng.integers(len(fonts)))], CLASSES[int(rng.integers(len(CLASSES)))]
        if placed := _place(rng, font, name, letters, (0, 0, width, height)):
            letters.append(placed)
    order = rng.permutation(len(letters)).tolist()  # so that the order of the list tells nothing
    clutter = []
    for _ in range(round(height * width / AREA)):  # arcs from the curvature of a ring to nearly straight, anywhere
        y, x = (int(rng.integers(0, most)) for most in size)
        radius = _log_uniform(rng, CAP[0], 4 * CAP[0])
        start, turn = float(rng.uniform(0, 360)), float(rng.uniform(30, 150)) * CAP[0] / radius
        radii = (radius, radius * float(rng.uniform(0.6, 1)))
        clutter.append(Stroke((x, y), radii, (start, start + turn), float(rng.uniform(1, 3)), _hue(rng)))
    return [letters[n] for n in order], clutter + rings


def _place(
    rng: np.random.Generator, font: str, name: str, others: Sequence[Letter], inside: Box, *, marked: bool = False
) -> Letter | None:
    """A letter within a box where it, and the ring that it may have, overlaps none of the others."""
    cap = float(math.exp(rng.uniform(*np.log(CAP))))
    rotation = float(rng.uniform(-ROTATION, ROTATION))
    red, green, blue = rng.integers(0, DARKEST_INK, 3).tolist()
    letter = Letter(font, name, cap, rotation, (0, 0), (red, green, blue), marked)
    reach = letter.radius + ROOM + 2
    left, top, width, height = inside
    for _ in range(TRIES):
        x, y = (
            int(rng.integers(math.ceil(low + reach), math.floor(low + most - reach) + 1))
            for low, most in ((left, width), (top, height))
        )
        if all(math.dist((x, y), other.at) >= reach + other.radius for other in others):
            return replace(letter, at=(x, y))
    return None


def _hue(rng: np.random.Generator) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(float(rng.random()), 1.0, float(rng.uniform(0.6, 0.95)))
    return round(255 * red), round(255 * green), round(255 * blue)


# ---- crowds: how they are drawn


def draw_crowd(letters: list[Letter], strokes: list[Stroke], background: np.ndarray) -> tuple[Image.Image, list[Box]]:
    """The picture, and the box round the ink of each letter, over a background of uint8 (height, width, 3)."""
    dim = BRIGHTEST_DARK + (255 - BRIGHTEST_DARK) / 255 * background.astype(np.float32)
    picture = Image.fromarray(np.round(dim).astype(np.uint8))
    for stroke in strokes:
        half = math.ceil(max(stroke.radii) + stroke.width)
        mask, middle = Image.new("L", (2 * half * FINE, 2 * half * FINE)), half * FINE
        across, down = (FINE * (radius + stroke.width / 2) for radius in stroke.radii)
        box = (middle - across, middle - down, middle + across, middle + down)
        ImageDraw.Draw(mask).arc(box, *stroke.angles, fill=255, width=max(1, round(FINE * stroke.width)))
        picture.paste(stroke.colour, (stroke.at[0] - half, stroke.at[1] - half), mask.reduce(FINE))
    boxes = []
    for letter in letters:
        # hinting moves outlines by up to one fine pixel
        glyph, (x, y) = _letter_mask(letter.font, letter.letter, round(FINE * letter.cap / cap_ratio(letter.font)))
        half = math.ceil((max(glyph.size) / 2 + 1) / FINE)
        square = Image.new("L", (2 * half * FINE, 2 * half * FINE))
        square.paste(glyph, (round(half * FINE - x), round(half * FINE - y)))
        mask = square.rotate(letter.rotation, Image.Resampling.BICUBIC).reduce(FINE)
        corner = (letter.at[0] - half, letter.at[1] - half)
        picture.paste(letter.ink, corner, mask)
        left, top, right, bottom = mask.getbbox() or (0, 0, *mask.size)
        boxes.append((corner[0] + left, corner[1] + top, right - left, bottom - top))
    return picture, boxes


@dataclass(frozen=True)
class Photographs:
    """Regions of photographs, `files` as bytes: at random, reduced by up to the picture's own size."""

    files: Sequence[bytes]

    def __call__(self, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
        with Image.open(io.BytesIO(self.files[int(rng.integers(len(self.files)))])) as opened:
            photo = opened.convert("RGB")
        most = min(photo.width / width, photo.height / height)
        scale = float(rng.uniform(min(1.0, most), most))  # below 1 the whole of a small photograph is enlarged
        across, down = round(scale * width), round(scale * height)
        left, top = int(rng.integers(photo.width - across + 1)), int(rng.integers(photo.height - down + 1))
        region = photo.crop((left, top, left + across, top + down)).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(region)


# ---- sets of crowds

SCENES = ("scenes", "scenes-count")
SIDES = {"train": 160, "heldout": 384}  # pixels
COUNTS = {"train": 20_000, "heldout": 520}
MOST_RINGS = 4  # as many as 96 pixels have room for
WITHIN = 96  # pixels of a square that holds all rings, so that a window of training does
_worker: tuple[Sequence[str], Photographs]  # of a process: once, since photographs are large


def write_scenes(
    folder: Path,
    kind: str,
    fonts: Mapping[str, Sequence[str]],
    backgrounds: Mapping[str, Photographs],
    made_with: Mapping[str, object],
) -> None:
    """Draw a set of `SCENES` into folder/train and folder/heldout, with the fonts and backgrounds of each split.

    Ringed letters walk through the letters, then the fonts.
    """
    for split, count in COUNTS.items():
        index = {"classes": CLASSES, "size": SIDES[split], "seed": 0, "made_with": {**made_with, **versions()}}
        jobs = [(kind, split, number) for number in range(count)]
        with Pool(initializer=_start_worker, initargs=(tuple(fonts[split]), backgrounds[split])) as pool:
            write_shards(folder / split, pool.imap(_draw_sample, jobs, chunksize=16), kind, 2000, count, index)


def _start_worker(fonts: Sequence[str], background: Photographs) -> None:
    global _worker
    _worker = fonts, background


def _draw_sample(job: tuple[str, str, int]) -> Sample:
    """Picture `number` of a kind's split."""
    (kind, split, number), (fonts, background) = job, _worker
    rng, side = np.random.default_rng([0, SCENES.index(kind), split == "heldout", number]), SIDES[split]
    if kind == "scenes":
        label = number % len(CLASSES)
        marked = [(fonts[number // len(CLASSES) % len(fonts)], CLASSES[label])]
    else:
        label = number % (MOST_RINGS + 1)
        pairs = rng.integers([len(fonts), len(CLASSES)], size=(label, 2)).tolist()
        marked = [(fonts[font], CLASSES[letter]) for font, letter in pairs]
    letters, strokes = crowd(rng, fonts, (side, side), marked, WITHIN)
    picture, boxes = draw_crowd(letters, strokes, background(rng, side, side))
    objects = {
        "bbox": boxes,
        "category": [CLASSES.index(letter.letter) for letter in letters],
        "marked": [letter.marked for letter in letters],
    }
    group = {"group": Path(marked[0][0]).name} if kind == "scenes" else {}
    return Sample(jpeg(picture), label, {"objects": objects, **group})
