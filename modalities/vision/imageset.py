"""`ImageSet`: the map-style datasets that sources open, and what all of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from PIL import Image

from modalities.vision.images import BadImage, decode_image, to_rgb

__all__ = [
    "HELDOUT_NAMES",
    "Event",
    "ImageSet",
    "check_label",
    "decode",
    "digest_of",
    "is_heldout",
    "load_image",
]

HELDOUT_NAMES = ("heldout", "val", "validation", "test")  # what a held-out folder or split may be called
HELDOUT_FRACTION = 0.1
Event = tuple[str, str, str]  # "skipped" or "converted", reason, name


class ImageSet:
    """Images by index.

    Attributes:
        spec: the source.
        classes: by label; None where the source has no list of them.
        fingerprint: of the content.
        problems: events of listing the source.
    """

    spec: str
    classes: tuple[str, ...] | None
    fingerprint: str
    problems: Sequence[Event] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[bytes | Image.Image, int]:
        """(stored bytes or a PIL image, label). Raises BadImage."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What a report calls the image."""
        return f"{self.spec}[{index}]"


def load_image(images: ImageSet, index: int, num_classes: int | None, events: list[Event]) -> tuple[Image.Image, int]:
    """(RGB image, label); conversions are added to `events`. Raises BadImage, and what `check_label` does."""
    payload, label = images.read(index)
    if num_classes is not None:
        check_label(label, num_classes, images.name(index), listed=images.classes is not None)
    return decode(payload, images.name(index), events), label


def check_label(label: int, num_classes: int, name: str, *, listed: bool) -> None:
    """For a label outside 0…num_classes−1 ValueError where the source lists its classes, else BadImage."""
    if 0 <= label < num_classes:
        return
    if listed:
        raise ValueError(f"{name} has label {label}, outside 0…{num_classes - 1} (num_classes {num_classes})")
    raise BadImage("label out of range", f"{label} of {num_classes} classes")


def decode(payload: bytes | Image.Image, name: str, events: list[Event]) -> Image.Image:
    image, notes = decode_image(payload) if isinstance(payload, bytes) else to_rgb(payload)
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
