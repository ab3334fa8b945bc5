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

MARGIN = 8  # pixels round the boxes of the evidence that a window shows too, where picture and window have them

Window = tuple[int, int, int, int]  # left, top, width, height in pixels


@dataclass(frozen=True)
class Objects:
    """N objects: boxes (N, 4) float64, left, top, width, height in pixels; categories (N,) int64;
    marked, evidence (N,) bool.

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
        seen = (boxes[:, :2] < [width, height]).all(1) & (boxes[:, :2] + boxes[:, 2:] > 0).all(1)
        marked = self.marked[seen] & seen[self.evidence].all()
        return Objects(boxes[seen], self.categories[seen], marked, self.evidence[seen], self.group)


NO_OBJECTS = Objects(np.zeros((0, 4)), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, bool))


def parse_objects(fields: object, group: object = "") -> Objects:
    """The objects of a mapping as above. Raises BadImage "no objects", "bad objects"."""
    if not isinstance(fields, Mapping) or not {"bbox", "category"} <= fields.keys():
        raise BadImage(
            "no objects", "expected {'bbox': [[left, top, width, height], …], 'category': […]}"
        )
    expected = "expected equally many boxes of four numbers and whole categories from 0; marks, evidence true or false"
    try:
        boxes = np.array(fields["bbox"], np.float64).reshape(-1, 4)
        categories = np.array(fields["category"]).reshape(-1)
        marked = np.array(fields.get("marked", [True] * len(boxes))).reshape(-1)
        evidence = np.array(fields.get("evidence", marked)).reshape(-1)
        counts = {len(fields["bbox"]), len(boxes), len(categories), len(marked), len(evidence)}
    except (TypeError, ValueError) as error:
        raise BadImage("bad objects", f"{expected} ({error})") from None
    kinds = categories.dtype.kind + marked.dtype.kind + evidence.dtype.kind
    typed = not len(boxes) or (kinds in ("ibb", "ubb") and categories.min() >= 0)
    if len(counts) > 1 or not typed or not np.isfinite(boxes).all() or (boxes[:, 2:] <= 0).any():
        raise BadImage("bad objects", f"{expected}; boxes with a width and height above 0")
    marked = marked.astype(bool)
    evidence = evidence.astype(bool)
    return Objects(boxes, categories.astype(np.int64), marked, marked | evidence, str(group or ""))


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
    inside = objects.in_window((0, 0, *size)).boxes
    if len(inside) < len(objects.boxes):
        count = f"{len(objects.boxes) - len(inside)} of {len(objects.boxes)} boxes lie"
        raise BadImage("bad objects", f"{count} outside of an image of {size[0]}×{size[1]}")
    categories = objects.categories[objects.marked] if target == "marked" else objects.categories
    largest = categories.max(initial=-1) + (target != "marked")
    if largest >= num_classes:
        raise BadImage(
            "label out of range", f"{largest} of {num_classes} classes, asked for {target!r}"
        )
    for shape in shapes:
        window_on(size, objects, shape, (0.0, 0.0))


def window_on(
    size: tuple[int, int], objects: Objects, shape: tuple[int, int], at: tuple[float, float]
) -> Window:
    """A window of `shape` (height, width) on a picture of `size` (width, height) that holds all
    evidence; BadImage "too small" or "spread" where there is none. at: where among the possible
    places, from 0 (left, top) to 1. With one `at` a larger window contains each smaller one."""
    height, width = shape
    if size[0] < width or size[1] < height:
        raise BadImage("too small", f"{size[0]}×{size[1]} pixels, a window of {width}×{height}")
    needed = objects.boxes[objects.evidence]
    corner = []
    for axis, (side, most, place) in enumerate(zip((width, height), size, at, strict=True)):
        low = 0
        high = most - side
        if len(needed):
            first = float(needed[:, axis].min())
            last = float((needed[:, axis] + needed[:, axis + 2]).max())
            if last - first > side:
                raise BadImage(
                    "spread",
                    f"the objects to be shown take {last - first:g} pixels, the window has {side}",
                )
            room = min(MARGIN, (side - (last - first)) // 2)
            begin = max(0.0, first - room)
            end = min(float(most), last + room)
            low = max(low, int(np.ceil(end)) - side)
            high = min(high, int(begin))
        corner.append(low + round(place * max(0, high - low)))
    return corner[0], corner[1], width, height


def window_off(image: Image.Image, objects: Objects, shape: tuple[int, int]) -> Window | None:
    """The first of 16 random windows that lacks a box of the evidence and MARGIN pixels round it,
    or None."""
    around = replace(
        objects, boxes=objects.boxes + np.array([-MARGIN, -MARGIN, 2 * MARGIN, 2 * MARGIN])
    )
    (across, down), (height, width) = image.size, shape
    for _ in range(16):
        window = random.randint(0, across - width), random.randint(0, down - height), width, height
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
    answer = target_of(objects, "marked", shape) + 1 if objects.marked.any() else np.array(0)
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
        left, top, right, bottom = (
            max(0, round(side)) for side in (*box[:2], *(box[:2] + box[2:]))
        )
        pixels[top:bottom, left:right] = category + 1
    return pixels


def at_patches(maps: Tensor, patches: int) -> Tensor:
    """(B, patches): of maps (B, height, width) the pixel in the middle of every square patch, row
    by row; ValueError where so many square patches do not make up the map."""
    height, width = maps.shape[-2:]
    patch = math.isqrt(height * width // max(patches, 1))
    if (
        not patch
        or height % patch
        or width % patch
        or (height // patch) * (width // patch) != patches
    ):
        raise ValueError(
            f"a map of {height} × {width} pixels is not made up of {patches} square patches"
        )
    return maps[:, patch // 2 :: patch, patch // 2 :: patch].flatten(1)
