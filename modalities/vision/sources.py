"""Where images come from: a spec string in, images by number (ImageSet) or shards (ShardSet) out.

    "glyphs" | "photos"             shards that `python tools/fetch_data.py vision NAME` puts into the data folder
    "glyphs-builtin"                capital letters drawn from the fonts that ship with matplotlib; nothing to fetch
    "folder:PATH"                   torchvision's ImageFolder layout: PATH/train/CLASS/… and PATH/val/CLASS/… (or heldout,
                                    validation, test), or PATH/CLASS/… alone
    "wds:PATTERN"                   WebDataset shards, local or remote, "wds:a/train-{0000..1023}.tar", or a folder with
                                    index.json; "…tar?index=PATH" names an index that lies elsewhere
    "hf:NAME[:CONFIG][:SPLIT]"      a Hugging Face dataset by name or local path, image and label columns found by type;
                                    "…?image=COLUMN&label=COLUMN" names them; SPLIT may be a slice, "train[:80%]"

A folder or dataset without a held-out part of its own holds out a tenth, by a hash of each image's name (its row number
in a dataset), unless `heldout_source` is set; shards hold out nothing. The data folder is $PRIORZOO_DATA, or ./data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import find_classes

from modalities.vision.glyphs import BuiltinGlyphs
from modalities.vision.images import EXTENSIONS, BadImage
from modalities.vision.shards import (
    PackedStrings,
    ShardSet,
    TarImages,
    data_folder,
    open_shards,
    read_label,
    sample_image,
)
from zoo.naming import did_you_mean

__all__ = ["FETCHED", "ImageSet", "check_label", "data_folder", "is_held_out", "open_images", "open_shard_source"]

FETCHED = ("glyphs", "photos")
HELDOUT_FRACTION = 0.1
HELDOUT_NAMES = ("heldout", "val", "validation", "test")  # what a held-out folder or split may be called
KEPT_BYTES = 256 * 2**20  # of drawn letters
_FORMS = (*FETCHED, "glyphs-builtin", "folder:PATH", "wds:PATTERN", "hf:NAME")


class ImageSet:
    """Images by number. `classes` is None where no list of classes is known; `problems` were met while listing."""

    spec: str
    classes: tuple[str, ...] | None
    fingerprint: str
    problems: Sequence[tuple[str, str, str]] = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> tuple[bytes | Image.Image, int]:
        """(stored bytes or a PIL image, label). Errors: BadImage."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """What a report calls the image."""
        return f"{self.spec}[{index}]"


def check_label(label: int, num_classes: int, name: str, *, known: bool) -> None:
    """A label outside 0…num_classes−1 is a ValueError where the classes are known, else a BadImage."""
    if 0 <= label < num_classes:
        return
    if known:
        raise ValueError(f"{name} has label {label}, outside 0…{num_classes - 1} (num_classes {num_classes})")
    raise BadImage("label out of range", f"{label} of {num_classes} classes")


def is_held_out(name: str) -> bool:
    """Whether an image of a source without a held-out part is held out: blake2b of its name, as a number in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, key=b"priorzoo images").digest()
    return int.from_bytes(digest, "big") < HELDOUT_FRACTION * 2**64


def fingerprint_of(parts: Iterable[object]) -> str:
    """16 bytes in hex that change when any of the parts does."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def open_shard_source(spec: str, split: str) -> ShardSet | None:
    """The shards of a spec's split, or None where the spec is no shard source. split: "train", "heldout" or "all".

    Errors: FileNotFoundError where files are missing, naming the command that fetches them if there is one.
    """
    if spec in FETCHED:
        folder = data_folder() / "vision" / spec / ("heldout" if split == "all" else split)
        if not (folder / "index.json").is_file():
            instead = "; 'glyphs-builtin' needs nothing fetched" if spec == "glyphs" else ""
            raise FileNotFoundError(
                f"source {spec!r}: no {folder / 'index.json'}; "
                f"`python tools/fetch_data.py vision {spec}` makes it{instead}"
            )
        return open_shards(spec, str(folder))
    if spec.startswith("wds:"):
        if split == "heldout":
            raise ValueError(f"source {spec!r} has no held-out split of its own: set heldout_source to its shards")
        return open_shards(spec, spec[len("wds:") :])
    return None


def open_images(
    spec: str, split: str, *, hold_out: bool = True, size: int = 128, classes: Sequence[str] | None = None
) -> ImageSet:
    """The images of a spec's split, by number.

    split: "train"; "heldout"; "all", for a source that is a held-out set as a whole (its held-out part if it has one).
    hold_out=False trains on everything that is not a held-out part of its own. size: what "glyphs-builtin" draws.
    classes: names in the order of their labels, for a "folder:" that lists them otherwise or not completely.

    Errors: ValueError for an unknown spec, naming the nearest valid one; those of the kinds of sources.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"source must be a non-empty string such as 'glyphs-builtin', got {spec!r}")
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"split {split!r} is none of 'train', 'heldout', 'all'")
    shards = open_shard_source(spec, split)
    if shards is not None:
        return ShardImages(shards)
    if spec == "glyphs-builtin":
        return BuiltinImages(spec, "train" if split == "train" else "heldout", size)
    if spec.startswith("folder:"):
        return FolderImages(spec, split, hold_out=hold_out, classes=classes)
    if spec.startswith("hf:"):
        from modalities.vision.hf import HFImages

        return HFImages(spec, split, hold_out=hold_out)
    hint = did_you_mean(spec, _FORMS) or (f"did you mean 'folder:{spec}'? " if os.path.isdir(spec) else "")
    raise ValueError(f"source {spec!r} is none of {', '.join(_FORMS)}; {hint}".rstrip("; "))


