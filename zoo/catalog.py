"""Models by name: `<modality>_<method>[_ssmax]_<size>`, with a set of weights
`<modality>_<method>[_ssmax]_<size>.<tag>`.

A name is read from its ends. Its modality is imported, which registers families; `ModelFamily.find`
takes size and method; the tag is looked up in weights/manifest.json.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import did_you_mean, one_line
from zoo.files import read_object, read_tensors
from zoo.model import ZooModel
from zoo.plugins import load_modality, modality_module, modality_names
from zoo.pretrained import manifest, verified_file, weights_entry


@dataclass(frozen=True)
class ModelEntry:
    """A registered architecture: `build(**config)` makes it; `config` is JSON."""

    name: str
    modality: str
    build: Callable[..., ZooModel]
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """`<modality>_<method>_<size>` and `<modality>_<method>_ssmax_<size>` for every position method
    and size.

    An entry is made by `find`, so methods registered later and sums of methods have theirs too.

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
        methods = self.methods()
        names = []
        for size in self.sizes:
            for method in methods:
                names.append(f"{self.modality}_{method}_{size}")
                names.append(f"{self.modality}_{method}_ssmax_{size}")
        return names

    def find(self, name: str) -> ModelEntry | None:
        """The entry of a name; None where it is none of this family. ValueError for a sum with a
        part that is no method."""
        for size in self.sizes:
            method = name.removeprefix(f"{self.modality}_").removesuffix(f"_{size}")
            if name != f"{self.modality}_{method}_{size}":
                continue
            plain = method.removesuffix("_ssmax")
            try:
                self.check(plain)
            except ValueError:
                if "+" in plain:
                    raise
                continue
            config = self.config(plain, size, plain != method)
            return ModelEntry(name, self.modality, self.build, config)
        return None


_ENTRIES: dict[str, ModelEntry] = {}
_FAMILIES: list[ModelFamily] = []


def _find(name: str) -> ModelEntry | None:
    """The entry of an architecture among the modalities that are imported."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    for family in _FAMILIES:
        entry = family.find(name)
        if entry is not None:
            return entry
    return None


def _listed() -> list[str]:
    """Names of the architectures of the modalities that are imported."""
    names = [*_ENTRIES]
    for family in _FAMILIES:
        names += family.names()
    return names


def register_model(
    name: str, build: Callable[..., ZooModel], *, modality: str, config: dict[str, Any]
) -> ModelEntry:
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


def model_entry(name: str) -> ModelEntry:
    """The entry of an architecture, with or without a tag of weights behind it. ValueError for an
    unknown name."""
    base = name.partition(".")[0]
    modality = base.partition("_")[0]
    # A name that does not begin with a modality may be registered by any of them.
    modalities = [modality] if modality in modality_names() else modality_names()
    missing = _register_models(modalities)
    entry = _find(base)
    if entry is None:
        hint = f"{did_you_mean(base, _listed(), most=3)}`priorzoo list` prints all"
        raise ValueError("; ".join([f"unknown model {base!r}", hint, *dict.fromkeys(missing)]))
    return entry


def create_model(name: str, **overrides: object) -> ZooModel:
    """Make a model.

    Args:
        name: an architecture, or `<architecture>.<tag>`, which loads those weights.
        overrides: entries of its config to replace, such as
            `position_options={"scaling": "yarn", "factor": 8.0}`.

    Raises:
        ValueError: for an unknown name, override, or tag, a damaged file of weights, or weights
            that an override does not fit.
    """
    entry = model_entry(name)
    unknown = [key for key in overrides if key not in entry.config]
    if unknown:
        hint = did_you_mean(unknown[0], entry.config)
        raise ValueError(
            f"{entry.name} has no setting {unknown[0]!r}; {hint}It has: {', '.join(entry.config)}"
        )
    tensors = read_tensors(verified_file(name)) if "." in name else None
    model = entry.build(**{**entry.config, **overrides})
    if tensors is not None:
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(
                f"the weights of {name} do not fit this model: {one_line(error)}"
            ) from error
        model.class_names = tuple(weights_entry(name).get("class_names", ()))
    return model


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Names that match a shell pattern: architectures, or with `pretrained` the tagged names that
    have weights."""
    # Every match starts with what is before the first wildcard: modalities with other names need
    # not be imported.
    start = re.split(r"[*?[]", pattern)[0]
    modalities = []
    for name in modality_names():
        prefix = f"{name}_"
        if prefix.startswith(start) or start.startswith(prefix):
            modalities.append(name)
    _register_models(modalities)
    names = fnmatch.filter(manifest() if pretrained else _listed(), pattern)
    return sorted(name for name in names if _find(name.partition(".")[0]))


def load_model(folder: str | os.PathLike[str]) -> ZooModel:
    """The model in a folder written by `save_pretrained`, of the modality that its config.json
    names.

    A folder that holds one as model/, such as a finished run or a checkpoint, stands for it, and so
    does a name with weights.

    Raises:
        ValueError: where there is no config.json, or it is of no modality known here.
        FileNotFoundError, ImportError: see `ZooModel.from_pretrained` and `load_modality`.
    """
    if not os.path.isdir(folder) and str(folder) in manifest():
        return create_model(str(folder))
    folder = Path(folder)
    inner = folder / "model"
    if not (folder / "config.json").is_file() and (inner / "config.json").is_file():
        folder = inner
    modality = saved_modality(folder)
    if modality is None:
        raise ValueError(
            f"{folder}: no config.json of a known model; "
            "expected a folder written by save_pretrained"
        )
    return load_modality(modality).model.from_pretrained(folder)


def saved_modality(folder: str | os.PathLike[str]) -> str | None:
    """The modality that a folder's config.json names; None where neither is there. ValueError for a
    damaged one."""
    try:
        modality = read_object(Path(folder) / "config.json").get("modality")
    except OSError:
        return None
    return modality if isinstance(modality, str) else None


def _register_models(names: Iterable[str]) -> list[str]:
    """Import the modules of modalities, which register their models; returns what those that cannot
    be imported lack."""
    missing = []
    for name in names:
        try:
            modality_module(name)
        except ImportError as error:
            missing.append(str(error))
    return missing
