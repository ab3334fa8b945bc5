"""Tables of results: files of rows, and what a terminal shows."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from modalities.results import Axis, Row
from zoo.files import replacing


def write_table(path: Path, rows: Sequence[Mapping[str, object]], *, delimiter: str = ",") -> None:
    """Rows under a header of all their columns, in order of first appearance; list values are left
    out. Text that a spreadsheet would take for a formula has an apostrophe before it, and no text
    has line breaks."""
    columns: list[str] = []
    for row in rows:
        for name, value in row.items():
            if name not in columns and not isinstance(value, list):
                columns.append(name)
    with replacing(path) as file:
        table = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        table.writerow([_harmless(name) for name in columns])
        for row in rows:
            table.writerow([_harmless(row.get(name)) for name in columns])


# First characters of a formula; the last four are in full width.
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    # Spreadsheets leave out a byte order mark and a space without width.
    text = " ".join(value.splitlines()).lstrip("\ufeff\u200b")
    try:
        float(text)
    except ValueError:
        if len(text) > 1 and text.lstrip()[:1] in _FORMULA:
            return f"'{text}"
    return text


def print_table(
    console: Console,
    title: str,
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    """Rows of a table with columns named `left` and, aligned to the right, `right`."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold", min_width=6)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def result_table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def paired_tables(rows: Sequence[Row], name: str, units: str, axis: Axis) -> Iterator[Table]:
    """A table for each score: every model's difference at every place, its 95% interval over units,
    how many they are, and its interval over seeds where there are several."""
    several_seeds = any(max(row["seeds"], row["against_seeds"]) > 1 for row in rows)
    columns = [axis.column, "difference", "95% interval", "lower", "n"]
    if several_seeds:
        columns.append("seeds")
    for score in dict.fromkeys(row["score"] for row in rows):
        interval = f"95% interval over n {units}; lower: in what share of them"
        if several_seeds:
            interval += "; below it, that of other seeds"
        table = result_table(f"{name}: {score} minus that of {rows[0]['against']}, {interval}")
        # A terminal of 80 columns has room for all.
        table.add_column("model", overflow="fold", min_width=14)
        for column in columns:
            wraps = column == axis.column
            table.add_column(column, justify="right", no_wrap=not wraps, overflow="fold")
        for row in rows:
            if row["score"] == score:
                texts = _paired_texts(row, axis)
                if several_seeds:
                    texts.append(f"{row['seeds']}, {row['against_seeds']}")
                table.add_row(row["model"], *texts)
                if several_seeds:
                    over_seeds = _interval_text(row["seed_low"], row["seed_high"])
                    table.add_row("  over seeds", "", "", over_seeds)
        yield table


def _interval_text(low: float, high: float) -> str:
    return "–" if math.isnan(low) else f"{low:+.4f} to {high:+.4f}"


def _paired_texts(row: Row, axis: Axis) -> list[str]:
    return [
        axis.tick(row[axis.column]),
        f"{row['difference']:+.4f}",
        _interval_text(row["low"], row["high"]),
        f"{row['lower_in']:.0%}",
        str(row["units"]),
    ]
