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
import os
import signal
import string
from collections.abc import Mapping, Sequence
from functools import lru_cache
from multiprocessing import Pool, parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

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

PAD = 16  # pixels
_MEASURED = 1024.0  # font size at which letters are measured, in pixels; hinting moves outlines by up to one pixel


def _face(font: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=4096)
def cap_ratio(font: str) -> float:
    """Cap height (of the font's H) over font size."""
    _, top, _, bottom = _face(font, _MEASURED).getbbox("H", anchor="ls")
    return (bottom - top) / _MEASURED


@lru_cache(maxsize=64)
def _letter_mask(font: str, letter: str, size: float) -> tuple[Image.Image, Point]:
    """An upright letter at a font size in pixels: its ink as coverage (mode L), padded, and its ink
    box's centre."""
    face = _face(font, size)
    left, top, right, bottom = (round(side) for side in face.getbbox(letter, anchor="ls"))
    width, height = (-(-side // PAD) * PAD + 2 * PAD for side in (right - left, bottom - top))
    picture = Image.new("L", (width, height))
    ImageDraw.Draw(picture).text((PAD - left, PAD - top), letter, fill=255, font=face, anchor="ls")
    return picture, (PAD + (right - left) / 2, PAD + (bottom - top) / 2)


# ---- crowds: what stands where

CAP = (17.0, 22.0)  # cap height in pixels, log-uniform
AREA = 48.0**2  # pixels a letter, and as many a piece of clutter
# values of ink reach the first, those of backgrounds begin at the second
DARKEST_INK = 60
BRIGHTEST_DARK = 120
ROOM = 3.0  # pixels between the ink's circle and the middle of the ring's line
TRIES = 60  # places that are tried for a letter; where all overlap others it is left out
# Pixels, of the larger coordinate, between letters that a line joins: half the training size, and
# what fits.
REACH = (48, 58)
FINE = 4  # everything is drawn at so many times its size and averaged


class Letter(NamedTuple):
    """A letter: cap height in pixels, tilt in degrees counter-clockwise, middle (x, y), and ink."""

    font: str
    letter: str
    cap: float
    rotation: float
    at: tuple[int, int]
    ink: Colour
    marked: bool = False
    ringed: bool = False

    @property
    def radius(self) -> float:
        """Of a circle round the ink, in pixels: 1.1 cap heights wide."""
        return 0.5 * math.hypot(1.0, 1.1) * self.cap


class Stroke(NamedTuple):
    """Part of an ellipse's line, or all of it: a ring is an arc of 360 degrees. With `to` it is a
    line from `at` to there."""

    at: tuple[int, int]
    radii: Point
    angles: Point
    width: float
    colour: Colour
    to: tuple[int, int] | None = None


def crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    answer: tuple[str, str],
    within: int,
) -> tuple[list[Letter], list[Stroke]]:
    """Letters, and clutter and last a ring, on a canvas of (height, width) pixels.

    answer: font and letter of the ringed one. within: side of a square, in pixels, that holds it
    with its ring. ValueError where that has no room.
    """
    (height, width), side = size, min(within, *size)
    square = (
        int(rng.integers(0, width - side + 1)),
        int(rng.integers(0, height - side + 1)),
        side,
        side,
    )
    letter = _place(rng, *answer, [], square)
    if letter is None:
        raise ValueError(f"a letter with a ring does not fit into {side} × {side} pixels")
    letters = [letter._replace(marked=True, ringed=True)]
    ring = Stroke(
        letter.at,
        (letter.radius + ROOM,) * 2,
        (0.0, 360.0),
        float(rng.uniform(2.0, 3.0)),
        _hue(rng),
    )
    for _ in range(max(0, round(height * width / AREA) - 1)):
        font = fonts[int(rng.integers(len(fonts)))]
        name = CLASSES[int(rng.integers(len(CLASSES)))]
        if placed := _place(rng, font, name, letters, (0, 0, width, height)):
            letters.append(placed)
    order = rng.permutation(len(letters)).tolist()  # so that the order of the list tells nothing
    clutter = []
    for _ in range(
        round(height * width / AREA)
    ):  # arcs from the curvature of a ring to nearly straight, anywhere
        y, x = (int(rng.integers(0, most)) for most in size)
        radius = math.exp(rng.uniform(math.log(CAP[0]), math.log(4 * CAP[0])))
        start = float(rng.uniform(0, 360))
        turn = float(rng.uniform(30, 150)) * CAP[0] / radius
        radii = (radius, radius * float(rng.uniform(0.6, 1)))
        clutter.append(
            Stroke((x, y), radii, (start, start + turn), float(rng.uniform(1, 3)), _hue(rng))
        )
    return [letters[n] for n in order], [*clutter, ring]


def linked_crowd(
    rng: np.random.Generator,
    fonts: Sequence[str],
    size: tuple[int, int],
    answer: tuple[str, str],
    within: int,
) -> tuple[list[Letter], list[Stroke]]:
    """A crowd with lines that join letters in pairs and pass no other letter, until no more fits.
    The ring is round the letter that is joined to `answer` and has their line's colour. ValueError
    where no letter is REACH away from `answer`."""
    for _ in range(TRIES):
        letters, (*strokes, ring) = crowd(rng, fonts, size, answer, within)
        order = sorted(range(len(letters)), key=lambda n: not letters[n].marked)
        if any(_can_join(letters, order[0], m) for m in order[1:]):
            break
    else:
        raise ValueError(
            f"no letter is {REACH[0]} to {REACH[1]} pixels away from another on a canvas of {size} pixels"
        )
    pairs: dict[int, int] = {}
    for n in order:
        partners = [m for m in order if not {n, m} & pairs.keys() and _can_join(letters, n, m)]
        if partners:
            m = partners[int(rng.integers(len(partners)))]
            pairs |= {n: m, m: n}
            step = np.subtract(letters[m].at, letters[n].at) / math.dist(
                letters[m].at, letters[n].at
            )
            gaps = [(letters[k].radius + ROOM) * step for k in (n, m)]
            (x, y), (to_x, to_y) = (
                np.round([letters[n].at + gaps[0], letters[m].at - gaps[1]]).astype(int).tolist()
            )
            strokes.append(
                Stroke(
                    (x, y), (0, 0), (0, 0), float(rng.uniform(2.0, 3.0)), _hue(rng), (to_x, to_y)
                )
            )
    start = letters[pairs[order[0]]]
    line = next(stroke for stroke in strokes if stroke.to is not None)
    ring = ring._replace(at=start.at, radii=(start.radius + ROOM,) * 2, colour=line.colour)
    return [letter._replace(ringed=letter is start) for letter in letters], [*strokes, ring]


def _can_join(letters: Sequence[Letter], n: int, m: int) -> bool:
    """Whether the larger coordinate between two letters is within REACH, and the line between them
    passes no other."""
    line = np.subtract(letters[m].at, letters[n].at)
    if not REACH[0] <= np.abs(line).max() <= REACH[1]:
        return False
    others = [letter for k, letter in enumerate(letters) if k not in (n, m)]
    places = np.array([letter.at for letter in others]).reshape(-1, 2) - letters[n].at
    nearest = np.clip(places @ line / (line @ line), 0, 1)[:, None] * line
    return bool(
        (
            np.linalg.norm(places - nearest, axis=1) > [letter.radius + ROOM for letter in others]
        ).all()
    )


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
    sides = ((left, left + width), (top, top + height))
    spans = [(math.ceil(low + reach), math.floor(high - reach) + 1) for low, high in sides]
    for _ in range(TRIES if all(low < high for low, high in spans) else 0):
        x, y = (int(rng.integers(*span)) for span in spans)
        if all(math.dist((x, y), other.at) >= reach + other.radius for other in others):
            return letter._replace(at=(x, y))
    return None


def _hue(rng: np.random.Generator) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(float(rng.random()), 1.0, float(rng.uniform(0.6, 0.95)))
    return round(255 * red), round(255 * green), round(255 * blue)


# ---- crowds: how they are drawn


def draw_crowd(
    letters: list[Letter], strokes: list[Stroke], background: np.ndarray
) -> tuple[Image.Image, list[Box]]:
    """The picture, and the box round the ink of each letter, over a background of uint8 (height,
    width, 3)."""
    dim = BRIGHTEST_DARK + (255 - BRIGHTEST_DARK) / 255 * background.astype(np.float32)
    picture = Image.fromarray(np.round(dim).astype(np.uint8))
    for stroke in strokes:
        span = stroke.radii if stroke.to is None else np.abs(np.subtract(stroke.to, stroke.at))
        half = math.ceil(max(span) + stroke.width)
        width = max(1, round(FINE * stroke.width))
        mask = Image.new("L", (2 * half * FINE, 2 * half * FINE))
        middle = half * FINE
        if stroke.to is not None:
            end = (middle + FINE * (b - a) for a, b in zip(stroke.at, stroke.to, strict=True))
            ImageDraw.Draw(mask).line((middle, middle, *end), fill=255, width=width)
        else:
            across, down = (FINE * (radius + stroke.width / 2) for radius in stroke.radii)
            box = (middle - across, middle - down, middle + across, middle + down)
            ImageDraw.Draw(mask).arc(box, *stroke.angles, fill=255, width=width)
        picture.paste(stroke.colour, (stroke.at[0] - half, stroke.at[1] - half), mask.reduce(FINE))
    boxes = []
    for letter in letters:
        # hinting moves outlines by up to one fine pixel
        glyph, (x, y) = _letter_mask(
            letter.font, letter.letter, round(FINE * letter.cap / cap_ratio(letter.font))
        )
        half = math.ceil((max(glyph.size) / 2 + 1) / FINE)
        square = Image.new("L", (2 * half * FINE, 2 * half * FINE))
        square.paste(glyph, (round(half * FINE - x), round(half * FINE - y)))
        mask = square.rotate(letter.rotation, Image.Resampling.BICUBIC).reduce(FINE)
        corner = (letter.at[0] - half, letter.at[1] - half)
        picture.paste(letter.ink, corner, mask)
        left, top, right, bottom = mask.getbbox() or (0, 0, *mask.size)
        boxes.append((corner[0] + left, corner[1] + top, right - left, bottom - top))
    return picture, boxes


def photograph_region(
    rng: np.random.Generator, files: Sequence[bytes], height: int, width: int
) -> np.ndarray:
    """A random region of a random photograph, reduced by up to the picture's own size."""
    with Image.open(io.BytesIO(files[int(rng.integers(len(files)))])) as opened:
        photo = opened.convert("RGB")
    most = min(photo.width / width, photo.height / height)
    scale = float(
        rng.uniform(min(1.0, most), most)
    )  # below 1 the whole of a small photograph is enlarged
    across = round(scale * width)
    down = round(scale * height)
    left = int(rng.integers(photo.width - across + 1))
    top = int(rng.integers(photo.height - down + 1))
    region = photo.crop((left, top, left + across, top + down)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.asarray(region)


# ---- sets of crowds

SIDES = {"train": 160, "heldout": 384}  # pixels
COUNTS = {"train": 20_000, "heldout": 520}
WITHIN = 96  # pixels of a square that holds the answer, so that a window of training does
_worker: tuple[Sequence[str], Sequence[bytes]]  # of a process: once, since photographs are large


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
        with Pool(
            initializer=_start_worker, initargs=(tuple(fonts[split]), photographs[split])
        ) as pool:
            write_shards(
                folder / split,
                pool.imap(_draw_sample, jobs, chunksize=16),
                kind,
                2000,
                count,
                index,
            )


def _start_worker(fonts: Sequence[str], photographs: Sequence[bytes]) -> None:
    global _worker
    os.setpgid(0, 0)  # a terminal's signals reach the parent alone, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()
    _worker = fonts, photographs


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _draw_sample(job: tuple[str, str, int]) -> Sample:
    (kind, split, number), (fonts, photographs) = job, _worker
    # The second number is 0 for the pixels of the published scenes.
    rng = np.random.default_rng([0, kind == "links", split == "heldout", number])
    side = SIDES[split]
    label = number % len(CLASSES)
    font = fonts[number // len(CLASSES) % len(fonts)]
    draw = linked_crowd if kind == "links" else crowd
    letters, strokes = draw(rng, fonts, (side, side), (font, CLASSES[label]), WITHIN)
    picture, boxes = draw_crowd(letters, strokes, photograph_region(rng, photographs, side, side))
    categories = [CLASSES.index(letter.letter) for letter in letters]
    objects = {
        "bbox": boxes,
        "category": categories,
        "marked": [letter.marked for letter in letters],
    }
    evidence = (
        {"evidence": [letter.marked or letter.ringed for letter in letters]}
        if kind == "links"
        else {}
    )
    return Sample(jpeg(picture), label, {"objects": objects | evidence, "group": Path(font).name})
