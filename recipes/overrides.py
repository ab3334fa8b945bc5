"""`--set` of evaluate and adapt: the same weights under a changed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from recipes.commands import CommandError
from recipes.settings import merge, parse_value, set_nested
from zoo.errors import nearest

# By field of the model's configuration: JSON values, or dictionaries of such.
Overrides = dict[str, Any]
# Names of options inside a field whose numbers the weights hold.
STORED = {"values", "file", "kind"}


def parse_overrides(settings: Sequence[str]) -> Overrides:
    """["position_options.scaling=yarn"] to {"position_options": {"scaling": "yarn"}}.

    Values are JSON or bare words.
    """
    overrides: Overrides = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise CommandError(
                f"--set {setting!r}: expected key=value, such as position_options.scaling=yarn"
            )
        set_nested(overrides, key.split("."), parse_value(text), setting)
    return overrides


def override(model: Any, overrides: Overrides) -> Any:
    """The same weights under a changed configuration, such as another scaling of rotary angles."""
    config = dataclasses.replace(model.config, **_changes(model.config, overrides))
    variant = type(model)(config)
    weights = _stored_tensors(model)
    new = variant.state_dict()
    names = (new.keys() & weights.keys()) | dict(variant.named_parameters()).keys()
    new_shapes = {name: new[name].shape for name in names}
    shapes = {name: value.shape for name, value in weights.items()}
    if new_shapes != shapes:
        raise CommandError(
            f"--set {overrides}: this changes the model's parameters, so its weights no longer fit"
        )
    variant.load_state_dict(weights, strict=False)
    variant.class_names = model.class_names
    return variant


def _changes(config: Any, overrides: Overrides) -> Overrides:
    """The new values of a configuration's fields."""
    names = {field.name for field in dataclasses.fields(config)}
    changes = {}
    for key, value in overrides.items():
        if key not in names:
            near = nearest(key, names)
            raise CommandError(f"--set {key}: the model's configuration has no such field; {near}")
        stored = sorted(STORED & _inner_names({key: value}))
        if stored:
            raise CommandError(f"--set {key}: {stored[0]} are numbers that the weights hold")
        old_value = getattr(config, key)
        if isinstance(old_value, dict) and isinstance(value, dict):
            value = merge(old_value, value)
        changes[key] = value
    return changes


def _inner_names(overrides: Overrides) -> set[str]:
    """Every name on the paths inside fields."""
    names: set[str] = set()
    for path, _ in leaves(overrides):
        names.update(path.split(".")[1:])
    return names


def _stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that training wrote, such as a memory.

    Other buffers follow from the configuration.
    """
    tensors = dict(model.named_parameters())
    initial = type(model)(model.config).state_dict()
    for name, value in model.state_dict().items():
        if name not in tensors and not torch.equal(value, initial[name].to(value)):
            tensors[name] = value
    return tensors


def leaves(tree: Overrides, prefix: str = "") -> list[tuple[str, object]]:
    """(path with dots, value) of every value in nested dictionaries."""
    pairs: list[tuple[str, object]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += leaves(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs
