"""Likelihood of held-out DNA: stretches cut into windows of each length, and what evaluators of them share.

A cell is a length and a few stretches of one contig. Stretches are as long as the longest length and serve every length, cut
into windows that do not overlap, each read from BOS: all lengths predict the same bases, up to the remainder of a stretch
that is not a whole number of windows. Contigs weigh equally, whatever their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from modalities.dna.baselines import COMPRESSORS, MARKOV
from modalities.dna.evaluation import DnaEvaluator, window_of
from modalities.dna.splits import Region
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, Score, batches
from modalities.figures import styles_of
from zoo.model import ZooModel

__all__ = ["ENOUGH", "LEFT_OUT", "Likelihood", "add", "by_contig", "mean", "view", "with_styles"]

CELL_BASES = 1 << 16  # in a cell, at least one stretch
ENOUGH = 0.9  # share of the held-out bases whose contigs must have room for a default length
LEFT_OUT = Score("contigs_left_out", exception=True)


class Likelihood(DnaEvaluator):
    """Evaluators that score windows of held-out stretches: `samples` stretches of every held-out contig that has room; by
    default as many as read about `default_bases` at each length."""

    default_bases = 1 << 18

    def points(self, model: ZooModel) -> tuple[Any, ...]:
        """`lengths`, or the default ones that held-out contigs have room for."""
        lengths = self.settings.resolved_lengths(self.trained_at(model))
        if self.settings.lengths is not None:
            return lengths
        most = self.heldout.items.reaching(ENOUGH)
        return tuple(length for length in lengths if window_of(model, length) <= most) or lengths[:1]

    def lengths(self, model: ZooModel) -> tuple[int, ...]:
        """In tokens, ascending."""
        return self.points(model)

    def samples(self, model: ZooModel) -> int:
        stretch = window_of(model, self.lengths(model)[-1])
        return self.settings.samples or max(1, self.default_bases // (len(self.heldout.items.contigs) * stretch))

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return {
            "heldout": self.heldout.fingerprint,
            "seed": self.settings.seed,
            "stretch": window_of(model, self.lengths(model)[-1]),
            "samples": self.samples(model),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        lengths = self.lengths(model)
        longest = window_of(model, lengths[-1])
        found = self.stretches(longest, self.samples(model), self.settings.seed)
        group, left_out = max(1, CELL_BASES // longest), len(self.heldout.items.contigs) - len(found)
        cells = []
        for length in lengths:
            for contig, stretches in found.items():
                for part in batches(len(stretches), group):
                    name = f"length={length}/{contig}/stretches={part.start}-{part.stop}"
                    facts = {"length": length, "contig": contig, "contigs_left_out": left_out}
                    cost = sum(s.stop - s.start for s in stretches[part])
                    cells.append(Cell(name, cost=cost, data={"facts": facts, "stretches": stretches[part]}))
        return cells

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Region]]:
        """By contig; contigs without room for one of `length` are left out."""
        return self.heldout.items.stretches(length, count, seed)

    def windows(self, model: ZooModel, cell: Cell) -> list[np.ndarray]:
        """The whole windows (N, window) of each stretch of a cell; a stretch shorter than a window is one window."""
        data, window = self.heldout.items, window_of(model, cell.data["facts"]["length"])
        found = [data.codes(stretch) for stretch in cell.data["stretches"]]
        return [codes[: max(1, len(codes) // window) * window].reshape(-1, min(window, len(codes))) for codes in found]


def by_contig(cells: Sequence[CellValue]) -> dict[str, list[CellValue]]:
    found: dict[str, list[CellValue]] = {}
    for cell in cells:
        found.setdefault(cell["contig"], []).append(cell)
    return found


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return float(np.mean(values)) if len(values) else math.nan


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two arrays, the shorter one continued with zeros."""
    total = np.zeros(max(len(a), len(b)))
    total[: len(a)] += a
    total[: len(b)] += b
    return total


# ------------------------------------------------------------------------------------------------ baselines in figures

GREYS = {"uniform": ("0.75", "-"), "gzip": ("0.65", ":"), "xz": ("0.65", "-.")}


def with_styles(
    results: Sequence[ModelResult], bits: Callable[[ModelResult], float]
) -> tuple[list[ModelResult], list[dict[str, Any]]]:
    """What figures draw, and its styles: models as everywhere, baselines as grey lines without markers.

    Of Markov chains only those of the fewest `bits` and of the highest order are drawn. The legend names the compressors
    that are outside `view`.
    """
    chains = [result for result in results if result.method in MARKOV]
    kept = [min(chains, key=bits), max(chains, key=lambda r: MARKOV.index(r.method))] if chains else []
    results = [result for result in results if result.method not in MARKOV or any(result is chain for chain in kept)]
    given = iter(styles_of([result for result in results if result.method not in (*GREYS, *MARKOV)]))
    high, styles = view(results, "bits_per_base", 2.0)[1], []
    for result in results:
        if result.method in MARKOV:
            color, dash, note = ("0.2", "-", "best order") if result is kept[0] else ("0.45", "--", "highest order")
            note = "best and highest order" if kept[0] is kept[1] else note
            note = f" ({note})" if len(chains) > 1 else ""
        elif result.method in GREYS:
            color, dash = GREYS[result.method]
            most = max(_values(result, "bits_per_base"), default=0.0)
            note = f" (out of view, to {most:.2f})" if most > high else ""
        else:
            styles.append(next(given))
            continue
        plain = {"marker": "", "linewidth": 1.6, "zorder": 2, "label": result.label + note}
        styles.append({"color": color, "linestyle": dash, **plain})
    return results, styles


def view(results: Sequence[ModelResult], column: str, chance: float) -> tuple[float, float]:
    """Limits that hold `chance`, models and chains, but not compressors, whose headers dominate short windows."""
    shown = [chance, *(value for r in results if r.method not in COMPRESSORS for value in _values(r, column))]
    room = 0.08 * (max(shown) - min(shown)) or 0.08 * chance
    return min(shown) - room, max(shown) + room


def _values(result: ModelResult, column: str) -> list[float]:
    return [row[column] for row in result.rows if math.isfinite(row.get(column, math.nan))]
