"""`--calibrate`: a few real steps of a plan on this machine, and what the whole run will take by them. It writes nothing."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch

from modalities.contract import Batch, Modality, find_modality
from modalities.cost import Meter, device_name
from recipes.config import ConfigError, Plan
from recipes.console import clock, short
from recipes.engine import Ranks
from recipes.plain import create_engine
from recipes.step import take_step
from zoo.errors import one_line, ran_out_of_memory

__all__ = ["Calibration", "time_steps"]

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


@dataclass(frozen=True)
class Calibration:
    """Timed steps of a plan.

    Attributes:
        seconds: of each step, of the lead rank.
        count: targets of a step, over all ranks.
        peak_bytes: memory of a rank at its peak, the largest of them; None where it cannot be read.
        peak_flops: FLOP/s of a rank's device at most. peak_source: where that is from.
        data: what the batches were.
    """

    seconds: tuple[float, ...]
    count: float
    peak_bytes: int | None
    peak_flops: float
    peak_source: str
    data: str

    def lines(self, plan: Plan, flops: float) -> dict[str, str]:
        """What a plan's table says, for `flops` a step."""
        unit, steps = find_modality(plan.recipe.modality).unit, plan.recipe.train.steps
        each = statistics.median(self.seconds)
        share = flops / each / (plan.world * self.peak_flops)
        memory = "not to be read here" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f} GiB at the peak"
        return {
            "measured memory per rank": memory,
            "measured speed": f"{short(self.count / each)} {unit}/s",
            "measured seconds a step": f"{each:.3g}, the median of {len(self.seconds)} after {WARM_UP} to warm up, from "
            f"{min(self.seconds):.3g} to {max(self.seconds):.3g}",
            "MFU": f"{share:.1%} of {short(self.peak_flops)}FLOP/s a rank ({self.peak_source})",
            "time to the end": f"{clock(each * steps)} for {steps:,} steps, without evaluation and saving",
            "calibrated on": self.data,
        }


def time_steps(plan: Plan, ranks: Ranks, steps: int) -> Calibration:
    """Time `steps` steps of the plan's model, engine, DeepSpeed configuration and batches. Every rank must call.

    Raises:
        ConfigError: where the device has not the memory.
    """
    recipe, modality = plan.recipe, find_modality(plan.recipe.modality)
    plan = replace(plan, deepspeed={key: value for key, value in plan.deepspeed.items() if key not in MONITORS})
    seconds = []
    torch.manual_seed(recipe.train.seed)
    try:
        batches, data = _batches(plan, ranks, modality)
        with Meter(ranks.device) as meter:
            engine = create_engine(modality.build(recipe.model.name, recipe.model.options, recipe.data), plan, ranks)
            engine.train()
            for number in range(WARM_UP):
                take_step(engine, modality, batches, number + 1)
        for number in range(WARM_UP, WARM_UP + steps):  # without the meter, which takes time itself on the CPU
            begun = time.perf_counter()
            count = take_step(engine, modality, batches, number + 1).targets
            _wait_for(ranks)
            seconds.append(time.perf_counter() - begun)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(
            f"a step of train.micro_batch={recipe.train.micro_batch} does not fit on {device_name(ranks.device)}: expected a "
            "smaller one, more train.zero_stage, or model.options.activation_checkpointing=true"
        ) from error
    peaks = [peak for peak in engine.gather(meter.peak_bytes) if peak is not None]
    peak_flops, source = find_peak(ranks, recipe.train.precision)
    return Calibration(tuple(seconds), count, max(peaks, default=None), peak_flops, source, data)


def _batches(plan: Plan, ranks: Ranks, modality: Modality) -> tuple[Iterator[Batch], str]:
    """(micro-batches without end, what they are): the recipe's, or random ones of their shapes where a rank finds no data."""
    recipe = plan.recipe
    data, micro = recipe.data, recipe.train.micro_batch or 1
    missing = ""
    try:
        loader = iter(modality.loader(data, rank=ranks.group, world=ranks.groups, micro_batch=micro))
        first = next(loader)
    except (OSError, ValueError, ImportError) as error:
        missing = one_line(error)
    found: list[str] = [missing]
    if ranks.world > 1:
        found = [""] * ranks.world
        torch.distributed.all_gather_object(found, missing)
    if not any(found):
        return chain([first], loader), "the recipe's data"
    missing = next(filter(None, found))
    if modality.example is None:
        raise ConfigError(f"--calibrate: {missing}")
    with torch.device("meta"):
        model = modality.build(recipe.model.name, recipe.model.options, data)
    example = modality.example(model, data, micro)
    return repeat(example), f"random batches of its shapes: the recipe's data could not be opened: {missing}"


def find_peak(ranks: Ranks, precision: str) -> tuple[float, str]:
    """(FLOP/s of a rank's device, where that is from): of a data sheet, or what matrix products reach. Every rank must call."""
    name = device_name(ranks.device)
    for pattern, (half, single) in PEAKS.items():
        peak = single if precision == "fp32" else half
        if peak and re.search(rf"\b{pattern}\b", name) and "MIG" not in name:
            return peak, f"{name}, dense {precision}, by its data sheet"
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    side, repetitions = PRODUCT[ranks.device.type]
    a = torch.randn(side, side, device=ranks.device).to(kinds[precision])
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(repetitions):
            a @ a
        _wait_for(ranks)
        best = min(best, time.perf_counter() - begun)
    reached = 2 * side**3 * repetitions / best
    return reached, f"{name}, no data sheet known: what {precision} products of {side} × {side} reach"


def _wait_for(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
