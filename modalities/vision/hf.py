"""Hugging Face datasets as image sets. `datasets` takes seconds to import, so it is imported when a source needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from modalities.vision.images import HELDOUT_NAMES, BadImage, ImageSet, digest_of, heldout_places
from zoo.errors import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset


class HFImages(ImageSet):
    """One split of a Hugging Face dataset; images stay encoded until they are read.

    split "train" is the split named in the spec, else "train", else the first. "heldout" is the dataset's validation or test
    split, but never the one trained on; where there is no other, rows that `is_heldout` picks. "all" is the split named, else
    the held-out one, else everything. A spec that names a validation or test split of a dataset with others to train on
    means that split, held out: to train on it is a ValueError.
    """

    def __init__(self, spec: str, split: str, *, hold_out: bool = True) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(f"source {spec!r} needs the package `datasets`: pip install datasets") from error
        place, _, query = spec[len("hf:") :].partition("?")
        options = dict(parse_qsl(query))
        if unknown := sorted(options.keys() - {"image", "label"}):
            raise ValueError(f"source {spec!r}: unknown option {unknown[0]!r}; expected image, label or split=heldout")
        name, config, named = _parts(spec, place)
        splits = _splits(name, config)
        trained = named or ("train" if "train" in splits else next(iter(splits)))
        heldout = next((part for part in HELDOUT_NAMES if part in splits and part != trained), None)
        others = " or ".join(part for part in splits if part not in HELDOUT_NAMES)
        if trained in HELDOUT_NAMES and others:
            if split == "train":
                what = f"train on {others}, and give this as heldout_source"
                raise ValueError(f"source {spec!r} names a held-out split: {what}")
            heldout = trained
        self.spec, self.split = spec, trained
        if split != "train":
            self.split = (named if split == "all" else None) or heldout or trained
        if self.split not in splits:
            hint = did_you_mean(self.split, splits)
            raise ValueError(f"source {spec!r}: no split {self.split!r} among {', '.join(splits)}; {hint}".rstrip("; "))
        data = splits[self.split]
        if split != "all" and hold_out and heldout is None:
            self.among = len(data)
            data = data.select(heldout_places((f"row {row}" for row in range(len(data))), split))
        if not len(data):
            raise ValueError(f"source {spec!r}: split {self.split!r} has no row for {split!r}")
        self.image = _column(spec, data.features, "image", options.get("image"))
        self.label = _column(spec, data.features, "label", options.get("label"))
        feature = data.features[self.label]
        self.classes = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        self.data = data.cast_column(self.image, datasets.Image(decode=False)).select_columns([self.image, self.label])
        self.fingerprint = digest_of([name, config, self.split, len(data), self.data._fingerprint])

    def __len__(self) -> int:
        return len(self.data)

    def read(self, index: int) -> tuple[bytes, int]:
        row = self.data[index]
        image, label = row[self.image], row[self.label]
        if image is None:
            raise BadImage("no image", f"column {self.image!r} is null")
        if label is None or label == -1:  # -1 is a ClassLabel's missing label
            raise BadImage("no label", f"column {self.label!r} is {label}")
        return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes(), int(label)

    def name(self, index: int) -> str:
        return f"{self.spec}[{self.split}][{index}]"


def _parts(spec: str, place: str) -> tuple[str, str | None, str | None]:
    """(name, configuration, split) of NAME[:CONFIG][:SPLIT]."""
    name, config, split = [*place.split(":", 2), "", ""][:3]
    if not name:
        raise ValueError(f"source {spec!r}: expected 'hf:NAME[:CONFIG][:SPLIT]'")
    if not split and config in ("train", *HELDOUT_NAMES):  # "hf:name:validation" can only mean the split
        config, split = "", config
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


def _column(spec: str, features: Mapping[str, object], role: str, named: str | None) -> str:
    """The column of images, or of labels: the one named, else the only one of its type; "label" may be whole numbers."""
    import datasets

    kind = datasets.Image if role == "image" else datasets.ClassLabel
    fitting = [name for name, feature in features.items() if isinstance(feature, kind)]
    if role == "label":
        numbers = named or ("" if fitting else "label")
        feature = features.get(numbers)
        if isinstance(feature, datasets.Value) and feature.dtype.lstrip("u").startswith("int"):
            return numbers
    if named in fitting or (named is None and len(fitting) == 1):
        return named or fitting[0]
    hint = did_you_mean(named or "", fitting)
    what = f"expected one column of type {kind.__name__} among {', '.join(features)}"
    raise ValueError(f"source {spec!r}: {what}, got {named or fitting}; {hint}name it with '?{role}=COLUMN'")
