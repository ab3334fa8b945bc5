"""`--dry-run`: what a recipe would run, cost and need, without touching data, disk or the process group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modalities.contract import find_modality
from recipes.config import Optim, Plan, Recipe, resolve
from recipes.console import facts_table, short
from recipes.during import find_monitors
from recipes.sequence import check_sequence

if TYPE_CHECKING:
    from recipes.calibrate import Calibration

GPUS = (24, 80, 139)  # GiB of memory


def memory_per_rank(parameters: int, plan: Plan, activation_bytes: float) -> dict[str, float]:
    """Bytes by use. fp32: 4 weights + 4 gradients + 8 Adam moments a parameter. bf16, fp16: 2 + 2 + 12 (fp32 copy, moments).

    ZeRO divides by the ranks: from stage 1 the optimiser's, from 2 the gradients, from 3 the weights. Ranks that share lines
    divide the activations.
    """
    weights, gradients, optimizer = (4, 4, 8) if plan.recipe.train.precision == "fp32" else (2, 2, 12)
    stage, world = plan.recipe.train.zero_stage, plan.world
    memory = {
        "weights": weights * parameters / (world if stage >= 3 else 1),
        "gradients": gradients * parameters / (world if stage >= 2 else 1),
        "optimiser": optimizer * parameters / (world if stage >= 1 else 1),
        "activations": activation_bytes * (plan.recipe.train.micro_batch or 1) / plan.recipe.train.sequence_parallel,
    }
    return memory | ({"average": 4 * parameters} if plan.recipe.train.ema else {})


def offloaded(memory: dict[str, float], plan: Plan) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """(bytes that stay on the device, bytes by place: "CPU", "NVMe"), by the offload sections of the DeepSpeed file.

    offload_optimizer takes the optimiser's numbers and, to the CPU in either case, the gradients; offload_param, at stage 3,
    the weights. `ratio` is the share of the optimiser's numbers that goes. DeepSpeed's buffers are not booked.
    """
    zero = plan.deepspeed["zero_optimization"]
    optimizer, weights = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    stage, names = plan.recipe.train.zero_stage, {"cpu": "CPU", "nvme": "NVMe"}
    stays = dict(memory)
    goes: dict[str, dict[str, float]] = {"CPU": {}, "NVMe": {}}

    def move(use: str, place: str, share: float = 1.0) -> None:
        goes[place][use] = memory[use] * share
        stays[use] = memory[use] * (1 - share)

    # At stages 1 and 2 DeepSpeed keeps on the CPU what is to go to NVMe.
    if stage >= 1 and (place := names.get(optimizer.get("device", ""))):
        move("optimiser", place if stage == 3 else "CPU", optimizer.get("ratio", 1.0))
        move("gradients", "CPU")
    if stage == 3 and (place := names.get(weights.get("device", ""))):
        move("weights", place)
    return {use: size for use, size in stays.items() if size}, {place: uses for place, uses in goes.items() if uses}


def gibibytes(memory: dict[str, float]) -> str:
    """The sum and its parts."""
    return f"{sum(memory.values()) / 2**30:.2f} GiB: " + ", ".join(f"{n} {b / 2**30:.2f}" for n, b in memory.items())


def build_on_meta(recipe: Recipe) -> Any:
    """The recipe's model with shapes and no storage, whatever its size."""
    import torch

    with torch.device("meta"):
        return find_modality(recipe.modality).build(recipe.model.name, recipe.model.options, recipe.data)


