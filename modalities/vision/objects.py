"""Where things are in a picture: boxes with categories, windows that keep an object's pixels, and
what is asked of them.

    "objects": {"bbox": [[left, top, width, height], …], "category": [0, …], "marked": [true, …]},
    "group": "a font"

is what a shard's KEY.json holds, in pixels (Hugging Face's form for detection). Without "marked"
all are; "evidence" marks further boxes that the question needs. Targets are of the window on the
picture that a model sees:

    marked    the category of the one marked object
    map       the category + 1 of every pixel, 0 without one, of overlapping boxes the last; a patch
              has its middle pixel's

Training asks for both, "marked+map": the class token answers for the picture, with the category + 1
or 0 where nothing is marked, and each patch for itself, by one classifier.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image
from torch import Tensor

from modalities.vision.errors import BadImage

# Pixels round the boxes of the evidence that a window shows too, where picture and window have
# them.
MARGIN = 8

# Left, top, width, height in pixels.
Window = tuple[int, int, int, int]


@dataclass(frozen=True)
class Objects:
    """N objects.

    boxes: (N, 4) float64, left, top, width, height in pixels.
    categories: (N,) int64.
    marked, evidence: (N,) bool.
    group: what the picture shares with others that a measurement should not count as independent,
    such as a font; "".
    """

    boxes: np.ndarray
    categories: np.ndarray
    marked: np.ndarray
    evidence: np.ndarray
    group: str = ""

    def in_window(self, window: Window) -> Objects:
        """The objects that a window shows some of, in its coordinates; none is marked where some
        evidence is missing."""
        left, top, width, height = window
        boxes = self.boxes - [left, top, 0, 0]
        corners = boxes[:, :2]
        ends = corners + boxes[:, 2:]
        visible = (corners < [width, height]).all(1) & (ends > 0).all(1)
        marked = self.marked[visible] & visible[self.evidence].all()
        return Objects(
            boxes[visible],
            self.categories[visible],
            marked,
            self.evidence[visible],
            self.group,
        )


NO_OBJECTS = Objects(
    boxes=np.zeros((0, 4)),
    categories=np.zeros(0, np.int64),
    marked=np.zeros(0, bool),
    evidence=np.zeros(0, bool),
)


def parse_objects(fields: object, group: object = "") -> Objects:
    """The objects of a mapping as above. Raises BadImage "no objects", "bad objects"."""
    if not isinstance(fields, Mapping) or not {"bbox", "category"} <= fields.keys():
        raise BadImage(
            "no objects", "expected {'bbox': [[left, top, width, height], …], 'category': […]}"
        )
    expected = (
        "expected equally many boxes of four numbers and whole categories from 0; "
        "marks, evidence true or false"
    )
    try:
        boxes = np.array(fields["bbox"], np.float64).reshape(-1, 4)
        categories = np.array(fields["category"]).reshape(-1)
        marked = np.array(fields.get("marked", [True] * len(boxes))).reshape(-1)
        evidence = np.array(fields.get("evidence", marked)).reshape(-1)
        counts = {len(fields["bbox"]), len(boxes), len(categories), len(marked), len(evidence)}
    except (TypeError, ValueError) as error:
        raise BadImage("bad objects", f"{expected} ({error})") from None
    # numpy's letters of the types: i and u are whole numbers, b is true or false.
    kinds = categories.dtype.kind + marked.dtype.kind + evidence.dtype.kind
    typed = not len(boxes) or (kinds in ("ibb", "ubb") and categories.min() >= 0)
    sized = np.isfinite(boxes).all() and (boxes[:, 2:] > 0).all()
    if len(counts) > 1 or not typed or not sized:
        raise BadImage("bad objects", f"{expected}; boxes with a width and height above 0")
    marked = marked.astype(bool)
    return Objects(
        boxes,
        categories.astype(np.int64),
        marked,
        marked | evidence.astype(bool),
        str(group or ""),
    )


def check_objects(
    objects: Objects,
    size: tuple[int, int],
    target: str,
    shapes: Iterable[tuple[int, int]],
    num_classes: int,
) -> None:
    """BadImage where `target` cannot be asked of windows of `shapes` on a picture of `size` (width,
    height), where the answer is none of `num_classes` (a map's are its categories + 1, and the
    background), and where a box is outside."""
    if target != "map":
        target_of(objects, "marked", (0, 0))
    outside = len(objects.boxes) - len(objects.in_window((0, 0, *size)).boxes)
    if outside:
        count = f"{outside} of {len(objects.boxes)} boxes lie"
        raise BadImage("bad objects", f"{count} outside of an image of {size[0]}×{size[1]}")
    if target == "marked":
        largest = objects.categories[objects.marked].max(initial=-1)
    else:
        # 0 is the background.
        largest = objects.categories.max(initial=-1) + 1
    if largest >= num_classes:
        raise BadImage(
            "label out of range", f"{largest} of {num_classes} classes, asked for {target!r}"
        )
    for shape in shapes:
        window_on(size, objects, shape, (0.0, 0.0))


def window_on(
    size: tuple[int, int],
    objects: Objects,
    shape: tuple[int, int],
    place: tuple[float, float],
) -> Window:
    """A window of `shape` (height, width) on a picture of `size` (width, height) that holds all
    evidence; BadImage "too small" or "spread" where there is none. place: where among the possible
    ones, from 0 (left, top) to 1. With one `place` a larger window contains each smaller one."""
    height, width = shape
    if size[0] < width or size[1] < height:
        raise BadImage("too small", f"{size[0]}×{size[1]} pixels, a window of {width}×{height}")
    boxes = objects.boxes[objects.evidence]
    left_range = (0, size[0] - width)
    top_range = (0, size[1] - height)
    if len(boxes):
        ends = boxes[:, :2] + boxes[:, 2:]
        left_range = _starts(boxes[:, 0], ends[:, 0], width, size[0])
        top_range = _starts(boxes[:, 1], ends[:, 1], height, size[1])
    return _between(left_range, place[0]), _between(top_range, place[1]), width, height


def _starts(begins: np.ndarray, ends: np.ndarray, side: int, most: int) -> tuple[int, int]:
    """The least and greatest start of a window's side, on a picture's of `most` pixels, that holds
    what lies between, with MARGIN where there is room."""
    first = float(begins.min())
    last = float(ends.max())
    extent = last - first
    if extent > side:
        raise BadImage(
            "spread", f"the objects to be shown take {extent:g} pixels, the window has {side}"
        )
    room = min(MARGIN, (side - extent) // 2)
    begin = max(0.0, first - room)
    end = min(float(most), last + room)
    low = max(0, int(np.ceil(end)) - side)
    high = min(most - side, int(begin))
    return low, high


def _between(bounds: tuple[int, int], place: float) -> int:
    low, high = bounds
    return low + round(place * max(0, high - low))


def window_off(image: Image.Image, objects: Objects, shape: tuple[int, int]) -> Window | None:
    """The first of 16 random windows that lacks a box of the evidence and MARGIN pixels round it,
    or None."""
    grown = objects.boxes + np.array([-MARGIN, -MARGIN, 2 * MARGIN, 2 * MARGIN])
    around = replace(objects, boxes=grown)
    height, width = shape
    for _ in range(16):
        left = random.randint(0, image.width - width)
        top = random.randint(0, image.height - height)
        window = (left, top, width, height)
        if around.in_window(window).evidence.sum() < objects.evidence.sum():
            return window
    return None


def cut(image: Image.Image, window: Window) -> Image.Image:
    left, top, width, height = window
    return image.crop((left, top, left + width, top + height))


def targets_of(objects: Objects | None, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """A batch's "targets" and "maps" for one picture of `shape`. None: −1 everywhere."""
    if objects is None:
        return {"targets": np.array(-1), "maps": np.full(shape, -1)}
    answer = np.array(0)
    if objects.marked.any():
        answer = target_of(objects, "marked", shape) + 1
    return {"targets": answer, "maps": target_of(objects, "map", shape)}


