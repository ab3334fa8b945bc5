"""The cost of every base of long sequences, in windows that overlap by half.

A contig of at most `window` bases is one window. Of a longer one all bases of the first window count, and the last half of
every other: each base counts once, predicted from at least window/2 bases but for those of the first window. On the other
strand windows begin at the contig's other end. A base costs the same in a region as in its whole contig.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.bed import BedRow
from modalities.dna.evaluation import (
    FileEvaluator,
    RegionSettings,
    strands_of,
    table,
)
from modalities.dna.genome import Genome
from modalities.dna.scoring import score_windows
from modalities.dna.tokenizers import load_tokenizer, step_of
from modalities.evaluation import Cell, ModelResult
from modalities.loading import fingerprint_of
from modalities.results import Row, short_names
from zoo.model import ZooModel

if TYPE_CHECKING:
    from rich.console import Console

CELL_BASES = 1 << 18  # that the windows of a cell read, on one strand
SHOWN = 20  # rows on the terminal


@dataclass(frozen=True)
class Span:
    """Bases [start, stop) of a contig of `length` bases, of the region of number `row`; turned: read on the other strand."""

    row: int
    contig: str
    length: int
    start: int
    stop: int
    turned: bool = False

    def strands(self, both: bool) -> tuple[bool, ...]:
        """Those that are read: whether it is the other one."""
        return (False, True) if both else (self.turned,)


@dataclass(frozen=True)
class Read:
    """Bases [start, stop) of the contig of a span, by number, read on one strand; arrays (n,) in the contig's order."""

    span: int
    start: int
    stop: int
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


R = TypeVar("R", bound=RegionSettings)


class RegionEvaluator(FileEvaluator[R]):
    """Evaluators of every base of the records of `fasta`, or of the rows of the BED file `regions`. A cell is a run of
    windows, so a stopped measurement goes on inside a record."""

    default_window = 16
    window_step = 2

    def identity(self, model: ZooModel) -> Row:
        rows = self.regions() if self.settings.regions is not None else []
        places = (f"{row.contig}\t{row.start}\t{row.stop}\t{row.name}\t{row.strand}\n".encode() for row in rows)
        regions = fingerprint_of(places) if rows else None
        return {"bases": self.genome().fingerprint, "regions": regions} | super().identity(model)

    def both(self, model: ZooModel) -> bool:
        return strands_of(model, self.settings) == "both"

    def cells(self, model: ZooModel) -> list[Cell]:
        rows, half, both = self.regions(), self.window(model) // 2, self.both(model)
        return [
            Cell(f"part={n}", sum(cost(span, half, both) for span in part), {"spans": part, "rows": rows})
            for n, part in enumerate(spans_of(self.genome(), rows, half, CELL_BASES))
        ]

    def read(self, model: ZooModel, spans: Sequence[Span]) -> Iterator[Read]:
        """What every window of every span says, a strand after the other, windows of similar lengths together."""
        genome, half = self.genome(), self.window(model) // 2
        for turned in (False, True):
            chosen = [(n, span) for n, span in enumerate(spans) if turned in span.strands(self.both(model))]
            windows = [window for n, span in chosen for window in _windows(n, span, half, turned)]
            for batch in _batches(windows, self.settings.batch_tokens):
                codes = _codes(genome, spans, batch, turned)
                nats, counted = base_nats(model, codes, self.settings.batch_tokens)
                self.advance(sum(map(len, batch)))
                for n, window in enumerate(batch):
                    part = slice(window.first - window.start, window.last - window.start)
                    start, values = window.first, (nats[n, part], counted[n, part])
                    if turned:
                        start = spans[window.span].length - window.last
                        values = values[0][::-1], values[1][::-1]
                    yield Read(window.span, start, start + len(values[0]), *values, turned)

    def measured(self, results: list[ModelResult]) -> str:
        rows, what = results[0].rows, "records" if self.settings.regions is None else "regions"
        bases, length = (sum(row[name] for row in rows) for name in ("bases", "length"))
        left_out = f"; {length - bases:,} left out: unknown, or in no whole token" if length > bases else ""
        return f"{self.name}: {bases:,} of the {length:,} bases of {len(rows):,} {what} of {self.source_name}{left_out}"

    def show(self, results: list[ModelResult], console: Console) -> None:
        """The first rows and the totals: bits per base, a column for each model."""
        first = results[0].rows
        shown = table(f"{self.name}: bits per base", ["name"], ["length", "bases", *short_names(results)])
        for n, row in enumerate(first[:SHOWN]):
            bits = (f"{result.rows[n]['bits_per_base']:.4f}" for result in results)
            shown.add_row(row["name"], f"{row['length']:,}", f"{row['bases']:,}", *bits)
        shown.add_section()
        length, bases = (f"{sum(row[name] for row in first):,}" for name in ("length", "bases"))
        totals = (f"{_total(result):.4f}" for result in results)
        shown.add_row(f"all {len(first):,}", length, bases, *totals, style="bold")
        console.print(shown)
        if len(first) > SHOWN:
            console.print(f"{len(first) - SHOWN:,} more in the files")


