"""What happens to a decoded image: augmentation and batches for training, exact sizes for evaluation.

    train_transform   PIL -> PIL of the training size          BatchMaker    images of a batch -> tensors; mixup, erasing
    eval_transform    PIL -> tensor, for any data loader       preprocess    PIL -> tensor of an asked size, real or enlarged

Every random draw follows from a key of integers such as (seed, epoch, sample): `seeded(key)` sets the generators that
timm and torchvision draw from, `undisturbed()` gives them back to the program as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from modalities.vision.images import MAX_PIXELS, BadImage, to_rgb

if TYPE_CHECKING:
    from modalities.vision.data import VisionDataConfig

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "BatchMaker",
    "ToRGB",
    "eval_transform",
    "preprocess",
    "rand_augment",
    "seeded",
    "train_transform",
    "undisturbed",
]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_BICUBIC = v2.InterpolationMode.BICUBIC
# First word of every random key after the seed, so that no two uses share a stream.
_AUGMENT, _ERASE, _MIX = 10, 11, 12


def seeded(*key: int) -> None:
    """Set Python's, numpy's and torch's CPU generator from a key. CUDA generators stay as they are."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=24).digest()
    first, second, third = struct.unpack("<QIxxxxQ", digest)
    random.seed(first)
    np.random.seed(second)
    torch.default_generator.manual_seed(third >> 1)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the three generators as they were found."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


class ToRGB(torch.nn.Module):
    """PIL image of any mode -> upright RGB, as a transform (images.py has the table). Errors: BadImage."""

    def forward(self, image: Image.Image) -> Image.Image:
        return to_rgb(image)[0]


class LessThin(torch.nn.Module):
    """PIL -> PIL, cut from the centre to sides of at most 1 : THINNEST.

    Before an image's shorter side is resized to S and a square cut out: a picture of 60000 × 2 pixels would be S·30000
    pixels long in between. What is cut away is far from the square, so that the result stays the same.
    """

    THINNEST = 8

    def forward(self, image: Image.Image) -> Image.Image:
        longest = self.THINNEST * min(image.size)
        if max(image.size) <= longest:
            return image
        width, height = min(image.width, longest), min(image.height, longest)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return image.crop((left, top, left + width, top + height))


def rand_augment(spec: str, size: int, mean: Sequence[float]) -> Callable[[Image.Image], Image.Image]:
    """timm's RandAugment of a string such as "rand-m9-n2-mstd0.5"; areas moved in are filled with the mean colour."""
    hparams = {"translate_const": int(0.45 * size), "img_mean": tuple(min(255, round(255 * m)) for m in mean)}
    try:
        return rand_augment_transform(spec, hparams)
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(f"rand_augment {spec!r} is not of timm's form, such as 'rand-m9-n2-mstd0.5'") from error


def train_transform(config: VisionDataConfig) -> v2.Compose:
    """PIL -> PIL (image_size, image_size), as `augment` says. Draws from the global generators: see `seeded`."""
    size, steps = config.image_size, []
    if config.augment == "none":
        return v2.Compose([LessThin(), v2.Resize(size, _BICUBIC), v2.CenterCrop(size)])
    steps.append(v2.RandomResizedCrop(size, scale=config.crop_scale, interpolation=_BICUBIC))
    if config.hflip > 0:
        steps.append(v2.RandomHorizontalFlip(config.hflip))
    if config.color_jitter > 0:
        jitter = config.color_jitter
        steps.append(v2.ColorJitter(brightness=jitter, contrast=jitter, saturation=jitter))
    if config.rand_augment:
        steps.append(rand_augment(config.rand_augment, size, config.mean))
    return v2.Compose(steps)


