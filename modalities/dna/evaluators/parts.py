"""Bits per base of repeats and of unique sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.evaluation import strands_of
from modalities.dna.evaluators.bits import mean
from modalities.dna.evaluators.contigs import Contigs
from modalities.dna.repeats import repetitive
from modalities.dna.scoring import BIT, score_windows
from modalities.evaluation import Axis, Cell, CellValue, ModelResult, Observed, Score
from zoo.model import ZooModel

__all__ = ["PARTS", "Parts"]

PARTS = ("all", "unique", "repeats", "soft-masked")


class Parts(Contigs):
    """Bits per base of held-out contigs in windows of one length, as `Contigs`, by part.

    A base of "repeats" lies in 24 bases all of whose words of 16 stand more than once, on either strand, in the file of its
    contig; others are "unique". "soft-masked" are those that the file has in lower case; none in many files. `share` is that
    of a part in the bases that count. Contigs weigh equally.
    """

    name = "parts"
    summary = "bits per base of held-out repeats and unique sequence at one length"
    scores: tuple[Score, ...] = (Score("bits_per_base"), Score("share"))
    axis = Axis("part", "part of the sequence")
    paired_over = "stretches"

    def points(self, model: ZooModel) -> tuple[str, ...]:
        return PARTS

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        found: dict[str, list[list[float]]] = {"bits": [], "bases": []}
        asked: dict[str, Any] = dict(strands=strands_of(model, self.settings), by_base=True)
        data = self.heldout.items
        for windows, stretch in zip(self.windows(model, cell), cell.data["stretches"], strict=True):
            scores = score_windows(
                model, windows, batch_tokens=self.settings.batch_tokens, advance=self.advance, **asked
            )
            bits, bases = (np.zeros(windows.size) for _ in range(2))
            width = scores.nll.shape[1]  # less than a window where bases at its end make no token
            bits.reshape(windows.shape)[:, :width], bases.reshape(windows.shape)[:, :width] = (
                scores.nll / BIT,
                scores.bases,
            )
            read = stretch.contig, stretch.start, stretch.start + windows.size
            again, soft = repetitive(data.genome, *read), data.genome.soft_masked(*read)
            masks = (np.ones_like(again), ~again, again, soft)
            found["bits"].append([float(bits[mask].sum()) for mask in masks])
            found["bases"].append([float(bases[mask].sum()) for mask in masks])
        return {**cell.data["facts"], **found}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every stretch, part by part, pooled in its contig: of a part, many stretches have few bases."""
        for k, (bits, bases) in enumerate(zip(cell["bits"], cell["bases"], strict=True)):
            for part, total, weight in zip(PARTS, bits, bases, strict=True):
                if weight:
                    yield Observed(part, f"{name}/{k}", "bits_per_base", total, weight, cell["contig"])

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        contigs: dict[str, np.ndarray] = {}
        for cell in cells.values():
            sums = np.array([np.sum(cell[name], axis=0) for name in ("bits", "bases")])
            contigs[cell["contig"]] = contigs.get(cell["contig"], 0) + sums
        rows = []
        for k, part in enumerate(PARTS):
            known = [sums[:, k] for sums in contigs.values() if sums[1, k]]
            if known:
                shares = [sums[1, k] / sums[1, 0] for sums in contigs.values() if sums[1, 0]]
                row = {"part": part, "length": next(iter(cells.values()))["length"]}
                row |= {"bits_per_base": mean([bits / bases for bits, bases in known]), "share": mean(shares)}
                rows.append(row | {"bases": int(sum(bases for _, bases in known)), "contigs": len(known)})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """No figure: the table says it."""
        return None
