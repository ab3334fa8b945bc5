"""The k-mers of continuations against the true ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.dna.baselines import BASELINES
from modalities.dna.baselines.markov import kmers
from modalities.dna.continuation import Continuation, ContinuationSettings, texts_of
from modalities.dna.evaluation import REFERENCE
from modalities.evaluation import Axis, Cell, CellValue, ModelResult, Score
from modalities.figures import finish, panels, styles_of
from modalities.results import mean_of_seeds
from zoo.model import ZooModel

__all__ = ["Spectrum", "SpectrumSettings"]

ORDERS = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class SpectrumSettings(ContinuationSettings):
    """As of all continuations."""

    factors: ClassVar[tuple[int, ...]] = (1,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_bases < max(ORDERS):
            raise ValueError(f"new_bases {self.new_bases}: k-mers of {max(ORDERS)} need at least as many")


class Spectrum(Continuation):
    """Jensen-Shannon divergence, in bits, between the k-mers that a model writes and the true ones, k = 1 to 6.

    Continuations are split into halves A and B. `divergence` is the mean of D(written A, true B) and D(written B, true A),
    `floor` is D(true A, true B): for a model that writes like the genome both have the same expectation, and `excess`, the
    difference, is the model's. Sampled at temperature 1, after prompts of the training length, or the shortest of `lengths`.
    """

    name = "spectrum"
    summary = "Jensen-Shannon divergence (bits) of the written k-mers from the true ones, beside its floor"
    scores = (Score("divergence"), Score("floor"))
    axis = Axis("k", "k (bases)")
    settings_class = SpectrumSettings
    temperature = 1.0

    def prompt_lengths(self, model: ZooModel) -> tuple[int, ...]:
        return self.lengths_for(model)[:1]

    def points(self, model: ZooModel) -> tuple[int, ...]:
        return ORDERS

    def cells(self, model: ZooModel) -> list[Cell]:
        cells = super().cells(model)
        if sum(len(cell.data["places"]) for cell in cells) < 2:
            raise ValueError("two halves need at least two continuations: raise samples, or hold out more")
        return cells

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        truth, written = texts_of(list(cells.values()))
        rows = []
        for k in ORDERS:
            true, made = ([kmer_counts(codes[half::2], k) for half in (0, 1)] for codes in (truth, written))
            divergence = (jensen_shannon(made[0], true[1]) + jensen_shannon(made[1], true[0])) / 2
            floor = jensen_shannon(*true)
            row = {"k": k, "divergence": divergence, "floor": floor, "excess": divergence - floor}
            rows.append(row | {"prompts": len(truth)})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Divergence against k, above the floor of two halves of the truth."""
        results = mean_of_seeds(results, self.axis.column)
        figure, (axis,) = panels(1, 1, width=6.8, height=4.2)
        for result, style in zip(results, styles_of(results), strict=True):
            axis.plot([row["k"] for row in result.rows], [max(row["divergence"], 1e-6) for row in result.rows], **style)
        ks = [row["k"] for row in results[0].rows]
        floor = [max(row["floor"], 1e-6) for row in results[0].rows]
        axis.fill_between(ks, floor, min(floor) / 10, color="0.85", zorder=0)
        axis.plot(ks, floor, **REFERENCE)
        axis.text(0.95, 0.08, "truth against truth", transform=axis.transAxes, fontsize=8.5, color="0.35", ha="right")
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(floor) / 2)
        axis.set_xticks(ks)
        axis.set(
            xlabel=self.axis.label, ylabel="Jensen-Shannon divergence (bits)", title="written k-mers against true ones"
        )
        axis.grid(alpha=0.25, linewidth=0.6)
        finish(figure, [axis], results, path, unseeded=BASELINES)


def kmer_counts(codes: np.ndarray, k: int) -> np.ndarray:
    """(4^k,) counts of each k-mer in rows (N, T) of known bases."""
    return np.bincount(np.concatenate([kmers(row, k) for row in codes]), minlength=4**k)


def jensen_shannon(a: np.ndarray, b: np.ndarray) -> float:
    """H((p + q) / 2) − (H(p) + H(q)) / 2 in bits, of two arrays of counts; from 0 (equal) to 1 (disjoint)."""
    p, q = a / a.sum(), b / b.sum()
    return max(0.0, _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2)


def _entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())
