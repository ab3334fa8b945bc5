"""The cost of every base of long sequences: `score`, summed over records or regions, and `track`,
base by base.

Contigs are read in windows that overlap by half. A contig of at most `window` bases is one window.
Of a longer one all bases of the first window count, and the last half of every other: each base
counts once, predicted from at least window/2 bases but for those of the first window. On the other
strand windows begin at the contig's other end. A base costs the same in a region as in its whole
contig.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from modalities.dna.evaluation import FileEvaluator, FileSettings, strands_of
from modalities.dna.genome import Genome
from modalities.dna.scoring import BIT, score_windows
from modalities.dna.splits import Region, joined, read_bed
from modalities.dna.tokenizers import UNKNOWN, load_tokenizer, reverse_complement
from modalities.evaluation import Cell
from modalities.loading import fingerprint_of
from modalities.results import CellValue, ModelResult, Row, file_safe, short_names
from modalities.results import Score as Column
from modalities.settings import option
from modalities.tables import print_table
from zoo.files import replacing
from zoo.model import ZooModel

if TYPE_CHECKING:
    from rich.console import Console

CELL_BASES = 1 << 18  # that the windows of a cell read, on one strand
SHOWN = 20  # rows on the terminal
SUMS = ("nats", "read", "bases", "known", "strong")  # of a record; `read` and nats on all strands


class Span(NamedTuple):
    """Bases [start, stop) of a contig of `length` bases, of the region of number `row`; turned:
    read on the other strand."""

    row: int
    contig: str
    length: int
    start: int
    stop: int
    turned: bool = False

    def strands(self, both: bool) -> tuple[bool, ...]:
        """Those that are read: whether it is the other one."""
        return (False, True) if both else (self.turned,)


class Read(NamedTuple):
    """Bases from `start` of the contig of a span, by number, read on one strand; arrays (n,) in the
    contig's order."""

    span: int
    start: int
    nats: np.ndarray  # float64
    counted: np.ndarray  # bool
    turned: bool


@dataclass(frozen=True)
class Window:
    """Bases [start, stop) of the strand that is read; those of [first, last) count."""

    span: int
    start: int
    stop: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.stop - self.start


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
    scores = (Column("bits_per_base"),)

    def regions(self) -> Sequence[Region]:
        """The rows of the BED file, or every contig."""
        if self.settings.regions is not None:
            return read_bed(Path(self.settings.regions), self.genome())
        return [
            Region(contig.name, 0, contig.length, contig.name) for contig in self.genome().contigs
        ]

    def identity(self, model: ZooModel) -> Row:
        rows = self.regions() if self.settings.regions is not None else ()
        places = (
            f"{row.contig}\t{row.start}\t{row.stop}\t{row.name}\t{row.strand}\n".encode()
            for row in rows
        )
        regions = fingerprint_of(places) if rows else None
        return {"bases": self.genome().fingerprint, "regions": regions} | super().identity(model)

    def both(self, model: ZooModel) -> bool:
        return strands_of(model, self.settings) == "both"

    def cells(self, model: ZooModel) -> list[Cell]:
        rows = self.regions()
        half = self.window(model) // 2
        both = self.both(model)
        return [
            Cell(
                f"part={n}",
                sum(cost(span, half, both) for span in part),
                {"spans": part, "rows": rows},
            )
            for n, part in enumerate(spans_of(self.genome(), rows, half, CELL_BASES))
        ]

    def read(self, model: ZooModel, spans: Sequence[Span]) -> Iterator[Read]:
        """What every window of every span says, a strand after the other, windows of similar
        lengths together."""
        genome = self.genome()
        half = self.window(model) // 2
        batch_tokens = self.settings.batch_tokens
        step = load_tokenizer(model.config.tokenizer).step
        for turned in (False, True):
            chosen = [
                (n, span)
                for n, span in enumerate(spans)
                if turned in span.strands(self.both(model))
            ]
            windows = [window for n, span in chosen for window in _windows(n, span, half, turned)]
            for batch in _batches(windows, batch_tokens):
                codes = _codes(genome, spans, batch, turned)
                nats = np.zeros(codes.shape)
                counted = np.zeros(codes.shape, bool)
                if codes.shape[1] >= step:
                    scores = score_windows(model, codes, batch_tokens=batch_tokens, by_base=True)
                    nats = scores.nll.numpy()
                    counted = scores.bases.numpy() > 0
                for n, window in enumerate(batch):
                    part = slice(window.first - window.start, window.last - window.start)
                    start = window.first
                    if turned:
                        start = spans[window.span].length - window.last
                    way = -1 if turned else 1
                    yield Read(
                        window.span, start, nats[n, part][::way], counted[n, part][::way], turned
                    )

    def measured(self, results: list[ModelResult]) -> str:
        rows = results[0].rows
        what = "records" if self.settings.regions is None else "regions"
        bases, length = (sum(row[name] for row in rows) for name in ("bases", "length"))
        left_out = (
            f"; {length - bases:,} left out: unknown, or in no whole token"
            if length > bases
            else ""
        )
        return f"{self.name}: {bases:,} of the {length:,} bases of {len(rows):,} {what} of {self.source_name}{left_out}"

    def show(self, results: list[ModelResult], console: Console) -> None:
        """The totals and the first rows: bits per base, a column for each model."""
        first = results[0].rows
        length, bases = (f"{sum(row[name] for row in first):,}" for name in ("length", "bases"))
        rows = [[f"all {len(first):,}", length, bases]]
        for result in results:
            counted = [
                (row["bits_per_base"] * row["bases"], row["bases"])
                for row in result.rows
                if row["bases"]
            ]
            bits, total = np.sum([(0, 0), *counted], axis=0)
            rows[0].append(f"{bits / total if total else math.nan:.4f}")
        for n, row in enumerate(first[:SHOWN]):
            bits = (f"{result.rows[n]['bits_per_base']:.4f}" for result in results)
            rows.append([row["name"], f"{row['length']:,}", f"{row['bases']:,}", *bits])
        print_table(
            console,
            f"{self.name}: bits per base",
            ["name"],
            ["length", "bases", *short_names(results)],
            rows,
        )
        if len(first) > SHOWN:
            console.print(f"{len(first) - SHOWN:,} more in the files")


