"""Downstream tasks by lm-evaluation-harness: its command line, with text models of the zoo as its
model `priorzoo`.

    priorzoo lm-eval --model priorzoo --model_args pretrained=RUN_DIR --tasks arc_easy,hellaswag
    priorzoo lm-eval ls tasks

All words but --import go to the harness; model_args are the arguments of
`modalities.text.lm_eval.PriorzooLM`. Needs the extra `lm-eval`. Exit codes: 0 done, 2 the request
cannot be served as written.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import typer

from zoo.console import Import, call, new_app
from zoo.plugins import import_named

app = new_app()


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def lm_eval_command(words: list[str] = typer.Argument([]), import_: Import = []) -> None:  # noqa: B006
    import_named(import_)
    try:
        from lm_eval.__main__ import cli_evaluate

        if not {"-h", "--help"} & set(words):
            from modalities.text import lm_eval  # noqa: F401  registers the model
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'priorzoo[lm-eval]'") from error
    # As recipes/commands.py does for the other commands.
    torch.set_flush_denormal(True)
    # The harness reads its words from sys.argv.
    before = sys.argv
    sys.argv = ["lm-eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


main = partial(call, app, prog="priorzoo lm-eval")
