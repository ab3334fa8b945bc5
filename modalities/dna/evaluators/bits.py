"""Bits per base of held-out DNA against length, and by position in a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.decoder.scoring import position_buckets
from modalities.dna.baselines import BASELINES, COMPRESSORS
from modalities.dna.evaluation import DnaLengthSettings, StrandSettings, strands_of
from modalities.dna.likelihood import LEFT_OUT, Likelihood, add, by_contig, mean, view, with_styles
from modalities.dna.scoring import BIT, score_windows
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Cell, CellValue, ModelResult, Score
from modalities.figures import RULE, curves, finish, name_panel, panels, position_curves
from modalities.results import mean_of_seeds
from zoo.model import ZooModel

__all__ = ["Bits", "BitsSettings", "summary"]


@dataclass(frozen=True)
class BitsSettings(DnaLengthSettings, StrandSettings):
    """Lengths of windows, and strands."""


class Bits(Likelihood):
    """NLL, bits per base and next-base accuracy against length, and bits by position in windows of the longest length.

    The standard error is that of the mean over stretches, drawn contig by contig; NaN where all have a single one.
    Positions are in tokens, in octaves, and left out for both strands, where a base is at two positions. A tokenizer of more
    than single bases has a token accuracy instead; a compressor has none.
    """

    name = "bits"
    summary = "NLL, bits per base and next-base accuracy of held-out contigs against length, and bits by position"
    scores: ClassVar[tuple[Score, ...]] = (
        Score("bits_per_base", "bits per base", linear=True),
        Score("accuracy", linear=True),
        Score("token_accuracy", linear=True),
        LEFT_OUT,
    )
    settings_class = BitsSettings

    def identity(self, model: ZooModel) -> dict[str, Any]:
        return super().identity(model) | {"strands": strands_of(model, self.settings)}

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        strands = strands_of(model, self.settings)
        values: dict[str, list[float]] = {name: [] for name in ("bits", "bases", "correct", "tokens")}
        bucket_bits, bucket_bases, left_over = np.zeros(0), np.zeros(0), 0
        by_stretch = self.windows(model, cell)
        for windows, stretch in zip(by_stretch, cell.data["stretches"], strict=True):
            scores = score_windows(model, windows, strands=strands, batch_tokens=self.settings.batch_tokens)
            left_over += stretch.stop - stretch.start - windows.size + scores.left_over
            bits = scores.nll / BIT  # before sums, so that 2 bits stay exactly 2
            for name, value in (("bits", bits), ("bases", scores.bases), ("correct", scores.correct)):
                values[name].append(value.sum().item())
            values["tokens"].append(int((scores.bases > 0).sum()))
            if strands == "one":
                bucket = position_buckets(bits.shape[1])
                bucket_bits = add(bucket_bits, np.bincount(bucket, weights=bits.sum(0).numpy()))
                bucket_bases = add(bucket_bases, np.bincount(bucket, weights=scores.bases.sum(0).numpy()))
        accuracy = "accuracy" if load_tokenizer(model.config.tokenizer).bases_per_token == 1 else "token_accuracy"
        sums = {"left_over": left_over, "bucket_bits": bucket_bits.tolist(), "bucket_bases": bucket_bases.tolist()}
        return {**cell.data["facts"], "window": by_stretch[0].shape[1], "score": accuracy, **values, **sums}

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({cell["length"] for cell in cells.values()}):
            mine = [cell for cell in cells.values() if cell["length"] == length]
            row = {"length": length} | summary(mine)
            bits, bases = (
                reduce(add, (np.array(cell[name]) for cell in mine)) for name in ("bucket_bits", "bucket_bases")
            )
            if len(bits):
                row["position_to"] = [2**k for k in range(len(bits))]
                row["position_bits"] = np.divide(bits, bases, out=np.full(len(bits), np.nan), where=bases > 0).tolist()
            rows.append(row)
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Bits per base and accuracy against length, and bits by position inside windows of the longest length."""
        results, styles = with_styles(mean_of_seeds(results, self.axis.column), _bits_as_trained)
        figure, axes = panels(1, 3, width=4.2, height=3.9)
        titles = ("bits per base, less is better", "next base predicted right")
        chances = ((2.0, "2.000, uniform"), (0.25, "0.25, chance"))
        for axis, score, title, (chance, text) in zip(axes[:2], self.scores[:2], titles, chances, strict=True):
            curves(axis, results, score, styles=styles)
            name_panel(axis, title)
            axis.axhline(chance, **RULE)
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axis.annotate(text, (0.99, chance), fontsize=7.5, color="0.35", **place)
            axis.set_ylim(view(results, score.column, chance))
        where = [n for n, result in enumerate(results) if result.method not in ("uniform", *COMPRESSORS)]
        if where:  # the others are alike at every position
            known, their_styles = [results[n] for n in where], [styles[n] for n in where]
            position_curves(axes[2], known, "position_bits", "bits per base", styles=their_styles)
            axes[2].axhline(2.0, **RULE)
        axes[2].set_visible(bool(where))
        finish(figure, axes, results, path, unseeded=BASELINES)


def _bits_as_trained(result: ModelResult) -> float:
    """At the training length, or the nearest."""
    return min(result.rows, key=lambda row: abs(math.log(row["length"] / result.trained_at)))["bits_per_base"]


def summary(cells: Sequence[CellValue]) -> dict[str, Any]:
    """Means over contigs of cells of one length, with their counts."""
    contigs = [
        {name: _column(mine, name) for name in ("bits", "bases", "correct", "tokens")}
        for mine in by_contig(cells).values()
    ]
    contigs = [contig for contig in contigs if contig["bases"].sum()]
    bits = mean([contig["bits"].sum() / contig["bases"].sum() for contig in contigs])
    accuracy = mean([contig["correct"].sum() / contig["tokens"].sum() for contig in contigs])
    return {
        "bits_per_base": bits,
        "standard_error": _standard_error([_ratio(contig["bits"], contig["bases"]) for contig in contigs]),
        "nll": bits * BIT,
        **({} if math.isnan(accuracy) else {cells[0]["score"]: accuracy}),
        "bases": sum(int(contig["bases"].sum()) for contig in contigs),
        "window_bases": max(cell["window"] for cell in cells),
        "stretches": sum(len(contig["bits"]) for contig in contigs),
        "left_over": sum(cell["left_over"] for cell in cells),
        "contigs": len(contigs),
        "contigs_left_out": cells[0]["contigs_left_out"],
    }


def _column(cells: Sequence[CellValue], name: str) -> np.ndarray:
    return np.array([value for cell in cells for value in cell[name]], dtype=np.float64)


def _ratio(bits: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """Of the stretches with known bases."""
    return bits[bases > 0] / bases[bases > 0]


def _standard_error(contigs: Sequence[np.ndarray]) -> float:
    """Of the mean over C contigs of the means over each one's n stretches: √(Σ s² / n) / C. A contig of a single stretch
    takes the mean s² of the others; NaN where all have one."""
    known = [values.var(ddof=1) for values in contigs if len(values) > 1]
    if not known:
        return math.nan
    other = np.mean(known)
    variances = [values.var(ddof=1) if len(values) > 1 else other for values in contigs]
    return math.sqrt(sum(s2 / len(values) for s2, values in zip(variances, contigs, strict=True))) / len(contigs)
