"""Whether a JPEG has the data of all of its pixels.

libjpeg warns of missing data and goes on with zeros, and Pillow passes no warning on: a file that
is cut and ends in an end mark gives grey rows. Data is missing where what follows it is read. So
the picture is decoded again with other bytes behind each run of coded data. A decoder that has
every pixel skips them on its way to the next marker, and both pictures are equal.
"""

from __future__ import annotations

import io
import math
import random
import re
import struct
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from modalities.vision.errors import BadImage

_START = 0xD8
_END = 0xD9
_SCAN = 0xDA
_RESTART_INTERVAL = 0xDD
_RESTARTS = range(0xD0, 0xD8)
# Start of frame: all but those of tables (C4), reserved (C8) and arithmetic conditioning (CC).
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = 0xC2
_LOSSLESS = 0xC3
_ARITHMETIC = range(0xC9, 0xD0)
_MARKER = re.compile(rb"\xff+[^\x00\xff]")
# Application segments by which decoders know colours: JFIF's and Adobe's; others are left out.
_COLOUR_SEGMENTS = (0xE0, 0xEE)
_APPLICATION = range(0xE0, 0xF0)
# It begins with a one, and has no 0xFF: missing bits are read as zeros.
_FILLER = b"\xb5" + bytes(random.Random(0).choices(range(1, 255), k=127))
# Its bits inverted.
_OTHER_FILLER = bytes(255 - byte for byte in _FILLER)
# Trailing zeros of a run of coded data that no encoder writes, unless its codes are of zeros.
_ZEROS = bytes(16)


@dataclass
class _Frame:
    """kind: its marker. components: (horizontal, vertical) samples by id."""

    kind: int
    width: int
    height: int
    components: dict[int, tuple[int, int]]


@dataclass
class _Scan:
    """components: ids. band: first and last coefficient. low: bits of them that are still to
    come. interval: units between restarts. ends: where its runs of coded data end."""

    components: list[int]
    band: range
    low: int
    interval: int
    ends: list[int] = field(default_factory=list)


@dataclass
class _Layout:
    """The parts of a file. segments: (start, end) of those that decoding needs."""

    frame: _Frame
    scans: list[_Scan]
    segments: list[tuple[int, int]]


def check_jpeg(data: bytes, picture: Image.Image) -> None:
    """Raises BadImage for a JPEG, decoded as `picture`, that lacks coded data or has data that no
    pixel needs behind it; for arithmetic coding, in which what is missing cannot be told."""
    layout = _read_layout(data)
    _check_coverage(layout)
    for scan in layout.scans:
        _check_restarts(layout.frame, scan)
    if not _same_picture(picture, _filled(data, layout, _FILLER)):
        raise BadImage("truncated", "coded data of a JPEG is missing")
    if _ends_in_zeros(data, layout) and _is_textured(picture, layout):
        cut = len(_ZEROS) // 2
        others = (_filled(data, layout, filler, cut) for filler in (_FILLER, _OTHER_FILLER))
        if all(_same_picture(picture, other) for other in others):
            raise BadImage("corrupt", "zeros in the place of coded data of a JPEG")


def _ends_in_zeros(data: bytes, layout: _Layout) -> bool:
    return any(data.endswith(_ZEROS, 0, end) for scan in layout.scans for end in scan.ends)


def _is_textured(picture: Image.Image, layout: _Layout) -> bool:
    """Whether codes of other bits would be seen: a picture of one colour may have a single code."""
    extremes = np.asarray(picture.getextrema()).reshape(-1, 2)
    return layout.frame.kind != _LOSSLESS and bool((extremes[:, 0] < extremes[:, 1]).any())


def _same_picture(picture: Image.Image, data: bytes) -> bool:
    try:
        other = Image.open(io.BytesIO(data), formats=["JPEG"])
        other.load()
    # As in `decode_image`.
    except Exception:
        return False
    return other.mode == picture.mode and other.tobytes() == picture.tobytes()


def _filled(data: bytes, layout: _Layout, filler: bytes, less: int = 0) -> bytes:
    """The file with a filler behind each run of coded data, whose last `less` bytes are left
    out."""
    parts = [b"\xff\xd8"]
    ends = [end for scan in layout.scans for end in scan.ends]
    for start, stop in layout.segments:
        position = start
        for end in ends:
            if start < end <= stop:
                parts += [data[position : max(position, end - less)], filler]
                position = end
        parts.append(data[position:stop])
    return b"".join([*parts, b"\xff\xd9"])