class ShardImages(ImageSet):
    """Local shards by number, in shard order."""

    def __init__(self, shards: ShardSet) -> None:
        self.spec, self.classes, self.fingerprint = shards.spec, shards.classes, shards.fingerprint
        self.samples = TarImages(shards)

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[bytes, int]:
        sample = self.samples[index]
        return sample_image(sample), read_label(sample)

    def name(self, index: int) -> str:
        return self.samples.name(index)


class BuiltinImages(ImageSet):
    """Letters in matplotlib's fonts, drawn when first asked for and kept: to draw one takes longer than to train on it."""

    def __init__(self, spec: str, split: str, size: int) -> None:
        self.glyphs = BuiltinGlyphs(split, size=size)
        self.kept: dict[int, tuple[Image.Image, int]] = {}
        self.room = KEPT_BYTES // (3 * size * size)
        self.spec, self.classes, self.fingerprint = spec, tuple(self.glyphs.classes), self.glyphs.fingerprint

    def __len__(self) -> int:
        return len(self.glyphs)

    def read(self, index: int) -> tuple[Image.Image, int]:
        found = self.kept.get(index) or self.glyphs[index]
        if len(self.kept) < self.room:
            self.kept[index] = found
        return found[0].copy(), found[1]


class _ListedFolder(ImageFolder):
    """ImageFolder that may be given its classes, admits empty ones, and keeps the names of files it left out."""

    def __init__(self, root: Path, classes: Sequence[str] | None) -> None:
        self.given, self.left_out = classes, []
        super().__init__(str(root), is_valid_file=self._is_image, allow_empty=True)

    def _is_image(self, path: str) -> bool:
        if path.lower().endswith(EXTENSIONS):
            return True
        self.left_out.append(path)
        return False

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        found, numbers = super().find_classes(directory)
        if self.given is None:
            return found, numbers
        for name in found:
            if name not in self.given:
                hint = did_you_mean(name, self.given)
                raise ValueError(f"{directory} has a class {name!r} that training does not have; {hint}".rstrip("; "))
        return list(self.given), {name: number for number, name in enumerate(self.given)}


class FolderImages(ImageSet):
    """A folder of class folders. Labels are the places of the class names in alphabetical order, those of PATH/train."""

    def __init__(self, spec: str, split: str, *, hold_out: bool, classes: Sequence[str] | None = None) -> None:
        path = Path(spec[len("folder:") :]).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"source {spec!r}: no folder {path}")
        train, heldout = path / "train", next((path / n for n in HELDOUT_NAMES if (path / n).is_dir()), None)
        own = train.is_dir() and any(child.is_dir() for child in train.iterdir())  # else it is a class called "train"
        if own and heldout is None and split != "train":
            raise ValueError(f"source {spec!r} has train, but none of {', '.join(HELDOUT_NAMES)}: set heldout_source")
        if own and classes is None:
            classes = find_classes(train)[0]
        root = path if not own else train if split == "train" else heldout
        listed = _ListedFolder(root, classes)
        self.spec, self.root, self.classes = spec, root, tuple(listed.classes)
        samples = listed.samples
        if not own and hold_out and split != "all":
            wanted = split == "heldout"
            samples = [sample for sample in samples if is_held_out(self._relative(sample[0])) == wanted]
        empty = sorted(set(range(len(self.classes))) - {label for _, label in listed.samples})
        self.problems = [("skipped", "unknown extension", name) for name in listed.left_out]
        self.problems += [("skipped", "empty class", str(root / self.classes[label])) for label in empty]
        if not samples:
            raise ValueError(f"source {spec!r}: no image for split {split!r} in {root}")
        sizes = split != "train"  # which files a training set holds is enough; asking for each size would take minutes
        self.fingerprint = fingerprint_of(
            (self._relative(path), label, os.path.getsize(path) if sizes else 0) for path, label in samples
        )
        self.paths = PackedStrings(path for path, _ in samples)
        self.labels = np.array([label for _, label in samples])

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self.root).replace(os.sep, "/")

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[bytes, int]:
        return Path(self.paths[index]).read_bytes(), int(self.labels[index])

    def name(self, index: int) -> str:
        return self.paths[index]
