"""What a recipe would run, cost and need, from shapes: `priorzoo train --dry-run`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

import torch

from modalities.contract import Cost, find_modality
from modalities.evaluation import scheduled_evaluators
from recipes.commands import facts_table, short
from recipes.plan import Plan
from recipes.ranks import check_sequence
from recipes.recipe import Optim, Recipe
from zoo.console import Console
from zoo.model import ZooModel

GIB = 2**30


def print_plan(plan: Plan, *, as_json: bool, measured: Mapping[str, str] | None = None) -> None:
    """Print the figures of a plan, by the lead rank.

    as_json: with the resolved recipe and the DeepSpeed configuration. ValueError where an evaluator
    of `evaluate.during` cannot run.
    """
    recipe = plan.recipe
    known = find_modality(recipe.modality).evaluators
    scheduled_evaluators(recipe.evaluate.during, known, asdict(recipe.data))
    figures = describe(plan)
    figures |= measured or {}
    if int(os.environ.get("RANK", 0)) != 0:
        return
    if as_json:
        record = {"recipe": plan.to_dict(), "deepspeed": plan.deepspeed, "figures": figures}
        print(json.dumps(record, indent=2))
    else:
        title = f"{recipe.name} (dry run; --json prints every setting)"
        Console().print(facts_table(title, figures))


def build_on_meta(recipe: Recipe) -> ZooModel:
    """The recipe's model with shapes and no storage, whatever its size."""
    modality = find_modality(recipe.modality)
    with torch.device("meta"):
        return modality.build(recipe.model.name, recipe.model.options, recipe.data)


def describe(plan: Plan) -> dict[str, str]:
    """Figures of a plan as text, by name."""
    recipe = plan.recipe
    train = plan.recipe.train
    modality = find_modality(recipe.modality)
    model = build_on_meta(recipe)
    shared = train.sequence_parallel
    check_sequence(model, shared)
    parameters = sum(p.numel() for p in model.parameters())
    value_bytes = 4 if train.precision == "fp32" else 2
    cost = modality.cost(model, recipe.data, value_bytes)
    samples = train.batch * train.steps
    ranks = f"ranks {plan.world}" if shared == 1 else f"groups of ranks {plan.groups}"
    sizes = f"micro-batch {train.micro_batch} × accumulation {train.accumulation} × {ranks}"
    units = f"{samples * cost.units:,} = {train.steps:,} steps × {train.batch * cost.units:,}"
    figures = {
        "model": f"{recipe.model.name}, {parameters:,} parameters ({short(parameters)})",
        "batch": f"{train.batch} = {sizes}",
        modality.unit: units,
        "optimiser": schedule_in_words(recipe.optim, train.steps),
        "precision, ZeRO": f"{train.precision}, stage {train.zero_stage}",
    }
    if shared > 1:
        part = f"{cost.units // shared:,} of {cost.units:,} {modality.unit} each"
        figures["sequence parallelism"] = f"{shared} ranks share a line: {part}"
    flops = f"{short(samples * cost.flops)} in all, {short(train.batch * cost.flops)} a step"
    figures["estimated FLOPs"] = flops
    memory = memory_per_rank(parameters, plan, cost)
    parts = ", ".join(f"{use} {size / GIB:.2f}" for use, size in memory.items())
    figures["estimated memory per rank"] = f"{sum(memory.values()) / GIB:.2f} GiB: {parts}"
    return figures


def memory_per_rank(parameters: int, plan: Plan, cost: Cost) -> dict[str, float]:
    """Bytes by use.

    A parameter has in fp32 4 bytes of weights, 4 of gradients and 8 of Adam's moments; in bf16 and
    fp16 2, 2 and 12, which are moments and the fp32 copy.

    ZeRO divides by the ranks: from stage 1 the optimiser's, from 2 the gradients, from 3 the
    weights. Ranks that share lines divide the activations. Logits stand three times at the peak.
    What a DeepSpeed file offloads to the CPU is not deducted.
    """
    train = plan.recipe.train
    rows = (train.micro_batch or 1) / train.sequence_parallel
    if train.precision == "fp32":
        parameter_bytes = {"weights": 4, "gradients": 4, "optimiser": 8}
    else:
        parameter_bytes = {"weights": 2, "gradients": 2, "optimiser": 12}
    # ZeRO's stage from which each is divided.
    stages = {"weights": 3, "gradients": 2, "optimiser": 1}
    memory: dict[str, float] = {}
    for use, size in parameter_bytes.items():
        divisor = plan.world if train.zero_stage >= stages[use] else 1
        memory[use] = size * parameters / divisor
    memory["activations"] = cost.activation_bytes * rows
    memory["logits"] = 3 * min(cost.logit_bytes * rows, cost.most_logit_bytes)
    if train.ema:
        memory["average"] = 4 * parameters
    return memory


def schedule_in_words(optim: Optim, steps: int) -> str:
    """Optimiser and schedule as a person says them.

    "adamw, learning rate 0.002: linear warm-up over 50 steps, then cosine to 0.0002 at step 800"
    """
    if optim.warmup and steps <= optim.warmup + 1:
        last = optim.lr * min(1, steps / optim.warmup)
        return (
            f"{optim.name}, learning rate {last:g} at the end: warm-up to {optim.lr:g} takes "
            f"{optim.warmup:,} steps"
        )
    warmup = ""
    if optim.warmup:
        warmup = f"linear warm-up over {optim.warmup:,} steps, then "
    end = ""
    if optim.schedule != "constant":
        end = f" to {optim.lr * optim.floor:g} at step {steps:,}"
    return f"{optim.name}, learning rate {optim.lr:g}: {warmup}{optim.schedule}{end}"
