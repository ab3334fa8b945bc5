"""The held-out images of a source or of a training run, opened once per process and shared by evaluators, sizes, models."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from modalities.vision.data import VisionDataConfig, held_out_images
from modalities.vision.images import BadImage, orientation

DEFAULT_SOURCE = "glyphs"
PROBED = 256  # images that the default sizes are chosen by
KEPT_BYTES = 512 * 2**20  # of decoded images
_TURNED = (5, 6, 7, 8)  # EXIF orientations that are stored lying on a side
# What changes training and not what it holds out, so that seeds and variants share their images.
_TRAINING_ALONE = (
    "augment", "hflip", "color_jitter", "rand_augment", "random_erasing", "mixup", "cutmix", "label_smoothing",
    "crop_scale", "mean", "std", "seed", "num_workers", "shuffle_buffer",
)  # fmt: skip

Shape = tuple[int, int]  # (height, width)


class HeldOutImages:
    """Images in one random order that is always the same, whatever order they are stored in: `[place]` is (RGB, label).

    The first that fit into KEPT_BYTES stay decoded: every size and every model asks for the same ones again. `source` is
    what files call them.
    """

    def __init__(self, source: str | VisionDataConfig) -> None:
        self.source = source_name(source)
        self.images = held_out_images(source)
        self.classes, self.fingerprint = self.images.classes, self.images.fingerprint
        self.order = np.random.default_rng(0).permutation(len(self.images))
        self.kept: dict[int, tuple[Image.Image, int]] = {}
        self.room = KEPT_BYTES
        self.sizes: dict[int, tuple[int, int] | None] = {}

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        """Errors: BadImage for an image that cannot be decoded."""
        if place in self.kept:
            return self.kept[place]
        image, label = self.images[int(self.order[place])]
        size = 3 * image.width * image.height
        if size <= self.room:
            self.kept[place] = image, label
            self.room -= size
        return image, label

    def too_small(self, places: Iterable[int], shapes: Sequence[Shape], fit: str) -> set[int]:
        """Those of ``places`` whose image, by its header, has fewer pixels than one of ``shapes`` asks for.

        An image without a readable header is not among them: it fails when it is decoded.
        """
        found = set()
        for place in places:
            size = self._size(place)
            if size and any(_less(fitted(size, shape, fit), shape) for shape in shapes):
                found.add(place)
        return found

    def largest(self, shape: Shape, fit: str, *, share: float, count: int | None = None) -> int:
        """The largest shorter side, at the aspect of ``shape``, that this share of the first ``count`` images has; share=0
        is that of the largest image. Errors: ValueError where none can be read."""
        sizes = [size for place in range(min(count or len(self), len(self))) if (size := self._size(place))]
        if not sizes:
            raise ValueError(f"source {self.source!r}: none of its first held-out images can be decoded")
        sides = sorted((min(fitted(size, shape, fit)) for size in sizes), reverse=True)
        return sides[max(0, math.ceil(share * len(sides)) - 1)]

    def _size(self, place: int) -> tuple[int, int] | None:
        """(width, height) of the upright image from its header alone, or None where that cannot be read."""
        if place not in self.sizes:
            try:
                stored, _ = self.images.images.read(int(self.order[place]))
                self.sizes[place] = _upright_size(stored)
            except BadImage:
                self.sizes[place] = None
        return self.sizes[place]


def fitted(size: tuple[int, int], shape: Shape, fit: str) -> Shape:
    """(height, width) of an image of (width, height), brought to the aspect of ``shape`` as `preprocess` does."""
    (width, height), aspect = size, shape[0] / shape[1]
    choose = max if fit == "extend" else min
    return max(1, choose(height, round(width * aspect))), max(1, choose(width, round(height / aspect)))


def _less(have: Shape, wanted: Shape) -> bool:
    return have[0] < wanted[0] or have[1] < wanted[1]


def _upright_size(stored: bytes | Image.Image) -> tuple[int, int]:
    """Errors: BadImage for bytes that are no image."""
    try:
        image = stored if isinstance(stored, Image.Image) else Image.open(io.BytesIO(stored))
    except Exception as error:  # a broken file can make Pillow's readers raise nearly anything
        raise BadImage("unknown format") from error
    return (image.height, image.width) if orientation(image) in _TURNED else image.size


def held_out_by(data: Mapping[str, Any]) -> VisionDataConfig:
    """What a training held out, from the data section of its recipe.json; equal for runs that held out the same.

    Errors: ValueError for shards without `heldout_source`, which hold nothing out, and for unknown options.
    """
    config = VisionDataConfig().with_options(**data)
    if config.heldout_source is None and config.source.startswith("wds:"):
        raise ValueError(f"training on {config.source!r} held out nothing: name the held-out images with --source")
    defaults = {field.name: field.default for field in fields(config)}
    return replace(config, **{name: defaults[name] for name in _TRAINING_ALONE})


def source_name(source: str | VisionDataConfig | None) -> str:
    """What files call held-out images: "glyphs", or "all of folder:photos, classes of folder:train"."""
    if not isinstance(source, VisionDataConfig):
        return source or DEFAULT_SOURCE
    if source.heldout_source is None:
        return source.source
    folders = source.source.startswith("folder:") and source.heldout_source.startswith("folder:")
    return f"all of {source.heldout_source}" + (f", classes of {source.source}" if folders else "")


@lru_cache(maxsize=2)
def held_out(source: str | VisionDataConfig | None) -> HeldOutImages:
    """The held-out images of a spec string or of a run's data (`held_out_by`); None is DEFAULT_SOURCE.

    Errors: those of `held_out_images`.
    """
    return HeldOutImages(source or DEFAULT_SOURCE)
