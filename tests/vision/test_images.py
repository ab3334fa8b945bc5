"""The treatment of every kind of image, the report, and images for evaluation."""

from __future__ import annotations

import logging
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from modalities.vision import images
from modalities.vision.batches import train_transform
from modalities.vision.config import VisionDataConfig
from modalities.vision.images import TURNS, BadImage, ImageReport, decode_image, to_rgb
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


def wide_grey(value, transparency=None):
    """A 16-bit PNG; its last column is `transparency`, where it has one."""
    pixels = np.full((4, 6), value, np.uint16)
    pixels[:, 5] = value if transparency is None else transparency
    plain = encoded(Image.fromarray(pixels))
    if transparency is None:
        return plain
    end = plain.index(b"IDAT") - 4
    return plain[:end] + chunk(b"tRNS", struct.pack(">H", transparency)) + plain[end:]


CONVERTED = {
    "grey": (encoded(red("L")), "grey", None),
    "1-bit": (encoded(Image.new("1", (6, 4), 1)), "grey", (255, 255, 255)),
    "palette": (encoded(red().quantize(4)), "palette", RED),
    "cmyk": (encoded(red("CMYK"), "TIFF"), "cmyk", RED),
    "ycbcr": (encoded(red("YCbCr"), "TIFF"), "ycbcr", RED),
    "alpha": (encoded(half_transparent()), "alpha", RED),
    "16-bit": (wide_grey(40000), "16-bit", (155, 155, 155)),
    "16-bit transparent": (wide_grey(40000, transparency=40000), "alpha", (255, 255, 255)),
    "16-bit beside the transparent colour": (wide_grey(40000, transparency=40001), "alpha", (155, 155, 155)),
    "32-bit integers within 16 bits": (encoded(Image.new("I", (6, 4), 40000), "TIFF"), "16-bit", (155, 155, 155)),
    "16-bit pgm": (b"P5 6 4 65535\n" + struct.pack(">H", 257 * 90) * 24, "16-bit", (90, 90, 90)),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_every_kind_becomes_rgb(kind):
    data, note, colour = CONVERTED[kind]
    image, notes = decode_image(data)
    assert image.mode == "RGB" and image.size == (6, 4) and notes[-1] == note
    if colour is not None:
        assert np.abs(np.subtract(image.getpixel((0, 0)), colour)).max() <= (0 if "16" in notes[0] else 3)
    if note == "alpha":
        assert image.getpixel((5, 0)) == (255, 255, 255)
    again, more = to_rgb(image)
    assert more == () and again.tobytes() == image.tobytes()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied_once(form):
    upright = picture(5, (48, 32))
    for orientation in range(1, 9):
        undo = {6: 8, 8: 6}.get(orientation, orientation)  # what stores the picture so that the note is true
        stored = upright.transpose(TURNS[undo]) if undo in TURNS else upright
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"JPEG": {"quality": 100}, "WEBP": {"lossless": True}}.get(form, {})
        data = encoded(stored, form, exif=exif, **options)
        found, notes = decode_image(data)
        assert images.upright_size(data) == found.size == to_rgb(found)[0].size == (48, 32)
        if form != "TIFF":  # Pillow turns a TIFF by itself when it loads it
            assert notes == (() if orientation == 1 else ("rotated",))
        assert np.abs(np.asarray(found, int) - np.asarray(upright, int)).mean() < 4


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


@pytest.mark.parametrize("kind", SKIPPED)
def test_bad_images_have_a_reason(kind, monkeypatch):
    data, reason = SKIPPED[kind]
    with pytest.raises(BadImage) as error:
        decode_image(data)
    assert error.value.reason == reason
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(BadImage, match="too large: 12×12 pixels"):
        decode_image(encoded(solid(1)))


