"""The command `priorzoo`: `recipes/train.py`, `recipes/evaluate.py` and `python -m zoo` for who installed the wheel.

Several ranks: `deepspeed --module recipes.train RECIPE …`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer

from zoo.cli import app as zoo_app
from zoo.cli import call

__all__ = ["main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train, measure and inspect models whose positions are priors on attention's logits.",
)
app.registered_commands += zoo_app.registered_commands


@app.command(add_help_option=False)
def train(words: list[str]) -> int:
    """Train a model by recipe; `priorzoo train --help` has the options."""
    from recipes import train

    return train.run(words)


@app.command(add_help_option=False)
def evaluate(words: list[str]) -> int:
    """Measure models beside each other; `priorzoo evaluate --help` has the options."""
    from recipes import evaluate

    return evaluate.main(words)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    own_options: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "evaluate": evaluate,
    }  # which typer leaves to them
    if words and words[0] in own_options:
        return own_options[words[0]](words[1:])
    return call(app, words, prog="priorzoo")
