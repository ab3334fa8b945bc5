"""From stored bytes to an upright 8-bit RGB image of a size, sets of images, and the report of what
was skipped.

    grey, 1-bit, palette, CMYK, YCbCr, HSV     converted by Pillow, without colour profiles, gamma
    alpha, a transparent colour                composited on white
    grey of 9 to 16 bits                       scaled to 8 bits, so that white stays white (TIFF of
                                               12 and 16 bits, PNG, PGM of any depth, JPEG 2000)
    grey in 32-bit integers                    as of 16 bits, where no value is larger
    colour of 16 bits                          the upper 8
    EXIF orientation                           applied; broken EXIF counts as upright
    several frames                             the first one
    empty, unknown format, truncated, corrupt, float, signed, LAB, TIFF and JPEG 2000 whose meaning
    or depth Pillow mistakes (`tiff.py`, `formats.py`), arithmetic JPEG, too large (MAX_PIXELS)
                                               skipped

The formats of EXTENSIONS are read, by content. Missing data is noticed in all of them. Changed
bytes are noticed in PNG, which has checksums; of others the decoder makes what it can.

Sources also skip files without an image's extension, class folders without images, samples without
an image, label or usable objects, and labels outside 0…num_classes−1 (a ValueError where the source
lists its classes). The next good image of the order takes the place of a skipped one; in held-out
passes it has target −1. A set of which nothing is left is a ValueError.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from modalities.encoder.items import ItemSet, split_places
from modalities.vision.errors import BadImage
from modalities.vision.formats import (
    FORMATS,
    check_meaning,
    check_whole,
    eight_bits,
    unreadable,
    white_level,
)
from modalities.vision.objects import Objects

EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".jp2",
    ".avif",
)
# A quarter of a GiB in RGB: Pillow's own bound.
MAX_PIXELS = 89_478_485
# What a held-out folder or split may be called.
HELDOUT_NAMES = ("heldout", "val", "validation", "test")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MAX_ASPECT = 8


def decode_image(data: bytes) -> Image.Image:
    """Upright RGB. Raises BadImage."""
    if not data:
        raise BadImage("empty")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadImage("too large", f"{image.width}×{image.height} pixels")
        check_meaning(image, data)
        image.load()
        check_whole(image, data)
        _scale_transparency(image, data)
        return to_rgb(image, white=white_level(image, data))
    except (BadImage, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise BadImage("too large", str(error)) from None
    # A broken file can make Pillow's readers raise nearly anything.
    except Exception as error:
        raise unreadable(data, error) from None


def _scale_transparency(image: Image.Image, data: bytes) -> None:
    """Bring the transparent colour of a PNG of fewer bits to 8 bits: Pillow scales the pixels
    alone. Raises BadImage for 16 bits."""
    if image.format != "PNG" or image.mode == "P" or "transparency" not in image.info:
        return
    # Byte 24 of a PNG is its bit depth.
    bits = data[24]
    if bits == 16:
        raise BadImage("unsupported mode", "16 bits with a transparent colour")
    if bits in (2, 4):
        image.info["transparency"] *= 255 // (2**bits - 1)


def to_rgb(image: Image.Image, *, white: int = 65535) -> Image.Image:
    """Upright 8-bit RGB. white: the level of grey beyond 8 bits, as `white_level` has it. Raises
    BadImage for a mode without a defined range, and for what Pillow cannot convert."""
    if orientation(image) > 1:
        # With a broken tag besides the orientation the picture counts as upright.
        with contextlib.suppress(Exception):
            image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = eight_bits(image, white)
    mode = image.mode
    # A transparent colour, as PNG and GIF have it.
    keyed = "transparency" in image.info
    if mode == "RGB" and not keyed:
        return image
    try:
        if mode in ("RGBA", "LA", "PA") or (keyed and mode in ("RGB", "L", "1", "P")):
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        elif mode not in ("L", "1", "P", "CMYK", "YCbCr", "HSV"):
            raise BadImage("unsupported mode", mode)
        return image.convert("RGB")
    except BadImage:
        raise
    except (ValueError, TypeError, OSError) as error:
        raise BadImage("unsupported mode", f"{mode}: {error}") from error


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) where there is none or the EXIF data is broken."""
    if "exif" not in image.info and image.format == "JPEG":
        return 1
    try:
        # 0x0112 is EXIF's tag of the orientation.
        value = int(image.getexif().get(0x0112, 1))
    # Pillow's EXIF reader raises many things; a broken note does not make the picture bad.
    except Exception:
        return 1
    return value if 1 <= value <= 8 else 1


