"""Vision data, read from here outwards: a config in, a resumable loader of batches out.

    sources.py     images by spec string, and the held-out split     shards.py      WebDataset tars
    loaders.py     order, ranks, workers, exact resume               images.py      decoding, and what bad images become
    transforms.py  augmentation, batches, exact evaluation sizes     glyphs.py      letters drawn from fonts
    hf.py          Hugging Face datasets

A batch is {"images": float32 (B, 3, S, S), normalised, "targets": int64 (B,)}; in training with mixup, cutmix or label
smoothing the targets are float32 (B, num_classes). In held-out passes the target of a place that does not count is −1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from PIL import Image

from modalities.vision.images import BadImage, ImageReport
from modalities.vision.loaders import Event, ImageLoader, ShardLoader, load_image
from modalities.vision.sources import ImageSet, open_images, open_shard_source
from modalities.vision.transforms import IMAGENET_MEAN, IMAGENET_STD, eval_transform, preprocess, rand_augment
from zoo.naming import did_you_mean

__all__ = [
    "HeldOut",
    "ImageReport",
    "VisionDataConfig",
    "build_loader",
    "eval_transform",
    "held_out_images",
    "preprocess",
]

BUILTIN_HELDOUT_SIZE = 384  # what "glyphs-builtin" draws for `held_out_images`
_AUGMENTS = ("none", "light", "imagenet")


@dataclass(frozen=True)
class VisionDataConfig:
    """What to train on.

    source, heldout_source: spec strings (sources.py). heldout_source is where the held-out split comes from when not
        from `source`; all of it is then held out.
    image_size: S, the side of the square training images. num_classes: labels are 0…num_classes−1; as many as the source
        lists, where it lists its classes.
    augment: "none" resizes the shorter side and cuts out the centre, as evaluation does; "light" is RandomResizedCrop
        with `crop_scale` (the share of the area), then flip and colour jitter where those are set; "imagenet" is the
        same, then RandAugment and, on the normalised tensor, random erasing. Pictures are resized bicubically.
    hflip: probability. color_jitter: strength on brightness, contrast and saturation. random_erasing: probability, filled
        with noise. rand_augment: timm's string, such as "rand-m9-n2-mstd0.5"; each operation then has a chance of one half,
        "-p1" makes it sure.
    mixup, cutmix: the α of their Beta(α, α), 0 is off; with both on, a batch takes either with equal chance.
        label_smoothing: ε.
    mean, std: of the channels in 0…1, for normalisation.
    shuffle_buffer: samples of a shard source that a worker mixes at a time (compressed, in memory).
    """

    source: str = "glyphs"
    heldout_source: str | None = None
    image_size: int = 96
    num_classes: int = 26
    augment: str = "light"
    crop_scale: tuple[float, float] = (0.7, 1.0)
    hflip: float = 0.0
    color_jitter: float = 0.0
    rand_augment: str = ""
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    seed: int = 0
    num_workers: int = 0
    shuffle_buffer: int = 4096

    def __post_init__(self) -> None:
        for name in ("crop_scale", "mean", "std"):  # lists, as JSON and --set give them
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("image_size", "num_classes", "shuffle_buffer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("num_workers", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")
        for name in ("hflip", "random_erasing", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is outside 0..1")
        for name in ("color_jitter", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)} must not be negative")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(
                f"crop_scale {self.crop_scale} is not two rising shares of the area in 0..1, such as (0.7, 1)"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean {self.mean} and std {self.std} must have three values each, std positive")
        self._check_augment()

    def _check_augment(self) -> None:
        """An option that `augment` would leave unused is an error."""
        if self.augment not in _AUGMENTS:
            raise ValueError(
                f"augment {self.augment!r} is none of {', '.join(_AUGMENTS)}; {did_you_mean(self.augment, _AUGMENTS)}"
            )
        unused = {
            "none": ("hflip", "color_jitter", "rand_augment", "random_erasing"),
            "light": ("rand_augment", "random_erasing"),
        }
        for name in unused.get(self.augment, ()):
            if getattr(self, name):
                need = "'light' or 'imagenet'" if name in ("hflip", "color_jitter") else "'imagenet'"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with augment={self.augment!r}; set augment to {need}"
                )
        if self.rand_augment:
            rand_augment(self.rand_augment, self.image_size, self.mean)

    def with_options(self, **options: Any) -> VisionDataConfig:
        """A copy with some values changed; an unknown name is an error that says which one is near."""
        names = [field.name for field in fields(self)]
        for name in options:
            if name not in names:
                raise ValueError(
                    f"vision data has no option {name!r}; {did_you_mean(name, names)}it has {', '.join(names)}"
                )
        return replace(self, **options)


def build_loader(
    config: VisionDataConfig, *, split: str = "train", rank: int = 0, world: int = 1, micro_batch: int
) -> ImageLoader | ShardLoader:
    """The loader of one split for one rank: iterable of batches, with state_dict(), load_state_dict() and report.

    "train" is endless, shuffled and augmented. Shards ("glyphs", "photos", "wds:…") are read in order by ShardLoader,
    everything else by number by ImageLoader. "heldout" is one pass without augmentation in a mixed order, the same for
    every seed, with equally many batches on every rank: the last ones wrap round to the pass's beginning, with targets
    −1, as in the places of skipped images. Remote held-out shards are first copied into the data folder's `cache`.

    Errors: ValueError for a split, rank or micro_batch that cannot be, where the source's list of classes is not as long
    as num_classes, and where training and held-out images have lists that differ; those of the sources.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split {split!r} is none of 'train', 'heldout'")
    shares = {"rank": rank, "world": world}
    if split == "heldout":
        images = _held_out(config, size=round(config.image_size * 4 / 3))
        return ImageLoader(images, config, micro_batch, train=False, **shares)
    shards = open_shard_source(config.source, "train")
    if shards is not None:
        _check_classes(config, shards.classes)
        return ShardLoader(shards, config, micro_batch, **shares)
    hold_out, size = config.heldout_source is None, round(config.image_size * 4 / 3)
    images = open_images(config.source, "train", hold_out=hold_out, size=size)
    _check_classes(config, images.classes)
    return ImageLoader(images, config, micro_batch, train=True, **shares)


