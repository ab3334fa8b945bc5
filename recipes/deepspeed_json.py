"""A user's DeepSpeed file: its numbers move into the recipe, DeepSpeed's classes check the rest.

The recipe's optimiser and schedule train the model. `optimizer` and `scheduler` of a file say which
they are, and their numbers. For "auto" and for what a file leaves out, the recipe's value holds, or
DeepSpeed's default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, KeysView
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from recipes.commands import ConfigError, replace_setting
from recipes.recipe import Json, Recipe
from zoo.errors import nearest
from zoo.files import read_object

FLAG = "--deepspeed_config"

# DeepSpeed's name for a quantity, and the recipe's. Nested names are joined by dots.
SHARED = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "train.clip",
    "sequence_parallel_size": "train.sequence_parallel",
    "zero_optimization.stage": "train.zero_stage",
}
# Types of `optimizer` and `scheduler`, and the recipe settings that follow from them.
TYPES: dict[str, dict[str, dict[str, object]]] = {
    "optimizer": {"AdamW": {"optim.name": "adamw"}, "Adam": {"optim.name": "adamw"}},
    "scheduler": {
        "WarmupLR": {"optim.schedule": "constant"},
        "WarmupDecayLR": {"optim.schedule": "linear", "optim.floor": 0.0},
        "WarmupCosineLR": {"optim.schedule": "cosine"},
    },
}
# Their parameters: the recipe setting that each is, or the one value that it has here.
PARAMETERS = {
    "optimizer": {
        "lr": "optim.lr",
        "betas": "optim.betas",
        "eps": "optim.eps",
        "weight_decay": "optim.weight_decay",
    },
    "scheduler": {
        "warmup_num_steps": "optim.warmup",
        "warmup_max_lr": "optim.lr",
        "total_num_steps": "train.steps",
        "cos_min_ratio": "optim.floor",
    },
}
FIXED: dict[str, dict[str, object]] = {
    "optimizer": {
        "adam_w_mode": True,
        "torch_adam": True,
        "bias_correction": True,
        "amsgrad": False,
    },
    "scheduler": {
        "warmup_min_lr": 0,
        "warmup_min_ratio": 0,
        "warmup_type": "linear",
        "last_batch_iteration": -1,
    },
}
INSTEAD = {
    "optimizer": "or remove the section and set optim.name (adamw, radam or muon), optim.lr, …",
    "scheduler": "or remove the section and set optim.schedule, optim.warmup, …",
}
REFUSED = {
    # With it DeepSpeed would sum gradients over some ranks alone.
    "data_parallel_size": "follows from the ranks and train.sequence_parallel",
    "compile": "is DeepCompile's section, not tried with priors and not served: "
    "train.compile=true compiles by torch.compile",
}
# Sections that DeepSpeed reads and then waits for calls that nothing here makes. One that is
# switched off is let through.
UNUSED = {
    "tensor_parallel": "cuts layers of other libraries' models, and none of the zoo's",
    "expert_parallel": "is for mixtures of experts, which no model of the zoo has",
    "use_data_before_expert_parallelism": "is for mixtures of experts",
    "pipeline": "needs a model made of stages",
    "activation_checkpointing": "is read by deepspeed.checkpointing alone; "
    "model.options.activation_checkpointing=true recomputes blocks",
    "sparse_attention": "replaces attention, and with it the priors",
    "sparse_gradients": "is for sparse embeddings, which no model of the zoo has",
    "compression_training": "needs layers of DeepSpeed's own",
    "quantize_training": "needs layers of DeepSpeed's own",
    "weight_quantization": "is for inference",
    "hybrid_engine": "is for inference in reinforcement learning",
    "progressive_layer_drop": "needs a model that takes its arguments",
    "curriculum_learning": "is for batches of DeepSpeed's loader; recipes have their own",
    "data_efficiency": "is for batches of DeepSpeed's loader; recipes have their own",
    "dataloader_drop_last": "is for batches of DeepSpeed's loader; recipes have their own",
    "elasticity": "would change the batch; train.batch stays, whatever the number of ranks",
    "autotuning": "is a mode of the launcher; `priorzoo train --calibrate` measures a set-up",
    "amp": "needs Apex; train.precision is fp32, bf16 or fp16",
    "torch_autocast": "is a precision; train.precision is fp32, bf16 or fp16",
    "eigenvalue": "is used by quantize_training alone",
    "nebula": "is a service that checkpoints would be sent to; they are files of the run folder",
    "datastates_ckpt": "is another writer of checkpoints; they are files of the run folder",
    "vocabulary_size": "is read by nothing",
}


class Claim(NamedTuple):
    """A value that the user's file gives to a setting of the recipe."""

    # Of the file.
    key: str
    # Of the recipe.
    setting: str
    value: object


