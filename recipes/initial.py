"""Where a model's first weights come from when a recipe names them (`model.init_from`)."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from recipes.config import ConfigError
from recipes.runs import model_folder, newest_run_dir
from zoo.model import ZooModel
from zoo.pretrained import resolve_tag, verified_file


def load_weights(model: ZooModel, source: str) -> None:
    """Copy weights into a model of the same shape, from a source that `model.init_from` names.

    A run folder, a save_pretrained folder, a model with shipped weights (text_ggd_ssmax_tiny.passkey), or
    "newest:RECIPE". A classifier for another number of classes stays as it was initialised. ConfigError where there are none,
    or they do not fit.
    """
    if source.startswith("newest:"):
        path: Path | None = newest_weights(source.removeprefix("newest:"))
    else:
        path = Path(source) if Path(source).is_dir() else None
    try:
        if path is not None:
            folder = path if (path / "config.json").exists() else model_folder(path)
            state = type(model).from_pretrained(folder).state_dict()
        elif "." in source and "/" not in source:
            state = load_file(verified_file(resolve_tag(source)))
        else:
            raise ValueError(
                "expected a run folder, a save_pretrained folder, newest:RECIPE, or a model with weights such as "
                "text_ggd_ssmax_tiny.passkey"
            )
        own = model.state_dict()
        for name in model.replaceable_parameters():
            if name in state and state[name].shape != own[name].shape:
                state[name] = own[name]
        model.load_state_dict(state)
    except RuntimeError as error:  # torch's, for shapes that differ
        raise ConfigError(f"model.init_from={source}: its weights do not fit this model: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={source}: {error}") from error


def newest_weights(recipe_name: str) -> Path:
    """The newest finished run of a recipe; ConfigError naming the command that makes one."""
    found = newest_run_dir(recipe_name, finished=True)
    if found is None:
        raise ConfigError(
            f"this recipe starts from a finished run of {recipe_name}, and there is none under {Path('runs') / recipe_name}; "
            f"make one with `deepspeed recipes/train.py {recipe_name}`, or name weights with --set model.init_from=…"
        )
    return found
