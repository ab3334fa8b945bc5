"""A recipe settled for a number of ranks and a device, and its DeepSpeed configuration.

Nothing in this module imports DeepSpeed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from recipes.commands import ConfigError
from recipes.deepspeed_json import apply_user_config, check_with_deepspeed
from recipes.recipe import Json, Recipe, Train
from recipes.settings import merge
from zoo.errors import check_fields, nearest

CHOICES = {
    "train.precision": ("auto", "fp32", "bf16", "fp16"),
    "train.zero_stage": (0, 1, 2, 3),
    "optim.name": ("adamw", "radam", "muon"),
    "optim.schedule": ("cosine", "linear", "constant"),
}


@dataclass(frozen=True)
class Plan:
    """A recipe with nothing left open, and the DeepSpeed configuration that runs it."""

    recipe: Recipe
    deepspeed: Json
    world: int

    @property
    def groups(self) -> int:
        """How many groups of ranks there are, each with its own samples.

        It is ranks / train.sequence_parallel.
        """
        return self.world // self.recipe.train.sequence_parallel

    def to_dict(self) -> Json:
        return {**dataclasses.asdict(self.recipe), "world": self.world}


def resolve(
    recipe: Recipe,
    world: int,
    device: str = "cpu",
    user_config: Json | None = None,
    overridden_keys: Collection[str] = (),
) -> Plan:
    """Settle a copy of a recipe for `world` ranks on `device` ("cpu" or "cuda") and write its
    DeepSpeed configuration.

    user_config: the user's DeepSpeed JSON. It wins over the recipe, and must not contradict a
    `--set` (`overridden_keys`).
    """
    recipe = copy.deepcopy(recipe)
    user_config = copy.deepcopy(user_config or {})
    chosen_keys = set(overridden_keys)
    if user_config:
        file_keys = apply_user_config(recipe, user_config, chosen_keys)
        chosen_keys |= file_keys
        if "train.micro_batch" in file_keys and "train.batch" not in chosen_keys:
            recipe.train.batch = _batch_of_parts(recipe.train, world)
    _settle_positions(recipe)
    check_values(recipe)
    train = recipe.train
    _settle_precision(train, device, chosen_keys)
    if recipe.optim.name == "muon" and train.zero_stage and train.clip:
        raise ConfigError(
            f"train.clip={train.clip}: expected 0 with optim.name='muon' "
            f"at zero_stage={train.zero_stage}, where DeepSpeed would clip Muon's updates; "
            "or optim.name=adamw"
        )
    micro_batch = train.micro_batch
    if micro_batch and not chosen_keys & {"train.micro_batch", "train.accumulation"}:
        micro_batch = _fitting_micro_batch(train, world)
    micro_batch, accumulation = resolve_batch(
        train.batch,
        micro_batch,
        train.accumulation,
        world,
        train.sequence_parallel,
    )
    train.micro_batch = micro_batch
    train.accumulation = accumulation
    plan = Plan(recipe, merge(deepspeed_config(recipe), user_config), world)
    if user_config:
        check_with_deepspeed(plan.deepspeed)
    return plan


def resolve_batch(
    batch: int, micro_batch: int | None, accumulation: int | None, world: int, shared: int = 1
) -> tuple[int, int]:
    """(micro_batch, accumulation) such that batch = micro_batch × accumulation × world / shared.

    shared: ranks that share the tokens of their samples; they count as one.
    """
    if world % shared:
        raise ConfigError(
            f"train.sequence_parallel={shared}: expected a divisor of the number of ranks, {world}"
        )
    world //= shared
    micro = micro_batch
    steps = accumulation
    if micro is None:
        steps = steps or 1
        micro = max(1, batch // (steps * world))
    elif steps is None:
        steps = max(1, batch // (micro * world))
    product = micro * steps * world
    if product != batch:
        ranks = "ranks" if shared == 1 else "groups of ranks"
        if batch % world:
            advice = f"set train.batch={product}, or a number of ranks that divides {batch}"
        else:
            sizes = " or ".join(map(str, _divisors(batch // world, micro)[-2:][::-1]))
            advice = f"set train.batch={product}, or train.micro_batch={sizes}"
            if accumulation is not None:
                advice += ", and leave out train.accumulation"
        raise ConfigError(
            f"train.batch={batch} is not micro_batch × accumulation × {ranks} "
            f"= {micro} × {steps} × {world} = {product}; {advice}"
        )
    return micro, steps


def _divisors(number: int, most: int) -> list[int]:
    """The divisors of a number up to `most`, ascending."""
    return [size for size in range(1, most + 1) if number % size == 0]


def _fitting_micro_batch(train: Train, world: int) -> int:
    """The recipe's own micro-batch, or the largest one below it that divides a rank's share of the
    batch, where the share is whole."""
    micro_batch = train.micro_batch or 1
    groups = max(world // train.sequence_parallel, 1)
    if train.batch % groups or micro_batch * (train.accumulation or 1) * groups == train.batch:
        return micro_batch
    share = train.batch // groups
    if train.accumulation:
        share //= train.accumulation
    return _divisors(share, micro_batch)[-1]


def _batch_of_parts(train: Train, world: int) -> int:
    """The whole batch that follows from its parts, as DeepSpeed derives it."""
    micro_batch = train.micro_batch or 1
    accumulation = train.accumulation or 1
    groups = max(world // train.sequence_parallel, 1)
    return micro_batch * accumulation * groups


def check_values(recipe: Recipe) -> None:
    """ConfigError for a value that can never be right, whatever the machine."""
    optim = recipe.optim
    train = recipe.train
    try:
        for section in ("optim", "train", "evaluate"):
            check_fields(getattr(recipe, section), f"{section}.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name, choices in CHOICES.items():
        value = attrgetter(name)(recipe)
        if value not in choices:
            raise ConfigError(f"{name}={value!r}: {nearest(str(value), map(str, choices))}")
    for name in ("lr", "prior_lr_scale", "muon_lr_scale"):
        rate = getattr(optim, name)
        if not 0 < rate < math.inf:
            raise ConfigError(f"optim.{name}={rate}: expected a positive number")
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={optim.betas}: expected two numbers in [0, 1)")
    if train.ema == 1:
        raise ConfigError("train.ema=1: expected a decay below 1, or 0 for none")
    if train.ema and train.zero_stage == 3:
        raise ConfigError(
            f"train.ema={train.ema}: expected 0 at zero_stage 3, which cuts the weights up"
        )


def _settle_precision(train: Train, device: str, chosen_keys: Collection[str]) -> None:
    """Settle the precision of "auto", and the ZeRO stage that the precision needs."""
    if train.precision == "auto":
        train.precision = "bf16" if device == "cuda" else "fp32"
    if train.precision == "fp32" or train.zero_stage != 0:
        return
    if "train.zero_stage" in chosen_keys:
        raise ConfigError(
            f"train.zero_stage=0 is not served in {train.precision}; expected 1, 2 or 3"
        )
    train.zero_stage = 1


def _settle_positions(recipe: Recipe) -> None:
    """Turn tensors and arrays among `position_options` into lists: a recipe is stored as JSON."""
    options = recipe.model.options
    if "position_options" in options:
        text = json.dumps(options["position_options"], default=_numbers)
        options["position_options"] = json.loads(text)


def _numbers(value: object) -> object:
    """A tensor or an array as a list."""
    if not hasattr(value, "tolist"):
        raise ConfigError(
            f"model.options.position_options: {value!r} is not JSON: expected numbers or tensors"
        )
    return value.tolist()


def deepspeed_config(recipe: Recipe) -> Json:
    """DeepSpeed's configuration of a recipe whose batch, precision and stage are settled."""
    train = recipe.train
    config: Json = {
        "train_batch_size": train.batch,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation,
        "gradient_clipping": train.clip,
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "zero_optimization": {"stage": train.zero_stage},
        # The engine hands DeepSpeed an optimiser with the recipe's decay groups. RAdam is not on
        # DeepSpeed's list of optimisers tried with ZeRO, and none needs DeepSpeed's compiled CPU
        # Adam.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if train.sequence_parallel > 1:
        # DeepSpeed checks the batch's sizes by it.
        config["sequence_parallel_size"] = train.sequence_parallel
    if recipe.optim.name == "muon":
        # Muon needs whole matrices.
        config["zero_optimization"]["reduce_scatter"] = False
    return config
