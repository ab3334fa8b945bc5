"""The models an evaluate command names: registry names, patterns, run and saved-model folders,
baselines, models of others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modalities.results import file_safe
from recipes.commands import CommandError
from recipes.models import (
    Baseline,
    find_baselines,
    find_device,
    find_outside,
    split_names,
    target_name,
    without_seed,
)
from recipes.overrides import Overrides, leaves, override
from recipes.registry import find_recipe, list_recipes
from recipes.run_folder import load_run
from zoo.catalog import create_model, list_models, load_model, model_entry
from zoo.plugins import import_named
from zoo.pretrained import weights_entry


@dataclass(frozen=True)
class Target:
    """One model to measure.

    label: its name in tables and figures; name: in the command. data: the data section of its
    recipe; empty where unknown.
    recipe: (name of the recipe, steps) of runs and shipped weights, None where unknown; empty for
    other models.
    seed: (of the loop, of the data). shipped: not of a run. family: what seeds have in common, of a
    run recipe.json without seeds, and the model's configuration; of shipped weights their name
    without "-s1".
    """

    label: str
    modality: str
    model: Any  # a ZooModel, or a baseline or a model of another library with a config of its own
    trained: bool
    family: str = ""
    recipe: tuple[object, ...] = ()
    seed: tuple[object, ...] = ()
    shipped: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def method(self) -> str:
        """What gives the model its colour in figures; empty for a modality whose models have no
        choice of it."""
        config = self.model.config
        position = getattr(config, "position", "")
        position = position if isinstance(position, str) else ",".join(position)
        return position + ("_ssmax" if getattr(config, "ssmax", False) else "")

    @property
    def setup(self) -> str:
        """What runs and shipped weights both record, as text: recipe, steps and the model's
        configuration."""
        return (
            json.dumps([*self.recipe, dataclasses.asdict(self.model.config)], sort_keys=True)
            if self.recipe
            else ""
        )


def find_targets(names: list[str], overrides: Overrides, device: str, dtype: str) -> list[Target]:
    """Load every model named: run folders, registry names, patterns of names that have weights,
    baselines, PREFIX:NAME."""
    targets: dict[str, Target] = {}
    baselines: dict[str, Baseline] = {}
    for name in dict.fromkeys(name for argument in names for name in split_names(argument)):
        if known := find_baselines(name):
            baselines |= known
            continue
        matches = [name]
        if not os.path.isdir(name) and not find_outside(name) and any(c in name for c in "*?["):
            matches = list_models(name, pretrained=True)
            if not matches:
                listing = ", ".join(list_models(pretrained=True))
                raise CommandError(f"no model with weights matches {name!r}; there are: {listing}")
        for key in map(target_name, matches):
            if key not in targets:
                targets[key] = _load(key, overrides, device, dtype)
    modalities = {t.modality for t in targets.values()} | {
        modality.name for modality, _ in baselines.values()
    }
    if not modalities:
        listing = ", ".join(list_models(pretrained=True))
        raise CommandError(f"{' '.join(names)!r} names no model; those with weights are {listing}")
    if len(modalities) > 1:
        raise CommandError(
            f"one call measures models of one modality, these are {' and '.join(sorted(modalities))}"
        )
    first = next(iter(targets.values()), None)
    for name, (
        modality,
        make,
    ) in baselines.items():  # at the lengths and on the data of the first model
        model = make(first.model.config.train_context if first else 256)
        seed = (getattr(model.config, "seed", None),) * 2
        data = first.data if first else {}
        targets[name] = Target(
            name, modality.name, model, True, without_seed(name), seed=seed, data=data
        )
    files = Counter(file_safe(target.label) for target in targets.values())
    for name, target in targets.items():
        label = target.label
        if (
            files[file_safe(label)] > 1
        ):  # files of one name: the digest of the model's place sets them apart
            label += f" {hashlib.sha256(name.encode(errors='surrogateescape')).hexdigest()[:6]}"
        targets[name] = replace(target, name=name, label=label)
    return list(targets.values())


def find_trained(name: str, device: str, imports: list[str]) -> Target:
    """The one model with weights of this name, in float32, after `imports`."""
    device = find_device(device)
    import_named(imports)
    targets = find_targets([name], {}, device, "float32")
    if len(targets) > 1:
        raise CommandError(
            f"{name!r} names {len(targets)} models: {', '.join(t.label for t in targets)}; name one"
        )
    [target] = targets
    if not target.trained:
        tags = list_models(f"{name}.*", pretrained=True)
        known = (
            ", ".join(tags) or "none of this architecture; `priorzoo list --pretrained` prints all"
        )
        raise CommandError(f"{name} is untrained; with weights: {known}")
    return target


def _load(name: str, overrides: Overrides, device: str, dtype: str) -> Target:
    outside = None if os.path.isdir(name) else find_outside(name)
    if outside:
        modality, hook, inner = outside
        if overrides and not name.startswith("hf:"):
            option = leaves(overrides)[0][0]
            raise CommandError(
                f"--set {option} does not apply to {name}: it is measured as it was saved"
            )
        for key, value in leaves(overrides):  # of its configuration: settings behind a name
            inner += f"{',' if re.search('@.*=', inner) else '@'}{key}={json.dumps(value)}"
        torch.manual_seed(0)  # so that a random model is the same one each time
        model, trained = hook.load(inner)
        target = Target(name, modality, model, trained, family=name)
    else:
        target = _folder(name) if os.path.isdir(name) else _registered(name)
    model = target.model
    label = target.label + " (untrained)" * (not target.trained)
    if overrides:
        model = model if outside else override(model, overrides)
        label += " " + ",".join(f"{key}={value}" for key, value in leaves(overrides))
    target = replace(
        target, label=label, model=model.to(device=device, dtype=getattr(torch, dtype)).eval()
    )
    return target if target.shipped else replace(target, family=target.family + target.setup)


def _folder(name: str) -> Target:
    """A run folder, or a folder of save_pretrained."""
    path = Path(name).resolve()
    if not (path / "recipe.json").exists() and (path / "config.json").exists():
        model = load_model(path)
        unknown = (None, None)
        return Target(
            path.name, model.modality, model, True, str(path), unknown, unknown, shipped=False
        )
    model, recipe = load_run(name)
    train = recipe.get("train", {})
    data = recipe.get("data", {})
    without = {key: {**part} if isinstance(part, dict) else part for key, part in recipe.items()}
    for section in ("train", "data"):
        without.get(section, {}).pop("seed", None)
    return Target(
        label=f"{recipe.get('name', 'run')} ({path.name})",
        modality=model.modality,
        model=model,
        trained=True,
        family=json.dumps(without, sort_keys=True),
        recipe=(recipe.get("name"), train.get("steps")),
        seed=(train.get("seed"), data.get("seed")),
        shipped=False,
        data=data,
    )


def _registered(name: str) -> Target:
    """A model of the registry, with the weights of its tag where it has one."""
    if "/" in name:
        raise CommandError(f"no run folder {name!r}")
    try:
        model_entry(name)
    except ValueError as error:
        hint = (
            "it is a recipe: train it, and name the run's folder"
            if name in list_recipes()
            else error
        )
        raise CommandError(f"no folder {name!r} here; {hint}") from error
    trained = "." in name
    card = weights_entry(name) if trained else {}
    if not trained:
        torch.manual_seed(0)  # so that a random model is the same one each time
    data = dataclasses.asdict(find_recipe(card["recipe"]).data) if "recipe" in card else {}
    recipe = (card.get("recipe"), card.get("steps"))
    seed = (card.get("seed"),) * 2
    model = create_model(name)
    return Target(name, model.modality, model, trained, without_seed(name), recipe, seed, data=data)


def seed_groups(targets: list[Target]) -> dict[str, str]:
    """Label → label of the first in its group of seeds, for labels in a group of at least two.

    A group has one `family`; shipped weights join the runs of their `setup` where those are of one
    family. A group in which a seed occurs twice is left out.
    """
    runs: dict[str, set[str]] = {}
    for target in targets:
        if not target.shipped:
            runs.setdefault(target.setup, set()).add(target.family)
    families: dict[str, list[Target]] = {}
    for target in targets:
        joined = runs.get(target.setup, set()) if target.shipped else set()
        families.setdefault(next(iter(joined)) if len(joined) == 1 else target.family, []).append(
            target
        )
    groups: dict[str, str] = {}
    for members in families.values():
        if len(members) > 1 and len({member.seed for member in members}) == len(members):
            groups |= {member.label: members[0].label for member in members}
    return groups
