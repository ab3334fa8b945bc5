"""Recipes: named training set-ups, the loop that runs them, and the run folders they leave behind.

`find_recipe("text.ggd_ssmax_tiny")` gives a `Recipe`; `priorzoo train` trains it,
`priorzoo evaluate` measures it.
"""

from recipes.recipe import Evaluate, Model, Optim, Recipe, Train
from recipes.registry import Recipes, find_recipe, list_recipes

__all__ = [
    "Evaluate",
    "Model",
    "Optim",
    "Recipe",
    "Recipes",
    "Train",
    "find_recipe",
    "list_recipes",
]
