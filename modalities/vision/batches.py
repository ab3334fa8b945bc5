"""Training batches from decoded images: augmentation, and windows on pictures with objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from modalities.encoder.batches import GridBatches
from modalities.encoder.config import Shape
from modalities.vision.config import VisionDataConfig
from modalities.vision.images import limit_aspect, rand_augment
from modalities.vision.objects import NO_OBJECTS, Objects, cut, targets_of, window_off, window_on

BICUBIC = v2.InterpolationMode.BICUBIC


def train_transform(config: VisionDataConfig, shape: Shape) -> v2.Compose:
    """PIL -> PIL of `shape`, as `augment` says; of a window what is done to its pixels. Draws from
    the global generators."""
    if config.augment == "none":
        resize = v2.Resize(max(shape), BICUBIC)
        return v2.Compose([v2.Lambda(limit_aspect), resize, v2.CenterCrop(shape)])
    steps: list[Callable[[Image.Image], Image.Image]] = []
    if config.augment != "window":
        # An aspect of 3:4 to 4:3, torchvision's, of the picture relative to the shape's own.
        aspect = shape[1] / shape[0]
        steps.append(
            v2.RandomResizedCrop(
                shape,
                scale=config.crop_scale,
                ratio=(3 / 4 * aspect, 4 / 3 * aspect),
                interpolation=BICUBIC,
            )
        )
    if config.hflip > 0:
        steps.append(v2.RandomHorizontalFlip(config.hflip))
    jitter = config.color_jitter
    if jitter:
        steps.append(v2.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter))
    if config.rand_augment:
        steps.append(rand_augment(config.rand_augment, min(shape), config.mean))
    return v2.Compose(steps or [v2.Identity()])


class ImageBatches(GridBatches):
    """Decoded images of one batch -> {"images": float32 (B, 3, H, W), normalised, "targets"}, of
    windows also "maps" (B, H, W)."""

    inputs = "images"

    def __init__(self, config: VisionDataConfig) -> None:
        super().__init__(config)
        self.config = config
        self.transforms = {shape: train_transform(config, shape) for shape in self.shapes}
        self.mean = 255 * torch.tensor(config.mean).view(3, 1, 1)
        self.scale = 1 / (255 * torch.tensor(config.std).view(3, 1, 1))

    def sample(
        self, item: Image.Image, label: int | Objects, shape: Shape
    ) -> tuple[np.ndarray, Mapping[str, object]]:
        """(H, W, 3) uint8, and what is asked of it."""
        window, answer = self._window(item, label, shape)
        return np.asarray(self.transforms[shape](window)), answer

    def tensor(self, arrays: np.ndarray) -> Tensor:
        """(B, 3, H, W) float32 from (B, H, W, 3) uint8."""
        batch = torch.from_numpy(arrays).permute(0, 3, 1, 2)
        batch = batch.to(torch.float32, memory_format=torch.contiguous_format)
        return batch.sub_(self.mean).mul_(self.scale)

    def _window(
        self, image: Image.Image, label: int | Objects, shape: Shape
    ) -> tuple[Image.Image, Mapping[str, object]]:
        """The image and its label; or a random window on it, and what is asked of that: of −1,
        which does not count, −1."""
        if self.config.target == "label":
            return image, {"targets": label}
        objects = None if isinstance(label, int) else label
        place = (random.random(), random.random())
        window = window_on(image.size, objects or NO_OBJECTS, shape, place)
        unmarked = self.config.unmarked
        if objects and unmarked and random.random() < unmarked:
            window = window_off(image, objects, shape) or window
        return cut(image, window), targets_of(objects and objects.in_window(window), shape)
