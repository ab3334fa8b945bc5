"""A user's DeepSpeed file: its numbers moved into the recipe, its "auto" filled in, and all of it read by DeepSpeed's classes.

The recipe's own optimiser and schedule train: `optimizer` and `scheduler` of a file say which, and their numbers. "auto", and
whatever a file leaves out, is the recipe's value.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.commands import ConfigError, replace_setting
from zoo.catalog import model_entry
from zoo.errors import nearest
from zoo.files import read_json

if TYPE_CHECKING:
    from pydantic import ValidationError

    from recipes.config import Recipe

FLAG = "--deepspeed_config"
Path = tuple[str, ...]  # of a key inside sections

# DeepSpeed's name for a quantity, and the recipe's. Nested names are joined by dots.
SHARED = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "train.clip",
    "sequence_parallel_size": "train.sequence_parallel",
    "zero_optimization.stage": "train.zero_stage",
    "bf16.enabled": "train.precision",
    "fp16.enabled": "train.precision",
}
# What Hugging Face's Trainer writes for "auto" under zero_optimization, for a model of width w.
BUCKETS = {
    "zero_optimization.reduce_bucket_size": lambda w: w * w,
    "zero_optimization.stage3_prefetch_bucket_size": lambda w: 9 * w * w // 10,
    "zero_optimization.stage3_param_persistence_threshold": lambda w: 10 * w,
}
OWN_AUTO = {"data_types.keep_in_fp32_modules", "pipeline.stages"}  # where DeepSpeed itself reads the word


@dataclass(frozen=True)
class Kind:
    """A type of `optimizer` or `scheduler`.

    implies: recipe settings that follow from the type itself. same: parameters, and the recipe setting that each is.
    only: parameters that have one value here.
    """

    implies: Mapping[str, str | float]
    same: Mapping[str, str]
    only: Mapping[str, object] = field(default_factory=dict)


# Under either name DeepSpeed decouples weight decay unless adam_w_mode is false. torch's Adam is what a recipe has.
ADAMW = Kind(
    {"optim.name": "adamw"},
    {name: f"optim.{name}" for name in ("lr", "betas", "eps", "weight_decay")},
    {"adam_w_mode": True, "torch_adam": True, "bias_correction": True, "amsgrad": False},
)
WARM_UP = {"warmup_num_steps": "optim.warmup", "warmup_max_lr": "optim.lr"}
FROM_ZERO = {"warmup_min_lr": 0, "warmup_type": "linear", "last_batch_iteration": -1}
LENGTH = {"total_num_steps": "train.steps"}
KINDS: dict[str, dict[str, Kind]] = {
    "optimizer": {"AdamW": ADAMW, "Adam": ADAMW},
    "scheduler": {
        "WarmupLR": Kind({"optim.schedule": "constant"}, WARM_UP, FROM_ZERO),
        "WarmupDecayLR": Kind({"optim.schedule": "linear", "optim.floor": 0.0}, WARM_UP | LENGTH, FROM_ZERO),
        "WarmupCosineLR": Kind(
            {"optim.schedule": "cosine"},
            LENGTH | {"warmup_num_steps": "optim.warmup", "cos_min_ratio": "optim.floor"},
            {"warmup_min_ratio": 0, "warmup_type": "linear", "last_batch_iteration": -1},
        ),
    },
}
INSTEAD = {
    "optimizer": "or remove the section and set optim.name (adamw, radam or muon), optim.lr, …",
    "scheduler": "or remove the section and set optim.schedule, optim.warmup, …",
}


class Claim(NamedTuple):
    """A key of the file, and the recipe's setting that it gives a value."""

    key: str
    setting: str
    value: Any


def load_deepspeed_json(path: str) -> dict[str, Any]:
    """Read a user's DeepSpeed file. ConfigError: unreadable, or not an object."""
    try:
        user_config = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from None
    if not isinstance(user_config, dict):
        raise ConfigError(f"{FLAG} {path}: expected a JSON object, got {type(user_config).__name__}")
    return user_config


