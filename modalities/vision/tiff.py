"""What the samples of a TIFF mean, by its tags (TIFF 6.0), where Pillow does not look at them.

A picture is read where its meaning is certain and Pillow's pixels agree with it; others are
refused.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image, TiffImagePlugin

from modalities.vision.errors import BadImage
from modalities.vision.jpeg import check_jpeg

_WIDTH = 256
_HEIGHT = 257
_BITS = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_STRIP_OFFSETS = 273
_SAMPLES = 277
_STRIP_ROWS = 278
_STRIP_BYTES = 279
_PLANAR = 284
_TILE_WIDTH = 322
_TILE_HEIGHT = 323
_TILE_OFFSETS = 324
_TILE_BYTES = 325
_INKS = 332
_EXTRA = 338
_FORMAT = 339
_JPEG_TABLES = 347
_COEFFICIENTS = 529
_SUBSAMPLING = 530
_REFERENCE = 532
# Photometric interpretations.
WHITE_IS_ZERO = 0
_RGB = 2
_CMYK = 5
_YCBCR = 6
_UNCOMPRESSED = 1
_OLD_JPEG = 6
_JPEG = 7
_SIGNED = 2
# Rec. 601 and full range, which Pillow takes for all.
_LUMA = (0.299, 0.587, 0.114)
_RANGES = {_RGB: (0, 1, 0, 1, 0, 1), _YCBCR: (0, 1, 0.5, 1, 0.5, 1)}

Tags = Mapping[int, Any]


def check_tiff(image: Image.Image, data: bytes) -> None:
    """Raises BadImage for an opened TIFF that Pillow would read as another picture, or of which a
    strip or tile is cut short."""
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    tags = image.tag_v2
    reason = _refusal(tags)
    if reason:
        raise BadImage("unsupported mode", f"TIFF {reason}")
    if tags.get(_COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED:
        _check_sizes(tags)
    if tags.get(_COMPRESSION) == _JPEG:
        _check_jpegs(tags, data)


def tiff_bits(image: Image.Image) -> int:
    """Bits of a sample."""
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    return int(image.tag_v2.get(_BITS, (1,))[0])


def is_inverted(image: Image.Image) -> bool:
    """Whether 0 is white."""
    assert isinstance(image, TiffImagePlugin.TiffImageFile)
    return image.tag_v2.get(_PHOTOMETRIC) == WHITE_IS_ZERO


def _refusal(tags: Tags) -> str:
    """Why a picture is refused; "" for one that is read."""
    bits = tags.get(_BITS, (1,))
    photometric = tags.get(_PHOTOMETRIC)
    samples = tags.get(_SAMPLES, 1)
    uncompressed = tags.get(_COMPRESSION, _UNCOMPRESSED) == _UNCOMPRESSED
    if len(set(bits)) > 1:
        return f"with samples of {bits} bits"
    if _SIGNED in tags.get(_FORMAT, (1,)) and bits[0] != 32:
        return "with signed samples"
    if tags.get(_COMPRESSION) == _OLD_JPEG:
        return "with JPEG of the old kind"
    if tags.get(_PLANAR) == 2 and samples > 1:
        in_planes = photometric in (_RGB, _CMYK) and bits[0] == 8
        if samples == 2 or (uncompressed and not in_planes):
            return f"with {samples} planes of {bits[0]} bits"
    if photometric == _RGB and samples > 3 + len(tags.get(_EXTRA, ())):
        return f"with {samples} samples, of which it explains three"
    if photometric == _CMYK and tags.get(_INKS, 1) != 1:
        return "with inks other than CMYK"
    if photometric == _YCBCR and uncompressed and tags.get(_SUBSAMPLING, (2, 2)) != (1, 1):
        return "with subsampled YCbCr, uncompressed"
    return _other_range(tags, photometric, 2 ** bits[0] - 1)


def _other_range(tags: Tags, photometric: int | None, full: int) -> str:
    """What differs from the ranges and coefficients that Pillow takes; "" where nothing does."""
    if photometric == _YCBCR:
        luma = tags.get(_COEFFICIENTS, _LUMA)
        if any(abs(float(a) - b) > 0.001 for a, b in zip(luma, _LUMA, strict=False)):
            return "with YCbCr other than Rec. 601"
    if photometric in _RANGES and _REFERENCE in tags:
        # The middle of 0…255 is 128.
        expected = [math.ceil(share * full) for share in _RANGES[photometric]]
        reference = [float(value) for value in tags[_REFERENCE]]
        if any(abs(a - b) > 1 for a, b in zip(reference, expected, strict=False)):
            return "with reference black and white"
    return ""


def _check_sizes(tags: Tags) -> None:
    """Raises BadImage for an uncompressed strip or tile with fewer bytes than its pixels need."""
    samples = 1 if tags.get(_PLANAR) == 2 else tags.get(_SAMPLES, 1)
    width = tags[_WIDTH]
    height = tags[_HEIGHT]
    sizes = tags.get(_STRIP_BYTES, ())
    rows = min(tags.get(_STRIP_ROWS, height), height)
    if _TILE_BYTES in tags:
        sizes = tags[_TILE_BYTES]
        width = tags[_TILE_WIDTH]
        rows = tags[_TILE_HEIGHT]
        height = rows
    line = math.ceil(width * samples * tags.get(_BITS, (1,))[0] / 8)
    strips = math.ceil(height / rows)
    for number, size in enumerate(sizes):
        # The last strip of a plane has the rows that are left.
        is_last = number % strips == strips - 1
        lines = height - rows * (strips - 1) if is_last else rows
        if size < line * lines:
            raise BadImage("truncated", f"{size} bytes of a TIFF's pixels, not {line * lines}")


def _check_jpegs(tags: Tags, data: bytes) -> None:
    """Raises BadImage for a strip or tile whose JPEG lacks data, which libtiff fills up."""
    for content in _jpegs(tags, data):
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as picture:
            picture.load()
            check_jpeg(content, picture)


def _jpegs(tags: Tags, data: bytes) -> Iterator[bytes]:
    """The JPEG of each strip or tile, with the tables that all share."""
    tables = tags.get(_JPEG_TABLES, b"")
    offsets = tags.get(_TILE_OFFSETS) or tags.get(_STRIP_OFFSETS, ())
    sizes = tags.get(_TILE_BYTES) or tags.get(_STRIP_BYTES, ())
    for offset, size in zip(offsets, sizes, strict=False):
        content = data[offset : offset + size]
        # The tables' end mark and the strip's start mark meet.
        yield tables[:-2] + content[2:] if tables else content
