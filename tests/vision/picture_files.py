"""Pictures written by hand, byte by byte as their standards have it: the oracle of what is read."""

from __future__ import annotations

import struct
import zlib

import numpy as np

# TIFF 6.0: numbers of tags and their values.
NONE, DEFLATE = 1, 8
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
UNSIGNED, SIGNED, FLOAT = 1, 2, 3


def pack_bits(samples, bits, order="<"):
    """Rows (H, n) of unsigned numbers as TIFF and PNG pack them: of 8 bits or fewer, or of 10 to
    14, the highest bit first and rows filled to whole bytes; of 16 and 32 in a byte order."""
    if bits in (16, 32):
        return samples.astype(f"{order}u{bits // 8}").tobytes()
    shifts = np.arange(bits)[::-1]
    ones = (samples.astype(np.int64)[..., None] >> shifts & 1).reshape(len(samples), -1)
    return np.packbits(ones.astype(np.uint8), axis=1).tobytes()


def tiff(
    samples,
    bits,
    photometric,
    *,
    order="<",
    compression=NONE,
    sample_format=UNSIGNED,
    planar=False,
    predictor=False,
    extra=(),
    colours=None,
    tags=(),
    data=None,
):
    """A TIFF of samples (H, W, n). extra: meanings of samples beyond the colour; colours: (3, N),
    16 bits; tags: further (tag, type, values). data: the strip, other than by `samples`."""
    height, width, count = samples.shape
    stored = samples.astype(np.int64)
    if predictor:
        stored[:, 1:] -= samples[:, :-1].astype(np.int64)
        stored &= 2**bits - 1
    planes = [stored.reshape(height, -1)]
    if planar:
        planes = [stored[..., channel] for channel in range(count)]
    strips = [pack_bits(plane, bits, order) for plane in planes]
    if data is not None:
        strips = [data]
    if compression == DEFLATE:
        strips = [zlib.compress(strip) for strip in strips]
    places = 8 + np.cumsum([0, *map(len, strips)])
    entries = [
        (256, 4, [width]),
        (257, 4, [height]),
        (258, 3, [bits] * count),
        (259, 3, [compression]),
        (262, 3, [photometric]),
        (273, 4, places[:-1].tolist()),
        (277, 3, [count]),
        (278, 4, [height]),
        (279, 4, list(map(len, strips))),
        (284, 3, [2 if planar else 1]),
        (317, 3, [2 if predictor else 1]),
        (339, 3, [sample_format] * count),
        *tags,
    ]
    if extra:
        entries.append((338, 3, list(extra)))
    if colours is not None:
        entries.append((320, 3, np.asarray(colours).ravel().tolist()))
    return _tiff_of(strips, sorted(entries), order)


def _tiff_of(strips, entries, order):
    """The file of strips, and of its tags behind them."""
    body = b"".join(strips)
    body += bytes(len(body) % 2)
    start = 8 + len(body)
    # Values of more than four bytes are behind the directory.
    heap = start + 2 + 12 * len(entries) + 4
    directory = struct.pack(f"{order}H", len(entries))
    behind = b""
    for tag, kind, values in entries:
        letter = {3: "H", 4: "I", 5: "I"}[kind]
        content = struct.pack(f"{order}{len(values)}{letter}", *values)
        count = len(values) // (2 if kind == 5 else 1)
        field = content.ljust(4, b"\0")
        if len(content) > 4:
            field = struct.pack(f"{order}I", heap + len(behind))
            behind += content + bytes(len(content) % 2)
        directory += struct.pack(f"{order}HHI", tag, kind, count) + field
    magic = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", start)
    return magic + body + directory + bytes(4) + behind


# PNG: kinds of colour, and their samples.
GREY, COLOUR, INDEXED, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6


def png(samples, bits, kind, *, interlaced=False, chunks=(), pixels=None):
    """A PNG of samples (H, W, n). chunks: (name, content) before the pixels; pixels: the zlib
    stream, other than by `samples`."""
    height, width, _ = samples.shape
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2)]
        passes += [(0, 1, 2, 2), (1, 0, 2, 1)]
    rows = b""
    for top, left, down, across in passes:
        part = samples[top::down, left::across]
        if part.size:
            packed = pack_bits(part.reshape(len(part), -1), bits, ">")
            size = len(packed) // len(part)
            for row in range(len(part)):
                # Each row begins with its filter, here none.
                rows += b"\0" + packed[row * size : (row + 1) * size]
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, interlaced)
    pixels = zlib.compress(rows) if pixels is None else pixels
    parts = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)


def _chunk(name, content):
    check = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)