def describe(plan: Plan, calibrate: Callable[[Plan], Calibration] | None = None) -> dict[str, str]:
    """The figures of a plan as text, by name; those that `calibrate` measures come last."""
    recipe, train = plan.recipe, plan.recipe.train
    modality = find_modality(recipe.modality)
    model = build_on_meta(recipe)
    check_sequence(model, train.sequence_parallel)
    parameters = sum(p.numel() for p in model.parameters())
    cost = modality.cost(model, recipe.data, 4 if train.precision == "fp32" else 2)
    samples = train.batch * train.steps
    memory, elsewhere = offloaded(memory_per_rank(parameters, plan, cost.activation_bytes), plan)
    lines = {}
    if (shared := train.sequence_parallel) > 1:
        lines["sequence parallelism"] = (
            f"{shared} ranks share a line: {cost.units // shared:,} of {cost.units:,} {modality.unit} each, and inside "
            f"attention {model.config.num_heads // shared} of {model.config.num_heads} heads"
        )
        lines["longest line that fits"] = ", ".join(
            f"{longest_line(memory, cost.units, size * 2**30):,} {modality.unit} in {size} GiB" for size in GPUS
        )
    return {
        "model": f"{recipe.model.name}, {parameters:,} parameters ({short(parameters)})",
        "batch": f"{train.batch} = micro-batch {train.micro_batch} × accumulation {train.accumulation} × "
        + (f"ranks {plan.world}" if shared == 1 else f"groups of ranks {plan.groups}"),
        modality.unit: f"{samples * cost.units:,} = {train.steps:,} steps × {train.batch * cost.units:,}",
        "optimiser": schedule_in_words(recipe.optim, train.steps),
        "precision, ZeRO": f"{train.precision}, stage {train.zero_stage}",
        **lines,
        "estimated FLOPs": f"{short(samples * cost.flops)} in all, {short(train.batch * cost.flops)} a step",
        "estimated memory per rank": gibibytes(memory),
        **{f"offloaded to {place} per rank": gibibytes(uses) for place, uses in elsewhere.items()},
        **(calibrate(plan).lines(plan, train.batch * cost.flops) if calibrate else {}),
    }


def schedule_in_words(optim: Optim, steps: int) -> str:
    """ "adamw, learning rate 0.002: linear warm-up over 50 steps, then cosine to 0.0002 at step 800"."""
    warmup = f"linear warm-up over {optim.warmup:,} steps, then " if optim.warmup else ""
    then = (
        "constant"
        if optim.schedule == "constant"
        else f"{optim.schedule} to {optim.lr * optim.floor:g} at step {steps:,}"
    )
    return f"{optim.name}, learning rate {optim.lr:g}: {warmup}{then}"


def longest_line(memory: Mapping[str, float], units: int, room: float) -> int:
    """How many tokens a line could have for a rank to do with `room` bytes, by its memory for lines of `units` tokens.

    Of what grows with the line only activations are estimated: leave room for what a kernel needs while it runs.
    """
    states = sum(size for name, size in memory.items() if name != "activations")
    return max(0, int((room - states) / (memory["activations"] / units)))


def print_plan(
    recipe: Recipe,
    user_config: dict[str, Any],
    overridden_keys: set[str],
    *,
    world: int | None = None,
    calibrate: int = 0,
    verbose: bool = False,
) -> int:
    """Print the resolved recipe, the DeepSpeed configuration and the figures; the lead rank only. Returns 0.

    calibrate: real steps to time, whose figures come last; every rank must call then.
    """
    from rich.console import Console

    from recipes import engine

    world = world or int(os.environ.get("WORLD_SIZE", 1))
    plan = resolve(
        recipe,
        world=world,
        device="cuda" if engine.wants_cuda() else "cpu",
        user_config=user_config,
        overridden_keys=overridden_keys,
    )
    if user_config:
        from recipes.deepspeed_check import check_with_deepspeed

        check_with_deepspeed(plan.deepspeed)
    find_monitors(recipe, find_modality(recipe.modality))  # ConfigError for what `evaluate.during` cannot run
    if calibrate:
        from recipes.calibrate import time_steps

        ranks = replace(engine.start(verbose=verbose), shared=plan.recipe.train.sequence_parallel)
        figures = describe(plan, lambda plan: time_steps(plan, ranks, calibrate))
    else:
        figures = describe(plan)
    if int(os.environ.get("RANK", 0)) == 0:
        console = Console(highlight=False)
        for title, section in {"recipe": plan.to_dict(), "DeepSpeed": plan.deepspeed}.items():
            console.print(f"{title}\n{json.dumps(section, indent=2)}", markup=False, soft_wrap=True)
        console.print(facts_table(f"{recipe.name} (dry run)", figures))
    return 0
