"""The data section of vision recipes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from modalities.loading import MOST_WORKERS
from modalities.vision.images import IMAGENET_MEAN, IMAGENET_STD, MAX_PIXELS, rand_augment
from zoo.errors import LARGEST_SEED, bounded, check_fields, nearest

# What each way of augmenting leaves unused, which is an error to set.
_UNUSED = {
    "none": ("hflip", "color_jitter", "rand_augment", "random_erasing"),
    "light": ("rand_augment", "random_erasing"),
    "imagenet": (),
    "window": ("hflip", "rand_augment", "random_erasing"),
}
TARGETS = ("label", "marked+map")


@dataclass(frozen=True)
class VisionDataConfig:
    """What to train on.

    source: a spec string (sources.py).
    heldout_source: where held-out images come from, all of them, when not from `source`.
    image_size: S, the side of the square training images.
    num_classes: labels are 0…num_classes−1, as many as the source lists; of maps one more, the
        background.
    target: "label", the image's own, or what is asked of the objects in it (objects.py).
    unmarked: for "marked+map", the share of training rows whose window should lack some evidence;
        their answer is 0. Pictures without such a window keep the mark: 70% of `scenes` at 96
        pixels.
    shapes: height×width in pixels, such as 96x96,64x144, among which every training batch draws
        one; (): image_size alone.
    augment: "none" resizes the shorter side and cuts out the centre, as evaluation does; "light" is
        RandomResizedCrop with `crop_scale` (the share of the area), then flip and colour jitter
        where those are set; "imagenet" is the same, then RandAugment and, on the normalised tensor,
        random erasing. Resizing is bicubic. "window", of targets that are asked of objects, cuts
        out a window at the stored resolution that holds the evidence; no resizing.
    hflip, random_erasing: probabilities; erased areas are filled with noise.
    color_jitter: strength on brightness, contrast and saturation.
    rand_augment: timm's string, such as "rand-m9-n2-mstd0.5", which applies each operation with
        probability one half; "-p1" applies all.
    mixup, cutmix: the α of their Beta(α, α), 0 is off; with both on, each batch takes one of them,
        either equally likely.
    label_smoothing: ε.
    mean, std: of the channels in 0…1, for normalisation.
    shuffle_buffer: samples of a shard source that a worker shuffles at a time (compressed, in
        memory).
    """

    source: str = "glyphs"
    heldout_source: str | None = None
    image_size: int = bounded(96, 1, 2**13)
    num_classes: int = bounded(26, 1, 2**24)
    target: str = "label"
    unmarked: float = bounded(0.0, 0, 1)
    shapes: tuple[str, ...] = ()
    augment: str = "light"
    crop_scale: tuple[float, float] = (0.7, 1.0)
    hflip: float = bounded(0.0, 0, 1)
    color_jitter: float = bounded(0.0, 0, math.inf)
    rand_augment: str = ""
    random_erasing: float = bounded(0.0, 0, 1)
    mixup: float = bounded(0.0, 0, math.inf)
    cutmix: float = bounded(0.0, 0, math.inf)
    label_smoothing: float = bounded(0.0, 0, 1)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    seed: int = bounded(0, 0, LARGEST_SEED)
    num_workers: int = bounded(0, 0, MOST_WORKERS)
    shuffle_buffer: int = bounded(4096, 1, 2**24)

    def __post_init__(self) -> None:
        check_fields(self)
        # JSON and --set give lists.
        for name in ("crop_scale", "mean", "std", "shapes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_numbers()
        self._check_augmentation()
        self._check_target()
        # Raises.
        self.train_shapes  # noqa: B018

    def _check_numbers(self) -> None:
        scale = self.crop_scale
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            expected = "expected two rising shares of the area, such as (0.7, 1)"
            raise ValueError(f"crop_scale {scale}: {expected}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(
                f"mean {self.mean} and std {self.std} must have three values each, std positive"
            )

    def _check_augmentation(self) -> None:
        for name, choices in (("augment", tuple(_UNUSED)), ("target", TARGETS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} {value!r}: {nearest(value, choices)}")
        for name in _UNUSED[self.augment]:
            value = getattr(self, name)
            if value:
                light = name in ("hflip", "color_jitter")
                need = "'light' or 'imagenet'" if light else "'imagenet'"
                raise ValueError(
                    f"{name}={value!r} has no effect with augment={self.augment!r}; "
                    f"set augment to {need}"
                )
        if self.rand_augment:
            rand_augment(self.rand_augment, self.image_size, self.mean)

    def _check_target(self) -> None:
        asks_label = self.target == "label"
        if asks_label == (self.augment == "window"):
            way_out = "expected augment='window' for target='marked+map', and only for it"
            raise ValueError(f"target={self.target!r} with augment={self.augment!r}: {way_out}")
        if asks_label:
            if self.unmarked:
                raise ValueError(f"unmarked={self.unmarked} with target='label': expected 0")
            return
        for name in ("mixup", "cutmix", "label_smoothing"):
            value = getattr(self, name)
            if value:
                raise ValueError(f"{name}={value} with target={self.target!r}: expected 0")

    @property
    def train_shapes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of the training batches."""
        shapes = []
        for text in self.shapes:
            match = re.fullmatch(r"(\d+)x(\d+)", text)
            if not match or not 0 < int(match[1]) * int(match[2]) <= MAX_PIXELS:
                expected = "height and width in pixels, such as 96x96 or 64x144"
                raise ValueError(f"shapes: {text!r} is not {expected}")
            shapes.append((int(match[1]), int(match[2])))
        return tuple(shapes) or ((self.image_size, self.image_size),)

    def unaugmented(self) -> VisionDataConfig:
        """As held-out images are prepared: no augmentation, plain labels."""
        names = (*_UNUSED["none"], "mixup", "cutmix", "label_smoothing", "shapes", "unmarked")
        defaults = {name: getattr(type(self), name) for name in names}
        return replace(self, augment="none" if self.target == "label" else "window", **defaults)
