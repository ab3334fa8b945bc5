"""Give a causal language model of transformers a prior, and train it on: for longer contexts, or without its own positions.

    priorzoo adapt MODEL --position ggd_goat --drop-rope --source english --context 1024 --out FOLDER
    priorzoo adapt MODEL --position nope --out FOLDER               trained on alike, without a prior: the control
    priorzoo evaluate hf:MODEL hf:FOLDER perplexity                 before and after

MODEL is a folder or hub name, or a RoPE model of the zoo, which becomes a Llama. transformers' Trainer trains on packed rows of
--source by AdamW, its rate warmed up and then falling by a cosine; priors have a rate of their own and no weight decay. FOLDER
is loaded by `zoo.load_adapted`. Needs the extra `hf`. A run that was stopped continues from its last checkpoint with --resume.
Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer

import zoo
from modalities.evaluation import option
from recipes.commands import CommandError, Console, call, facts_table, with_options
from zoo.adapters.layer import prior_parameters
from zoo.catalog import import_named
from zoo.cli import Import


@dataclass(frozen=True)
class Adaptation:
    """What is trained, on what, for how long."""

    train: str = option("all", "all, priors, or patterns of parameters' names, comma-separated")
    source: str = option("sotu-excerpt", "where texts come from, as in a text recipe")
    facts_fraction: float = option(0.0, "share of rows that state facts and ask for them")
    context: int | None = option(None, "tokens a row, 2 or more; default: the model's own")
    steps: int = option(500, "of the optimiser")
    batch: int = option(32, "rows a step")
    lr: float = option(5e-4, "of the weights")
    prior_lr_scale: float = option(20.0, "that of the priors, in such")
    seed: int = option(0, "of the priors, the rows and their order")

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("steps", 1), ("batch", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise CommandError(f"--{name} {value}: expected at least {least}")


def adapt_command(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="folder, hub name, or a RoPE text model of the zoo")],
    *,
    out: Annotated[Path, typer.Option(help="folder of the adapted model")],
    position: Annotated[str, typer.Option(help="a prior or a sum of priors; nope for none")] = "ggd_goat",
    keep_rope: Annotated[bool, typer.Option("--keep-rope/--drop-rope", help="the model's own positions")] = True,
    ssmax: Annotated[bool, typer.Option("--ssmax", help="scale logits by s·ln n")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="from the last checkpoint in --out")] = False,
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be trained, and train nothing")] = False,
    **options: Any,
) -> None:
    run = Adaptation(**options)
    from modalities.text.adapting import adaptation_rows, open_adaptable, train_on  # transformers takes seconds

    import_named(import_)
    if (out / "config.json").is_file():
        raise CommandError(f"{out} holds a model already; give another --out")
    torch.manual_seed(run.seed)
    model, tokenizer, spec = open_adaptable(name)
    context = run.context or model.config.max_position_embeddings
    patterns = run.train if run.train in ("all", "priors") else run.train.split(",")
    zoo.adapt(model, position, keep_rope=keep_rope, ssmax=ssmax, train_context=run.context, train=patterns)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    priors = sum(p.numel() for p in prior_parameters(model).values())
    rows_read = f"{run.steps:,} steps of {run.batch} rows of {context:,} tokens of {run.source}"
    facts = {
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "position": f"{position}, {'added to' if keep_rope else 'instead of'} its own; {priors:,} parameters",
        "trained": f"{trained:,} parameters, {rows_read}",
        "out": str(out),
    }
    console = Console()
    console.print(facts_table(f"{name} adapted{' (dry run)' if dry_run else ''}", facts))
    if dry_run:
        return
    count, seed = run.steps * run.batch, run.seed
    rows = adaptation_rows(spec, run.source, context, count=count, seed=seed, facts_fraction=run.facts_fraction)
    heldout = adaptation_rows(spec, run.source, context)
    rates = {"lr": run.lr, "prior_lr_scale": run.prior_lr_scale}
    before, after = train_on(model, rows, heldout, out, batch=run.batch, **rates, seed=seed, resume=resume)
    zoo.save_adapted(model, out)
    tokenizer.save_pretrained(out)
    losses = {"held-out loss before": f"{before:.4f} nats a token", "after": f"{after:.4f} nats a token"}
    console.print(facts_table("done", losses | {"model": f"{out}; zoo.load_adapted({str(out)!r})"}))


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo adapt") -> int:
    return call(with_options(adapt_command, {"adapt": Adaptation}), argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
