"""Capital letters of real fonts in drawn scenes: pictures with detail at every resolution.

A `Scene` is a description, in units of the canvas: a letter of a font, its place, size, tilt and colours, a background
that runs from one colour to another, and a few faint shapes. `draw` puts a scene, or a window of it (`View`), on any
number of pixels. Outlines are drawn anew each time, so a picture of 384 px is not an enlarged one of 96 px; and since
nothing depends on the pixel grid (there is no pixel noise), reducing the large picture gives the small one.

Held-out scenes are seen whole. The letter's cap height is log-uniform in [0.22, 0.28] of the canvas, and the letter
lies anywhere fully inside. Training scenes are made the same way and seen through a random window that holds the whole
letter, so that the cap height in the view is log-uniform in [0.22, 0.95]. This is the usual random resized crop, kept
to crops that do not lose the object. It is what makes larger test pictures a fair question about positions: a letter
of a held-out scene at 144 px covers as many pixels as a letter of 0.66–0.84 of a training view at 48 px, so strokes of
that thickness have been seen by the patches. What has not been seen at 48 px is a letter among so many patches.

Ink is always darker than paper, and both are tinted at random: which of the two is the letter is not part of the task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from recipes.fetchers.glyphs.letters import PAD, cap_ratio, letter_box, letter_mask

HELDOUT_CAP = (0.22, 0.28)  # cap height of a scene, in canvases
TRAIN_CAP = (0.22, 0.95)  # cap height of a training view, in views
MARGIN = 0.01  # what is left free between a letter and the edge of a canvas or view
MAX_ROTATION = 10.0  # degrees
MIN_CONTRAST = 4.0  # of the letter against every colour of the background, as WCAG's ratio of luminances
MAX_CLUTTER_CONTRAST = 1.4
MASTER = 256.0  # cap height, in pixels, at which letters are drawn at least

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """Clutter: "line" between two corners of `box`, filled "ellipse" in it, or "arc" of it over `angles` (degrees)."""

    kind: str
    box: tuple[float, float, float, float]
    colour: Colour
    width: float = 0.0
    angles: tuple[float, float] = (0.0, 360.0)


@dataclass(frozen=True)
class Scene:
    """What is to be seen, in units of the canvas (x to the right, y down, both from 0 to 1).

    centre is that of the letter's ink box before it is tilted by `rotation` (degrees, counter-clockwise). The
    background runs linearly from paper[0] to paper[1] in the direction `slope` (degrees), corner to corner.
    """

    font: str
    letter: str
    cap_height: float
    centre: tuple[float, float]
    rotation: float
    ink: Colour
    paper: tuple[Colour, Colour]
    slope: float
    clutter: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class View:
    """The window of a scene that is drawn: a square of side 1/zoom about `centre`, zoom ≥ 1."""

    zoom: float = 1.0
    centre: tuple[float, float] = (0.5, 0.5)


# ---- scenes ----


def extent(scene: Scene) -> tuple[float, float]:
    """Width and height, in canvases, of the upright box around the tilted letter."""
    width, height = (side * scene.cap_height for side in letter_box(scene.font, scene.letter))
    cos, sin = abs(math.cos(math.radians(scene.rotation))), abs(math.sin(math.radians(scene.rotation)))
    return width * cos + height * sin, width * sin + height * cos


def cap_height_in(scene: Scene, view: View) -> float:
    """Cap height as a part of the view's side."""
    return scene.cap_height * view.zoom


def heldout_example(rng: np.random.Generator, font: str | Path, letter: str) -> tuple[Scene, View]:
    """A scene with a cap height log-uniform in HELDOUT_CAP, seen whole."""
    return _scene(rng, str(font), letter, _log_uniform(rng, *HELDOUT_CAP)), View()


