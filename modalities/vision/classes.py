"""Classes of images: the orders in which libraries number folders, and sources whose labels become
other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from modalities.classes import is_identity, label_numbers
from modalities.encoder.items import digest_of
from modalities.vision.errors import BadImage
from modalities.vision.images import ImageSet
from modalities.vision.objects import Objects
from zoo.errors import did_you_mean

# What a class of objects is called that is none of them.
BACKGROUND = "background"
ORDERS = ("torchvision", "timm")


def sort_classes(names: Sequence[str], order: str = "torchvision") -> tuple[str, ...]:
    """Names of class folders as a library numbers them: torchvision by code points, timm numbers by
    value and letters without case (2 < 10, apple < Banana)."""
    names = sorted(names)
    if order == "timm":
        # Slow to import.
        from timm.utils.misc import natural_key

        names.sort(key=natural_key)
    return tuple(names)


def ordered_classes(names: Sequence[str], order: str) -> tuple[str, ...]:
    """Names of class folders in an order: a library's, or that of a file with a name a line, which
    may have more."""
    if order in ORDERS:
        return sort_classes(names, order)
    try:
        lines = Path(order).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        hint = did_you_mean(order, ORDERS)
        expected = f"expected {', '.join(ORDERS)} or a file with the name of a class a line"
        raise ValueError(f"order={order}: {hint}{expected} ({type(error).__name__})") from None
    listed = tuple(line.strip() for line in lines if line.strip())
    label_numbers(names, listed, source="the folder", model=order)
    return listed


def target_names(names: Sequence[str] | None, target: str) -> tuple[str, ...]:
    """The names of a model's classes by what is asked of it: of maps the background is the
    first."""
    if not names:
        return ()
    return (BACKGROUND, *names) if "map" in target else tuple(names)


def renumbered(objects: Objects, numbers: Sequence[int]) -> Objects:
    """Objects with other numbers of their categories; () leaves them. Raises BadImage for a
    category that has none."""
    if not numbers:
        return objects
    largest = objects.categories.max(initial=0)
    if largest >= len(numbers):
        raise BadImage("label out of range", f"{largest} of {len(numbers)} classes")
    return replace(objects, categories=np.array(numbers, np.int64)[objects.categories])


class RenumberedImages(ImageSet):
    """A source with the labels of another list of classes.

    numbers: by label of the source, that in `classes`.
    """

    def __init__(self, images: ImageSet, numbers: Sequence[int], classes: Sequence[str]) -> None:
        self.images = images
        self.numbers = tuple(numbers)
        self.spec = images.spec
        self.classes = tuple(classes)
        self.problems = images.problems
        self.among = images.among
        self.fingerprint = digest_of([images.fingerprint, self.numbers])

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[bytes | Image.Image, int]:
        """ValueError for a label that the source does not list."""
        payload, label = self.images.read(index)
        if label not in range(len(self.numbers)):
            expected = f"outside 0…{len(self.numbers) - 1}, the classes that its source lists"
            raise ValueError(f"{self.name(index)} has label {label}, {expected}")
        return payload, self.numbers[label]

    def read_objects(self, index: int) -> tuple[bytes | Image.Image, Objects]:
        payload, objects = self.images.read_objects(index)
        return payload, renumbered(objects, self.numbers)

    def group(self, index: int) -> str:
        return self.images.group(index)

    def name(self, index: int) -> str:
        return self.images.name(index)


def renumber(images: ImageSet, classes: Sequence[str], *, trained: str) -> ImageSet:
    """A source with its labels as numbers of `classes`, which those of the source `trained` are;
    itself where they are its own. ValueError for classes of other names."""
    if not images.classes:
        return images
    source = f"the held-out part of {images.spec!r}"
    owner = f"the training source {trained!r}"
    numbers = label_numbers(images.classes, classes, source=source, model=owner)
    if is_identity(numbers) and len(images.classes) == len(classes):
        return images
    return RenumberedImages(images, numbers, classes)
