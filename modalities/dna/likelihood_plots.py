"""Figures of the likelihood of held-out DNA. Models look as in every figure; baselines are grey lines without markers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modalities.dna.baselines import COMPRESSORS
from modalities.evaluation import ModelResult, SeedMean, mean_of_seeds
from modalities.plots import (
    BASELINES,
    CONTIG,
    LENGTH,
    compact,
    curves,
    finish,
    mark_training,
    name_panel,
    panels,
    styles_of,
)

RULE = {"color": "0.35", "linewidth": 1.0, "zorder": 1}
ROOM = 0.08  # of the span of the models, left above and below it


def bits_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Bits per base and accuracy against length, and bits by position inside windows of the longest length."""
    results = mean_of_seeds(results, LENGTH.column)
    figure, axes = panels(1, 3, width=4.2, height=3.9)
    curves(axes[0], results, "bits_per_base", "bits per base", linear=True)
    curves(axes[1], _filled(results, "accuracy"), "accuracy", "accuracy", linear=True)
    name_panel(axes[0], "bits per base, less is better")
    name_panel(axes[1], "next base guessed right")
    _rule(axes[0], 2.0, "2.000, uniform")
    _rule(axes[1], 0.25, "0.25, chance")
    _positions(axes[2], results)
    for axis, column in zip(axes, ("bits_per_base", "accuracy", None), strict=True):
        if column:
            _look_at_models(axis, results, column, 2.0 if column == "bits_per_base" else 0.25)
    finish(figure, axes, results, path)


def _positions(axis, results: Sequence[ModelResult]) -> None:
    longest = max(row["length"] for result in results for row in result.rows)
    for result, style in zip(results, styles_of(results), strict=True):
        row = max(result.rows, key=lambda row: row["length"])
        if "position_bits" in row and result.method not in ("uniform", *COMPRESSORS):  # those know no position
            axis.plot(row["position_to"], row["position_bits"], **style)
    name_panel(axis, f"by position in windows of {compact(longest)}")
    axis.set(ylabel="bits per base", xlabel="tokens seen, up to (log₂)", xscale="log")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: compact(value))
    axis.grid(alpha=0.25, linewidth=0.6)
    _rule(axis, 2.0, "")
    mark_training(axis, results)


def contigs_figure(results: Sequence[ModelResult], path: Path) -> None:
    """A dot for every model and held-out contig, baselines as ticks; a contig is a line of the page."""
    results = mean_of_seeds(results, CONTIG.column)
    contigs = list(dict.fromkeys(row["contig"] for result in results for row in result.rows))
    scored = any("accuracy" in row for result in results for row in result.rows)
    figure, axes = panels(1, 1 + scored, width=5.2, height=1.6 + max(0.42, 0.07 * len(results)) * len(contigs))
    labels = {"bits_per_base": "bits per base, less is better", "accuracy": "next base guessed right"}
    for axis, (column, label) in zip(axes, labels.items(), strict=False):
        for k, (result, style) in enumerate(zip(results, styles_of(results), strict=True)):
            lift = 0.62 * ((k + 0.5) / len(results) - 0.5)
            rows = [row for row in result.rows if column in row]
            places = [contigs.index(row["contig"]) + lift for row in rows]
            plain = {"marker": "|", "markersize": 9.0, "alpha": 1.0} if result.method in BASELINES else {}
            axis.plot([row[column] for row in rows], places, **style | {"linestyle": "none"} | plain)
            if isinstance(result, SeedMean):
                ends = ([row[column] for row in r if column in row] for r in (result.low, result.high))
                axis.hlines(places, *ends, color=style["color"], linewidth=1.0, zorder=2)
        axis.set(ylim=(len(contigs) - 0.5, -0.5), xlabel=label)
        axis.set_yticks(range(len(contigs)), contigs if axis is axes[0] else [])
        axis.axvline(2.0 if column == "bits_per_base" else 0.25, **RULE)
        axis.grid(axis="x", alpha=0.25, linewidth=0.6)
        for edge in range(1, len(contigs)):
            axis.axhline(edge - 0.5, color="0.85", linewidth=0.6, zorder=0)
        _look_at_models(axis, results, column, 2.0 if column == "bits_per_base" else 0.25, horizontal=True)
    windows = compact(max(row["length"] for result in results for row in result.rows))
    name_panel(axes[0], f"held-out contigs, windows of {windows} tokens")
    finish(figure, axes, results, path)


def strands_figure(results: Sequence[ModelResult], path: Path) -> None:
    """How much the bits of the two strands of a window differ, and how alike windows rank by either."""
    results = mean_of_seeds(results, LENGTH.column)
    figure, axes = panels(1, 2, width=4.6, height=3.9)
    curves(axes[0], results, "difference", "mean |difference|, bits per base", linear=True)
    curves(axes[1], results, "pearson_r", "Pearson r", linear=True)
    name_panel(axes[0], "a window and its reverse complement")
    name_panel(axes[1], "windows and their reverse complements")
    axes[0].set_ylim(bottom=0)
    finish(figure, axes, results, path)


def _filled(results: Sequence[ModelResult], column: str) -> list[ModelResult]:
    """Results whose rows all have a column; NaN, which is not drawn, where they had none."""

    def rows(of: list[dict]) -> list[dict]:
        return [{column: math.nan} | row for row in of]

    found = [replace(result, rows=rows(result.rows)) for result in results]
    return [replace(r, low=rows(r.low), high=rows(r.high)) if isinstance(r, SeedMean) else r for r in found]


def _look_at_models(
    axis, results: Sequence[ModelResult], column: str, chance: float, *, horizontal: bool = False
) -> None:
    """Bounds that hold every model, Markov chain and ``chance``. Compressors pay for headers in short windows: those that leave
    the view are named at its edge."""

    def values(of: ModelResult) -> list[float]:
        return [row[column] for row in of.rows if math.isfinite(row.get(column, math.nan))]

    shown = [chance, *(v for r in results if r.method not in COMPRESSORS for v in values(r))]
    room = ROOM * (max(shown) - min(shown)) or ROOM * chance
    low, high = min(shown) - room, max(shown) + room
    (axis.set_xlim if horizontal else axis.set_ylim)(low, high)
    beyond = [f"{r.label} to {max(values(r)):.2f}" for r in results if values(r) and max(values(r)) > high]
    if beyond:
        axis.annotate(
            "out of view: " + ", ".join(beyond),
            (0.01, 0.99),
            xycoords="axes fraction",
            va="top",
            fontsize=7,
            color="0.35",
        )


def _rule(axis, value: float, text: str) -> None:
    axis.axhline(value, **RULE)
    axis.annotate(
        text, (0.99, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5, color="0.35"
    )
