"""Vision data, read from here outwards: a config in, a resumable loader of batches out; and held-out images for evaluation.

    config.py   the data section of a recipe            sources.py     images by spec string, and the held-out split
    samples.py  order, bad images, exact resume         shards.py      WebDataset          hf.py   Hugging Face
    batches.py  augmentation of training batches        transforms.py  evaluation at exact sizes
    images.py   decoding, and what bad images become    ../loading.py  the loaders: ranks, workers, resume
    objects.py  boxes, masks, windows, and what is asked of them

A batch is {"images": float32 (B, 3, H, W), normalised, "targets": int64 (B,)}, with boxes also "maps" (B, H, W); in training
with mixup, cutmix or label smoothing the targets are float32 (B, num_classes). In held-out passes the target of a place that
does not count is −1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal, overload

import numpy as np
from PIL import Image

from modalities.loading import Heldout, IndexedLoader, StreamLoader
from modalities.vision.config import VisionDataConfig
from modalities.vision.images import BadImage, ImageSet, checked_image, upright_size
from modalities.vision.samples import ImageSamples, ShardStream
from modalities.vision.sources import open_images, open_shard_source
from modalities.vision.transforms import Shape

DEFAULT_SOURCE = "glyphs"
EVALUATION_SIZE = 384  # pixels that "glyphs-builtin" should have for evaluation


@overload
def build_loader(
    config: VisionDataConfig, *, split: Literal["heldout"], micro_batch: int, **share: int
) -> IndexedLoader: ...
@overload
def build_loader(
    config: VisionDataConfig, *, split: str = "train", micro_batch: int, **share: int
) -> IndexedLoader | StreamLoader: ...
def build_loader(
    config: VisionDataConfig, *, split: str = "train", micro_batch: int, **share: int
) -> IndexedLoader | StreamLoader:
    """The loader of one split for one rank. share: `rank` (0) of `world` (1).

    "train" is endless, shuffled and augmented; shards are streamed, everything else is read by index. "heldout" is one pass
    without augmentation in a shuffled order, the same for every seed, with equally many batches on every rank.

    Raises ValueError for a split or micro_batch that cannot work, where the source's list of classes is not as long as
    num_classes, and where training and held-out images list different classes; and what the sources raise.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split {split!r}: expected 'train' or 'heldout'")
    share = {"rank": 0, "world": 1, "num_workers": config.num_workers} | share
    size = round(config.image_size * 4 / 3)
    if split == "heldout":
        return IndexedLoader(ImageSamples(_heldout(config, size=size), config, train=False), micro_batch, **share)
    if (config.mixup > 0 or config.cutmix > 0) and micro_batch % 2:
        raise ValueError(f"micro_batch {micro_batch} must be even: mixup and cutmix mix images in pairs")
    shards = open_shard_source(config.source, "train")
    if shards is not None:
        _check_classes(config, shards.classes)
        return StreamLoader(ShardStream(shards, config, micro_batch), micro_batch, **share)
    images = open_images(config.source, "train", hold_out=config.heldout_source is None, size=size)
    _check_classes(config, images.classes)
    return IndexedLoader(ImageSamples(images, config, train=True), micro_batch, **share)


def _heldout(config: VisionDataConfig, *, size: int) -> ImageSet:
    """The held-out images of a config; a held-out folder takes its classes from the training folder."""
    if config.heldout_source is None:
        images = open_images(config.source, "heldout", size=size)
    elif config.target != "label":
        images = open_images(config.heldout_source, "all")
    else:
        try:
            shards = open_shard_source(config.source, "train")
        except FileNotFoundError:  # on another machine
            classes = None
        else:
            classes = (shards or open_images(config.source, "train", hold_out=False)).classes
        images = open_images(config.heldout_source, "all", size=size, classes=classes if _folders(config) else None)
        if classes and images.classes and classes != images.classes:
            pairs = enumerate(zip_longest(classes, images.classes))
            label, (one, other) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"source {config.source!r} and heldout_source {config.heldout_source!r} must list the same classes in one "
                f"order: label {label} is {one!r} in training and {other!r} in held-out images"
            )
    _check_classes(config, images.classes)
    return images


def _folders(config: VisionDataConfig) -> bool:
    return all((source or "").startswith("folder:") for source in (config.source, config.heldout_source))


def _check_classes(config: VisionDataConfig, classes: tuple[str, ...] | None) -> None:
    mapped = "map" in config.target
    if classes is not None and len(classes) + mapped != config.num_classes:
        listed = f"{len(classes)} classes" + (" and the background" if mapped else "")
        way_out = f"--set data.num_classes={len(classes) + mapped}"
        raise ValueError(f"the source has {listed}, num_classes is {config.num_classes}: {way_out}")