def apply_user_config(recipe: Recipe, user_config: dict[str, Any], overridden_keys: set[str]) -> set[str]:
    """Move what the file says about the recipe's quantities into the recipe, and fill in its "auto". Changes both.

    Returns the settings that the file named. ConfigError where the file contradicts itself or a --set (`overridden_keys`),
    and for what no recipe can run.
    """
    if "data_parallel_size" in user_config:  # with it DeepSpeed would sum gradients over some ranks alone
        raise ConfigError(
            f"{FLAG}: 'data_parallel_size' follows from the ranks and train.sequence_parallel; remove the key"
        )
    if "compile" in user_config:  # DeepSpeed reads it when engine.compile() is called
        raise ConfigError(f"{FLAG}: 'compile' is not served: training never calls engine.compile(); remove the section")
    for name in ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization"):
        if not isinstance(user_config.get(name, {}), dict):
            raise ConfigError(f"{FLAG}: {name}={user_config[name]!r}: expected an object")
    _fill_auto(recipe, user_config)
    claims: dict[str, Claim] = {}
    for claim in [*_section_claims(user_config), *_shared_claims(recipe, user_config)]:
        key, setting, value = claim
        old, other = attrgetter(setting)(recipe), claims.setdefault(setting, claim)
        if other.value != value:
            raise ConfigError(f"{FLAG}: {other.key}={other.value} and {key}={value} disagree; keep one")
        if setting in overridden_keys and old != value:
            means = f"{key} of {FLAG}, which means {setting}={value}"
            raise ConfigError(f"--set {setting}={old} and {means}, disagree; keep one")
        replace_setting(recipe, setting, value, f"{FLAG}: {key}")
    return set(claims)


def _section_claims(user_config: dict[str, Any]) -> Iterator[Claim]:
    """Claims of `optimizer` and `scheduler`, which leave the file; ConfigError for what has no counterpart in a recipe."""
    for name in [name for name in KINDS if name in user_config]:
        section, kinds, instead = user_config.pop(name), KINDS[name], INSTEAD[name]
        parameters = section.get("params", {})
        if not isinstance(parameters, dict):
            raise ConfigError(f"{FLAG}: {name}: expected an object with 'type' and 'params'")
        for key in section.keys() - {"type", "params"}:
            raise ConfigError(f"{FLAG}: {name}.{key} has no counterpart in the recipe: remove it")
        wanted = str(section.get("type"))
        kind = next((kind for known, kind in kinds.items() if known.lower() == wanted.lower()), None)
        if kind is None:
            near = nearest(wanted, kinds)
            raise ConfigError(f"{FLAG}: {name}.type={wanted!r} has no counterpart in the recipe; {near}; {instead}")
        for setting, value in kind.implies.items():
            yield Claim(f"{name}.type", setting, value)
        for key, value in parameters.items():
            path = f"{name}.params.{key}"
            if key in kind.same:
                if value != "auto":
                    yield Claim(path, kind.same[key], tuple(value) if isinstance(value, list) else value)
            elif key not in kind.only:
                near = nearest(key, kind.same)
                raise ConfigError(f"{FLAG}: {path} has no counterpart in the recipe; {near}; {instead}")
            elif value not in ("auto", kind.only[key]):
                raise ConfigError(f"{FLAG}: {path}={value!r}: expected {kind.only[key]!r}, the recipe's, {instead}")


def _shared_claims(recipe: Recipe, user_config: dict[str, Any]) -> Iterator[Claim]:
    """Claims of the quantities that both name; the file keeps them."""
    enabled: dict[str, Any] = {}
    for key, setting in SHARED.items():
        section, _, name = key.rpartition(".")
        values = user_config.get(section) if section else user_config
        if not isinstance(values, dict) or name not in values:
            continue
        if setting == "train.precision":
            enabled[section] = values[name]
        else:
            yield Claim(key, setting, values[name])
    if all(enabled.get(name) for name in ("bf16", "fp16")):
        raise ConfigError(f"{FLAG}: fp16 and bf16 are both enabled; keep one")
    for name, is_enabled in enabled.items():
        if is_enabled:
            yield Claim(f"{name}.enabled", "train.precision", name)
        elif not any(enabled.values()) and recipe.train.precision in (name, "auto"):
            yield Claim(f"{name}.enabled", "train.precision", "fp32")


def _fill_auto(recipe: Recipe, tree: dict[str, Any], path: str = "") -> None:
    """Replace "auto": the recipe has the quantities that both name, and the model's width gives the sizes of buckets."""
    for name, value in list(tree.items()):
        key = f"{path}{name}"
        if isinstance(value, dict):
            if key not in KINDS:
                _fill_auto(recipe, value, f"{key}.")
        elif value != "auto" or key in OWN_AUTO:
            continue
        elif key in SHARED:
            del tree[name]
        elif key in BUCKETS and (width := _model_width(recipe)):
            tree[name] = BUCKETS[key](width)
        else:
            raise ConfigError(
                f'{FLAG}: {key} is "auto", and the recipe has no value for it: write one, or remove the key for '
                f"DeepSpeed's default; {nearest(key, [*SHARED, *BUCKETS])}"
            )


