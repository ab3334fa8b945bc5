"""Hugging Face datasets as image sets. `datasets` takes seconds to import, so it is imported when a source needs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from modalities.vision.images import HELDOUT_NAMES, BadImage, ImageSet, digest_of, heldout_places
from modalities.vision.objects import Objects, parse_objects
from zoo.naming import did_you_mean

_OPTIONS = ("image", "label", "objects", "mask")
_SLICE = re.compile(r"^(?P<split>[^\[]+)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]$")


class HFImages(ImageSet):
    """One split of a Hugging Face dataset; images stay encoded until they are read.

    split "train" is the split named in the spec, else "train", else the first. "heldout" is the dataset's validation or
    test split, but never the one trained on; where there is no other, `is_heldout` picks rows of that one. "all" is the
    split named, else the held-out one, else everything.

    objects: the column "objects", or one named, is read in place of labels, and that of masks where one is named.

    A spec that names a validation or test split of a dataset with others to train on means that split, held out: to train
    on it is a ValueError.
    """

    def __init__(self, spec: str, split: str, *, hold_out: bool = True, objects: bool = False) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(f"source {spec!r} needs the package `datasets`: pip install datasets") from error
        place, _, query = spec[len("hf:") :].partition("?")
        options = dict(parse_qsl(query))
        for key in options.keys() - set(_OPTIONS):
            raise ValueError(
                f"source {spec!r}: unknown option {key!r}; expected {' or '.join(map(repr, _OPTIONS))}, or 'split=heldout'"
            )
        name, config, named = _parts(spec, place)
        splits = _splits(datasets, name, config)
        whole = named or ("train" if "train" in splits else next(iter(splits)))
        trained = _SLICE.sub(r"\g<split>", whole)
        heldout = next((part for part in HELDOUT_NAMES if part in splits and part != trained), None)
        others = [part for part in splits if part not in HELDOUT_NAMES]
        if trained in HELDOUT_NAMES and others:
            if split == "train":
                raise ValueError(
                    f"source {spec!r} names a held-out split: train on {' or '.join(others)}, and give this as heldout_source"
                )
            heldout = whole
        chosen = named or heldout or whole if split == "all" else heldout if split == "heldout" and heldout else whole
        data = _rows(spec, splits, chosen)
        if split != "all" and hold_out and heldout is None:
            self.among = len(data)
            data = data.select(heldout_places((f"row {row}" for row in range(len(data))), split))
        if not len(data):
            raise ValueError(f"source {spec!r}: split {chosen!r} has no row for {split!r}")
        self.spec, self.split = spec, chosen
        image, label, mask = _columns(spec, data.features, options, objects, datasets)
        self.image, self.label, self.mask = image, label, mask
        feature = data.features.get(label)
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        for column in filter(None, (image, mask)):
            data = data.cast_column(column, datasets.Image(decode=False))
        self.data = data.select_columns([column for column in (image, label, mask) if column])
        self.fingerprint = digest_of([name, config, chosen, len(data), self.data._fingerprint])

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
        image = self._image(row)
        mask = None if not self.mask or row[self.mask] is None else _bytes(row[self.mask])
        fields = row[self.label] if self.label else None
        if isinstance(fields, list):  # a list of objects, each with its box
            fields = {
                key: [one[key] for one in fields] for key in (fields[0] if fields else {"bbox": 0, "category": 0})
            }
        return image, parse_objects(fields, mask=mask)

    def _image(self, row: dict[str, Any]) -> bytes:
        if row[self.image] is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        return _bytes(row[self.image])

    def name(self, index: int) -> str:
        return f"{self.spec}[{self.split}][{index}]"


def _bytes(stored: dict[str, Any]) -> bytes:
    return stored["bytes"] if stored["bytes"] is not None else Path(stored["path"]).read_bytes()


def _parts(spec: str, place: str) -> tuple[str, str | None, str | None]:
    """(name, configuration, split) of NAME[:CONFIG][:SPLIT]; a split may be a slice (see `_rows`)."""
    name, config, split = [*place.split(":", 2), "", ""][:3]
    if not name:
        raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
    if config.partition("[")[0] in ("train", *HELDOUT_NAMES):  # "hf:name:validation" can only mean the split
        config, split = "", f"{config}:{split}" if split else config
    return name, config or None, split or None


def _rows(spec: str, splits: dict[str, Any], named: str) -> Any:
    """The rows of a split, or of a slice such as "train[:80%]" or "train[100:-50]"; percentages to the nearest row."""
    match = _SLICE.match(named)
    split = match["split"] if match else named
    if split not in splits:
        raise ValueError(
            f"source {spec!r}: no split {split!r} among {', '.join(splits)}; {did_you_mean(split, splits)}"
        )
    data = splits[split]
    if not match:
        return data
    ends = [match["start"], match["stop"]]
    places = [round(len(data) * int(e[:-1]) / 100) if e and e.endswith("%") else e and int(e) for e in ends]
    return data.select(range(*slice(*places).indices(len(data))) or [])


def _splits(datasets: Any, name: str, config: str | None) -> dict[str, Any]:
    """The dataset's splits by name. A folder that `save_to_disk` wrote is read as it is."""
    folder = Path(name)
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return dict(datasets.load_dataset(name, config))
    loaded = datasets.load_from_disk(name)
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if config:
        raise ValueError(
            f"{name} was saved by save_to_disk and has no configuration {config!r}; its splits are "
            f"{', '.join(splits)}; {did_you_mean(config, splits)}".rstrip("; ")
        )
    return splits


def _columns(
    spec: str, features: Any, options: dict[str, str], objects: bool, datasets: Any
) -> tuple[str, str, str | None]:
    """(image, label or objects, mask): the columns named, or the only ones of their types; label "" where masks are all."""
    plain = (datasets.Image, datasets.ClassLabel, datasets.Value)
    whole = [
        name for name, one in features.items() if isinstance(one, datasets.Value) and one.dtype.lstrip("u")[:3] == "int"
    ]

    def of_type(kind: type | tuple[type, ...]) -> list[str]:
        return [name for name, one in features.items() if isinstance(one, kind)]

    def column(role: str, fitting: list[str], what: str) -> str:
        named = options.get(role)
        if named is not None and named not in features:
            hint = did_you_mean(named, features)
            raise ValueError(f"source {spec!r}: no column {named!r} among {', '.join(features)}; {hint}".rstrip("; "))
        if named in fitting or (named is None and len(fitting) == 1):
            return named or fitting[0]
        there = ", ".join(fitting) or f"none among {', '.join(features)}"
        if named is not None:
            there = f"{named!r} of another, {features[named]!r:.80}; there is {there}"
        elif fitting:
            there = f"several: {there}"
        raise ValueError(
            f"source {spec!r}: expected one column of type {what}, found {there}; name it with '?image=…&label=…', or of boxes "
            "and masks with '?image=…&objects=…&mask=…'"
        )

    images, labels = of_type(datasets.Image), of_type(datasets.ClassLabel)
    mask = column("mask", images, "Image") if objects and "mask" in options else None
    image = column("image", [name for name in images if name != mask], "Image")
    if mask and "objects" not in (*options, *features):
        return image, "", mask
    if objects:
        options = {"objects": "objects"} | options
        return image, column("objects", [name for name in features if name not in of_type(plain)], "objects"), mask
    named = options.get("label", "" if labels else "label")  # whole numbers are labels where they are called so
    return image, named if named in whole else column("label", labels, "ClassLabel"), None
