"""Recipes by name: `<modality>.<recipe>`, from the module that each modality names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial

from modalities.contract import find_modality, modality_names
from recipes.config import ConfigError, Recipe
from zoo.naming import nearest
from zoo.outside import import_file
from zoo.registry import list_models, model_entry

__all__ = ["Recipes", "find_recipe", "list_recipes", "recipe_named"]


class Recipes(MutableMapping[str, Callable[[], Recipe]]):
    """The named recipes of a modality: a function each, called when the recipe is asked for.

    Iterating gives the recipes of models that are listed; those of other models, such as sums of methods, are found by name.
    """

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self._own: dict[str, Callable[[], Recipe]] = {}
        # size, model's size, recipe of a method, methods that have none
        self._families: list[tuple[str, str, Callable[[str], Recipe], Collection[str]]] = []

    def add(self, function: Callable[[], Recipe]) -> Callable[[], Recipe]:
        """Register a recipe under its function's name; a decorator."""
        self[function.__name__] = function
        return function

    def add_methods(
        self, size: str, build: Callable[[str], Recipe], *, model_size: str = "", without: Collection[str] = ()
    ) -> None:
        """`<method>_<size>` for every registered model `<modality>_<method>_<model_size>` that has no recipe of that name.

        model_size: `size` where empty.  without: methods that the recipe does not fit, with SSMax or without.
        """
        self._families.append((size, model_size or size, build, without))

    def __getitem__(self, name: str) -> Callable[[], Recipe]:
        """Raises ValueError for a sum of methods with a part that is no method, KeyError for other unknown names."""
        if name in self._own:
            return self._own[name]
        for size, model_size, build, without in self._families:
            method = name.removesuffix(f"_{size}")
            if method == name or method.removesuffix("_ssmax") in without:
                continue
            if self._has_model(f"{self.modality}_{method}_{model_size}", summed="+" in method):
                return partial(build, method)
        raise KeyError(name)

    @staticmethod
    def _has_model(name: str, *, summed: bool) -> bool:
        try:
            model_entry(name)
        except ValueError:
            if summed:
                raise
            return False
        return True

    def __setitem__(self, name: str, function: Callable[[], Recipe]) -> None:
        self._own[name] = function

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        names = list(self._own)
        for size, model_size, _, without in self._families:
            start, end = f"{self.modality}_", f"_{model_size}"
            models = list_models(f"{start}*{end}", modality=self.modality)
            methods = [model.removeprefix(start).removesuffix(end) for model in models]
            names += [f"{method}_{size}" for method in methods if method.removesuffix("_ssmax") not in without]
        return iter(dict.fromkeys(names))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
            if short in table:
                return table[short]()
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from error
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")


def recipe_named(word: str) -> Recipe:
    """The recipe that a command line names: `find_recipe`, or for FILE.py[:function] one in a file, which is imported.

    The file holds a table, `RECIPES = Recipes("text")` with functions added by `@RECIPES.add`, or functions without arguments
    annotated `-> Recipe`. Where there are several, `:function` chooses.

    Raises:
        ConfigError: where there is no such recipe, or the file cannot be imported.
    """
    path, separator, wanted = word.rpartition(":") if re.search(r"\.py:\w*$", word) else (word, "", "")
    if not path.endswith(".py"):
        return find_recipe(word)
    try:
        module = import_file(path)
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    found: Mapping[str, Callable[[], Recipe]] = getattr(module, "RECIPES", None) or {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not inspect.signature(value).parameters
        and inspect.signature(value).return_annotation in (Recipe, "Recipe")
    }
    names = ", ".join(found) or "none"
    if not separator and len(found) != 1:
        raise ConfigError(
            f"{path} has {len(found)} recipes ({names}), expected one, or a name behind the file: {path}:FUNCTION. A recipe is "
            "a function without arguments annotated `-> Recipe`, or one added to `RECIPES = Recipes(MODALITY)`"
        )
    if separator and wanted not in found:
        raise ConfigError(f"{path} has no recipe {wanted!r}; {nearest(wanted, found) if found else 'it has none'}")
    made = found[wanted or next(iter(found))]()
    if not isinstance(made, Recipe):
        raise ConfigError(f"the recipe in {word} returns {type(made).__name__}, expected a recipes.config.Recipe")
    return made
