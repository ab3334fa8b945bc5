"""The command `priorzoo`: what the files of `recipes/` do, `modalities.prior_plot`, and `zoo.cli`.

Several ranks: `deepspeed --module priorzoo.train RECIPE …`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated

# As in recipes/train.py; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from zoo import __version__
from zoo.cli import app as zoo_app
from zoo.console import call

# Name → (what its module's `main` does, the module, which is imported when the command is called).
COMMANDS = {
    "train": ("Train a model by recipe", "recipes.train"),
    "train-seeds": ("Train recipes with several seeds each, side by side", "recipes.train_seeds"),
    "evaluate": ("Measure models and compare them", "recipes.evaluate"),
    "generate": ("Continue a text or a sequence of bases", "recipes.generate"),
    "predict": ("Name what images show", "recipes.predict"),
    "adapt": (
        "Give a causal language model of transformers a prior, and train it on",
        "recipes.adapt",
    ),
    "verify": ("Verify a run's checkpoints and weights by their digests", "recipes.verify"),
    "hub": (
        "Write a model as the folder of a hub repository, with its card, and push it",
        "recipes.hub",
    ),
    "gallery": ("Write one page of the models: tables, curves, priors by head", "recipes.gallery"),
    "plot-prior": (
        "Draw every head's log-prior, against distance or around an image's centre",
        "modalities.prior_plot",
    ),
    "lm-eval": ("Measure a text model on the tasks of lm-evaluation-harness", "recipes.lm_eval"),
    "fetch-data": ("Fetch the data that the recipes name", "recipes.fetch_data"),
}
# All words go to the command's module, which has options of its own.
PASS_ALL = {"ignore_unknown_options": True}
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train, measure and inspect models whose positions are priors on attention's logits.",
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="print it")] = False) -> None:
    if version:
        print(f"priorzoo {__version__}")
        raise typer.Exit()


app.registered_commands += zoo_app.registered_commands


def _command(name: str, module_name: str) -> Callable[[list[str]], int]:
    def command(words: list[str] = typer.Argument([])) -> int:
        module = import_module(module_name)
        # A module's `run` is its `main` as a whole process.
        main = getattr(module, "run", module.main)
        return main(words, prog=f"priorzoo {name}")

    return command


for _name, (_purpose, _module) in COMMANDS.items():
    _register = app.command(
        _name,
        help=_purpose,
        add_help_option=False,
        context_settings=PASS_ALL,
    )
    _register(_command(_name, _module))


def main(argv: Sequence[str] | None = None) -> int:
    return call(app, argv, prog="priorzoo")
