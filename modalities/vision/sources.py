"""Where images come from: a spec string in, an `ImageSet` out.

    "photos" | "glyphs"         shards that `python -m tools.offline photos`, in a checkout, puts
                                into the data folder (glyphs: version 0.5.0)
    "scenes" | "links"          the same, of pictures with boxes
    "glyphs-builtin"            the capitals of 19 fonts in small scenes, and of 4 others held out;
                                ships with the package
    "folder:PATH"               torchvision's ImageFolder layout: PATH/train/CLASS/… and
                                PATH/val/CLASS/… (or heldout, validation, test), or
                                PATH/CLASS/… alone
    "wds:PATTERN"               WebDataset shards, "wds:a/train-{0000..1023}.tar", or a folder with
                                index.json
    "hf:NAME[:CONFIG][:SPLIT]"  a Hugging Face dataset by name or local path, image and label
                                columns found by type; "…?image=COLUMN&label=COLUMN" names them

A folder or dataset without a held-out part of its own holds out a tenth, by a hash of each image's
name (its row number in a dataset), unless `heldout_source` is set; "…?split=heldout" behind it
holds out all of it. Shards hold out nothing. Class folders are numbered as torchvision does, by
code points; "folder:PATH?order=timm" numbers them as timm does, and "?order=FILE" as a file that
lists a class a line.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from PIL import Image

from modalities.classes import label_numbers
from modalities.digests import content_digests
from modalities.encoder.items import Event, digest_of
from modalities.vision.classes import ordered_classes
from modalities.vision.errors import BadImage
from modalities.vision.images import (
    EXTENSIONS,
    HELDOUT_NAMES,
    ImageSet,
    heldout_places,
)
from modalities.vision.shards import Shards, listed_classes, open_shards
from zoo.errors import did_you_mean
from zoo.files import data_folder, read_object

FETCHED = ("glyphs", "photos", "scenes", "links")
BUILTIN = Path(__file__).with_name("assets") / "glyphs"
# Side in pixels of the letters that are stored.
BUILTIN_SIZES = {"train": (64,), "heldout": (64, 384)}
# Behind a folder or dataset: all of it is held out.
HELD_OUT = "split=heldout"
# In which classes of folders are numbered where the source does not say.
DEFAULT_ORDER = "torchvision"
# Rows of a dataset that are looked through at once.
_ROWS = 256
_FORMS = (*FETCHED, "glyphs-builtin", "folder:PATH", "wds:PATTERN", "hf:NAME")


def open_shard_source(spec: str, split: str) -> Shards | None:
    """The shards of a spec's split ("train", "heldout", "all"); None for other sources. Raises
    FileNotFoundError."""
    if spec in FETCHED:
        folder = _fetched_folder(spec, "heldout" if split == "all" else split)
        if not (folder / "index.json").is_file():
            way_out = f"to make it, `python -m tools.offline {spec}` in a checkout"
            if spec == "glyphs":
                way_out = "version 0.5.0 draws it; 'glyphs-builtin' needs no download"
            raise FileNotFoundError(f"source {spec!r}: no {folder / 'index.json'}; {way_out}")
        return open_shards(spec, str(folder))
    if spec.startswith("wds:"):
        if split == "heldout":
            way_out = "set heldout_source to its shards"
            raise ValueError(f"source {spec!r} has no held-out split of its own: {way_out}")
        return open_shards(spec, spec[len("wds:") :])
    return None


def _fetched_folder(spec: str, split: str) -> Path:
    return data_folder() / "vision" / spec / split


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
    location, _, query = spec.partition("?")
    options = query.split("&")
    if spec.startswith(("folder:", "hf:")) and HELD_OUT in options:
        if split == "train":
            way_out = "set heldout_source to it, and train on another"
            raise ValueError(f"source {spec!r} is held out as a whole: {way_out}")
        split = "all"
        options.remove(HELD_OUT)
        spec = location
        if options:
            spec += "?" + "&".join(options)
    shards = open_shard_source(spec, split)
    if shards is not None:
        return shards.indexed()
    if spec == "glyphs-builtin":
        return BuiltinImages(spec, "train" if split == "train" else "heldout", size)
    if spec.startswith("folder:"):
        return FolderImages(spec, split, hold_out=hold_out, classes=classes)
    if spec.startswith("hf:"):
        return HFImages(spec, split, hold_out=hold_out)
    raise ValueError(f"source {spec!r} is none of {', '.join(_FORMS)}; {_hint(spec)}".rstrip("; "))


def _hint(spec: str) -> str:
    """The form of a source that was probably meant; "" where none is near."""
    same_word = did_you_mean(spec, _FORMS)
    if same_word:
        return same_word
    if os.path.isdir(spec):
        return f"did you mean 'folder:{spec}'? "
    kind, _, _ = spec.partition(":")
    return did_you_mean(f"{kind}:PATH", _FORMS)


def class_names(spec: str) -> tuple[str, ...]:
    """The classes that a source's training images list, by label, read without its images; () where
    that is unknown."""
    if spec in ("glyphs", "glyphs-builtin", "scenes", "links"):
        # All of them show the same letters.
        return tuple(read_object(BUILTIN / "index.json")["classes"])
    if spec.startswith("folder:"):
        path, order = _folder_options(spec)
        folders = _visible_folders(path / "train") or _visible_folders(path)
        return ordered_classes(folders, order or DEFAULT_ORDER)
    if spec.startswith("wds:"):
        return listed_classes(spec[len("wds:") :])
    if spec in FETCHED:
        return listed_classes(str(_fetched_folder(spec, "train")))
    return ()


def _folder_options(spec: str) -> tuple[Path, str]:
    """(path, order) of "folder:PATH?order=ORDER"; the order is "" without one."""
    location, mark, query = spec[len("folder:") :].rpartition("?order=")
    path = location if mark else query
    return Path(path).expanduser(), query if mark else ""


class BuiltinImages(ImageSet):
    """Letters cut from the sheets that ship with the package, one for each font; consecutive ones
    go through the letters, then the fonts. Of the stored sizes the smallest with at least `size`
    pixels, or the largest."""

    def __init__(self, spec: str, split: str, size: int) -> None:
        index = read_object(BUILTIN / "index.json")
        sizes = BUILTIN_SIZES[split]
        part = index[split]
        self.spec = spec
        self.split = split
        self.classes = tuple(index["classes"])
        self.fingerprint = part["fingerprint"]
        self.fonts: list[str] = part["fonts"]
        self.scenes = part["scenes"]
        self.letters = len(self.classes)
        self.side = min((side for side in sizes if side >= size), default=max(sizes))
        self.sheets: dict[str, Image.Image] = {}

    def __len__(self) -> int:
        return len(self.fonts) * self.letters * self.scenes

    def read(self, index: int) -> tuple[Image.Image, int]:
        label = index % self.letters
        scene = index // (self.letters * len(self.fonts))
        left = label * self.side
        top = scene * self.side
        sheet = self._sheet(self.group(index))
        return sheet.crop((left, top, left + self.side, top + self.side)), label

    def _sheet(self, font: str) -> Image.Image:
        """The letters of a font: a column a letter, a row a scene."""
        if font not in self.sheets:
            file = BUILTIN / f"{self.split}-{self.side}-{font}.webp"
            self.sheets[font] = Image.open(file).convert("RGB")
        return self.sheets[font]

    def group(self, index: int) -> str:
        return self.fonts[index // self.letters % len(self.fonts)]


def _visible_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones such as a notebook's
    checkpoints."""
    if not folder.is_dir():
        return []
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    return sorted(name for name in names if not name.startswith("."))


