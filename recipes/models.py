"""Models by name."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.commands import ConfigError
from recipes.run_folder import newest_model, newest_run_dir
from zoo.files import read_tensors
from zoo.model import ZooModel
from zoo.pretrained import verified_file


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
