"""`--set` of evaluate and adapt: the same weights under a changed configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch

from recipes.commands import CommandError
from recipes.settings import merge, parse_value, set_nested
from zoo.errors import nearest

Overrides = dict[
    str, Any
]  # by field of the model's configuration: JSON values, or dictionaries of such


def parse_overrides(settings: list[str]) -> Overrides:
    """["position_options.scaling=yarn"] to {"position_options": {"scaling": "yarn"}}; values are
    JSON or bare words."""
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
    config = model.config
    known = {field.name for field in dataclasses.fields(config)}
    changes = {}
    for key, value in overrides.items():
        if key not in known:
            raise CommandError(
                f"--set {key}: the model's configuration has no such field; {nearest(key, known)}"
            )
        before = getattr(config, key)
        inside = {part for leaf, _ in leaves({key: value}) for part in leaf.split(".")[1:]}
        if numbers := sorted({"values", "file", "kind"} & inside):
            raise CommandError(f"--set {key}: {numbers[0]} are numbers that the weights hold")
        changes[key] = (
            merge(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        )
    variant = type(model)(replace(config, **changes))
    fresh = type(model)(config)
    weights = dict(model.named_parameters())
    initial = fresh.state_dict()
    # Buffers follow from the configuration, but for what training wrote, such as a memory.
    for name, value in model.state_dict().items():
        if name not in weights and not torch.equal(value, initial[name].to(value)):
            weights[name] = value
    new = variant.state_dict()
    names = (new.keys() & weights.keys()) | dict(variant.named_parameters()).keys()
    if {name: new[name].shape for name in names} != {
        name: value.shape for name, value in weights.items()
    }:
        raise CommandError(
            f"--set {overrides}: this changes the model's parameters, so its weights no longer fit"
        )
    variant.load_state_dict(weights, strict=False)
    variant.class_names = model.class_names
    return variant


def leaves(tree: Overrides, prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for key, value in tree.items():
        leaves += (
            leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
        )
    return leaves
