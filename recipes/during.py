"""Evaluators that run during training, and samples: `evaluate.during` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from modalities.contract import Modality
from modalities.evaluation import Evaluator, Listing
from recipes.config import ConfigError, Recipe
from recipes.samples import SAMPLERS, Painter, Sample, Sampler
from zoo.model import ZooModel
from zoo.naming import nearest

if TYPE_CHECKING:
    from recipes.engine import Engine

__all__ = ["Findings", "Monitors", "find_monitors"]


class Findings(NamedTuple):
    """Numbers by name, such as {"passkey/free_generation@512": 0.98}, samples, and matplotlib figures."""

    numbers: dict[str, float]
    samples: list[Sample]
    pictures: list[Any]


class Monitors:
    """What a recipe's `evaluate.during` names, each with its settings and its number of steps between runs: evaluators, and
    the samples of `recipes.samples`.

    They measure on rank 0 what would be exported at that step (averaged weights where they are kept, the optimiser's
    float32 copies in bf16), while the other ranks wait: keep their settings small.
    """

    def __init__(self, recipe: Recipe, modality: Modality, model: ZooModel) -> None:
        self.monitors = find_monitors(recipe, modality)
        for _, monitor in self.monitors:  # ValueError now for what cannot be measured
            if isinstance(monitor, Evaluator):
                monitor.cells(model)
            else:
                monitor.prepare(model)

    def measure(self, engine: Engine, step: int, *, last: bool) -> Findings:
        """What is due after this step, on rank 0; elsewhere nothing. Every rank must call."""
        due = [monitor for every, monitor in self.monitors if step % every == 0 or last]
        found = Findings({}, [], [])
        if not due:
            return found
        model = engine.exported_model()
        if model is not None:
            for monitor in due:
                if isinstance(monitor, Sampler):
                    found.samples.extend(monitor.write(model))
                elif isinstance(monitor, Painter):
                    found.pictures.append(monitor.draw(model))
                else:
                    found.numbers.update(_flat(monitor, monitor.rows(dict(monitor.run(model)))))
        engine.barrier()
        return found


def find_monitors(recipe: Recipe, modality: Modality) -> list[tuple[int, Evaluator | Sampler | Painter]]:
    """What `evaluate.during` names, with the number of steps between its runs; ConfigError for what cannot be."""
    return [_monitor(name, given, recipe, modality) for name, given in recipe.evaluate.during.items()]


def _monitor(name: str, given: Any, recipe: Recipe, modality: Modality) -> tuple[int, Evaluator | Sampler | Painter]:
    """(number of steps between its runs, what runs) of an entry of `evaluate.during`."""
    known: dict[str, Any] = {n: kind for n, kind in modality.evaluators.items() if not issubclass(kind, Listing)}
    samplers = {n: kind for n, kind in SAMPLERS.items() if kind.serves(modality)}
    known |= samplers
    if name not in known:
        raise ConfigError(f"evaluate.during: no evaluator {name!r} for {modality.name} models; {nearest(name, known)}")
    settings = {**given} if isinstance(given, Mapping) else {"every": given}
    every = settings.pop("every", None)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"evaluate.during: {name}={given!r}: expected a number of steps, or settings with 'every'")
    kind = known[name].settings_class
    names = [field.name for field in fields(kind)]
    for key in settings:
        if key not in names:
            raise ConfigError(f"evaluate.during: {name} has no setting {key!r}; {nearest(key, names)}")
    parse = {field.name: field.metadata.get("parse") for field in fields(kind)}
    try:
        chosen = kind(**{k: _value(v, parse[k]) for k, v in settings.items()})
        if name in samplers:
            return every, known[name](chosen, recipe, modality)
        return every, known[name](chosen, asdict(recipe.data))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"evaluate.during: {name}={given!r}: {error}") from error


def _value(given: Any, parse: Callable[[str], Any] | None) -> Any:
    """A setting from JSON: text or a number as on the command line, a list as a tuple."""
    if parse is not None and isinstance(given, str | int | float):
        return parse(str(given))
    return tuple(given) if isinstance(given, list) else given


def _flat(evaluator: Evaluator, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The finite scores of rows by name and place."""
    tick = evaluator.axis.tick
    found = {
        f"{evaluator.name}/{score.column}@{tick(row[evaluator.axis.column])}": row.get(score.column)
        for row in rows
        for score in evaluator.scores
        if score.tabled and not score.exception
    }
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}
