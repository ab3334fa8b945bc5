"""What Pillow does not check of a picture's file: missing data, depths and meanings."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageFile, JpegImagePlugin, TiffImagePlugin

from modalities.vision.errors import BadImage
from modalities.vision.jpeg import check_jpeg
from modalities.vision.tiff import check_tiff, is_inverted, tiff_bits

# Those of the extensions that sources read.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
_PNG = b"\x89PNG\r\n\x1a\n"
_TIFF = (b"II*\0", b"MM\0*")
# What Pillow says of a TIFF's depth or colour that it does not know; the latter of planes of more
# samples than its mode has letters.
_UNKNOWN_TIFF = ("unknown pixel mode", "string index out of range")
# Start of a JPEG 2000 codestream and its size segment.
_SIZE_SEGMENT = b"\xff\x4f\xff\x51"


def check_meaning(image: Image.Image, data: bytes) -> None:
    """Raises BadImage for an opened picture whose pixels Pillow would take for others."""
    if image.format == "TIFF":
        check_tiff(image, data)
    if image.format == "JPEG2000":
        _check_jpeg2000(image, data)


def check_whole(image: Image.Image, data: bytes) -> None:
    """Raises BadImage for a loaded picture with missing or damaged data."""
    if image.format in ("JPEG", "MPO"):
        check_jpeg(data, image)
    if image.format == "PNG":
        _check_sums(data)


def white_level(image: Image.Image, data: bytes) -> int:
    """The value of white in a picture with grey of more than 8 bits, as Pillow has it; negative
    where white is 0 and black its absolute value."""
    if not image.mode.startswith("I;16"):
        return 65535
    if image.format == "TIFF":
        full = 2 ** tiff_bits(image) - 1
        return -full if is_inverted(image) else full
    if image.format == "JPEG2000":
        bits, _, _ = _components(data)[0]
        # Pillow shifts them to the left.
        return (2**bits - 1) << (16 - bits)
    return 65535


def eight_bits(image: Image.Image, white: int = 65535) -> Image.Image:
    """Grey of more bits in 8. white: `white_level`. Raises BadImage for values above it."""
    values = np.asarray(image).astype(np.int64)
    least = values.min()
    most = values.max()
    if least < 0 or most > abs(white):
        raise BadImage("unsupported mode", f"{image.mode} with values {least}…{most}")
    grey = (values * 255 // abs(white)).astype(np.uint8)
    return Image.fromarray(255 - grey if white < 0 else grey)


def unreadable(data: bytes, error: Exception) -> BadImage:
    """Why Pillow cannot open or decode a file."""
    problem = _problem(data)
    text = problem or str(error)
    words = ("truncated", "not enough image data")
    if isinstance(error, EOFError) or any(word in text for word in words) or _is_cut(data):
        return BadImage("truncated", f"{type(error).__name__}: {text}")
    if text in _UNKNOWN_TIFF:
        return BadImage("unsupported mode", "TIFF of a depth or colour that Pillow does not know")
    if "nsupported" in text or "cannot handle" in text:
        return BadImage("unsupported mode", text)
    if "cannot identify" in text:
        return BadImage("unknown format", f"begins with {data[:8]!r}")
    return BadImage("corrupt", f"{type(error).__name__}: {text}")


def _problem(data: bytes) -> str:
    """What Pillow says of a JPEG or TIFF that it cannot open, for which `Image.open` only says that
    it cannot; else ""."""
    kinds: dict[bytes, type[ImageFile.ImageFile]] = dict.fromkeys(
        _TIFF, TiffImagePlugin.TiffImageFile
    )
    kinds[b"\xff\xd8\xff"] = JpegImagePlugin.JpegImageFile
    for signature, kind in kinds.items():
        if data.startswith(signature):
            try:
                kind(io.BytesIO(data))
            # As in `decode_image`.
            except Exception as error:
                return str(error)
    return ""


def _is_cut(data: bytes) -> bool:
    """Whether a file is shorter than its container says."""
    if data.startswith(b"RIFF") and len(data) >= 8:
        return struct.unpack_from("<I", data, 4)[0] + 8 > len(data)
    if data[4:8] in (b"ftyp", b"jP  "):
        return any(end > len(data) for _, end in _boxes(data))
    if data.startswith(_TIFF) and len(data) >= 8:
        order = "<" if data.startswith(b"II") else ">"
        (directory,) = struct.unpack_from(f"{order}I", data, 4)
        if directory + 2 > len(data):
            return True
        (entries,) = struct.unpack_from(f"{order}H", data, directory)
        return directory + 2 + 12 * entries > len(data)
    if data.startswith(_SIZE_SEGMENT):
        return not data.endswith(b"\xff\xd9")
    return False


def _boxes(data: bytes) -> Iterator[tuple[int, int]]:
    """(start, end) of the outermost boxes of a JP2 or AVIF file (ISO 14496-12)."""
    start = 0
    while start + 8 <= len(data):
        (size,) = struct.unpack_from(">I", data, start)
        if size == 1 and start + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, start + 8)
        elif size == 0:
            # To the end of the file.
            size = len(data) - start
        yield start, start + size
        start += max(size, 8)


def _check_sums(data: bytes) -> None:
    """Raises BadImage where the checksum of a PNG's chunk with pixels or colours differs."""
    start = len(_PNG)
    while start + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, start)
        name = data[start + 4 : start + 8]
        end = start + 8 + size
        if end + 4 > len(data) or name == b"IEND":
            return
        (stated,) = struct.unpack_from(">I", data, end)
        # Chunks with a capital are those without which there is no picture.
        needed = name[:1].isupper() or name == b"tRNS"
        if needed and zlib.crc32(memoryview(data)[start + 4 : end]) != stated:
            raise BadImage("corrupt", f"the checksum of the chunk {name.decode('latin-1')} differs")
        start = end + 4


def _components(data: bytes) -> list[tuple[int, bool, tuple[int, int]]]:
    """(bits, whether signed, steps across and down) of the components of a JPEG 2000."""
    start = data.find(_SIZE_SEGMENT)
    components = []
    (count,) = struct.unpack_from(">H", data, start + 40)
    for number in range(count):
        depth, across, down = struct.unpack_from("3B", data, start + 42 + 3 * number)
        components.append(((depth & 127) + 1, depth > 127, (across, down)))
    return components


def _check_jpeg2000(image: Image.Image, data: bytes) -> None:
    """Raises BadImage for all but 8 bits, or 9 to 16 of grey, unsigned, of one resolution: Pillow
    scales other depths wrongly."""
    components = _components(data)
    bits, is_signed, steps = components[0]
    alike = all(component == components[0] for component in components)
    depth_read = bits == 8 or (8 < bits <= 16 and image.mode == "I;16")
    if is_signed or not alike or not depth_read or steps != (1, 1):
        listed = ", ".join(
            f"{bits} bits at {across}×{down}" for bits, _, (across, down) in components
        )
        sign = "signed" if is_signed else "unsigned"
        raise BadImage("unsupported mode", f"JPEG 2000 with {sign} components of {listed}")
