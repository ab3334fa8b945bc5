"""Crowds of letters over photographs: "scenes" and "links".

Letters keep their size in pixels: a larger canvas holds more of them, at one density. Scenes ask
which letter is in the closed ring (find), and which letter is where (map). Links ask which letter a
line joins to the one in the ring; other lines join other letters. Its middle is where a crop of the
training size round the ring ends, or farther away. KEY.json has the boxes, and the answer is
*marked*. Training pictures are larger than what models are trained at: a window that holds the ring
and the answer is cut out. Ink is darker than the background everywhere.
"""

from __future__ import annotations

import colorsys
import io
import math
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont, features

from tools.offline.shards import Sample, write_shards

CLASSES: tuple[str, ...] = tuple(string.ascii_uppercase)
# Degrees at most, either way.
ROTATION = 10.0
Colour = tuple[int, int, int]
Pair = tuple[float, float]
# Left, top, width, height in pixels.
Box = tuple[int, int, int, int]


def jpeg(picture: Image.Image) -> bytes:
    """At full colour resolution, since halving it would blur small pictures more than large
    ones."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=92, subsampling=0)
    return stream.getvalue()


def versions() -> dict[str, str | None]:
    """The versions that decide on the pixels."""
    return {
        "pillow": PIL.__version__,
        "freetype": features.version("freetype2"),
        "numpy": np.__version__,
    }


# ---- letters of font files

# Pixels.
PAD = 16
# Font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel.
MEASURED_SIZE = 1024.0


def _face(font: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def cap_ratio(font: str) -> float:
    """Cap height (of the font's H) over font size."""
    _, top, _, bottom = _face(font, MEASURED_SIZE).getbbox("H", anchor="ls")
    return (bottom - top) / MEASURED_SIZE


@lru_cache(maxsize=64)
def _letter_mask(font: str, letter: str, size: float) -> tuple[Image.Image, Pair]:
    """An upright letter at a font size in pixels: its ink as coverage (mode L), padded, and the
    centre of its ink's box."""
    face = _face(font, size)
    left, top, right, bottom = map(round, face.getbbox(letter, anchor="ls"))
    width = _padded(right - left)
    height = _padded(bottom - top)
    picture = Image.new("L", (width, height))
    ImageDraw.Draw(picture).text((PAD - left, PAD - top), letter, fill=255, font=face, anchor="ls")
    return picture, (PAD + (right - left) / 2, PAD + (bottom - top) / 2)


def _padded(side: int) -> int:
    """Rounded up to a multiple of PAD, with PAD at both ends."""
    return -(-side // PAD) * PAD + 2 * PAD


# ---- crowds: what is where

# Cap height in pixels, log-uniform.
CAP = (17.0, 22.0)
# Pixels a letter, and as many a piece of clutter.
AREA = 48.0**2
# Values of ink reach the first; those of backgrounds begin at the second.
DARKEST_INK = 60
BRIGHTEST_DARK = 120
# Pixels between the ink's circle and the middle of the ring's line.
ROOM = 3.0
# Places that are tried for a letter; where all overlap others it is left out.
TRIES = 60
# Pixels, of the larger coordinate, between letters that a line joins: half the training size, and
# what fits.
REACH = (48, 58)
# Everything is drawn at so many times its size and averaged.
FINE = 4


class Letter(NamedTuple):
    """A letter: cap height in pixels, tilt in degrees counter-clockwise, middle (x, y), and ink."""

    font: str
    letter: str
    cap: float
    rotation: float
    middle: tuple[int, int]
    ink: Colour
    marked: bool = False
    ringed: bool = False

    @property
    def radius(self) -> float:
        """Of a circle round the ink, in pixels: 1.1 cap heights wide."""
        return 0.5 * math.hypot(1.0, 1.1) * self.cap


class Arc(NamedTuple):
    """Part of an ellipse's line; a ring is an arc of 360 degrees."""

    middle: tuple[int, int]
    radii: Pair
    angles: Pair
    width: float
    colour: Colour

    def draw(self, draw: ImageDraw.ImageDraw, origin: int, width: int) -> None:
        """Draw it at FINE times its size with its middle at (origin, origin)."""
        across = FINE * (self.radii[0] + self.width / 2)
        down = FINE * (self.radii[1] + self.width / 2)
        box = (origin - across, origin - down, origin + across, origin + down)
        draw.arc(box, *self.angles, fill=255, width=width)


class Line(NamedTuple):
    """A straight line from its `middle`, as the place of drawing is called, to its end."""

    middle: tuple[int, int]
    end: tuple[int, int]
    width: float
    colour: Colour

    @property
    def radii(self) -> Pair:
        x, y = np.abs(np.subtract(self.end, self.middle)).tolist()
        return x, y

    def draw(self, draw: ImageDraw.ImageDraw, origin: int, width: int) -> None:
        """Draw it at FINE times its size from (origin, origin)."""
        x = origin + FINE * (self.end[0] - self.middle[0])
        y = origin + FINE * (self.end[1] - self.middle[1])
        draw.line((origin, origin, x, y), fill=255, width=width)


class Crowd(NamedTuple):
    """Letters, clutter and lines, and the ring of one letter."""

    letters: list[Letter]
    strokes: list[Arc | Line]
    ring: Arc


def crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    answer: tuple[str, str],
    within: int,
) -> Crowd:
    """Letters and clutter on a canvas of (height, width) pixels.

    answer: font and letter of the ringed one. within: side of a square, in pixels, that holds it
    with its ring. ValueError where that has no room.
    """
    height, width = size
    side = min(within, *size)
    left = int(rng.integers(0, width - side + 1))
    top = int(rng.integers(0, height - side + 1))
    first = _place(rng, *answer, [], (left, top, side, side))
    if first is None:
        raise ValueError(f"a letter with a ring does not fit into {side} × {side} pixels")
    letters = [first._replace(marked=True, ringed=True)]
    ring = Arc(
        first.middle,
        (first.radius + ROOM, first.radius + ROOM),
        (0.0, 360.0),
        float(rng.uniform(2.0, 3.0)),
        _hue(rng),
    )
    count = round(height * width / AREA)
    for _ in range(count - 1):
        font = fonts[int(rng.integers(len(fonts)))]
        name = CLASSES[int(rng.integers(len(CLASSES)))]
        letter = _place(rng, font, name, letters, (0, 0, width, height))
        if letter is not None:
            letters.append(letter)
    # Shuffled, so that the order of the list tells nothing.
    order = rng.permutation(len(letters)).tolist()
    clutter: list[Arc | Line] = [_clutter(rng, size) for _ in range(count)]
    return Crowd([letters[n] for n in order], clutter, ring)


def _clutter(rng: np.random.Generator, size: tuple[int, int]) -> Arc:
    """An arc from the curvature of a ring to nearly straight, anywhere."""
    height, width = size
    y = int(rng.integers(0, height))
    x = int(rng.integers(0, width))
    radius = math.exp(rng.uniform(math.log(CAP[0]), math.log(4 * CAP[0])))
    start = float(rng.uniform(0, 360))
    turn = float(rng.uniform(30, 150)) * CAP[0] / radius
    radii = (radius, radius * float(rng.uniform(0.6, 1)))
    return Arc((x, y), radii, (start, start + turn), float(rng.uniform(1, 3)), _hue(rng))


def linked_crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    answer: tuple[str, str],
    within: int,
) -> Crowd:
    """A crowd with lines that join letters in pairs and pass no other letter, until no more fits.
    The ring is round the letter that is joined to `answer` and has their line's colour. ValueError
    where no letter is REACH away from `answer`."""
    for _ in range(TRIES):
        letters, strokes, ring = crowd(rng, fonts, size, answer, within)
        # The answer is joined first.
        order = sorted(range(len(letters)), key=lambda n: not letters[n].marked)
        if any(_can_join(letters, order[0], m) for m in order[1:]):
            break
    else:
        raise ValueError(
            f"no letter is {REACH[0]} to {REACH[1]} pixels away from another on a canvas of "
            f"{size} pixels"
        )
    partner: dict[int, int] = {}
    lines: list[Line] = []
    for n in order:
        free = [m for m in order if not {n, m} & partner.keys() and _can_join(letters, n, m)]
        if not free:
            continue
        m = free[int(rng.integers(len(free)))]
        partner[n] = m
        partner[m] = n
        lines.append(_join(rng, letters[n], letters[m]))
    ringed = letters[partner[order[0]]]
    radius = ringed.radius + ROOM
    return Crowd(
        [letter._replace(ringed=letter is ringed) for letter in letters],
        [*strokes, *lines],
        ring._replace(middle=ringed.middle, radii=(radius, radius), colour=lines[0].colour),
    )


