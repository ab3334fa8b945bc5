"""Training batches from decoded images: augmentation, mixup and erasing, each draw keyed.

Every random draw follows from a key of integers such as (seed, epoch, sample). timm and torchvision
draw from the global generators, so `seeded(key)` sets those and `preserve_rng_state()` restores
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from modalities.vision.config import VisionDataConfig
from modalities.vision.images import Shape, limit_aspect, rand_augment
from modalities.vision.objects import NO_OBJECTS, Objects, cut, targets_of, window_off, window_on

BICUBIC = v2.InterpolationMode.BICUBIC
# First word of every random key after the seed, so that no two uses share a stream; samples.py has
# its own.
_AUGMENT = 10
_ERASE = 11
_MIX = 12
_SHAPE = 13


def seeded(*key: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator by a key."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=24).digest()
    # 64 bits for Python, 32 for numpy, which takes no more, and 63 for torch, whose seed is signed.
    for_python, for_numpy, for_torch = struct.unpack("<QIxxxxQ", digest)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch >> 1)


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the three generators afterwards."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


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


class BatchMaker:
    """Decoded images of one batch -> {"images": float32 (B, 3, H, W), normalised, "targets"}.

    (H, W) is one of `train_shapes`, drawn for the batch. targets: int64 (B,), of windows also
    "maps" (B, H, W); with mixup, cutmix or label smoothing float32 (B, num_classes) summing to 1.
    Mixup pairs image b with B−1−b; B is even.
    """

    def __init__(self, config: VisionDataConfig) -> None:
        self.config = config
        self.shapes = config.train_shapes
        self.transforms = {shape: train_transform(config, shape) for shape in self.shapes}
        self.erase = None
        if config.random_erasing:
            self.erase = RandomErasing(config.random_erasing, mode="pixel", device="cpu")
        self.mix = None
        if config.mixup > 0 or config.cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                label_smoothing=config.label_smoothing,
                num_classes=config.num_classes,
            )
        self.mean = 255 * torch.tensor(config.mean).view(3, 1, 1)
        self.scale = 1 / (255 * torch.tensor(config.std).view(3, 1, 1))

    def __call__(
        self,
        images: Sequence[Image.Image],
        labels: Sequence[int | Objects],
        keys: Sequence[tuple[int, ...]],
        batch_key: tuple[int, ...],
    ) -> dict[str, Tensor]:
        """keys: one per image; batch_key: of what is drawn once per batch. The config's seed
        precedes each."""
        config = self.config
        shape = self._shape(batch_key)
        answers = []
        pixels = np.empty((len(images), *shape, 3), dtype=np.uint8)
        with preserve_rng_state():
            for row, image, label, key in zip(pixels, images, labels, keys, strict=True):
                seeded(config.seed, _AUGMENT, *key)
                window, answer = self._window(image, label, shape)
                row[:] = np.asarray(self.transforms[shape](window))
                answers.append(answer)
            batch = self._normalised(pixels)
            tensors = {name: _stacked(answers, name) for name in answers[0]}
            if self.erase is not None:
                for image, key in zip(batch, keys, strict=True):
                    seeded(config.seed, _ERASE, *key)
                    self.erase(image)
            if self.mix is not None:
                seeded(config.seed, _MIX, *batch_key)
                batch, tensors["targets"] = self.mix(batch, tensors["targets"])
            elif config.label_smoothing:
                tensors["targets"] = mixup_target(
                    tensors["targets"],
                    config.num_classes,
                    smoothing=config.label_smoothing,
                )
        return {"images": batch} | tensors

    def _shape(self, batch_key: tuple[int, ...]) -> Shape:
        """One of the training shapes, drawn for the batch."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        rng = np.random.default_rng([self.config.seed, _SHAPE, *batch_key])
        return self.shapes[int(rng.integers(len(self.shapes)))]

    def _normalised(self, pixels: np.ndarray) -> Tensor:
        """(B, 3, H, W) float32 from (B, H, W, 3) uint8."""
        batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
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


def _stacked(answers: Sequence[Mapping[str, object]], name: str) -> Tensor:
    """(B, …) int64: one of the answers of every image."""
    return torch.tensor(np.array([answer[name] for answer in answers]), dtype=torch.int64)