def target_of(objects: Objects, target: str, shape: tuple[int, int]) -> np.ndarray:
    """What a target asks of a picture of `shape` (height, width): int64, of that shape for "map".
    Raises "not one marked"."""
    if target == "marked":
        marked = objects.categories[objects.marked]
        if len(marked) != 1:
            raise BadImage(
                "not one marked", f"{len(marked)} objects are marked; to be named, expected one"
            )
        return marked[0]
    pixels = np.zeros(shape, np.int64)
    for box, category in zip(objects.boxes, objects.categories.tolist(), strict=True):
        left = max(0, round(box[0]))
        top = max(0, round(box[1]))
        right = max(0, round(box[0] + box[2]))
        bottom = max(0, round(box[1] + box[3]))
        pixels[top:bottom, left:right] = category + 1
    return pixels


def at_patches(maps: Tensor, patches: int) -> Tensor:
    """(B, patches): of maps (B, height, width) the pixel in the middle of every square patch, row
    by row; ValueError where so many square patches do not make up the map."""
    height, width = maps.shape[-2:]
    patch = math.isqrt(height * width // max(patches, 1))
    whole = patch and height % patch == 0 and width % patch == 0
    if not whole or (height // patch) * (width // patch) != patches:
        raise ValueError(
            f"a map of {height} × {width} pixels is not made up of {patches} square patches"
        )
    middle = patch // 2
    return maps[:, middle::patch, middle::patch].flatten(1)
