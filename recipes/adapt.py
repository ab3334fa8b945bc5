"""Give a causal language model of transformers a prior, and train it on: for longer contexts, or without its own positions.

    python recipes/adapt.py MODEL --position ggd_goat --drop-rope --source english --context 1024 --out FOLDER
    python recipes/adapt.py MODEL --position nope --out FOLDER               trained on alike, without a prior: the control
    python recipes/evaluate.py hf:MODEL hf:FOLDER perplexity                 before and after

MODEL is a folder or hub name, or a RoPE model of the zoo, which becomes a Llama. transformers' Trainer trains on packed rows of
--source by AdamW, its rate warmed up and then falling by a cosine; priors have a rate of their own and no weight decay. FOLDER
is loaded by `zoo.load_adapted`. Needs the extra `hf`. A run that was stopped continues from its last checkpoint with --resume.
Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer
from rich.console import Console

import zoo
from modalities.text.adapting import adaptation_rows, open_adaptable, train_on
from recipes.commands import CommandError, call
from recipes.console import facts_table
from zoo.adapters.layer import prior_parameters
from zoo.cli import Import
from zoo.outside import import_named


def adapt_command(  # noqa: PLR0913 - options of a command
    name: Annotated[str, typer.Argument(metavar="MODEL", help="folder, hub name, or a RoPE text model of the zoo")],
    *,
    out: Annotated[Path, typer.Option(help="folder of the adapted model")],
    position: Annotated[str, typer.Option(help="a prior or a sum of priors; nope for none")] = "ggd_goat",
    keep_rope: Annotated[bool, typer.Option("--keep-rope/--drop-rope", help="the model's own positions")] = True,
    ssmax: Annotated[bool, typer.Option("--ssmax", help="scale logits by s·ln n")] = False,
    train: Annotated[str, typer.Option(help="all, priors, or patterns of parameters' names, comma-separated")] = "all",
    source: Annotated[str, typer.Option(help="where texts come from, as in a text recipe")] = "sotu-excerpt",
    facts_fraction: Annotated[float, typer.Option(help="share of rows that state facts and ask for them")] = 0.0,
    context: Annotated[int | None, typer.Option(min=2, help="tokens a row; default: the model's own")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 500,
    batch: Annotated[int, typer.Option(min=1, help="rows a step")] = 32,
    lr: Annotated[float, typer.Option(help="of the weights")] = 5e-4,
    prior_lr_scale: Annotated[float, typer.Option(help="that of the priors, in such")] = 20.0,
    seed: int = 0,
    resume: Annotated[bool, typer.Option("--resume", help="from the last checkpoint in --out")] = False,
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be trained, and train nothing")] = False,
) -> None:
    import_named(import_)
    if (out / "config.json").is_file():
        raise CommandError(f"{out} holds a model already; give another --out")
    torch.manual_seed(seed)
    model, tokenizer, spec = open_adaptable(name)
    context = context or model.config.max_position_embeddings
    patterns = train if train in ("all", "priors") else train.split(",")
    zoo.adapt(model, position, keep_rope=keep_rope, ssmax=ssmax, train=patterns)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    priors = sum(p.numel() for p in prior_parameters(model).values())
    facts: dict[str, str] = {
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "position": f"{position}, {'beside' if keep_rope else 'instead of'} its own; {priors:,} parameters",
        "trained": f"{trained:,} parameters, {steps:,} steps of {batch} rows of {context:,} tokens of {source}",
        "out": str(out),
    }
    console = Console(highlight=False, markup=False)
    console.print(facts_table(f"{name} adapted{' (dry run)' if dry_run else ''}", facts))
    if dry_run:
        return
    rows = adaptation_rows(spec, source, context, count=steps * batch, seed=seed, facts_fraction=facts_fraction)
    heldout = adaptation_rows(spec, source, context)
    losses = train_on(
        model, rows, heldout, out, batch=batch, lr=lr, prior_lr_scale=prior_lr_scale, seed=seed, resume=resume
    )
    zoo.save_adapted(model, out)
    tokenizer.save_pretrained(out)
    named = zip(("held-out loss before", "after"), (f"{loss:.4f} nats a token" for loss in losses), strict=True)
    results: dict[str, Any] = dict(named) | {"model": f"{out}; zoo.load_adapted({str(out)!r})"}
    console.print(facts_table("done", results))


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/adapt.py") -> int:
    return call(adapt_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
