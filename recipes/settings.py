"""`--set key=value`: settings of a command line, parsed and put into a recipe."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Sequence

from recipes.commands import ConfigError, replace_setting
from recipes.recipe import Json, Recipe
from zoo.catalog import model_entry
from zoo.errors import nearest
from zoo.files import parse_json

# What other trainers call a setting, and the setting of a recipe.
ELSEWHERE = {
    "checkpoint_every": "train.save_every",
    "save_steps": "train.save_every",
    "save_interval": "train.save_every",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "iterations": "train.steps",
    "batch_size": "train.batch",
    "global_batch_size": "train.batch",
    "train_batch_size": "train.batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulation",
    "gradient_clipping": "train.clip",
    "max_grad_norm": "train.clip",
    "learning_rate": "optim.lr",
    "warmup_steps": "optim.warmup",
    "optimizer": "optim.name",
    "logging_steps": "train.log_every",
    "eval_every": "evaluate.every",
    "eval_steps": "evaluate.every",
    "seq_len": "data.context",
    "sequence_length": "data.context",
    "max_length": "data.context",
    "context_length": "data.context",
    "block_size": "data.context",
    "dtype": "train.precision",
}


def apply_overrides(recipe: Recipe, settings: Sequence[str]) -> tuple[Recipe, set[str]]:
    """Apply `key=value` strings; returns a changed copy and the set of keys.

    `model.options.KEY` takes any JSON value (a bare word is a string). `model.options.A.B.C`
    changes one entry of the option A, which is otherwise as the recipe or the registered model has
    it.
    """
    recipe = copy.deepcopy(recipe)
    overridden_keys = set()
    for setting in sorted(settings, key=_is_entry_of_option):
        key, separator, text = setting.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(f"--set {setting!r}: expected key=value, such as train.steps=200")
        if key.startswith("model.options."):
            _set_option(recipe, setting, key.removeprefix("model.options."), text)
        else:
            _set_field(recipe, setting, key, text)
        overridden_keys.add(key)
    return recipe, overridden_keys


def _is_entry_of_option(setting: str) -> bool:
    """Sorts whole options before entries of them."""
    key = setting.partition("=")[0]
    return key.count(".") > 2


def _set_option(recipe: Recipe, setting: str, name: str, text: str) -> None:
    """Set an option of the model, or an entry of one by its path with dots."""
    path = name.split(".")
    if not all(path):
        raise ConfigError(
            f"--set {setting!r}: expected model.options.NAME=value, or NAME.KEY of one with keys"
        )
    option = path[0]
    if len(path) > 1 and option not in recipe.model.options:
        # Its other entries are those of the registered model.
        try:
            config = model_entry(recipe.model.name).config
        except (ImportError, ValueError) as error:
            raise ConfigError(f"--set {setting!r}: {error}") from None
        if option not in config:
            near = nearest(option, config)
            raise ConfigError(
                f"--set {setting!r}: {recipe.model.name} has no option {option!r}; {near}"
            )
        recipe.model.options[option] = copy.deepcopy(config[option])
    set_nested(recipe.model.options, path, parse_value(text), setting)


def _set_field(recipe: Recipe, setting: str, key: str, text: str) -> None:
    """Set `section.name` of a recipe."""
    keys = _field_keys(recipe)
    section, _, name = key.partition(".")
    if key not in keys:
        same_name = [choice for choice in keys if choice.endswith(f".{name}")]
        near = nearest(key, same_name or keys)
        if name in ELSEWHERE:
            near = f"did you mean {ELSEWHERE[name]!r}?"
        hint = f"; the model's own are model.options.{name}" if section == "model" else ""
        raise ConfigError(f"--set {setting!r}: no setting {key!r}; {near}{hint}")
    hints = typing.get_type_hints(type(getattr(recipe, section)))
    replace_setting(recipe, key, parse_field(text, hints[name]), f"--set {setting!r}")


def _field_keys(recipe: Recipe) -> list[str]:
    """Every `section.name` of a recipe that --set can change, without the model's options."""
    keys = []
    for section, value in vars(recipe).items():
        if dataclasses.is_dataclass(value):
            keys += [f"{section}.{field.name}" for field in dataclasses.fields(value)]
    keys.remove("model.options")
    return keys


def set_nested(tree: Json, path: Sequence[str], value: object, setting: str) -> None:
    """Set the entry at `path` of nested dictionaries, making those on the way.

    ConfigError where one on the way is a value.
    """
    branch = tree
    for n, part in enumerate(path[:-1]):
        branch = branch.setdefault(part, {})
        if not isinstance(branch, dict):
            name = ".".join(path[: n + 1])
            raise ConfigError(f"--set {setting!r}: {name} is {branch!r}, which has no entries")
    branch[path[-1]] = value


def parse_value(text: str) -> object:
    """JSON, or a bare word: none, true, false or a string."""
    words = {"none": None, "true": True, "false": False}
    try:
        return parse_json(text, "the value")
    except ValueError:
        return words.get(text.strip().lower(), text)


def parse_field(text: str, hint: object) -> object:
    """A value for a field with this annotation, not checked."""
    text = text.strip()
    kinds = typing.get_args(hint)
    if type(None) in kinds:
        if text.lower() in ("none", "null"):
            return None
        hint = next(kind for kind in kinds if kind is not type(None))
    if hint is str:
        return text
    if typing.get_origin(hint) is tuple:
        parts = text.strip("()[] ").split(",")
        return tuple(parse_field(part, kinds[0]) for part in parts if part.strip())
    try:
        value = float(text) if hint is float else parse_value(text)
    except ValueError:
        return text
    if hint is int and isinstance(value, float) and value.is_integer():
        # 1e4 steps is a fair way to write an int.
        return int(value)
    return value


def merge(base: Json, extra: Json) -> Json:
    """`base` with the entries of `extra`, dictionaries inside merged alike."""
    merged = dict(base)
    for key, value in extra.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            value = merge(before, value)
        merged[key] = value
    return merged
