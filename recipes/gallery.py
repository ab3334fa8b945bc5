"""Write one HTML page of the models with weights: a table of models, score curves, priors by head, sortable tables.

    priorzoo gallery --out gallery.html
    priorzoo gallery --results results --out gallery.html

The page is one file that asks the network for nothing. Scores with 95% intervals are read from the CSV files of folders that
`priorzoo evaluate --out FOLDER` wrote; without --results from the checkout's benchmarks/ where the command runs in one, else
from the models' cards, which have no intervals. Exit codes: 0 done, 2 it cannot be made.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import typer
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from recipes.commands import CommandError, call
from recipes.console import Console
from zoo.catalog import create_model, manifest
from zoo.files import write_text
from zoo.prior_plot import FLOOR, centre_log_prior, layer_priors, log_prior_curve

PAGE = Path(__file__).with_name("gallery_page")
LENGTH = 1024  # tokens of the priors' curves
ERROR = "_standard_error"
SHARES = ("accuracy", "free_generation", "top1")  # their intervals end at 0 and 1
FACTS = ("position", "steps", "seed", "tokens", "images", "train_context", "image_size", "data", "license")
KINDS = {"model": "shipped", "seed": "another seed", "baseline": "baseline"}  # in the order of tables
Place = int | float | str  # along an axis: a length, a size, a name
Cell = tuple[float, float | None, float | None]  # a score and the ends of its 95% interval
Entry = Mapping[str, Any]  # of the manifest


@dataclass
class ScoreTable:
    """One score of one evaluator: a row for each model, a column for each place on the axis.

    note: how it was measured. kinds: of the rows, keys of `KINDS`.
    """

    modality: str
    title: str
    score: str
    axis: str
    note: str = ""
    places: list[Place] = field(default_factory=list)
    rows: dict[str, dict[Place, Cell]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, label: str, kind: str, place: Place, cell: Cell) -> None:
        self.kinds[label] = kind
        self.rows.setdefault(label, {})[place] = cell
        if place not in self.places:
            self.places.append(place)

    def ordered(self) -> ScoreTable:
        """The table with numbers in order, and shipped models before baselines."""
        if all(isinstance(place, int | float) for place in self.places):
            self.places.sort()
        labels = sorted(self.rows, key=lambda label: list(KINDS).index(self.kinds[label]))
        self.rows = {label: self.rows[label] for label in labels}
        return self

    def curves(self) -> dict[str, Any]:
        """What the page's script draws; share: all scores are from 0 to 1."""
        rows = {
            label: [[None if v is None else round(v, 5) for v in row[p]] if p in row else None for p in self.places]
            for label, row in self.rows.items()
        }
        share = all(0 <= cell[0] <= 1 for row in self.rows.values() for cell in row.values())
        return {"places": self.places, "rows": rows, "share": share}


def gallery_command(
    *,
    out: Annotated[Path, typer.Option(help="the HTML file")] = Path("gallery.html"),
    results: Annotated[
        list[Path], typer.Option(help="a folder of results; default: the checkout's, else the cards'")
    ] = [],  # noqa: B006
) -> None:
    folders = results or sorted(p for name in ("text_*", "vision_*", "dna_*") for p in Path("benchmarks").glob(name))
    tables = stored_scores(folders) if folders else card_scores()
    page = gallery_page(tables, measured=bool(folders))
    write_text(out, page)
    summary = f"written: {out}, {len(page.encode()) / 1e3:,.0f} kB, {len(manifest())} models, {len(tables)} tables"
    Console().print(summary, soft_wrap=True)


# ---- scores


def card_scores() -> list[ScoreTable]:
    """Scores on the cards of shipped weights, without intervals."""
    tables: dict[tuple[str, str], ScoreTable] = {}
    for name, entry in manifest().items():
        modality = _modality(entry)
        for row in entry.get("measured", []):
            axis, *scores = row
            for score in scores:
                table = tables.setdefault((modality, score), ScoreTable(modality, modality, score, axis))
                table.add(name, "model", row[axis], (row[score], None, None))
    return [table.ordered() for table in tables.values()]


def stored_scores(folders: Sequence[Path]) -> list[ScoreTable]:
    """Every score that the CSV files of `folders` have with a standard error; CommandError for a folder without any."""
    tables: dict[tuple[Path, str], ScoreTable] = {}
    for folder in folders:
        before = len(tables)
        for path in sorted(folder.glob("*.csv")):
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if rows and path.name.count(".") == 1 and "model" in rows[0] and "method" in rows[0]:
                _add_scores(tables, path, rows)
        if len(tables) == before:
            raise CommandError(f"{folder} holds no results; expected {folder}/EVALUATOR.csv of priorzoo evaluate")
    return [table.ordered() for table in tables.values()]