def _join(rng: np.random.Generator, first: Letter, second: Letter) -> Line:
    """A line between two letters that ends where a ring round each would be."""
    step = np.subtract(second.middle, first.middle) / math.dist(second.middle, first.middle)
    start = first.middle + (first.radius + ROOM) * step
    end = second.middle - (second.radius + ROOM) * step
    (x, y), (end_x, end_y) = np.round([start, end]).astype(int).tolist()
    return Line((x, y), (end_x, end_y), float(rng.uniform(2.0, 3.0)), _hue(rng))


def _can_join(letters: Sequence[Letter], n: int, m: int) -> bool:
    """Whether the larger coordinate between two letters is within REACH, and the line between them
    passes no other."""
    line = np.subtract(letters[m].middle, letters[n].middle)
    if not REACH[0] <= np.abs(line).max() <= REACH[1]:
        return False
    others = [letter for k, letter in enumerate(letters) if k not in (n, m)]
    middles = np.array([letter.middle for letter in others]).reshape(-1, 2) - letters[n].middle
    # The point of the line that is nearest to each.
    nearest = np.clip(middles @ line / (line @ line), 0, 1)[:, None] * line
    distances = np.linalg.norm(middles - nearest, axis=1)
    return bool((distances > [letter.radius + ROOM for letter in others]).all())