def _held_out(config: VisionDataConfig, *, size: int) -> ImageSet:
    """The held-out images of a config; a held-out folder takes its classes from the folder trained on."""
    if config.heldout_source is None:
        images = open_images(config.source, "heldout", size=size)
    else:
        folders = config.source.startswith("folder:") and config.heldout_source.startswith("folder:")
        classes = _train_classes(config)
        images = open_images(config.heldout_source, "all", size=size, classes=classes if folders else None)
        _check_same(config, classes, images.classes)
    _check_classes(config, images.classes)
    return images


def _train_classes(config: VisionDataConfig) -> tuple[str, ...] | None:
    """The classes trained on, by label; None where they are not known, or the shards are not on this machine."""
    try:
        shards = open_shard_source(config.source, "train")
    except FileNotFoundError:
        return None
    return (shards or open_images(config.source, "train", hold_out=False)).classes


def _check_same(config: VisionDataConfig, train: tuple[str, ...] | None, heldout: tuple[str, ...] | None) -> None:
    """ValueError where a label means one class in training and another in held-out images."""
    if train is None or heldout is None or train == heldout:
        return
    both = (
        f"source {config.source!r} and heldout_source {config.heldout_source!r} must list the same classes in one order"
    )
    for label, (one, other) in enumerate(zip_longest(train, heldout)):
        if one != other:
            raise ValueError(f"{both}: label {label} is {one!r} in training and {other!r} in held-out images")


def _check_classes(config: VisionDataConfig, classes: tuple[str, ...] | None) -> None:
    if classes is not None and len(classes) != config.num_classes:
        raise ValueError(
            f"the source has {len(classes)} classes, num_classes is {config.num_classes}: "
            f"--set data.num_classes={len(classes)}"
        )


class HeldOut:
    """Held-out images by number, as they are stored: [i] is (RGB image at its native size, label).

    classes: names by label; the labels' numbers where the source has no names (empty if how many is not known either).
    fingerprint: identifies the content. report: what was converted so far.
    Errors: BadImage (a ValueError with `reason`) for an image that cannot be had; IndexError past the end.
    """

    def __init__(self, images: ImageSet, num_classes: int = 0) -> None:
        self.images, self.num_classes = images, num_classes
        self.classes = (
            [str(number) for number in range(num_classes)] if images.classes is None else list(images.classes)
        )
        self.fingerprint = images.fingerprint
        self.report = ImageReport()
        self.report.extend(images.problems)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if not 0 <= index < len(self.images):
            raise IndexError(f"image {index} is outside 0..{len(self.images) - 1}")
        events: list[Event] = []
        try:
            return load_image(self.images, index, len(self.classes) or None, events)
        except BadImage as error:
            events.append(("skipped", error.reason, self.images.name(index)))
            raise BadImage(error.reason, f"{self.images.name(index)}: {error.detail}") from error
        finally:
            self.report.extend(events)


def held_out_images(source: str | VisionDataConfig, *, split: str = "heldout") -> HeldOut:
    """The held-out images of a config, or of a spec string, for evaluation.

    split="all" takes a spec as a held-out set as a whole; shards given as "wds:…" always are. "glyphs-builtin" is drawn at
    384 pixels. Errors: those of `open_images`.
    """
    if isinstance(source, VisionDataConfig):
        return HeldOut(_held_out(source, size=BUILTIN_HELDOUT_SIZE), source.num_classes)
    split = "all" if source.startswith("wds:") else split
    return HeldOut(open_images(source, split, size=BUILTIN_HELDOUT_SIZE))
