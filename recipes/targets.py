"""What an evaluation was asked to measure: models, evaluators, settings and overrides, from the words of a command."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modalities.evaluation import Evaluator, Settings
from recipes.config import nearest


class RequestError(ValueError):
    """Something in the command that cannot be measured as written."""


@dataclass(frozen=True)
class Target:
    """One model to measure.

    Attributes:
        label: what tables and figures call it.
        family: what seeds of one set-up have in common: the recipe, or the architecture where that is unknown, and overrides.
        seed_tag: "-s1" at the end of a tag of weights or of a run folder; mostly empty.
        source: where its recipe's held-out data comes from; None where unknown.
    """

    label: str
    modality: str
    model: nn.Module
    trained: bool
    family: str = ""
    seed_tag: str = ""
    source: str | None = None

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

    True groups models of one family, False none. None groups a family whose members differ in their seed tags
    (`goat_tiny.glyphs`, `goat_tiny.glyphs-s1`, and a run folder `…-s2` of the same recipe).
    """
    families: dict[str, list[Target]] = {}
    for target in targets if asked is not False else []:
        families.setdefault(target.family, []).append(target)
    groups = {}
    for members in families.values():
        if len(members) > 1 and (asked or len({member.seed_tag for member in members}) == len(members)):
            first = min(members, key=lambda member: member.seed_tag)
            groups |= {member.label: first.label for member in members}
    return groups


def find_targets(names: list[str], overrides: dict[str, Any], device: str, dtype: str) -> list[Target]:
    """Load every model named: run folders, registry names, and patterns of names that have weights."""
    from zoo import list_models

    found: dict[str, Target] = {}
    for name in dict.fromkeys(part for argument in names for part in argument.split(",") if part):
        if any(c in name for c in "*?["):
            matches = list_models(name, pretrained=True)
            if not matches:
                raise RequestError(f"no model with weights matches {name!r}; there are: {_listing(True)}")
        else:
            matches = [name]
        for match in matches:
            if match not in found:
                found[match] = _load(match, overrides, device, dtype)
    if not found:
        raise RequestError(f"{' '.join(names)!r} names no model; those with weights are {_listing(True)}")
    modalities = sorted({target.modality for target in found.values()})
    if len(modalities) > 1:
        raise RequestError(f"one call measures models of one modality, these are {' and '.join(modalities)}")
    return list(found.values())


def _load(name: str, overrides: dict[str, Any], device: str, dtype: str) -> Target:
    from zoo.pretrained import manifest, resolve_tag
    from zoo.registry import create_model, model_entry

    if Path(name).is_dir():
        from recipes.runs import load_run

        model, recipe = load_run(name)
        label, modality, trained = _run_label(name, recipe), recipe["modality"], True
        family, source = recipe.get("name", "run"), _heldout_source(recipe.get("data", {}))
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
        family, source = card.get("recipe", entry.name), _card_source(card)
        if not trained:
            torch.manual_seed(0)  # so that a random model is the same one each time
        model = create_model(name)
    if overrides:
        model = override(model, overrides)
        changes = " " + ",".join(f"{key}={value}" for key, value in _leaves(overrides))
        label, family = label + changes, family + changes
    model = model.to(device=device, dtype=getattr(torch, dtype)).eval()
    tag = re.search(r"-s\d+$", Path(name).resolve().name)
    return Target(label, modality, model, trained, family, tag[0] if tag else "", source)


def _card_source(card: dict[str, Any]) -> str | None:
    """What shipped weights are measured on: what their card says, or the recipe that it names."""
    from recipes import find_recipe

    if "source" in card or "recipe" not in card:
        return card.get("source")
    return _heldout_source(vars(find_recipe(card["recipe"]).data))


def _heldout_source(data: dict[str, Any]) -> str | None:
    return data.get("heldout_source") or data.get("source")


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
