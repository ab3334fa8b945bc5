"""Evaluators of attention weights: `sinks` by layer on held-out text, and `heads` one by one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from modalities.analysis import Analysis, analyse
from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of
from modalities.evaluation import Cell, Listing
from modalities.figures import finish, panels, styles_of
from modalities.prior_plot import retrieval_heads
from modalities.results import (
    Axis,
    CellValue,
    ModelResult,
    Row,
    Score,
    mean_of_rows,
    mean_of_seeds,
    short_names,
)
from modalities.settings import Settings, option
from modalities.tables import print_table
from modalities.text.evaluation import HaystackEvaluator, TextEvaluator
from modalities.text.prompts import Template
from modalities.text.tokenizers import load_tokenizer
from zoo.layers import Attention

if TYPE_CHECKING:
    from rich.console import Console


# `sinks` leaves out rows that see fewer keys: the sink's share of a short row says little.
MIN_KEYS = 16
# Edges of bins of ω, in logits, half an octave each; the outer bins hold values beyond the ends.
RANGE_EDGES = 2.0 ** (np.arange(-4, 15) / 2)
# A bin of ω with fewer rows has no value.
MIN_ROWS = 20
# Margins are clamped to ± this many logits: steep priors have 1e15, which would drown a mean.
MAX_MARGIN = 100.0
# Heads of a model that the console lists.
MAX_HEADS = 12


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """`samples` counts texts."""

    length: int | None = option(None, "tokens of a text; default: the training length", parse=int)


class _AttentionEvaluator(TextEvaluator[AttentionSettings]):
    """Analyses the attention of all layers on `samples` texts (default 16), a cell each."""

    unit = "samples"

    @abstractmethod
    def text(
        self, model: Decoder, length: int, index: int
    ) -> tuple[np.ndarray, Sequence[int] | None, list]:
        """(token ids, queries to analyse, spans of the answer) of a text, the same in every run.

        Queries are token numbers, None for all; a span is (start, stop).
        """

    @abstractmethod
    def describe_texts(self, model: Decoder, length: int) -> None:
        """Set `data_line`."""

    def text_length(self, model: Decoder) -> int:
        return self.settings.length or model.config.train_context

    def analyse_text(self, model: Decoder, index: int) -> list[Analysis]:
        """The attention of each layer on the text of an index."""
        ids, queries, spans = self.text(model, self.text_length(model), index)
        batch = torch.as_tensor(ids, device=device_of(model))[None]
        return analyse(model, batch, rows=queries, spans=spans)

    def cells(self, model: Decoder) -> list[Cell]:
        length = self.text_length(model)
        # A text that cannot be made is an error before anything is measured.
        self.text(model, length, 0)
        self.describe_texts(model, length)
        count = self.settings.samples or 16
        return [Cell(f"sample={n}", cost=1, data={"index": n}) for n in range(count)]


class Sinks(_AttentionEvaluator):
    """Weight of the first key by layer, against ω = max − min of a row's content logits.

    As in fig. 2c of GOAT.

    | column | mean over heads and rows that see at least 16 keys |
    |---|---|
    | `sink_mass` | weight of the first key |
    | `sink_mass_by_range` | the same in bins of ω whose middles are `range_to` |
    | `content_range` | ω, in logits |
    | `divergence`, `entropy` | KL(p‖π) and H(p), in nats |
    | `content_margin` | content logits of the sink less the best other key's; within ±100 |
    | `prior_margin` | the same of the prior's logits |
    """

    name = "sinks"
    summary = "weight of the attention sink by layer, against the range of the content's logits"
    scores: tuple[Score, ...] = (
        Score("sink_mass", unit_interval=True),
        Score("content_range"),
        Score("divergence"),
        Score("entropy"),
        Score("content_margin"),
        Score("prior_margin"),
    )
    axis = Axis("layer", "layer", str, "train_tokens")

    def points(self, model: Decoder) -> tuple[int, ...]:
        return tuple(range(len(model.layers)))

    def identity(self, model: Decoder) -> Row:
        return {"length": self.settings.length, "text": self.heldout_for(model).fingerprint}

    def describe_texts(self, model: Decoder, length: int) -> None:
        self.describe(self.heldout_for(model).items, length)

    def text(self, model: Decoder, length: int, index: int) -> tuple[np.ndarray, None, list]:
        """BOS and a stretch of a document; documents take turns, with the next tokens each time."""
        documents = [d.tokens for d in self.heldout_for(model).items if len(d.tokens) >= length]
        if not documents:
            raise ValueError(
                f"no held-out document of {self.text_name} has {length} tokens; "
                "choose a shorter --length"
            )
        tokens = documents[index % len(documents)]
        # The stretch moves on with each turn of a document, and wraps round at its end.
        turn = index // len(documents)
        start = turn * length % (len(tokens) - length + 1)
        bos = load_tokenizer(model.config.tokenizer).bos_id
        return np.concatenate([[bos], tokens[start : start + length - 1]]), None, []

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        layers = []
        for analysis in self.analyse_text(model, cell.data["index"]):
            values = {}
            for score in self.scores:
                values[score.column] = getattr(analysis, score.column)[analysis.seen >= MIN_KEYS]
            for name in ("content_margin", "prior_margin"):
                values[name] = values[name].clamp(-MAX_MARGIN, MAX_MARGIN)
            mass = values["sink_mass"].numpy()
            ranges = values["content_range"].numpy()
            num_bins = len(RANGE_EDGES) - 1
            bins = np.clip(np.searchsorted(RANGE_EDGES, ranges) - 1, 0, num_bins - 1)
            layer = {name: float(value[value.isfinite()].mean()) for name, value in values.items()}
            # Sums and counts, which `rows` adds over texts before it divides.
            layer["mass_sum"] = np.bincount(bins, weights=mass, minlength=num_bins).tolist()
            layer["rows"] = np.bincount(bins, minlength=num_bins).tolist()
            layers.append(layer)
        return {"layers": layers}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        columns = [score.column for score in self.scores]
        middles = np.sqrt(RANGE_EDGES[:-1] * RANGE_EDGES[1:]).tolist()
        layers_of_texts = [cell["layers"] for cell in cells.values()]
        # One layer, as each text measured it.
        for number, texts in enumerate(zip(*layers_of_texts, strict=True)):
            row: Row = {"layer": number}
            scores_by_text = []
            for text in texts:
                scores_by_text.append({name: text[name] for name in columns})
            row |= mean_of_rows(scores_by_text)
            mass_sums = np.sum([text["mass_sum"] for text in texts], axis=0)
            counts = np.sum([text["rows"] for text in texts], axis=0)
            # Bins of few rows stay NaN.
            means = np.full(len(mass_sums), np.nan)
            np.divide(mass_sums, counts, out=means, where=counts >= MIN_ROWS)
            row["range_to"] = middles
            row["sink_mass_by_range"] = means.tolist()
            rows.append(row)
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """A panel for each layer: weight of the sink against ω."""
        results = mean_of_seeds(results, self.axis.column)
        num_layers = max(len(result.rows) for result in results)
        columns = min(4, num_layers)
        # The axis ends at 0.02 or above: of models without a sink, noise would fill the panel.
        masses = [0.02]
        for result in results:
            for row in result.rows:
                masses += row["sink_mass_by_range"]
        top = np.nanmax(masses)
        figure, axes = panels(math.ceil(num_layers / columns), columns, width=3.4, height=3.2)
        for layer, axis in enumerate(axes):
            # The last row of panels may have more of them than there are layers.
            axis.set_visible(layer < num_layers)
            for result, style in zip(results, styles_of(results), strict=True):
                if layer < len(result.rows):
                    row = result.rows[layer]
                    line = style | {"markersize": 4.0}
                    axis.plot(row["range_to"], row["sink_mass_by_range"], **line)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set(
                title=f"layer {layer}",
                xlabel="ω, range of content logits",
                ylim=(-0.04 * top, 1.06 * top),
            )
            axis.grid(alpha=0.25, linewidth=0.6)
        axes[0].set_ylabel("weight of the sink")
        finish(figure, axes, results, path)


class Heads(
    Listing[AttentionSettings, Decoder], HaystackEvaluator[AttentionSettings], _AttentionEvaluator
):
    """What each head attends to where a text asks for one of its facts, and its prior's parameters.

    Figures of docs/PAPERS.md are made of it.

    | column | of a head at the text's last token, mean over texts |
    |---|---|
    | `answer_mass` | weight on the tokens of the answer, wherever they stand |
    | `distance` | mean distance of the keys by weight, in tokens |
    | `entropy`, `divergence` | H(p) and KL(p‖π), in nats |
    | `log_z` | how far content and prior disagree, ln Z in nats |
    | `content_range`, `sink_mass` | ω in logits, weight of the first key |
    | `retrieval` | 1 where the prior looks away from the query (θβ < 0) |
    | `theta_beta`, …, `ssmax.s` | parameters of the head, by their names in the state dict |

    Seeds are listed apart: heads of one number are not the same head in two trainings.
    """

    name = "heads"
    summary = "what each head looks at, the answer or how far, and its prior's parameters"
    scores: tuple[Score, ...] = (
        Score("answer_mass"),
        Score("distance"),
        Score("entropy"),
        Score("divergence"),
        Score("log_z"),
        Score("content_range"),
        Score("sink_mass"),
    )
    axis = Axis("head", "layer.head", str, "train_tokens")
    filler = "own"

    def identity(self, model: Decoder) -> Row:
        return {"length": self.settings.length, "seed": 42, "hay": self.haystack(model).fingerprint}

    def describe_texts(self, model: Decoder, length: int) -> None:
        self.describe_hay(model, length)

    def text(self, model: Decoder, length: int, index: int) -> tuple[np.ndarray, list[int], list]:
        """(a prompt, its last token, every span of the answer in it).

        The last token's query predicts the answer's first token.
        """
        rng = np.random.default_rng([42, length, index, 1])
        tokenizer = load_tokenizer(model.config.tokenizer)
        haystack = self.haystack(model)
        depth = rng.random()
        try:
            prompt, answer, *_ = Template().draw(length, depth, rng, tokenizer, haystack)
        except ValueError as error:
            advice = "; give --length" if self.settings.length is None else ""
            raise ValueError(f"heads: {error}{advice}") from error
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(answer))
        starts = np.flatnonzero((windows == answer).all(1)).tolist()
        if not starts:
            raise ValueError("the answer is cut into other tokens where it is stated")
        return prompt, [len(prompt) - 1], [(start, start + len(answer)) for start in starts]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        heads = []
        for layer, analysis in zip(
            model.layers, self.analyse_text(model, cell.data["index"]), strict=True
        ):
            columns: dict[str, list[float]] = {}
            for score in self.scores:
                if score.column == "answer_mass":
                    values = analysis.mass.sum(-1)
                else:
                    values = getattr(analysis, score.column)
                columns[score.column] = values.nanmean(dim=(0, 2)).tolist()
            num_heads = analysis.entropy.shape[1]
            columns |= _head_parameters(layer, num_heads)
            for h in range(num_heads):
                head = {"head": f"{analysis.layer}.{h}"}
                heads.append(head | {name: by_head[h] for name, by_head in columns.items()})
        return {"heads": heads}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        heads_of_texts = [cell["heads"] for cell in cells.values()]
        return [mean_of_rows(texts) for texts in zip(*heads_of_texts, strict=True)]

    def show(self, results: list[ModelResult], console: Console) -> None:
        """The heads of each model with most weight on the answer."""
        measures = [score.column for score in self.scores]
        for result, name in zip(results, short_names(results), strict=True):
            parameters = [column for column in result.rows[0] if column not in {"head", *measures}]
            # As many as fit beside the head, 13 characters each: two measures, then parameters.
            columns = [*measures[:2], *parameters, *measures[2:]]
            columns = columns[: max(2, (console.width - 4) // 13 - 1)]
            rows = sorted(result.rows, key=lambda row: -row["answer_mass"])[:MAX_HEADS]
            cells = []
            for row in rows:
                cells.append([row["head"], *(f"{row[column]:.3f}" for column in columns)])
            print_table(console, f"{name}: heads by answer_mass", ["head"], columns, cells)


def _head_parameters(layer: nn.Module, heads: int) -> dict[str, list[float]]:
    """Columns (H,): `retrieval`, and parameters of prior and SSMax that are one number a head.

    A layer of another package's model has `retrieval` alone, all 0.
    """
    attention = getattr(layer, "attention", None)
    if not isinstance(attention, Attention):
        return {"retrieval": [0.0] * heads}
    prior = attention.prior
    ssmax = attention.ssmax
    columns: dict[str, Tensor] = {"retrieval": torch.tensor(retrieval_heads(attention))}
    for name, parameter in prior.named_parameters():
        if parameter.shape == (prior.num_heads,):
            columns[name] = parameter
    if ssmax is not None:
        columns["ssmax.s"] = ssmax.scales()
    return {name: column.detach().double().tolist() for name, column in columns.items()}
