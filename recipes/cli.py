"""The command `priorzoo`: `recipes/train.py`, `evaluate.py`, `tabulate.py`, `generate.py`, `attention.py`, `predict.py`,
`embed.py`, `adapt.py`, `verify.py`, `lm_eval.py`, `import_released.py` and `python -m zoo`, for who installed the wheel.

Several ranks: `deepspeed --module recipes.train RECIPE …`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

# As in recipes/train.py; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
OWN_OPTIONS = {"ignore_unknown_options": True}  # all words go to the command, which has options of its own
app.registered_commands += zoo_app.registered_commands


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def train(words: list[str] = typer.Argument([])) -> int:
    """Train a model by recipe; `priorzoo train --help` has the options."""
    from recipes import train

    return train.run(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def evaluate(words: list[str] = typer.Argument([])) -> int:
    """Measure models beside each other; `priorzoo evaluate --help` has the options."""
    from recipes import evaluate

    return evaluate.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def generate(words: list[str] = typer.Argument([])) -> int:
    """Continue a text or a sequence of bases; `priorzoo generate --help` has the options."""
    from recipes import generate

    return generate.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def attention(words: list[str] = typer.Argument([])) -> int:
    """Show what heads attend to in a text, bases or an image; `priorzoo attention --help` has the options."""
    from recipes import attention

    return attention.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def predict(words: list[str] = typer.Argument([])) -> int:
    """Name what images show; `priorzoo predict --help` has the options."""
    from recipes import predict

    return predict.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def embed(words: list[str] = typer.Argument([])) -> int:
    """Write features of images, texts or bases; `priorzoo embed --help` has the options."""
    from recipes import embed

    return embed.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def adapt(words: list[str] = typer.Argument([])) -> int:
    """Give a causal language model of transformers a prior, and train it on; `priorzoo adapt --help` has the options."""
    from recipes import adapt

    return adapt.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def verify(words: list[str] = typer.Argument([])) -> int:
    """Verify a run's checkpoints and weights by their digests; `priorzoo verify --help` has the options."""
    from recipes import verify

    return verify.main(words)


@app.command(add_help_option=False, context_settings=OWN_OPTIONS)
def tabulate(words: list[str] = typer.Argument([])) -> int:
    """Join results of several folders in one table and figure; `priorzoo tabulate --help` has the options."""
    from recipes import tabulate

    return tabulate.main(words)


@app.command("import", add_help_option=False, context_settings=OWN_OPTIONS)
def import_(words: list[str] = typer.Argument([])) -> int:
    """Make a saved model of a released checkpoint; `priorzoo import --help` has the options."""
    from recipes import import_released

    return import_released.main(words)


@app.command("lm-eval", add_help_option=False, context_settings=OWN_OPTIONS)
def lm_eval(words: list[str] = typer.Argument([])) -> int:
    """Measure a text model on the tasks of lm-evaluation-harness; `priorzoo lm-eval --help` has the options."""
    from recipes import lm_eval

    return lm_eval.main(words)


def main(argv: Sequence[str] | None = None) -> int:
    return call(app, argv, prog="priorzoo")
