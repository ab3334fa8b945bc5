"""Recipes: named training set-ups, the loop that runs them, and the run folders they leave behind.

`find_recipe("text.ggd_ssmax_tiny")` gives a `Recipe`; `recipes/train.py` trains it, `recipes/evaluate.py` measures it.
"""

from __future__ import annotations

import importlib
import importlib.util

from recipes.config import ConfigError, Recipe, nearest

MODALITIES = tuple(m for m in ("text", "vision", "dna") if importlib.util.find_spec(f"recipes.{m}"))


def list_recipes() -> list[str]:
    """Every recipe by name, `<modality>.<recipe>`, of the modalities whose packages are installed."""
    names = []
    for modality in MODALITIES:
        try:
            names += [f"{modality}.{name}" for name in importlib.import_module(f"recipes.{modality}").RECIPES]
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("zoo", "modalities", "recipes"):
                raise
    return names


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ConfigError naming the nearest one, or the package its modality lacks."""
    modality, _, short = name.partition(".")
    if modality in MODALITIES:
        try:
            table = importlib.import_module(f"recipes.{modality}").RECIPES
        except ModuleNotFoundError as error:
            raise ConfigError(f"{name} needs the package {error.name}: pip install 'priorzoo[{modality}]'") from error
        if short in table:
            return table[short]()
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")
