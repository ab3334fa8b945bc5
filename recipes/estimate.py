"""`--dry-run`: what a recipe would run, cost and need, from shapes. `--calibrate`: a few of its
steps, measured."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from modalities.contract import Cost, find_modality
from modalities.cost import Meter
from modalities.evaluation import scheduled_evaluators
from recipes.commands import ConfigError, Console, clock, facts_table, short
from recipes.engine import check_sequence
from recipes.plan import Plan
from recipes.recipe import Optim, Recipe
from zoo.errors import ran_out_of_memory
from zoo.model import ZooModel

if TYPE_CHECKING:
    from recipes.train import Trainer

WARM_UP = 2  # steps before those that are timed: moments are allocated, kernels compiled and chosen
MONITORS = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
)  # of a DeepSpeed file: they write


def print_plan(plan: Plan, *, as_json: bool, measured: Mapping[str, str] | None = None) -> None:
    """Print the figures of a plan, by the lead rank; as_json: with the resolved recipe and the
    DeepSpeed configuration."""
    recipe = plan.recipe
    known = find_modality(recipe.modality).evaluators
    scheduled_evaluators(
        recipe.evaluate.during, known, asdict(recipe.data)
    )  # ValueError for what cannot run
    figures = describe(plan) | dict(measured or {})
    if int(os.environ.get("RANK", 0)):
        return
    if as_json:
        print(
            json.dumps(
                {"recipe": plan.to_dict(), "deepspeed": plan.deepspeed, "figures": figures},
                indent=2,
            )
        )
    else:
        Console().print(
            facts_table(f"{recipe.name} (dry run; --json prints every setting)", figures)
        )


def calibrated(trainer: Trainer, steps: int) -> dict[str, str]:
    """Figures of so many real steps of a trainer before its `setup`. Every rank must call.

    Memory is what `memory_per_rank` estimates: weights, the optimiser's copies of them, and what
    steps add at their peak. Code
    of libraries is not counted: on the CPU that is several hundred MiB of a process.
    Raises ConfigError where the device has not the memory.
    """
    device = trainer.ranks.device
    settings = trainer.settings
    seconds: list[float] = []
    targets = 0.0
    try:
        trainer.setup(None)
        trainer.engine.train()
        held = (
            torch.cuda.memory_allocated(device)
            if device.type == "cuda"
            else trainer.engine.held_bytes()
        )
        with Meter(device) as meter:
            for _ in range(WARM_UP + steps):
                (_, _, targets, _), spent = trainer.read(trainer.launch())
                seconds.append(spent)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of train.micro_batch={settings.micro_batch} does not fit on {device}: expected a smaller one, more "
            "train.zero_stage, or model.options.activation_checkpointing=true"
        ) from error
    peaks = [held + peak for peak in trainer.engine.gather(meter.peak_bytes) if peak is not None]
    timed = seconds[WARM_UP:]
    each = statistics.median(timed)
    return {
        "measured memory per rank": f"{max(peaks) / 2**30:.2f} GiB at the peak"
        if peaks
        else "not to be read here",
        "measured speed": f"{short(targets / each)} {trainer.modality.unit}/s",
        "measured seconds a step": f"{each:.3g}, the median of {len(timed)}, from {min(timed):.3g} to {max(timed):.3g}",
        "time to the end": f"{clock(each * settings.steps)}, without evaluation and saving",
    }


def build_on_meta(recipe: Recipe) -> ZooModel:
    """The recipe's model with shapes and no storage, whatever its size."""
    with torch.device("meta"):
        return find_modality(recipe.modality).build(
            recipe.model.name, recipe.model.options, recipe.data
        )


def describe(plan: Plan) -> dict[str, str]:
    """Figures of a plan as text, by name."""
    recipe = plan.recipe
    train = plan.recipe.train
    modality = find_modality(recipe.modality)
    model = build_on_meta(recipe)
    shared = train.sequence_parallel
    check_sequence(model, shared)
    parameters = sum(p.numel() for p in model.parameters())
    cost = modality.cost(model, recipe.data, 4 if train.precision == "fp32" else 2)
    samples = train.batch * train.steps
    memory = memory_per_rank(parameters, plan, cost)
    lines = f"{shared} ranks share a line: {cost.units // shared:,} of {cost.units:,} {modality.unit} each"
    return {
        "model": f"{recipe.model.name}, {parameters:,} parameters ({short(parameters)})",
        "batch": f"{train.batch} = micro-batch {train.micro_batch} × accumulation {train.accumulation} × "
        + (f"ranks {plan.world}" if shared == 1 else f"groups of ranks {plan.groups}"),
        modality.unit: f"{samples * cost.units:,} = {train.steps:,} steps × {train.batch * cost.units:,}",
        "optimiser": schedule_in_words(recipe.optim, train.steps),
        "precision, ZeRO": f"{train.precision}, stage {train.zero_stage}",
        **({"sequence parallelism": lines} if shared > 1 else {}),
        "estimated FLOPs": f"{short(samples * cost.flops)} in all, {short(train.batch * cost.flops)} a step",
        "estimated memory per rank": f"{sum(memory.values()) / 2**30:.2f} GiB: "
        + ", ".join(f"{use} {size / 2**30:.2f}" for use, size in memory.items()),
    }


def memory_per_rank(parameters: int, plan: Plan, cost: Cost) -> dict[str, float]:
    """Bytes by use. fp32: 4 weights + 4 gradients + 8 Adam moments a parameter. bf16, fp16: 2 + 2
    + 12 (fp32 copy, moments).

    ZeRO divides by the ranks: from stage 1 the optimiser's, from 2 the gradients, from 3 the
    weights. Ranks that share lines divide the activations. Logits stand three times at the peak.
    What a DeepSpeed file offloads to the CPU is not deducted.
    """
    train = plan.recipe.train
    world = plan.world
    rows = (train.micro_batch or 1) / train.sequence_parallel
    weights, gradients, optimizer = (4, 4, 8) if train.precision == "fp32" else (2, 2, 12)
    memory = {
        "weights": weights * parameters / (world if train.zero_stage >= 3 else 1),
        "gradients": gradients * parameters / (world if train.zero_stage >= 2 else 1),
        "optimiser": optimizer * parameters / (world if train.zero_stage >= 1 else 1),
        "activations": cost.activation_bytes * rows,
        "logits": 3 * min(cost.logit_bytes * rows, cost.most_logit_bytes),
    }
    return memory | ({"average": 4 * parameters} if train.ema else {})


def schedule_in_words(optim: Optim, steps: int) -> str:
    """ "adamw, learning rate 0.002: linear warm-up over 50 steps, then cosine to 0.0002 at step
    800"."""
    if optim.warmup and steps <= optim.warmup + 1:
        last = optim.lr * min(1, steps / optim.warmup)
        return f"{optim.name}, learning rate {last:g} at the end: warm-up to {optim.lr:g} takes {optim.warmup:,} steps"
    warmup = f"linear warm-up over {optim.warmup:,} steps, then " if optim.warmup else ""
    end = (
        "" if optim.schedule == "constant" else f" to {optim.lr * optim.floor:g} at step {steps:,}"
    )
    return f"{optim.name}, learning rate {optim.lr:g}: {warmup}{optim.schedule}{end}"
