"""Where images come from: a spec string in, a map-style `ImageSet` or a `ShardSet` out.

    "glyphs" | "photos" | "solar"   shards that `python recipes/fetch_data.py vision NAME` puts into the data folder
    "scenes" | "scenes-count"       the same, of pictures with boxes (`vision scenes`)
    "glyphs-builtin"                the capitals of 19 fonts in small scenes, and of 4 others held out; ships with the package
    "folder:PATH"                   torchvision's ImageFolder layout: PATH/train/CLASS/… and PATH/val/CLASS/… (or heldout,
                                    validation, test), or PATH/CLASS/… alone
    "wds:PATTERN"                   WebDataset shards, local or remote, "wds:a/train-{0000..1023}.tar", or a folder with
                                    index.json; "…tar?index=PATH" names an index elsewhere
    "hf:NAME[:CONFIG][:SPLIT]"      a Hugging Face dataset by name or local path, image and label columns found by type;
                                    "…?image=COLUMN&label=COLUMN" names them; SPLIT may be a slice, "train[:80%]"

Boxes and masks (objects.py) come from the KEY.json and KEY.mask.png of shards, from the column "objects" of a dataset, or
one that "…?objects=COLUMN&mask=COLUMN" names, and from the metadata.jsonl of a folder, PATH/train/metadata.jsonl or
PATH/metadata.jsonl, a line a picture: {"file_name", "objects", "mask_file_name"}.

A folder or dataset without a held-out part of its own holds out a tenth, by a hash of each image's name (its row number in
a dataset), unless `heldout_source` is set; "…?split=heldout" behind it holds out all of it, and trains on none. Shards hold
out nothing. The data folder is `modalities.files.data_folder`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

from modalities.files import data_folder, fetch_command
from modalities.vision.hf import HFImages
from modalities.vision.images import EXTENSIONS, HELDOUT_NAMES, BadImage, Event, ImageSet, digest_of, heldout_places
from modalities.vision.objects import Objects, parse_objects
from modalities.vision.shards import ShardSet, TarImages, open_shards, packed
from zoo.inputs import parse_json
from zoo.naming import did_you_mean

FETCHED = ("glyphs", "photos", "solar", "scenes", "scenes-count")
BUILTIN = Path(__file__).with_name("assets") / "glyphs"
BUILTIN_SIZES = {"train": (64,), "heldout": (64, 384)}  # pixels
HELD_OUT = "split=heldout"  # behind a folder or dataset: all of it
_FORMS = (*FETCHED, "glyphs-builtin", "folder:PATH", "wds:PATTERN", "hf:NAME")


def open_shard_source(spec: str, split: str) -> ShardSet | None:
    """The shards of a spec's split ("train", "heldout" or "all"); None for other sources.

    Raises FileNotFoundError for missing files; it names the command that fetches them, if there is one.
    """
    if spec in FETCHED:
        folder = data_folder() / "vision" / spec / ("heldout" if split == "all" else split)
        if not (folder / "index.json").is_file():
            fetch = fetch_command(f"vision {spec.partition('-')[0]} --offline")
            instead = "; 'glyphs-builtin' needs no download" if spec == "glyphs" else ""
            raise FileNotFoundError(f"source {spec!r}: no {folder / 'index.json'}; to make it, {fetch}{instead}")
        return open_shards(spec, str(folder))
    if spec.startswith("wds:"):
        if split == "heldout":
            raise ValueError(f"source {spec!r} has no held-out split of its own: set heldout_source to its shards")
        return open_shards(spec, spec[len("wds:") :])
    return None


def open_images(
    spec: str,
    split: str,
    *,
    hold_out: bool = True,
    size: int = 128,
    classes: Sequence[str] | None = None,
    objects: bool = False,
) -> ImageSet:
    """The images of a spec's split.

    split: "train"; "heldout"; "all", for a source that is a held-out set as a whole (its held-out part if it has one).
    hold_out=False trains on everything but a held-out part of its own. size: pixels that "glyphs-builtin" should have.
    classes: names by label, for a "folder:" whose own list differs or is incomplete. objects: the pictures' objects will be
    read, and not their labels.

    Raises ValueError for an unknown spec, naming the nearest valid one; and what the kinds of sources raise.
    """
    if not isinstance(spec, str) or not spec:
        raise ValueError(f"source must be a non-empty string such as 'glyphs-builtin', got {spec!r}")
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"split {split!r}: expected 'train', 'heldout' or 'all'")
    place, _, query = spec.partition("?")
    options = query.split("&")
    if spec.startswith(("folder:", "hf:")) and HELD_OUT in options:
        if split == "train":
            raise ValueError(
                f"source {spec!r} is held out as a whole: train on another, and give this as heldout_source"
            )
        options.remove(HELD_OUT)
        spec, split = "?".join([place, "&".join(options)] if options else [place]), "all"
    if (shards := open_shard_source(spec, split)) is not None:
        return TarImages(shards)
    if spec == "glyphs-builtin":
        return BuiltinImages(spec, "train" if split == "train" else "heldout", size)
    if spec.startswith("folder:") and objects:
        return ObjectFolder(spec, split, hold_out=hold_out)
    if spec.startswith("folder:"):
        return FolderImages(spec, split, hold_out=hold_out, classes=classes)
    if spec.startswith("hf:"):
        return HFImages(spec, split, hold_out=hold_out, objects=objects)
    folder = f"did you mean 'folder:{spec}'? " if os.path.isdir(spec) else ""
    hint = did_you_mean(spec, _FORMS) or folder or did_you_mean(f"{spec.partition(':')[0]}:PATH", _FORMS)
    raise ValueError(f"source {spec!r} is none of {', '.join(_FORMS)}; {hint}".rstrip("; "))


def class_names(spec: str) -> tuple[str, ...]:
    """The classes that a source's training images list, by label, read without its images; () where that cannot be told."""
    if spec in ("glyphs", "glyphs-builtin", "scenes", "scenes-count"):  # the same letters
        return tuple(json.loads((BUILTIN / "index.json").read_text())["classes"])
    if spec.startswith("folder:"):
        path = Path(spec[len("folder:") :]).expanduser()
        for folder in (path / "train", path):
            if _has_folders(folder):
                return tuple(_class_folders(folder))
    return ()