def _place(
    rng: np.random.Generator, font: str, name: str, others: Sequence[Letter], inside: Box
) -> Letter | None:
    """A letter within a box where it, with a ring, overlaps none of the others."""
    cap = float(math.exp(rng.uniform(*np.log(CAP))))
    rotation = float(rng.uniform(-ROTATION, ROTATION))
    red, green, blue = rng.integers(0, DARKEST_INK, 3).tolist()
    letter = Letter(font, name, cap, rotation, (0, 0), (red, green, blue))
    reach = letter.radius + ROOM + 2
    left, top, width, height = inside
    columns = (math.ceil(left + reach), math.floor(left + width - reach) + 1)
    rows = (math.ceil(top + reach), math.floor(top + height - reach) + 1)
    if columns[0] >= columns[1] or rows[0] >= rows[1]:
        return None
    for _ in range(TRIES):
        x = int(rng.integers(*columns))
        y = int(rng.integers(*rows))
        if all(math.dist((x, y), other.middle) >= reach + other.radius for other in others):
            return letter._replace(middle=(x, y))
    return None


def _hue(rng: np.random.Generator) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(float(rng.random()), 1.0, float(rng.uniform(0.6, 0.95)))
    return round(255 * red), round(255 * green), round(255 * blue)


# ---- crowds: how they are drawn


def draw_crowd(what: Crowd, background: np.ndarray) -> tuple[Image.Image, list[Box]]:
    """The picture, and the box round the ink of each letter, over a background of uint8 (height,
    width, 3)."""
    dim = BRIGHTEST_DARK + (255 - BRIGHTEST_DARK) / 255 * background.astype(np.float32)
    picture = Image.fromarray(np.round(dim).astype(np.uint8))
    for stroke in (*what.strokes, what.ring):
        half = math.ceil(max(stroke.radii) + stroke.width)
        mask = Image.new("L", (2 * half * FINE, 2 * half * FINE))
        stroke.draw(ImageDraw.Draw(mask), half * FINE, max(1, round(FINE * stroke.width)))
        corner = (stroke.middle[0] - half, stroke.middle[1] - half)
        picture.paste(stroke.colour, corner, mask.reduce(FINE))
    return picture, [_draw_letter(picture, letter) for letter in what.letters]


