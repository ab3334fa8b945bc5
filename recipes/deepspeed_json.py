"""A user's DeepSpeed file: its numbers moved into the recipe, and what is left of it read by
DeepSpeed's classes.

The recipe's own optimiser and schedule train: `optimizer` and `scheduler` of a file say which, and
their numbers. "auto", and whatever a file leaves out, is the recipe's value, or DeepSpeed's
default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, KeysView
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.commands import ConfigError, replace_setting
from zoo.errors import nearest
from zoo.files import read_object

if TYPE_CHECKING:
    from recipes.config import Json, Recipe

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
    "optimizer": {name: f"optim.{name}" for name in ("lr", "betas", "eps", "weight_decay")},
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
    "compile": "is DeepCompile's section, not tried with priors and not served: train.compile=true compiles by torch.compile",
}
Claim = tuple[
    str, str, object
]  # a key of the file, the recipe's setting that it gives a value, the value


def load_deepspeed_json(path: str) -> Json:
    """Read a user's DeepSpeed file."""
    try:
        return read_object(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {error}") from None


def apply_user_config(recipe: Recipe, user_config: Json, overridden_keys: set[str]) -> set[str]:
    """Move what the file says about the recipe's quantities into the recipe; returns the settings
    that it names.

    Changes both. ConfigError where the file contradicts itself or a --set (`overridden_keys`).
    """
    for key, reason in REFUSED.items():
        if key in user_config:
            raise ConfigError(f"{FLAG}: {key!r} {reason}; remove the key")
    for name in ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization"):
        if not isinstance(user_config.get(name, {}), dict):
            raise ConfigError(f"{FLAG}: {name}={user_config[name]!r}: expected an object")
    _remove_auto(user_config)
    claims: dict[str, tuple[str, object]] = {}
    for key, setting, value in [
        *_section_claims(user_config),
        *_shared_claims(recipe, user_config),
    ]:
        old, (other, other_value) = (
            attrgetter(setting)(recipe),
            claims.setdefault(setting, (key, value)),
        )
        if other_value != value:
            raise ConfigError(f"{FLAG}: {other}={other_value} and {key}={value} disagree; keep one")
        if setting in overridden_keys and old != value:
            means = f"{key} of {FLAG}, which means {setting}={value}"
            raise ConfigError(f"--set {setting}={old} and {means}, disagree; keep one")
        replace_setting(recipe, setting, value, f"{FLAG}: {key}")
    return set(claims)


def _remove_auto(tree: Json) -> None:
    for name, value in list(tree.items()):
        if isinstance(value, dict):
            _remove_auto(value)
        elif value == "auto":
            del tree[name]


def _section_claims(user_config: Json) -> Iterator[Claim]:
    """Claims of `optimizer` and `scheduler`, which leave the file; ConfigError for what has no
    counterpart in a recipe."""
    for name in [name for name in TYPES if name in user_config]:
        section = user_config.pop(name)
        types = TYPES[name]
        known = PARAMETERS[name]
        fixed = FIXED[name]
        parameters = section.get("params", {})
        if not isinstance(parameters, dict):
            raise ConfigError(f"{FLAG}: {name}.params={parameters!r}: expected an object")
        word = str(section.get("type"))
        settings = {kind.lower(): settings for kind, settings in types.items()}.get(word.lower())
        if settings is None:
            near = nearest(word, types)
            raise ConfigError(
                f"{FLAG}: {name}.type={word!r} has no counterpart in the recipe; {near}; {INSTEAD[name]}"
            )
        yield from ((f"{name}.type", setting, value) for setting, value in settings.items())
        for key, value in parameters.items():
            path = f"{name}.params.{key}"
            if key in known:
                yield path, known[key], tuple(value) if isinstance(value, list) else value
            elif key not in fixed:
                near = nearest(key, known)
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
            yield key, setting, values[name]
    sections = {name: user_config.get(name, {}) for name in ("bf16", "fp16")}
    enabled = {
        name: section["enabled"] for name, section in sections.items() if "enabled" in section
    }
    for name, is_enabled in enabled.items():  # both enabled disagree
        if is_enabled:
            yield f"{name}.enabled", "train.precision", name
        elif not any(enabled.values()) and recipe.train.precision in (name, "auto"):
            yield f"{name}.enabled", "train.precision", "fp32"


def check_with_deepspeed(config: Json) -> None:
    """ConfigError for a value that DeepSpeed's classes refuse, and for a key that they never look
    at."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is computed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger
    from pydantic import ValidationError

    class OneRank:
        def get_data_parallel_world_size(self) -> int:
            return 1

    # The batch equation of all ranks is `recipes.config.resolve_batch`'s; one rank alone does not
    # read how many share tokens.
    noting = _Noting(
        {key: value for key, value in config.items() if key != "sequence_parallel_size"}
    )
    noting["train_batch_size"] = (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    )
    level = logger.level
    logger.setLevel("ERROR")
    try:
        DeepSpeedConfig(noting, mpu=OneRank())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{FLAG}: {noting.reads[-1]}: {place}={first['input']!r}: {first['msg']}"
        ) from None
    except (
        Exception
    ) as error:  # assertions and whatever a value of another type meets in DeepSpeed's code
        raise ConfigError(f"{FLAG}: {noting.reads[-1]}: DeepSpeed refuses it: {error}") from None
    finally:
        logger.setLevel(level)
    for key in noting:
        if key not in noting.reads:
            near = nearest(key, noting.reads)
            raise ConfigError(
                f"{FLAG}: {key} is no key of DeepSpeed's, which would ignore it; {near}"
            )


class _Noting(dict[str, object]):
    """A dictionary that notes which keys are looked at, present or not."""

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

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # `key in config.keys()` looks at one of them
        return KeysView(self)

    def __copy__(self) -> _Noting:
        return self
