"""Recipes: named training set-ups, the loop that runs them, and the run folders they leave behind.

`find_recipe("text.ggd_ssmax_tiny")` gives a `Recipe`; `recipes/train.py` trains it, `recipes/evaluate.py` measures it.
"""

from __future__ import annotations

import importlib
import importlib.util

from recipes.config import ConfigError, Recipe, nearest

MODALITIES = tuple(m for m in ("text", "vision", "dna") if importlib.util.find_spec(f"recipes.{m}"))


def list_recipes() -> list[str]:
    """Every recipe by name, `<modality>.<recipe>`."""
    return [f"{m}.{name}" for m in MODALITIES for name in importlib.import_module(f"recipes.{m}").RECIPES]


def find_recipe(name: str) -> Recipe:
    """The recipe of this name; ConfigError naming the nearest one where there is none."""
    modality, _, short = name.partition(".")
    if modality in MODALITIES:
        table = importlib.import_module(f"recipes.{modality}").RECIPES
        if short in table:
            return table[short]()
    raise ConfigError(f"no recipe {name!r}; {nearest(name, list_recipes())}")
