"""The treatment of every kind of image, the report, and images for evaluation."""

from __future__ import annotations

import io
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
from modalities.vision.images import BadImage, ImageReport, decode_image, to_rgb
from modalities.vision.transforms import eval_transform, preprocess
from tests.vision.image_files import encoded, picture, solid
from zoo import create_model

RED = (200, 30, 40)


def red(mode="RGB"):
    return Image.new("RGB", (6, 4), RED).convert(mode)


def half_transparent():
    image = Image.new("RGBA", (6, 4), (*RED, 255))
    image.paste((0, 0, 255, 0), (3, 0, 6, 4))
    return image


def huge_png():
    """The header of a 20000 × 20000 picture with hardly any data."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def wide_grey(value, **options):
    """A 16-bit PNG; its last column is `transparency`, where it has one."""
    pixels = np.full((4, 6), value, np.uint16)
    pixels[:, 5] = options.get("transparency", value)
    if not options:
        return encoded(Image.fromarray(pixels))
    plain = encoded(Image.fromarray(pixels))
    body = b"tRNS" + struct.pack(">H", options["transparency"])
    end = plain.index(b"IDAT") - 4
    return plain[:end] + struct.pack(">I", 2) + body + struct.pack(">I", zlib.crc32(body)) + plain[end:]


CONVERTED = {
    "grey": (encoded(red("L")), "grey", None),
    "1-bit": (encoded(Image.new("1", (6, 4), 1)), "grey", (255, 255, 255)),
    "palette": (encoded(red().quantize(4)), "palette", RED),
    "cmyk": (encoded(red("CMYK"), "TIFF"), "cmyk", RED),
    "cmyk jpeg": (encoded(red("CMYK"), "JPEG", quality=100), "cmyk", RED),
    "ycbcr": (encoded(red("YCbCr"), "TIFF"), "ycbcr", RED),
    "alpha": (encoded(half_transparent()), "alpha", RED),
    "grey and alpha": (encoded(half_transparent().convert("LA")), "alpha", None),
    "16-bit": (wide_grey(40000), "16-bit", (155, 155, 155)),
    "16-bit transparent": (wide_grey(40000, transparency=40000), "alpha", (255, 255, 255)),
    "16-bit beside the transparent colour": (wide_grey(40000, transparency=40001), "alpha", (155, 155, 155)),
    "32-bit integers within 16 bits": (encoded(Image.new("I", (6, 4), 40000), "TIFF"), "16-bit", (155, 155, 155)),
    "16-bit tiff": (encoded(Image.fromarray(np.full((4, 6), 65535, np.uint16)), "TIFF"), "16-bit", (255, 255, 255)),
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


def test_a_transparent_palette_is_composited_too():
    image = Image.new("P", (6, 4), 1)
    image.putpalette([255, 0, 0, *RED])
    image.paste(0, (3, 0, 6, 4))
    found, notes = decode_image(encoded(image, transparency=0))
    assert notes == ("palette", "alpha")
    assert found.getpixel((0, 0)) == RED and found.getpixel((5, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(form, orientation):
    upright = picture(5, (48, 32))
    undo = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)  # what stores the picture so that the note is true
    turn = images.TURNS.get(undo)
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100}, "WEBP": {"lossless": True}}.get(form, {})
    found, notes = decode_image(encoded(stored, form, exif=exif, **options))
    assert found.size == (48, 32)
    if form != "TIFF":  # Pillow turns a TIFF by itself when it loads it
        assert notes == (() if orientation == 1 else ("rotated",))
    assert np.abs(np.asarray(found, int) - np.asarray(upright, int)).mean() < 4
    assert to_rgb(found)[0].size == (48, 32)


def test_broken_exif_leaves_the_picture():
    data = encoded(solid(5), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode_image(data)[0].size == (12, 12)


JPEG = encoded(picture(1, (80, 80)), "JPEG", quality=95)
PNG = encoded(picture(1, (80, 80)))
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


@pytest.mark.parametrize(("mode", "transparency"), [("F", 0.5), ("LAB", (0, 0, 0)), ("RGB", "none"), ("P", 3.5)])
def test_what_cannot_be_converted_is_bad(mode, transparency):
    image = Image.new(mode, (6, 4))
    image.info["transparency"] = transparency
    with pytest.raises(BadImage) as error:
        to_rgb(image)
    assert error.value.reason == "unsupported mode"


@pytest.mark.parametrize("kind", SKIPPED)
def test_bad_images_have_a_reason(kind):
    data, reason = SKIPPED[kind]
    with pytest.raises(BadImage) as error:
        decode_image(data)
    assert error.value.reason == reason


def test_an_image_between_pillows_bound_and_twice_that_is_too_large(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    with pytest.raises(BadImage, match="too large: 12×12 pixels"):
        decode_image(encoded(solid(1)))


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_decoded_or_bad_and_nothing_else(seed):
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
    assert report.skipped == {"corrupt": 9} and report.converted == {"grey": 1}
    assert report.names["corrupt"] == [f"image {n}" for n in range(5)]
    assert len(caplog.records) == 1 and "corrupt" in caplog.text and "image 0" in caplog.text
    assert str(report) == "skipped 9 × corrupt (such as image 0); converted 1 × grey (such as g)"
    report.extend([("skipped", "empty", "/a/long/way/to" * 20 + "/the-image.png")])
    assert "), 1 × empty (such as …" in str(report) and "/the-image.png); converted" in str(report)
    assert len(str(report)) < 200 and "\n" not in str(report)


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
    native, upsampled = (
        preprocess(checks, 192, 192, mode=mode, train_size=48, **NORMAL) for mode in ("native", "upsampled")
    )
    assert native.shape == upsampled.shape == (3, 192, 192) and native.dtype == torch.float32
    assert native.std() > 0.45 and upsampled.std() < 0.05
    small = preprocess(ramp(192, 192), 48, 48, train_size=48, **NORMAL)
    torch.testing.assert_close(small, preprocess(ramp(192, 192), 48, 48, mode="upsampled", train_size=48, **NORMAL))


def test_native_never_enlarges_and_names_the_largest_size():
    with pytest.raises(ValueError, match=r"largest.* 128×128"):
        preprocess(picture(1, (128, 128)), 129, 129, train_size=96)
    with pytest.raises(ValueError, match=r"largest.* 100×200"):
        preprocess(picture(1, (200, 300)), 150, 300, fit="crop", train_size=96)
    assert preprocess(picture(1, (200, 300)), 100, 200, fit="crop", train_size=96).shape == (3, 100, 200)


def test_crop_takes_the_centred_window_of_the_aspect():
    found = preprocess(ramp(100, 100), 50, 100, fit="crop", train_size=48, **NORMAL)
    assert abs(found[1].min() - 0.25) < 0.02 and abs(found[1].max() - 0.75) < 0.02  # a quarter is cut above and below
    assert found[0].min() < 0.02 and found[0].max() > 0.98


def test_extend_keeps_the_picture_and_repeats_its_edges():
    found = preprocess(ramp(100, 100), 100, 200, fit="extend", train_size=48, **NORMAL)
    torch.testing.assert_close(found[:, :, 50:150], preprocess(ramp(100, 100), 100, 100, train_size=48, **NORMAL))
    assert (found[0, :, :50] == found[0, :, 50:51]).all() and (found[0, :, 150:] == found[0, :, 149:150]).all()
    tall = preprocess(ramp(100, 100), 90, 45, fit="extend", mode="upsampled", train_size=48, **NORMAL)
    assert tall.shape == (3, 90, 45) and abs(tall[1, 0] - 0).max() < 0.02 and tall[1, -1].min() > 0.98


@pytest.mark.parametrize("size", [(60_000, 2), (2, 60_000)])
def test_thin_pictures_take_no_memory(size, monkeypatch):
    """No picture in between is larger than a few training sizes, and the middle is what comes out."""
    image = Image.new("RGB", size, "white")
    middle = (size[0] // 2 - 1, size[1] // 2 - 1)
    image.paste(RED, (*middle, middle[0] + 2, middle[1] + 2))
    areas, resize = [], Image.Image.resize

    def watched(self, to, *args, **kwargs):
        areas.append(to[0] * to[1])
        return resize(self, to, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", watched)
    plain = train_transform(VisionDataConfig(augment="none"), (32, 32))
    for pixels in (eval_transform(32, (0, 0, 0), (1, 1, 1))(image), torch.tensor(np.array(plain(image))) / 255):
        assert max(areas) <= 8 * 32**2 and pixels.numel() == 3 * 32**2
        assert pixels.min() < 0.2
    crop = preprocess(image, 2, 2, train_size=2, fit="crop", **NORMAL)
    torch.testing.assert_close(crop, (torch.tensor(RED) / 255)[:, None, None].expand(3, 2, 2))
    with pytest.raises(BadImage, match=r"too large.*extended to 60000×60000"):
        preprocess(image, 2, 2, train_size=2, fit="extend")


def test_pictures_that_are_not_thin_are_resized_as_ever():
    from torchvision.transforms import v2

    for size in ((320, 40), (40, 41), (75, 300)):
        image = picture(7, size)
        usual = v2.Compose([v2.Resize(32, v2.InterpolationMode.BICUBIC), v2.CenterCrop(32)])(image)
        found = eval_transform(32, (0, 0, 0), (1, 1, 1))(image)
        assert torch.equal((255 * found).round().to(torch.uint8), v2.functional.pil_to_tensor(usual))


def test_preprocess_refuses_unknown_ways():
    for options in ({"mode": "big"}, {"fit": "stretch"}):
        with pytest.raises(ValueError, match="expected"):
            preprocess(picture(1), 8, 8, train_size=8, **options)


def test_evaluation_takes_any_image_mode():
    transform = eval_transform(32)
    for image in (picture(1, (50, 40)), picture(1, (40, 50)).convert("L"), half_transparent()):
        tensor = transform(image)
        assert tensor.shape == (3, 32, 32) and tensor.dtype == torch.float32
    same = preprocess(picture(2, (40, 40)), 32, 32, train_size=32)
    torch.testing.assert_close(transform(picture(2, (40, 40))), same)


def test_a_file_like_image_of_a_dataset_decodes_as_bytes_do():
    data = encoded(picture(3))
    assert to_rgb(Image.open(io.BytesIO(data)))[0].tobytes() == decode_image(data)[0].tobytes()


def test_a_model_reads_a_file_as_training_does(tmp_path):
    model = create_model("vision_nope_tiny_patch8").eval()
    grey = np.linspace(0, 255, 64 * 64).astype(np.uint8).reshape(64, 64)
    clear = np.dstack([np.full((64, 64, 3), 7, np.uint8), np.zeros((64, 64), np.uint8)])
    same = {
        "eight.png": Image.fromarray(grey), "sixteen.png": Image.fromarray(grey.astype(np.uint16) * 257),
        "clear.png": Image.fromarray(clear, "RGBA"), "white.png": Image.new("RGB", (64, 64), "white"),
    }  # fmt: skip
    for name, image in same.items():
        image.save(tmp_path / name)
    read = {name: model.read(str(tmp_path / name)).inputs[0] for name in same}
    assert torch.equal(read["eight.png"], read["sixteen.png"])
    assert torch.equal(read["clear.png"], read["white.png"])
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.png: unknown format"):
        model.read(str(tmp_path / "text.png"))
