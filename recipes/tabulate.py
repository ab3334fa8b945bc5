"""One table and one figure of what an evaluator found in several folders: other models, other lengths, other machines.

    python recipes/tabulate.py far results/near results/farthest --out results
    python recipes/tabulate.py resolution benchmarks/vision_tiny     what is stored there, printed

FOLDER is what `recipes/evaluate.py --out FOLDER` wrote. A model's rows are joined; models of a group stay one.
With --out: EVALUATOR.csv and EVALUATOR.png. Exit codes: 0 done, 2 the folders cannot be joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import typer

from modalities.contract import find_modality, modality_names
from modalities.evaluation import Evaluator, Listing
from modalities.results import ModelResult
from recipes.commands import CommandError, call
from recipes.report import draw_results, load_results, print_results, stored_settings
from zoo.errors import require
from zoo.naming import nearest

WHICH = (
    "lengths",
    "sizes",
    "samples",
    "batch_tokens",
    "batch_size",
)  # settings that choose what is measured, and not how


def tabulate_command(
    evaluator: Annotated[str, typer.Argument(metavar="EVALUATOR", help="such as far")],
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="that evaluations wrote to")],
    out: Annotated[Path | None, typer.Option(help="where EVALUATOR.csv and .png go; default: nowhere")] = None,
) -> None:
    if out is not None:
        require("matplotlib", "drawing figures", "figures")
    kind = find_kind(evaluator, folders)
    results, settings = joined(kind, folders)
    measured = kind(settings)
    print_results(measured, results)
    if out is not None:
        draw_results(measured, results, out)
        typer.echo(f"written: {out / kind.name}.csv, .png")


def find_kind(name: str, folders: Sequence[Path]) -> type[Evaluator]:
    """The evaluator of a name, of the modality whose results the folders hold; CommandError where they hold none."""
    known = {}
    for modality in modality_names():
        with contextlib.suppress(ImportError):  # its packages are not installed
            known[modality] = find_modality(modality).evaluators
    if not any(name in kinds for kinds in known.values()):
        raise CommandError(
            f"no evaluator {name!r}; {nearest(name, sorted({n for kinds in known.values() for n in kinds}))}"
        )
    for folder in folders:
        if not any((folder / name).glob("*.json")):
            raise CommandError(f"{folder} holds no results of {name}; expected {folder / name}/MODEL.json")
    stored = [path.name for path in (folders[0] / name).glob("*.json")]
    theirs = [kinds[name] for modality, kinds in known.items() if name in kinds]
    named = [
        kinds[name]
        for modality, kinds in known.items()
        if name in kinds and any(s.startswith(modality) for s in stored)
    ]
    kind = (named or theirs)[0]
    if issubclass(kind, Listing):
        raise CommandError(f"{name} writes a list of its own, which has no table over models")
    return kind


def joined(kind: type[Evaluator], folders: Sequence[Path]) -> tuple[list[ModelResult], Any]:
    """What all folders hold, a result for each model with the rows of all, and the settings of the first.

    Raises:
        ValueError: where they were measured otherwise, or say different things of one model at one place.
    """
    first, axis = stored_settings(kind, folders[0]), kind.axis.column
    found: dict[str, ModelResult] = {}
    for folder in folders:
        settings = stored_settings(kind, folder)
        for field in dataclasses.fields(settings):
            mine, other = getattr(settings, field.name), getattr(first, field.name)
            if mine != other and field.name not in WHICH:
                raise ValueError(f"{folder}: {field.name} is {mine!r}, and {other!r} in {folders[0]}")
        for result in load_results(kind, folder):
            before = found.setdefault(result.label, dataclasses.replace(result, rows=[]))
            if (before.weights, before.trained_at) != (result.weights, result.trained_at):
                raise ValueError(f"{folder}: {result.label} has other weights than in the folders before")
            for row in result.rows:
                same = next((known for known in before.rows if known[axis] == row[axis]), None)
                if same is not None and json.dumps(same, sort_keys=True) != json.dumps(
                    row, sort_keys=True
                ):  # NaN is NaN
                    raise ValueError(f"{folder}: {result.label} was measured before, at {axis} {row[axis]}, otherwise")
                if same is None:
                    before.rows.append(row)
    for result in found.values():
        if all(isinstance(row[axis], int | float) for row in result.rows):
            result.rows.sort(key=lambda row: row[axis])
    return list(found.values()), first


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/tabulate.py") -> int:
    return call(tabulate_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
