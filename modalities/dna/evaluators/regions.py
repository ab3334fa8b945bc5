"""The cost of every base of records or regions: `score`, summed over each, and `track`, base by
base."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modalities.dna.evaluation import FileEvaluator, FileSettings, strands_of
from modalities.dna.scoring import BIT
from modalities.dna.spans import Read, Span, read_spans, span_cost, split_spans
from modalities.dna.splits import Region, joined, read_bed
from modalities.dna.tokenizers import UNKNOWN
from modalities.evaluation import Cell
from modalities.loading import fingerprint_of
from modalities.results import CellValue, ModelResult, Row, Score, file_safe, short_names
from modalities.settings import option
from modalities.tables import print_table
from zoo.files import replacing
from zoo.model import ZooModel

if TYPE_CHECKING:
    from rich.console import Console

# Bases that the windows of a cell read, on one strand.
CELL_BASES = 1 << 18
# Rows on the terminal.
SHOWN = 20
# Sums of a record; `read` and nats are of all strands.
SUMS = ("nats", "read", "bases", "known", "strong")


@dataclass(frozen=True)
class RegionSettings(FileSettings):
    """Parts of a file of sequences."""

    regions: str | None = option(
        None, "BED file of what to read, score on column 6's strand; default: all of --fasta"
    )


class RegionEvaluator(FileEvaluator[RegionSettings]):
    """Evaluators of every base of the records of `fasta`, or of the rows of the BED file `regions`.
    A cell is a run of windows, so a stopped measurement goes on inside a record."""

    default_window = 16
    window_step = 2
    scores = (Score("bits_per_base"),)

    def regions(self) -> Sequence[Region]:
        """The rows of the BED file, or every contig."""
        if self.settings.regions is not None:
            return read_bed(Path(self.settings.regions), self.genome())
        return [
            Region(contig.name, 0, contig.length, contig.name) for contig in self.genome().contigs
        ]

    def identity(self, model: ZooModel) -> Row:
        regions = None
        if self.settings.regions is not None:
            lines = []
            for row in self.regions():
                lines.append(f"{row.contig}\t{row.start}\t{row.stop}\t{row.name}\t{row.strand}\n")
            regions = fingerprint_of(line.encode() for line in lines)
        identity: Row = {"bases": self.genome().fingerprint, "regions": regions}
        return identity | super().identity(model)

    def both(self, model: ZooModel) -> bool:
        return strands_of(model, self.settings) == "both"

    def cells(self, model: ZooModel) -> list[Cell]:
        rows = self.regions()
        half = self.window(model) // 2
        both = self.both(model)
        cells = []
        for n, spans in enumerate(split_spans(self.genome(), rows, half, CELL_BASES)):
            cost = sum(span_cost(span, half, both) for span in spans)
            cells.append(Cell(f"part={n}", cost, {"spans": spans, "rows": rows}))
        return cells

    def read(self, model: ZooModel, spans: Sequence[Span]) -> Iterator[Read]:
        """What every window of every span says."""
        return read_spans(
            model,
            self.genome(),
            spans,
            half=self.window(model) // 2,
            both=self.both(model),
            batch_tokens=self.settings.batch_tokens,
        )

    def measured(self, results: list[ModelResult]) -> str:
        rows = results[0].rows
        kind = "records" if self.settings.regions is None else "regions"
        bases = _total(rows, "bases")
        length = _total(rows, "length")
        text = (
            f"{self.name}: {bases:,} of the {length:,} bases "
            f"of {len(rows):,} {kind} of {self.source_name}"
        )
        if length > bases:
            text += f"; {length - bases:,} left out: unknown, or in no whole token"
        return text

    def show(self, results: list[ModelResult], console: Console) -> None:
        """The totals and the first rows: bits per base, a column for each model."""
        first = results[0].rows
        totals = [
            f"all {len(first):,}",
            f"{_total(first, 'length'):,}",
            f"{_total(first, 'bases'):,}",
        ]
        totals += [f"{_bits_per_base(result.rows):.4f}" for result in results]
        lines = [totals]
        for n, row in enumerate(first[:SHOWN]):
            bits = [f"{result.rows[n]['bits_per_base']:.4f}" for result in results]
            lines.append([row["name"], f"{row['length']:,}", f"{row['bases']:,}", *bits])
        columns = ["length", "bases", *short_names(results)]
        print_table(console, f"{self.name}: bits per base", ["name"], columns, lines)
        if len(first) > SHOWN:
            console.print(f"{len(first) - SHOWN:,} more in the files")


def _total(rows: Sequence[Row], column: str) -> int:
    return sum(row[column] for row in rows)


def _bits_per_base(rows: Sequence[Row]) -> float:
    """Of all bases of all rows; NaN for none."""
    counted = [row for row in rows if row["bases"]]
    if not counted:
        return math.nan
    bits = sum(row["bits_per_base"] * row["bases"] for row in counted)
    return bits / _total(counted, "bases")


class RegionScore(RegionEvaluator):
    """Log-likelihood, in nats, and bits per base of every record of `fasta`; with `regions` of
    every row of that BED file whose bases are predicted from those before them, outside the region
    too; a row with "-" in the sixth column is read on the other strand.

    Records are read in windows of `window` bases (default 16 times the training length), rounded
    down to an even number of k-mers, that overlap by half. A token across a window's middle (BPE
    alone has such) counts by its share of bases. With strands "both" the record's reverse
    complement is read likewise, and numbers are means over the two.

    `bed_start` and `bed_stop` count as BED does: from 0, half-open. `bases` are those that count:
    not those of a k-mer with an unknown base, nor those at a record's end that make no k-mer.
    `unknown` and `gc` are of the whole record as written. Records without a counted base are listed
    as NaN.
    """

    name = "score"
    version = 4
    summary = "log-likelihood and bits per base of every record of a FASTA file, or region of a BED"

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Sums over the cell's spans; a row's sums are those of all its spans."""
        spans = cell.data["spans"]
        rows = cell.data["rows"]
        genome = self.genome()
        sums: list[Row] = [dict.fromkeys(SUMS, 0) for _ in spans]
        for read in self.read(model, spans):
            total = sums[read.span]
            counted = int(read.counted.sum())
            total["nats"] += float(read.nats.sum())
            total["read"] += counted
            # Of two strands one, so that a base counts once.
            if read.turned == spans[read.span].turned:
                total["bases"] += counted
        records = []
        for span, total in zip(spans, sums, strict=True):
            row = rows[span.row]
            codes = genome.codes(span.contig, span.start, span.stop)
            total["known"] = int((codes != UNKNOWN).sum())
            total["strong"] = int(np.isin(codes, (1, 2)).sum())
            record = {
                "row": span.row,
                "name": row.name,
                "contig": row.contig,
                "bed_start": row.start,
                "bed_stop": row.stop,
                "strand": row.strand,
            }
            records.append(record | total)
        return {"records": records, "strands": 2 if self.both(model) else 1}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        records: dict[int, Row] = {}
        for cell in cells.values():
            for part in cell["records"]:
                record = records.setdefault(part["row"], part | dict.fromkeys(SUMS, 0))
                for name in SUMS:
                    record[name] += part[name]
        strands = max((cell["strands"] for cell in cells.values()), default=1)
        return [_score_row(record, strands) for record in records.values()]