def training_example(rng: np.random.Generator, font: str | Path, letter: str) -> tuple[Scene, View]:
    """A scene of the same kind and a window on it, with a cap height in the window that is log-uniform in TRAIN_CAP.

    The window holds the whole letter and stays within the scene. Letters too wide or long to fill 0.95 of a window
    stop where they fill it.
    """
    font = str(font)
    seen = _log_uniform(rng, *TRAIN_CAP)
    scene = _scene(rng, font, letter, _log_uniform(rng, HELDOUT_CAP[0], min(HELDOUT_CAP[1], seen)))
    largest = (1 - 2 * MARGIN) / max(extent(scene))
    zoom = min(max(seen / scene.cap_height, 1.0), largest)
    half = 0.5 / zoom
    centre = []
    for place, side in zip(scene.centre, extent(scene), strict=True):
        reach = side / 2 + MARGIN / zoom
        low, high = max(half, place + reach - half), min(1 - half, place - reach + half)
        centre.append(float(rng.uniform(low, max(low, high))))  # equal, but for rounding, where the letter fills it
    return scene, View(zoom, (centre[0], centre[1]))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _scene(rng: np.random.Generator, font: str, letter: str, cap_height: float) -> Scene:
    ink, paper = _colours(rng)
    rotation = float(rng.uniform(-MAX_ROTATION, MAX_ROTATION))
    scene = Scene(font, letter, cap_height, (0.5, 0.5), rotation, ink, paper, float(rng.uniform(0, 360)))
    across, down = (float(rng.uniform(side / 2 + MARGIN, 1 - side / 2 - MARGIN)) for side in extent(scene))
    clutter = tuple(_shape(rng, paper) for _ in range(rng.integers(0, 7)))
    return replace(scene, centre=(across, down), clutter=clutter)


