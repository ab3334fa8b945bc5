"""Recipes and priors in files of one's own, through the real commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipes import evaluate, find_recipe
from recipes.config import ConfigError, apply_overrides, open_recipe, resolve
from tests.launching import command
from zoo import create_model

OWN = '''
import torch
from torch import nn

import zoo
from modalities.text.data import TextDataConfig
from recipes.config import Evaluate, Model, Optim, Recipe, Train

class Fading(zoo.priors.TablePrior):
    def __init__(self, num_heads):
        super().__init__(num_heads)
        self.rate = nn.Parameter(torch.ones(num_heads))

    def curve(self, distance, *, causal):
        return -self.rate.to(distance.dtype).view(-1, *[1] * distance.ndim) * distance.abs().sqrt()

zoo.register_prior("fading", Fading)
SHAPE = {"dim": 32, "num_layers": 1, "num_heads": 2, "hidden_dim": 32}

def mine() -> Recipe:
    """Four steps."""
    model, data = Model("text_fading+spectral_tiny", options=dict(SHAPE)), TextDataConfig(context=32)
    train, evaluate = Train(steps=4, batch=2, save_every=2), Evaluate(every=0)
    return Recipe("text.mine", "text", model, data, Optim(schedule="constant"), train, evaluate)
'''
GIVEN = """
import torch

from recipes import find_recipe

def recipe(position, options):
    table = find_recipe("text.table_tiny")
    table.model.options.update(dim=32, num_heads=2, hidden_dim=32, position=position, position_options=options)
    return table

def summed():
    rates = -torch.tensor([[0.1], [0.7]]) * torch.arange(5)
    waves = torch.arange(256.0)[:, None].add(torch.arange(256.0)).sin()
    return recipe("matrix+table", {"table": {"values": rates}, "matrix": {"values": waves}})

def unknown():
    return recipe("table", {"beyond": print})

RECIPES = {"summed": summed, "unknown": unknown}
"""
ALL = """
import sys
from recipes import evaluate, train
own, folder = sys.argv[1:]
for name, *words in (("whole",), ("parts", "--set", "train.steps=2"), ("parts", "--resume", "auto")):
    assert train.main([own, "--run-dir", f"{folder}/{name}", *words]) == 0
words = ["perplexity", "--lengths", "32", "--samples", "1", "--out", f"{folder}/out", "--import", own]
assert evaluate.main([f"{folder}/whole", *words]) == 0
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "own.py").write_text(OWN)
    (folder / "given.py").write_text(GIVEN)
    (folder / "wrong.py").write_text("import nowhere_to_be_found")
    (folder / "returns.py").write_text("from recipes.config import Recipe\ndef f() -> Recipe: return 3")
    return folder


@pytest.mark.slow
def test_a_prior_and_a_recipe_in_a_file_train_resume_and_are_measured(files, tmp_path, capsys) -> None:
    done = command([sys.executable, "-c", ALL, str(files / "own.py"), str(tmp_path)])
    assert done.returncode == 0 and (tmp_path / "out" / "perplexity.csv").exists(), done.stderr
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    assert evaluate.main([str(tmp_path / "whole"), "perplexity", "--out", str(tmp_path / "no")]) == 2
    errors = capsys.readouterr().err
    assert "unknown part 'fading'" in errors and "--import FILE.py" in errors


def test_options_that_are_no_json_become_numbers(files) -> None:
    """Models of the resolved recipe are those of the recipe as written."""
    recipe = open_recipe(f"{files}/given.py:summed")
    settled = json.loads(json.dumps(resolve(recipe, world=1).to_dict()))["model"]["options"]
    both = (settled, recipe.model.options)
    states = [create_model("text_table_tiny", **options, train_context=256).state_dict() for options in both]
    priors = [key for key in states[0] if ".prior." in key]
    assert priors and all(torch.equal(states[0][key], states[1][key]) for key in priors)
    with pytest.raises(ConfigError, match=r"position_options: .* is not JSON"):
        resolve(open_recipe(f"{files}/given.py:unknown"), world=1)


def test_recipes_are_found_by_name(files) -> None:
    assert find_recipe("dna.alibi+spectral_ssmax_tiny").model.name == "dna_alibi+spectral_ssmax_tiny"
    for name, message in (
        ("text.alibbi+spectral_tiny", r"unknown part 'alibbi'.*did you mean 'alibi'"),
        (f"{files}/given.py", r"has the recipes summed, unknown; expected .*given\.py:NAME"),
        (f"{files}/given.py:sumed", "sumed: the file has the recipes summed"),
        (f"{files}/returns.py", "returns int, expected"),
        (f"{files}/none.py", r"no file '.*none\.py'"),
        (f"{files}/wrong.py", r"importing .*wrong\.py fails: ModuleNotFoundError.*nowhere_to_be_found"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_recipe(name)


def changed(name: str, *settings: str) -> dict:
    return apply_overrides(find_recipe(name), [f"model.options.{setting}" for setting in settings])[0].model.options


def test_options_inside_options_are_set_one_by_one() -> None:
    options = changed(
        "text.ggd+spectral+key_bias_tiny", "position_options.spectral.rank=4", "position_options.ggd.init=alibi"
    )
    assert options == {"position_options": {"spectral": {"rank": 4}, "ggd": {"init": "alibi"}}}
    assert changed("text.ggd_tiny", 'position=["ggd","rope"]') == {"position": ["ggd", "rope"]}
    # What the registered model has stays, unless it is replaced.
    inside = "position_options.init=uniform"
    assert changed("vision.goat_tiny", inside) == {"position_options": {"rank": 2, "init": "uniform"}}
    assert changed("vision.goat_tiny", inside, "position_options={}") == {"position_options": {"init": "uniform"}}
    for setting, words in (
        ("positon_options.rank=4", "no option 'positon_options'; did you mean 'position_options'"),
        ("dim.x=4", "dim is 128, which has no entries"),
    ):
        with pytest.raises(ConfigError, match=words):
            changed("text.ggd_tiny", setting)
