"""Saturation mutagenesis: the log-likelihood ratio of every single-base substitution of regions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.alleles import Change, effect, place, score_haplotypes
from modalities.dna.bases import BASES, UNKNOWN
from modalities.dna.bed import BedRow, merged
from modalities.dna.evaluation import (
    FileEvaluator,
    RegionSettings,
    fingerprint_of_rows,
    step_of,
    strands_of,
    table,
)
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, Score
from modalities.figures import panels
from modalities.results import short_names
from zoo.model import ZooModel
from zoo.prior_plot import save_figure

__all__ = ["Mutagenesis"]

CELL_SITES = 256
MOST_SITES = 1 << 20  # of all regions together, with three rows each
DRAWN = 200  # bases of the figure
NO_ROOM = "a contig shorter than a k-mer"


class Mutagenesis(FileEvaluator):
    """log p(window with the substitution) − log p(reference's window) of the three other bases at every base of `regions` (of
    all of `fasta` without), read and placed as `variants` does. Unknown bases are left out; regions that share bases are
    joined. At most 2²⁰ bases.

    `window` is that of `variants` (default: the training length).
    """

    name = "mutagenesis"
    summary = "log-likelihood ratio of every single-base substitution of regions (saturation mutagenesis)"
    scores = (Score("llr_nats"),)
    settings_class = RegionSettings
    default_window = 1

    def regions(self) -> list[BedRow]:
        """Joined, without strands: substitutions are of that as written. ValueError for more than `MOST_SITES` bases."""
        found = merged(super().regions(), self.genome())
        if (sites := sum(row.stop - row.start for row in found)) > MOST_SITES:
            raise ValueError(
                f"{sites:,} bases to substitute: expected at most {MOST_SITES:,}; name smaller regions with --regions"
            )
        return found

    def identity(self, model: ZooModel) -> dict[str, Any]:
        regions = fingerprint_of_rows(self.regions())
        return {"bases": self.genome().fingerprint, "regions": regions} | super().identity(model)

    def cells(self, model: ZooModel) -> list[Cell]:
        window = self.window(model)
        parts = [
            BedRow(row.contig, start, min(start + CELL_SITES, row.stop))
            for row in self.regions()
            for start in range(row.start, row.stop, CELL_SITES)
        ]
        return [
            Cell(f"{part.contig}:{part.start}-{part.stop}", 4 * window * (part.stop - part.start), {"sites": part})
            for part in parts
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        genome, sites = self.genome(), cell.data["sites"]
        length, window = genome[sites.contig].length, self.window(model)
        step = step_of(load_tokenizer(model.config.tokenizer))
        codes = genome.codes(sites.contig, sites.start, sites.stop).tolist()
        changes = [
            Change(sites.contig, at, BASES[code], alt)
            for at, code in enumerate(codes, sites.start)
            if code != UNKNOWN
            for alt in BASES.replace(BASES[code], "")
        ]
        placed = [place(change, length, window, step) for change in changes]
        options = {"strands": strands_of(model, self.settings), "batch_tokens": self.settings.batch_tokens}
        known = [one for one in placed if one]
        scores = iter(score_haplotypes(model, genome, known, advance=self.advance, **options))
        rows = []
        for change, one in zip(changes, placed, strict=True):
            found = effect(one, next(scores), "") if one else effect(None, None, NO_ROOM)
            where = {"chrom": change.chrom, "pos": change.start + 1, "ref": change.ref, "alt": change.alt}
            rows.append(where | {name: found[name] for name in ("llr_nats", "llr_bits", "window", "reason")})
        return {"rows": rows}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return [row for cell in cells.values() for row in cell["rows"]]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """The first region's substitutions as a map, bases down and places along; a panel a model, on one colour scale."""
        figure, axes = panels(len(results), 1, width=9.0, height=1.8)
        maps = [llr_map(result.rows) for result in results]
        most = max((abs(value) for _, one in maps for value in one[np.isfinite(one)]), default=1.0) or 1.0
        image = None
        for axis, name, (start, values) in zip(axes, short_names(results), maps, strict=True):
            extent = (start - 0.5, start + values.shape[1] - 0.5, len(BASES) - 0.5, -0.5)
            image = axis.imshow(values, aspect="auto", cmap="RdBu", vmin=-most, vmax=most, extent=extent)
            axis.set_yticks(range(len(BASES)), list(BASES))
            axis.set_title(name, fontsize=9)
        axes[-1].set_xlabel("position, from 1")
        if image is not None:
            bar = figure.colorbar(image, ax=list(axes), fraction=0.03)
            bar.set_label("log p(substitution) − log p(reference), nats", fontsize=7)
        save_figure(figure, path)

    def show(self, results: list[ModelResult], console: Any, count: int = 10) -> None:
        """Each model's least likely substitutions, and what a substitution costs on average."""
        for result, model in zip(results, short_names(results), strict=True):
            scored = sorted((row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"])
            mean = math.fsum(row["llr_nats"] for row in scored) / len(scored) if scored else math.nan
            title = f"mutagenesis: {model}, {len(scored):,} substitutions, mean {mean:+.3f} nats; least likely"
            found = table(title, ["place", "change"], ["log p(alt) − log p(ref), nats", "bits"])
            for row in scored[:count]:
                numbers = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
                found.add_row(f"{row['chrom']}:{row['pos']}", f"{row['ref']}→{row['alt']}", *numbers)
            console.print(found)
            if left := len(result.rows) - len(scored):
                console.print(f"not scored: {left:,}")


def llr_map(rows: list[dict[str, Any]]) -> tuple[int, np.ndarray]:
    """(first position, (4, N) nats) of the first `DRAWN` positions of the first contig; 0 for the reference's base, NaN where
    nothing is scored."""
    if not rows:
        return 1, np.full((len(BASES), 1), np.nan)
    first = rows[0]["pos"]
    mine = [row for row in rows if row["chrom"] == rows[0]["chrom"] and row["pos"] < first + DRAWN]
    values = np.full((len(BASES), mine[-1]["pos"] - first + 1), np.nan)
    for row in mine:
        values[BASES.index(row["ref"]), row["pos"] - first] = 0.0
        values[BASES.index(row["alt"]), row["pos"] - first] = row["llr_nats"]
    return first, values
