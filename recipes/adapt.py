"""Give a causal language model of transformers a prior, LoRA or both, and train it on: for longer
contexts, or without RoPE.

    priorzoo adapt MODEL --position ggd --train lora --source rfc --context 12k --out FOLDER
    priorzoo adapt MODEL@window=7000,sinks=4 --steps 0 --out FOLDER       needs no training
    priorzoo adapt MODEL@yarn=2 --position nope --train lora --out FOLDER the control, no prior
    priorzoo adapt MODEL --position nope --rope drop --out FOLDER         DroPE, at MODEL's length
    priorzoo evaluate hf:MODEL hf:FOLDER recall                           before and after

MODEL is a folder or hub name, with settings behind "@" as in `priorzoo evaluate`. FOLDER is an
adapter of megabytes, which `zoo.load_adapted` puts on its base; with --train all it is a whole
model. transformers' Trainer trains on packed rows of --source by AdamW, its rate warmed up and then
falling by a cosine; priors have a rate of their own and no weight decay. Needs the extra `hf`. A
run that was stopped continues from its last checkpoint with --resume.
Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import nn

import zoo
from modalities.cost import keep_freed_tensors
from modalities.settings import check_choice, counts, option
from modalities.tokenizers.outside import check_place, split_arm
from recipes.commands import (
    CommandError,
    call,
    clock,
    facts_table,
    option_name,
    short,
    with_options,
)
from recipes.overrides import parse_overrides
from zoo.adapters import ADAPTER
from zoo.adapters.layer import RECORD, has_priors, prior_parameters
from zoo.console import Console, Import
from zoo.plugins import import_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Adaptation:
    """What is trained, on what, for how long."""

    train: str = option("all", "prior; lora, with the prior where it has numbers; or all")
    rope: str = option("keep", "the model's own positions: keep or drop")
    rank: int = option(8, "rank of LoRA")
    source: str = option("sotu-excerpt", "where texts come from, as in a text recipe")
    facts_fraction: float = option(0.0, "share of rows that state facts and ask for them")
    context: int | None = option(
        None,
        "tokens a row; default: the model's own",
        parse=lambda text: counts(text)[0],
    )
    steps: int = option(500, "steps of the optimiser; 0 for a prior without training")
    batch: int = option(32, "rows a step")
    lr: float = option(5e-4, "learning rate of the weights")
    prior_lr_scale: float = option(20.0, "learning rate of the priors, as a multiple of --lr")
    seed: int = option(0, "seed of the priors, the rows and their order")

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
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise CommandError(
                    f"{option_name(name)} {value}: expected a number of at least {least}"
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
    check_folder(out, resume)
    check_place(split_arm(name)[0])
    # Before transformers makes tensors, since torch reads the setting of large pages at the first
    # one.
    keep_freed_tensors(below=1 << 20)
    # transformers takes seconds to import.
    from modalities.text import adapting

    torch.manual_seed(run.seed)
    model, tokenizer, spec = adapting.open_adaptable(name)
    context = run.context or model.config.max_position_embeddings
    rows_a_pass = adapting.rows_at_once(run.batch, context)
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
    losses: dict[str, float] = {}
    if heldout and not dry_run:
        losses["as it came"] = adapting.heldout_loss(model, heldout)
    add_trainable(model, name, run, position, set_, ssmax)
    trained = freeze_the_rest(model, run.train)
    if run.steps and not trained:
        raise CommandError(
            f"--train {run.train}: {position} has no parameters, nothing would be trained"
        )
    kind = "a whole model" if run.train == "all" else "an adapter"
    facts = {
        "model": f"{type(model).__name__}, {count_numbers(model.parameters()):,} parameters",
        "prior": f"{getattr(model.config, RECORD)['position']}, its own positions: {run.rope}",
        "out": f"{out}, {kind}",
    }
    training: dict[str, str] = {}
    if rows is not None:
        epoch_tokens = rows.rows.epoch_tokens
        training = training_facts(run, context, rows_a_pass, trained, epoch_tokens)
        facts |= training
    console = Console()
    if dry_run:
        if rows is not None:
            heldout_rows = len(heldout) if heldout else 0
            facts["expected"] = expected_cost(
                model, run, context, rows_a_pass, trained, heldout_rows
            )
        console.print(facts_table(f"{name}: dry run", facts))
        return
    console.print(facts_table(f"{name}: plan", facts))
    if rows is not None and heldout is not None:
        losses["adapted"] = adapting.heldout_loss(model, heldout)
        adapting.train_on(
            model,
            rows,
            out,
            batch=run.batch,
            lr=run.lr,
            prior_lr_scale=run.prior_lr_scale,
            seed=run.seed,
            resume=resume,
            tell=progress_printer(console, run.batch * context),
        )
        # Before the last measurement, which may take longer than the training.
        save_result(model, tokenizer, out, run, context, training | loss_figures(losses))
        losses["trained"] = adapting.heldout_loss(model, heldout)
    figures = loss_figures(losses)
    save_result(model, tokenizer, out, run, context, training | figures)
    figures["model"] = f"{out}; zoo.load_adapted({str(out)!r})"
    console.print(facts_table("done", figures))


def loss_figures(losses: Mapping[str, float]) -> dict[str, str]:
    """Held-out losses by stage, as tables and records show them."""
    figures = {}
    for stage, loss in losses.items():
        figures[f"held-out loss, {stage}"] = f"{loss:.4f} nats a token"
    return figures


def save_result(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    run: Adaptation,
    context: int,
    facts: Mapping[str, str],
) -> None:
    """Write the adapter, with a record of its training, or the whole model where all is trained."""
    if run.train == "all":
        # A whole model has no record of a base.
        model.__dict__.pop(RECORD, None)
        tokenizer.save_pretrained(out)
    else:
        record = model.__dict__[RECORD]
        if not run.steps:
            # The adapter fits a base with any weights.
            record["base"]["digest"] = ""
        record["training"] = {"tokens": run.steps * run.batch * context, **facts}
    zoo.save_adapted(model, out)


def check_folder(out: Path, resume: bool) -> None:
    """CommandError where --out holds a model, or nothing to resume from."""
    if any((out / mark).is_file() for mark in ("config.json", ADAPTER)):
        raise CommandError(f"{out} holds a model already; give another --out")
    if resume and not any((out / "checkpoints").glob("*/trained.safetensors")):
        raise CommandError(f"--resume: {out}/checkpoints has no checkpoint")


def add_trainable(
    model: PreTrainedModel,
    name: str,
    run: Adaptation,
    position: str,
    settings: list[str],
    ssmax: bool,
) -> None:
    """Give the model LoRA where it is asked for, and a prior where it has none."""
    from zoo.adapters.released import add_lora

    if run.train != "all" and RECORD not in model.__dict__:
        raise CommandError(f"{name} is a whole adapted model, not a base: expected --train all")
    if run.train == "lora":
        add_lora(model, run.rank)
    if not has_priors(model):
        zoo.adapt(
            model,
            position or "ggd_goat",
            options=parse_overrides(settings),
            keep_rope=run.rope == "keep",
            ssmax=ssmax,
            train_context=run.context,
        )
    elif position or settings or ssmax or run.rope == "drop":
        raise CommandError(
            f"{name} has a prior already: --position, --set, --ssmax and --rope drop do not apply"
        )


def freeze_the_rest(model: PreTrainedModel, train: str) -> list[nn.Parameter]:
    """The parameters that `train` (prior, lora or all) leaves trainable."""
    priors = prior_parameters(model)
    for name, parameter in model.named_parameters():
        if train != "all" and name not in priors and ".lora_" not in name:
            parameter.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def count_numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def training_facts(
    run: Adaptation,
    context: int,
    rows_a_pass: int,
    trained: Sequence[nn.Parameter],
    epoch_tokens: int,
) -> dict[str, str]:
    """What is trained and on what, as the plan and the adapter's record have it."""
    shape = f"{run.batch} rows of {context:,} tokens, {rows_a_pass} a pass"
    tokens = run.steps * run.batch * context
    epochs = tokens / epoch_tokens
    return {
        "trained": f"{count_numbers(trained):,} numbers, {run.steps:,} steps of {shape}",
        "data": f"{tokens:,} tokens, {epochs:.2f} times those of {run.source}",
    }


