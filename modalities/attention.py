"""Evaluators that look into attention, for every modality: its sink by layer, and what each head looks at.

A modality subclasses both and says what its samples are (`AttentionEvaluator.probe`); measures are those of `zoo.analysis`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn

from modalities.evaluation import Axis, Cell, CellValue, Evaluator, Listing, ModelResult, Row, Score
from modalities.figures import finish, log_if_wide, panels, styles_of
from modalities.paired import Place
from modalities.results import mean_of_rows, mean_of_seeds, short_names
from zoo.analysis import Analysis, analyse
from zoo.layers import Attention
from zoo.prior_plot import LayerLogPrior

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AttentionEvaluator", "Heads", "Probe", "Sinks"]

# Rows that see fewer keys are left out of `sinks`: the sink's share of a short row says little.
SEEN = 16
# Half octaves of ω, in logits; values beyond the ends are in the outer ones.
EDGES = 2.0 ** (np.arange(-4, 15) / 2)
FEWEST = 20  # rows of a bin that is drawn
Layered = Any  # a model of any modality, with `layers` and `train_positions()`
MARGIN = 100.0  # logits; steep priors have margins of 1e15, which would drown a mean


@dataclass(frozen=True)
class Probe:
    """One input of a model, as a batch of one."""

    inputs: tuple[Tensor, ...]  # of the model's `forward_features`
    places: Tensor  # (S, n) where its tokens are, NaN for tokens without a place (see `zoo.analysis.analyse`)
    rows: Sequence[int] | None = None  # the queries to look at; None for all
    spans: Sequence[tuple[int, int]] = ()  # (start, stop) of the keys that hold the answer


class AttentionEvaluator(Evaluator):
    """Looks into the attention of all layers at `samples` probes, a cell each."""

    unit = "samples"
    default_samples: ClassVar[int] = 16

    @abstractmethod
    def probe(self, model: Layered, index: int) -> Probe:
        """The probe of this index, the same in every run."""

    def sink(self, model: Layered) -> int:
        """The key that is called the sink: by default the first, which every query of a line sees."""
        return 0

    def look(self, model: Layered, cell: Cell) -> list[Analysis]:
        probe = self.probe(model, cell.data["index"])
        sink = self.sink(model)
        return analyse(model, *probe.inputs, rows=probe.rows, spans=probe.spans, places=probe.places, sink=sink)

    def trained_at(self, model: Layered) -> int:
        """Tokens of a training sample."""
        return model.train_positions().length

    def identity(self, model: Layered) -> Row:
        return {name: value for name, value in super().identity(model).items() if name != "samples"}

    def points(self, model: Layered) -> tuple[Place, ...]:
        return tuple(range(len(model.layers)))

    def cells(self, model: Layered) -> list[Cell]:
        self.probe(model, 0)  # what cannot be made is an error before anything is measured
        count = self.settings.samples or self.default_samples
        return [Cell(f"sample={n}", cost=1, data={"index": n}) for n in range(count)]


class Sinks(AttentionEvaluator):
    """How much weight the sink has by layer, against the signal ω = max − min of a row's content logits (GOAT, fig. 2c).

    | column | mean over heads and rows that see at least 16 keys |
    |---|---|
    | `sink_mass` | weight of the sink; `sink_mass_by_range` in bins of ω whose middles are `range_to` |
    | `content_range` | ω, in logits |
    | `divergence`, `entropy` | KL(p‖π) and H(p), in nats |
    | `content_margin`, `prior_margin` | logits of the sink less the best other key's, by content and by prior; within ±100 |

    The first key of the text is the sink; in images the class token, or without one the patch with the most weight.
    """

    name = "sinks"
    summary = "weight of the attention sink by layer, against the range of the content's logits"
    scores: tuple[Score, ...] = (
        Score("sink_mass", unit_interval=True),
        *map(Score, ("content_range", "divergence", "entropy", "content_margin", "prior_margin")),
    )
    axis = Axis("layer", "layer", str, "train_tokens")

    def measure(self, model: Layered, cell: Cell) -> CellValue:
        layers = []
        for analysis in self.look(model, cell):
            long = analysis.seen >= SEEN
            values = {score.column: getattr(analysis, score.column)[long] for score in self.scores}
            values |= {name: values[name].clamp(-MARGIN, MARGIN) for name in ("content_margin", "prior_margin")}
            mass, signal = values["sink_mass"].numpy(), values["content_range"].numpy()
            bins = np.clip(np.searchsorted(EDGES, signal) - 1, 0, len(EDGES) - 2)
            means = {name: float(value[value.isfinite()].mean()) for name, value in values.items()}
            sums = np.bincount(bins, weights=mass, minlength=len(EDGES) - 1).tolist()
            layers.append(means | {"mass_sum": sums, "rows": np.bincount(bins, minlength=len(EDGES) - 1).tolist()})
        return {"layers": layers}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows, middles = [], np.sqrt(EDGES[:-1] * EDGES[1:]).tolist()
        for layer, probes in enumerate(zip(*(cell["layers"] for cell in cells.values()), strict=True)):
            mass, count = (np.sum([probe[name] for probe in probes], axis=0) for name in ("mass_sum", "rows"))
            means = mean_of_rows([{score.column: probe[score.column] for score in self.scores} for probe in probes])
            by_range = np.divide(mass, count, out=np.full(len(mass), np.nan), where=count >= FEWEST)
            rows.append({"layer": layer} | means | {"range_to": middles, "sink_mass_by_range": by_range.tolist()})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """A panel for each layer: weight of the sink against ω."""
        results = mean_of_seeds(results, self.axis.column)
        layers = max(len(result.rows) for result in results)
        across = min(4, layers)
        most = np.nanmax([0.02, *(v for r in results for row in r.rows for v in row["sink_mass_by_range"])])
        figure, axes = panels(math.ceil(layers / across), across, width=3.4, height=3.2)
        for layer, axis in enumerate(axes):
            axis.set_visible(layer < layers)
            for result, style in zip(results, styles_of(results), strict=True):
                if layer < len(result.rows):
                    row = result.rows[layer]
                    axis.plot(row["range_to"], row["sink_mass_by_range"], **style | {"markersize": 4.0})
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set(title=f"layer {layer}", xlabel="ω, range of content logits", ylim=(-0.04 * most, 1.06 * most))
            axis.grid(alpha=0.25, linewidth=0.6)
        axes[0].set_ylabel("weight of the sink")
        finish(figure, axes, results, path)


class Heads(Listing, AttentionEvaluator):
    """What each head looks at, and its prior's parameters (BAM, fig. 4, 5, 14, 17, 18).

    | column | of a head, mean over samples |
    |---|---|
    | `answer_mass` | weight on the keys that hold the answer, where samples have one |
    | `distance` | mean distance of the keys by weight, in tokens or patches |
    | `entropy`, `divergence`, `log_z` | H(p), KL(p‖π), and how far content and prior disagree, ln Z; nats |
    | `content_range`, `sink_mass` | ω in logits, weight of the sink |
    | `retrieval` | 1 where the prior looks away from the query (θβ < 0) |
    | `theta_beta`, …, `ssmax.s` | the prior's parameters of the head, by their names in the state dict |

    Seeds are listed apart: the order of heads means nothing.
    """

    name = "heads"
    summary = "what each head looks at, the answer or how far, and its prior's parameters"
    scores: tuple[Score, ...] = tuple(
        map(Score, ("answer_mass", "distance", "entropy", "divergence", "log_z", "content_range", "sink_mass"))
    )
    axis = Axis("head", "layer.head", str, "train_tokens")

    def measure(self, model: Layered, cell: Cell) -> CellValue:
        heads = []
        for layer, analysis in zip(model.layers, self.look(model, cell), strict=True):
            mass = analysis.mass.sum(-1) if analysis.mass.shape[-1] else analysis.entropy * math.nan
            values = {score.column: getattr(analysis, score.column, mass) for score in self.scores}
            columns = {name: value.nanmean(dim=(0, 2)).tolist() for name, value in values.items()}
            columns |= _head_parameters(layer, len(analysis.heads))
            for h in range(len(analysis.heads)):
                head = {"head": f"{analysis.layer}.{h}", "heads": len(analysis.heads)}
                heads.append(head | {name: by_head[h] for name, by_head in columns.items()})
        return {"heads": heads}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        return [mean_of_rows(probes) for probes in zip(*(cell["heads"] for cell in cells.values()), strict=True)]

    def show(self, results: list[ModelResult], console: Console, count: int = 12) -> None:
        """The heads of each model with most of the measure that the figure draws."""
        from rich.box import SIMPLE_HEAD  # here: tools/gpu.py trains models where nothing is installed
        from rich.table import Table

        what, measures = _shown(results), [score.column for score in self.scores]
        for result, name in zip(results, short_names(results), strict=True):
            table = Table(title=f"{name}: heads by {what}", title_justify="left", box=SIMPLE_HEAD)
            parameters = [column for column in result.rows[0] if column not in {"head", "heads", *measures}]
            known = dict.fromkeys([what, "distance", *parameters, *measures])
            columns = ["head", *(c for c in known if any(_value(row, c) is not None for row in result.rows))]
            columns = columns[: max(3, (console.width - 4) // 13)]
            for column in columns:
                table.add_column(column, justify="left" if column == "head" else "right", overflow="fold")
            for row in sorted(result.rows, key=lambda row: -row[what])[:count]:
                table.add_row(row["head"], *(f"{row[column]:.3f}" for column in columns[1:]))
            console.print(table)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """The measure by head, heads of a layer side by side; filled where the prior looks away from the query."""
        what = _shown(results)
        figure, (axis,) = panels(1, 1, width=5.2, height=3.9)
        for result, style in zip(results, styles_of(results), strict=True):
            for retrieval in (False, True):
                rows = [
                    row for row in result.rows if (row["retrieval"] > 0) == retrieval and _value(row, what) is not None
                ]
                fill = {"markerfacecolor": style["color"] if retrieval else "none", "linestyle": ""}
                label = {"label": style["label"] if not retrieval else "_"}
                axis.plot([_across(row) for row in rows], [row[what] for row in rows], **style | fill | label)
        layers = 1 + max(int(row["head"].partition(".")[0]) for result in results for row in result.rows)
        axis.set_xticks(range(layers))
        ylabel = "weight on the answer" if what == "answer_mass" else "mean distance of the keys"
        axis.set(xlabel="layer (heads side by side)", ylabel=ylabel)
        axis.grid(alpha=0.25, linewidth=0.6)
        if what == "answer_mass":
            axis.set_ylim(-0.04, 1.04)
        else:
            log_if_wide(axis, [row[what] for result in results for row in result.rows])
        if any(row["retrieval"] for result in results for row in result.rows):
            figure.suptitle("filled: retrieval heads, whose prior looks away from the query", fontsize=9)
        finish(figure, [axis], results, path)


def _head_parameters(layer: nn.Module, heads: int) -> dict[str, list[float]]:
    """(H,) each: `retrieval`, and parameters of the prior and of SSMax that are one number a head; 0s of layers of others."""
    attention = getattr(layer, "attention", None)
    if not isinstance(attention, Attention):
        return {"retrieval": [0.0] * heads}
    prior, ssmax = attention.prior, attention.ssmax
    columns = {"retrieval": LayerLogPrior(attention).retrieval_heads()}
    columns |= {name: p for name, p in prior.named_parameters() if p.shape == (prior.num_heads,)}
    columns |= {} if ssmax is None else {"ssmax.s": ssmax.s}
    return {name: column.detach().double().tolist() for name, column in columns.items()}


def _across(row: Row) -> float:
    """Where a head is drawn: heads of a layer side by side about its number."""
    layer, head = map(int, row["head"].split("."))
    return layer + 0.6 * (head / max(1, row["heads"] - 1) - 0.5)


def _value(row: Row, name: str) -> float | None:
    """The number in column `name`; None where there is none."""
    value = row.get(name)
    return None if value is None or math.isnan(value) else value


def _shown(results: Sequence[ModelResult]) -> str:
    """The measure that tables and figures are about."""
    answers = any(_value(row, "answer_mass") is not None for result in results for row in result.rows)
    return "answer_mass" if answers else "distance"
