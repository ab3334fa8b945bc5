"""Recipes by name: `<modality>.<recipe>`, from the module that each modality names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from modalities.contract import find_modality, modality_names
from recipes.config import ConfigError, Recipe
from zoo.catalog import import_file, list_models, model_entry
from zoo.errors import nearest


@dataclass(frozen=True)
class Family:
    """Recipes `<prefix><method>_<size>`, one for each method; see `Recipes.add_methods`."""

    size: str
    build: Callable[[str], Recipe]
    model_size: str
    without: Collection[str]
    prefix: str
    listed: Collection[str] | None

    def name(self, method: str) -> str:
        return f"{self.prefix}{method}_{self.size}"

    def fits(self, method: str) -> bool:
        return method.removesuffix("_ssmax") not in self.without


class Recipes(Mapping[str, Callable[[], Recipe]]):
    """The named recipes of a modality: functions that return a `Recipe`.

    Iterating gives the recipes of models that are listed; those of other models, such as sums of methods, are found by name.
    """

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self._functions: dict[str, Callable[[], Recipe]] = {}
        self._families: list[Family] = []

    def add(self, function: Callable[[], Recipe]) -> Callable[[], Recipe]:
        """Register a recipe under its function's name; a decorator."""
        self[function.__name__] = function
        return function

    def __setitem__(self, name: str, function: Callable[[], Recipe]) -> None:
        self._functions[name] = function

    def add_methods(
        self,
        size: str,
        build: Callable[[str], Recipe],
        *,
        model_size: str = "",
        without: Collection[str] = (),
        prefix: str = "",
        listed: Collection[str] | None = None,
    ) -> None:
        """`<prefix><method>_<size>` for every registered model `<modality>_<method>_<model_size>` that has no recipe so named.

        build: makes the recipe of a method. model_size: `size` where empty. without: methods that it does not fit.
        listed: methods whose recipes are listed; None: all registered ones.
        """
        self._families.append(Family(size, build, model_size or size, without, prefix, listed))

    def __getitem__(self, name: str) -> Callable[[], Recipe]:
        """Raises ValueError for a sum of methods with a part that is no method, KeyError for other unknown names."""
        if name in self._functions:
            return self._functions[name]
        wrong_part: ValueError | None = None  # where a longer prefix may still fit
        for family in self._families:
            method = name.removeprefix(family.prefix).removesuffix(f"_{family.size}")
            if family.name(method) == name and family.fits(method):
                try:
                    model_entry(f"{self.modality}_{method}_{family.model_size}")
                    return partial(family.build, method)
                except ValueError as error:
                    wrong_part = error if "+" in method else wrong_part
        raise wrong_part or KeyError(name)

    def methods_of(self, family: Family) -> list[str]:
        """The methods whose recipes are listed."""
        start, end = f"{self.modality}_", f"_{family.model_size}"
        models = list_models(f"{start}*{end}") if family.listed is None else ()
        methods = family.listed or [model.removeprefix(start).removesuffix(end) for model in models]
        return [method for method in methods if family.fits(method)]

    def __iter__(self) -> Iterator[str]:
        families = (family.name(method) for family in self._families for method in self.methods_of(family))
        return iter(dict.fromkeys([*self._functions, *families]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def described(self) -> Iterator[tuple[str, str, list[str]]]:
        """(name, first line of the docstring, methods) of each recipe, and of each family with `<method>` in its name."""
        families = [(family.name("<method>"), family.build, self.methods_of(family)) for family in self._families]
        for name, function, methods in [*((name, f, []) for name, f in self._functions.items()), *families]:
            while isinstance(function, partial):
                function = function.func
            yield name, (inspect.getdoc(function) or "").partition("\n")[0], methods


def _recipes_of(modality: str) -> Recipes:
    module = find_modality(modality).recipes
    return importlib.import_module(module).RECIPES if module else Recipes(modality)


def installed_recipes() -> Iterator[Recipes]:
    """The recipes of every modality whose packages are installed."""
    for modality in modality_names():
        try:
            yield _recipes_of(modality)
        except ModuleNotFoundError:  # a module of the modality itself
            raise
        except ImportError:
            continue


def list_recipes() -> list[str]:
    """Every recipe by name."""
    return [f"{recipes.modality}.{name}" for recipes in installed_recipes() for name in recipes]


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ConfigError names the nearest one, or the package that its modality lacks."""
    modality, _, short = name.partition(".")
    if modality in modality_names():
        try:
            if function := _recipes_of(modality).get(short):
                return function()
        except (ImportError, ValueError) as error:
            raise ConfigError(str(error)) from error
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")


def open_recipe(name: str) -> Recipe:
    """The recipe that a command line names: `find_recipe`, or for FILE.py[:function] one in that file, which is imported.

    The file holds a table, `RECIPES = Recipes("text")` with functions added by `@RECIPES.add`, or functions without arguments
    annotated `-> Recipe`. ConfigError where there is no such recipe, or the file cannot be imported.
    """
    match = re.fullmatch(r"(.*\.py)(?::(\w*))?", name)
    if not match:
        return find_recipe(name)
    path, function = match[1], match[2] or ""
    try:
        module = import_file(path)
    except (OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    functions: Mapping[str, Callable[[], Recipe]] = getattr(module, "RECIPES", None) or {
        key: value
        for key, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and value.__annotations__.get("return") in (Recipe, "Recipe")
    }
    if not function and len(functions) == 1:
        function = next(iter(functions))
    if function not in functions:
        raise ConfigError(
            f"{name}: the file has the recipes {', '.join(functions) or '(none)'}; expected {path}:NAME of one. A recipe is a "
            "function without arguments annotated `-> Recipe`, or one added to `RECIPES = Recipes(MODALITY)`"
        )
    recipe = functions[function]()
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"the recipe in {name} returns {type(recipe).__name__}, expected a recipes.config.Recipe")
    return recipe
