"""Write one HTML page of the models with weights: a table of models, score curves, priors by head,
sortable tables.

    priorzoo gallery --out gallery.html

The page is one file that asks the network for nothing. Scores are those of the models' cards. Exit
codes: 0 done, 2 it cannot be made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from modalities.prior_plot import prior_curves
from recipes.commands import call
from recipes.recipe import Json
from zoo.catalog import create_model
from zoo.console import Console
from zoo.files import write_text
from zoo.pretrained import manifest

PAGE = Path(__file__).with_name("gallery_page")
FACTS = (
    "position",
    "steps",
    "seed",
    "tokens",
    "images",
    "train_context",
    "image_size",
    "data",
    "license",
)


@dataclass
class ScoreTable:
    """One score of a modality: a row for each model, a column for each place on the axis, a length
    or a size."""

    modality: str
    score: str
    axis: str
    places: list[int] = field(default_factory=list)
    rows: dict[str, dict[int, float]] = field(default_factory=dict)

    def curves(self) -> Json:
        """What the page's script draws; share: all scores are from 0 to 1."""
        rows = {}
        share = True
        for label, row in self.rows.items():
            rows[label] = [row.get(place) for place in self.places]
            share &= all(0 <= score <= 1 for score in row.values())
        return {"places": self.places, "rows": rows, "share": share}


def gallery_command(
    *,
    out: Annotated[Path, typer.Option(help="the HTML file")] = Path("gallery.html"),
    home: Annotated[
        str,
        typer.Option(metavar="URL", help="what the page links back to; default: the repository"),
    ] = "",
) -> None:
    if not home:
        # A line is "Repository, URL".
        addresses = metadata("priorzoo").get_all("Project-URL", [""])
        home = addresses[0].partition(", ")[2]
    page = gallery_page(home)
    write_text(out, page)
    size = len(page.encode()) / 1e3
    Console().print(
        f"written: {out}, {size:,.0f} kB, {len(manifest())} models",
        soft_wrap=True,
    )


def card_scores() -> list[ScoreTable]:
    """Scores on the cards of shipped weights."""
    tables: dict[tuple[str, str], ScoreTable] = {}
    for name, entry in manifest().items():
        modality = entry["recipe"].partition(".")[0]
        for row in entry.get("measured", []):
            axis, *scores = row
            for score in scores:
                table = tables.setdefault((modality, score), ScoreTable(modality, score, axis))
                table.rows.setdefault(name, {})[row[axis]] = row[score]
                table.places = sorted({*table.places, row[axis]})
    return list(tables.values())


def gallery_page(home: str = "") -> str:
    """The HTML of the page, from the weights that ship and their cards. home: an address to link
    back to."""
    tables = card_scores()
    models = [_model_facts(name, entry, tables) for name, entry in manifest().items()]
    priors = {model["name"]: model["prior"] for model in models if model["prior"]}
    data = {"tables": [table.curves() for table in tables], "priors": priors}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # In a script's element no text may close it.
    text = text.replace("<", "\\u003c")
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True)
    environment.filters["prose"] = _prose
    return environment.get_template("page.html").render(
        models=models,
        tables=tables,
        facts=FACTS,
        home=home,
        version=version("priorzoo"),
        data=Markup(text),
    )


def _model_facts(name: str, entry: Mapping[str, Any], tables: Sequence[ScoreTable]) -> Json:
    """What the page's template reads of a model."""
    model = create_model(name)
    prior = None
    reason = ""
    try:
        prior = prior_curves(model)
    except ValueError as error:
        reason = str(error)
    modality = entry["recipe"].partition(".")[0]
    trained = entry.get("train_context") or entry.get("image_size") or 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = f"{parameters / 1e6:.1f}M"
    # The table with the model's longest curve.
    numbers = [n for n, table in enumerate(tables) if name in table.rows]
    longest = max(numbers, key=lambda n: len(tables[n].rows[name]), default=None)
    return {
        "name": name,
        "entry": entry,
        "modality": modality,
        "trained": trained,
        "cells": [modality, size, str(trained or ""), *_first_scores(entry)],
        "table": longest,
        "prior": prior,
        "reason": reason,
    }


def _prose(text: str) -> Markup:
    """HTML of a text with `code`."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _first_scores(entry: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """A card's first score at the first and the last place that was measured, and its name."""
    rows = entry.get("measured", [])
    columns = list(rows[0]) if rows else []
    if len(columns) < 2:
        return ["", "", ""]
    axis, score = columns[:2]
    scored = [row for row in rows if score in row]
    first = f"{scored[0][score]:.3f} at {scored[0][axis]}"
    last = f"{scored[-1][score]:.3f} at {scored[-1][axis]}"
    return [first, last, score]


main = partial(call, gallery_command, prog="priorzoo gallery")
