"""Log-likelihood of every record of a sequence file, or of every region of a BED file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from modalities.dna.bases import UNKNOWN
from modalities.dna.evaluation import RegionSettings
from modalities.dna.reading import RegionEvaluator
from modalities.evaluation import Cell, CellValue
from modalities.evaluation import Score as Column
from modalities.results import Row
from zoo.model import ZooModel

SUMS = ("nats", "read", "bases", "known", "strong")  # of a record; `read` and nats on all strands


class Score(RegionEvaluator[RegionSettings]):
    """Log-likelihood, in nats, and bits per base of every record of `fasta`, in any format that a genome may have; with
    `regions` of every row of that BED file, whose bases are predicted from those before them, outside the region too; a row
    with "-" in the sixth column is read on the other strand.

    Records are read in windows of `window` bases (default 16 times the training length), rounded down to an even number of
    k-mers, that overlap by half (`modalities.dna.reading`). A token across a window's middle (BPE alone has such) counts by
    its share of bases. With strands "both" the record's reverse complement is read likewise, and numbers are means over the
    two.

    `bed_start` and `bed_stop` count as BED does: from 0, half-open. `bases` are those that count: not those of a k-mer with an
    unknown base, nor those at a record's end that make no k-mer. `unknown` and `gc` are of the whole record as written.
    Records without a counted base are listed as NaN.
    """

    name = "score"
    version = 4  # 3 had other names in its cells
    summary = "log-likelihood and bits per base of every record of a FASTA or GenBank file, or region of a BED"
    scores = (Column("bits_per_base"),)

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Sums over the cell's spans; a row's sums are those of all its spans."""
        spans, rows, genome = cell.data["spans"], cell.data["rows"], self.genome()
        sums: list[Row] = [dict.fromkeys(SUMS, 0) for _ in spans]
        for read in self.read(model, spans):
            total = sums[read.span]
            total["nats"] += float(read.nats.sum())
            total["read"] += int(read.counted.sum())
            total["bases"] += int(read.counted.sum()) if read.turned == spans[read.span].turned else 0
        records = []
        for span, numbers in zip(spans, sums, strict=True):
            row, codes = rows[span.row], genome.codes(span.contig, span.start, span.stop)
            numbers["known"] = int((codes != UNKNOWN).sum())
            numbers["strong"] = int(np.isin(codes, (1, 2)).sum())
            place = {"contig": row.contig, "bed_start": row.start, "bed_stop": row.stop, "strand": row.strand}
            records.append({"row": span.row, "name": row.name} | place | numbers)
        return {"records": records, "strands": 2 if self.both(model) else 1}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        records: dict[int, Row] = {}
        for part in (part for cell in cells.values() for part in cell["records"]):
            record = records.setdefault(part["row"], part | dict.fromkeys(SUMS, 0))
            for name in SUMS:
                record[name] += part[name]
        strands = max((cell["strands"] for cell in cells.values()), default=1)
        return [_row(record, strands) for record in records.values()]


def _row(record: Mapping[str, Any], strands: int) -> Row:
    length, nats = record["bed_stop"] - record["bed_start"], math.nan
    if record["read"]:
        nats = record["nats"] / record["read"]
    return {name: record[name] for name in ("name", "contig", "bed_start", "bed_stop", "strand")} | {
        "length": length,
        "bases": record["bases"],
        "unknown": length - record["known"],
        "gc": record["strong"] / record["known"] if record["known"] else math.nan,
        "log_likelihood": -record["nats"] / strands if record["read"] else math.nan,
        "nats_per_base": nats,
        "bits_per_base": nats / math.log(2),
    }
