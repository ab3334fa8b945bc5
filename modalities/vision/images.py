"""From stored bytes to an RGB image, and sets of images. What is done with every kind of image, and how it is counted:

    stored as                                   treatment                                          counted as
    8-bit RGB                                   taken as it is                                     –
    grey, 1-bit                                 grey in all three channels                         converted: grey
    palette                                     its colours                                        converted: palette
    alpha, transparent colour                   composited on white                                converted: alpha
    CMYK, YCbCr, HSV                            converted by Pillow, without colour profiles       converted: cmyk, ycbcr, hsv
    16-bit grey (also in 32-bit integers)       divided by 257 to 8 bits                           converted: 16-bit
    EXIF orientation                            applied: the picture stands upright                converted: rotated
    broken EXIF                                 taken as upright                                   –
    several frames                              the first one                                      –
    no bytes                                    skipped                                            skipped: empty
    no image format that Pillow knows           skipped                                            skipped: unknown format
    ends too early                              skipped, never filled up with grey                 skipped: truncated
    broken otherwise                            skipped                                            skipped: corrupt
    float, LAB, integers beyond 16 bits         skipped: they have no defined range                skipped: unsupported mode
    what Pillow cannot convert                  skipped                                            skipped: unsupported mode
    more than MAX_PIXELS pixels                 skipped before a pixel is decoded                  skipped: too large

What the sources add:

    a file without an image's extension         folder: not listed                                 skipped: unknown extension
    a tar sample without an image member        skipped                                            skipped: no image
    a tar sample without a label, or an unreadable one   skipped                                   skipped: no label, bad label
    objects that are none, or cannot be right            skipped                                   skipped: no objects,
                                                                                                   bad objects, bad mask
    objects of an image that its EXIF turns              skipped: in which of the two is not known skipped: rotated objects
    objects of which a window cannot be made             skipped                                   skipped: too small,
                                                                                                   spread, not one marked
    a label outside 0…num_classes−1             list of classes known (folder, index.json, hf ClassLabel): ValueError;
                                                otherwise skipped                                  skipped: label out of range
                                                taken as it is where num_classes is not known either (evaluation
                                                of a spec string); −1 in an hf ClassLabel is none  skipped: no label
    a class folder without images               the class keeps its number                         skipped: empty class
    a tar without its end mark, with a damaged header or a sparse member, or with another number
    of samples than its index says                                                                 ValueError

The place of a skipped image is taken by the next good one of the order; in held-out passes it then has target −1. A set of
which nothing is left is a ValueError. Read by index (`HeldoutImages`), a bad image raises BadImage, a ValueError.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError

if TYPE_CHECKING:
    from modalities.vision.objects import Objects

__all__ = [
    "EXTENSIONS",
    "HELDOUT_NAMES",
    "MAX_PIXELS",
    "BadImage",
    "Event",
    "ImageReport",
    "ImageSet",
    "checked_image",
    "decode_image",
    "digest_of",
    "is_heldout",
    "load_image",
    "orientation",
    "picture_of",
    "to_rgb",
]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")
MAX_PIXELS = 89_478_485  # a quarter of a GiB in RGB: Pillow's own bound
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HELDOUT_NAMES = ("heldout", "val", "validation", "test")  # what a held-out folder or split may be called
HELDOUT_FRACTION = 0.1
Event = tuple[str, str, str]  # "skipped" or "converted", reason, name
_log = logging.getLogger(__name__)


class BadImage(ValueError):
    """An image that is skipped: `reason` as in the module's table, `detail` for people."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class ImageReport:
    """What was skipped and converted: counts by reason, with the first few names of each.

    A training loader counts an image in every epoch. The first of every reason is logged: skipped as a warning,
    converted as information.
    """

    NAMES = 5
    SHOWN = 60  # characters of a name in the table

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.converted: Counter[str] = Counter()
        self.names: dict[str, list[str]] = {}

    def add(self, kind: str, reason: str, name: str) -> None:
        """Count one event; kind is "skipped" or "converted"."""
        counts = self.skipped if kind == "skipped" else self.converted
        counts[reason] += 1
        names = self.names.setdefault(reason, [])
        if len(names) < self.NAMES and name not in names:
            names.append(name)
        if counts[reason] == 1:
            level = logging.WARNING if kind == "skipped" else logging.INFO
            _log.log(level, "image %s (%s): %s; more of these are only counted", kind, reason, name)

    def extend(self, events: Iterable[Event]) -> None:
        """Add events (kind, reason, name), as workers hand them over."""
        for event in events:
            self.add(*event)

    def __str__(self) -> str:
        """One line: "skipped 9 × corrupt (such as NAME), 1 × empty (such as NAME); converted 4 × grey (such as NAME)"."""
        if not self.names:
            return "every image was taken as it is"
        kinds = [("skipped", self.skipped), ("converted", self.converted)]
        return "; ".join(
            f"{kind} {', '.join(map(self._line, counts.most_common()))}" for kind, counts in kinds if counts
        )

    def _line(self, counted: tuple[str, int]) -> str:
        (reason, count), name = counted, self.names[counted[0]][0]
        return f"{count} × {reason} (such as {name if len(name) <= self.SHOWN else '…' + name[1 - self.SHOWN :]})"


