"""The models an evaluate command names: registry names, patterns, run and saved-model folders,
baselines, models of others."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modalities.contract import Modality, Outside, find_modality, modality_names
from modalities.results import file_safe
from recipes.commands import CommandError, ConfigError
from recipes.registry import find_recipe, list_recipes
from recipes.run_folder import load_run, stored_recipe
from recipes.settings import merge, parse_value, set_nested
from zoo import list_models, load_model
from zoo.catalog import create_model, model_entry, saved_modality
from zoo.errors import did_you_mean, nearest
from zoo.plugins import import_named, modality_module
from zoo.pretrained import weights_entry

Baseline = tuple[Modality, Callable[[int], nn.Module]]
Overrides = dict[
    str, Any
]  # by field of the model's configuration: JSON values, or dictionaries of such


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


def modality_of(word: str, *, registered: bool = False) -> str | None:
    """The modality of a model's name, pattern or folder, without loading it; None where the word
    does not tell, and where it is no model's name although all are `registered`."""
    if os.path.isdir(word):
        try:
            return stored_recipe(word)["modality"]
        except ConfigError:
            return saved_modality(word)
    if outside := find_outside(word):
        return outside[0]
    start = word.partition("_")[0]
    if registered and start in modality_names() and not set(word) & set("*?["):
        with contextlib.suppress(ValueError):
            return model_entry(word).modality
        return None
    return start if start in modality_names() else None


def find_outside(word: str) -> tuple[str, Outside, str] | None:
    """(modality, hook, name) of PREFIX:NAME or PREFIX:MODALITY:NAME; None for a word without a
    known prefix."""
    prefix, colon, name = word.partition(":")
    installed = installed_modalities("OUTSIDE_PREFIXES", prefix) if colon else []
    hooks = {
        modality.name: modality.outside[prefix]
        for modality in installed
        if prefix in modality.outside
    }
    if not hooks:
        return None
    named, colon, rest = name.partition(":")
    if colon and named in hooks:
        return named, hooks[named], rest
    if colon and named in modality_names():
        raise CommandError(f"{word!r}: {prefix} has no models of {named}; {nearest(named, hooks)}")
    claims = {modality: hook.claim(name) for modality, hook in hooks.items()}
    if not any(claims.values()):
        forms = ", ".join(f"{prefix}:{modality}:{name}" for modality in hooks)
        raise CommandError(f"{word!r} seems to read none of {', '.join(hooks)}; to insist, {forms}")
    modality = max(claims, key=claims.__getitem__)
    return modality, hooks[modality], name


def installed_modalities(listing: str = "", pattern: str = "*") -> list[Modality]:
    """With a listing, such as OUTSIDE_PREFIXES, a module that has it is skipped where none of its
    entries fits the pattern."""
    modalities = []
    for name in modality_names():
        with contextlib.suppress(ImportError):
            entries = getattr(modality_module(name), listing, None) if listing else None
            if entries is None or fnmatch.filter(entries, pattern):
                modalities.append(find_modality(name))
    return modalities


def split_names(argument: str) -> list[str]:
    """The models that a comma-separated argument names; a folder's name may have commas, and
    settings behind "@" do."""
    return (
        [argument]
        if os.path.isdir(argument)
        else [part for part in re.split(r",(?![\w.]+=)", argument) if part]
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


def find_device(name: str) -> str:
    """The device an option names; of "auto" the GPU where there is one. ValueError for one that is
    not available."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    available += [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if name not in available:
        raise ValueError(
            f"device {name!r} is not available; expected auto or one of {', '.join(available)}"
        )
    return name


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


def target_name(word: str) -> str:
    """What a target named by `word` is called: a folder without "/" behind it."""
    return os.path.normpath(word) if os.path.isdir(word) else word


def find_baselines(pattern: str) -> dict[str, Baseline]:
    """The baselines whose names match a shell pattern; none where it is close to a model's name."""
    if modality_of(pattern) or set(pattern) <= set("*?") or did_you_mean(pattern, list_models()):
        return {}
    installed = installed_modalities("BASELINES", pattern)
    baselines = ((name, (m, make)) for m in installed for name, make in m.baselines.items())
    return {name: baseline for name, baseline in baselines if fnmatch.fnmatch(name, pattern)}


def _load(name: str, overrides: Overrides, device: str, dtype: str) -> Target:
    outside = None if os.path.isdir(name) else find_outside(name)
    if outside:
        modality, hook, inner = outside
        if overrides and not name.startswith("hf:"):
            option = _leaves(overrides)[0][0]
            raise CommandError(
                f"--set {option} does not apply to {name}: it is measured as it was saved"
            )
        for key, value in _leaves(overrides):  # of its configuration: settings behind a name
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
        label += " " + ",".join(f"{key}={value}" for key, value in _leaves(overrides))
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


def without_seed(name: str) -> str:
    """The name of shipped weights, or of a baseline, without "-s1", "-s2", … behind it."""
    return re.sub(r"-s\d+$", "", name)


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
        inside = {part for leaf, _ in _leaves({key: value}) for part in leaf.split(".")[1:]}
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


def _leaves(tree: Overrides, prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for key, value in tree.items():
        leaves += (
            _leaves(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else [(prefix + key, value)]
        )
    return leaves