def _read_layout(data: bytes) -> _Layout:
    """Raises BadImage for a file without an end mark, or one that is no sequence of segments."""
    frame: _Frame | None = None
    scans: list[_Scan] = []
    segments: list[tuple[int, int]] = []
    interval = 0
    position = 2
    while True:
        match = _MARKER.match(data, position)
        if match is None:
            # Bytes between segments are skipped, as libjpeg does.
            match = _MARKER.search(data, position)
        if match is None:
            raise BadImage("truncated", "a JPEG without an end mark")
        start = match.end() - 2
        marker = data[start + 1]
        position = match.end()
        if marker == _END:
            break
        if marker in _RESTARTS or marker in (0x01, _START):
            continue
        content, position = _segment(data, position)
        if marker in _FRAMES:
            frame = _read_frame(marker, content)
        elif marker == _RESTART_INTERVAL:
            interval = int.from_bytes(content[:2], "big")
        elif marker == _SCAN:
            scans.append(_read_scan(content, interval))
            position = _coded_end(data, position, scans[-1])
        if marker not in _APPLICATION or marker in _COLOUR_SEGMENTS:
            segments.append((start, position))
    if frame is None or not scans:
        raise BadImage("truncated", "a JPEG without a frame or a scan")
    return _Layout(frame, scans, segments)


def _segment(data: bytes, position: int) -> tuple[bytes, int]:
    """The content of a segment whose length is at a position, and its end."""
    length = int.from_bytes(data[position : position + 2], "big")
    if length < 2 or position + length > len(data):
        raise BadImage("truncated", "a segment of a JPEG is cut short")
    return data[position + 2 : position + length], position + length


def _read_frame(marker: int, content: bytes) -> _Frame:
    if marker in _ARITHMETIC:
        raise BadImage("unsupported mode", "JPEG with arithmetic coding")
    try:
        _, height, width, count = struct.unpack_from(">BHHB", content)
        components = {}
        for number in range(count):
            identity, sampling, _ = content[6 + 3 * number : 9 + 3 * number]
            components[identity] = (max(1, sampling >> 4), max(1, sampling & 15))
    except (struct.error, ValueError):
        raise BadImage("corrupt", "the frame of a JPEG is cut short") from None
    return _Frame(marker, width, height, components)


def _read_scan(content: bytes, interval: int) -> _Scan:
    if not content or len(content) < 4 + 2 * content[0]:
        raise BadImage("corrupt", "the head of a JPEG's scan is cut short")
    count = content[0]
    first, last, bits = content[1 + 2 * count : 4 + 2 * count]
    ids = list(content[1 : 1 + 2 * count : 2])
    return _Scan(ids, range(first, last + 1), bits & 15, interval)


def _coded_end(data: bytes, position: int, scan: _Scan) -> int:
    """Add the ends of a scan's runs of coded data; the last one is where the scan ends."""
    for match in _MARKER.finditer(data, position):
        scan.ends.append(match.start())
        if data[match.end() - 1] not in _RESTARTS:
            return match.start()
    raise BadImage("truncated", "a JPEG without an end mark")


def _check_coverage(layout: _Layout) -> None:
    """Raises BadImage where scans leave out a component, or bits of a progressive one."""
    low: dict[tuple[int, int], int] = {}
    for scan in layout.scans:
        for component in scan.components:
            for coefficient in scan.band:
                low[component, coefficient] = scan.low
    coefficients = range(64) if layout.frame.kind == _PROGRESSIVE else range(0)
    for component in layout.frame.components:
        seen = any(component in scan.components for scan in layout.scans)
        if not seen or any(low.get((component, c), 1) for c in coefficients):
            raise BadImage("truncated", "scans of a JPEG are missing")


def _check_restarts(frame: _Frame, scan: _Scan) -> None:
    """Raises BadImage where restarts, and so the runs between them, are missing."""
    side = 1 if frame.kind == _LOSSLESS else 8
    widest = max(h for h, _ in frame.components.values())
    tallest = max(v for _, v in frame.components.values())
    across = float(widest * side)
    down = float(tallest * side)
    if len(scan.components) == 1:
        # Its units are blocks of the component alone.
        horizontal, vertical = frame.components.get(scan.components[0], (1, 1))
        across = side * widest / horizontal
        down = side * tallest / vertical
    units = math.ceil(frame.width / across) * math.ceil(frame.height / down)
    runs = math.ceil(units / scan.interval) if scan.interval else 1
    # An encoder may write a restart behind the last run too.
    if units and len(scan.ends) not in (runs, runs + 1):
        reason = "truncated" if len(scan.ends) < runs else "corrupt"
        raise BadImage(reason, f"{len(scan.ends)} runs of coded data in a JPEG, not {runs}")
