"""Recipes in the user's files, and options inside options. Priors in files: CONTRIBUTING's and the
guides' examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from recipes import find_recipe
from recipes.commands import ConfigError
from recipes.plan import resolve
from recipes.registry import open_recipe
from recipes.settings import apply_overrides
from tests.refusals import refuses
from zoo import create_model

GIVEN = """
import torch

from recipes import find_recipe

def recipe(position, options):
    table = find_recipe("text.table_tiny")
    table.model.options.update(dim=32, num_heads=2, hidden_dim=32, position=position, position_options=options)
    return table

def summed():
    rates = -torch.tensor([[0.1], [0.7]]) * torch.arange(5)
    return recipe("alibi+table", {"table": {"values": rates}})

def unknown():
    return recipe("table", {"beyond": print})

RECIPES = {"summed": summed, "unknown": unknown}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "given.py").write_text(GIVEN)
    (folder / "wrong.py").write_text("import nowhere_to_be_found")
    (folder / "returns.py").write_text("from recipes import Recipe\ndef f() -> Recipe: return 3")
    return folder


def test_options_become_numbers(files) -> None:
    """Models of the resolved recipe are those of the recipe as written."""
    recipe = open_recipe(f"{files}/given.py:summed")
    both = (
        json.loads(json.dumps(resolve(recipe, world=1).to_dict()))["model"]["options"],
        recipe.model.options,
    )
    states = [
        create_model("text_table_tiny", **options, train_context=256).state_dict()
        for options in both
    ]
    priors = [key for key in states[0] if ".prior." in key]
    assert priors
    assert all(torch.equal(states[0][key], states[1][key]) for key in priors)
    with pytest.raises(ConfigError, match=r"position_options: .* is not JSON"):
        resolve(open_recipe(f"{files}/given.py:unknown"), world=1)


def test_recipes_are_found_by_name(files) -> None:
    assert (
        find_recipe("dna.alibi+spectral_ssmax_tiny").model.name == "dna_alibi+spectral_ssmax_tiny"
    )
    for name, message in (
        ("text.alibbi+spectral_tiny", r"unknown part 'alibbi'.*did you mean 'alibi'"),
        (f"{files}/given.py", r"has the recipes summed, unknown; expected .*given\.py:NAME"),
        (f"{files}/given.py:sumed", "sumed: the file has the recipes summed"),
        (f"{files}/returns.py", "returns int, expected"),
        (f"{files}/none.py", r"no file '.*none\.py'"),
        (
            f"{files}/wrong.py",
            r"importing .*wrong\.py fails: ModuleNotFoundError.*nowhere_to_be_found",
        ),
    ):
        refuses(message, open_recipe, name, error=ConfigError)


def changed(name: str, *settings: str) -> dict:
    return apply_overrides(find_recipe(name), [f"model.options.{setting}" for setting in settings])[
        0
    ].model.options


def test_nested_options_are_set() -> None:
    """Options inside options are set one by one."""
    options = changed(
        "text.ggd+spectral+key_bias_tiny",
        "position_options.spectral.rank=4",
        "position_options.ggd.init=alibi",
    )
    assert options == {"position_options": {"spectral": {"rank": 4}, "ggd": {"init": "alibi"}}}
    assert changed("text.ggd_tiny", 'position=["ggd","rope"]') == {"position": ["ggd", "rope"]}
    # What the registered model has stays, unless it is replaced.
    inside = "position_options.init=uniform"
    assert changed("vision.goat_tiny", inside) == {
        "position_options": {"rank": 2, "init": "uniform"}
    }
    assert changed("vision.goat_tiny", inside, "position_options={}") == {
        "position_options": {"init": "uniform"}
    }
    for setting, words in (
        ("positon_options.rank=4", "no option 'positon_options'; did you mean 'position_options'"),
        ("dim.x=4", "dim is 128, which has no entries"),
    ):
        refuses(words, changed, "text.ggd_tiny", setting, error=ConfigError)
