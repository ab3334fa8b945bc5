"""What evaluators find: rows of scores along an axis, of one model or as the mean of several
seeds."""

from __future__ import annotations

import csv
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.files import replacing

Row = dict[
    str, Any
]  # a row of a table by column: numbers, lists of numbers, text, whatever JSON carries
CellValue = Row


def compact(number: float) -> str:
    """128, 1k, 1.5k, 32k, 1M: lengths as tick labels, in powers of two."""
    unit, size = next(
        ((unit, size) for unit, size in (("M", 2**20), ("k", 2**10)) if number >= size), ("", 1)
    )
    return f"{number / size:.{3 if number / size < 999.5 else 4}g}{unit}"  # up to 1,023 without an exponent


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
    """A column of rows that tables and figures show."""

    column: str  # rows may lack it
    label: str = ""  # of the figure's panel; the column where empty
    unit_interval: bool = False  # the panel's axis is 0 to 1, and more is better
    linear: bool = False  # the panel's axis is never logarithmic
    exception: bool = False  # a count that tables show where it is not 0, and figures do not
    tabled: bool = True  # tables show it
    drawn: bool = True  # the default figure has a panel for it
    title: str = ""  # above the panel
    level: float | None = None  # a line in the panel, such as chance


@dataclass(frozen=True)
class ModelResult:
    """All that one evaluator found about one model: what tables, files and figures are made
    from."""

    label: str
    trained_at: int  # on the evaluator's axis
    rows: list[Row]
    cells: dict[str, CellValue] = field(default_factory=dict)
    method: str = ""  # "ggd_ssmax": gives the model its colour
    weights: str = ""
    seconds: float = 0.0
    group: str = (
        ""  # models of one group are seeds of one set-up: tables and figures show their mean
    )
    source: str | None = None  # of held-out data; None for evaluators that have none
    trained_range: tuple[
        int, ...
    ] = ()  # least and greatest place of training where it was at several; else empty


@dataclass(frozen=True)
class SeedMean(ModelResult):
    """Several seeds of one set-up as one result: `rows` are means, the others extremes and
    deviations, row by row."""

    low: list[Row] = field(default_factory=list)
    high: list[Row] = field(default_factory=list)
    deviation: list[Row] = field(default_factory=list)  # sample standard deviation
    seeds: int = 1


def short_names(results: Sequence[ModelResult]) -> list[str]:
    """The methods, which are short, where all are known and tell the results apart; else the
    labels."""
    methods = [result.method for result in results]
    return (
        methods
        if all(methods) and len(set(methods)) == len(methods)
        else [result.label for result in results]
    )


def mean_of_seeds(results: Sequence[ModelResult], axis: str) -> list[ModelResult]:
    """`results` with those of each group replaced by one `SeedMean`, at the place of the first.

    Its rows are means of every number over the seeds that have it, at the places of `axis` that all
    seeds have. Where one seed's number is NaN, mean and extremes are NaN; a deviation is NaN unless
    all are finite and more than one. ValueError for a group of models that were not trained at the
    same place.
    """
    groups: dict[tuple[str, str], list[ModelResult]] = {}
    for n, result in enumerate(results):
        groups.setdefault(
            ("group", result.group) if result.group else ("single", str(n)), []
        ).append(result)
    return [
        members[0] if len(members) == 1 else _seed_mean(members, axis)
        for members in groups.values()
    ]


def _seed_mean(members: list[ModelResult], axis: str) -> SeedMean:
    first = members[0]
    if len({(member.trained_at, member.trained_range, member.method) for member in members}) > 1:
        labels = ", ".join(member.label for member in members)
        raise ValueError(f"{labels} are not seeds of one set-up: they were trained differently")
    by_point = [{row[axis]: row for row in member.rows} for member in members]
    points = [point for point in by_point[0] if all(point in rows for rows in by_point)]

    def reduced(how: Callable[[list[float]], float]) -> list[Row]:
        rows = []
        for point in points:
            seeds = [rows_by_point[point] for rows_by_point in by_point]
            names = dict.fromkeys(name for seed in seeds for name in seed)
            row = {
                name: _reduce([seed[name] for seed in seeds if name in seed], how) for name in names
            }
            rows.append(row | {axis: point})
        return rows

    return SeedMean(
        first.group,
        first.trained_at,
        reduced(_mean),
        method=first.method,
        seconds=sum(member.seconds for member in members),
        group=first.group,
        source=first.source,
        trained_range=first.trained_range,
        low=reduced(lambda values: _extreme(min, values)),
        high=reduced(lambda values: _extreme(max, values)),
        deviation=reduced(
            lambda x: statistics.stdev(x) if len(x) > 1 and all(map(math.isfinite, x)) else math.nan
        ),
        seeds=len(members),
    )


def _mean(values: list[float]) -> float:
    # fmean refuses the sum of an infinity and its negative
    return (
        statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)
    )


def _extreme(choose: Callable[[list[float]], float], values: list[float]) -> float:
    return (
        math.nan if any(map(math.isnan, values)) else choose(values)
    )  # min and max depend on where a NaN is


def _reduce(values: list[Any], how: Callable[[list[float]], float]) -> Any:
    """Numbers by `how`, lists of numbers place by place; anything else is kept where all agree,
    else None."""
    if all(isinstance(value, (int, float)) for value in values):
        return how(values)
    if all(isinstance(value, list) for value in values):
        return [_reduce(list(column), how) for column in zip(*values, strict=False)]
    return values[0] if all(value == values[0] for value in values) else None


def mean_of_rows(rows: Sequence[Row]) -> Row:
    """The mean of every number; lists place by place; other values are kept where all agree, else
    None."""
    return {name: _reduce([row.get(name) for row in rows], _mean) for name in rows[0]}


def write_table(path: Path, rows: Sequence[Mapping[str, object]], *, delimiter: str = ",") -> None:
    """Rows under a header of all their columns, in order of first appearance; list values are left
    out. Text that a spreadsheet would take for a formula has an apostrophe before it, and no text
    has line breaks."""
    columns = dict.fromkeys(
        name for row in rows for name, value in row.items() if not isinstance(value, list)
    )
    with replacing(path) as file:
        table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        table.writerows(
            [
                map(_harmless, columns),
                *([_harmless(row.get(name)) for name in columns] for row in rows),
            ]
        )


_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"  # the last four: in full width


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = " ".join(value.splitlines()).lstrip("\ufeff\u200b")  # which spreadsheets leave out
    try:
        float(text)
    except ValueError:
        return f"'{text}" if len(text) > 1 and text.lstrip()[:1] in tuple(_FORMULA) else text
    return text


def file_safe(text: str) -> str:
    """`text` with everything but letters, digits and ._- replaced by underscores; above 120 bytes
    its end is a digest."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
    if len(name.encode()) <= 120:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return name.encode()[:100].decode(errors="ignore") + f"-{digest}"