def _draw_letter(picture: Image.Image, letter: Letter) -> Box:
    """Draw a letter; returns the box round its ink."""
    # Hinting moves outlines by up to one fine pixel.
    size = round(FINE * letter.cap / cap_ratio(letter.font))
    glyph, (x, y) = _letter_mask(letter.font, letter.letter, size)
    half = math.ceil((max(glyph.size) / 2 + 1) / FINE)
    square = Image.new("L", (2 * half * FINE, 2 * half * FINE))
    square.paste(glyph, (round(half * FINE - x), round(half * FINE - y)))
    mask = square.rotate(letter.rotation, Image.Resampling.BICUBIC).reduce(FINE)
    corner = (letter.middle[0] - half, letter.middle[1] - half)
    picture.paste(letter.ink, corner, mask)
    left, top, right, bottom = mask.getbbox() or (0, 0, *mask.size)
    return corner[0] + left, corner[1] + top, right - left, bottom - top


def photograph_region(
    rng: np.random.Generator, files: Sequence[bytes], height: int, width: int
) -> np.ndarray:
    """A random region of a random photograph, reduced by up to the picture's own size."""
    with Image.open(io.BytesIO(files[int(rng.integers(len(files)))])) as opened:
        photo = opened.convert("RGB")
    most = min(photo.width / width, photo.height / height)
    # Below 1 the whole of a small photograph is enlarged.
    scale = float(rng.uniform(min(1.0, most), most))
    across = round(scale * width)
    down = round(scale * height)
    left = int(rng.integers(photo.width - across + 1))
    top = int(rng.integers(photo.height - down + 1))
    region = photo.crop((left, top, left + across, top + down))
    return np.asarray(region.resize((width, height), Image.Resampling.BICUBIC))


# ---- sets of crowds

# Pixels.
SIDES = {"train": 160, "heldout": 384}
COUNTS = {"train": 20_000, "heldout": 520}
# Pixels of a square that holds the answer, so that a window of training does.
WITHIN = 96
# Fonts and photographs of a worker process: sent once, since photographs are large.
_worker: tuple[Sequence[str], Sequence[bytes]]


def write_scenes(
    kind: str,
    folder: Path,
    fonts: Mapping[str, Sequence[str]],
    photographs: Mapping[str, Sequence[bytes]],
    about: Mapping[str, object],
) -> None:
    """Draw "scenes" or "links" into folder/train and folder/heldout; answers walk through the
    letters, then the fonts."""
    for split, count in COUNTS.items():
        index = {
            "classes": CLASSES,
            "size": SIDES[split],
            "seed": 0,
            "made_with": {**about, **versions()},
        }
        jobs = [(kind, split, number) for number in range(count)]
        materials = (fonts[split], photographs[split])
        with Pool(initializer=_start_worker, initargs=materials) as pool:
            samples = pool.imap(_draw_sample, jobs, chunksize=16)
            write_shards(folder / split, samples, kind, 2000, count, index)


def _start_worker(fonts: Sequence[str], photographs: Sequence[bytes]) -> None:
    global _worker
    _worker = fonts, photographs


def _draw_sample(job: tuple[str, str, int]) -> Sample:
    kind, split, number = job
    fonts, photographs = _worker
    # The second number is 0 for the pixels of the published scenes.
    rng = np.random.default_rng([0, kind == "links", split == "heldout", number])
    side = SIDES[split]
    label = number % len(CLASSES)
    font = fonts[number // len(CLASSES) % len(fonts)]
    arrange = linked_crowd if kind == "links" else crowd
    what = arrange(rng, fonts, (side, side), (font, CLASSES[label]), WITHIN)
    picture, boxes = draw_crowd(what, photograph_region(rng, photographs, side, side))
    objects = {
        "bbox": boxes,
        "category": [CLASSES.index(letter.letter) for letter in what.letters],
        "marked": [letter.marked for letter in what.letters],
    }
    if kind == "links":
        objects["evidence"] = [letter.marked or letter.ringed for letter in what.letters]
    return Sample(jpeg(picture), label, {"objects": objects, "group": Path(font).name})
