"""What evaluators find: rows of scores along an axis, of one model or as the mean of several
seeds."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A row of a table by column: numbers, lists of numbers, text, whatever JSON carries.
Row = dict[str, Any]
CellValue = Row


def compact(number: float) -> str:
    """128, 1k, 1.5k, 32k, 1M: lengths as tick labels, in powers of two."""
    unit = ""
    size = 1
    if number >= 2**20:
        unit = "M"
        size = 2**20
    elif number >= 2**10:
        unit = "k"
        size = 2**10
    value = number / size
    # Three figures would write 1,000 to 1,023 with an exponent.
    figures = 3 if value < 999.5 else 4
    return f"{value:.{figures}g}{unit}"


@dataclass(frozen=True)
class Axis:
    """What curves run along: a column of rows, its label, how a tick is written, what files call
    the place of training."""

    column: str
    label: str
    tick: Callable[[Any], str] = str
    trained: str = "train_context"


LENGTH = Axis("length", "length (tokens, log₂)", compact)


@dataclass(frozen=True)
class Score:
    """A column of rows that tables and figures show.

    Attributes:
        column: its name; rows may lack it.
        label: of the figure's panel; the column where empty.
        unit_interval: the panel's axis is 0 to 1, and more is better.
        linear: the panel's axis is never logarithmic.
        exception: a count that tables show where it is not 0, and figures do not.
        tabled: tables show it.
        drawn: the default figure has a panel for it.
        title: above the panel.
        level: where the panel has a line, such as chance.
    """

    column: str
    label: str = ""
    unit_interval: bool = False
    linear: bool = False
    exception: bool = False
    tabled: bool = True
    drawn: bool = True
    title: str = ""
    level: float | None = None


@dataclass(frozen=True)
class ModelResult:
    """All that one evaluator found about one model: what tables, files and figures are made
    from.

    Attributes:
        label: the model's name in tables.
        trained_at: place of training on the evaluator's axis.
        rows, cells: of the evaluator.
        method: "ggd_ssmax"; gives the model its colour.
        group: models of one group are seeds of one set-up; tables and figures show their mean.
        source: of held-out data; None for evaluators that have none.
        trained_range: least and greatest place of training where it was at several; else empty.
    """

    label: str
    trained_at: int
    rows: list[Row]
    cells: dict[str, CellValue] = field(default_factory=dict)
    method: str = ""
    weights: str = ""
    seconds: float = 0.0
    group: str = ""
    source: str | None = None
    trained_range: tuple[int, ...] = ()


@dataclass(frozen=True)
class SeedMean(ModelResult):
    """Several seeds of one set-up as one result: `rows` are means; `low`, `high` and `deviation`
    (sample standard deviation) are of the same places, row by row."""

    low: list[Row] = field(default_factory=list)
    high: list[Row] = field(default_factory=list)
    deviation: list[Row] = field(default_factory=list)
    seeds: int = 1


def short_names(results: Sequence[ModelResult]) -> list[str]:
    """The methods, which are short, where all are known and tell the results apart; else the
    labels."""
    methods = [result.method for result in results]
    if all(methods) and len(set(methods)) == len(methods):
        return methods
    return [result.label for result in results]


def mean_of_seeds(results: Sequence[ModelResult], axis: str) -> list[ModelResult]:
    """`results` with those of each group replaced by one `SeedMean`, at the place of the first.

    Its rows are means of every number over the seeds that have it, at the places of `axis` that all
    seeds have. Where one seed's number is NaN, mean and extremes are NaN; a deviation is NaN unless
    all are finite and more than one. ValueError for a group of models that were not trained at the
    same place.
    """
    groups: dict[tuple[str, str], list[ModelResult]] = {}
    for n, result in enumerate(results):
        key = ("group", result.group) if result.group else ("single", str(n))
        groups.setdefault(key, []).append(result)
    means = []
    for members in groups.values():
        means.append(members[0] if len(members) == 1 else _seed_mean(members, axis))
    return means


# From the values of several rows to one.
Reduce = Callable[[list[float]], float]


def _seed_mean(members: list[ModelResult], axis: str) -> SeedMean:
    first = members[0]
    set_ups = {(member.trained_at, member.trained_range, member.method) for member in members}
    if len(set_ups) > 1:
        labels = ", ".join(member.label for member in members)
        raise ValueError(f"{labels} are not seeds of one set-up: they were trained differently")
    rows_by_place: dict[Any, list[Row]] = {}
    for member in members:
        for place, row in {row[axis]: row for row in member.rows}.items():
            rows_by_place.setdefault(place, []).append(row)
    shared = {place: rows for place, rows in rows_by_place.items() if len(rows) == len(members)}

    def reduce_places(reduce: Reduce) -> list[Row]:
        return [_reduce_rows(rows, reduce) | {axis: place} for place, rows in shared.items()]

    return SeedMean(
        first.group,
        first.trained_at,
        reduce_places(_mean),
        method=first.method,
        seconds=sum(member.seconds for member in members),
        group=first.group,
        source=first.source,
        trained_range=first.trained_range,
        low=reduce_places(_least),
        high=reduce_places(_greatest),
        deviation=reduce_places(_deviation),
        seeds=len(members),
    )


def _all_finite(values: list[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _mean(values: list[float]) -> float:
    # fmean refuses the sum of an infinity and its negative
    return statistics.fmean(values) if _all_finite(values) else sum(values) / len(values)


# What min and max give depends on where a NaN stands.


def _least(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _greatest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; NaN of one value, or where one is not finite."""
    if len(values) > 1 and _all_finite(values):
        return statistics.stdev(values)
    return math.nan


def _reduce(values: list[Any], reduce: Reduce) -> Any:
    """Numbers by `reduce`, lists of numbers place by place; anything else is kept where all agree,
    else None."""
    if all(isinstance(value, (int, float)) for value in values):
        return reduce(values)
    if all(isinstance(value, list) for value in values):
        return [_reduce(list(column), reduce) for column in zip(*values, strict=False)]
    return values[0] if all(value == values[0] for value in values) else None


def _reduce_rows(rows: Sequence[Row], reduce: Reduce) -> Row:
    """One row: of each column, the values of the rows that have it, by `_reduce`."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: _reduce(values, reduce) for name, values in columns.items()}


def mean_of_rows(rows: Sequence[Row]) -> Row:
    """The mean of every number; lists place by place; other values are kept where all agree, else
    None."""
    mean = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        mean[name] = _reduce(values, _mean)
    return mean


def file_safe(text: str) -> str:
    """`text` with everything but letters, digits and ._- replaced by underscores; above 120 bytes
    its end is a digest."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
    if len(name.encode()) <= 120:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return name.encode()[:100].decode(errors="ignore") + f"-{digest}"
