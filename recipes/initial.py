"""Where a model's first weights come from when a recipe names them (`model.init_from`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.config import ConfigError
from recipes.runs import model_folder, newest_run_dir


def load_weights(model: Any, source: str) -> None:
    """Copy weights into a model of the same shape, from what `model.init_from` may name.

    A run folder, a save_pretrained folder, a model with shipped weights (text_ggd_ssmax_tiny.passkey), or
    "newest:RECIPE". ConfigError where there are none, or they do not fit.
    """
    from zoo.pretrained import load_pretrained, resolve_tag

    if source.startswith("newest:"):
        path: Path | None = newest_weights(source.removeprefix("newest:"))
    else:
        path = Path(source) if Path(source).is_dir() else None
    try:
        if path is not None:
            folder = path if (path / "config.json").exists() else model_folder(path)
            model.load_state_dict(type(model).from_pretrained(folder).state_dict())
        elif "." in source and "/" not in source:
            load_pretrained(model, resolve_tag(source))
        else:
            raise ValueError(
                "expected a run folder, a save_pretrained folder, newest:RECIPE, or a model with weights such as "
                "text_ggd_ssmax_tiny.passkey"
            )
    except (RuntimeError, ValueError) as error:  # torch raises RuntimeError for shapes that differ
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
