"""Recipes by name: `<modality>.<recipe>`, from the module that each modality names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from modalities.contract import find_modality, modality_names
from recipes.config import ConfigError, Recipe
from zoo.naming import nearest

__all__ = ["Recipes", "find_recipe", "list_recipes"]


class Recipes(dict[str, Callable[[], Recipe]]):
    """The named recipes of a modality: a function each, called when the recipe is asked for."""

    def __init__(self, modality: str) -> None:
        super().__init__()
        self.modality = modality

    def add(self, function: Callable[[], Recipe]) -> Callable[[], Recipe]:
        """Register a recipe under its function's name; a decorator."""
        self[function.__name__] = function
        return function

    def add_methods(self, size: str, build: Callable[[str], Recipe], *, model_size: str = "") -> None:
        """`<method>_<size>` for every registered model `<modality>_<method>_<model_size>` that has no recipe of that name.

        model_size: `size` where empty.
        """
        from zoo import list_models

        start, end = f"{self.modality}_", f"_{model_size or size}"
        for model in list_models(f"{start}*{end}", modality=self.modality):
            method = model.removeprefix(start).removesuffix(end)
            self.setdefault(f"{method}_{size}", partial(build, method))


def _recipes_of(modality: str) -> Recipes:
    module = find_modality(modality).recipes
    return importlib.import_module(module).RECIPES if module else Recipes(modality)


def list_recipes() -> list[str]:
    """Every recipe by name, of the modalities whose packages are installed."""
    names = []
    for modality in modality_names():
        try:
            names += [f"{modality}.{name}" for name in _recipes_of(modality)]
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError):  # a module of the modality itself
                raise
    return names


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ConfigError names the nearest one, or the package that its modality lacks."""
    modality, _, short = name.partition(".")
    if modality in modality_names():
        try:
            table = _recipes_of(modality)
        except ImportError as error:
            raise ConfigError(str(error)) from error
        if short in table:
            return table[short]()
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")
