"""Evaluators during training: `evaluate.during` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from modalities.contract import Modality
from modalities.evaluation import Evaluator, Listing
from recipes.config import ConfigError, Recipe
from zoo.errors import nearest
from zoo.model import ZooModel


def find_evaluators(recipe: Recipe, modality: Modality) -> list[tuple[int, Evaluator]]:
    """(steps between its runs, evaluator) of each entry in `evaluate.during`; ConfigError for an entry that is wrong."""
    known = {name: kind for name, kind in modality.evaluators.items() if not issubclass(kind, Listing)}
    evaluators: list[tuple[int, Evaluator]] = []
    for name, entry in recipe.evaluate.during.items():
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(f"evaluate.during: no evaluator {name!r} for {modality.name} models; {near}")
        settings: dict[str, Any] = {**entry} if isinstance(entry, Mapping) else {"every": entry}
        every = settings.pop("every", None)
        if type(every) is not int or every < 1:
            raise ConfigError(f"evaluate.during: {name}={entry!r}: expected a number of steps or settings with 'every'")
        parsers = {option.name: option.metadata.get("parse") for option in fields(known[name].settings_class)}
        try:
            for key, value in settings.items():
                if key not in parsers:
                    raise ValueError(f"{name} has no setting {key!r}; {nearest(key, parsers)}")
                parse = parsers[key]
                if parse is not None and isinstance(value, str | int | float):  # as on the command line
                    value = parse(str(value))
                settings[key] = tuple(value) if isinstance(value, list) else value
            evaluators.append((every, known[name](known[name].settings_class(**settings), asdict(recipe.data))))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"evaluate.during: {name}={entry!r}: {error}") from error
    return evaluators


def scores(evaluator: Evaluator, model: ZooModel) -> dict[str, float]:
    """The finite scores of a model by name and place, such as {"passkey/free_generation@512": 0.98}."""
    axis, numbers = evaluator.axis, {}
    for row in evaluator.rows(dict(evaluator.run(model))):
        for score in evaluator.scores:
            value = row.get(score.column)
            if score.tabled and not score.exception and value is not None and math.isfinite(value):
                numbers[f"{evaluator.name}/{score.column}@{axis.tick(row[axis.column])}"] = float(value)
    return numbers
