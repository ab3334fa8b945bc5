"""Give a causal language model of transformers a prior, LoRA or both, and train it on: for longer
contexts, or without RoPE.

    priorzoo adapt MODEL --position ggd --train lora --source rfc --context 12k --steps 30 --out
    FOLDER
    priorzoo adapt MODEL@window=7000,sinks=4 --steps 0 --out FOLDER     a prior that needs no
    training
    priorzoo adapt MODEL@yarn=2 --position nope --train lora --out FOLDER       without a prior: the
    control
    priorzoo adapt MODEL --position nope --rope drop --out FOLDER       DroPE: recalibrated at the
    model's own length
    priorzoo evaluate hf:MODEL hf:FOLDER recall                         before and after

MODEL is a folder or hub name, with settings behind "@" as in `priorzoo evaluate`. FOLDER is an
adapter of megabytes, which `zoo.load_adapted` puts on its base; with --train all it is a whole
model. transformers' Trainer trains on packed rows of
--source by AdamW, its rate warmed up and then falling by a cosine; priors have a rate of their own
and no weight decay. Needs the extra `hf`. A run that was stopped continues from its last checkpoint
with --resume.
Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import zoo
from modalities.cost import keep_freed_tensors
from modalities.decoder.tokenizers import check_place, split_arm
from modalities.settings import check_choice, counts, option
from recipes.commands import CommandError, Console, call, clock, facts_table, short, with_options
from recipes.overrides import parse_overrides
from zoo.adapters import ADAPTER
from zoo.adapters.layer import RECORD, has_priors, prior_parameters
from zoo.cli import Import
from zoo.errors import Options
from zoo.plugins import import_named


@dataclass(frozen=True)
class Adaptation:
    """What is trained, on what, for how long."""

    train: str = option("all", "prior; lora, with the prior where it has numbers; or all")
    rope: str = option("keep", "the model's own positions: keep or drop")
    rank: int = option(8, "of LoRA")
    source: str = option("sotu-excerpt", "where texts come from, as in a text recipe")
    facts_fraction: float = option(0.0, "share of rows that state facts and ask for them")
    context: int | None = option(
        None, "tokens a row; default: the model's own", parse=lambda t: counts(t)[0]
    )
    steps: int = option(500, "of the optimiser; 0 for a prior without training")
    batch: int = option(32, "rows a step")
    lr: float = option(5e-4, "of the weights")
    prior_lr_scale: float = option(20.0, "that of the priors, in such")
    seed: int = option(0, "of the priors, the rows and their order")

    def __post_init__(self) -> None:
        bounds = {
            "context": 2,
            "steps": 0,
            "batch": 1,
            "rank": 1,
            "lr": 0,
            "prior_lr_scale": 0,
            "seed": 0,
        }
        for name, least in bounds.items():
            if (value := getattr(self, name)) is not None and not least <= value < math.inf:
                raise CommandError(
                    f"--{name.replace('_', '-')} {value}: expected a number of at least {least}"
                )
        check_choice("train", self.train, ("prior", "lora", "all"))
        check_choice("rope", self.rope, ("keep", "drop"))
        if self.train == "lora" and not self.steps:
            raise CommandError(
                "--steps 0: LoRA starts without effect; expected --train prior, or at least 1 step"
            )


def adapt_command(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="folder or hub name")],
    *,
    out: Annotated[Path, typer.Option(help="folder of the adapter or model")],
    position: Annotated[
        str,
        typer.Option(
            help="a prior or a sum of priors; nope for none; default: ggd_goat, or what MODEL has"
        ),
    ] = "",
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="an option of the prior")
    ] = [],  # noqa: B006
    ssmax: Annotated[bool, typer.Option("--ssmax", help="scale logits by s·ln n")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="from the last checkpoint in --out")
    ] = False,
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="print what would be trained, with time and memory, and train nothing"
        ),
    ] = False,
    **options: Any,
) -> None:
    run = Adaptation(**options)
    import_named(import_)
    if any((out / mark).is_file() for mark in ("config.json", ADAPTER)):
        raise CommandError(f"{out} holds a model already; give another --out")
    if resume and not any((out / "checkpoints").glob("*/trained.safetensors")):
        raise CommandError(f"--resume: {out}/checkpoints has no checkpoint")
    check_place(split_arm(name)[0])
    # Before transformers makes tensors, since torch reads the setting of large pages at the first
    # one.
    keep_freed_tensors(below=1 << 20)
    from modalities.text import adapting  # transformers takes seconds
    from zoo.adapters.released import add_lora

    torch.manual_seed(run.seed)
    model, tokenizer, spec = adapting.open_adaptable(name)
    context = run.context or model.config.max_position_embeddings
    size = adapting.rows_at_once(run.batch, context)
    rows = None
    heldout = None
    if run.steps:
        rows = adapting.adaptation_rows(
            spec,
            run.source,
            context,
            run.steps * run.batch,
            seed=run.seed,
            facts_fraction=run.facts_fraction,
        )
        heldout = adapting.adaptation_rows(spec, run.source, context)
    losses = (
        {"as it came": adapting.heldout_loss(model, heldout)} if heldout and not dry_run else {}
    )
    if run.train != "all" and RECORD not in model.__dict__:
        raise CommandError(f"{name} is a whole adapted model, not a base: expected --train all")
    if run.train == "lora":
        add_lora(model, run.rank)
    if not has_priors(model):
        shared: Options = {
            "keep_rope": run.rope == "keep",
            "ssmax": ssmax,
            "train_context": run.context,
        }
        zoo.adapt(model, position or "ggd_goat", options=parse_overrides(set_), **shared)
    elif position or set_ or ssmax or run.rope == "drop":
        raise CommandError(
            f"{name} has a prior already: --position, --set, --ssmax and --rope drop do not apply"
        )
    priors = prior_parameters(model)
    for parameter_name, parameter in model.named_parameters():
        if run.train != "all" and parameter_name not in priors and ".lora_" not in parameter_name:
            parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    if run.steps and not trained:
        raise CommandError(
            f"--train {run.train}: {position} has no parameters, nothing would be trained"
        )
    facts = {
        "model": f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        "prior": f"{getattr(model.config, RECORD)['position']}, its own positions: {run.rope}",
        "out": f"{out}, " + ("a whole model" if run.train == "all" else "an adapter"),
    }
    if rows is not None:
        numbers = sum(p.numel() for p in trained)
        tokens = run.steps * run.batch * context
        shape = f"{run.batch} rows of {context:,} tokens, {size} a pass"
        facts["trained"] = f"{numbers:,} numbers, {run.steps:,} steps of {shape}"
        facts["data"] = (
            f"{tokens:,} tokens, {tokens / rows.rows.epoch_tokens:.2f} times those of {run.source}"
        )
    console = Console()
    if dry_run and rows is not None:
        seconds, peak = adapting.expected_cost(model, context, size)
        gib = (
            peak + sum(p.nbytes for p in model.parameters()) + 3 * sum(p.nbytes for p in trained)
        ) / 2**30
        facts["expected"] = (
            f"{clock(run.steps * run.batch / size * seconds)} (estimated), {gib:.1f} GiB plus libraries"
        )
    console.print(facts_table(f"{name}: {'dry run' if dry_run else 'plan'}", facts))
    if dry_run:
        return
    if rows is not None and heldout is not None:
        losses["adapted"] = adapting.heldout_loss(model, heldout)
        started = time.perf_counter()

        def tell(step: int, steps: int, loss: float, done: int) -> None:
            rate = done * run.batch * context / (time.perf_counter() - started)
            left = clock((steps - step) * run.batch * context / rate)
            console.print(
                f"step {step:,}/{steps:,}  loss {loss:.4f}  {short(rate)} tokens/s  left {left}"
            )

        rates = {"lr": run.lr, "prior_lr_scale": run.prior_lr_scale}
        adapting.train_on(
            model, rows, out, batch=run.batch, **rates, seed=run.seed, resume=resume, tell=tell
        )
        losses["trained"] = adapting.heldout_loss(model, heldout)
    figures = {
        f"held-out loss, {stage}": f"{loss:.4f} nats a token" for stage, loss in losses.items()
    }
    if run.train == "all":
        model.__dict__.pop(RECORD, None)  # a whole model
        tokenizer.save_pretrained(out)
    else:
        if not run.steps:
            model.__dict__[RECORD]["base"]["digest"] = ""  # of any weights
        training = {key: facts[key] for key in ("trained", "data") if key in facts} | figures
        model.__dict__[RECORD]["training"] = {"tokens": run.steps * run.batch * context} | training
    zoo.save_adapted(model, out)
    console.print(
        facts_table("done", figures | {"model": f"{out}; zoo.load_adapted({str(out)!r})"})
    )


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo adapt") -> int:
    return call(with_options(adapt_command, {"adapt": Adaptation}), argv, prog=prog)
