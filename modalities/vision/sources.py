"""Where images come from: a spec string in, an `ImageSet` out.

    "photos" | "glyphs"             shards that `priorzoo fetch-data vision NAME` puts into the data
    folder (glyphs: of 0.5.0)
    "scenes" | "links"              the same, of pictures with boxes
    "glyphs-builtin"                the capitals of 19 fonts in small scenes, and of 4 others held
    out; ships with the package
    "folder:PATH"                   torchvision's ImageFolder layout: PATH/train/CLASS/… and
    PATH/val/CLASS/… (or heldout,
                                    validation, test), or PATH/CLASS/… alone
    "wds:PATTERN"                   WebDataset shards, "wds:a/train-{0000..1023}.tar", or a folder
    with index.json
    "hf:NAME[:CONFIG][:SPLIT]"      a Hugging Face dataset by name or local path, image and label
    columns found by type;
                                    "…?image=COLUMN&label=COLUMN" names them

A folder or dataset without a held-out part of its own holds out a tenth, by a hash of each image's
name (its row number in a dataset), unless `heldout_source` is set; "…?split=heldout" behind it
holds out all of it. Shards hold out nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from modalities.vision.errors import BadImage
from modalities.vision.images import (
    EXTENSIONS,
    HELDOUT_NAMES,
    Event,
    ImageSet,
    digest_of,
    heldout_places,
)
from modalities.vision.shards import Shards, open_shards
from zoo.errors import did_you_mean
from zoo.files import data_folder, read_object

FETCHED = ("glyphs", "photos", "scenes", "links")
BUILTIN = Path(__file__).with_name("assets") / "glyphs"
BUILTIN_SIZES = {"train": (64,), "heldout": (64, 384)}  # pixels
HELD_OUT = "split=heldout"  # behind a folder or dataset: all of it
_FORMS = (*FETCHED, "glyphs-builtin", "folder:PATH", "wds:PATTERN", "hf:NAME")


def open_shard_source(spec: str, split: str) -> Shards | None:
    """The shards of a spec's split ("train", "heldout", "all"); None for other sources. Raises
    FileNotFoundError."""
    if spec in FETCHED:
        folder = data_folder() / "vision" / spec / ("heldout" if split == "all" else split)
        if not (folder / "index.json").is_file():
            way_out = f"to make it, `priorzoo fetch-data vision {spec} --offline`"
            if spec == "glyphs":
                way_out = "version 0.5.0 draws it; 'glyphs-builtin' needs no download"
            raise FileNotFoundError(f"source {spec!r}: no {folder / 'index.json'}; {way_out}")
        return open_shards(spec, str(folder))
    if spec.startswith("wds:"):
        if split == "heldout":
            raise ValueError(
                f"source {spec!r} has no held-out split of its own: set heldout_source to its shards"
            )
        return open_shards(spec, spec[len("wds:") :])
    return None


def open_images(
    spec: str,
    split: str,
    *,
    hold_out: bool = True,
    size: int = 128,
    classes: Sequence[str] | None = None,
) -> ImageSet:
    """The images of a spec's split: "train", "heldout", or "all" of a held-out set (its held-out
    part if it has one).

    hold_out=False trains on everything but a held-out part of its own. size: pixels that
    "glyphs-builtin" should have.
    classes: names by label, for a "folder:" whose own list differs or is incomplete.
    """
    place, _, query = spec.partition("?")
    options = query.split("&")
    if spec.startswith(("folder:", "hf:")) and HELD_OUT in options:
        if split == "train":
            raise ValueError(
                f"source {spec!r} is held out as a whole: set heldout_source to it, and train on another"
            )
        options.remove(HELD_OUT)
        spec = "?".join([place, "&".join(options)] if options else [place])
        split = "all"
    if (shards := open_shard_source(spec, split)) is not None:
        return shards.indexed()
    if spec == "glyphs-builtin":
        return BuiltinImages(spec, "train" if split == "train" else "heldout", size)
    if spec.startswith("folder:"):
        return FolderImages(spec, split, hold_out=hold_out, classes=classes)
    if spec.startswith("hf:"):
        return HFImages(spec, split, hold_out=hold_out)
    folder = f"did you mean 'folder:{spec}'? " if os.path.isdir(spec) else ""
    hint = (
        did_you_mean(spec, _FORMS)
        or folder
        or did_you_mean(f"{spec.partition(':')[0]}:PATH", _FORMS)
    )
    raise ValueError(f"source {spec!r} is none of {', '.join(_FORMS)}; {hint}".rstrip("; "))


def class_names(spec: str) -> tuple[str, ...]:
    """The classes that a source's training images list, by label, read without its images; () where
    that is unknown."""
    if spec in ("glyphs", "glyphs-builtin", "scenes", "links"):  # the same letters
        return tuple(read_object(BUILTIN / "index.json")["classes"])
    if spec.startswith("folder:"):
        path = Path(spec[len("folder:") :]).expanduser()
        return tuple(_shown_folders(path / "train") or _shown_folders(path))
    return ()


class BuiltinImages(ImageSet):
    """Letters cut from the sheets that ship with the package, one for each font; consecutive ones
    go through the letters, then the fonts. Of the stored sizes the smallest with at least `size`
    pixels, or the largest."""

    def __init__(self, spec: str, split: str, size: int) -> None:
        index = read_object(BUILTIN / "index.json")
        sizes = BUILTIN_SIZES[split]
        part = index[split]
        self.side = min((side for side in sizes if side >= size), default=max(sizes))
        self.fonts: list[str] = part["fonts"]
        self.scenes = part["scenes"]
        self.letters = len(index["classes"])
        self.split = split
        self.sheets: dict[str, Image.Image] = {}
        self.spec = spec
        self.classes = tuple(index["classes"])
        self.fingerprint = part["fingerprint"]

    def __len__(self) -> int:
        return len(self.fonts) * self.letters * self.scenes

    def read(self, index: int) -> tuple[Image.Image, int]:
        label = index % self.letters
        font = self.group(index)
        if font not in self.sheets:
            self.sheets[font] = Image.open(
                BUILTIN / f"{self.split}-{self.side}-{font}.webp"
            ).convert("RGB")
        left = label * self.side
        top = index // (self.letters * len(self.fonts)) * self.side
        return self.sheets[font].crop((left, top, left + self.side, top + self.side)), label

    def group(self, index: int) -> str:
        return self.fonts[index // self.letters % len(self.fonts)]


def _shown_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, but hidden ones, such as a notebook's
    checkpoints."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir() and not entry.name.startswith(".")
    )


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _list_images(root: Path, classes: Sequence[str]) -> tuple[list[tuple[str, int]], list[Event]]:
    """(path, label) of the images of every class, sorted by class, folder and name; and what is
    left out."""
    samples = []
    problems = []
    seen = set()
    for name, label in sorted((name, label) for label, name in enumerate(classes)):
        top = os.path.join(root, name)
        entries = []
        for place, folders, files in os.walk(top):  # not through links
            folders[:] = [name for name in folders if not name.startswith(".")]
            entries.append(
                (place, folders, sorted(name for name in files if not name.startswith(".")))
            )
        for place, folders, files in sorted(entries):
            links = (
                path
                for path in (os.path.join(place, folder) for folder in folders)
                if os.path.islink(path)
            )
            problems += [("linked folder in a class", path) for path in links]
            for path in (os.path.join(place, file) for file in files):
                target = (
                    os.path.realpath(path) if os.path.islink(path) or os.path.islink(top) else path
                )
                if not path.lower().endswith(EXTENSIONS):
                    problems.append(("unknown extension", path))
                elif not os.path.isfile(path):
                    problems.append(("no regular file", path))
                elif target in seen:
                    problems.append(("seen twice, by a link", path))
                else:
                    seen |= {path, target}
                    samples.append((path, label))
    return samples, problems


def _names_of_content(root: Path, samples: Sequence[tuple[str, int]]) -> list[str]:
    """Names in `root`, of files with equal bytes the first one's: copies are held out together, or
    trained on together."""
    sizes = Counter(os.path.getsize(file) for file, _ in samples)
    first: dict[bytes, str] = {}
    names = []
    for file, _ in samples:
        name = _relative(root, file)
        if sizes[os.path.getsize(file)] > 1:
            with open(file, "rb") as stream:
                name = first.setdefault(hashlib.file_digest(stream, "sha256").digest(), name)
        names.append(name)
    return names


def _relative(root: Path, file: str) -> str:
    return os.path.relpath(file, root).replace(os.sep, "/")


class FolderImages(ImageSet):
    """A folder of class folders. Labels are the places of the class names in alphabetical order,
    those of PATH/train."""

    def __init__(
        self, spec: str, split: str, *, hold_out: bool, classes: Sequence[str] | None = None
    ) -> None:
        path = Path(spec[len("folder:") :]).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"source {spec!r}: no folder {path}")
        train = path / "train"
        heldout = next((path / n for n in HELDOUT_NAMES if (path / n).is_dir()), None)
        parts = _shown_folders(train)  # without them "train" is a class
        if parts and heldout is None and split != "train":
            raise ValueError(
                f"source {spec!r} has train, but none of {', '.join(HELDOUT_NAMES)}: set heldout_source"
            )
        if heldout and {*_shown_folders(path)} <= {*HELDOUT_NAMES}:
            raise ValueError(
                f"source {spec!r} has no train: name that of classes, folder:{heldout}?split=heldout"
            )
        root = (heldout if heldout and split != "train" else train) if parts else path
        names = _shown_folders(root)
        if not names:
            raise FileNotFoundError(f"no class folder in {root}: expected {root}/CLASS/IMAGE")
        self.spec = spec
        self.classes = tuple((parts or names) if classes is None else classes)
        for name in names:
            if name not in self.classes:
                hint = did_you_mean(name, self.classes)
                raise ValueError(
                    f"{root} has a class {name!r} that training does not have; {hint}".rstrip("; ")
                )
        samples, self.problems = _list_images(root, self.classes)
        empty = sorted(set(range(len(self.classes))) - {label for _, label in samples})
        self.problems += [("empty class", str(root / self.classes[label])) for label in empty]
        if root == path and hold_out and split != "all":
            self.among = len(samples)
            places = heldout_places(_names_of_content(root, samples), split)
            samples = [samples[place] for place in places]
        if not samples:
            raise ValueError(f"source {spec!r}: no image for split {split!r} in {root}")
        versions = (
            split != "train"
        )  # of a training set the names suffice: a stat of every file would take minutes
        facts = (
            (_relative(root, file), label, _version(file) if versions else 0)
            for file, label in samples
        )
        self.fingerprint = digest_of(facts)
        # In one buffer: forked workers share it, while they would copy a list of objects page by
        # page.
        self.paths = np.array([os.fsencode(file) for file, _ in samples])
        self.labels = np.array([label for _, label in samples])

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[bytes, int]:
        return Path(self.name(index)).read_bytes(), int(self.labels[index])

    def name(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class HFImages(ImageSet):
    """One split of a Hugging Face dataset; images stay encoded until they are read.

    "train" is the split named in the spec, else "train"; "heldout" the validation or test split,
    the one named before others, or rows of the training split that `heldout_places` picks; "all"
    the split named, else the held-out one, else everything.
    """

    def __init__(self, spec: str, split: str, *, hold_out: bool = True) -> None:
        try:
            import datasets  # takes seconds
        except ImportError as error:
            raise ImportError(
                f"source {spec!r} needs the package `datasets`: pip install datasets"
            ) from error
        place, _, query = spec[len("hf:") :].partition("?")
        columns = dict(parse_qsl(query))
        if unknown := sorted(columns.keys() - {"image", "label"}):
            raise ValueError(
                f"source {spec!r}: unknown option {unknown[0]!r}; expected image, label or {HELD_OUT}"
            )
        name, config, named = [*place.split(":", 2), "", ""][:3]
        saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        if not named and (saved or config in ("train", *HELDOUT_NAMES)):
            config, named = "", config
        if not name:
            raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
        if split == "train" and named in HELDOUT_NAMES:
            raise ValueError(
                f"source {spec!r} names a held-out split: give it as heldout_source, and train on another"
            )
        loaded = (
            datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None)
        )
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        heldout = next(
            (part for part in (named, *HELDOUT_NAMES) if part in HELDOUT_NAMES and part in splits),
            "",
        )
        self.spec = spec
        self.split = named or "train"
        if split != "train":
            self.split = (split == "all" and named) or heldout or named or "train"
        if self.split not in splits:
            hint = did_you_mean(self.split, splits)
            raise ValueError(
                f"source {spec!r}: no split {self.split!r} among {', '.join(splits)}; {hint}".rstrip(
                    "; "
                )
            )
        data = splits[self.split]
        if split != "all" and hold_out and not heldout:
            self.among = len(data)
            data = data.select(heldout_places((f"row {row}" for row in range(len(data))), split))
        if not len(data):
            raise ValueError(f"source {spec!r}: split {self.split!r} has no row for {split!r}")
        roles = (("image", datasets.Image), ("label", datasets.ClassLabel))
        self.image, self.label = (
            _column(spec, data.features, role, kind, columns) for role, kind in roles
        )
        feature = data.features[self.label]
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        self.data = data.cast_column(self.image, datasets.Image(decode=False)).select_columns(
            [self.image, self.label]
        )
        self.fingerprint = digest_of(
            [name, config or None, self.split, len(data), self.data._fingerprint]
        )

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.data[index]
        image = row[self.image]
        label = row[self.label]
        if image is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        if label is None or label == -1:  # -1 is a ClassLabel's missing label
            raise BadImage("no label", f"column {self.label!r} is {label}")
        return image["bytes"] if image["bytes"] is not None else Path(
            image["path"]
        ).read_bytes(), int(label)

    def name(self, index: int) -> str:
        return f"{self.spec}[{self.split}][{index}]"


def _column(
    spec: str, features: Mapping[str, object], role: str, kind: type, named: Mapping[str, str]
) -> str:
    """The column that is named for a role, else the only one of its type; labels may be whole
    numbers, called "label"."""
    fitting = [name for name, feature in features.items() if isinstance(feature, kind)] or [role]
    column = named.get(role) or (fitting[0] if len(fitting) == 1 else "")
    feature = features.get(column)
    if isinstance(feature, kind) or (
        role == "label" and "int" in str(getattr(feature, "dtype", ""))
    ):
        return column
    what = f"expected one column of {role}s among {', '.join(features)}, got {named.get(role) or fitting}"
    raise ValueError(
        f"source {spec!r}: {what}; {did_you_mean(column, fitting)}name it with '?{role}=COLUMN'"
    )
