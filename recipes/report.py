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
from recipes.commands import clock, short
from zoo.console import Console
from zoo.files import write_json
from zoo.positions import slices

console = Console()
# Seconds between two lines of progress.
EVERY = 15.0


class CellProgress:
    """Prints at intervals how much of an evaluation's cells is read.

    total: units of all cells. unit: what they are.
    """

    def __init__(self, name: str, total: int, unit: str, console: Console):
        self.name = name
        self.total = total
        self.unit = unit
        self.console = console
        # Units of finished cells, and of the one that is being read.
        self.finished = 0
        self.part = 0
        self.started = time.perf_counter()
        self.last_line = self.started

    def advance(self, units: int) -> None:
        """Count units of the cell that is being read."""
        self.part += units
        now = time.perf_counter()
        if now - self.last_line < EVERY:
            return
        done = min(self.finished + self.part, self.total)
        rate = done / (now - self.started)
        time_left = clock((self.total - done) / rate) if rate else "…"
        self.last_line = now
        self.console.print(
            f"{self.name}  {short(done)}/{short(self.total)} {self.unit}  {short(rate)}/s  "
            f"left {time_left}",
            soft_wrap=True,
        )

    def finish(self, units: int) -> None:
        """Count a whole cell of `units`, in place of its parts."""
        self.finished += units
        self.part = 0
        self.advance(0)


def write_results(evaluator: Evaluator, results: list[ModelResult], out: Path) -> None:
    """EVAL/MODEL.json for each model, EVAL.csv, EVAL.png, and an evaluator's own files.

    A listing writes its rows itself.
    """
    for result in results:
        path = out / evaluator.name / f"{file_safe(result.label)}.json"
        write_json(path, _contents(evaluator, result))
    if not isinstance(evaluator, Listing):
        rows = []
        for result in results:
            model = {
                "model": result.label,
                "method": result.method,
                evaluator.axis.trained: result.trained_at,
            }
            rows += [model | row for row in result.rows]
        write_table(out / f"{evaluator.name}.csv", rows)
    evaluator.draw(results, out / f"{evaluator.name}.png")
    evaluator.write(results, out)


def _contents(evaluator: Evaluator, result: ModelResult) -> Row:
    """What the JSON file of a result says."""
    contents = {
        "evaluator": evaluator.name,
        "version": evaluator.version,
        "settings": dataclasses.asdict(evaluator.settings),
        "label": result.label,
        evaluator.axis.trained: result.trained_at,
    }
    omitted = {"label", "trained_at", "cells"}
    if isinstance(evaluator, Listing):
        omitted.add("rows")
    for field in dataclasses.fields(result):
        if field.name not in omitted:
            contents[field.name] = getattr(result, field.name)
    return contents


def print_results(evaluator: Evaluator, results: list[ModelResult]) -> None:
    """Print the tables of an evaluation, then what the evaluator shows itself.

    A table of numbers has a row for each model and score, and a column for each place on the axis.
    """
    line = evaluator.measured(results)
    if line:
        console.print(line, soft_wrap=True)
    if not isinstance(evaluator, Listing):
        axis = evaluator.axis.column
        means = mean_of_seeds(results, axis)
        points = list(dict.fromkeys(row[axis] for result in means for row in result.rows))
        if any(isinstance(point, str) for point in points):
            for score in evaluator.scores:
                if score.tabled:
                    _print_names(evaluator, means, points, score)
        else:
            _print_numbers(evaluator, means, sorted(points))
    evaluator.show(results, console)


def _print_numbers(evaluator: Evaluator, results: list[ModelResult], points: list[Place]) -> None:
    """A row for each model and score, a column for each place."""
    title = f"{evaluator.name}: {evaluator.summary}"
    if any(isinstance(result, SeedMean) for result in results):
        title += "; mean ± standard deviation over seeds"
    table = result_table(title)
    # Many columns must not squeeze the names out.
    table.add_column("model", overflow="fold", min_width=7)
    table.add_column("score", style="dim", no_wrap=True)
    for point in points:
        # Numbers are never cut; on a narrow terminal names wrap.
        table.add_column(evaluator.axis.tick(point), justify="right", no_wrap=True, min_width=5)
    for result, name in zip(results, short_names(results), strict=True):
        if isinstance(result, SeedMean):
            name += f" ({result.seeds} seeds)"
        scores = [score for score in evaluator.scores if _has_score(result, score)]
        for index, score in enumerate(scores):
            values = [_value(result, evaluator.axis.column, point, score) for point in points]
            is_last = index + 1 == len(scores)
            table.add_row("" if index else name, score.column, *values, end_section=is_last)
    console.print(table)


def _has_score(result: ModelResult, score: Score) -> bool:
    """Whether a table shows a score of a result; a count of exceptions only where there are any."""
    if not score.tabled:
        return False
    if score.exception:
        return any(row.get(score.column) for row in result.rows)
    return any(score.column in row for row in result.rows)


def print_paired(evaluator: Evaluator, rows: Sequence[Row]) -> None:
    for table in paired_tables(rows, evaluator.name, evaluator.paired_over, evaluator.axis):
        console.print(table)


def _print_names(
    evaluator: Evaluator, results: list[ModelResult], points: list[Place], score: Score
) -> None:
    """A row for each name on the axis, a column for each model."""
    column = score.column
    results = [result for result in results if _is_measured(result, column)]
    names = short_names(results)
    # A column takes about 14 characters, the names on the axis up to 26.
    columns = max(1, (console.width - 26) // 14)
    for part in slices(len(results), columns):
        table = result_table(f"{evaluator.name}: {column}")
        table.add_column(evaluator.axis.column, overflow="fold")
        for name in names[part]:
            table.add_column(name, justify="right", overflow="fold", min_width=7)
        for point in points:
            values = [_value(r, evaluator.axis.column, point, score) for r in results[part]]
            table.add_row(str(point), *values)
        console.print(table)


def _is_measured(result: ModelResult, column: str) -> bool:
    """Whether a score has a value at any place."""
    return any(row.get(column) is not None for row in result.rows)


def _value(result: ModelResult, axis: str, point: Place, score: Score) -> str:
    """A score at a place of the axis as text, of several seeds with its deviation."""
    mean = _score_at(result.rows, axis, point, score)
    if mean is None:
        return ""
    if score.exception:
        return f"{mean:g}"
    decimals = _decimals(mean)
    text = f"{mean:,.{decimals}f}"
    if isinstance(result, SeedMean):
        deviation = _score_at(result.deviation, axis, point, score)
        if deviation is not None and not math.isnan(deviation):
            # On a line of its own, so that narrow terminals hold both.
            text += f"\n±{deviation:,.{decimals}f}"
    return text


def _score_at(rows: Sequence[Row], axis: str, point: Place, score: Score) -> float | None:
    """A score at a place of the axis; None where it was not measured."""
    for row in rows:
        if row[axis] == point:
            return row.get(score.column)
    return None


def _decimals(value: float) -> int:
    """As many as give a value about four figures."""
    size = abs(value)
    if size < 10:
        return 3
    if size < 100:
        return 2
    return 0