def _list_images(
    root: Path, labels: Mapping[str, int]
) -> tuple[list[tuple[str, int]], list[Event]]:
    """(path, label) of the images of every class folder, sorted by class, folder and name; and what
    is left out."""
    samples: list[tuple[str, int]] = []
    problems: list[Event] = []
    # Paths of the images so far, and what they link to.
    listed: set[str] = set()
    for name in sorted(labels):
        top = os.path.join(root, name)
        for folder, subfolders, files in _walk(top):
            for subfolder in subfolders:
                path = os.path.join(folder, subfolder)
                if os.path.islink(path):
                    problems.append(("linked folder in a class", path))
            for file in files:
                path = os.path.join(folder, file)
                target = path
                if os.path.islink(path) or os.path.islink(top):
                    target = os.path.realpath(path)
                if not path.lower().endswith(EXTENSIONS):
                    problems.append(("unknown extension", path))
                elif not os.path.isfile(path):
                    problems.append(("no regular file", path))
                elif target in listed:
                    problems.append(("seen twice, by a link", path))
                else:
                    listed |= {path, target}
                    samples.append((path, labels[name]))
    return samples, problems


def _walk(top: str) -> list[tuple[str, list[str], list[str]]]:
    """(folder, its folders, its files) of a folder and all in it, sorted, without hidden ones; not
    through links."""
    entries = []
    for folder, subfolders, files in os.walk(top):
        # In place: `os.walk` goes into the folders that are left in its list.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        entries.append((folder, subfolders, sorted(f for f in files if not f.startswith("."))))
    return sorted(entries)


