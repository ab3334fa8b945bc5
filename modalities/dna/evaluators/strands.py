"""Likelihood of a sequence against that of its reverse complement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import reverse_complement
from modalities.dna.evaluators.bits import LEFT_OUT, Likelihood, by_contig, mean
from modalities.dna.scoring import score_windows
from modalities.evaluation import Cell, CellValue, ModelResult, Score
from zoo.model import ZooModel

__all__ = ["Strands"]


class Strands(Likelihood):
    """Bits per base of windows and of their reverse complements.

    The mean over windows of |bits(x) − bits(rc x)| per base, Pearson's r between the two over windows (NaN where either is
    constant), the bits per base of the strand as written, and of both strands on average.
    """

    name = "strands"
    summary = "bits per base of windows and of their reverse complements, against length"
    scores = (
        Score("difference"),
        Score("pearson_r"),
        Score("one_strand_bits"),
        Score("both_strands_bits"),
        LEFT_OUT,
    )
    default_bases = 1 << 17  # each read twice

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        forth: list[float] = []
        back: list[float] = []
        for windows in self.windows(model, cell):
            for found, strand in ((forth, windows), (back, reverse_complement(windows))):
                scores = score_windows(model, strand, strands="one", batch_tokens=self.settings.batch_tokens)
                found += (scores.bits / scores.counted).tolist()
                self.advance(strand.size // 2)
        return {**cell.data["facts"], "forth": forth, "back": back}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            mine = [cell for cell in cells.values() if cell["length"] == length]
            pairs = [
                np.concatenate([[cell["forth"], cell["back"]] for cell in contig], axis=1)
                for contig in by_contig(mine).values()
            ]
            pairs = [pair[:, np.isfinite(pair).all(0)] for pair in pairs]
            pairs = [pair for pair in pairs if pair.size]
            rows.append(
                {
                    "length": length,
                    "difference": mean([np.abs(forth - back).mean() for forth, back in pairs]),
                    "pearson_r": _pearson(np.concatenate(pairs, axis=1)) if pairs else math.nan,
                    "one_strand_bits": mean([forth.mean() for forth, _ in pairs]),
                    "both_strands_bits": mean([pair.mean() for pair in pairs]),
                    "windows": sum(pair.shape[1] for pair in pairs),
                    "contigs": len(pairs),
                    "contigs_left_out": mine[0]["contigs_left_out"],
                }
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """No figure: the table says it."""
        return None


def _pearson(pairs: np.ndarray) -> float:
    """Of (2, N); NaN where a row is constant."""
    if pairs.shape[1] < 2 or not pairs.std(axis=1).all():
        return math.nan
    return float(np.corrcoef(pairs)[0, 1])