def eval_transform(
    image_size: int, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD
) -> v2.Compose:
    """PIL -> float32 (3, image_size, image_size), normalised: shorter side resized (bicubic, antialiased), centre cut out.

    It is an ordinary torchvision transform, so that `torchvision.datasets` and a plain DataLoader can use it.
    """
    steps = [ToRGB(), LessThin(), v2.Resize(image_size, _BICUBIC), v2.CenterCrop(image_size)]
    return v2.Compose(
        [*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
    )


class BatchMaker:
    """Decoded images of one batch -> {"images": float32 (B, 3, S, S), normalised, "targets"}.

    targets: int64 (B,); with train=True and mixup, cutmix or label smoothing on, float32 (B, num_classes) summing to 1.
    Mixup pairs image b with image B−1−b, one λ per batch, and needs an even B.
    """

    def __init__(self, config: VisionDataConfig, *, train: bool) -> None:
        self.config, self.train = config, train
        size = config.image_size
        self.transform = train_transform(config if train else config.with_options(**_PLAIN))
        self.erase = RandomErasing(config.random_erasing, mode="pixel", device="cpu") if config.random_erasing else None
        mixing = {"mixup_alpha": config.mixup, "cutmix_alpha": config.cutmix}
        self.mix = None
        if config.mixup > 0 or config.cutmix > 0:
            self.mix = Mixup(**mixing, label_smoothing=config.label_smoothing, num_classes=config.num_classes)
        self.mean = 255 * torch.tensor(config.mean).view(3, 1, 1)
        self.scale = 1 / (255 * torch.tensor(config.std).view(3, 1, 1))
        self.shape = (size, size, 3)

    def __call__(
        self,
        images: Sequence[Image.Image],
        labels: Sequence[int],
        keys: Sequence[tuple[int, ...]],
        batch_key: tuple[int, ...],
    ) -> dict[str, Tensor]:
        """keys: one per image; batch_key: for what the batch draws as a whole. The seed is put in front of each."""
        seed = self.config.seed
        pixels = np.empty((len(images), *self.shape), dtype=np.uint8)
        with undisturbed():
            for row, image, key in zip(pixels, images, keys, strict=True):
                seeded(seed, _AUGMENT, *key)
                row[:] = np.asarray(self.transform(image))
            batch = (
                torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
            )
            batch.sub_(self.mean).mul_(self.scale)
            targets = torch.tensor(labels, dtype=torch.int64)
            if self.train:
                batch, targets = self._mix(batch, targets, keys, batch_key)
        return {"images": batch, "targets": targets}

    def _mix(self, batch: Tensor, targets: Tensor, keys: Sequence[tuple[int, ...]], batch_key: tuple[int, ...]) -> Any:
        config = self.config
        if self.erase is not None:
            for image, key in zip(batch, keys, strict=True):
                seeded(config.seed, _ERASE, *key)
                self.erase(image)
        if self.mix is not None:
            seeded(config.seed, _MIX, *batch_key)
            return self.mix(batch, targets)
        if config.label_smoothing > 0:
            targets = mixup_target(targets, config.num_classes, smoothing=config.label_smoothing)
        return batch, targets


_PLAIN: dict[str, Any] = {
    "augment": "none",
    "hflip": 0.0,
    "color_jitter": 0.0,
    "rand_augment": "",
    "random_erasing": 0.0,
}


def preprocess(
    image: Image.Image,
    height: int,
    width: int,
    *,
    mode: str = "native",
    train_size: int,
    fit: str = "extend",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """An image at the size to be tested: float32 (3, height, width), normalised.

    fit brings the image to the aspect width : height. "crop" takes the largest window of it from the centre; "extend"
        keeps the whole picture and repeats its edge pixels on both sides, so that nothing of the object is lost.
    mode="native" resizes DOWN to the asked size (bicubic, antialiased): a larger test image has real detail.
    mode="upsampled" first reduces the image so that its shorter side has train_size pixels, then enlarges that to the
        asked size: the control, as large but without new detail.

    Errors: ValueError for an unknown mode or fit, and where "native" would have to enlarge; it names the largest size
    of the asked aspect that can be had. BadImage "too large" (a ValueError) where "extend" would make more than MAX_PIXELS
    pixels of a thin picture.
    """
    if mode not in ("native", "upsampled"):
        raise ValueError(f"mode {mode!r} is none of 'native', 'upsampled'")
    if fit not in ("extend", "crop"):
        raise ValueError(f"fit {fit!r} is none of 'extend', 'crop'")
    if height < 1 or width < 1 or train_size < 1:
        raise ValueError(f"height {height}, width {width} and train_size {train_size} must be at least 1")
    image = _to_aspect(to_rgb(image)[0], height / width, fit)
    if mode == "native":
        if image.height < height or image.width < width:
            tall = min(image.height, image.width * height // width)
            raise ValueError(
                f"a native {height}×{width} image needs more pixels than are stored ({image.height}×{image.width} at that "
                f"aspect); the largest that can be had is {tall}×{tall * width // height}"
            )
    else:
        scale = train_size / min(image.height, image.width)
        small = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(small, Image.Resampling.BICUBIC)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return v2.functional.normalize(pixels.to(torch.float32) / 255, list(mean), list(std))


def _to_aspect(image: Image.Image, aspect: float, fit: str) -> Image.Image:
    """Cut or extend an image to height / width = aspect, as nearly as whole pixels allow."""
    height, width = image.height, image.width
    if fit == "crop":
        tall, wide = min(height, round(width * aspect)), min(width, round(height / aspect))
        top, left = (height - max(1, tall)) // 2, (width - max(1, wide)) // 2
        return image.crop((left, top, left + max(1, wide), top + max(1, tall)))
    tall, wide = max(height, round(width * aspect)), max(width, round(height / aspect))
    if (tall, wide) == (height, width):
        return image
    if tall * wide > MAX_PIXELS:
        raise BadImage("too large", f"{width}×{height} pixels, extended to {wide}×{tall}; fit='crop' takes it")
    top, left = (tall - height) // 2, (wide - width) // 2
    padding = ((top, tall - height - top), (left, wide - width - left), (0, 0))
    return Image.fromarray(np.pad(np.asarray(image), padding, mode="edge"))