def load_deepspeed_json(path: str) -> Json:
    """Read a user's DeepSpeed file."""
    try:
        return read_object(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {error}") from None


def apply_user_config(recipe: Recipe, user_config: Json, overridden_keys: set[str]) -> set[str]:
    """Move what the file says about the recipe's quantities into the recipe.

    Changes both, and returns the settings that the file names. ConfigError where the file
    contradicts itself or a --set (`overridden_keys`).
    """
    for key, reason in REFUSED.items():
        if key in user_config:
            raise ConfigError(f"{FLAG}: {key!r} {reason}; remove the key")
    for key, reason in UNUSED.items():
        if _is_switched_on(user_config.get(key)):
            raise ConfigError(f"{FLAG}: {key!r} {reason}; remove the key")
        user_config.pop(key, None)
    for name in ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization"):
        if not isinstance(user_config.get(name, {}), dict):
            raise ConfigError(f"{FLAG}: {name}={user_config[name]!r}: expected an object")
    _remove_auto(user_config)
    claims: dict[str, Claim] = {}
    for claim in [*_section_claims(user_config), *_shared_claims(recipe, user_config)]:
        key, setting, value = claim
        first = claims.setdefault(setting, claim)
        if first.value != value:
            raise ConfigError(
                f"{FLAG}: {first.key}={first.value} and {key}={value} disagree; keep one"
            )
        recipe_value = attrgetter(setting)(recipe)
        if setting in overridden_keys and recipe_value != value:
            raise ConfigError(
                f"--set {setting}={recipe_value} and {key} of {FLAG}, which means "
                f"{setting}={value}, disagree; keep one"
            )
        replace_setting(recipe, setting, value, f"{FLAG}: {key}")
    return set(claims)


def _is_switched_on(value: object) -> bool:
    """Whether a value asks for anything: a section by its "enabled", else by any entry that is
    neither false, 0 nor "auto"."""
    if not isinstance(value, dict):
        return bool(value) and value != "auto"
    if "enabled" in value:
        return _is_switched_on(value["enabled"])
    return any(_is_switched_on(entry) for entry in value.values())


def _remove_auto(tree: Json) -> None:
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _remove_auto(value)
        elif value == "auto":
            del tree[name]


def _section_claims(user_config: Json) -> Iterator[Claim]:
    """Claims of `optimizer` and `scheduler`, which are removed from the file.

    ConfigError for what has no counterpart in a recipe.
    """
    for name in TYPES:
        if name in user_config:
            section = user_config.pop(name)
            yield from _type_claims(name, section)
            yield from _parameter_claims(name, section)


def _type_claims(name: str, section: Json) -> Iterator[Claim]:
    """Claims that follow from the type of `optimizer` or `scheduler`."""
    parameters = section.get("params", {})
    if not isinstance(parameters, dict):
        raise ConfigError(f"{FLAG}: {name}.params={parameters!r}: expected an object")
    kind = str(section.get("type"))
    settings_by_kind = {known.lower(): settings for known, settings in TYPES[name].items()}
    if kind.lower() not in settings_by_kind:
        near = nearest(kind, TYPES[name])
        raise ConfigError(
            f"{FLAG}: {name}.type={kind!r} has no counterpart in the recipe; {near}; "
            f"{INSTEAD[name]}"
        )
    for setting, value in settings_by_kind[kind.lower()].items():
        yield Claim(f"{name}.type", setting, value)


def _parameter_claims(name: str, section: Json) -> Iterator[Claim]:
    """Claims of the parameters of `optimizer` or `scheduler`."""
    settings = PARAMETERS[name]
    fixed = FIXED[name]
    for key, value in section.get("params", {}).items():
        path = f"{name}.params.{key}"
        if key in settings:
            if isinstance(value, list):
                value = tuple(value)
            yield Claim(path, settings[key], value)
        elif key not in fixed:
            near = nearest(key, settings)
            raise ConfigError(
                f"{FLAG}: {path} has no counterpart in the recipe; {near}; {INSTEAD[name]}"
            )
        elif value != fixed[key]:
            raise ConfigError(
                f"{FLAG}: {path}={value!r}: expected {fixed[key]!r}, the recipe's, {INSTEAD[name]}"
            )


def _shared_claims(recipe: Recipe, user_config: Json) -> Iterator[Claim]:
    """Claims of the quantities that both name; the file keeps them."""
    for key, setting in SHARED.items():
        section, _, name = key.rpartition(".")
        values = user_config.get(section, {}) if section else user_config
        if name in values:
            yield Claim(key, setting, values[name])
    enabled = {}
    for name in ("bf16", "fp16"):
        section = user_config.get(name, {})
        if "enabled" in section:
            enabled[name] = section["enabled"]
    # Where both are enabled, their claims disagree.
    for name, is_enabled in enabled.items():
        if is_enabled:
            yield Claim(f"{name}.enabled", "train.precision", name)
        elif not any(enabled.values()) and recipe.train.precision in (name, "auto"):
            yield Claim(f"{name}.enabled", "train.precision", "fp32")


def check_with_deepspeed(config: Json) -> None:
    """Have DeepSpeed's classes read a configuration.

    ConfigError for a value that they refuse, and for a key that they never look at.
    """
    # Nothing is computed, so no GPU is needed.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger
    from pydantic import ValidationError

    recorder = _one_rank_config(config)
    level = logger.level
    logger.setLevel("ERROR")
    try:
        DeepSpeedConfig(recorder, mpu=_OneRank())
    except ValidationError as error:
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise ConfigError(
            f"{FLAG}: {recorder.reads[-1]}: {place}={detail['input']!r}: {detail['msg']}"
        ) from None
    except Exception as error:
        # Assertions, and whatever a value of another type meets in DeepSpeed's code.
        raise ConfigError(f"{FLAG}: {recorder.reads[-1]}: DeepSpeed refuses it: {error}") from None
    finally:
        logger.setLevel(level)
    for key in recorder:
        if key not in recorder.reads:
            near = nearest(key, recorder.reads)
            raise ConfigError(
                f"{FLAG}: {key} is no key of DeepSpeed's, which would ignore it; {near}"
            )


class _OneRank:
    """The part of a model-parallel unit that DeepSpeedConfig asks for."""

    def get_data_parallel_world_size(self) -> int:
        return 1


def _one_rank_config(config: Json) -> _ReadRecorder:
    """A configuration as one rank alone would have it.

    `recipes.plan.resolve_batch` checks the batch of all ranks. One rank alone does not read how
    many share tokens.
    """
    recorder = _ReadRecorder(config)
    recorder.pop("sequence_parallel_size", None)
    micro_batch = config["train_micro_batch_size_per_gpu"]
    recorder["train_batch_size"] = micro_batch * config["gradient_accumulation_steps"]
    return recorder


class _ReadRecorder(dict[str, object]):
    """A dictionary that records which keys are looked at, present or not."""

    def __init__(self, values: Json) -> None:
        self.reads: list[str] = []
        super().__init__(values)

    def get(self, key: str, default: object = None) -> object:
        self.reads.append(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.reads.append(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.reads.append(str(key))
        return super().__contains__(key)

    # `key in config.keys()` looks at one key: the view asks `__contains__`.
    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return KeysView(self)

    def __copy__(self) -> _ReadRecorder:
        return self
