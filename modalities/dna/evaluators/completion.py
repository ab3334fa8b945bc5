"""Continuations beside the true ones: agreement base by base, and GC content along the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.dna.continuation import Continuation, ContinuationSettings, texts_of
from modalities.evaluation import CellValue, ModelResult, Score, option, standard_error
from zoo.model import ZooModel

__all__ = ["Completion", "CompletionSettings"]

WINDOW = 25  # bases of the sliding window of GC content


@dataclass(frozen=True)
class CompletionSettings(ContinuationSettings):
    """Also the temperature."""

    factors: ClassVar[tuple[int, ...]] = (1, 4, 16)
    temperature: float = option(1.0, "of sampling; 0 takes the likeliest base")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 on, got {self.temperature}")
        if self.new_bases < 2 * WINDOW:
            raise ValueError(
                f"new_bases {self.new_bases}: GC content in windows of {WINDOW} needs at least {2 * WINDOW} bases"
            )


class Completion(Continuation):
    """Share of bases equal to the truth, and GC content in a sliding window of 25 bases.

    `chance` is Σ pᵢ² over the truth's composition: the expected agreement of two draws from it. `gc_r` is Pearson's r
    between the GC trajectories of written and true sequence, averaged over prompts; where one is constant r is not defined,
    and the prompt counts as `undefined`. `gc_error` is their mean absolute difference. Prompts are 1, 4 and 16 times the
    training length, as far as held-out contigs have room, unless `lengths` are given.
    """

    name = "completion"
    summary = "continuations of held-out DNA: agreement with the truth beside chance, and Pearson r of GC content"
    scores = (
        Score("accuracy"),
        Score("chance"),
        Score("gc_r"),
        Score("gc_error"),
        Score("undefined", exception=True),
    )
    settings_class = CompletionSettings

    @property
    def temperature(self) -> float:
        return self.settings.temperature

    def prompt_lengths(self, model: ZooModel) -> tuple[int, ...]:
        lengths = self.lengths_for(model)
        return lengths if self.settings.lengths else self.with_room(model, lengths, self.settings.new_bases)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            truth, written = texts_of([c for c in cells.values() if c["length"] == length])
            hits, r = (truth == written).mean(1), gc_correlation(truth, written)
            defined = r[np.isfinite(r)]
            rows.append(
                {
                    "length": length,
                    "accuracy": float(hits.mean()),
                    "accuracy_standard_error": standard_error(hits),
                    "chance": float(chance(truth).mean()),
                    "gc_r": float(defined.mean()) if len(defined) else math.nan,
                    "gc_r_standard_error": standard_error(defined),
                    "gc_error": float(np.abs(gc_trajectory(truth) - gc_trajectory(written)).mean()),
                    "undefined": len(r) - len(defined),
                    "prompts": len(r),
                }
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """No figure: the table says it."""
        return None


def gc_trajectory(codes: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """(N, T − window + 1): share of G and C in each window of (N, T) codes."""
    strong = ((codes == 1) | (codes == 2)).astype(np.float64)
    return np.lib.stride_tricks.sliding_window_view(strong, window, axis=1).mean(-1)


def gc_correlation(truth: np.ndarray, written: np.ndarray) -> np.ndarray:
    """(N,) Pearson's r between the GC trajectories of each row; NaN where one of them is constant."""
    pair = [gc_trajectory(codes) for codes in (truth, written)]
    constant = np.any([np.ptp(values, axis=1) < 0.5 / WINDOW for values in pair], axis=0)  # steps are 1 / WINDOW
    x, y = (values - values.mean(1, keepdims=True) for values in pair)
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.where(constant, np.nan, (x * y).sum(1) / np.where(constant, 1.0, scale))


def chance(truth: np.ndarray) -> np.ndarray:
    """(N,) Σ pᵢ² over the base composition of each row."""
    shares = np.stack([(truth == base).mean(1) for base in range(4)])
    return (shares**2).sum(0)
