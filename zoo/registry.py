"""Models by name: register_model, create_model, list_models.

Names read `<modality>_<method>_<size>`; `<name>.<tag>` is the same architecture with a set of shipped weights. A modality
registers its models when it is imported, and is imported when a name asks for it: the three that ship, and those of other
packages through the entry-point group `priorzoo.modalities`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from zoo import pretrained as weights
from zoo.inputs import read_object
from zoo.model import ZooModel
from zoo.naming import did_you_mean, nearest

__all__ = [
    "ModelEntry",
    "ModelFamily",
    "create_model",
    "list_models",
    "load_modality",
    "load_model",
    "modality_names",
    "model_entry",
    "register_family",
    "register_model",
    "saved_modality",
]

GROUP = "priorzoo.modalities"
SHIPPED = {
    "text": EntryPoint("text", "modalities.text:MODALITY", GROUP),
    "vision": EntryPoint("vision", "modalities.vision:MODALITY", GROUP),
    "dna": EntryPoint("dna", "modalities.dna:MODALITY", GROUP),
}


@dataclass(frozen=True)
class ModelEntry:
    """A registered architecture: `build(**config)` makes it; `config` is JSON."""

    name: str
    modality: str
    build: Callable[..., ZooModel]
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """`<modality>_<method>_<size>` and `<modality>_<method>_ssmax_<size>` for every position method and size.

    Entries are made when they are asked for, so methods registered later and sums of methods have theirs too.

    Attributes:
        build: `build(**config)` makes a model.
        sizes: what a size's models have in common, by its name.
        config: (method, size, ssmax) → the configuration, JSON.
        methods: names that are listed.
        check: raises ValueError for what is no method and no sum of methods.
    """

    modality: str
    build: Callable[..., ZooModel]
    sizes: Mapping[str, object]
    config: Callable[[str, str, bool], dict[str, Any]]
    methods: Callable[[], list[str]]
    check: Callable[[str], None]

    def names(self) -> list[str]:
        """Every name that is listed: sums without a name of their own are not."""
        return [
            f"{self.modality}_{method}{ssmax}_{size}"
            for size in self.sizes
            for method in self.methods()
            for ssmax in ("", "_ssmax")
        ]

    def find(self, name: str) -> ModelEntry | None:
        """The entry of a name; None where it is none of this family.

        Raises:
            ValueError: for a sum with a part that is no method.
        """
        for size in self.sizes:
            start, end = f"{self.modality}_", f"_{size}"
            if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end):
                method = name.removeprefix(start).removesuffix(end)
                plain = method.removesuffix("_ssmax")
                try:
                    self.check(plain)
                except ValueError:
                    if "+" in plain:
                        raise
                    continue
                return ModelEntry(name, self.modality, self.build, self.config(plain, size, plain != method))
        return None


_ENTRIES: dict[str, ModelEntry] = {}
_FAMILIES: list[ModelFamily] = []


def _find(name: str) -> ModelEntry | None:
    """The entry of an architecture among the modalities that are imported."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    return next((entry for family in _FAMILIES if (entry := family.find(name))), None)


def _listed() -> list[str]:
    return [*_ENTRIES, *(name for family in _FAMILIES for name in family.names())]


def register_model(name: str, build: Callable[..., ZooModel], *, modality: str, config: dict[str, Any]) -> ModelEntry:
    """Add an architecture.

    Raises:
        ValueError: for a name that is taken, or one with a dot, which separates the tag of weights.
    """
    if "." in name:
        raise ValueError(f"model name {name!r} has a dot; the part after a dot is a tag of weights")
    if _find(name) is not None:
        raise ValueError(f"model {name!r} is registered already")
    _ENTRIES[name] = ModelEntry(name, modality, build, dict(config))
    return _ENTRIES[name]


def register_family(family: ModelFamily) -> None:
    """Add the architectures of a modality whose models differ in position method and size."""
    _FAMILIES.append(family)


@cache
def _points() -> dict[str, EntryPoint]:
    """Entry points of all modalities by name; those that ship win over installed ones of the same name."""
    return {point.name: point for point in entry_points(group=GROUP)} | SHIPPED


def modality_names() -> list[str]:
    """Every modality, whether or not the packages it needs are installed."""
    return list(SHIPPED) + sorted(_points().keys() - SHIPPED.keys())


@cache
def load_modality(name: str) -> Any:
    """The object that a modality's entry point names; importing it registers the modality's models.

    Raises:
        ValueError: for an unknown name; it names the nearest.
        ImportError: where a package it needs is missing.
    """
    points = _points()
    if name not in points:
        raise ValueError(f"no modality {name!r}; {did_you_mean(name, points)}there are {', '.join(modality_names())}")
    return _load(points[name])


