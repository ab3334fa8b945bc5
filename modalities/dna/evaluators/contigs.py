"""Bits per base of each held-out contig at one length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.dna.baselines import BASELINES
from modalities.dna.evaluators.bits import Bits, LikelihoodSettings, by_contig, parts, summary, view, with_styles
from modalities.dna.splits import Region
from modalities.evaluation import Axis, CellValue, ModelResult, Observed, Score, Settings
from modalities.figures import RULE, finish, panels
from modalities.results import SeedMean, compact, mean_of_seeds
from zoo.model import ZooModel

__all__ = ["Contigs"]


class Contigs(Bits):
    """Bits per base and accuracy of each held-out contig, in windows of one length: the last of `lengths`, by default four
    times the training length. A contig without room for a window is one shorter window: its longest region.

    Windows lie where their length puts them: at another length other bases are read. `bits` compares lengths on the same bases.
    """

    name = "contigs"
    version = 1
    summary = "NLL, bits per base and next-base accuracy of each held-out contig at one length"
    scores: tuple[Score, ...] = (Score("bits_per_base"), Score("accuracy"), Score("token_accuracy"))
    settings_class: ClassVar[type[Settings]] = LikelihoodSettings
    axis = Axis("contig", "held-out contig")
    paired_over = "stretches"

    def points(self, model: ZooModel) -> tuple[str, ...]:
        return tuple(self.heldout.items.contigs)

    def lengths(self, model: ZooModel) -> tuple[int, ...]:
        return (self.settings.lengths[-1] if self.settings.lengths else 4 * self.trained_at(model),)

    def stretch(self, model: ZooModel) -> int:
        return self.lengths(model)[-1]

    def stretches(self, length: int, count: int, seed: int) -> dict[str, list[Region]]:
        data = self.heldout.items
        short = {name: region for name in data.contigs if len(region := data.longest(name)) < length}
        found = data.stretches(length, count, seed) if len(short) < len(data.contigs) else {}
        found |= {name: [region] for name, region in short.items()}
        return {name: found[name] for name in data.contigs if name in found}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Every stretch of a contig."""
        for k in range(len(cell["bits"])):
            yield from parts(cell["contig"], f"{name}/{k}", cell, slice(k, k + 1))

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return [
            {"contig": name, "length": mine[0]["length"]} | summary(mine)
            for name, mine in by_contig(list(cells.values())).items()
        ]

    def show(self, results: list[ModelResult], console: Any) -> None:
        """Which of several lengths was read."""
        if len(self.settings.lengths or ()) > 1:
            console.print(
                f"note: {self.name} reads windows of one length, here {self.settings.lengths[-1]:,} bases; the other --lengths "
                "were not measured (`bits` measures several, on the same bases)",
                soft_wrap=True,
            )

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """A marker for every model and held-out contig, baselines as ticks."""
        results, styles = with_styles(mean_of_seeds(results, self.axis.column), _mean_bits)
        contigs = list(dict.fromkeys(row["contig"] for result in results for row in result.rows))
        scored = any("accuracy" in row for result in results for row in result.rows)
        figure, axes = panels(1, 1 + scored, width=5.2, height=1.8 + max(0.42, 0.07 * len(results)) * len(contigs))
        labels = {"bits_per_base": "bits per base, less is better", "accuracy": "next base predicted right"}
        for axis, (column, label), chance in zip(axes, labels.items(), (2.0, 0.25), strict=False):
            for k, (result, style) in enumerate(zip(results, styles, strict=True)):
                marker = {} if style["marker"] else {"marker": "|", "markersize": 9.0, "markeredgewidth": 1.6}
                _dots(axis, result, column, contigs, 0.62 * ((k + 0.5) / len(results) - 0.5), style | marker)
            axis.set(ylim=(len(contigs) - 0.5, -0.5), xlim=view(results, column, chance), xlabel=label)
            axis.set_yticks(range(len(contigs)), contigs if axis is axes[0] else [])
            axis.axvline(chance, **RULE)
            axis.grid(axis="x", alpha=0.25, linewidth=0.6)
            for edge in range(1, len(contigs)):
                axis.axhline(edge - 0.5, color="0.85", linewidth=0.6, zorder=0)
        windows = compact(max(row["length"] for result in results for row in result.rows))
        figure.suptitle(f"held-out contigs, windows of {windows} bases", fontsize=11)
        finish(figure, axes, results, path, unseeded=BASELINES)


def _dots(axis: Any, result: ModelResult, column: str, contigs: list[str], lift: float, style: dict[str, Any]) -> None:
    """One model's marker in the line of each contig, `lift` below its middle."""
    rows = [row for row in result.rows if column in row]
    places = [contigs.index(row["contig"]) + lift for row in rows]
    axis.plot([row[column] for row in rows], places, **style | {"linestyle": "none"})
    if isinstance(result, SeedMean):
        ends = ([row[column] for row in r if column in row] for r in (result.low, result.high))
        axis.hlines(places, *ends, color=style["color"], linewidth=1.0, zorder=2)


def _mean_bits(result: ModelResult) -> float:
    return float(np.mean([row["bits_per_base"] for row in result.rows]))
