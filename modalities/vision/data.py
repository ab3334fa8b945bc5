"""Vision data: a config in, a resumable loader of batches out; and held-out images for evaluation.

A batch is {"images": float32 (B, 3, H, W), normalised, "targets": int64 (B,)}, with boxes also
"maps" (B, H, W); in training with mixup, cutmix or label smoothing the targets are float32 (B,
num_classes). In held-out passes the target of a place that does not count is −1.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from functools import lru_cache

from PIL import Image

from modalities.encoder.config import Options, Shape
from modalities.encoder.items import HeldoutItems
from modalities.loading import Heldout, IndexedLoader, StreamLoader
from modalities.vision.classes import renumber
from modalities.vision.config import VisionDataConfig
from modalities.vision.errors import BadImage
from modalities.vision.images import ImageSet, checked_image, upright_size
from modalities.vision.objects import Objects
from modalities.vision.samples import ImageSamples, ShardStream
from modalities.vision.sources import class_names, open_images, open_shard_source

_log = logging.getLogger(__name__)
DEFAULT_SOURCE = "glyphs-builtin"
# Settings on which held-out images depend.
DECIDING = ("source", "heldout_source", "num_classes", "target")
# Pixels that "glyphs-builtin" should have for evaluation.
EVALUATION_SIZE = 384


def build_loader(
    config: VisionDataConfig, *, split: str = "train", micro_batch: int, **share: int
) -> IndexedLoader | StreamLoader:
    """The loader of one split for one rank. share: `rank` (0) of `world` (1). ValueError where
    classes do not fit.

    "train" is endless, shuffled and augmented; shards are streamed, everything else is read by
    index. "heldout" is one pass without augmentation in a shuffled order, the same for every seed,
    with equally many batches on every rank.
    """
    if split == "heldout":
        return build_heldout(config, split=split, micro_batch=micro_batch, **share)
    share = _with_defaults(config, share)
    if (config.mixup > 0 or config.cutmix > 0) and micro_batch % 2:
        raise ValueError(
            f"micro_batch {micro_batch} must be even: mixup and cutmix mix images in pairs"
        )
    shards = open_shard_source(config.source, "train")
    if shards is not None:
        _check_classes(config, shards.classes)
        return StreamLoader(ShardStream(shards, config, micro_batch), micro_batch, **share)
    images = open_images(
        config.source,
        "train",
        hold_out=config.heldout_source is None,
        size=_stored_size(config),
    )
    _check_classes(config, images.classes)
    return IndexedLoader(ImageSamples(images, config, train=True), micro_batch, **share)


def build_heldout(
    config: VisionDataConfig, *, split: str = "heldout", micro_batch: int, **share: int
) -> IndexedLoader:
    """One pass over the held-out images, as `build_loader` has it."""
    share = _with_defaults(config, share)
    images = _heldout(config, size=_stored_size(config))
    _check_classes(config, images.classes)
    if share["rank"] == 0:
        _warn_of_numbers(config, images)
    return IndexedLoader(ImageSamples(images, config, train=False), micro_batch, **share)


def _with_defaults(config: VisionDataConfig, share: dict[str, int]) -> dict[str, int]:
    return {"rank": 0, "world": 1, "num_workers": config.num_workers} | share


def _stored_size(config: VisionDataConfig) -> int:
    """Pixels that "glyphs-builtin" should have: room for random crops."""
    return round(config.image_size * 4 / 3)


def _heldout(config: VisionDataConfig, *, size: int) -> ImageSet:
    """The held-out images of a config, with labels of the training source: by name where both list
    their classes."""
    trained = _training_classes(config.source)
    if config.heldout_source is None:
        images = open_images(config.source, "heldout", size=size)
    else:
        # Folders count training's classes that they lack.
        folder_classes = trained or None if _folders(config) else None
        images = open_images(config.heldout_source, "all", size=size, classes=folder_classes)
    return renumber(images, trained, trained=config.source) if trained else images


def _warn_of_numbers(config: VisionDataConfig, images: ImageSet) -> None:
    """Log that labels cannot be compared by name, where one of two sources has no names."""
    if config.heldout_source is None:
        return
    if bool(images.classes) != bool(_training_classes(config.source)):
        sources = f"source {config.source!r} and heldout_source {config.heldout_source!r}"
        _log.warning("one of %s has no names of classes: labels are compared by number", sources)


def _training_classes(source: str) -> tuple[str, ...]:
    """The classes that a training source lists; () where it lists none, or is on another
    machine."""
    if source.startswith("hf:"):
        with contextlib.suppress(OSError):
            return open_images(source, "train", hold_out=False).classes or ()
        return ()
    return class_names(source)


def _folders(config: VisionDataConfig) -> bool:
    """Whether both sources are folders of class folders."""
    sources = (config.source, config.heldout_source or "")
    return all(source.startswith("folder:") for source in sources)


def _check_classes(config: VisionDataConfig, classes: tuple[str, ...] | None) -> None:
    if classes is None:
        return
    listed = f"{len(classes)} classes"
    expected = len(classes)
    if "map" in config.target:
        listed += " and the background"
        expected += 1
    if expected != config.num_classes:
        way_out = f"--set data.num_classes={expected}"
        raise ValueError(f"the source has {listed}, num_classes is {config.num_classes}: {way_out}")


class HeldoutImages(HeldoutItems):
    """Images in one random order: `[place]` is (RGB at its stored size, label), or with `objects`
    (RGB, `Objects`)."""

    noun = "image"

    def __init__(self, images: ImageSet, num_classes: int = 0, *, objects: bool = False) -> None:
        super().__init__(images, num_classes)
        self.images = images
        self.objects = objects

    def __getitem__(self, place: int) -> tuple[Image.Image, int | Objects]:
        """Raises BadImage; ValueError for a label outside the source's list of classes."""
        payload, label = self._stored(place)
        image = checked_image(
            payload,
            label,
            self.name(place),
            num_classes=len(self.classes) or None,
            listed=self.images.classes is not None,
        )
        return image, label

    def _stored(self, place: int) -> tuple[bytes | Image.Image, int | Objects]:
        read = self.images.read_objects if self.objects else self.images.read
        return read(self.index(place))

    def side(self, place: int, shape: Shape) -> int:
        """Shorter side of the largest central window, at the aspect of `shape`, on an image; 0
        where its header is broken."""
        try:
            width, height = upright_size(self._stored(place)[0])
        except BadImage:
            return 0
        # At the aspect of `shape`, the height that fits the width, and the other way round.
        fitting_height = round(width * shape[0] / shape[1])
        fitting_width = round(height * shape[1] / shape[0])
        return max(1, min(height, fitting_height, width, fitting_width))


