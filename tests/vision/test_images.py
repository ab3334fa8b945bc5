"""The treatment of every kind of image, the report, and images for evaluation."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.vision import images
from modalities.vision.batches import train_transform
from modalities.vision.config import VisionDataConfig
from modalities.vision.images import TURNS, BadImage, decode_image, to_rgb
from modalities.vision.transforms import preprocess
from tests.vision.image_files import encoded, picture, solid
from zoo import create_model

RED = (200, 30, 40)


def red(mode="RGB"):
    return Image.new("RGB", (6, 4), RED).convert(mode)


def half_transparent():
    image = Image.new("RGBA", (6, 4), (*RED, 255))
    image.paste((0, 0, 255, 0), (3, 0, 6, 4))
    return image


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png():
    """The header of a 20000 × 20000 picture with hardly any data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def wide_grey(transparency=None):
    """A 16-bit PNG of 40000, in which one grey may be transparent."""
    plain = encoded(Image.fromarray(np.full((4, 6), 40000, np.uint16)))
    if transparency is None:
        return plain
    end = plain.index(b"IDAT") - 4
    return plain[:end] + chunk(b"tRNS", struct.pack(">H", transparency)) + plain[end:]


CONVERTED = {
    "grey": (encoded(red("L")), (82, 82, 82)),
    "1-bit": (encoded(Image.new("1", (6, 4), 1)), (255, 255, 255)),
    "palette": (encoded(red().quantize(4)), RED),
    "cmyk": (encoded(red("CMYK"), "TIFF"), RED),
    "ycbcr": (encoded(red("YCbCr"), "TIFF"), RED),
    "alpha": (encoded(half_transparent()), RED),
    "16-bit": (wide_grey(), (155, 155, 155)),
    "16-bit transparent": (wide_grey(40000), (255, 255, 255)),
    "16-bit beside the transparent colour": (wide_grey(40001), (155, 155, 155)),
    "32-bit integers within 16 bits": (encoded(Image.new("I", (6, 4), 40000), "TIFF"), (155, 155, 155)),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_every_kind_becomes_rgb(kind):
    data, colour = CONVERTED[kind]
    image = decode_image(data)
    assert image.mode == "RGB" and image.size == (6, 4)
    assert np.abs(np.subtract(image.getpixel((0, 0)), colour)).max() <= (0 if "16" in kind else 3)
    assert kind != "alpha" or image.getpixel((5, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation_is_applied_once(form):
    upright = picture(5, (48, 32))
    for orientation in range(1, 9):
        undo = {6: 8, 8: 6}.get(orientation, orientation)  # what stores the picture so that the note is true
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = upright.transpose(TURNS[undo]) if undo in TURNS else upright
        data = encoded(turned, form, exif=exif, **({"quality": 100} if form == "JPEG" else {}))
        image = decode_image(data)
        assert images.upright_size(data) == image.size == to_rgb(image).size == (48, 32)
        assert np.abs(np.asarray(image, int) - np.asarray(upright, int)).mean() < 4
    assert decode_image(encoded(solid(5), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")).size == (12, 12)


JPEG, PNG = encoded(picture(1, (80, 80)), "JPEG", quality=95), encoded(picture(1, (80, 80)))
SKIPPED = {
    "empty": (b"", "empty"),
    "text": (b"<html>404 not found</html>", "unknown format"),
    "half a jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "half a png": (PNG[: len(PNG) // 2], "truncated"),
    "png with a broken chunk": (PNG[:60] + bytes(40) + PNG[100:], "corrupt"),
    "bomb": (huge_png(), "too large"),
    "float": (encoded(Image.new("F", (6, 4), 0.5), "TIFF"), "unsupported mode"),
    "32-bit": (encoded(Image.new("I", (6, 4), 1 << 20), "TIFF"), "unsupported mode"),
    "lab": (encoded(Image.new("LAB", (6, 4)), "TIFF"), "unsupported mode"),
}


def test_bad_images_have_a_reason(monkeypatch):
    for data, reason in SKIPPED.values():
        with pytest.raises(BadImage) as error:
            decode_image(data)
        assert error.value.reason == reason
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(BadImage, match="too large: 12×12 pixels"):
        decode_image(encoded(solid(1)))


# ---- images for evaluation ----

NORMAL = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def ramp(height, width):
    """Red rises to the right, green downwards."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / (width - 1), 255 * y / (height - 1), 0 * x], -1)
    return Image.fromarray(pixels.round().astype(np.uint8))


def test_the_largest_central_window_is_read():
    pixels = preprocess(ramp(100, 100), 50, 100, train_size=48, **NORMAL)
    assert abs(pixels[1].min() - 0.25) < 0.02 and abs(pixels[1].max() - 0.75) < 0.02  # a quarter is cut above and below
    assert pixels[0].min() < 0.02 and pixels[0].max() > 0.98
    for shape, options, message in (((150, 300), {}, r"largest.* 100×200"), ((8, 8), {"mode": "big"}, "mode 'big'")):
        with pytest.raises(ValueError, match=message):
            preprocess(Image.new("RGB", (200, 300)), *shape, train_size=96, **options)


def test_thin_pictures_take_no_memory(monkeypatch):
    """No picture in between is larger than a few training sizes, and the middle is what comes out."""
    image = Image.new("RGB", (60_000, 2), "white")
    image.paste(RED, (29_999, 0, 30_001, 2))
    areas, resize = [], Image.Image.resize

    def watched(image, size, *args, **options):
        areas.append(size[0] * size[1])
        return resize(image, size, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    pixels = np.array(train_transform(VisionDataConfig(augment="none"), (32, 32))(image))
    assert max(areas) <= 8 * 32**2 and pixels.shape == (32, 32, 3) and pixels.min() < 50


def test_a_model_reads_a_file_as_training_does(tmp_path):
    model, grey = create_model("vision_nope_tiny_patch8").eval(), np.arange(4096).reshape(64, 64) // 16
    pixels = []
    for image in (grey.astype(np.uint8), grey.astype(np.uint16) * 257):
        Image.fromarray(image).save(tmp_path / "a.png")
        pixels.append(model.read(str(tmp_path / "a.png")))
    assert torch.equal(*pixels)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.png: unknown format"):
        model.read(str(tmp_path / "text.png"))
