"""Bits of every base along a genome, as tracks that genome browsers show."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import runs
from modalities.dna.bed import BedRow, merged
from modalities.dna.evaluation import RegionSettings
from modalities.dna.genome import Genome
from modalities.dna.reading import RegionEvaluator
from modalities.dna.scoring import BIT
from modalities.evaluation import Cell, CellValue, ModelResult, Score, option
from modalities.results import Row, file_safe
from zoo.errors import nearest
from zoo.files import replacing, replacing_path
from zoo.model import ZooModel

FORMATS = {"bedgraph": "bedgraph", "bigwig": "bw"}  # and the suffix of their files


def formats(text: str) -> tuple[str, ...]:
    """ "bedgraph,bigwig" to its parts."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"format {name!r}: {nearest(name, FORMATS)}")
    return names


@dataclass(frozen=True)
class TrackSettings(RegionSettings):
    """And which files to write."""

    formats: tuple[str, ...] = option(
        ("bedgraph",), "bedgraph, bigwig, or both with a comma; default: bedgraph", parse=formats
    )


class Track(RegionEvaluator[TrackSettings]):
    """−log₂ p of every base given those before it: how surprising each is, in bits; 2 of a uniform model.

    Bases are read as `score` reads them, in windows that overlap by half; with strands "both" a base has the mean over the
    two strands. Written are track.MODEL.bedgraph, rows of one base each, and track.MODEL.bw; both hold the same float32
    values. Places in both, and `bed_start` and `bed_stop` in the table, count as BED does: from 0, half-open. Bases that do
    not count, such as N, have no value. Regions that share bases are joined; a BED file's strands do not matter.
    """

    name = "track"
    summary = "bits of every base of a genome or of regions, as bedGraph and bigWig"
    scores = (Score("bits_per_base"),)

    def regions(self) -> list[BedRow]:
        return merged(super().regions(), self.genome())

    def cells(self, model: ZooModel) -> list[Cell]:
        if "bigwig" in self.settings.formats:
            _library()  # raises before anything is measured
        return super().cells(model)

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """The bits of each span's bases: little-endian float32 in base64, NaN where a base does not count."""
        spans, strands = cell.data["spans"], 1 + self.both(model)
        bits = [np.zeros(span.stop - span.start) for span in spans]
        for read in self.read(model, spans):
            first = spans[read.span].start
            value = np.where(read.counted, read.nats / BIT / strands, np.nan)
            bits[read.span][read.start - first : read.stop - first] += value
        texts = [base64.b64encode(one.astype("<f4").tobytes()).decode() for one in bits]
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
        if "bigwig" in self.settings.formats and not any(row["bases"] for row in regions.values()):
            raise ValueError("no base of the regions has a value, and a bigWig cannot be empty; --formats bedgraph can")
        return [
            {"name": f"{row['contig']}:{row['bed_start'] + 1}-{row['bed_stop']}"}
            | row
            | {"bits_per_base": row["bits"] / row["bases"] if row["bases"] else math.nan}
            for row in regions.values()
        ]

    def write(self, results: list[ModelResult], out: Path) -> None:
        """The table of regions and the tracks, one of each for each model."""
        super().write(results, out)
        for result in results:
            for name in self.settings.formats:
                path = out / f"{self.name}.{file_safe(result.label)}.{FORMATS[name]}"
                if name == "bedgraph":
                    write_bedgraph(path, result.cells)
                else:
                    write_bigwig(path, result.cells, self.genome())


def _values(cells: Mapping[str, CellValue]) -> Iterator[tuple[int, str, int, np.ndarray]]:
    """(number of the region, contig, first base, bits float32) of every span, in order."""
    for cell in cells.values():
        for (row, contig, start), text in zip(cell["spans"], cell["bits"], strict=True):
            yield row, contig, start, np.frombuffer(base64.b64decode(text), "<f4")


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
    with replacing_path(path) as temporary, library.open(str(temporary), "w") as file:
        file.addHeader([(contig.name, contig.length) for contig in genome.contigs])
        for contig, start, bits in _known(cells):
            file.addEntries(contig, start, values=bits.astype(np.float64), span=1, step=1)


def _library() -> Any:
    try:
        import pyBigWig
    except ImportError as error:
        raise ImportError("bigWig needs the package `pyBigWig`: pip install pyBigWig") from error
    return pyBigWig
