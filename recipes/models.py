"""Models by name: what a word of a command line names, and how it is loaded.

A word is a name of the registry (text_ggd_tiny), a name with weights (text_ggd_tiny.facts), a run
folder, a folder of `save_pretrained` or one that holds it as model/, a model of another library
(hf:NAME, timm:NAME, or the folder of one), or a baseline. Shell patterns stand for names with
weights and for baselines.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from modalities.classes import listing, shared_classes
from modalities.contract import Modality, Outside, find_modality, modality_names
from recipes.commands import CommandError, ConfigError
from recipes.overrides import Overrides, leaves, override
from recipes.recipe import Json
from recipes.registry import list_recipes
from recipes.run_folder import load_run, newest_model, newest_run_dir, run_recipe
from zoo.catalog import create_model, list_models, load_model, model_entry, saved_modality
from zoo.errors import did_you_mean, nearest
from zoo.files import read_object, read_tensors
from zoo.model import ZooModel
from zoo.plugins import import_named, modality_module
from zoo.pretrained import verified_file, weights_entry

Kind = Literal["registered", "weights", "run", "saved", "outside", "baseline"]
Baseline = tuple[Modality, Callable[[int], nn.Module]]
# Length in tokens of the data of a baseline that is measured without a model.
BASELINE_CONTEXT = 256


@dataclass(frozen=True)
class NamedModel:
    """A model that a word names, before it is loaded.

    kind: "registered" is a name without weights.
    name: the word; of a folder without "/" behind it.
    label: the name in tables and messages.
    load: load(overrides) → (model, whether it is trained); of a baseline
        load(overrides, train_context).
    facts: recipe.json of a run, the manifest's entry of shipped weights; else empty.
    data: the data section of the recipe that trained it; empty where unknown.
    """

    kind: Kind
    name: str
    label: str
    modality: str
    load: Callable[..., tuple[Any, bool]]
    facts: Json = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def find_models(arguments: Sequence[str]) -> list[NamedModel]:
    """Every model that arguments name, each once, the baselines last.

    An argument is a word, or several with commas between them. CommandError where there is none.
    """
    words = [word for argument in arguments for word in split_names(argument)]
    models: dict[str, NamedModel] = {}
    baselines: dict[str, NamedModel] = {}
    for word in dict.fromkeys(words):
        for named in _find_word(word):
            group = baselines if named.kind == "baseline" else models
            group.setdefault(named.name, named)
    if not models and not baselines:
        listing = ", ".join(list_models(pretrained=True))
        raise CommandError(
            f"{' '.join(arguments)!r} names no model; those with weights are {listing}"
        )
    return [*models.values(), *baselines.values()]


def _find_word(word: str) -> list[NamedModel]:
    """The models that a word or a pattern names."""
    baselines = find_baselines(word)
    if baselines:
        return [_baseline(name, *baseline) for name, baseline in baselines.items()]
    if os.path.isdir(word) or find_outside(word) or not is_pattern(word):
        return [find_model(word)]
    names = list_models(word, pretrained=True)
    if not names:
        listing = ", ".join(list_models(pretrained=True))
        raise CommandError(f"no model with weights matches {word!r}; there are: {listing}")
    return [_registered(name) for name in names]


def find_model(word: str) -> NamedModel:
    """The model that a word names which is no pattern and no baseline.

    CommandError or ConfigError where there is none.
    """
    if os.path.isdir(word):
        return _folder(word)
    outside = find_outside(word)
    if outside:
        return _outside(word, *outside)
    return _registered(word)


def load_trained(word: str, device: str, imports: list[str]) -> tuple[NamedModel, Any]:
    """The one model with weights that a word names, after `imports`, and the loaded model in
    float32."""
    device = find_device(device)
    import_named(imports)
    models = find_models([word])
    if len(models) > 1:
        labels = ", ".join(named.label for named in models)
        raise CommandError(f"{word!r} names {len(models)} models: {labels}; name one")
    named = models[0]
    model, trained = named.load({})
    if not trained:
        tags = list_models(f"{word}.*", pretrained=True)
        listing = ", ".join(tags)
        if not tags:
            listing = "none of this architecture; `priorzoo list --pretrained` prints all"
        raise CommandError(f"{word} is untrained; with weights: {listing}")
    return named, model.to(device=device, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------------
# words


def modality_of(word: str, *, registered: bool = False) -> str | None:
    """The modality of a model's name, pattern or folder, without loading it.

    None where the word does not tell. With `registered` all models are registered: then None also
    where it is no model's name.
    """
    if os.path.isdir(word):
        with contextlib.suppress(ConfigError):
            return _folder(word).modality or None
        return None
    outside = find_outside(word)
    if outside:
        return outside[0]
    start = word.partition("_")[0]
    if start not in modality_names():
        return None
    if registered and not is_pattern(word):
        with contextlib.suppress(ValueError):
            return model_entry(word).modality
        return None
    return start


def is_pattern(word: str) -> bool:
    """Whether a word has wildcards of a shell."""
    return bool(set(word) & set("*?["))


def split_names(argument: str) -> list[str]:
    """The words of an argument with commas.

    Commas in a folder's name and between settings behind "@" separate nothing.
    """
    if os.path.isdir(argument):
        return [argument]
    return [part for part in re.split(r",(?![\w.]+=)", argument) if part]


def plain_name(word: str) -> str:
    """The name of what a word names: a folder without "/" behind it."""
    return os.path.normpath(word) if os.path.isdir(word) else word


def find_device(name: str) -> str:
    """The device that an option names; of "auto" the GPU where there is one.

    ValueError for one that is not available.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    available = ["cpu"]
    if has_cuda:
        available.append("cuda")
    available += [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if name not in available:
        raise ValueError(
            f"device {name!r} is not available; expected auto or one of {', '.join(available)}"
        )
    return name


# ------------------------------------------------------------------------------------------------
# names of the registry


def _registered(name: str) -> NamedModel:
    """A model of the registry, with the weights of its tag where it has one."""
    if "/" in name:
        raise CommandError(f"no run folder {name!r}")
    try:
        modality = model_entry(name).modality
    except ValueError as error:
        hint: object = error
        if name in list_recipes():
            hint = "it is a recipe: train it, and name the run's folder"
        raise CommandError(f"no folder {name!r} here; {hint}") from error
    if "." not in name:
        load = _loader(partial(_fresh, name), trained=False)
        return NamedModel("registered", name, name, modality, load)
    card = weights_entry(name)
    load = _loader(partial(create_model, name), trained=True)
    data = card.get("data_section", {})
    return NamedModel("weights", name, name, modality, load, facts=card, data=data)


def _fresh(name: str) -> ZooModel:
    """A model with random weights, the same ones each time."""
    torch.manual_seed(0)
    return create_model(name)


def _loader(read: Callable[[], Any], *, trained: bool) -> Callable[..., tuple[Any, bool]]:
    """`NamedModel.load` of a model of the zoo."""

    def load(overrides: Overrides) -> tuple[Any, bool]:
        model = read()
        if overrides:
            model = override(model, overrides)
        return model, trained

    return load


# ------------------------------------------------------------------------------------------------
# folders


def _library(folder: Path) -> str:
    """The prefix of the library that wrote a folder's config.json; "" for one of none."""
    config = read_object(folder / "config.json")
    if "architecture" in config:
        return "timm"
    return "hf" if "model_type" in config else ""


def _folder(word: str) -> NamedModel:
    """A run folder, or a saved model's."""
    name = plain_name(word)
    path = Path(word).resolve()
    if not (path / "recipe.json").exists():
        for folder in (path, path / "model"):
            if (folder / "config.json").exists():
                modality = saved_modality(folder) or ""
                library = "" if modality else _library(folder)
                outside = find_outside(f"{library}:{folder}") if library else None
                if outside:
                    return _outside(f"{library}:{word}", *outside)
                # load_model says why where the modality is unknown.
                load = _loader(partial(load_model, folder), trained=True)
                return NamedModel("saved", name, path.name, modality, load)
    recipe = run_recipe(word)
    return NamedModel(
        kind="run",
        name=name,
        label=f"{recipe.get('name', 'run')} ({path.name})",
        modality=recipe["modality"],
        load=_loader(lambda: load_run(word)[0], trained=True),
        facts=recipe,
        data=recipe.get("data", {}),
    )


# ------------------------------------------------------------------------------------------------
# other libraries and baselines


def find_outside(word: str) -> tuple[str, Outside, str] | None:
    """(modality, hook, name) of PREFIX:NAME or PREFIX:MODALITY:NAME.

    None for a word without a known prefix.
    """
    prefix, colon, name = word.partition(":")
    if not colon:
        return None
    hooks = {}
    for modality in installed_modalities("OUTSIDE_PREFIXES", prefix):
        if prefix in modality.outside:
            hooks[modality.name] = modality.outside[prefix]
    if not hooks:
        return None
    _refuse_image_model(word, name)
    first, colon, rest = name.partition(":")
    if colon and first in hooks:
        return first, hooks[first], rest
    if colon and first in modality_names():
        raise CommandError(f"{word!r}: {prefix} has no models of {first}; {nearest(first, hooks)}")
    claims = {modality: hook.claim(name) for modality, hook in hooks.items()}
    if not any(claims.values()):
        forms = ", ".join(f"{prefix}:{modality}:{name}" for modality in hooks)
        raise CommandError(f"{word!r} seems to read none of {', '.join(hooks)}; to insist, {forms}")
    best = max(claims, key=claims.__getitem__)
    return best, hooks[best], name


def _refuse_image_model(word: str, folder: str) -> None:
    """CommandError for a folder of an image model of transformers, which no evaluator reads."""
    file = Path(folder) / "config.json"
    if not word.startswith("hf:") or not file.is_file():
        return
    config = read_object(file)
    if "image_size" in config and "vocab_size" not in config:
        kinds = ", ".join(map(str, config.get("architectures") or ())) or "a model"
        raise CommandError(
            f"{word!r} holds {kinds} of transformers, which reads images; "
            "expected an image model of the zoo or of timm"
        )


def _outside(word: str, modality: str, hook: Outside, inner_name: str) -> NamedModel:
    """A model of another library. Overrides of hf: models go into its name, behind "@"."""

    def load(overrides: Overrides) -> tuple[Any, bool]:
        name = inner_name
        for key, value in leaves(overrides):
            if not word.startswith("hf:"):
                raise CommandError(
                    f"--set {key} does not apply to {word}: it is measured as it was saved"
                )
            separator = "," if re.search("@.*=", name) else "@"
            name += f"{separator}{key}={json.dumps(value)}"
        # So that a random model is the same one each time.
        torch.manual_seed(0)
        return hook.load(name)

    return NamedModel("outside", word, word, modality, load)


def find_baselines(pattern: str) -> dict[str, Baseline]:
    """The baselines whose names match a shell pattern; none where it is close to a model's name."""
    if modality_of(pattern) or set(pattern) <= set("*?") or did_you_mean(pattern, list_models()):
        return {}
    baselines: dict[str, Baseline] = {}
    for modality in installed_modalities("BASELINES", pattern):
        for name in fnmatch.filter(modality.baselines, pattern):
            baselines[name] = (modality, modality.baselines[name])
    return baselines


def _baseline(name: str, modality: Modality, make: Callable[[int], nn.Module]) -> NamedModel:
    """A baseline; overrides do not change it."""

    def load(overrides: Overrides, train_context: int = BASELINE_CONTEXT) -> tuple[nn.Module, bool]:
        return make(train_context), True

    return NamedModel("baseline", name, name, modality.name, load)


def installed_modalities(listing: str = "", pattern: str = "*") -> list[Modality]:
    """The modalities whose packages are installed.

    listing: such as OUTSIDE_PREFIXES. A module that has it is skipped where none of its entries
        fits the pattern, which spares its import.
    """
    modalities = []
    for name in modality_names():
        with contextlib.suppress(ImportError):
            entries = getattr(modality_module(name), listing, None) if listing else None
            if entries is None or fnmatch.filter(entries, pattern):
                modalities.append(find_modality(name))
    return modalities


# ------------------------------------------------------------------------------------------------
# weights to begin a training with


def name_classes(model: ZooModel, names: Sequence[str], checkpoint: Path | None) -> None:
    """Give a model the names of classes that its training data list, where they list any.

    ConfigError where the checkpoint that training continues from has others.
    """
    if names:
        model.class_names = tuple(names)
    config = checkpoint / "model" / "config.json" if checkpoint else None
    if config is None or not config.is_file():
        return
    trained = read_object(config).get("class_names") or ()
    if names and trained and list(trained) != list(names):
        raise ConfigError(
            f"{checkpoint} was trained on the classes {listing(trained)}; the data now list "
            f"{listing(names)}: restore the run's list of classes, or start a new run"
        )


def load_weights(model: ZooModel, source: str) -> str:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    Returns what is to be said of the classifier: its rows follow the names of classes where both
    know them, and a class without a row stays as it was initialised. Without names it is copied
    where it has as many classes.
    """
    folder = _init_folder(source)
    try:
        state, names = _read_state(type(model), folder, source)
        note = _fit_classifier(state, names, model)
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = f"its weights do not fit this model: {error}"
        raise ConfigError(f"model.init_from={source}: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error
    return f"model.init_from={source}: {note}" if note else ""


def _fit_classifier(state: dict[str, torch.Tensor], names: Sequence[str], model: ZooModel) -> str:
    """Replace the tensors of a classifier in `state`, which is for classes `names`, by the model's;
    returns what was done."""
    initial = model.state_dict()
    replaceable = model.replaceable_parameters() & state.keys()
    if not replaceable:
        return ""
    equal_shapes = all(state[name].shape == initial[name].shape for name in replaceable)
    if names and model.class_names:
        pairs = shared_classes(model.class_names, names)
        for name in replaceable:
            rows = initial[name].clone()
            for row, stored_row in pairs:
                rows[row] = state[name][stored_row]
            state[name] = rows
        return _rows_note(model.class_names, names, [row for row, _ in pairs])
    if not equal_shapes:
        state.update({name: initial[name] for name in replaceable})
        return "another number of classes, so that the classifier starts anew"
    if names or model.class_names:
        listed = listing(names or model.class_names)
        return f"one side has no names of classes ({listed}): the classifier's rows are copied"
    return ""


def _rows_note(names: Sequence[str], stored: Sequence[str], rows: Sequence[int]) -> str:
    """Which classes have rows of stored weights; "" where all have, in their order."""
    if tuple(names) == tuple(stored):
        return ""
    new = [name for row, name in enumerate(names) if row not in rows]
    if not new:
        return f"rows of the classifier by name, {len(names)} of {len(stored)} classes"
    return (
        f"rows of the classifier by name for {len(rows)} classes; "
        f"the weights do not know {listing(new)}, which start anew"
    )


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


def _read_state(
    kind: type[ZooModel], folder: Path, source: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights in a saved model's folder or a run folder, or those of a name; and the names of
    their classes."""
    if folder.is_dir():
        is_saved_model = (folder / "config.json").exists()
        read = kind.from_pretrained
        model = read(folder) if is_saved_model else newest_model(folder, read)
        return model.state_dict(), model.class_names
    if "." in source and "/" not in source:
        names = weights_entry(source).get("class_names", ())
        return read_tensors(verified_file(source)), tuple(names)
    raise ValueError(
        "expected a folder, newest:RECIPE, or a name such as text_ggd_ssmax_tiny.facts"
    )