def upright_size(stored: bytes | Image.Image) -> tuple[int, int]:
    """(width, height) by the header alone. Raises BadImage for bytes that are no image."""
    try:
        image = stored if isinstance(stored, Image.Image) else Image.open(io.BytesIO(stored))
    # As in `decode_image`.
    except Exception as error:
        raise BadImage("unknown format") from error
    # Pillow turns a TIFF by itself.
    if image.format != "TIFF" and orientation(image) in (5, 6, 7, 8):
        return image.height, image.width
    return image.size


def limit_aspect(image: Image.Image) -> Image.Image:
    """An image centre-cropped to an aspect of at most MAX_ASPECT : 1: else 60000 × 2 pixels would
    be resized to a shorter side of S by a longer one of S·30000. The central square that is cut
    afterwards is the same."""
    longest = MAX_ASPECT * min(image.size)
    return image if max(image.size) <= longest else _centre(image, longest, longest)


def _centre(image: Image.Image, height: int, width: int) -> Image.Image:
    height = max(1, min(image.height, height))
    width = max(1, min(image.width, width))
    top = (image.height - height) // 2
    left = (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))


def rand_augment(
    spec: str, size: int, mean: Sequence[float]
) -> Callable[[Image.Image], Image.Image]:
    """timm's RandAugment from a string such as "rand-m9-n2-mstd0.5"; uncovered areas are filled
    with the mean colour."""
    # timm takes longer to import than torch.
    from timm.data.auto_augment import rand_augment_transform

    hparams = {
        "translate_const": int(0.45 * size),
        "img_mean": tuple(min(255, round(255 * m)) for m in mean),
    }
    try:
        return rand_augment_transform(spec, hparams)
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(
            f"rand_augment {spec!r}: expected timm's form, such as 'rand-m9-n2-mstd0.5'"
        ) from error


def preprocess(
    image: Image.Image,
    height: int,
    width: int,
    *,
    via: int = 0,
    mean: Sequence[float],
    std: Sequence[float],
) -> Tensor:
    """The largest central window of an image, at a given size: float32 (3, height, width),
    normalised. via: the shorter side is reduced to so many pixels first, and enlarged again: the
    control without new detail."""
    # Slow to import.
    from torchvision.transforms.v2.functional import normalize

    image = to_rgb(image)
    window_height = round(image.width * height / width)
    window_width = round(image.height * width / height)
    image = _centre(image, window_height, window_width)
    if via:
        image = reduced(image, via)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32)
    return normalize(pixels / 255, list(mean), list(std))


def reduced(image: Image.Image, side: int) -> Image.Image:
    """The image with a shorter side of so many pixels."""
    scale = side / min(image.size)
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    return image.resize((width, height), Image.Resampling.BICUBIC)


class ImageSet(ItemSet):
    """Images by index."""

    def read(self, index: int) -> tuple[bytes | Image.Image, int]:
        """(stored bytes or a PIL image, label). Raises BadImage."""
        raise NotImplementedError

    def read_objects(self, index: int) -> tuple[bytes | Image.Image, Objects]:
        """(stored bytes or a PIL image, its objects). Raises BadImage; ValueError for a source that
        has none."""
        raise ValueError(
            f"source {self.spec!r} has no boxes; expected shards with objects in KEY.json"
        )


def checked_image(
    payload: bytes | Image.Image,
    label: int | Objects,
    name: str,
    *,
    num_classes: int | None = None,
    listed: bool = False,
) -> Image.Image:
    """The RGB image. Raises BadImage, also where EXIF turns an image with objects: its boxes may be
    of either one. A label outside 0…num_classes−1 is a ValueError where the source lists its
    classes (`listed`), else a BadImage."""
    if isinstance(label, int) and num_classes is not None and not 0 <= label < num_classes:
        if listed:
            expected = f"0…{num_classes - 1} (num_classes {num_classes})"
            raise ValueError(f"{name} has label {label}, outside {expected}")
        raise BadImage("label out of range", f"{label} of {num_classes} classes")
    image = decode_image(payload) if isinstance(payload, bytes) else to_rgb(payload)
    if not isinstance(label, int):
        stored = Image.open(io.BytesIO(payload)) if isinstance(payload, bytes) else payload
        if orientation(stored) > 1:
            raise BadImage("rotated objects")
    return image


def heldout_places(names: Iterable[str], split: str) -> list[int]:
    """Of a source without a held-out part, the places of a split's images (`split_places`)."""
    return split_places(names, split, key=b"priorzoo images")
