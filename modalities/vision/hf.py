"""Hugging Face datasets as image sets. `datasets` takes seconds to import, so it is imported when a source needs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from modalities.vision.images import HELDOUT_NAMES, BadImage, ImageSet, digest_of, heldout_places
from modalities.vision.objects import Objects, parse_objects
from zoo.naming import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

_OPTIONS = ("image", "label", "objects", "mask")
_SLICE = re.compile(r"^(?P<split>[^\[]+)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]$")


class HFImages(ImageSet):
    """One split of a Hugging Face dataset; images stay encoded until they are read.

    split "train" is the split named in the spec, else "train", else the first. "heldout" is the dataset's validation or test
    split, but never the one trained on; where there is no other, rows that `is_heldout` picks. "all" is the split named, else
    the held-out one, else everything. A spec that names a validation or test split of a dataset with others to train on
    means that split, held out: to train on it is a ValueError.

    objects: boxes are read in place of labels, from the column "objects" or one named, and masks from one named.
    """

    def __init__(self, spec: str, split: str, *, hold_out: bool = True, objects: bool = False) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(f"source {spec!r} needs the package `datasets`: pip install datasets") from error
        place, _, query = spec[len("hf:") :].partition("?")
        options = dict(parse_qsl(query))
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            known = " or ".join(map(repr, _OPTIONS))
            raise ValueError(f"source {spec!r}: unknown option {unknown[0]!r}; expected {known}, or 'split=heldout'")
        name, config, named = _parts(spec, place)
        splits = _splits(name, config)
        whole = named or ("train" if "train" in splits else next(iter(splits)))
        trained = _SLICE.sub(r"\g<split>", whole)
        heldout = next((part for part in HELDOUT_NAMES if part in splits and part != trained), None)
        others = " or ".join(part for part in splits if part not in HELDOUT_NAMES)
        if trained in HELDOUT_NAMES and others:
            if split == "train":
                what = f"train on {others}, and give this as heldout_source"
                raise ValueError(f"source {spec!r} names a held-out split: {what}")
            heldout = whole
        self.spec, self.split = spec, whole
        if split != "train":
            self.split = (named if split == "all" else None) or heldout or whole
        data = _rows(spec, splits, self.split)
        if split != "all" and hold_out and heldout is None:
            self.among = len(data)
            data = data.select(heldout_places((f"row {row}" for row in range(len(data))), split))
        if not len(data):
            raise ValueError(f"source {spec!r}: split {self.split!r} has no row for {split!r}")
        self.image, self.label, self.mask = _columns(spec, data.features, options, objects)
        feature = data.features.get(self.label)
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        for column in filter(None, (self.image, self.mask)):
            data = data.cast_column(column, datasets.Image(decode=False))
        self.data = data.select_columns([column for column in (self.image, self.label, self.mask) if column])
        self.fingerprint = digest_of([name, config, self.split, len(data), self.data._fingerprint])

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.data[index]
        image, label = self._image(row), row[self.label]
        if label is None or label == -1:  # -1 is a ClassLabel's missing label
            raise BadImage("no label", f"column {self.label!r} is {label}")
        return image, int(label)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        row = self.data[index]
        fields = row[self.label] if self.label else None
        if isinstance(fields, list):  # a list of objects, each with its box
            keys = fields[0] if fields else ("bbox", "category")
            fields = {key: [one[key] for one in fields] for key in keys}
        mask = _bytes(row[self.mask]) if self.mask and row[self.mask] is not None else None
        return self._image(row), parse_objects(fields, mask=mask)

    def _image(self, row: Mapping[str, Any]) -> bytes:
        if row[self.image] is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        return _bytes(row[self.image])

    def name(self, index: int) -> str:
        return f"{self.spec}[{self.split}][{index}]"


def _bytes(stored: Mapping[str, Any]) -> bytes:
    return stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()


def _parts(spec: str, place: str) -> tuple[str, str | None, str | None]:
    """(name, configuration, split) of NAME[:CONFIG][:SPLIT]; a split may be a slice (see `_rows`)."""
    name, config, split = [*place.split(":", 2), "", ""][:3]
    if not name:
        raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
    if config.partition("[")[0] in ("train", *HELDOUT_NAMES):  # "hf:name:validation" can only mean the split
        config, split = "", f"{config}:{split}" if split else config
    return name, config or None, split or None


def _splits(name: str, config: str | None) -> dict[str, Dataset]:
    """The dataset's splits by name. A folder that `save_to_disk` wrote is read as it is."""
    import datasets

    if not any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return dict(datasets.load_dataset(name, config))
    loaded = datasets.load_from_disk(name)
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if config:
        hint = f"its splits are {', '.join(splits)}; {did_you_mean(config, splits)}".rstrip("; ")
        raise ValueError(f"{name} was saved by save_to_disk and has no configuration {config!r}; {hint}")
    return splits


def _rows(spec: str, splits: Mapping[str, Dataset], named: str) -> Dataset:
    """The rows of a split, or of a slice such as "train[:80%]" or "train[100:-50]"; percentages to the nearest row."""
    match = _SLICE.match(named)
    split = match["split"] if match else named
    if split not in splits:
        hint = did_you_mean(split, splits)
        raise ValueError(f"source {spec!r}: no split {split!r} among {', '.join(splits)}; {hint}")
    data = splits[split]
    if not match:
        return data
    ends = [match["start"], match["stop"]]
    places = [round(len(data) * int(e[:-1]) / 100) if e and e.endswith("%") else e and int(e) for e in ends]
    return data.select(range(*slice(*places).indices(len(data))) or [])


def _columns(
    spec: str, features: Mapping[str, object], options: Mapping[str, str], objects: bool
) -> tuple[str, str, str | None]:
    """(image, label or objects, mask): the columns named, or the only ones of their types; label "" where masks are all."""
    import datasets

    def of_type(*kinds: type) -> list[str]:
        return [name for name, one in features.items() if isinstance(one, kinds)]

    def column(role: str, fitting: list[str], what: str) -> str:
        named, columns = options.get(role), ", ".join(features)
        if named is not None and named not in features:
            hint = did_you_mean(named, features)
            raise ValueError(f"source {spec!r}: no column {named!r} among {columns}; {hint}".rstrip("; "))
        if named in fitting or (named is None and len(fitting) == 1):
            return named or fitting[0]
        there = ", ".join(fitting) or f"none among {columns}"
        if named is not None:
            there = f"{named!r} of another, {features[named]!r:.80}; there is {there}"
        elif fitting:
            there = f"several: {there}"
        form = "'?image=…&label=…', or of boxes and masks '?image=…&objects=…&mask=…'"
        raise ValueError(f"source {spec!r}: expected one column of type {what}, found {there}; name it with {form}")

    images, labels = of_type(datasets.Image), of_type(datasets.ClassLabel)
    mask = column("mask", images, "Image") if objects and "mask" in options else None
    image = column("image", [name for name in images if name != mask], "Image")
    if objects:
        if mask and "objects" not in (*options, *features):
            return image, "", mask
        options = {"objects": "objects", **options}
        plain = of_type(datasets.Image, datasets.ClassLabel, datasets.Value)
        return image, column("objects", [name for name in features if name not in plain], "objects"), mask
    label = options.get("label", "" if labels else "label")  # whole numbers are labels where they are called so
    kind = features.get(label)
    if isinstance(kind, datasets.Value) and kind.dtype.lstrip("u").startswith("int"):
        return image, label, None
    return image, column("label", labels, "ClassLabel"), None