# ------------------------------------------------------------------------------------------------ for evaluation


class HeldoutImages:
    """Images in one random order, the same whatever order they are stored in: `[place]` is (RGB at its stored size, label),
    or with `objects` (RGB, `Objects`).

    classes: names by label; numbers where the source has no names, empty where their number is unknown too.
    """

    def __init__(self, images: ImageSet, num_classes: int = 0, *, objects: bool = False) -> None:
        self.images, self.objects = images, objects
        self.classes = list(map(str, range(num_classes))) if images.classes is None else list(images.classes)
        self.order = np.random.default_rng(0).permutation(len(images))
        self._sizes: dict[int, tuple[int, int] | None] = {}

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> tuple[Image.Image, Any]:
        """Raises BadImage; ValueError for a label outside the source's list of classes."""
        payload, label = self._stored(place)
        listed, classes = self.images.classes is not None, len(self.classes) or None
        return checked_image(payload, label, self.name(place), num_classes=classes, listed=listed), label

    def _stored(self, place: int) -> tuple[bytes | Image.Image, Any]:
        index = int(self.order[place])
        return self.images.read_objects(index) if self.objects else self.images.read(index)

    def group(self, place: int) -> str:
        """What the image shares with others (`ImageSet.group`); by default itself."""
        index = int(self.order[place])
        return self.images.group(index) or f"image {index}"

    def name(self, place: int) -> str:
        """The file or row of an image."""
        return self.images.name(int(self.order[place]))

    def too_small(self, places: Iterable[int], shape: Shape) -> set[int]:
        """The places whose image has fewer pixels than `shape`. One without a readable header fails when decoded."""
        sizes = ((place, self._size(place)) for place in places)
        return {place for place, size in sizes if size and shorter_side(size, shape) < min(shape)}

    def largest(self, shape: Shape, *, count: int, share: float = 0) -> int:
        """The largest shorter side, at the aspect of `shape`, that this share of the first `count` images reaches; share=0 is
        that of the largest image. Raises ValueError where no header can be read."""
        sizes = [size for place in range(min(count, len(self))) if (size := self._size(place))]
        if not sizes:
            none = f"none of its held-out images can be read, such as {self.name(0)}"
            raise ValueError(f"source {self.images.spec!r}: {none}")
        sides = sorted((shorter_side(size, shape) for size in sizes), reverse=True)
        return sides[max(0, math.ceil(share * len(sides)) - 1)]

    def _size(self, place: int) -> tuple[int, int] | None:
        """(width, height) of the upright image from its header alone, None where that cannot be read."""
        if place not in self._sizes:
            try:
                self._sizes[place] = upright_size(self._stored(place)[0])
            except BadImage:
                self._sizes[place] = None
        return self._sizes[place]


def shorter_side(size: tuple[int, int], shape: Shape) -> int:
    """Of the largest central window, at the aspect of `shape`, on an image of (width, height)."""
    (width, height), aspect = size, shape[0] / shape[1]
    return min(height, round(width * aspect), width, round(height / aspect))


def heldout_by(data: Mapping[str, Any]) -> VisionDataConfig:
    """What a training held out, from its recipe's data section; equal for runs that held out the same.

    Raises ValueError for shards without `heldout_source`, which hold nothing out.
    """
    deciding = {name: data[name] for name in ("source", "heldout_source", "num_classes", "target") if name in data}
    config = VisionDataConfig(**deciding, augment="light" if deciding.get("target", "label") == "label" else "window")
    if config.heldout_source is None and config.source.startswith("wds:"):
        raise ValueError(f"training on {config.source!r} held out nothing: name the held-out images with --source")
    return config


def heldout_name(source: str | VisionDataConfig) -> str:
    """What files call held-out images: "glyphs", or "all of folder:photos, classes of folder:train"."""
    if isinstance(source, str):
        return source
    if source.heldout_source is None:
        return source.source
    return f"all of {source.heldout_source}" + (f", classes of {source.source}" if _folders(source) else "")


@lru_cache(maxsize=4)
def open_heldout(source: str | VisionDataConfig, *, objects: bool = False) -> Heldout[HeldoutImages]:
    """The held-out images of a spec string, or of a training's data (`heldout_by`), opened once per process.

    objects: pictures with boxes. Shards given as "wds:…" are a held-out set as a whole. Raises what the sources raise.
    """
    if isinstance(source, VisionDataConfig):
        images, classes = _heldout(source, size=EVALUATION_SIZE), source.num_classes
    else:
        split, classes = "all" if source.startswith("wds:") else "heldout", 0
        images = open_images(source, split, size=EVALUATION_SIZE)
    held = HeldoutImages(images, 0 if objects else classes, objects=objects)
    return Heldout(heldout_name(source), images.fingerprint, held)