def _load(point: EntryPoint, *, module_only: bool = False) -> Any:
    """A modality, or its module. ImportError with the pip command, where its packages are not installed."""
    try:
        return import_module(point.module) if module_only else point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in {"zoo", "modalities", "recipes", point.module.partition(".")[0]}:
            raise
        extra = f": pip install 'priorzoo[{point.name}]'" if point.name in SHIPPED else ""
        raise ImportError(f"{point.name} needs the package {error.name}{extra}") from error


def _register_models(names: Iterable[str]) -> list[str]:
    """Import the modules of modalities, which register their models; returns what those that cannot be imported lack."""
    missing = []
    for name in names:
        try:
            _load(_points()[name], module_only=True)
        except ImportError as error:
            missing.append(str(error))
    return missing


def model_entry(name: str) -> ModelEntry:
    """The entry of an architecture, with or without a tag of weights behind it.

    Raises:
        ValueError: for an unknown name, with the nearest known ones.
    """
    base = name.partition(".")[0]
    missing = _register_models({base.partition("_")[0]} & set(modality_names()) or modality_names())
    entry = _find(base)
    if entry is None:
        names = _listed()
        known = f"{did_you_mean(base, names, most=3)}`priorzoo list` prints all {len(names)}"
        raise ValueError("; ".join([f"unknown model {base!r}", known, *dict.fromkeys(missing)]))
    return entry


def create_model(name: str, *, pretrained: bool = False, **overrides: Any) -> ZooModel:
    """Make a model.

    Args:
        name: an architecture, or `<architecture>.<tag>`, which loads those weights.
        pretrained: load the architecture's shipped weights (the only tag, or the first listed in the manifest).
        overrides: entries of its config to replace, such as `position_options={"scaling": "yarn", "factor": 8.0}`.

    Raises:
        ValueError: for an unknown name, override, or tag.
    """
    entry = model_entry(name)
    unknown = [key for key in overrides if key not in entry.config]
    if unknown:
        hint = did_you_mean(unknown[0], entry.config)
        raise ValueError(f"{entry.name} has no setting {unknown[0]!r}; {hint}It has: {', '.join(entry.config)}")
    tagged = weights.resolve_tag(name) if pretrained or "." in name else None
    model = entry.build(**{**entry.config, **overrides})
    if tagged is not None:
        weights.load_pretrained(model, tagged)
    return model


def list_models(pattern: str = "*", *, modality: str | None = None, pretrained: bool = False) -> list[str]:
    """Names that match a shell pattern: architectures, or with `pretrained` the tagged names that have weights."""
    if modality is not None and modality not in modality_names():
        raise ValueError(f"no modality {modality!r}; {nearest(modality, modality_names())}")
    # What every match starts with tells which modalities need not be imported.
    start = re.split(r"[*?[]", pattern)[0]
    names = [modality] if modality else modality_names()
    _register_models(name for name in names if f"{name}_".startswith(start) or start.startswith(f"{name}_"))
    known = weights.list_weights() if pretrained else _listed()
    entries = {name: _find(name.partition(".")[0]) for name in fnmatch.filter(known, pattern)}
    return sorted(name for name, entry in entries.items() if entry and modality in (None, entry.modality))


def load_model(folder: str | os.PathLike[str]) -> ZooModel:
    """The model in a folder written by `save_pretrained`, of the modality that its config.json names.

    A folder that holds one as model/, such as a finished run or a checkpoint, stands for it, and so does a name with weights.

    Raises:
        ValueError: where there is no config.json, or it is of no modality known here.
        FileNotFoundError, ImportError: see `ZooModel.from_pretrained` and `load_modality`.
    """
    if not os.path.isdir(folder) and str(folder) in weights.list_weights():
        return create_model(str(folder))
    inner = Path(folder) / "model"
    if not (Path(folder) / "config.json").is_file() and (inner / "config.json").is_file():
        folder = inner
    modality = saved_modality(folder)
    if modality is None:
        raise ValueError(f"{folder}: no config.json of a known model; expected a folder written by save_pretrained")
    return load_modality(modality).model.from_pretrained(folder)


def saved_modality(folder: str | os.PathLike[str]) -> str | None:
    """The modality that a folder's config.json names; None where there is none, or it names none. ValueError for a damaged
    one."""
    try:
        modality = read_object(Path(folder) / "config.json").get("modality")
    except OSError:
        return None
    return modality if isinstance(modality, str) else None
