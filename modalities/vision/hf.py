"""Hugging Face datasets as image sets. `datasets` takes seconds to import, so it is imported when a source needs it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from modalities.vision.images import HELDOUT_NAMES, BadImage, ImageSet, digest_of, is_heldout
from modalities.vision.objects import Objects, parse_objects
from zoo.naming import did_you_mean

__all__ = ["HFImages"]

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
        for key in options:
            if key not in _OPTIONS:
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
            wanted, self.among = split == "heldout", len(data)
            data = data.select([row for row in range(len(data)) if is_heldout(f"row {row}") == wanted])
        if not len(data):
            raise ValueError(f"source {spec!r}: split {chosen!r} has no row for {split!r}")
        self.spec, self.split, self.mask = spec, chosen, None

        def is_image(feature: Any) -> bool:
            return isinstance(feature, datasets.Image)

        def holds_fields(feature: Any) -> bool:
            return not isinstance(feature, (datasets.Image, datasets.ClassLabel, datasets.Value))

        if objects and "mask" in options:
            self.mask = _column(spec, data, options["mask"], is_image, "Image")
        self.image = _column(spec, data, options.get("image"), is_image, "Image", but=self.mask)
        if self.mask and "objects" not in (*options, *data.features):
            self.label = ""  # masks alone
        elif objects:
            self.label = _column(spec, data, options.get("objects", "objects"), holds_fields, "objects")
        else:
            self.label = _label_column(spec, data, options.get("label"), datasets)
        feature = data.features.get(self.label)
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        data = data.cast_column(self.image, datasets.Image(decode=False))
        if self.mask:
            data = data.cast_column(self.mask, datasets.Image(decode=False))
        self.data = data.select_columns([column for column in (self.image, self.label, self.mask) if column])
        self.fingerprint = digest_of([name, config, chosen, len(data), self.data._fingerprint])

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.data[index]
        stored, label = row[self.image], row[self.label]
        if stored is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        if label is None or label == -1:  # -1 is a ClassLabel's missing label
            raise BadImage("no label", f"column {self.label!r} is {label}")
        return _bytes(stored), int(label)

    def read_objects(self, index: int) -> tuple[bytes, Objects]:
        row = self.data[index]
        if row[self.image] is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        mask = None if not self.mask or row[self.mask] is None else _bytes(row[self.mask])
        fields = row[self.label] if self.label else None
        if isinstance(fields, list):  # a list of objects, each with its box
            fields = {
                key: [one[key] for one in fields] for key in (fields[0] if fields else {"bbox": 0, "category": 0})
            }
        return _bytes(row[self.image]), parse_objects(fields, mask=mask)

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
    found = _SLICE.match(named)
    split = found["split"] if found else named
    if split not in splits:
        raise ValueError(
            f"source {spec!r}: no split {split!r} among {', '.join(splits)}; {did_you_mean(split, splits)}"
        )
    data = splits[split]
    if not found:
        return data
    ends = [found["start"], found["stop"]]
    places = [round(len(data) * int(e[:-1]) / 100) if e and e.endswith("%") else e and int(e) for e in ends]
    return data.select(range(*slice(*places).indices(len(data))) or [])


def _splits(datasets: Any, name: str, config: str | None) -> dict[str, Any]:
    """The dataset's splits by name. A folder that `save_to_disk` wrote is read as it is."""
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        loaded = datasets.load_from_disk(name)
        splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        if config:
            raise ValueError(
                f"{name} was saved by save_to_disk and has no configuration {config!r}; its splits are "
                f"{', '.join(splits)}; {did_you_mean(config, splits)}".rstrip("; ")
            )
        return splits
    return dict(datasets.load_dataset(name, config))


def _column(
    spec: str, data: Any, named: str | None, fits: Callable[[Any], bool], what: str, *, but: str | None = None
) -> str:
    """The column named, or the only one, whose type `fits`."""
    columns = [column for column, feature in data.features.items() if fits(feature) and column != but]
    if named is not None and named in columns:
        return named
    if named is not None and named not in data.features:
        raise ValueError(
            f"source {spec!r}: no column {named!r} among {', '.join(data.features)}; "
            f"{did_you_mean(named, data.features)}".rstrip("; ")
        )
    if named is not None or len(columns) != 1:
        found = f"{named!r} of another, {data.features[named]!r:.80}; there is " if named is not None else ""
        several = "several: " if len(columns) > 1 and not found else ""
        found += f"{several}{', '.join(columns)}" if columns else f"none among {', '.join(data.features)}"
        raise ValueError(
            f"source {spec!r}: expected one column of type {what}, found {found}; name it with '?image=…&label=…', or of boxes "
            "and masks with '?image=…&objects=…&mask=…'"
        )
    return columns[0]


def _label_column(spec: str, data: Any, named: str | None, datasets: Any) -> str:
    """The ClassLabel column; where there is none, a column of whole numbers called "label"."""
    none = not any(isinstance(feature, datasets.ClassLabel) for feature in data.features.values())
    if named is None and none and getattr(data.features.get("label"), "dtype", "").startswith("int"):
        return "label"
    if isinstance(feature := data.features.get(named), datasets.Value) and feature.dtype.startswith(("int", "uint")):
        return str(named)
    return _column(spec, data, named, lambda feature: isinstance(feature, datasets.ClassLabel), "ClassLabel")