def _model_width(recipe: Recipe) -> int | None:
    try:
        return recipe.model.options.get("dim") or model_entry(recipe.model.name).config.get("dim")
    except (ImportError, ValueError) as error:
        raise ConfigError(str(error)) from None


# ------------------------------------------------------------------------------------- DeepSpeed's own reading


def check_with_deepspeed(config: dict[str, Any]) -> None:
    """Validate a resolved configuration by DeepSpeed's classes.

    Raises:
        ConfigError: for a value that DeepSpeed refuses, and for a key that it does not know, which it would ignore outside
            the sections of its pydantic classes.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # nothing is computed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger
    from pydantic import ValidationError

    class OneRank:
        def get_data_parallel_world_size(self) -> int:
            return 1

    # The batch equation of all ranks is `recipes.config.resolve_batch`'s; one rank alone does not read how many share tokens.
    config = {key: value for key, value in config.items() if key != "sequence_parallel_size"}
    alone = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    reads: list[Path] = []

    def latest() -> str:
        """The key of the file itself that was looked at last."""
        return next((path[0] for path in reversed(reads) if len(path) == 1 and path[0] in config), "")

    level = logger.level
    logger.setLevel("ERROR")
    try:
        DeepSpeedConfig(_Section(config | {"train_batch_size": alone}, (), reads), mpu=OneRank())
    except ValidationError as error:
        raise ConfigError(_refusal(error, config, latest())) from None
    except Exception as error:  # assertions and whatever a value of another type meets in DeepSpeed's code
        raise ConfigError(f"{FLAG}: {latest()}: DeepSpeed refuses it: {error}") from None
    finally:
        logger.setLevel(level)
    for path in _unread(config, (), set(reads)):
        near = nearest(path[-1], sorted({name[-1] for name in reads if name[:-1] == path[:-1]}))
        raise ConfigError(f"{FLAG}: {'.'.join(path)} is no key of DeepSpeed's, which would ignore it; {near}")


class _Section(dict[str, Any]):
    """A dictionary that notes the paths of keys that are looked at, present or not; `ALL` where all are taken."""

    ALL = "*"

    def __init__(self, values: dict[str, Any], place: Path, reads: list[Path]) -> None:
        self._place, self._reads = place, reads
        super().__init__({k: _Section(v, (*place, k), reads) if isinstance(v, dict) else v for k, v in values.items()})

    def _note(self, key: object) -> None:
        self._reads.append((*self._place, str(key)))

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:  # `**section`: a pydantic class takes all of it
        self._note(self.ALL)
        return super().__iter__()

    def keys(self) -> Any:  # `key in section.keys()` looks at one of them
        return KeysView(self)

    def __copy__(self) -> _Section:
        return self


def _unread(tree: dict[str, Any], place: Path, reads: set[Path]) -> Iterator[Path]:
    """Keys that DeepSpeed left out where it looked at others by name; a section that it took as a whole has none."""
    if (*place, _Section.ALL) in reads or not any(path[:-1] == place for path in reads):
        return
    for key, value in tree.items():
        if (*place, key) not in reads:
            yield (*place, key)
        elif isinstance(value, dict):
            yield from _unread(value, (*place, key), reads)


def _refusal(error: ValidationError, config: dict[str, Any], latest: str) -> str:
    """The first error of a pydantic class, with the place in the file and the nearest valid key."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    first = error.errors()[0]
    inner = tuple(str(part) for part in first["loc"])
    name = ".".join(inner if inner and inner[0] in config else (latest, *inner))
    if first["type"] != "extra_forbidden":
        return f"{FLAG}: {name}={first['input']!r}: {first['msg']}"
    kind: Any = next(kind for kind in DeepSpeedConfigModel.__subclasses__() if kind.__name__ == error.title)
    for part in inner[:-1]:  # the class of the field there
        hint = next(f.annotation for n, f in kind.model_fields.items() if part in (n, f.alias))
        kind = next(inside for inside in (hint, *typing.get_args(hint)) if hasattr(inside, "model_fields"))
    known = [field.alias or name for name, field in kind.model_fields.items()]
    return f"{FLAG}: unknown key {name}; {nearest(inner[-1], known)}"