def _luminance(colour: Colour) -> float:
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: Colour, other: Colour) -> float:
    """(L₁ + 0.05) / (L₂ + 0.05), the lighter above the darker: 1 for equal luminances, 21 for black on white."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _near(rng: np.random.Generator, colour: Colour, spread: float) -> Colour:
    red, green, blue = np.clip(np.asarray(colour) + rng.normal(0, spread, 3), 0, 255).round().astype(int).tolist()
    return red, green, blue


def _colours(rng: np.random.Generator) -> tuple[Colour, tuple[Colour, Colour]]:
    """Dark ink and two light background colours; drawn again until the ink stands out from both."""
    while True:
        first, ink = (tuple(rng.integers(low, high, 3).tolist()) for low, high in ((150, 256), (0, 120)))
        second = _near(rng, first, 20.0)
        if min(_contrast(ink, first), _contrast(ink, second)) >= MIN_CONTRAST:
            return ink, (first, second)


def _shape(rng: np.random.Generator, paper: tuple[Colour, Colour]) -> Shape:
    """A faint shape that may stick out of the canvas."""
    while True:
        colour = _near(rng, paper[int(rng.integers(2))], 30.0)
        if max(_contrast(colour, side) for side in paper) <= MAX_CLUTTER_CONTRAST * _contrast(*paper):
            break
    kind = ("line", "ellipse", "arc")[int(rng.integers(3))]
    x, y = rng.uniform(-0.1, 1.1, 2).tolist()
    width, height = (_log_uniform(rng, 0.08, 0.6) for _ in range(2))
    flip = -1 if kind == "line" and rng.random() < 0.5 else 1
    box = (x - width / 2, y - flip * height / 2, x + width / 2, y + flip * height / 2)
    start = float(rng.uniform(0, 360))
    angles = (start, start + float(rng.uniform(60, 300)))
    return Shape(kind, box, colour, _log_uniform(rng, 0.006, 0.04), angles)


# ---- drawing ----


@dataclass(frozen=True)
class _Canvas:
    """Where scene coordinates fall on the pixels of an enlarged canvas of which each final pixel holds `over`²."""

    height: int
    width: int
    over: int
    view: View

    @property
    def scale(self) -> float:
        """Fine pixels to a unit of the scene; the shorter side shows 1/zoom of it, the longer one more."""
        return self.view.zoom * min(self.height, self.width) * self.over

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.view.centre[0]) * self.scale + self.width * self.over / 2
        return across, (y - self.view.centre[1]) * self.scale + self.height * self.over / 2

    def mask(self) -> Image.Image:
        return Image.new("L", (self.width * self.over, self.height * self.over))


def draw(scene: Scene, size: tuple[int, int], view: View | None = None) -> Image.Image:
    """The scene, or a window of it, as an RGB picture of size (height, width); equal arguments give equal pixels.

    The shorter side shows the window; a longer one shows more of the scene, at the same scale. Small pictures are
    drawn at up to four times their size and averaged.
    """
    height, width = size
    canvas = _Canvas(height, width, max(2, min(4, round(384 / min(size)))), view or View())
    picture = _background(scene, canvas)
    for shape in scene.clutter:
        picture.paste(shape.colour, mask=_shape_mask(shape, canvas).reduce(canvas.over))
    picture.paste(scene.ink, mask=_placed_letter(scene, canvas).reduce(canvas.over))
    return picture


def _background(scene: Scene, canvas: _Canvas) -> Image.Image:
    scale = canvas.scale / canvas.over
    x = (np.arange(canvas.width) + 0.5 - canvas.width / 2) / scale + canvas.view.centre[0] - 0.5
    y = (np.arange(canvas.height) + 0.5 - canvas.height / 2) / scale + canvas.view.centre[1] - 0.5
    cos, sin = math.cos(math.radians(scene.slope)), math.sin(math.radians(scene.slope))
    along = (x * cos + y[:, None] * sin) / (abs(cos) + abs(sin)) + 0.5  # 0 to 1, corner to corner
    shares = np.clip(along, 0, 1).astype(np.float32)[..., None]
    first, second = (np.asarray(colour, np.float32) for colour in scene.paper)
    return Image.fromarray((first + (second - first) * shares + 0.5).astype(np.uint8))


def _shape_mask(shape: Shape, canvas: _Canvas) -> Image.Image:
    mask = canvas.mask()
    pen = ImageDraw.Draw(mask)
    corners = [*canvas.place(*shape.box[:2]), *canvas.place(*shape.box[2:])]
    width = max(1, round(shape.width * canvas.scale))
    if shape.kind == "line":
        pen.line(corners, fill=255, width=width)
    elif shape.kind == "ellipse":
        pen.ellipse(corners, fill=255)
    else:
        pen.arc(corners, *shape.angles, fill=255, width=width)
    return mask


def _placed_letter(scene: Scene, canvas: _Canvas) -> Image.Image:
    """The letter, drawn upright and large, halved as often as it can be, and brought to its place by one affine map.

    Small letters would be shaped by hinting, which moves their outlines to whole pixels: strokes would be thicker in
    small pictures than in large ones. From MASTER pixels of cap height on, that is below 1% of a letter's ink.
    """
    mask = canvas.mask()
    needed = scene.cap_height * canvas.scale  # cap height in fine pixels
    master = 2.0 ** math.ceil(math.log2(max(needed, MASTER)))
    glyph, ink = letter_mask(scene.font, scene.letter, master / cap_ratio(scene.font))
    halved = min(2 ** math.floor(math.log2(master / needed)), PAD)
    glyph, (u, v) = glyph.reduce(halved), (ink[0] / halved, ink[1] / halved)
    shrink = master / halved / needed  # glyph pixels to a fine pixel, 1 to 2
    x, y = canvas.place(*scene.centre)
    reach = math.hypot(*glyph.size) / 2 / shrink
    left, top = max(0, math.floor(x - reach)), max(0, math.floor(y - reach))
    right, bottom = min(mask.width, math.ceil(x + reach)), min(mask.height, math.ceil(y + reach))
    if right <= left or bottom <= top:
        return mask  # outside the view
    cos, sin = (f(math.radians(scene.rotation)) * shrink for f in (math.cos, math.sin))
    x, y = x - left, y - top
    matrix = (cos, -sin, u - cos * x + sin * y, sin, cos, v - sin * x - cos * y)
    turned = glyph.transform((right - left, bottom - top), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    mask.paste(turned, (left, top))
    return mask
