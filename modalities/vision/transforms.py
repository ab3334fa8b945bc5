"""Transforms of decoded images: what training and evaluation share, and exact sizes for evaluation.

All resizing is bicubic and antialiased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms import v2

from modalities.vision.images import to_rgb

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MODES = ("native", "resized", "upsampled")  # see `preprocess`
BICUBIC = v2.InterpolationMode.BICUBIC
Shape = tuple[int, int]  # (height, width)


MAX_ASPECT = 8


def limit_aspect(image: Image.Image) -> Image.Image:
    """An image centre-cropped to an aspect of at most MAX_ASPECT : 1: else 60000 × 2 pixels would be resized to a shorter side
    of S by a longer one of S·30000. The central square that is cut afterwards is the same."""
    longest = MAX_ASPECT * min(image.size)
    return image if max(image.size) <= longest else _centre(image, longest, longest)


def _centre(image: Image.Image, height: int, width: int) -> Image.Image:
    """The central window of at most this size."""
    height, width = max(1, min(image.height, height)), max(1, min(image.width, width))
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))


def rand_augment(spec: str, size: int, mean: Sequence[float]) -> Callable[[Image.Image], Image.Image]:
    """timm's RandAugment from a string such as "rand-m9-n2-mstd0.5"; uncovered areas are filled with the mean colour."""
    hparams = {"translate_const": int(0.45 * size), "img_mean": tuple(min(255, round(255 * m)) for m in mean)}
    try:
        return rand_augment_transform(spec, hparams)
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(f"rand_augment {spec!r}: expected timm's form, such as 'rand-m9-n2-mstd0.5'") from error


def preprocess(
    image: Image.Image,
    height: int,
    width: int,
    *,
    mode: str = "native",
    train_size: int,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """The largest central window of an image, at a given size: float32 (3, height, width), normalised.

    mode: "native" only reduces (bicubic, antialiased), so a larger size has real detail. "resized" enlarges too where that
        is needed. "upsampled" first reduces the shorter side to train_size, then enlarges: the control without new detail.

    Raises ValueError where "native" would enlarge, naming the largest possible size.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {MODES}")
    image = to_rgb(image)
    image = _centre(image, round(image.width * height / width), round(image.height * width / height))
    if mode == "native" and (image.height < height or image.width < width):
        tall = min(image.height, image.width * height // width)
        stored, largest = f"{image.height}×{image.width}", f"{tall}×{tall * width // height}"
        raise ValueError(
            f"a native {height}×{width} image needs more pixels than are stored ({stored} at this aspect); the largest native "
            f"size is {largest}"
        )
    if mode == "upsampled":
        image = reduced(image, train_size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return v2.functional.normalize(pixels.to(torch.float32) / 255, list(mean), list(std))


def reduced(image: Image.Image, side: int) -> Image.Image:
    """The image with a shorter side of so many pixels."""
    scale = side / min(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.BICUBIC)