def heldout_by(data: Mapping[str, object]) -> VisionDataConfig:
    """What a training held out, from its recipe's data section; equal for runs that held out the
    same. ValueError for shards without `heldout_source`."""
    deciding: Options = {name: data[name] for name in DECIDING if name in data}
    augment = "light" if deciding.get("target", "label") == "label" else "window"
    config = VisionDataConfig(**deciding, augment=augment)
    if config.heldout_source is None and config.source.startswith("wds:"):
        way_out = "name the held-out images with --source"
        raise ValueError(f"training on {config.source!r} held out nothing: {way_out}")
    return config


def heldout_name(source: str | VisionDataConfig) -> str:
    """What files call held-out images: "glyphs", or "all of folder:photos, classes of
    folder:train"."""
    if isinstance(source, str):
        return source
    if source.heldout_source is None:
        return source.source
    name = f"all of {source.heldout_source}"
    return f"{name}, classes of {source.source}" if _folders(source) else name


@lru_cache(maxsize=4)
def open_heldout(
    source: str | VisionDataConfig, *, objects: bool = False
) -> Heldout[HeldoutImages]:
    """The held-out images of a spec string, or of a training's data (`heldout_by`), opened once per
    process; evaluators compare their classes with a model's. objects: pictures with boxes. Shards
    given as "wds:…" are a held-out set as a whole."""
    num_classes = 0
    if isinstance(source, VisionDataConfig):
        images = _heldout(source, size=EVALUATION_SIZE)
        num_classes = source.num_classes
    else:
        split = "all" if source.startswith("wds:") else "heldout"
        images = open_images(source, split, size=EVALUATION_SIZE)
    items = HeldoutImages(images, 0 if objects else num_classes, objects=objects)
    return Heldout(heldout_name(source), images.fingerprint, items)