def _names_of_content(root: Path, samples: Sequence[tuple[str, int]]) -> list[str]:
    """Names in `root`, of files with equal bytes the first one's: copies are held out together, or
    trained on together."""
    sizes = Counter(os.path.getsize(file) for file, _ in samples)
    first_names: dict[bytes, str] = {}
    names = []
    for file, _ in samples:
        name = _relative(root, file)
        if sizes[os.path.getsize(file)] > 1:
            with open(file, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").digest()
            name = first_names.setdefault(digest, name)
        names.append(name)
    return names


def _relative(root: Path, file: str) -> str:
    return os.path.relpath(file, root).replace(os.sep, "/")


def _digest_of_files(root: Path, samples: Sequence[tuple[str, int]], *, contents: bool) -> str:
    """Of names and labels; with `contents` also of the bytes, which stored cells are keyed by. Of a
    training set the names suffice: to read every file would take hours."""
    digests: Sequence[str | int] = [0] * len(samples)
    if contents:
        digests = content_digests(file for file, _ in samples)
    return digest_of(
        (_relative(root, file), label, digest)
        for (file, label), digest in zip(samples, digests, strict=True)
    )


class FolderImages(ImageSet):
    """A folder of class folders. Labels are the places of the class names, those of PATH/train, in
    the order that the source names, by default by code points."""

    def __init__(
        self, spec: str, split: str, *, hold_out: bool, classes: Sequence[str] | None = None
    ) -> None:
        path, order = _folder_options(spec)
        if not path.is_dir():
            forms = (
                f"; its options are '?{HELD_OUT}' and '?order=ORDER'" if "?" in str(path) else ""
            )
            raise FileNotFoundError(f"source {spec!r}: no folder {path}{forms}")
        train = path / "train"
        heldout = next((path / n for n in HELDOUT_NAMES if (path / n).is_dir()), None)
        # Without class folders in it, "train" is itself a class.
        train_classes = _visible_folders(train)
        if train_classes and heldout is None and split != "train":
            expected = ", ".join(HELDOUT_NAMES)
            raise ValueError(
                f"source {spec!r} has train, but none of {expected}: set heldout_source"
            )
        if heldout and {*_visible_folders(path)} <= {*HELDOUT_NAMES}:
            way_out = f"name that of classes, folder:{heldout}?split=heldout"
            raise ValueError(f"source {spec!r} has no train: {way_out}")
        root = path
        if train_classes:
            root = heldout if heldout and split != "train" else train
        names = _visible_folders(root)
        if not names:
            raise FileNotFoundError(f"no class folder in {root}: expected {root}/CLASS/IMAGE")
        self.spec = spec
        if classes is None:
            self.classes = ordered_classes(train_classes or names, order or DEFAULT_ORDER)
            self.class_order = "chosen" if order else "sorted"
        else:
            self.classes = tuple(classes)
        numbers = label_numbers(names, self.classes, source=str(root), model="training")
        labels = dict(zip(names, numbers, strict=False))
        samples, self.problems = _list_images(root, labels)
        empty = sorted(set(range(len(self.classes))) - {label for _, label in samples})
        self.problems += [("empty class", str(root / self.classes[label])) for label in empty]
        if root == path and hold_out and split != "all":
            self.among = len(samples)
            places = heldout_places(_names_of_content(root, samples), split)
            samples = [samples[place] for place in places]
        if not samples:
            raise ValueError(f"source {spec!r}: no image for split {split!r} in {root}")
        self.fingerprint = _digest_of_files(root, samples, contents=split != "train")
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
            # Importing it takes seconds.
            import datasets
        except ImportError as error:
            raise ImportError(
                f"source {spec!r} needs the package `datasets`: pip install datasets"
            ) from error
        location, _, query = spec[len("hf:") :].partition("?")
        columns = dict(parse_qsl(query))
        unknown = sorted(columns.keys() - {"image", "label"})
        if unknown:
            expected = f"expected image, label or {HELD_OUT}"
            raise ValueError(f"source {spec!r}: unknown option {unknown[0]!r}; {expected}")
        # Parts that are not there are "".
        name, config, named_split = [*location.split(":", 2), "", ""][:3]
        if not name:
            raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
        saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        if not named_split and (saved or config in ("train", *HELDOUT_NAMES)):
            named_split = config
            config = ""
        if split == "train" and named_split in HELDOUT_NAMES:
            way_out = "give it as heldout_source, and train on another"
            raise ValueError(f"source {spec!r} names a held-out split: {way_out}")
        if saved:
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config or None)
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        heldout = _heldout_split(splits, named_split)
        self.spec = spec
        if split == "train":
            self.split = named_split or "train"
        elif split == "all":
            self.split = named_split or heldout or "train"
        else:
            self.split = heldout or named_split or "train"
        if self.split not in splits:
            hint = did_you_mean(self.split, splits)
            message = f"source {spec!r}: no split {self.split!r} among {', '.join(splits)}; {hint}"
            raise ValueError(message.rstrip("; "))
        data = splits[self.split]
        if split != "all" and hold_out and not heldout:
            self.among = len(data)
            data = data.select(heldout_places((f"row {row}" for row in range(len(data))), split))
        if not len(data):
            raise ValueError(f"source {spec!r}: split {self.split!r} has no row for {split!r}")
        self.image = _column(spec, data.features, "image", datasets.Image, columns)
        self.label = _column(spec, data.features, "label", datasets.ClassLabel, columns)
        feature = data.features[self.label]
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        encoded = data.cast_column(self.image, datasets.Image(decode=False))
        self.data = encoded.select_columns([self.image, self.label])
        facts = [name, config or None, self.split, len(data), self.data._fingerprint]
        if split != "train":
            # `datasets` takes its fingerprint from a file beside the rows, and knows nothing of
            # pictures that rows only name.
            facts += [self.classes, *_digests_of_rows(self.data, self.image)]
        self.fingerprint = digest_of(facts)

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.data[index]
        image = row[self.image]
        label = row[self.label]
        if image is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        # −1 is a ClassLabel's missing label.
        if label is None or label == -1:
            raise BadImage("no label", f"column {self.label!r} is {label}")
        data = image["bytes"]
        if data is None:
            data = Path(image["path"]).read_bytes()
        return data, int(label)

    def name(self, index: int) -> str:
        return f"{self.spec}[{self.split}][{index}]"


