"""Bits of every base along a genome, as tracks that genome browsers show."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import runs
from modalities.dna.bed import BedRow, merged
from modalities.dna.evaluation import (
    REFERENCE,
    FileEvaluator,
    RegionSettings,
    fingerprint_of_rows,
    strands_of,
    table,
)
from modalities.dna.genome import Genome
from modalities.dna.reading import cost, read_spans, spans_of
from modalities.dna.scoring import BIT
from modalities.evaluation import Cell, CellValue, ModelResult, Score, option
from modalities.figures import finish, panels, styles_of
from modalities.files import file_safe
from modalities.results import short_names
from zoo.files import replacing, replacing_path
from zoo.model import ZooModel
from zoo.naming import nearest

__all__ = ["Track", "TrackSettings"]

CELL_BASES = 1 << 18  # that the windows of a cell read, on one strand
FORMATS = {"bedgraph": "bedgraph", "bigwig": "bw"}  # and the suffix of their files
DRAWN, BINS = 6, 200  # regions of the figure, and points of a curve


def formats(text: str) -> tuple[str, ...]:
    """ "bedgraph,bigwig" to its parts."""
    found = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for one in found:
        if one not in FORMATS:
            raise ValueError(f"format {one!r}: {nearest(one, FORMATS)}")
    return found


@dataclass(frozen=True)
class TrackSettings(RegionSettings):
    """And which files to write."""

    formats: tuple[str, ...] | None = option(
        None, "bedgraph, bigwig, or both with a comma; default: bedgraph", parse=formats
    )


class Track(FileEvaluator[TrackSettings]):
    """−log₂ p of every base given those before it: how surprising each is, in bits; 2 of a uniform model.

    Bases are read as `score` reads them, in windows that overlap by half; with strands "both" a base has the mean over the
    two strands. Written are track.MODEL.bedgraph (0-based, half-open rows of one base each) and track.MODEL.bw; both hold the
    same float32 values. Bases that do not count, such as N, have no value. Regions that share bases are joined; a
    BED file's strands do not matter.
    """

    name = "track"
    summary = "bits of every base of a genome or of regions, as bedGraph and bigWig"
    scores = (Score("bits_per_base"),)
    default_window = 16
    window_step = 2

    def regions(self) -> list[BedRow]:
        return merged(super().regions(), self.genome())

    def identity(self, model: ZooModel) -> dict[str, Any]:
        regions = fingerprint_of_rows(self.regions())
        return {"bases": self.genome().fingerprint, "regions": regions} | super().identity(model)

    def cells(self, model: ZooModel) -> list[Cell]:
        if "bigwig" in (self.settings.formats or ()):
            _library()  # raises before anything is measured
        half, both = self.window(model) // 2, strands_of(model, self.settings) == "both"
        return [
            Cell(f"part={n}", sum(cost(span, half, both=both) for span in part), {"spans": part, "half": half})
            for n, part in enumerate(spans_of(self.genome(), self.regions(), half, CELL_BASES))
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """The bits of each span's bases: little-endian float32 in base64, NaN where a base does not count."""
        spans, both = cell.data["spans"], strands_of(model, self.settings) == "both"
        bits = [np.zeros(span.stop - span.start) for span in spans]
        options: dict[str, Any] = dict(both=both, batch_tokens=self.settings.batch_tokens, advance=self.advance)
        for read in read_spans(model, self.genome(), spans, cell.data["half"], **options):
            first = spans[read.span].start
            value = np.where(read.counted, read.nats / BIT / (1 + both), np.nan)
            bits[read.span][read.start - first : read.stop - first] += value
        texts = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in bits]
        return {"spans": [[span.row, span.contig, span.start] for span in spans], "bits": texts}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for row, contig, start, bits in _values(cells):
            new = {"contig": contig, "start": start, "stop": start, "bases": 0, "bits": 0.0}
            mine = found.setdefault(row, new)
            mine["stop"] = start + len(bits)
            mine["bases"] += int(np.isfinite(bits).sum())
            mine["bits"] += float(np.nansum(bits, dtype=np.float64))
        if "bigwig" in (self.settings.formats or ()) and not any(row["bases"] for row in found.values()):
            raise ValueError("no base of the regions has a value, and a bigWig cannot be empty; --formats bedgraph can")
        return [
            row | {"bits_per_base": row["bits"] / row["bases"] if row["bases"] else math.nan} for row in found.values()
        ]

    def write(self, results: list[ModelResult], out: Path) -> None:
        """The table of regions and the tracks, one of each for each model."""
        formats = self.settings.formats or ("bedgraph",)
        super().write(results, out)
        for result in results:
            for one in formats:
                path = out / f"{self.name}.{file_safe(result.label)}.{FORMATS[one]}"
                if one == "bedgraph":
                    write_bedgraph(path, result.cells)
                else:
                    write_bigwig(path, result.cells, self.genome())

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Mean bits along the first regions, a panel each."""
        shown = results[0].rows[:DRAWN]
        figure, axes = panels(len(shown), 1, width=8.0, height=2.4)
        for result, style in zip(results, styles_of(results), strict=True):
            curves: dict[int, list[np.ndarray]] = {}
            for row, _, _, bits in _values(result.cells):
                if row < len(shown):
                    curves.setdefault(row, []).append(bits)
            for row, parts in curves.items():
                edges, bits = _edges(shown[row]), np.concatenate(parts)
                means = [_mean(bits[a:b]) for a, b in pairwise(edges)]
                middle = shown[row]["start"] + (edges[:-1] + edges[1:]) / 2
                axes[row].plot(middle, means, **style | {"marker": "", "linewidth": 1.2})
        for axis, place in zip(axes, shown, strict=True):
            axis.axhline(2.0, **REFERENCE)
            axis.grid(alpha=0.25, linewidth=0.6)
            per_point = max(1, (place["stop"] - place["start"]) // BINS)
            axis.set(ylabel="bits per base", title=f"{place['contig']}, means of {per_point:,} bases")
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes[-1].set_xlabel("base, from 0")
        finish(figure, axes, results, path)

    def show(self, results: list[ModelResult], console: Any, count: int = 20) -> None:
        """The first regions: bits per base, a column for each model."""
        names = short_names(results)
        found = table("track: bits per base of every region", ["contig"], ["start", "stop", "bases", *names])
        for n, row in enumerate(results[0].rows[:count]):
            bits = (f"{result.rows[n]['bits_per_base']:.4f}" for result in results)
            found.add_row(row["contig"], *(f"{row[name]:,}" for name in ("start", "stop", "bases")), *bits)
        console.print(found)
        if (more := len(results[0].rows) - count) > 0:
            console.print(f"{more:,} more regions in the files")


def _values(cells: Mapping[str, CellValue]) -> Iterator[tuple[int, str, int, np.ndarray]]:
    """(number of the region, contig, first base, bits float32) of every span, in order."""
    for cell in cells.values():
        for (row, contig, start), text in zip(cell["spans"], cell["bits"], strict=True):
            yield row, contig, start, np.frombuffer(base64.b64decode(text), "<f4")


def _edges(row: Mapping[str, Any]) -> np.ndarray:
    return np.unique(np.linspace(0, row["stop"] - row["start"], BINS + 1).round().astype(int))


def _mean(bits: np.ndarray) -> float:
    known = bits[np.isfinite(bits)]
    return float(known.mean()) if len(known) else math.nan


def _known(cells: Mapping[str, CellValue]) -> Iterator[tuple[str, int, np.ndarray]]:
    """(contig, first base, bits float32) of every run of bases that have a value, in order."""
    for _, contig, start, bits in _values(cells):
        for first, last in runs(np.isfinite(bits)).tolist():
            yield contig, start + first, bits[first:last]


def write_bedgraph(path: Path, cells: Mapping[str, CellValue]) -> None:
    """A row a base: contig, start, stop, value with as many digits as tell float32 numbers apart."""
    with replacing(path) as file:
        for contig, start, bits in _known(cells):
            file.writelines(f"{contig}\t{at}\t{at + 1}\t{value}\n" for at, value in enumerate(bits.astype(str), start))


def write_bigwig(path: Path, cells: Mapping[str, CellValue], genome: Genome) -> None:
    """The same values, fixed steps of one base; at least one, since the format has no form for none."""
    library = _library()
    with replacing_path(path) as temporary:
        file = library.open(str(temporary), "w")
        try:
            file.addHeader([(contig.name, contig.length) for contig in genome.contigs])
            for contig, start, bits in _known(cells):
                file.addEntries(contig, start, values=bits.astype(np.float64), span=1, step=1)
        finally:
            file.close()


def _library() -> Any:
    try:
        import pyBigWig
    except ImportError as error:
        raise ImportError("bigWig needs the package `pyBigWig`: pip install pyBigWig") from error
    return pyBigWig
