"""The models that an evaluate command measures: loaded, labelled, and grouped into seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from modalities.results import file_safe
from recipes.commands import CommandError
from recipes.models import BASELINE_CONTEXT, NamedModel, find_models
from recipes.overrides import Overrides, leaves
from recipes.recipe import Json


@dataclass(frozen=True)
class Target:
    """One model to measure.

    label: its name in tables and figures.
    name: its name in the command.
    model: a model of the zoo, or a baseline or a model of another library, whose config is its own.
    family: what seeds have in common. Of a run it is recipe.json without seeds and the model's
        configuration, of shipped weights their name without "-s1".
    recipe: (name of the recipe, steps) of runs and shipped weights, None where unknown; empty for
        other models.
    seed: (of the loop, of the data).
    shipped: not of a run.
    data: the data section of its recipe; empty where unknown.
    """

    label: str
    modality: str
    model: Any
    trained: bool
    family: str = ""
    recipe: tuple[object, ...] = ()
    seed: tuple[object, ...] = ()
    shipped: bool = True
    data: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def method(self) -> str:
        """What gives the model its colour in figures.

        It is empty for a modality whose models have no choice of method.
        """
        config = self.model.config
        method = getattr(config, "position", "")
        if not isinstance(method, str):
            method = ",".join(method)
        if getattr(config, "ssmax", False):
            method += "_ssmax"
        return method

    @property
    def setup(self) -> str:
        """What runs and shipped weights both record: recipe, steps and the model's configuration.

        It is text; empty for models that no recipe trained.
        """
        if not self.recipe:
            return ""
        config = dataclasses.asdict(self.model.config)
        return json.dumps([*self.recipe, config], sort_keys=True)


def find_targets(names: list[str], overrides: Overrides, device: str, dtype: str) -> list[Target]:
    """Load every model that `names` name; CommandError where they are of several modalities."""
    targets: dict[str, Target] = {}
    baselines: list[NamedModel] = []
    for named in find_models(names):
        if named.kind == "baseline":
            baselines.append(named)
        else:
            targets[named.name] = _load(named, overrides, device, dtype)
    loaded = [target.modality for target in targets.values()]
    modalities = sorted({*loaded, *(named.modality for named in baselines)})
    if len(modalities) > 1:
        raise CommandError(
            f"one call measures models of one modality, these are {' and '.join(modalities)}"
        )
    # Baselines are measured at the lengths and on the data of the first model.
    first = next(iter(targets.values()), None)
    for named in baselines:
        targets[named.name] = _load_baseline(named, first)
    return _distinct_labels(list(targets.values()))


def _load(named: NamedModel, overrides: Overrides, device: str, dtype: str) -> Target:
    model, trained = named.load(overrides)
    label = named.label
    if not trained:
        label += " (untrained)"
    if overrides:
        label += " " + ",".join(f"{key}={value}" for key, value in leaves(overrides))
    target = Target(
        label=label,
        modality=named.modality,
        model=model.to(device=device, dtype=getattr(torch, dtype)).eval(),
        trained=trained,
        data=named.data,
        name=named.name,
    )
    facts = named.facts
    if named.kind == "outside":
        return replace(target, family=named.name)
    if named.kind == "run":
        train = facts.get("train", {})
        target = replace(
            target,
            family=_without_seeds(facts),
            recipe=(facts.get("name"), train.get("steps")),
            seed=(train.get("seed"), named.data.get("seed")),
            shipped=False,
        )
        return replace(target, family=target.family + target.setup)
    if named.kind == "saved":
        target = replace(
            target,
            family=str(Path(named.name).resolve()),
            recipe=(None, None),
            seed=(None, None),
            shipped=False,
        )
        return replace(target, family=target.family + target.setup)
    seed = facts.get("seed")
    return replace(
        target,
        family=without_seed(named.name),
        recipe=(facts.get("recipe"), facts.get("steps")),
        seed=(seed, seed),
    )


def _load_baseline(named: NamedModel, first: Target | None) -> Target:
    """A baseline beside the first model, or alone."""
    context = first.model.config.train_context if first else BASELINE_CONTEXT
    model, trained = named.load({}, context)
    seed = getattr(model.config, "seed", None)
    return Target(
        label=named.label,
        modality=named.modality,
        model=model,
        trained=trained,
        family=without_seed(named.name),
        seed=(seed, seed),
        data=first.data if first else {},
        name=named.name,
    )


def _distinct_labels(targets: list[Target]) -> list[Target]:
    """Targets whose labels name different files.

    Where two labels are the same, the digest of the model's place sets them apart.
    """
    counts = Counter(file_safe(target.label) for target in targets)
    distinct = []
    for target in targets:
        if counts[file_safe(target.label)] > 1:
            place = target.name.encode(errors="surrogateescape")
            digest = hashlib.sha256(place).hexdigest()
            target = replace(target, label=f"{target.label} {digest[:6]}")
        distinct.append(target)
    return distinct


def without_seed(name: str) -> str:
    """The name of shipped weights, or of a baseline, without "-s1", "-s2", … behind it."""
    return re.sub(r"-s\d+$", "", name)


def _without_seeds(recipe: Json) -> str:
    """recipe.json as text without its seeds."""
    sections = dict(recipe)
    for name in ("train", "data"):
        section = sections.get(name)
        if isinstance(section, dict):
            sections[name] = {key: value for key, value in section.items() if key != "seed"}
    return json.dumps(sections, sort_keys=True)


def seed_groups(targets: list[Target]) -> dict[str, str]:
    """Label → label of the first in its group of seeds, for labels in a group of at least two.

    A group has one `family`; shipped weights join the runs of their `setup` where those are of one
    family. A group in which a seed occurs twice is left out.
    """
    run_families: dict[str, set[str]] = {}
    for target in targets:
        if not target.shipped:
            run_families.setdefault(target.setup, set()).add(target.family)
    members_of: dict[str, list[Target]] = {}
    for target in targets:
        family = target.family
        candidates = run_families.get(target.setup, set())
        if target.shipped and len(candidates) == 1:
            family = next(iter(candidates))
        members_of.setdefault(family, []).append(target)
    groups: dict[str, str] = {}
    for members in members_of.values():
        seeds = {member.seed for member in members}
        if len(members) > 1 and len(seeds) == len(members):
            for member in members:
                groups[member.label] = members[0].label
    return groups