def decode_image(data: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    """(RGB image, what was converted). Raises BadImage, with a reason of the module's table."""
    if not data:
        raise BadImage("empty")
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise BadImage("too large", f"{image.width}×{image.height} pixels")
        image.load()
        return to_rgb(image)
    except (BadImage, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImage("unknown format", f"begins with {data[:8]!r}") from None
    except Image.DecompressionBombError as error:
        raise BadImage("too large", str(error)) from None
    except Exception as error:  # a broken file can make Pillow's readers raise nearly anything
        early = isinstance(error, EOFError) or "truncated" in str(error)
        raise BadImage("truncated" if early else "corrupt", f"{type(error).__name__}: {error}") from None


def to_rgb(image: Image.Image) -> tuple[Image.Image, tuple[str, ...]]:
    """(upright 8-bit RGB image, what was converted). Raises BadImage for a mode without a defined range, and for what
    Pillow cannot convert."""
    notes: list[str] = []
    turn = _UPRIGHT.get(orientation(image))
    if turn is not None:
        transparency = image.info.get("transparency")
        image = image.transpose(turn)
        image.info = {} if transparency is None else {"transparency": transparency}  # upright now: never turned again
        notes.append("rotated")
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image, tuple(notes)
    if mode.startswith("I"):
        notes.append("16-bit")
        image = _eight_bits(image)  # with alpha where it had a transparent colour
    try:
        return _eight_bit_rgb(image, notes), tuple(notes)
    except (ValueError, TypeError, OSError) as error:
        raise error if isinstance(error, BadImage) else BadImage("unsupported mode", f"{mode}: {error}") from error


def _eight_bit_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    """An image of an 8-bit mode in RGB; what was converted is added to notes."""
    mode = image.mode
    if mode == "P":
        notes.append("palette")
    keyed = (
        mode in ("RGB", "L", "1", "P") and "transparency" in image.info
    )  # what PNG and GIF have; Pillow tries others
    if keyed or mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        notes.append("alpha")
        image = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if mode not in ("L", "1", "P", "CMYK", "YCbCr", "HSV"):
        raise BadImage("unsupported mode", mode)
    if "16-bit" not in notes:
        notes += {"L": ["grey"], "1": ["grey"], "P": []}.get(mode, [mode.lower()])
    return image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) where there is none or the EXIF data is broken."""
    if "exif" not in image.info and image.format == "JPEG":
        return 1
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # Pillow's EXIF reader raises many things; a broken note does not make the picture bad
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits in 8; a transparent colour is looked for before, and becomes alpha."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImage("unsupported mode", f"{image.mode} with values {values.min()}…{values.max()}")
    grey = Image.fromarray((values // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))))


# ------------------------------------------------------------------------------------------------ sets of images


class ImageSet:
    """Images by index.

    Attributes:
        spec: the source.
        classes: by label; None where the source has no list of them.
        fingerprint: of the content.
        problems: events of listing the source.
        among: images that these were chosen from by name, as the held-out tenth; 0 where they are all there are.
    """

    spec: str
    classes: tuple[str, ...] | None
    fingerprint: str
    problems: Sequence[Event] = ()
    among: int = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[bytes | Image.Image, int]:
        """(stored bytes or a PIL image, label). Raises BadImage."""
        raise NotImplementedError

    def read_objects(self, index: int) -> tuple[bytes | Image.Image, Objects]:
        """(stored bytes or a PIL image, its objects). Raises BadImage; ValueError for a source that has none."""
        raise ValueError(
            f"source {self.spec!r} has no boxes and no masks; those that may are wds:…, hf:… and folder:… with metadata.jsonl"
        )

    def group(self, index: int) -> str:
        """What the image shares with others that a measurement should not count as independent, such as a font; ""."""
        return ""

    def name(self, index: int) -> str:
        """What a report calls the image."""
        return f"{self.spec}[{index}]"


def load_image(images: ImageSet, index: int, num_classes: int | None, events: list[Event]) -> tuple[Image.Image, int]:
    """(RGB image, label) of a set, as `checked_image`."""
    payload, label = images.read(index)
    return checked_image(payload, label, num_classes, images.name(index), images.classes is not None, events)


def checked_image(
    payload: bytes | Image.Image, label: int, num_classes: int | None, name: str, listed: bool, events: list[Event]
) -> tuple[Image.Image, int]:
    """(RGB image, label); conversions are added to `events`. Raises BadImage.

    A label outside 0…num_classes−1 is a ValueError where the source lists its classes (`listed`), else a BadImage.
    """
    if num_classes is not None and not 0 <= label < num_classes:
        if listed:
            raise ValueError(f"{name} has label {label}, outside 0…{num_classes - 1} (num_classes {num_classes})")
        raise BadImage("label out of range", f"{label} of {num_classes} classes")
    image, notes = decode_image(payload) if isinstance(payload, bytes) else to_rgb(payload)
    events += [("converted", note, name) for note in notes]
    return image, label


def picture_of(payload: bytes | Image.Image, name: str, events: list[Event]) -> Image.Image:
    """The RGB image of a picture with objects, whose places are those of stored pixels; conversions are added to `events`.

    Raises BadImage, also where the image's EXIF would turn it.
    """
    image, notes = decode_image(payload) if isinstance(payload, bytes) else to_rgb(payload)
    if "rotated" in notes:
        raise BadImage(
            "rotated objects", "its EXIF turns the picture; whether its boxes are of the turned one is not known"
        )
    events += [("converted", note, name) for note in notes]
    return image


def is_heldout(name: str) -> bool:
    """Whether an image of a source without a held-out part is held out: blake2b of its name, as a number in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=b"priorzoo images").digest()
    return int.from_bytes(digest, "big") < HELDOUT_FRACTION * 2**64


def digest_of(parts: Iterable[object]) -> str:
    """32 hex digits of BLAKE2b over the repr of every part."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