def expected_cost(
    model: PreTrainedModel,
    run: Adaptation,
    context: int,
    rows_a_pass: int,
    trained: Sequence[nn.Parameter],
    heldout_rows: int,
) -> str:
    """Time and memory of the training, from one pass, and time of the held-out losses, which are
    measured before, between and after."""
    from modalities.text import adapting

    seconds, peak = adapting.expected_cost(model, context, rows_a_pass)
    training = run.steps * run.batch / rows_a_pass * seconds
    # A forward pass takes a third of forward and backward.
    measuring = 3 * heldout_rows / rows_a_pass * seconds / 3
    times = f"{clock(training)} of training, {clock(measuring)} of held-out losses (estimated)"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # Gradients and the optimiser's two moments.
    states = 3 * sum(parameter.nbytes for parameter in trained)
    return f"{times}, {(peak + weights + states) / 2**30:.1f} GiB plus libraries"


def progress_printer(
    console: Console, tokens_per_step: int
) -> Callable[[int, int, float, int], None]:
    """A function that prints a line of progress; its time begins here."""
    started = time.perf_counter()

    def tell(step: int, steps: int, loss: float, done: int) -> None:
        """done: steps of this process, without those before a resume."""
        rate = done * tokens_per_step / (time.perf_counter() - started)
        remaining = clock((steps - step) * tokens_per_step / rate)
        console.print(
            f"step {step:,}/{steps:,}  loss {loss:.4f}  {short(rate)} tokens/s  left {remaining}"
        )

    return tell


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo adapt") -> int:
    return call(with_options(adapt_command, {"adapt": Adaptation}), argv, prog=prog)
