"""Log-likelihood of every record of a sequence file, or of every region of a BED file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modalities.dna.bases import UNKNOWN
from modalities.dna.evaluation import (
    REFERENCE,
    FileEvaluator,
    RegionSettings,
    bin_edges,
    fingerprint_of_rows,
    step_of,
    strands_of,
    table,
)
from modalities.dna.reading import Span, cost, read_spans, spans_of
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult
from modalities.evaluation import Score as Column
from modalities.figures import finish, panels, styles_of
from modalities.results import short_names
from zoo.model import ZooModel
from zoo.slices import slices

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Score"]

CELL_BASES = 1 << 18  # that the windows of a cell read, on one strand
FEW_RECORDS = 20  # too few for a histogram


class Score(FileEvaluator[RegionSettings]):
    """Log-likelihood, in nats, and bits per base of every record of `fasta`, in any format that a genome may have; with
    `regions` of every row of that BED file, whose bases are predicted from those before them, outside the region too; a row
    with "-" in the sixth column is read on the other strand.

    Records are read in windows of `window` bases (default 16 times the training length), rounded down to an even number of
    k-mers, that overlap by half (`modalities.dna.reading`). A token across a window's middle (BPE alone has such) counts by
    its share of bases. With strands "both" the record's reverse complement is read likewise, and numbers are means over the
    two.

    `bases` are those that count; `remainder` those at a record's end that make no k-mer; a k-mer with an unknown base does
    not count. `unknown` and `gc` are of the whole record as written. Records without a counted base are listed as NaN.

    A cell is a run of windows, so a stopped measurement goes on inside a record.
    """

    name = "score"
    version = 3
    summary = "log-likelihood and bits per base of every record of a FASTA or GenBank file, or region of a BED"
    scores = (Column("bits_per_base"),)
    default_window = 16
    window_step = 2

    def identity(self, model: ZooModel) -> dict[str, Any]:
        regions = None if self.settings.regions is None else fingerprint_of_rows(self.regions())
        return {"bases": self.genome().fingerprint, "regions": regions} | super().identity(model)

    def cells(self, model: ZooModel) -> list[Cell]:
        rows, half = self.regions(), self.window(model) // 2
        both = strands_of(model, self.settings) == "both"
        return [
            Cell(
                f"part={n}",
                sum(cost(span, half, both=both) for span in part),
                {"spans": part, "half": half, "rows": rows},
            )
            for n, part in enumerate(spans_of(self.genome(), rows, half, CELL_BASES))
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Sums over the cell's spans; a row's sums are those of all its spans."""
        spans, both = cell.data["spans"], strands_of(model, self.settings) == "both"
        sums = np.zeros((len(spans), 2))  # nats and bases that count, on all strands
        known = np.zeros((len(spans), 3), np.int64)  # bases that count, known ones, G and C; on the strand as written
        options: dict[str, Any] = dict(both=both, batch_tokens=self.settings.batch_tokens, advance=self.advance)
        for read in read_spans(model, self.genome(), spans, cell.data["half"], **options):
            sums[read.span] += read.nats.sum(), read.counted.sum()
            if read.turned == spans[read.span].turned:
                strong = ((read.codes == 1) | (read.codes == 2)).sum()
                known[read.span] += read.counted.sum(), (read.codes != UNKNOWN).sum(), strong
        step = step_of(load_tokenizer(model.config.tokenizer))
        rows = [cell.data["rows"][span.row] for span in spans]
        return {
            "row": [span.row for span in spans],
            "record": [row.name for row in rows],
            "place": [[row.contig, row.start, row.stop] for row in rows],
            "strand": [row.strand for row in rows],
            "remainder": [_remainder(span, span.length % step) for span in spans],
            "nats": sums[:, 0].tolist(),
            "read": sums[:, 1].astype(int).tolist(),
            **dict(zip(("bases", "known", "strong"), known.T.tolist(), strict=True)),
            "strands": 2 if both else 1,
        }

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        names = ("remainder", "nats", "read", "bases", "known", "strong")
        records: dict[int, dict[str, Any]] = {}
        for cell in cells.values():
            for n, number in enumerate(cell["row"]):
                contig, start, stop = cell["place"][n]
                place = {"contig": contig, "start": start, "stop": stop} if self.settings.regions is not None else {}
                if place and "strand" in cell:  # cells of before have none; all their rows were read on "+"
                    place["strand"] = cell["strand"][n]
                fixed = {"name": cell["record"][n], **place, "length": stop - start, "strands": cell["strands"]}
                record = records.setdefault(number, fixed | dict.fromkeys(names, 0))
                for column in names:
                    record[column] += cell[column][n]
        return [_row(record) for record in records.values()]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Bits per base against length, a dot for each record, and their histogram where they are many."""
        many = len(results[0].rows) > FEW_RECORDS
        finite = [[row for row in result.rows if math.isfinite(row["bits_per_base"])] for result in results]
        every = [row["bits_per_base"] for rows in finite for row in rows]
        figure, axes = panels(1, 1 + many, width=5.2, height=4.0)
        for rows, style in zip(finite, styles_of(results), strict=True):
            bits = [row["bits_per_base"] for row in rows]
            size = {"markersize": 6.0 if len(rows) < 200 else 2.0, "alpha": 0.7 if len(rows) < 2000 else 0.2}
            dots = style | size | {"linestyle": "", "marker": style["marker"] or "."}
            axes[0].plot([row["length"] for row in rows], bits, **dots)
            if many and rows:
                outline = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.6}
                axes[1].hist(bits, bins=bin_edges(every, 60).tolist(), histtype="step", **outline)
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes[0].axhline(2.0, **REFERENCE)
        axes[0].annotate(
            "uniform", (0.01, 2.0), xycoords=("axes fraction", "data"), fontsize=7.5, color="0.35", va="bottom"
        )
        axes[0].set(xlabel="length of the record (bases, log)", ylabel="bits per base", title="every record")
        if many:
            axes[1].set(xlabel="bits per base", ylabel="records", title=f"{len(results[0].rows):,} records")
            axes[1].axvline(2.0, **REFERENCE)
        for axis in axes:
            axis.grid(alpha=0.25, linewidth=0.6)
        finish(figure, axes, results, path)

    def show(self, results: list[ModelResult], console: Any, count: int = 20) -> None:
        """The first records and the totals: bits per base, a column for each model that the terminal has room for."""
        names = short_names(results)
        for part in slices(len(results), max(1, (console.width - 46) // 12)):
            console.print(_table(results[part], names[part], count))
        if (more := len(results[0].rows) - count) > 0:
            console.print(f"{more:,} more records in the files")


def _remainder(span: Span, left: int) -> int:
    """Bases of a span among the `left` ones at its strand's end."""
    first, last = (0, left) if span.turned else (span.length - left, span.length)
    return max(0, min(span.stop, last) - max(span.start, first))


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    nats_per_base = record["nats"] / record["read"] if record["read"] else math.nan
    place = {name: record[name] for name in ("name", "contig", "start", "stop", "strand", "length") if name in record}
    return {
        **place,
        "bases": record["bases"],
        "unknown": record["length"] - record["known"],
        "remainder": record["remainder"],
        "gc": record["strong"] / record["known"] if record["known"] else math.nan,
        "log_likelihood": -record["nats"] / record["strands"] if record["read"] else math.nan,
        "nats_per_base": nats_per_base,
        "bits_per_base": nats_per_base / math.log(2),
    }


def _table(results: Sequence[ModelResult], names: Sequence[str], count: int) -> Table:
    first = results[0].rows
    found = table("score: bits per base of every record", ["record"], ["length", "unknown", "GC", *names])
    found.columns[0].min_width = 14
    for n, row in enumerate(first[:count]):
        bits = (_number(result.rows[n]["bits_per_base"]) for result in results)
        found.add_row(row["name"], f"{row['length']:,}", f"{row['unknown']:,}", _number(row["gc"], ".1%"), *bits)
    found.add_section()
    bits = (_number(_total(result)) for result in results)
    length, unknown = (sum(row[name] for row in first) for name in ("length", "unknown"))
    found.add_row(f"all {len(first):,} records", f"{length:,}", f"{unknown:,}", "", *bits, style="bold")
    return found


def _number(value: float, how: str = ".4f") -> str:
    return "–" if math.isnan(value) else format(value, how)


def _total(result: ModelResult) -> float:
    """Bits per base over all counted bases of all records."""
    bits = sum(row["bits_per_base"] * row["bases"] for row in result.rows if row["bases"])
    bases = sum(row["bases"] for row in result.rows)
    return bits / bases if bases else math.nan
