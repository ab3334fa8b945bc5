"""What an evaluation was asked to measure: models, evaluators, settings and overrides, from the words of a command."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modalities.evaluation import Evaluator, Settings
from recipes import MODALITIES
from recipes.config import nearest


class RequestError(ValueError):
    """Something in the command that cannot be measured as written."""


@dataclass(frozen=True)
class Target:
    """One model to measure.

    Attributes:
        label: what tables and figures call it.
        family: what seeds of one set-up have in common: of a run all that recipe.json says but the seeds, and the model's
            configuration; of shipped weights their name without "-s1".
        setup: as much of it as is known of runs and shipped weights alike: recipe, steps and the model's configuration.
        seed: (of the loop, of the data).
        shipped: whether it is weights of the zoo and no run.
        data: what it was trained on, the data section of its recipe; empty where unknown.
    """

    label: str
    modality: str
    model: nn.Module
    trained: bool
    family: str = ""
    setup: str = ""
    seed: tuple[Any, ...] = ()
    shipped: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        config = self.model.config
        return config.position + ("_ssmax" if config.ssmax else "")


def find_evaluators(names: str, modality: str) -> list[Evaluator]:
    """The evaluators called ``names`` (comma-separated, or "all") of a modality."""
    try:
        known: dict[str, Evaluator] = importlib.import_module(f"modalities.{modality}.evals").EVALUATORS
    except ModuleNotFoundError as error:
        if error.name != f"modalities.{modality}.evals":
            raise  # an evaluator's own dependency is missing: that is another message
        raise RequestError(f"modality {modality!r} has no evaluators") from error
    wanted = list(known) if names == "all" else [name for name in names.split(",") if name]
    if not wanted:
        raise RequestError(f"{names!r} names no evaluator; those of {modality} models are {', '.join(known)}")
    for name in wanted:
        if name not in known:
            raise RequestError(f"no evaluator {name!r} for {modality} models; {nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def make_settings(evaluators: list[Evaluator], modality: str, given: dict[str, Any]) -> Settings:
    """The settings of a modality's evaluators from the options of a command; None stands for an option not given.

    Raises:
        RequestError: for an option that these evaluators do not have; it names those they have.
    """
    kind = evaluators[0].settings  # one class per modality
    flags = {field.name: "--" + field.name.replace("_", "-") for field in dataclasses.fields(kind)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in flags:
            option = "--" + name.replace("_", "-")
            raise RequestError(f"{option} does not apply to {modality} models; theirs are {', '.join(flags.values())}")
    return kind(**given)


def seed_groups(targets: list[Target], asked: bool | None) -> dict[str, str]:
    """Label → name of the group of seeds it belongs to, for labels in a group of at least two.

    Runs are of one group where their recipe.json are equal in everything but `train.seed` and `data.seed`, shipped weights
    where their names are but for -s1, -s2, …; weights join the runs of their set-up where those are of one group. None
    leaves a group out in which a seed occurs twice, True keeps it; False groups nothing. A group is called by its first.
    """
    runs: dict[str, set[str]] = {}
    for target in targets:
        if not target.shipped:
            runs.setdefault(target.setup, set()).add(target.family)
    families: dict[str, list[Target]] = {}
    for target in targets if asked is not False else []:
        joined = runs.get(target.setup, set()) if target.shipped else set()
        families.setdefault(next(iter(joined)) if len(joined) == 1 else target.family, []).append(target)
    groups = {}
    for members in families.values():
        if len(members) > 1 and (asked or len({member.seed for member in members}) == len(members)):
            groups |= {member.label: members[0].label for member in members}
    return groups


def find_targets(names: list[str], overrides: dict[str, Any], device: str, dtype: str) -> list[Target]:
    """Load every model named: run folders, registry names, patterns of names that have weights, and baselines."""
    from zoo import list_models

    found: dict[str, Target] = {}
    baselines: dict[str, tuple[str, Callable[..., nn.Module]]] = {}
    for name in dict.fromkeys(part for argument in names for part in argument.split(",") if part):
        if known := find_baselines(name):
            baselines |= known
            continue
        if any(c in name for c in "*?["):
            matches = list_models(name, pretrained=True)
            if not matches:
                raise RequestError(f"no model with weights matches {name!r}; there are: {_listing(True)}")
        else:
            matches = [name]
        for match in matches:
            if match not in found:
                found[match] = _load(match, overrides, device, dtype)
    for name, (modality, make) in baselines.items():
        found[name] = _load_baseline(name, modality, make, next(iter(found.values()), None))
    if not found:
        raise RequestError(f"{' '.join(names)!r} names no model; those with weights are {_listing(True)}")
    modalities = sorted({target.modality for target in found.values()})
    if len(modalities) > 1:
        raise RequestError(f"one call measures models of one modality, these are {' and '.join(modalities)}")
    return list(found.values())


def find_baselines(pattern: str) -> dict[str, tuple[str, Callable[..., nn.Module]]]:
    """Baselines by name, each with its modality and what makes it: those of all modalities that match a shell pattern.

    A modality lists what its models are to beat, and what is no model of the zoo, in `modalities.<modality>.evals.BASELINES`.
    """
    if pattern.partition("_")[0] in MODALITIES or set(pattern) <= set("*?") or Path(pattern).is_dir():
        return {}
    found = {}
    for modality in MODALITIES:
        try:
            listed = getattr(importlib.import_module(f"modalities.{modality}.evals"), "BASELINES", {})
        except ModuleNotFoundError as error:  # a modality whose packages are not installed
            if (error.name or "").partition(".")[0] in ("zoo", "modalities", "recipes"):
                raise
            continue
        found |= {name: (modality, make) for name, make in listed.items() if fnmatch.fnmatch(name, pattern)}
    return found


def _load_baseline(name: str, modality: str, make: Callable[..., nn.Module], beside: Target | None) -> Target:
    """A baseline, measured at the lengths and on the data of the model it stands beside."""
    if beside is None:
        return Target(name, modality, make(), trained=True, shipped=True, family=name)
    model = make(train_context=beside.model.config.train_context)
    return Target(name, modality, model, trained=True, shipped=True, family=name, data=beside.data)


def _load(name: str, overrides: dict[str, Any], device: str, dtype: str) -> Target:
    from zoo.pretrained import manifest, resolve_tag
    from zoo.registry import create_model, model_entry

    if Path(name).is_dir():
        from recipes.runs import load_run

        model, recipe = load_run(name)
        label, modality, trained = _run_label(name, recipe), recipe["modality"], True
        data, family = recipe.get("data", {}), _without_seeds(recipe)
        known = recipe.get("name"), recipe.get("train", {}).get("steps")
        seed = recipe.get("train", {}).get("seed"), data.get("seed")
    else:
        if "/" in name:
            raise RequestError(f"no run folder {name!r}")
        try:
            entry = model_entry(name)
        except (KeyError, ValueError) as error:
            raise RequestError(str(error).strip("'\"")) from error
        trained = "." in name
        label, modality = (name if trained else f"{name} (untrained)"), entry.modality
        card = manifest()[resolve_tag(name)] if trained else {}
        data, family = _card_data(card), re.sub(r"-s\d+$", "", name)
        known, seed = (card.get("recipe"), card.get("steps")), (card.get("seed"),) * 2
        if not trained:
            torch.manual_seed(0)  # so that a random model is the same one each time
        model = create_model(name)
    if overrides:
        model = override(model, overrides)
        label += " " + ",".join(f"{key}={value}" for key, value in _leaves(overrides))
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
    setup = json.dumps([*known, dataclasses.asdict(model.config)], sort_keys=True)
    shipped = not Path(name).is_dir()
    family += "" if shipped else setup
    return Target(label, modality, model, trained, family, setup, seed, shipped, data)


def _without_seeds(recipe: dict[str, Any]) -> str:
    """All of a recipe.json but the seeds, as text."""
    rest = {key: {**part} if isinstance(part, dict) else part for key, part in recipe.items()}
    for section in ("train", "data"):
        rest.get(section, {}).pop("seed", None)
    return json.dumps(rest, sort_keys=True)


def _card_data(card: dict[str, Any]) -> dict[str, Any]:
    """What shipped weights were trained on, by the recipe that their card names."""
    from recipes import find_recipe

    return dataclasses.asdict(find_recipe(card["recipe"]).data) if "recipe" in card else {}


def override(model: nn.Module, overrides: dict[str, Any]) -> nn.Module:
    """The same weights under a changed configuration, such as another scaling of rotary angles."""
    config = model.config
    known = {field.name for field in dataclasses.fields(config)}
    changes = {}
    for key, value in overrides.items():
        if key not in known:
            raise RequestError(f"--set {key}: the model's configuration has no such field; {nearest(key, known)}")
        before = getattr(config, key)
        changes[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    changed = type(model)(replace(config, **changes))
    parameters = dict(model.named_parameters())
    if {n: p.shape for n, p in changed.named_parameters()} != {n: p.shape for n, p in parameters.items()}:
        raise RequestError(f"--set {overrides}: this changes the model's parameters, so its weights no longer fit")
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            parameter.copy_(parameters[name])
    return changed


def parse_overrides(settings: list[str]) -> dict[str, Any]:
    """["position_options.scaling=yarn"] to {"position_options": {"scaling": "yarn"}}; values are JSON or bare words."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise RequestError(f"--set {setting!r}: expected key=value, such as position_options.scaling=yarn")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        *outer, last = key.split(".")
        place = overrides
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise RequestError(f"--set {setting!r}: {part!r} is set both as a value and as a group")
        place[last] = value
    return overrides


