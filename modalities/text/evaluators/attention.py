"""Evaluators that look into attention: its sink by layer on held-out text, and what each head looks
at."""

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
from modalities.text.prompts import Template
from modalities.text.retrieval import HaystackEvaluator, TextEvaluator
from modalities.text.tokenizers import load_tokenizer
from zoo.layers import Attention

if TYPE_CHECKING:
    from rich.console import Console


# Rows that see fewer keys are left out of `sinks`: the sink's share of a short row says little.
SEEN = 16
# Half octaves of ω, in logits; values beyond the ends are in the outer ones.
EDGES = 2.0 ** (np.arange(-4, 15) / 2)
FEWEST = 20  # rows of a bin that is drawn
MARGIN = 100.0  # logits; steep priors have margins of 1e15, which would drown a mean
SHOWN = 12  # heads in the console


@dataclass(frozen=True)
class AttentionSettings(Settings):
    """`samples` counts texts."""

    length: int | None = option(None, "tokens of a text; default: the training length", parse=int)


class _Look(TextEvaluator[AttentionSettings]):
    """Looks into the attention of all layers at `samples` texts (default 16), a cell each."""

    unit = "samples"

    @abstractmethod
    def text(
        self, model: Decoder, length: int, index: int
    ) -> tuple[np.ndarray, Sequence[int] | None, list]:
        """Of this index, the same in every run: token ids, the queries to look at (None: all),
        (start, stop) of an answer."""

    @abstractmethod
    def describe_texts(self, model: Decoder, length: int) -> None:
        """Sets `data_line`."""

    def look(self, model: Decoder, index: int) -> list[Analysis]:
        ids, rows, spans = self.text(
            model, self.settings.length or model.config.train_context, index
        )
        return analyse(
            model, torch.as_tensor(ids, device=device_of(model))[None], rows=rows, spans=spans
        )

    def cells(self, model: Decoder) -> list[Cell]:
        length = self.settings.length or model.config.train_context
        self.text(model, length, 0)  # what cannot be made is an error before anything is measured
        self.describe_texts(model, length)
        return [
            Cell(f"sample={n}", cost=1, data={"index": n})
            for n in range(self.settings.samples or 16)
        ]


