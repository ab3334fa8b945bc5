"""What an evaluation shows and leaves behind: progress, tables, and files of every evaluator."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

from modalities.evaluation import Evaluator, Listing
from modalities.paired import Place
from modalities.results import (
    ModelResult,
    Row,
    Score,
    SeedMean,
    file_safe,
    mean_of_seeds,
    short_names,
)
from modalities.tables import paired_tables, result_table, write_table
from recipes.commands import Console, clock, short
from zoo.files import write_json
from zoo.positions import slices

console = Console()
EVERY = 15.0  # seconds between two lines of progress


class CellProgress:
    """Prints now and then how much of an evaluation's cells is read. total: units of all cells.
    unit: what they are."""

    def __init__(self, name: str, total: int, unit: str, console: Console):
        self.name = name
        self.total = total
        self.unit = unit
        self.console = console
        self.finished = self.part = 0  # units of finished cells, and of the one that is read
        self.started = self.last_line = time.perf_counter()

    def advance(self, units: int) -> None:
        """Count units of the cell that is being read."""
        self.part += units
        now = time.perf_counter()
        done = min(self.finished + self.part, self.total)
        if now - self.last_line >= EVERY:
            self.last_line, rate = now, done / (now - self.started)
            left = clock((self.total - done) / rate) if rate else "…"
            text = f"{self.name}  {short(done)}/{short(self.total)} {self.unit}  {short(rate)}/s  left {left}"
            self.console.print(text, soft_wrap=True)

    def finish(self, units: int) -> None:
        """Count a whole cell of `units`, in place of its parts."""
        self.finished = self.finished + units
        self.part = 0
        self.advance(0)


def write_results(evaluator: Evaluator, results: list[ModelResult], out: Path) -> None:
    """EVAL/MODEL.json for each model, EVAL.csv, EVAL.png, and an evaluator's own files; a listing
    writes its rows itself."""
    axis = evaluator.axis
    for result in results:
        fields = {
            f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "cells"
        }
        if isinstance(evaluator, Listing):
            fields.pop("rows")
        content = {"label": fields.pop("label"), axis.trained: fields.pop("trained_at"), **fields}
        facts = {"evaluator": evaluator.name, "version": evaluator.version}
        facts["settings"] = dataclasses.asdict(evaluator.settings)
        write_json(out / evaluator.name / f"{file_safe(result.label)}.json", facts | content)
    if not isinstance(evaluator, Listing):
        models = (
            {"model": r.label, "method": r.method, axis.trained: r.trained_at} for r in results
        )
        rows = [
            model | row
            for model, result in zip(models, results, strict=True)
            for row in result.rows
        ]
        write_table(out / f"{evaluator.name}.csv", rows)
    evaluator.draw(results, out / f"{evaluator.name}.png")
    evaluator.write(results, out)


def print_results(evaluator: Evaluator, results: list[ModelResult]) -> None:
    """A row for each model and score, a column for each place on the axis; then what the evaluator
    shows itself."""
    if line := evaluator.measured(results):
        console.print(line, soft_wrap=True)
    if not isinstance(evaluator, Listing):
        axis = evaluator.axis.column
        means = mean_of_seeds(results, axis)
        points = list(dict.fromkeys(row[axis] for result in means for row in result.rows))
        if any(isinstance(point, str) for point in points):
            for score in (score for score in evaluator.scores if score.tabled):
                _print_names(evaluator, means, points, score)
        else:
            _print_numbers(evaluator, means, sorted(points))
    evaluator.show(results, console)


def _print_numbers(evaluator: Evaluator, results: list[ModelResult], points: list[Place]) -> None:
    pooled = any(isinstance(result, SeedMean) for result in results)
    seeds = "; mean ± standard deviation over seeds" if pooled else ""
    table = result_table(f"{evaluator.name}: {evaluator.summary}{seeds}")
    table.add_column("model", overflow="fold", min_width=7)  # never squeezed out by many columns
    table.add_column("score", style="dim", no_wrap=True)
    for point in points:  # numbers are never cut; on a narrow terminal names wrap
        table.add_column(evaluator.axis.tick(point), justify="right", no_wrap=True, min_width=5)
    for result, name in zip(results, short_names(results), strict=True):
        if isinstance(result, SeedMean):
            name += f" ({result.seeds} seeds)"
        scores = [
            score
            for score in evaluator.scores
            if score.tabled
            and any(
                row.get(score.column) if score.exception else score.column in row
                for row in result.rows
            )
        ]
        for k, score in enumerate(scores):
            shown = [_value(result, evaluator.axis.column, point, score) for point in points]
            table.add_row(
                name if k == 0 else "", score.column, *shown, end_section=k + 1 == len(scores)
            )
    console.print(table)


def print_paired(evaluator: Evaluator, rows: Sequence[Row]) -> None:
    for table in paired_tables(rows, evaluator.name, evaluator.paired_over, evaluator.axis):
        console.print(table)


def _print_names(
    evaluator: Evaluator, results: list[ModelResult], points: list[Place], score: Score
) -> None:
    """A row for each name on the axis, a column for each model."""
    results = [
        result
        for result in results
        if any(row.get(score.column) is not None for row in result.rows)
    ]
    names = short_names(results)
    for part in slices(len(results), max(1, (console.width - 26) // 14)):
        table = result_table(f"{evaluator.name}: {score.column}")
        table.add_column(evaluator.axis.column, overflow="fold")
        for name in names[part]:
            table.add_column(name, justify="right", overflow="fold", min_width=7)
        for point in points:
            shown = (
                _value(result, evaluator.axis.column, point, score) for result in results[part]
            )
            table.add_row(str(point), *shown)
        console.print(table)


def _value(result: ModelResult, axis: str, point: Place, score: Score) -> str:
    mean = _at(result.rows, axis, point, score)
    if mean is None:
        return ""
    if score.exception:
        return f"{mean:g}"
    deviation = _at(result.deviation, axis, point, score) if isinstance(result, SeedMean) else None
    if deviation is None or math.isnan(deviation):
        return _short(mean)
    return f"{_short(mean)}\n±{_short(deviation, like=mean)}"  # under it, so that narrow terminals hold both


def _at(rows: Sequence[Row], axis: str, point: Place, score: Score) -> float | None:
    return next((row.get(score.column) for row in rows if row[axis] == point), None)


def _short(value: float, *, like: float | None = None) -> str:
    """Four figures or so; as many decimals as `like` would get."""
    size = abs(value if like is None else like)
    return f"{value:,.{3 if size < 10 else 2 if size < 100 else 0}f}"