def parse_counts(text: str | None, option: str, what: str) -> tuple[int, ...] | None:
    """ "128,512,4k" to (128, 512, 4096); None stays None. ``what`` names such a number: "token count"."""
    if text is None:
        return None
    scale = {"k": 2**10, "m": 2**20}
    counts = []
    for part in filter(None, (p.strip().lower() for p in text.split(","))):
        number, factor = (part[:-1], scale[part[-1]]) if part[-1] in scale else (part, 1)
        if not number.isdigit():
            raise RequestError(f"{option} {text!r}: {part!r} is no {what}; expected numbers such as 128,512,4096")
        counts.append(int(number) * factor)
    return tuple(counts)


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    return parse_counts(text, "--lengths", "token count")


def parse_window(text: str | None) -> int | None:
    counts = parse_counts(text, "--window", "number of bases")
    if counts is not None and len(counts) != 1:
        raise RequestError(f"--window {text!r}: expected one number of bases, such as 4096")
    return counts[0] if counts else None


def parse_sizes(text: str | None) -> tuple[int, ...] | None:
    return parse_counts(text, "--sizes", "number of pixels")


def parse_aspect(text: str | None) -> tuple[int, int] | None:
    """ "2:1" to (2, 1): width to height."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not found:
        raise RequestError(f"--aspect {text!r}: expected width:height in whole numbers, such as 2:1 or 3:4")
    return int(found[1]), int(found[2])


def _run_label(path: str, recipe: dict[str, Any]) -> str:
    """The recipe's name and the run folder's own: "text.ggd_ssmax_tiny (20261121-0800)"."""
    return f"{recipe.get('name', 'run')} ({Path(path).resolve().name})"


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for key, value in tree.items():
        leaves += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return leaves


def _listing(pretrained: bool) -> str:
    from zoo import list_models

    return ", ".join(list_models(pretrained=pretrained)) or "none"
