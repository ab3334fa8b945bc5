"""`--dry-run` and `--calibrate`: what a recipe would run, cost and need, and a few real steps timed. Nothing is written."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modalities.contract import find_modality
from modalities.cost import Meter, device_name
from recipes import engine as backend
from recipes.config import ConfigError, Optim, Plan, Recipe, resolve
from recipes.console import Console, clock, facts_table, short
from recipes.during import find_evaluators
from zoo.errors import ran_out_of_memory
from zoo.model import ZooModel

WARM_UP = 2  # steps before those that are timed: moments are allocated, kernels compiled and chosen

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")  # of a DeepSpeed file: they write


def print_plan(
    recipe: Recipe,
    *,
    user_config: dict[str, Any],
    overridden_keys: set[str],
    world: int | None,
    calibrate: int,
    verbose: bool,
    as_json: bool,
    take_step: Callable[..., Any],
) -> int:
    """Print the figures of a recipe; the lead rank only. Returns 0.

    as_json: print the resolved recipe, the DeepSpeed configuration and the figures as one JSON object.
    calibrate: real steps to time by the loop's `take_step`, whose figures come last; every rank must call then.
    """
    world = world or int(os.environ.get("WORLD_SIZE", 1))
    device = "cuda" if backend.wants_cuda() else "cpu"
    plan = resolve(recipe, world=world, device=device, user_config=user_config, overridden_keys=overridden_keys)
    find_evaluators(recipe, find_modality(recipe.modality))  # ConfigError for what `evaluate.during` cannot run
    figures = describe(plan)
    if calibrate:
        ranks = replace(backend.start(verbose=verbose), shared=plan.recipe.train.sequence_parallel)
        figures |= time_steps(plan, ranks, calibrate, take_step)
    if int(os.environ.get("RANK", 0)) == 0:
        if as_json:
            print(json.dumps({"recipe": plan.to_dict(), "deepspeed": plan.deepspeed, "figures": figures}, indent=2))
        else:
            Console().print(facts_table(f"{recipe.name} (dry run; --json prints every setting)", figures))
    return 0


def build_on_meta(recipe: Recipe) -> ZooModel:
    """The recipe's model with shapes and no storage, whatever its size."""
    with torch.device("meta"):
        return find_modality(recipe.modality).build(recipe.model.name, recipe.model.options, recipe.data)


def describe(plan: Plan) -> dict[str, str]:
    """Figures of a plan as text, by name."""
    recipe, train = plan.recipe, plan.recipe.train
    modality, model, shared = find_modality(recipe.modality), build_on_meta(recipe), train.sequence_parallel
    backend.check_sequence(model, shared)
    parameters = sum(p.numel() for p in model.parameters())
    cost = modality.cost(model, recipe.data, 4 if train.precision == "fp32" else 2)
    samples = train.batch * train.steps
    memory = memory_per_rank(parameters, plan, cost.activation_bytes)
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


def memory_per_rank(parameters: int, plan: Plan, activation_bytes: float) -> dict[str, float]:
    """Bytes by use. fp32: 4 weights + 4 gradients + 8 Adam moments a parameter. bf16, fp16: 2 + 2 + 12 (fp32 copy, moments).

    ZeRO divides by the ranks: from stage 1 the optimiser's, from 2 the gradients, from 3 the weights. Ranks that share lines
    divide the activations. What a DeepSpeed file offloads to the CPU is not deducted.
    """
    train, world = plan.recipe.train, plan.world
    weights, gradients, optimizer = (4, 4, 8) if train.precision == "fp32" else (2, 2, 12)
    memory = {
        "weights": weights * parameters / (world if train.zero_stage >= 3 else 1),
        "gradients": gradients * parameters / (world if train.zero_stage >= 2 else 1),
        "optimiser": optimizer * parameters / (world if train.zero_stage >= 1 else 1),
        "activations": activation_bytes * (train.micro_batch or 1) / train.sequence_parallel,
    }
    return memory | ({"average": 4 * parameters} if train.ema else {})


def schedule_in_words(optim: Optim, steps: int) -> str:
    """ "adamw, learning rate 0.002: linear warm-up over 50 steps, then cosine to 0.0002 at step 800"."""
    warmup = f"linear warm-up over {optim.warmup:,} steps, then " if optim.warmup else ""
    end = "" if optim.schedule == "constant" else f" to {optim.lr * optim.floor:g} at step {steps:,}"
    return f"{optim.name}, learning rate {optim.lr:g}: {warmup}{optim.schedule}{end}"


# ------------------------------------------------------------------------------------------------- real steps


def time_steps(plan: Plan, ranks: backend.Ranks, steps: int, take_step: Callable[..., Any]) -> dict[str, str]:
    """Figures of `steps` real steps of the plan. Every rank must call. ConfigError where the device has not the memory."""
    recipe, modality = plan.recipe, find_modality(plan.recipe.modality)
    plan = replace(plan, deepspeed={key: value for key, value in plan.deepspeed.items() if key not in MONITORS})
    torch.manual_seed(recipe.train.seed)
    seconds = []
    try:
        share = {"rank": ranks.group, "world": ranks.groups, "micro_batch": recipe.train.micro_batch or 1}
        batches = iter(modality.loader(recipe.data, **share))
        with Meter(ranks.device) as meter:
            model = modality.build(recipe.model.name, recipe.model.options, recipe.data)
            engine = backend.Engine(model, plan, ranks)
            engine.train()
            for number in range(1, WARM_UP + 1):
                take_step(engine, modality, batches, number)
        for number in range(WARM_UP + 1, WARM_UP + steps + 1):  # without the meter, which takes time itself on the CPU
            begun = time.perf_counter()
            targets = take_step(engine, modality, batches, number).targets
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            seconds.append(time.perf_counter() - begun)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of train.micro_batch={recipe.train.micro_batch} does not fit on {device_name(ranks.device)}: expected a "
            "smaller one, more train.zero_stage, or model.options.activation_checkpointing=true"
        ) from error
    peak_bytes = max((peak for peak in engine.gather(meter.peak_bytes) if peak is not None), default=None)
    each = statistics.median(seconds)
    flops = modality.cost(model, recipe.data, 4).flops * recipe.train.batch / plan.world
    memory = "not to be read here" if peak_bytes is None else f"{peak_bytes / 2**30:.2f} GiB at the peak"
    return {
        "measured memory per rank": memory,
        "measured speed": f"{short(targets / each)} {modality.unit}/s, {short(flops / each)}FLOP/s a rank",
        "measured seconds a step": f"{each:.3g}, the median of {len(seconds)} after {WARM_UP} to warm up, from "
        f"{min(seconds):.3g} to {max(seconds):.3g}",
        "time to the end": f"{clock(each * recipe.train.steps)}, without evaluation and saving",
    }
