"""Pictures of every depth, meaning and container, against arrays that were written by hand."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from modalities.vision.errors import BadImage
from modalities.vision.images import decode_image
from tests.vision import picture_files as files
from tests.vision.image_files import encoded, picture
from tests.vision.picture_files import png, tiff

# Of full scale, by place; an odd width leaves bits over in packed rows.
RAMP = np.linspace(0, 1, 9 * 15).reshape(9, 15, 1)
HUES = np.concatenate([RAMP, RAMP[::-1], RAMP[:, ::-1]], axis=2)
ORDERS = ("<", ">")
PACKED = (files.NONE, files.DEFLATE)


def levels(shares, bits):
    return np.round(shares * (2**bits - 1)).astype(np.int64)


def shown(data):
    """What is shown at each place, of full scale; None where it is skipped."""
    try:
        return np.asarray(decode_image(data)) / 255
    except BadImage as error:
        assert error.reason == "unsupported mode"
        return None


def agrees(data, expected):
    """Whether what is shown is within two levels of 8 bits, and a half: of 16 bits Pillow drops the
    lower 8 of the colour and of its alpha."""
    picture = shown(data)
    return picture is not None and np.abs(picture - expected).max() <= 2.5 / 255


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
def test_grey_tiff(bits):
    """Right, or skipped where Pillow does not know the layout."""
    grey = levels(RAMP, bits)
    read = []
    for order, compression, white_is_zero in itertools.product(ORDERS, PACKED, (False, True)):
        photometric = files.WHITE_IS_ZERO if white_is_zero else files.BLACK_IS_ZERO
        data = tiff(grey, bits, photometric, order=order, compression=compression)
        share = grey / (2**bits - 1)
        expected = 1 - share if white_is_zero else share
        assert shown(data) is None or agrees(data, expected)
        read.append(shown(data) is not None)
    # Neither 12 bits in another order or white is zero, nor 16 bits in both.
    assert sum(read) == {12: 2, 16: 6}.get(bits, 8)


@pytest.mark.parametrize("bits", [8, 16])
def test_colour_tiff(bits):
    for order, compression, planar, alpha in itertools.product(
        ORDERS, PACKED, (False, True), (None, 0, 2)
    ):
        samples = levels(HUES, bits)
        expected = HUES
        extra = ()
        if alpha is not None:
            extra = (alpha,)
            samples = np.concatenate([samples, levels(RAMP, bits)], axis=2)
        if alpha == 2:
            expected = HUES * RAMP + 1 - RAMP
        options = {"order": order, "compression": compression, "planar": planar}
        data = tiff(samples, bits, files.RGB, extra=extra, **options)
        assert shown(data) is None or agrees(data, expected)
        assert planar or agrees(data, expected)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_palette_tiff(bits):
    rng = np.random.default_rng(bits)
    colours = rng.integers(0, 2**16, (3, 2**bits))
    numbers = rng.integers(0, 2**bits, (9, 15, 1))
    expected = np.moveaxis(colours[:, numbers[..., 0]], 0, -1) / 65535
    assert agrees(tiff(numbers, bits, files.PALETTE, colours=colours), expected)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_predicted_tiff(bits, order):
    options = {"compression": files.DEFLATE, "predictor": True, "order": order}
    assert agrees(tiff(levels(HUES, bits), bits, files.RGB, **options), HUES)


def test_cmyk_and_ycbcr_tiff():
    inks = np.concatenate([HUES, RAMP * 0.3], axis=2)
    paper = (1 - HUES) * (1 - RAMP * 0.3)
    assert agrees(tiff(levels(inks, 8), 8, files.CMYK), paper)
    luma, blue, red = np.moveaxis(levels(HUES, 8).astype(float), 2, 0)
    expected = [luma + 1.402 * (red - 128), luma + 1.772 * (blue - 128)]
    expected.insert(1, luma - 0.344136 * (blue - 128) - 0.714136 * (red - 128))
    expected = np.stack(expected, -1).clip(0, 255) / 255
    assert agrees(tiff(levels(HUES, 8), 8, files.YCBCR, tags=[(530, 3, [1, 1])]), expected)


GREYS = levels(RAMP, 8)
MISTAKEN = {
    "signed": tiff(GREYS, 8, files.BLACK_IS_ZERO, sample_format=files.SIGNED),
    "signed 16": tiff(GREYS, 16, files.BLACK_IS_ZERO, sample_format=files.SIGNED),
    "float": tiff(GREYS, 32, files.BLACK_IS_ZERO, sample_format=files.FLOAT),
    "10 bits": tiff(GREYS, 10, files.BLACK_IS_ZERO),
    "14 bits": tiff(GREYS, 14, files.BLACK_IS_ZERO),
    "32 bits": tiff(levels(RAMP, 32), 32, files.BLACK_IS_ZERO),
    "lab": tiff(levels(HUES, 8), 8, files.LAB),
    "planes of 16 bits": tiff(levels(HUES, 16), 16, files.RGB, planar=True),
    "an unexplained sample": tiff(levels(np.dstack([HUES, RAMP]), 8), 8, files.RGB),
    "planes of grey and alpha": tiff(
        np.dstack([GREYS, GREYS]), 8, 1, extra=(2,), planar=True, compression=files.DEFLATE
    ),
    "other inks": tiff(levels(np.dstack([HUES, RAMP]), 8), 8, files.CMYK, tags=[(332, 3, [2])]),
    "subsampled": tiff(levels(HUES, 8), 8, files.YCBCR),
    "Rec. 709": tiff(
        levels(HUES, 8),
        8,
        files.YCBCR,
        tags=[(529, 5, [2126, 10000, 7152, 10000, 722, 10000]), (530, 3, [1, 1])],
    ),
    "studio range": tiff(
        levels(HUES, 8),
        8,
        files.YCBCR,
        tags=[(530, 3, [1, 1]), (532, 5, [16, 1, 235, 1, 128, 1, 240, 1, 128, 1, 240, 1])],
    ),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_mistaken_tiff_is_skipped(name):
    assert shown(MISTAKEN[name]) is None


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_png(bits, interlaced):
    grey = levels(RAMP, bits)
    share = grey / (2**bits - 1)
    assert agrees(png(grey, bits, files.GREY, interlaced=interlaced), share)
    key = int(grey[4, 4, 0])
    keyed = png(
        grey,
        bits,
        files.GREY,
        interlaced=interlaced,
        chunks=[(b"tRNS", key.to_bytes(2, "big"))],
    )
    assert shown(keyed) is None if bits == 16 else agrees(keyed, np.where(grey == key, 1, share))
    if bits < 8:
        return
    alpha = levels(RAMP[:, ::-1], bits)
    cover = alpha / (2**bits - 1)
    hues = levels(HUES, bits)
    for kind, samples, colour in (
        (files.GREY_ALPHA, np.dstack([grey, alpha]), share),
        (files.COLOUR_ALPHA, np.dstack([hues, alpha]), HUES),
    ):
        data = png(samples, bits, kind, interlaced=interlaced)
        assert agrees(data, colour * cover + 1 - cover)
    assert agrees(png(hues, bits, files.COLOUR, interlaced=interlaced), HUES)


@pytest.mark.parametrize("most", [1, 3, 100, 255, 256, 1023, 4095, 65534, 65535])
def test_netpbm(most):
    kind = ">u1" if most < 256 else ">u2"
    for magic, shares in ((b"P5", RAMP), (b"P6", HUES)):
        values = np.round(shares * most).astype(int)
        head = magic + b"\n15 9\n%d\n" % most
        assert agrees(head + values.astype(kind).tobytes(), values / most)
        with pytest.raises(BadImage, match="truncated"):
            decode_image(head + values.astype(kind).tobytes()[:-1])


def test_jpeg_2000():
    """8 bits, and 16 of grey; Pillow turns white of 16-bit colour into black."""
    assert agrees(encoded(grey_of(8), "JPEG2000", irreversible=False), levels(RAMP, 8) / 255)
    assert agrees(encoded(grey_of(16), "JPEG2000", irreversible=False), RAMP)
    data = encoded(grey_of(8), "JPEG2000", no_jp2=True)
    # The depth in the size segment: a sign, and bits less one.
    place = data.index(b"\xff\x51") + 40
    for depth in (3, 6, 0x87):
        assert shown(data[:place] + bytes([depth]) + data[place + 1 :]) is None


def grey_of(bits):
    kind = np.uint8 if bits == 8 else np.uint16
    return Image.fromarray(levels(RAMP, bits)[..., 0].astype(kind))


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
JPEGS = {
    "baseline": {},
    "colours whole": {"subsampling": 0, "optimize": True},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
    "grey": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
}


def jpeg(name, image=NOISE):
    options = {"quality": 90} | JPEGS[name]
    return encoded(image.convert(options.pop("mode", "RGB")), "JPEG", **options)


@pytest.mark.parametrize("name", JPEGS)
def test_cut_jpeg_with_an_end(name):
    """An end mark behind a cut hides it from Pillow."""
    whole = jpeg(name)
    for share in (0.3, 0.5, 0.7, 0.9, 0.99):
        for end in (b"", b"\xff\xd9"):
            with pytest.raises(BadImage, match="truncated"):
                decode_image(whole[: int(share * len(whole))] + end)
    for lost in (3, 5, 9):
        with pytest.raises(BadImage, match="truncated"):
            decode_image(whole[: len(whole) - 2 - lost] + b"\xff\xd9")


@pytest.mark.parametrize("name", JPEGS)
def test_zeros_behind_a_cut(name):
    """A download that was given its whole size at the start ends in zeros."""
    whole = jpeg(name)
    half = len(whole) // 2
    for end in (b"\0\0", b"\xff\xd9"):
        with pytest.raises(BadImage, match=r"truncated|corrupt"):
            decode_image(whole[:half] + bytes(len(whole) - half - 2) + end)


def test_scans_that_are_missing():
    """A progressive JPEG that ends behind a whole scan is coarse, not good."""
    whole = jpeg("progressive")
    scans = [place for place in range(len(whole)) if whole[place : place + 2] == b"\xff\xda"]
    for scan in scans[1:]:
        with pytest.raises(BadImage, match="truncated"):
            decode_image(whole[:scan] + b"\xff\xd9")


@pytest.mark.parametrize("name", JPEGS)
def test_whole_jpegs_are_read(name):
    """Small ones, blank ones, and ones with something else in and behind them."""
    for size in ((1, 1), (8, 8), (17, 9), (33, 40)):
        for image in (NOISE.resize(size), Image.new("RGB", size, "white"), picture(1, size)):
            assert decode_image(jpeg(name, image)).size == size
    data = encoded(NOISE, "JPEG", comment=b"\xff\xd9\xff\xd8" * 9, icc_profile=bytes(70_000))
    assert decode_image(data + b"trailer\xff\xd8").size == (64, 64)
    several = io.BytesIO()
    NOISE.save(several, "MPO", save_all=True, append_images=[NOISE])
    assert decode_image(several.getvalue()).size == (64, 64)


def test_deep_jpeg_is_skipped():
    data = jpeg("baseline")
    place = data.index(b"\xff\xc0") + 4
    assert shown(data[:place] + bytes([12]) + data[place + 1 :]) is None


def test_arithmetic_jpeg_is_skipped():
    """What is missing of it cannot be told."""
    data = jpeg("baseline")
    start = data.index(b"\xff\xc0")
    with pytest.raises(BadImage):
        decode_image(data[:start] + b"\xff\xc9" + data[start + 2 :])


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG2000", "AVIF", "PPM"])
def test_cut_files(form):
    whole = encoded(NOISE, form)
    for share in (0.3, 0.6, 0.95):
        with pytest.raises(BadImage) as error:
            decode_image(whole[: int(share * len(whole))])
        assert error.value.reason == "truncated"


def test_short_strip_of_tiff():
    """A strip that its own count says to be short is not filled with what follows it."""
    samples = levels(HUES, 8)
    strip = files.pack_bits(samples.reshape(9, -1), 8)
    with pytest.raises(BadImage, match="truncated"):
        decode_image(tiff(samples, 8, files.RGB, data=strip[:-1]))


def test_cut_jpeg_in_tiff():
    data = bytearray(encoded(NOISE, "TIFF", compression="jpeg"))
    with Image.open(io.BytesIO(data)) as image:
        [start] = image.tag_v2[273]
        [size] = image.tag_v2[279]
    decode_image(bytes(data))
    middle = start + size // 2
    data[middle : start + size - 2] = bytes(start + size - 2 - middle)
    with pytest.raises(BadImage, match=r"truncated|corrupt"):
        decode_image(bytes(data))


def test_wrong_checksum_of_png():
    data = bytearray(encoded(NOISE, "PNG"))
    data[len(data) // 2] ^= 1
    with pytest.raises(BadImage, match="corrupt"):
        decode_image(bytes(data))
