"""Results of further seeds whose runs are not in this checkout, kept when the shipped weights are measured again.

The package has the weights of one seed a method, and a results file the cells of all: without this a fresh clone would
replace the mean of three seeds by one of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modalities.evaluation import Evaluator, ModelResult
from modalities.plots import overview_figure
from recipes.report import console, print_results, write_results
from recipes.targets import find_evaluators

if TYPE_CHECKING:
    from tools.train_zoo import Family

Content = dict[str, Any]  # of a results file


class StoredSeedsError(RuntimeError):
    """Stored results of further seeds can neither be measured again nor kept."""


def keep_stored(kind: Family, evaluators: Iterable[str], out: Path, *, force: bool) -> None:
    """Put into the files of `out`, just measured, the stored results of further seeds that are not among them.

    Raises:
        StoredSeedsError: where they cannot stand beside the new ones; `force` leaves them out instead.
    """
    merged, any_kept = {}, False
    for name in evaluators:
        evaluator = find_evaluators(name, kind.modality)[0]
        path = kind.measured / f"{name}.json"
        new = json.loads((out / path.name).read_text())
        stored = json.loads(path.read_text()) if path.exists() else new
        kept = _kept(kind, evaluator, stored, new, path=path, force=force)
        _say(kind, name, stored, new, kept)
        merged[name] = _merged(kind, evaluator, new, kept)
        if kept:
            any_kept = True
            settings = {key: tuple(v) if isinstance(v, list) else v for key, v in new["settings"].items()}
            write_results(evaluator, merged[name], evaluator.settings(**settings), out)
            print_results(evaluator, merged[name])
    if any_kept and {"passkey", "perplexity"} <= merged.keys():  # as recipes/evaluate.py draws it
        overview_figure(merged["passkey"], merged["perplexity"], out / "overview.png")


def _by_label(content: Content) -> dict[str, dict[str, Any]]:
    return {model["label"]: model for model in content["models"]}


def _kept(
    kind: Family, evaluator: Evaluator, stored: Content, new: Content, *, path: Path, force: bool
) -> list[dict[str, Any]]:
    """The stored models of further seeds that were not measured now."""
    further = {kind.label(method, seed) for seed in kind.seeds[1:] for method in kind.methods} - _by_label(new).keys()
    kept = [model for model in stored["models"] if model["label"] in further]
    reason = _obstacle(evaluator, stored, new, kept) if kept else ""
    if reason and not force:
        raise StoredSeedsError(
            f"{path} was left as it is. It has {len(kept)} models of further seeds that have no finished run in "
            f"{kind.run(kind.methods[0], kind.seeds[0]).parent}, and they cannot stand beside what was measured now: "
            f"{reason}. Train them (python tools/train_zoo.py train {kind.modality} --seeds "
            f"{','.join(map(str, kind.seeds[1:]))}), or leave them out with --force"
        )
    if reason:
        console.print(f"{evaluator.name}: --force leaves out {len(kept)} stored models of further seeds ({reason})")
    return [] if reason else kept


def _obstacle(evaluator: Evaluator, stored: Content, new: Content, kept: list[dict[str, Any]]) -> str:
    """Why stored results cannot stand beside new ones, empty where they can: settings are the same, and weights, data and
    cells of the models whose seeds they are."""
    defaults = json.loads(json.dumps(asdict(evaluator.settings())))  # of options that came after the stored file
    for key, value in (defaults | stored["settings"]).items():
        if value != new["settings"].get(key):
            return f"{key} was {value!r} and is {new['settings'].get(key)!r}"
    before, now = _by_label(stored), _by_label(new)
    for label in dict.fromkeys(model.get("group", "") for model in kept):
        if label in before and label in now:
            for key in ("weights", "source"):
                if before[label].get(key) != now[label].get(key):
                    return f"{key} of {label}: {before[label].get(key)!r} then, {now[label].get(key)!r} now"
            if before[label]["cells"].keys() != now[label]["cells"].keys():
                return f"{label} was measured in other cells"
    return ""


def _merged(kind: Family, evaluator: Evaluator, new: Content, kept: list[dict[str, Any]]) -> list[ModelResult]:
    """New and kept results in the order in which all would have been measured, each seed in its group."""
    names, groups = {field.name for field in fields(ModelResult)}, {model.get("group") for model in kept}
    results = []
    for model in new["models"] + kept:
        known = {key: value for key, value in model.items() if key in names}
        result = ModelResult(trained_at=model[evaluator.trained], **known)
        alone = not result.group and result.label in groups  # the first seed, measured without the others
        results.append(replace(result, group=result.label) if alone else result)
    order = [kind.label(method, seed) for seed in kind.seeds for method in kind.methods]
    return sorted(results, key=lambda result: order.index(result.label) if result.label in order else len(order))


def _say(kind: Family, name: str, stored: Content, new: Content, kept: list[dict[str, Any]]) -> None:
    """Which seeds were measured and which kept, and how far numbers in both files are apart where some were kept.

    Weights are the same, data need not be: other versions of fonts draw other letters.
    """
    before, now = _by_label(stored), _by_label(new)
    held = {model["label"] for model in kept}
    for seed in kind.seeds:
        for what, among in {"measured": now.keys(), "kept from the stored results (no run here)": held}.items():
            if methods := [method for method in kind.methods if kind.label(method, seed) in among]:
                console.print(f"{name}, seed {seed}, {what}: {', '.join(methods)}", soft_wrap=True)
    if kept:
        shown = ", ".join(
            f"{column} {_apart(kind, column, before, now):.2g}" for column in kind.evaluators.get(name, ())
        )
        console.print(f"{name}: what was measured again differs from the stored results by at most {shown}")


def _apart(kind: Family, column: str, before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> float:
    """The largest difference of a finite number in this column, over models and rows that both have."""
    most = 0.0
    for label in before.keys() & now.keys():
        old = {row[kind.axis]: row.get(column) for row in before[label]["rows"]}
        pairs = [(row.get(column), old.get(row[kind.axis])) for row in now[label]["rows"]]
        gaps = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        most = max([most, *filter(math.isfinite, gaps)])
    return most
