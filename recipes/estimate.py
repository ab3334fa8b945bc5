"""`--dry-run` and `--calibrate`: what a recipe would run, cost and need, and a few real steps timed. Nothing is written."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch

from modalities.contract import Batch, Modality, find_modality
from modalities.cost import Meter, device_name
from recipes import engine as backend
from recipes.config import ConfigError, Optim, Plan, Recipe, resolve
from recipes.console import Console, clock, facts_table, short
from recipes.during import find_evaluators
from zoo.errors import one_line, ran_out_of_memory
from zoo.model import ZooModel

WARM_UP = 2  # steps before those that are timed: moments are allocated, kernels compiled and chosen

# Dense FLOP/s in bf16 and fp16, and in fp32 without TF32, by what CUDA calls the device; NVIDIA's data sheets, which count
# sparsity twice. https://resources.nvidia.com/en-us-tensor-core (H100, H200), https://www.nvidia.com/en-us/data-center/ (a100,
# a10, l4, l40s, dgx-b200). The first match counts.
PEAKS: dict[str, tuple[float, float | None]] = {
    r"B200": (2250e12, None),
    r"H200 NVL": (835e12, 60e12),
    r"H200": (989e12, 67e12),
    r"H100 NVL": (835e12, 60e12),
    r"H100 PCIe": (756e12, 51e12),
    r"H100.* HBM3": (989e12, 67e12),
    r"A100": (312e12, 19.5e12),
    r"A10": (125e12, 31.2e12),
    r"L40S": (362e12, 91.6e12),
    r"L4": (121e12, 30.3e12),
}
# Of other devices matrix products are timed: their sides, and how many at a time.
PRODUCT = {"cpu": (1024, 4), "cuda": (8192, 20)}
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler")  # of a DeepSpeed file: they write


def print_plan(
    recipe: Recipe,
    *,
    user_config: dict[str, Any],
    overridden_keys: set[str],
    world: int | None,
    calibrate: int,
    verbose: bool,
    take_step: Callable[..., Any],
) -> int:
    """Print the resolved recipe, the DeepSpeed configuration and the figures; the lead rank only. Returns 0.

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
        for title, section in {"recipe": plan.to_dict(), "DeepSpeed": plan.deepspeed}.items():
            print(f"{title}\n{json.dumps(section, indent=2)}")
        Console().print(facts_table(f"{recipe.name} (dry run)", figures))
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
        batches, data = _batches(plan, ranks, modality)
        with Meter(ranks.device) as meter:
            model = modality.build(recipe.model.name, recipe.model.options, recipe.data)
            engine = backend.Engine(model, plan, ranks)
            engine.train()
            for number in range(1, WARM_UP + 1):
                take_step(engine, modality, batches, number)
        for number in range(WARM_UP + 1, WARM_UP + steps + 1):  # without the meter, which takes time itself on the CPU
            begun = time.perf_counter()
            targets = take_step(engine, modality, batches, number).targets
            _synchronize(ranks)
            seconds.append(time.perf_counter() - begun)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of train.micro_batch={recipe.train.micro_batch} does not fit on {device_name(ranks.device)}: expected a "
            "smaller one, more train.zero_stage, or model.options.activation_checkpointing=true"
        ) from error
    peak_bytes = max((peak for peak in engine.gather(meter.peak_bytes) if peak is not None), default=None)
    flops, peak = (
        modality.cost(model, recipe.data, 4).flops * recipe.train.batch,
        find_peak(ranks, recipe.train.precision),
    )
    return calibration(plan, seconds, targets, peak_bytes, flops, peak) | {"calibrated on": data}


def calibration(
    plan: Plan, seconds: Sequence[float], targets: float, peak_bytes: int | None, flops: float, peak: tuple[float, str]
) -> dict[str, str]:
    """Figures of timed steps. targets, flops: of a step, over all ranks; peak: FLOP/s of a device at most, and its source."""
    unit, steps = find_modality(plan.recipe.modality).unit, plan.recipe.train.steps
    each = statistics.median(seconds)
    memory = "not to be read here" if peak_bytes is None else f"{peak_bytes / 2**30:.2f} GiB at the peak"
    return {
        "measured memory per rank": memory,
        "measured speed": f"{short(targets / each)} {unit}/s",
        "measured seconds a step": f"{each:.3g}, the median of {len(seconds)} after {WARM_UP} to warm up, from "
        f"{min(seconds):.3g} to {max(seconds):.3g}",
        "MFU": f"{flops / each / (plan.world * peak[0]):.1%} of {short(peak[0])}FLOP/s a rank ({peak[1]})",
        "time to the end": f"{clock(each * steps)} for {steps:,} steps, without evaluation and saving",
    }


def _batches(plan: Plan, ranks: backend.Ranks, modality: Modality) -> tuple[Iterator[Batch], str]:
    """(micro-batches without end, what they are): the recipe's, or random ones of their shapes where a rank finds no data."""
    recipe, reason = plan.recipe, ""
    data, micro = recipe.data, recipe.train.micro_batch or 1
    try:
        loader = iter(modality.loader(data, rank=ranks.group, world=ranks.groups, micro_batch=micro))
        first = next(loader)
    except (OSError, ValueError, ImportError) as error:
        reason = one_line(error)
    reasons = [reason] * ranks.world
    if ranks.world > 1:
        torch.distributed.all_gather_object(reasons, reason)
    if not any(reasons):
        return chain([first], loader), "the recipe's data"
    reason = next(filter(None, reasons))
    if modality.example is None:
        raise ConfigError(f"--calibrate: {reason}")
    example = modality.example(build_on_meta(recipe), data, micro)
    return repeat(example), f"random batches of its shapes: the recipe's data could not be opened: {reason}"


def find_peak(ranks: backend.Ranks, precision: str) -> tuple[float, str]:
    """(FLOP/s of a rank's device, their source): a data sheet, or what matrix products reach. Every rank must call."""
    name = device_name(ranks.device)
    for pattern, (half, single) in PEAKS.items():
        peak = single if precision == "fp32" else half
        if peak and re.search(rf"\b{pattern}\b", name) and "MIG" not in name:
            return peak, f"{name}, dense {precision}, by its data sheet"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    side, repetitions = PRODUCT[ranks.device.type]
    a = torch.randn(side, side, device=ranks.device).to(dtype)
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(repetitions):
            a @ a
        _synchronize(ranks)
        best = min(best, time.perf_counter() - begun)
    reached = 2 * side**3 * repetitions / best
    return reached, f"{name}, no data sheet known: what {precision} products of {side} × {side} reach"


def _synchronize(ranks: backend.Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