def test_what_is_wrong_beside_the_pixels():
    broken_exif = encoded(solid(5), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode_image(broken_exif)[0].size == (12, 12)
    for mode, transparency in (("F", 0.5), ("LAB", (0, 0, 0)), ("RGB", "none"), ("P", 3.5)):
        image = Image.new(mode, (6, 4))
        image.info["transparency"] = transparency
        with pytest.raises(BadImage, match="unsupported mode"):
            to_rgb(image)


def test_random_damage_is_decoded_or_bad_and_nothing_else():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        data = bytearray((JPEG, PNG)[seed % 2])
        for place in rng.integers(0, len(data), 20):
            data[place] = rng.integers(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert decode_image(bytes(data))[0].mode == "RGB"
            except BadImage as error:
                assert error.reason in ("corrupt", "truncated", "unknown format", "too large", "empty")


def test_the_report_counts_and_logs_the_first_of_each_kind(caplog):
    report = ImageReport()
    assert str(report) == "every image was taken as it is"
    with caplog.at_level(logging.WARNING):
        report.extend([("skipped", "corrupt", f"image {n}") for n in range(9)] + [("converted", "grey", "g")])
    assert report.skipped == {"corrupt": 9} and report.names["corrupt"] == [f"image {n}" for n in range(5)]
    assert len(caplog.records) == 1 and "corrupt" in caplog.text and "image 0" in caplog.text
    assert str(report) == "skipped 9 × corrupt (such as image 0); converted 1 × grey (such as g)"
    report.extend([("skipped", "empty", "/a/long/way/to" * 20 + "/the-image.png")])
    assert "), 1 × empty (such as …" in str(report) and "/the-image.png); converted" in str(report)


# ---- images for evaluation ----

NORMAL = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def ramp(height, width):
    """Red rises to the right, green downwards."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / (width - 1), 255 * y / (height - 1), 0 * x], -1)
    return Image.fromarray(pixels.round().astype(np.uint8))


def test_native_images_have_detail_and_upsampled_ones_have_not():
    y, x = np.mgrid[0:192, 0:192]
    checks = Image.fromarray(((x // 2 + y // 2) % 2 * 255).astype(np.uint8))  # gone at a quarter of the size
    native, upsampled = (preprocess(checks, 192, 192, mode=m, train_size=48, **NORMAL) for m in ("native", "upsampled"))
    assert native.shape == upsampled.shape == (3, 192, 192) and native.dtype == torch.float32
    assert native.std() > 0.45 and upsampled.std() < 0.05
    small = preprocess(ramp(192, 192), 48, 48, train_size=48, **NORMAL)
    torch.testing.assert_close(small, preprocess(ramp(192, 192), 48, 48, mode="upsampled", train_size=48, **NORMAL))


def test_the_aspect_is_cropped_or_extended():
    found = preprocess(ramp(100, 100), 50, 100, fit="crop", train_size=48, **NORMAL)
    assert abs(found[1].min() - 0.25) < 0.02 and abs(found[1].max() - 0.75) < 0.02  # a quarter is cut above and below
    assert found[0].min() < 0.02 and found[0].max() > 0.98
    found = preprocess(ramp(100, 100), 100, 200, fit="extend", train_size=48, **NORMAL)
    torch.testing.assert_close(found[:, :, 50:150], preprocess(ramp(100, 100), 100, 100, train_size=48, **NORMAL))
    assert (found[0, :, :50] == found[0, :, 50:51]).all() and (found[0, :, 150:] == found[0, :, 149:150]).all()


@pytest.mark.parametrize(
    ("size", "shape", "options", "message"),
    [
        ((128, 128), (129, 129), {}, r"largest.* 128×128"),
        ((200, 300), (150, 300), {"fit": "crop"}, r"largest.* 100×200"),
        ((8, 8), (8, 8), {"mode": "big"}, "expected 'native'"),
        ((8, 8), (8, 8), {"fit": "stretch"}, "expected 'extend'"),
        ((60000, 2), (2, 2), {}, r"too large.*extended to 60000×60000"),
    ],
)
def test_what_preprocess_refuses(size, shape, options, message):
    with pytest.raises(ValueError, match=message):
        preprocess(Image.new("RGB", size), *shape, train_size=96, **options)


@pytest.mark.parametrize("size", [(60_000, 2), (2, 60_000)])
def test_thin_pictures_take_no_memory(size, monkeypatch):
    """No picture in between is larger than a few training sizes, and the middle is what comes out."""
    image = Image.new("RGB", size, "white")
    middle = (size[0] // 2 - 1, size[1] // 2 - 1)
    image.paste(RED, (*middle, middle[0] + 2, middle[1] + 2))
    areas, resize = [], Image.Image.resize
    watched = lambda self, to, *args, **kwargs: areas.append(to[0] * to[1]) or resize(self, to, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(Image.Image, "resize", watched)
    plain = train_transform(VisionDataConfig(augment="none"), (32, 32))
    pixels = np.array(plain(image))
    assert max(areas) <= 8 * 32**2 and pixels.shape == (32, 32, 3) and pixels.min() < 50


def test_a_model_reads_a_file_as_training_does(tmp_path):
    model = create_model("vision_nope_tiny_patch8").eval()
    grey = np.linspace(0, 255, 64 * 64).astype(np.uint8).reshape(64, 64)
    clear = np.dstack([np.full((64, 64, 3), 7, np.uint8), np.zeros((64, 64), np.uint8)])
    pairs = [
        (Image.fromarray(grey), Image.fromarray(grey.astype(np.uint16) * 257)),
        (Image.fromarray(clear, "RGBA"), Image.new("RGB", (64, 64), "white")),
    ]
    for pair in pairs:
        read = []
        for image in pair:
            image.save(tmp_path / "a.png")
            read.append(model.read(str(tmp_path / "a.png")))
        assert torch.equal(*read)
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.png: unknown format"):
        model.read(str(tmp_path / "text.png"))
