"""Recipes by name: tables of named recipes, families of them, and recipes in a user's file."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from modalities.contract import find_modality, modality_names
from recipes.commands import ConfigError
from recipes.recipe import Recipe
from zoo.catalog import list_models, model_entry
from zoo.errors import nearest
from zoo.plugins import import_file, modality_module


@dataclass(frozen=True)
class RecipeFamily:
    """Recipes `<prefix><method>_<size>` of the registered models
    `<modality>_<method>_<model_size>`.

    A recipe that is registered under such a name itself comes first. text.ggd_ssmax_tiny is method
    ggd_ssmax and size tiny, so `build("ggd_ssmax")` makes it; its model is text_ggd_ssmax_tiny.

    build: makes the recipe of a method.
    model_size: `size` where empty.
    without: methods that the family does not fit.
    listed: methods whose recipes are listed; None: all registered ones.
    """

    size: str
    build: Callable[[str], Recipe]
    model_size: str = ""
    without: Collection[str] = ()
    prefix: str = ""
    listed: Collection[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_size", self.model_size or self.size)

    def name(self, method: str) -> str:
        return f"{self.prefix}{method}_{self.size}"

    def fits(self, method: str) -> bool:
        return method.removesuffix("_ssmax") not in self.without


class Recipes(Mapping[str, Callable[[], Recipe]]):
    """The named recipes of a modality: functions that return a `Recipe`.

        RECIPES = Recipes("text")
        # tiny("alibi") is text.alibi_tiny, and so for each method
        RECIPES.add_family("tiny", tiny)

        @RECIPES.add
        def speeches() -> Recipe: ...    # text.speeches

    Iterating gives the recipes of models that are listed; those of other models, such as sums of
    methods, are found by name.
    """

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self._functions: dict[str, Callable[[], Recipe]] = {}
        self._families: list[RecipeFamily] = []

    def add(self, function: Callable[[], Recipe]) -> Callable[[], Recipe]:
        """Register a recipe under its function's name; a decorator."""
        self[function.__name__] = function
        return function

    def __setitem__(self, name: str, function: Callable[[], Recipe]) -> None:
        self._functions[name] = function

    def add_family(self, size: str, build: Callable[[str], Recipe], **options: Any) -> None:
        """Register a `RecipeFamily`."""
        self._families.append(RecipeFamily(size, build, **options))

    def __getitem__(self, name: str) -> Callable[[], Recipe]:
        """The function that makes a recipe.

        Raises:
            ValueError: for a sum of methods with a part that is no method.
            KeyError: for other unknown names.
        """
        if name in self._functions:
            return self._functions[name]
        # Kept while other families are tried: a longer prefix may still fit.
        wrong_part: ValueError | None = None
        for family in self._families:
            method = name.removeprefix(family.prefix).removesuffix(f"_{family.size}")
            if family.name(method) != name or not family.fits(method):
                continue
            try:
                model_entry(f"{self.modality}_{method}_{family.model_size}")
            except ValueError as error:
                if "+" in method:
                    wrong_part = error
            else:
                return partial(family.build, method)
        raise wrong_part or KeyError(name)

    def methods_of(self, family: RecipeFamily) -> list[str]:
        """The methods whose recipes are listed."""
        methods = family.listed
        if methods is None:
            methods = self._modelled_methods(family)
        return [method for method in methods if family.fits(method)]

    def _modelled_methods(self, family: RecipeFamily) -> list[str]:
        """The methods of the registered models of a family's size."""
        start = f"{self.modality}_"
        end = f"_{family.model_size}"
        models = list_models(f"{start}*{end}")
        return [model.removeprefix(start).removesuffix(end) for model in models]

    def __iter__(self) -> Iterator[str]:
        names = list(self._functions)
        for family in self._families:
            names += [family.name(method) for method in self.methods_of(family)]
        # A recipe's own name may also be one of a family.
        return iter(dict.fromkeys(names))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def described(self) -> Iterator[tuple[str, str, list[str]]]:
        """(name, first line of the docstring, methods) of each recipe and each family.

        A family has `<method>` in its name.
        """
        for name, function in self._functions.items():
            yield name, _summary(function), []
        for family in self._families:
            methods = self.methods_of(family)
            # A family without listed methods is one more form of another.
            if methods:
                yield family.name("<method>"), _summary(family.build), methods


def _summary(function: Callable[..., Recipe]) -> str:
    """The first line of a function's docstring, also where arguments are bound to it."""
    while isinstance(function, partial):
        function = function.func
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _recipes_of(modality: str) -> Recipes:
    module = getattr(modality_module(modality), "RECIPES_MODULE", None)
    if not module:
        module = find_modality(modality).recipes
    if not module:
        return Recipes(modality)
    return importlib.import_module(module).RECIPES


def installed_recipes() -> Iterator[Recipes]:
    """The recipes of every modality whose packages are installed."""
    for modality in modality_names():
        try:
            yield _recipes_of(modality)
        except ModuleNotFoundError:
            # A module of the modality itself is missing.
            raise
        except ImportError:
            continue


def list_recipes() -> list[str]:
    """Every recipe by name."""
    return [f"{recipes.modality}.{name}" for recipes in installed_recipes() for name in recipes]


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    ConfigError names the nearest recipe, or the package that its modality lacks.
    """
    modality, _, short_name = name.partition(".")
    if modality not in modality_names():
        raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")
    try:
        recipes = _recipes_of(modality)
        function = recipes.get(short_name)
        if function is None:
            names = [f"{modality}.{other}" for other in recipes]
            raise ConfigError(f"no recipe {name!r}; {nearest(name, names)}")
        # ImportError where the modality's packages are missing.
        find_modality(modality)
        return function()
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from error


def open_recipe(name: str) -> Recipe:
    """The recipe that a command line names.

    A name is looked up by `find_recipe`. FILE.py[:function] is a recipe in that file, which is
    imported. The file holds a table, `RECIPES = Recipes("text")` with functions added by
    `@RECIPES.add`, or functions without arguments annotated `-> Recipe`. ConfigError where there
    is no such recipe, or the file cannot be imported.
    """
    match = re.fullmatch(r"(.*\.py)(?::(\w*))?", name)
    if not match:
        return find_recipe(name)
    path = match[1]
    function_name = match[2] or ""
    try:
        module = import_file(path)
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    functions = getattr(module, "RECIPES", None) or _recipe_functions(module)
    if not function_name and len(functions) == 1:
        function_name = next(iter(functions))
    if function_name not in functions:
        names = ", ".join(functions) or "(none)"
        raise ConfigError(
            f"{name}: the file has the recipes {names}; expected {path}:NAME of one. "
            "A recipe is a function without arguments annotated `-> Recipe`, "
            "or one added to `RECIPES = Recipes(MODALITY)`"
        )
    recipe = functions[function_name]()
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise ConfigError(f"the recipe in {name} returns {kind}, expected a recipes.Recipe")
    return recipe


def _recipe_functions(module: ModuleType) -> dict[str, Callable[[], Recipe]]:
    """The functions of a module annotated `-> Recipe`, by name."""
    functions: dict[str, Callable[[], Recipe]] = {}
    for name, function in inspect.getmembers(module, inspect.isfunction):
        returns = function.__annotations__.get("return")
        if function.__module__ == module.__name__ and returns in (Recipe, "Recipe"):
            functions[name] = function
    return functions