def _score_row(record: Row, strands: int) -> Row:
    length = record["bed_stop"] - record["bed_start"]
    read = record["read"]
    known = record["known"]
    nats = record["nats"] / read if read else math.nan
    return {
        "name": record["name"],
        "contig": record["contig"],
        "bed_start": record["bed_start"],
        "bed_stop": record["bed_stop"],
        "strand": record["strand"],
        "length": length,
        "bases": record["bases"],
        "unknown": length - known,
        "gc": record["strong"] / known if known else math.nan,
        "log_likelihood": -record["nats"] / strands if read else math.nan,
        "nats_per_base": nats,
        "bits_per_base": nats / BIT,
    }


class Track(RegionEvaluator):
    """−log₂ p of every base given those before it: how surprising each is, in bits; 2 of a uniform
    model.

    Bases are read as `score` reads them; with strands "both" a base has the mean over the two
    strands. Written is track.MODEL.bedgraph, rows of one base each, as float32. Places in it, and
    `bed_start` and `bed_stop` in the table, count as BED does: from 0, half-open. Bases that do not
    count, such as N, have no value. Regions that share bases are joined; a BED file's strands do
    not matter.
    """

    name = "track"
    summary = "bits of every base of a genome or of regions, as bedGraph"

    def regions(self) -> list[Region]:
        order = {contig.name: n for n, contig in enumerate(self.genome().contigs)}
        rows = joined([replace(row, label="", strand="+") for row in super().regions()])
        return sorted(rows, key=lambda row: (order[row.contig], row.start))

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """The bits of each span's bases: little-endian float32 in base64, NaN where a base does not
        count."""
        spans = cell.data["spans"]
        strands = 2 if self.both(model) else 1
        bits = [np.zeros(span.stop - span.start) for span in spans]
        for read in self.read(model, spans):
            first = read.start - spans[read.span].start
            values = np.where(read.counted, read.nats / BIT / strands, np.nan)
            bits[read.span][first : first + len(values)] += values
        texts = [base64.b64encode(values.astype("<f4").tobytes()).decode() for values in bits]
        return {"spans": [[span.row, span.contig, span.start] for span in spans], "bits": texts}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        regions: dict[int, Row] = {}
        for number, contig, start, bits in _values(cells):
            if number not in regions:
                regions[number] = {
                    "name": "",
                    "contig": contig,
                    "bed_start": start,
                    "bed_stop": start,
                    "length": 0,
                    "bases": 0,
                    "bits": 0.0,
                }
            row = regions[number]
            row["bed_stop"] = start + len(bits)
            row["length"] += len(bits)
            row["bases"] += int(np.isfinite(bits).sum())
            row["bits"] += float(np.nansum(bits, dtype=np.float64))
        for row in regions.values():
            row["name"] = f"{row['contig']}:{row['bed_start'] + 1}-{row['bed_stop']}"
            row["bits_per_base"] = row["bits"] / row["bases"] if row["bases"] else math.nan
        return list(regions.values())

    def write(self, results: list[ModelResult], out: Path) -> None:
        """The table of regions and the track, one of each for each model; a value has as many
        digits as tell float32 numbers apart."""
        super().write(results, out)
        for result in results:
            with replacing(out / f"{self.name}.{file_safe(result.label)}.bedgraph") as file:
                for _, contig, start, bits in _values(result.cells):
                    texts = bits.astype(str)
                    for n in np.flatnonzero(np.isfinite(bits)).tolist():
                        file.write(f"{contig}\t{start + n}\t{start + n + 1}\t{texts[n]}\n")


def _values(cells: Mapping[str, CellValue]) -> Iterator[tuple[int, str, int, np.ndarray]]:
    """(number of the region, contig, first base, bits float32) of every span, in order."""
    for cell in cells.values():
        for (row, contig, start), text in zip(cell["spans"], cell["bits"], strict=True):
            bits = np.frombuffer(base64.b64decode(text), "<f4")
            yield row, contig, start, bits