def _add_scores(tables: dict[tuple[Path, str], ScoreTable], path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Rows of EVALUATOR.csv: model, method, place of training, place, then the scores."""
    _, _, _, axis, *columns = rows[0]
    shipped = manifest()
    modalities = (_modality(shipped[row["model"]]) for row in rows if row["model"] in shipped)
    modality = next(modalities, path.parent.name.partition("_")[0])
    for row, column in itertools.product(rows, columns):
        label, score = row["model"], column.replace(ERROR, "", 1)
        if ERROR not in column or not row[column] or not row.get(score):
            continue
        kind = "model" if label in shipped else "seed" if label.startswith(f"{modality}.") else "baseline"
        value, error = float(row[score]), float(row[column])
        low, high = value - 1.96 * error, value + 1.96 * error
        if score.partition(" ")[0] in SHARES:
            low, high = max(low, 0.0), min(high, 1.0)
        table = tables.setdefault((path, score), ScoreTable(modality, path.stem, score, axis, path.parent.name))
        known = math.isfinite(error)  # of a single contig it is not
        table.add(label, kind, _place(row[axis]), (value, low, high) if known else (value, None, None))


def _place(text: str) -> Place:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _modality(entry: Entry) -> str:
    return entry["recipe"].partition(".")[0]


# ---- priors


@torch.no_grad()
def prior_curves(model: Any) -> dict[str, Any]:
    """{at, layers[layer][head][n], unit, trained}: K less its maximum, cut below `FLOOR`.

    On a line from the last of `LENGTH` tokens; on a grid from the centre of an image of twice the training side, the mean over
    patches at one distance. Raises ValueError: see `zoo.prior_plot.layer_priors`.
    """
    priors = layer_priors(model)
    if model.train_positions().is_grid:
        height, width = model.config.train_size
        positions = model.positions(2 * height, 2 * width)
        rows, columns = positions.shape
        dy, dx = torch.arange(rows)[:, None] - rows // 2, torch.arange(columns) - columns // 2
        at, group = torch.hypot(dy.double(), dx.double()).flatten().unique(return_inverse=True)
        patches = [centre_log_prior(prior, positions)[0].flatten(1) for prior in priors]
        curves = [torch.stack([p[:, group == n].mean(-1) for n in range(len(at))], dim=-1) for p in patches]
        trained, unit = height // (2 * height // rows), "patches"
    else:
        at = torch.logspace(0, math.log2(LENGTH), 81, base=2, dtype=torch.float64).sub(1).round().unique().long()
        curves = [log_prior_curve(prior, LENGTH)[:, at.clamp(max=LENGTH - 1)] for prior in priors]
        trained, unit = model.config.train_context, "tokens"
    layers = [[[round(max(v, FLOOR), 3) for v in head] for head in curve.tolist()] for curve in curves]
    return {"at": [round(v, 3) for v in at.tolist()], "layers": layers, "unit": unit, "trained": trained}


# ---- page


def gallery_page(tables: Sequence[ScoreTable], *, measured: bool) -> str:
    """The HTML of the page, from score tables and the weights that ship; measured: the tables have intervals."""
    models: list[dict[str, Any]] = []
    for name, entry in manifest().items():
        model, prior, reason = create_model(name), None, ""
        try:
            prior = prior_curves(model)
        except ValueError as error:
            reason = str(error)
        trained = entry.get("train_context") or entry.get("image_size") or 0
        parameters = sum(parameter.numel() for parameter in model.parameters())
        cells = [_modality(entry), f"{parameters / 1e6:.1f}M", str(trained or ""), *_first_scores(entry)]
        listed = [n for n, table in enumerate(tables) if name in table.rows]
        table = max(listed, key=lambda n: len(tables[n].rows[name]), default=None)  # the longest curve
        facts = {"name": name, "entry": entry, "modality": _modality(entry), "trained": trained, "cells": cells}
        models.append(facts | {"table": table, "prior": prior, "reason": reason})
    priors = {model["name"]: model["prior"] for model in models if model["prior"]}
    data = {"tables": [table.curves() for table in tables], "priors": priors}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True)
    environment.filters["prose"] = _prose
    return environment.get_template("page.html").render(
        models=models,
        tables=tables,
        facts=FACTS,
        kinds=KINDS,
        measured=measured,
        version=version("priorzoo"),
        data=Markup(text),
    )


def _first_scores(entry: Entry) -> list[str]:
    """A card's first score at the first and the last place that was measured, and its name."""
    rows: list[dict[str, float]] = entry.get("measured", [])
    axis, score, *_ = [*(rows[0] if rows else {}), "", ""]
    scored = [row for row in rows if score in row]
    cells = [f"{row[score]:.3f} at {row[axis]}" for row in scored[:1] + scored[-1:]]
    return [*cells, *[""] * (2 - len(cells)), score]


def _prose(text: object) -> Markup:
    """HTML of a text with `code`."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo gallery") -> int:
    return call(gallery_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
