"""Recipes: named training set-ups, the loop that runs them, and the run folders they leave behind.

`find_recipe("text.ggd_ssmax_tiny")` gives a `Recipe`; `priorzoo train` trains it,
`priorzoo evaluate` measures it.
"""

from recipes.config import find_recipe, list_recipes

__all__ = ["find_recipe", "list_recipes"]