def spans_of(genome: Genome, rows: Sequence[Region], half: int, size: int) -> Iterator[list[Span]]:
    """All bases of all rows, in order, in parts whose windows read about `size` bases; a long row
    lies in several."""
    part: list[Span] = []
    room = size
    for number, row in enumerate(rows):
        length = genome[row.contig].length
        start = row.start
        while start < row.stop:
            # Where windows end, so that none is read twice.
            cut = max(start + room // 2, start + half, 2 * half) // half * half
            span = Span(number, row.contig, length, start, min(cut, row.stop), row.strand == "-")
            part.append(span)
            room -= cost(span, half, both=False)
            start = span.stop
            if room <= 0:
                yield part
                part = []
                room = size
    if part:
        yield part


def cost(span: Span, half: int, both: bool) -> int:
    """Bases that the windows of a span read, on one strand or both."""
    return sum(
        len(window) for turned in span.strands(both) for window in _windows(0, span, half, turned)
    )


def _windows(number: int, span: Span, half: int, turned: bool) -> Iterator[Window]:
    start, stop = (
        (span.length - span.stop, span.length - span.start) if turned else (span.start, span.stop)
    )
    for k in range(max(0, start // half - 1), max(0, (stop - 1) // half - 1) + 1):
        begin = k * half
        end = min(begin + 2 * half, span.length)
        yield Window(number, begin, end, max(start, begin + half if k else 0), min(stop, end))


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in sorted(windows, key=len):
        if batch and (len(batch) + 1) * len(window) > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _codes(
    genome: Genome, spans: Sequence[Span], batch: Sequence[Window], turned: bool
) -> np.ndarray:
    """(B, T) of the strand that is read, padded with unknown bases, which a causal model reads
    last."""
    filled = np.full((len(batch), len(batch[-1])), UNKNOWN, np.uint8)
    for row, window in zip(filled, batch, strict=True):
        span = spans[window.span]
        start = window.start
        stop = window.stop
        if turned:
            start, stop = span.length - stop, span.length - start
        codes = genome.codes(span.contig, start, stop)
        row[: len(codes)] = reverse_complement(codes) if turned else codes
    return filled


class Score(RegionEvaluator):
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
    version = 4  # 3 had other names in its cells
    summary = "log-likelihood and bits per base of every record of a FASTA file, or region of a BED"

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Sums over the cell's spans; a row's sums are those of all its spans."""
        spans = cell.data["spans"]
        rows = cell.data["rows"]
        genome = self.genome()
        sums: list[Row] = [dict.fromkeys(SUMS, 0) for _ in spans]
        for read in self.read(model, spans):
            total = sums[read.span]
            total["nats"] += float(read.nats.sum())
            total["read"] += int(read.counted.sum())
            total["bases"] += (
                int(read.counted.sum()) if read.turned == spans[read.span].turned else 0
            )
        records = []
        for span, numbers in zip(spans, sums, strict=True):
            row = rows[span.row]
            codes = genome.codes(span.contig, span.start, span.stop)
            numbers["known"] = int((codes != UNKNOWN).sum())
            numbers["strong"] = int(np.isin(codes, (1, 2)).sum())
            place = {
                "contig": row.contig,
                "bed_start": row.start,
                "bed_stop": row.stop,
                "strand": row.strand,
            }
            records.append({"row": span.row, "name": row.name} | place | numbers)
        return {"records": records, "strands": 2 if self.both(model) else 1}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        records: dict[int, Row] = {}
        for part in (part for cell in cells.values() for part in cell["records"]):
            record = records.setdefault(part["row"], part | dict.fromkeys(SUMS, 0))
            for name in SUMS:
                record[name] += part[name]
        strands = max((cell["strands"] for cell in cells.values()), default=1)
        rows = []
        for record in records.values():
            length = record["bed_stop"] - record["bed_start"]
            read = record["read"]
            known = record["known"]
            nats = record["nats"] / read if read else math.nan
            place = {
                name: record[name] for name in ("name", "contig", "bed_start", "bed_stop", "strand")
            }
            numbers = {
                "length": length,
                "bases": record["bases"],
                "unknown": length - known,
                "gc": record["strong"] / known if known else math.nan,
                "log_likelihood": -record["nats"] / strands if read else math.nan,
                "nats_per_base": nats,
                "bits_per_base": nats / BIT,
            }
            rows.append(place | numbers)
        return rows


class Track(RegionEvaluator):
    """−log₂ p of every base given those before it: how surprising each is, in bits; 2 of a uniform
    model.

    Bases are read as `score` reads them; with strands "both" a base has the mean over the two
    strands. Written is track.MODEL.bedgraph, rows of one base each, as float32. Places in it, and
    `bed_start` and `bed_stop` in the table, count as
    BED does: from 0, half-open. Bases that do not count, such as N, have no value. Regions that
    share bases are joined; a BED file's strands do not matter.
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
        strands = 1 + self.both(model)
        bits = [np.zeros(span.stop - span.start) for span in spans]
        for read in self.read(model, spans):
            first = read.start - spans[read.span].start
            bits[read.span][first : first + len(read.nats)] += np.where(
                read.counted, read.nats / BIT / strands, np.nan
            )
        texts = [base64.b64encode(values.astype("<f4").tobytes()).decode() for values in bits]
        return {"spans": [[span.row, span.contig, span.start] for span in spans], "bits": texts}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        regions: dict[int, Row] = {}
        for number, contig, start, bits in _values(cells):
            place = {"contig": contig, "bed_start": start, "bed_stop": start}
            row = regions.setdefault(number, place | {"length": 0, "bases": 0, "bits": 0.0})
            row["bed_stop"] = start + len(bits)
            row["length"] += len(bits)
            row["bases"] += int(np.isfinite(bits).sum())
            row["bits"] += float(np.nansum(bits, dtype=np.float64))
        return [
            {"name": f"{row['contig']}:{row['bed_start'] + 1}-{row['bed_stop']}"}
            | row
            | {"bits_per_base": row["bits"] / row["bases"] if row["bases"] else math.nan}
            for row in regions.values()
        ]

    def write(self, results: list[ModelResult], out: Path) -> None:
        """The table of regions and the track, one of each for each model; a value has as many
        digits as tell float32 numbers apart."""
        super().write(results, out)
        for result in results:
            with replacing(out / f"{self.name}.{file_safe(result.label)}.bedgraph") as file:
                for _, contig, start, bits in _values(result.cells):
                    texts = bits.astype(str)
                    known = np.flatnonzero(np.isfinite(bits)).tolist()
                    file.writelines(
                        f"{contig}\t{start + n}\t{start + n + 1}\t{texts[n]}\n" for n in known
                    )


def _values(cells: Mapping[str, CellValue]) -> Iterator[tuple[int, str, int, np.ndarray]]:
    """(number of the region, contig, first base, bits float32) of every span, in order."""
    for cell in cells.values():
        for (row, contig, start), text in zip(cell["spans"], cell["bits"], strict=True):
            yield row, contig, start, np.frombuffer(base64.b64decode(text), "<f4")
