"""Bits per base of repeats and of unique sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.evaluation import strands_of
from modalities.dna.evaluators.bits import LikelihoodSettings, mean
from modalities.dna.evaluators.contigs import Contigs
from modalities.dna.formats import read_features
from modalities.dna.repeats import repetitive
from modalities.dna.scoring import BIT, score_windows
from modalities.evaluation import Axis, Cell, CellValue, ModelResult, Observed, Score, option
from modalities.heldout import fingerprint_of
from zoo.model import ZooModel

__all__ = ["PARTS", "Parts", "PartsSettings"]

PARTS = ("all", "unique", "repeats", "soft-masked")
ANNOTATED = ("coding", "non-coding")  # with a GenBank file


@dataclass(frozen=True)
class PartsSettings(LikelihoodSettings):
    """As `LikelihoodSettings`, and an annotation of the held-out contigs."""

    genbank: str | None = option(None, "GenBank file with the held-out contigs' features, several with commas")


class Parts(Contigs):
    """Bits per base of held-out contigs in windows of one length, as `Contigs`, by part.

    A base of "repeats" lies in 24 bases all of whose words of 16 stand more than once, on either strand, in the file of its
    contig; others are "unique". "soft-masked" are those that the file has in lower case; none in many files. With `genbank`,
    "coding" bases lie in a CDS feature of the record of their contig's name, on either strand, "non-coding" ones of such a
    contig do not. `share` is that of a part in the bases that count, of annotated contigs for these two. Contigs weigh equally.
    """

    name = "parts"
    summary = "bits per base of held-out repeats and unique sequence at one length"
    scores: tuple[Score, ...] = (Score("bits_per_base"), Score("share"))
    axis = Axis("part", "part of the sequence")
    paired_over = "stretches"
    settings_class = PartsSettings

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS + ANNOTATED * (self.settings.genbank is not None)

    def points(self, model: ZooModel) -> tuple[str, ...]:
        return self.parts

    def coding(self) -> dict[str, np.ndarray]:
        """By held-out contig of the GenBank file, (n, 2) bounds of its CDS features' parts.

        Raises ValueError for a file without one of the held-out contigs, or whose record of one is longer than that.
        """
        found = _coding(self.settings.genbank)
        held = self.heldout.items.contigs
        if not found.keys() & held.keys():
            raise ValueError(
                f"{self.settings.genbank} has none of the held-out contigs {', '.join(held)}, but {', '.join(list(found)[:5])}"
            )
        for name in found.keys() & held.keys():
            if len(found[name]) and found[name].max() > (length := self.heldout.items.genome[name].length):
                raise ValueError(f"{self.settings.genbank}: features of {name!r} lie beyond its {length:,} bases")
        return {name: bounds for name, bounds in found.items() if name in held}

    def identity(self, model: ZooModel) -> dict[str, Any]:
        known = super().identity(model)
        if self.settings.genbank is None:
            return known
        lines = (f"{name}\t{start}\t{stop}\n".encode() for name, rows in self.coding().items() for start, stop in rows)
        return known | {"coding": fingerprint_of(lines)}

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
            masks = [np.ones_like(again), ~again, again, soft]
            if self.settings.genbank is not None:
                masks += _annotated(self.coding().get(stretch.contig), stretch.start, windows.size)
            found["bits"].append([float(bits[mask].sum()) for mask in masks])
            found["bases"].append([float(bases[mask].sum()) for mask in masks])
        return {**cell.data["facts"], **found}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every stretch, part by part, pooled in its contig: of a part, many stretches have few bases."""
        for k, (bits, bases) in enumerate(zip(cell["bits"], cell["bases"], strict=True)):
            for part, total, weight in zip(self.parts, bits, bases, strict=True):
                if weight:
                    yield Observed(part, f"{name}/{k}", "bits_per_base", total, weight, cell["contig"])

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        contigs: dict[str, np.ndarray] = {}
        for cell in cells.values():
            sums = np.array([np.sum(cell[name], axis=0) for name in ("bits", "bases")])
            contigs[cell["contig"]] = contigs.get(cell["contig"], 0) + sums
        rows = []
        for k, part in enumerate(self.parts):
            known = [sums[:, k] for sums in contigs.values() if sums[1, k]]
            if known:
                whole = slice(len(PARTS), None) if part in ANNOTATED else slice(1)  # what the part is a share of
                shares = [sums[1, k] / sums[1, whole].sum() for sums in contigs.values() if sums[1, whole].any()]
                row = {"part": part, "length": next(iter(cells.values()))["length"]}
                row |= {"bits_per_base": mean([bits / bases for bits, bases in known]), "share": mean(shares)}
                rows.append(row | {"bases": int(sum(bases for _, bases in known)), "contigs": len(known)})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """No figure: the table says it."""
        return None


@lru_cache(maxsize=2)
def _coding(files: str) -> dict[str, np.ndarray]:
    parts = (part for path in files.split(",") for part in read_features(Path(path), "CDS"))
    return {name: np.array(sorted(bounds), np.int64).reshape(-1, 2) for name, bounds in parts}


def _annotated(bounds: np.ndarray | None, start: int, size: int) -> list[np.ndarray]:
    """Whether each of `size` bases from `start` on lies in one of (n, 2) bounds, and whether not; None: of neither is known."""
    if bounds is None:
        return [np.zeros(size, bool), np.zeros(size, bool)]
    steps = np.zeros(size + 1, np.int64)
    for column, step in ((0, 1), (1, -1)):
        np.add.at(steps, (bounds[:, column] - start).clip(0, size), step)
    coding = steps.cumsum()[:size] > 0
    return [coding, ~coding]
