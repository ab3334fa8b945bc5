"""The data section of vision recipes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from modalities.vision.transforms import IMAGENET_MEAN, IMAGENET_STD, rand_augment
from zoo.naming import nearest

__all__ = ["VisionDataConfig"]

_RANGES = (
    (("image_size", "num_classes", "shuffle_buffer"), 1, math.inf, "must be at least 1"),
    (("num_workers", "seed"), 0, math.inf, "is negative"),
    (("hflip", "random_erasing", "label_smoothing"), 0, 1, "is outside 0..1"),
    (("color_jitter", "mixup", "cutmix"), 0, sys.float_info.max, "must not be negative"),
)
# What each way of augmenting leaves unused, which is an error to set.
_UNUSED = {
    "none": ("hflip", "color_jitter", "rand_augment", "random_erasing"),
    "light": ("rand_augment", "random_erasing"),
    "imagenet": (),
}


@dataclass(frozen=True)
class VisionDataConfig:
    """What to train on.

    source, heldout_source: spec strings (sources.py). heldout_source is where the held-out split comes from when not
        from `source`; all of it is then held out.
    image_size: S, the side of the square training images. num_classes: labels are 0…num_classes−1; as many as the source
        lists, where it lists its classes.
    augment: "none" resizes the shorter side and cuts out the centre, as evaluation does; "light" is RandomResizedCrop
        with `crop_scale` (the share of the area), then flip and colour jitter where those are set; "imagenet" is the
        same, then RandAugment and, on the normalised tensor, random erasing. Resizing is bicubic.
    hflip: probability. color_jitter: strength on brightness, contrast and saturation. random_erasing: probability, filled
        with noise. rand_augment: timm's string, such as "rand-m9-n2-mstd0.5", which applies each operation with probability
        one half; "-p1" applies all.
    mixup, cutmix: the α of their Beta(α, α), 0 is off; with both on, each batch takes one of them, either equally likely.
        label_smoothing: ε.
    mean, std: of the channels in 0…1, for normalisation.
    shuffle_buffer: samples of a shard source that a worker shuffles at a time (compressed, in memory).
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
        for names, least, most, expected in _RANGES:
            for name in names:
                if not least <= getattr(self, name) <= most:
                    raise ValueError(f"{name} {getattr(self, name)} {expected}")
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(
                f"crop_scale {self.crop_scale} is not two rising shares of the area in 0..1, such as (0.7, 1)"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean {self.mean} and std {self.std} must have three values each, std positive")
        self._check_augment()

    def _check_augment(self) -> None:
        if self.augment not in _UNUSED:
            raise ValueError(f"augment {self.augment!r}: {nearest(self.augment, _UNUSED)}")
        for name in _UNUSED[self.augment]:
            if getattr(self, name):
                need = "'light' or 'imagenet'" if name in ("hflip", "color_jitter") else "'imagenet'"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect with augment={self.augment!r}; set augment to {need}"
                )
        if self.rand_augment:
            rand_augment(self.rand_augment, self.image_size, self.mean)

    def unaugmented(self) -> VisionDataConfig:
        """As held-out images are prepared: no augmentation, plain labels."""
        off = {name: getattr(type(self), name) for name in (*_UNUSED["none"], "mixup", "cutmix", "label_smoothing")}
        return replace(self, augment="none", **off)