def _digests_of_rows(data: Any, image: str) -> list[str]:
    """Digests of the files that the rows are in, and of the pictures that they name; of rows in
    memory, of the rows themselves."""
    stored = [file["filename"] for file in data.cache_files]
    if not stored:
        return [digest_of(data[row] for row in range(len(data)))]
    named: list[str] = []
    for column in data.with_format("arrow").iter(_ROWS):
        pictures = column[image].combine_chunks()
        paths = pictures.field("path").filter(pictures.field("bytes").is_null())
        named += [path for path in paths.to_pylist() if path and os.path.isfile(path)]
    return content_digests([*stored, *named])


def _heldout_split(splits: Mapping[str, object], named_split: str) -> str:
    """The held-out one of a dataset's splits, the named one before others; "" without."""
    for name in (named_split, *HELDOUT_NAMES):
        if name in HELDOUT_NAMES and name in splits:
            return name
    return ""


def _column(
    spec: str,
    features: Mapping[str, object],
    role: str,
    kind: type,
    named_columns: Mapping[str, str],
) -> str:
    """The column that is named for a role, else the only one of its type; labels may be whole
    numbers, called "label"."""
    candidates = [name for name, feature in features.items() if isinstance(feature, kind)]
    if not candidates:
        candidates = [role]
    named = named_columns.get(role)
    if named:
        column = named
    else:
        column = candidates[0] if len(candidates) == 1 else ""
    feature = features.get(column)
    is_number = "int" in str(getattr(feature, "dtype", ""))
    if isinstance(feature, kind) or (role == "label" and is_number):
        return column
    among = f"expected one column of {role}s among {', '.join(features)}"
    hint = did_you_mean(column, candidates)
    raise ValueError(
        f"source {spec!r}: {among}, got {named or candidates}; {hint}name it with '?{role}=COLUMN'"
    )