def _has_folders(path: Path) -> bool:
    return path.is_dir() and any(e.is_dir() and not e.name.startswith(".") for e in os.scandir(path))


class BuiltinImages(ImageSet):
    """Letters cut from the sheets that ship with the package, one for each font.

    Of the stored sizes the smallest with at least `size` pixels, or the largest. The fingerprint is of the scenes, the same
    at every size. Consecutive images walk through the letters, then the fonts.
    """

    def __init__(self, spec: str, split: str, size: int) -> None:
        index = json.loads((BUILTIN / "index.json").read_text())
        sizes = BUILTIN_SIZES[split]
        self.side = min((side for side in sizes if side >= size), default=max(sizes))
        self.fonts: list[str] = index[split]["fonts"]
        self.files = [BUILTIN / f"{split}-{self.side}-{font}.webp" for font in self.fonts]
        self.scenes, self.letters = index[split]["scenes"], len(index["classes"])
        self.sheets: dict[int, Image.Image] = {}
        self.spec, self.classes, self.fingerprint = spec, tuple(index["classes"]), index[split]["fingerprint"]

    def __len__(self) -> int:
        return len(self.files) * self.letters * self.scenes

    def read(self, index: int) -> tuple[Image.Image, int]:
        rest, label = divmod(index, self.letters)
        scene, font = divmod(rest, len(self.files))
        if font not in self.sheets:
            self.sheets[font] = Image.open(self.files[font]).convert("RGB")
        left, top = label * self.side, scene * self.side
        return self.sheets[font].crop((left, top, left + self.side, top + self.side)), label

    def group(self, index: int) -> str:
        return self.fonts[index // self.letters % len(self.fonts)]


# ------------------------------------------------------------------------------------------------ folders


class _ListedFolder(ImageFolder):
    """ImageFolder without hidden names and links to a folder above, that may be given its classes, admits empty ones, and
    lists the files it leaves out, with the reason."""

    def __init__(self, root: Path, classes: Sequence[str] | None) -> None:
        self.known_classes = classes
        self.left_out: list[tuple[str, str]] = []
        super().__init__(str(root), is_valid_file=lambda name: name.lower().endswith(EXTENSIONS), allow_empty=True)

    def make_dataset(
        self,
        directory: str,
        class_to_idx: dict[str, int],
        extensions: object = None,
        is_valid_file: Callable[[str], bool] = bool,
        allow_empty: bool = True,
    ) -> list[tuple[str, int]]:
        """(path, label) of the files of every class, sorted by class, folder and name."""
        samples, seen = [], set()
        for name, label in sorted(class_to_idx.items()):
            for folder, _, files in sorted(_walk(os.path.join(directory, name))):
                for path in (os.path.join(folder, file) for file in sorted(files)):
                    if not is_valid_file(path):
                        self.left_out.append(("unknown extension", path))
                        continue
                    link = os.path.realpath(path) if os.path.islink(path) or os.path.islink(folder) else path
                    if link in seen:
                        self.left_out.append(("seen twice, by a link", path))
                        continue
                    seen |= {path, link}
                    samples.append((path, label))
        return samples

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names, known = _class_folders(directory), self.known_classes
        if known is None:
            return names, {name: number for number, name in enumerate(names)}
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(f"{directory} has a class {name!r} that training does not have; {hint}".rstrip("; "))
        return list(known), {name: number for number, name in enumerate(known)}


def _class_folders(folder: str | Path) -> list[str]:
    """Names of the folders in a folder, sorted, but hidden ones, such as a notebook's checkpoints.

    Raises:
        FileNotFoundError: where there is none.
    """
    names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise FileNotFoundError(f"no class folder in {folder}: expected {folder}/CLASS/IMAGE")
    return names


def _walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` through links, without hidden names and without links to a folder that is being walked."""
    for place, folders, files in os.walk(folder, followlinks=True):
        above = os.path.realpath(place) + os.sep
        paths = {name: os.path.join(place, name) for name in folders if not name.startswith(".")}
        folders[:] = [
            name
            for name, path in paths.items()
            if not (os.path.islink(path) and above.startswith(os.path.realpath(path) + os.sep))
        ]
        yield place, folders, [name for name in files if not name.startswith(".")]


class FolderImages(ImageSet):
    """A folder of class folders. Labels are the places of the class names in alphabetical order, those of PATH/train."""

    def __init__(self, spec: str, split: str, *, hold_out: bool, classes: Sequence[str] | None = None) -> None:
        path = _folder(spec)
        train, heldout = path / "train", next((path / n for n in HELDOUT_NAMES if (path / n).is_dir()), None)
        parts = _has_folders(train)  # else a class called "train"
        folders = {child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")}
        alone = heldout is not None and folders <= {*HELDOUT_NAMES}
        if alone and split == "train":
            raise ValueError(
                f"source {spec!r} has {', '.join(sorted(folders))} and no train: it is held out as a whole"
            )
        if parts and heldout is None and split != "train":
            raise ValueError(f"source {spec!r} has train, but none of {', '.join(HELDOUT_NAMES)}: set heldout_source")
        if parts and classes is None:
            classes = _class_folders(train)
        root = path
        if heldout is not None and (alone or (parts and split != "train")):
            root = heldout
        elif parts:
            root = train
        listed = _ListedFolder(root, classes)
        samples = listed.samples
        names = [os.path.relpath(file, root).replace(os.sep, "/") for file, _ in samples]
        self.problems: list[Event] = [("skipped", reason, name) for reason, name in listed.left_out]
        for label in sorted(set(range(len(listed.classes))) - {label for _, label in samples}):
            self.problems.append(("skipped", "empty class", str(root / listed.classes[label])))
        if root == path and hold_out and split != "all":
            self.among, places = len(samples), heldout_places(_named_once(names, samples), split)
            samples, names = [samples[n] for n in places], [names[n] for n in places]
        if not samples:
            raise ValueError(f"source {spec!r}: no image for split {split!r} in {root}")
        versions = split != "train"  # of a training set the names suffice: a stat of every file would take minutes
        self.fingerprint = digest_of(
            (name, label, _version(file) if versions else 0) for name, (file, label) in zip(names, samples, strict=True)
        )
        self.spec, self.classes = spec, tuple(listed.classes)
        self.paths = packed(file for file, _ in samples)
        self.labels = np.array([label for _, label in samples])

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[bytes, int]:
        return Path(self.name(index)).read_bytes(), int(self.labels[index])

    def name(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


def _named_once(names: list[str], samples: list[tuple[str, int]]) -> list[str]:
    """`names`, but of files with equal bytes the first one's: copies are held out together, or trained on together."""
    by_size: dict[int, list[int]] = {}
    for n, (path, _) in enumerate(samples):
        by_size.setdefault(_version(path)[0], []).append(n)
    named = list(names)
    for places in (places for places in by_size.values() if len(places) > 1):
        first: dict[bytes, str] = {}
        for n in places:
            with open(samples[n][0], "rb") as file:
                named[n] = first.setdefault(hashlib.file_digest(file, "sha256").digest(), names[n])
    return named


def _folder(spec: str) -> Path:
    path = Path(spec[len("folder:") :]).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"source {spec!r}: no folder {path}")
    return path


def _version(path: str | Path) -> tuple[int, int]:
    """(size, time of the last change) of a file, which differ where it was written again; of none zeros."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return 0, 0
    return status.st_size, status.st_mtime_ns


class ObjectFolder(ImageSet):
    """A folder of pictures whose metadata.jsonl says what is where, as Hugging Face's image folders have it.

    Raises FileNotFoundError without a metadata.jsonl, ValueError for a line that is none.
    """

    def __init__(self, spec: str, split: str, *, hold_out: bool) -> None:
        path = _folder(spec)
        listed = {name: path / name / "metadata.jsonl" for name in ("train", *HELDOUT_NAMES)}
        heldout = next((listed[name] for name in HELDOUT_NAMES if listed[name].is_file()), None)
        parts = listed["train"].is_file() and heldout is not None
        chosen = listed["train"] if parts else path / "metadata.jsonl"
        if split != "train" and heldout is not None and (parts or not chosen.is_file()):
            chosen, parts = heldout, True
        if not chosen.is_file():
            raise FileNotFoundError(
                f"source {spec!r}: boxes are read from {path / 'metadata.jsonl'}, or from metadata.jsonl in its train and "
                f"{' or '.join(HELDOUT_NAMES)}, which are not there"
            )
        self.spec, self.root, self.classes = spec, chosen.parent, None
        lines = enumerate(chosen.read_bytes().split(b"\n"), 1)
        rows = [self._row(line, f"{chosen}, line {number}") for number, line in lines if line.strip()]
        by_name = not parts and hold_out
        if by_name and split != "all":
            self.among = len(rows)
            rows = [rows[n] for n in heldout_places((row["file_name"] for row in rows), split)]
        if not rows:
            why = "; one in ten is held out, by its name" if by_name else ""
            raise ValueError(f"source {spec!r}: no picture for split {split!r} in {chosen}{why}")
        files = [name for row in rows for name in self._files(row) if name] if split != "train" else []
        self.rows, self.fingerprint = rows, digest_of([*rows, *(_version(self.root / name) for name in files)])

    @staticmethod
    def _files(row: dict[str, Any]) -> tuple[str, str | None]:
        return row["file_name"], row.get("mask_file_name")

    @staticmethod
    def _row(line: bytes, where: str) -> dict[str, Any]:
        row = parse_json(line, where)
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            got = line.decode("utf-8", "replace")[:80]
            raise ValueError(f'{where}: expected {{"file_name": …, "objects": …}}, got {got}')
        if not isinstance(row.get("mask_file_name", ""), str | None):
            raise ValueError(f"{where}: mask_file_name: expected the name of a file, got {row['mask_file_name']!r}")
        return row

    def __len__(self) -> int:
        return len(self.rows)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        row = self.rows[index]
        image, mask = (self._read(name) if name else None for name in self._files(row))
        return image or b"", parse_objects(row.get("objects"), row.get("group"), mask)

    def _read(self, name: str) -> bytes:
        path = self.root / name
        if not os.path.isfile(path):  # also of names that no file can have
            raise BadImage("no image", f"no file {str(path)[-200:]!r}")
        return path.read_bytes()

    def name(self, index: int) -> str:
        return str(self.root / self.rows[index]["file_name"])
