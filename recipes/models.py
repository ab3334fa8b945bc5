"""Models by name: what a word of a command line names."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from modalities.contract import Modality, Outside, find_modality, modality_names
from recipes.commands import CommandError, ConfigError
from recipes.run_folder import newest_model, newest_run_dir, stored_recipe
from zoo.catalog import list_models, model_entry, saved_modality
from zoo.errors import did_you_mean, nearest
from zoo.files import read_tensors
from zoo.model import ZooModel
from zoo.plugins import modality_module
from zoo.pretrained import verified_file

Baseline = tuple[Modality, Callable[[int], nn.Module]]


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


def find_baselines(pattern: str) -> dict[str, Baseline]:
    """The baselines whose names match a shell pattern; none where it is close to a model's name."""
    if modality_of(pattern) or set(pattern) <= set("*?") or did_you_mean(pattern, list_models()):
        return {}
    installed = installed_modalities("BASELINES", pattern)
    baselines = ((name, (m, make)) for m in installed for name, make in m.baselines.items())
    return {name: baseline for name, baseline in baselines if fnmatch.fnmatch(name, pattern)}


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


def target_name(word: str) -> str:
    """What a target named by `word` is called: a folder without "/" behind it."""
    return os.path.normpath(word) if os.path.isdir(word) else word


def without_seed(name: str) -> str:
    """The name of shipped weights, or of a baseline, without "-s1", "-s2", … behind it."""
    return re.sub(r"-s\d+$", "", name)


def load_weights(model: ZooModel, source: str) -> None:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    A classifier for another number of classes stays as it was initialised.
    """
    folder = _init_folder(source)
    try:
        state = _read_state(type(model), folder, source)
        initial = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != initial[name].shape:
                state[name] = initial[name]
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = f"its weights do not fit this model: {error}"
        raise ConfigError(f"model.init_from={source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error


def _init_folder(source: str) -> Path:
    """The folder that `model.init_from` means; it need not exist."""
    recipe_name = source.removeprefix("newest:")
    if recipe_name == source:
        return Path(source)
    folder = newest_run_dir(recipe_name, finished=True)
    if folder is None:
        raise ConfigError(
            f"runs/{recipe_name} has no finished run to start from: "
            f"`priorzoo train {recipe_name}`, or --set model.init_from=…"
        )
    return folder


def _read_state(kind: type[ZooModel], folder: Path, source: str) -> dict[str, torch.Tensor]:
    """The weights in a saved model's folder or a run folder, or those of a name."""
    if folder.is_dir():
        is_saved_model = (folder / "config.json").exists()
        read = kind.from_pretrained
        model = read(folder) if is_saved_model else newest_model(folder, read)
        return model.state_dict()
    if "." in source and "/" not in source:
        return read_tensors(verified_file(source))
    raise ValueError(
        "expected a folder, newest:RECIPE, or a name such as text_ggd_ssmax_tiny.facts"
    )