def _total(result: ModelResult) -> float:
    """Bits per base over all counted bases of all rows."""
    bits = sum(row["bits_per_base"] * row["bases"] for row in result.rows if row["bases"])
    bases = sum(row["bases"] for row in result.rows)
    return bits / bases if bases else math.nan


def spans_of(genome: Genome, rows: Sequence[BedRow], half: int, size: int) -> Iterator[list[Span]]:
    """All bases of all rows, in order, in parts whose windows read about `size` bases; a long row lies in several."""
    part: list[Span] = []
    room = size
    for number, row in enumerate(rows):
        length, start = genome[row.contig].length, row.start
        while start < row.stop:
            # Where windows end, so that none is read twice.
            cut = max(start + room // 2, start + half, 2 * half) // half * half
            span = Span(number, row.contig, length, start, min(cut, row.stop), row.strand == "-")
            part.append(span)
            room -= cost(span, half, both=False)
            start = span.stop
            if room <= 0:
                yield part
                part, room = [], size
    if part:
        yield part


def cost(span: Span, half: int, both: bool) -> int:
    """Bases that the windows of a span read, on one strand or both."""
    return sum(len(window) for turned in span.strands(both) for window in _windows(0, span, half, turned))


def _windows(number: int, span: Span, half: int, turned: bool) -> Iterator[Window]:
    start, stop = (span.length - span.stop, span.length - span.start) if turned else (span.start, span.stop)
    for k in range(max(0, start // half - 1), max(0, (stop - 1) // half - 1) + 1):
        begin = k * half
        end = min(begin + 2 * half, span.length)
        yield Window(number, begin, end, max(start, begin + half if k else 0), min(stop, end))


def base_nats(model: ZooModel, windows: np.ndarray, batch_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each base of windows (B, T), float64, and whether it counts; tokens share their cost evenly among bases."""
    if windows.shape[1] < step_of(load_tokenizer(model.config.tokenizer)):
        return np.zeros(windows.shape), np.zeros(windows.shape, bool)
    scores = score_windows(model, windows, strands="one", batch_tokens=batch_tokens, by_base=True)
    return scores.nll.numpy(), scores.bases.numpy() > 0


def _batches(windows: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in sorted(windows, key=len):
        if batch and (len(batch) + 1) * len(window) > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _codes(genome: Genome, spans: Sequence[Span], batch: Sequence[Window], turned: bool) -> np.ndarray:
    """(B, T) of the strand that is read, padded with unknown bases, which a causal model reads last."""
    filled = np.full((len(batch), len(batch[-1])), UNKNOWN, np.uint8)
    for row, window in zip(filled, batch, strict=True):
        span, start, stop = spans[window.span], window.start, window.stop
        if turned:
            start, stop = span.length - stop, span.length - start
        codes = genome.codes(span.contig, start, stop)
        row[: len(codes)] = reverse_complement(codes) if turned else codes
    return filled
