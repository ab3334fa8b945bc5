"""Models by name: register_model, create_model, list_models.

Names read `<modality>_<prior>_<size>`; `<name>.<tag>` is the same architecture with a set of shipped weights. A modality
registers its models when it is imported, and is imported on first use through the entry-point group `priorzoo.modalities`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from zoo import pretrained as weights
from zoo.naming import did_you_mean

__all__ = ["ModelEntry", "create_model", "list_models", "model_entry", "register_model"]


@dataclass(frozen=True)
class ModelEntry:
    """A registered architecture: `build(**config)` makes it; `config` is JSON."""

    name: str
    modality: str
    build: Callable[..., nn.Module]
    config: dict[str, Any]


_ENTRIES: dict[str, ModelEntry] = {}


def register_model(name: str, build: Callable[..., nn.Module], *, modality: str, config: dict[str, Any]) -> ModelEntry:
    """Add an architecture.

    Raises:
        ValueError: for a name that is taken, or one with a dot, which separates the tag of weights.
    """
    if "." in name:
        raise ValueError(f"model name {name!r} has a dot; the part after a dot is a tag of weights")
    if name in _ENTRIES:
        raise ValueError(f"model {name!r} is registered already")
    _ENTRIES[name] = ModelEntry(name, modality, build, dict(config))
    return _ENTRIES[name]


@cache
def _load_modality(name: str) -> str:
    """Import a modality, which registers its models; returns a message if an optional package is missing, else ""."""
    for point in entry_points(group="priorzoo.modalities", name=name):
        try:
            point.load()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("zoo", "modalities"):
                raise
            return f"{name} models need the package {error.name}: pip install 'priorzoo[{name}]'"
    return ""


def _load_modalities(name: str | None = None) -> list[str]:
    """Import one modality, or all; returns messages for those that lack an optional package."""
    known = entry_points(group="priorzoo.modalities").names
    return [missing for modality in (known & {name} or known) if (missing := _load_modality(modality))]


def model_entry(name: str) -> ModelEntry:
    """The entry of an architecture, with or without a tag of weights behind it.

    Raises:
        ValueError: for an unknown name, with the nearest known ones.
    """
    missing = _load_modalities(name.partition("_")[0])
    base = name.partition(".")[0]
    if base not in _ENTRIES:
        missing += _load_modalities()
    if base not in _ENTRIES:
        if not _ENTRIES and not missing:
            raise ValueError("no modality is registered: install the package, for example with `pip install -e .`")
        hint = did_you_mean(base, _ENTRIES, most=3)
        known = f"`python -m zoo list` prints all {len(_ENTRIES)}"
        raise ValueError("; ".join([f"unknown model {base!r}", hint + known, *dict.fromkeys(missing)]))
    return _ENTRIES[base]


def create_model(name: str, *, pretrained: bool = False, **overrides: Any) -> nn.Module:
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
    _load_modalities(modality)
    known = weights.list_weights() if pretrained else list(_ENTRIES)
    known = [name for name in known if name.partition(".")[0] in _ENTRIES]
    if modality is not None:
        known = [name for name in known if _ENTRIES[name.partition(".")[0]].modality == modality]
    return sorted(name for name in known if fnmatch.fnmatch(name, pattern))
