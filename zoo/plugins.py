"""Code from outside the core: modalities by entry point, and modules that a user names.

Packages have modalities through the entry-point group `priorzoo.modalities`. Files and modules with
priors of a user's own come through `import_named`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from zoo.errors import nearest
from zoo.model import ZooModel

GROUP = "priorzoo.modalities"
# The package whose SHIPPED has the entry points of this project's modalities.
SHIPPED_IN = "modalities"


class HasModel(Protocol):
    """What the core knows of a `modalities.contract.Modality`."""

    model: type[ZooModel]
    headline: tuple[str, ...]


@cache
def shipped_modalities() -> dict[str, EntryPoint]:
    """Entry points of the modalities of this project, by name; they need no installation."""
    values = importlib.import_module(SHIPPED_IN).SHIPPED
    return {name: EntryPoint(name, value, GROUP) for name, value in values.items()}


@cache
def _modalities() -> dict[str, EntryPoint]:
    """Entry points by name: of those that ship, then of installed ones with other names."""
    shipped = shipped_modalities()
    installed = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return shipped | {point.name: point for point in installed if point.name not in shipped}


def modality_names() -> list[str]:
    """Every modality, whether or not the packages it needs are installed."""
    return list(_modalities())


@cache
def load_modality(name: str) -> HasModel:
    """The object that a modality's entry point names; importing it registers the modality's models.

    Raises:
        ValueError: for an unknown name; it names the nearest.
        ImportError: where a package it needs is missing.
    """
    if name not in _modalities():
        raise ValueError(f"no modality {name!r}; {nearest(name, modality_names())}")
    return _load(_modalities()[name], EntryPoint.load)


def modality_module(name: str) -> ModuleType:
    """The module that a modality's entry point names; cheaper than `load_modality` where that makes
    its object lazily."""
    return _load(_modalities()[name], lambda point: importlib.import_module(point.module))


def headline_scores(name: str) -> tuple[str, ...]:
    """Names of a modality's scores for a table of its weights, the most telling first.

    They are those of its module's HEADLINE, which needs no further package, or of its object.
    """
    scores = getattr(modality_module(name), "HEADLINE", None)
    return load_modality(name).headline if scores is None else scores


def _load(point: EntryPoint, load: Callable[[EntryPoint], Any]) -> Any:
    """What `load` gives. ImportError with the pip command, where a package of another project is
    missing."""
    try:
        return load(point)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # A missing module of its own, or of this project, is a fault and no missing package.
        if package in {"zoo", "modalities", "recipes", point.module.partition(".")[0]}:
            raise
        message = f"{point.name} needs the package {error.name}"
        if point.name in shipped_modalities():
            message += f": pip install 'priorzoo[{point.name}]'"
        raise ImportError(message) from error


def import_named(names: list[str]) -> None:
    """Import what `--import` names: files that end in .py, and modules by their dotted names."""
    for name in names:
        if name.endswith(".py"):
            import_file(name)
        else:
            importlib.import_module(name)


def import_file(path: str | Path) -> ModuleType:
    """The module in a file. Named twice, it is imported once. ImportError with the cause where that
    fails."""
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(path)!r} to import")
    # Unlike the name of any module on the path.
    name = "outside" + re.sub(r"\W", "_", str(file.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file: expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportError(f"importing {path} fails: {type(error).__name__}: {error}") from error
    return module