class Sinks(_Look):
    """How much weight the first key has by layer, against the signal ω = max − min of a row's
    content logits (GOAT, fig. 2c).

    | column | mean over heads and rows that see at least 16 keys |
    |---|---|
    | `sink_mass` | weight of the first key; `sink_mass_by_range` in bins of ω whose middles are
    `range_to` |
    | `content_range` | ω, in logits |
    | `divergence`, `entropy` | KL(p‖π) and H(p), in nats |
    | `content_margin`, `prior_margin` | logits of the sink less the best other key's, by content
    and by prior; within ±100 |
    """

    name = "sinks"
    summary = "weight of the attention sink by layer, against the range of the content's logits"
    scores: tuple[Score, ...] = (
        Score("sink_mass", unit_interval=True),
        *map(Score, ("content_range", "divergence", "entropy", "content_margin", "prior_margin")),
    )
    axis = Axis("layer", "layer", str, "train_tokens")

    def points(self, model: Decoder) -> tuple[int, ...]:
        return tuple(range(len(model.layers)))

    def identity(self, model: Decoder) -> Row:
        return {"length": self.settings.length, "text": self.heldout_for(model).fingerprint}

    def describe_texts(self, model: Decoder, length: int) -> None:
        self.describe(self.heldout_for(model).items, length)

    def text(self, model: Decoder, length: int, index: int) -> tuple[np.ndarray, None, list]:
        """BOS and the first tokens of a document, or its next ones where documents are few."""
        documents = [d.tokens for d in self.heldout_for(model).items if len(d.tokens) >= length]
        if not documents:
            raise ValueError(
                f"no held-out document of {self.text_name} has {length} tokens; choose a shorter --length"
            )
        tokens = documents[index % len(documents)]
        start = index // len(documents) * length % (len(tokens) - length + 1)
        bos = load_tokenizer(model.config.tokenizer).bos_id
        return np.concatenate([[bos], tokens[start : start + length - 1]]), None, []

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        layers = []
        for analysis in self.look(model, cell.data["index"]):
            values = {
                score.column: getattr(analysis, score.column)[analysis.seen >= SEEN]
                for score in self.scores
            }
            values |= {
                name: values[name].clamp(-MARGIN, MARGIN)
                for name in ("content_margin", "prior_margin")
            }
            mass = values["sink_mass"].numpy()
            signal = values["content_range"].numpy()
            bins = np.clip(np.searchsorted(EDGES, signal) - 1, 0, len(EDGES) - 2)
            means = {name: float(value[value.isfinite()].mean()) for name, value in values.items()}
            sums = np.bincount(bins, weights=mass, minlength=len(EDGES) - 1).tolist()
            layers.append(
                means
                | {"mass_sum": sums, "rows": np.bincount(bins, minlength=len(EDGES) - 1).tolist()}
            )
        return {"layers": layers}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        middles = np.sqrt(EDGES[:-1] * EDGES[1:]).tolist()
        for layer, texts in enumerate(
            zip(*(cell["layers"] for cell in cells.values()), strict=True)
        ):
            mass, count = (
                np.sum([text[name] for text in texts], axis=0) for name in ("mass_sum", "rows")
            )
            means = mean_of_rows(
                [{score.column: text[score.column] for score in self.scores} for text in texts]
            )
            by_range = np.divide(mass, count, out=np.full(len(mass), np.nan), where=count >= FEWEST)
            rows.append(
                {"layer": layer}
                | means
                | {"range_to": middles, "sink_mass_by_range": by_range.tolist()}
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """A panel for each layer: weight of the sink against ω."""
        results = mean_of_seeds(results, self.axis.column)
        layers = max(len(result.rows) for result in results)
        across = min(4, layers)
        most = np.nanmax(
            [0.02, *(v for r in results for row in r.rows for v in row["sink_mass_by_range"])]
        )
        figure, axes = panels(math.ceil(layers / across), across, width=3.4, height=3.2)
        for layer, axis in enumerate(axes):
            axis.set_visible(layer < layers)
            for result, style in zip(results, styles_of(results), strict=True):
                if layer < len(result.rows):
                    row = result.rows[layer]
                    axis.plot(
                        row["range_to"], row["sink_mass_by_range"], **style | {"markersize": 4.0}
                    )
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set(
                title=f"layer {layer}",
                xlabel="ω, range of content logits",
                ylim=(-0.04 * most, 1.06 * most),
            )
            axis.grid(alpha=0.25, linewidth=0.6)
        axes[0].set_ylabel("weight of the sink")
        finish(figure, axes, results, path)


class Heads(Listing[AttentionSettings, Decoder], HaystackEvaluator[AttentionSettings], _Look):
    """What each head looks at where a fact of a text is asked for, and its prior's parameters
    (figures of docs/PAPERS.md).

    | column | of a head at the text's last token, mean over texts |
    |---|---|
    | `answer_mass` | weight on the tokens of the answer, wherever they stand |
    | `distance` | mean distance of the keys by weight, in tokens |
    | `entropy`, `divergence`, `log_z` | H(p), KL(p‖π), and how far content and prior disagree, ln
    Z; nats |
    | `content_range`, `sink_mass` | ω in logits, weight of the first key |
    | `retrieval` | 1 where the prior looks away from the query (θβ < 0) |
    | `theta_beta`, …, `ssmax.s` | the prior's parameters of the head, by their names in the state
    dict |

    Seeds are listed apart: the order of heads means nothing.
    """

    name = "heads"
    summary = "what each head looks at, the answer or how far, and its prior's parameters"
    scores: tuple[Score, ...] = tuple(
        map(
            Score,
            (
                "answer_mass",
                "distance",
                "entropy",
                "divergence",
                "log_z",
                "content_range",
                "sink_mass",
            ),
        )
    )
    axis = Axis("head", "layer.head", str, "train_tokens")
    filler = "own"

    def identity(self, model: Decoder) -> Row:
        return {"length": self.settings.length, "seed": 42, "hay": self.haystack(model).fingerprint}

    def describe_texts(self, model: Decoder, length: int) -> None:
        self.describe_hay(model, length)

    def text(self, model: Decoder, length: int, index: int) -> tuple[np.ndarray, list[int], list]:
        """A prompt: its last query, which writes the answer's first token, and the answer's tokens
        wherever they stand."""
        rng = np.random.default_rng([42, length, index, 1])
        tokenizer = load_tokenizer(model.config.tokenizer)
        try:
            prompt, answer, *_ = Template().draw(
                length, rng.random(), rng, tokenizer, self.haystack(model)
            )
        except ValueError as error:
            raise ValueError(
                f"heads: {error}" + "; give --length" * (self.settings.length is None)
            ) from error
        windows = np.lib.stride_tricks.sliding_window_view(prompt, len(answer))
        starts = np.flatnonzero((windows == answer).all(1)).tolist()
        if not starts:
            raise ValueError("the answer is cut into other tokens where it is stated")
        return prompt, [len(prompt) - 1], [(start, start + len(answer)) for start in starts]

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        heads = []
        for layer, analysis in zip(model.layers, self.look(model, cell.data["index"]), strict=True):
            mass = analysis.mass.sum(-1)
            values = {score.column: getattr(analysis, score.column, mass) for score in self.scores}
            columns = {name: value.nanmean(dim=(0, 2)).tolist() for name, value in values.items()}
            count = analysis.entropy.shape[1]
            columns |= _head_parameters(layer, count)
            for h in range(count):
                head = {"head": f"{analysis.layer}.{h}"}
                heads.append(head | {name: by_head[h] for name, by_head in columns.items()})
        return {"heads": heads}

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        return [
            mean_of_rows(texts)
            for texts in zip(*(cell["heads"] for cell in cells.values()), strict=True)
        ]

    def show(self, results: list[ModelResult], console: Console) -> None:
        """The heads of each model with most weight on the answer."""
        for result, name in zip(results, short_names(results), strict=True):
            measures = [score.column for score in self.scores]
            parameters = [column for column in result.rows[0] if column not in {"head", *measures}]
            columns = list(dict.fromkeys([*measures[:2], *parameters, *measures]))
            columns = columns[: max(2, (console.width - 4) // 13 - 1)]
            rows = sorted(result.rows, key=lambda row: -row["answer_mass"])[:SHOWN]
            cells = ([row["head"], *(f"{row[column]:.3f}" for column in columns)] for row in rows)
            print_table(console, f"{name}: heads by answer_mass", ["head"], columns, cells)


def _head_parameters(layer: nn.Module, heads: int) -> dict[str, list[float]]:
    """(H,) each: `retrieval`, and parameters of the prior and of SSMax that are one number a head;
    0s of layers of others."""
    attention = getattr(layer, "attention", None)
    if not isinstance(attention, Attention):
        return {"retrieval": [0.0] * heads}
    prior = attention.prior
    ssmax = attention.ssmax
    columns: dict[str, Tensor] = {"retrieval": torch.tensor(retrieval_heads(attention))}
    columns |= {name: p for name, p in prior.named_parameters() if p.shape == (prior.num_heads,)}
    columns |= {} if ssmax is None else {"ssmax.s": ssmax.scales()}
    return {name: column.detach().double().tolist() for name, column in columns.items()}
