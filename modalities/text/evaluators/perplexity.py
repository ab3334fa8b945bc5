"""Perplexity against length: held-out text cut into windows of each length, the same tokens
predicted at every length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of, position_buckets, token_nll, windows_of
from modalities.evaluation import Cell
from modalities.figures import (
    curves,
    finish,
    log_if_wide,
    mark_training,
    name_panel,
    panels,
    styles_of,
)
from modalities.paired import Observed, scores_by_unit
from modalities.results import LENGTH, CellValue, ModelResult, Row, Score, compact, mean_of_seeds
from modalities.settings import CutSettings, check_choice, option
from modalities.statistics import standard_error
from modalities.text.data import EncodedDocument
from modalities.text.evaluation import TextEvaluator
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.encoding import Tokenizer
from zoo.positions import slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DOCUMENTS = ("whole", "joined", "upto")
# Tokens read by default: of each document, and of documents in a row.
DOCUMENT_TOKENS = 8192
JOINED_TOKENS = 1 << 18
# Predictions of an octave of positions that is drawn.
FEWEST = 100
# Text as long as the longest length: "tokens" with the one before them, "bytes" of each token,
# "document", "turn" (the stretch's number in its document).
Stretch = dict[str, Any]


@dataclass(frozen=True)
class PerplexitySettings(CutSettings):
    """With what becomes of documents, and a second control: `cut` whose windows begin with BOS."""

    controls = ("cut", "cut-bos")
    documents: str = option(
        "whole", "whole: each as long as the greatest length; joined: in a row; upto: their starts"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("documents", self.documents, DOCUMENTS)


class Perplexity(TextEvaluator[PerplexitySettings]):
    """Mean NLL, perplexity and bits per byte of held-out text, cut into windows of each length.

    Stretches of text as long as the longest length are cut into windows without overlap that
    predict L tokens each, from the token before the window (BOS at a document's start) and its
    first L − 1. Lengths that divide the longest predict the same tokens; others those of the
    windows that fit. Every document that is long enough takes part, by default with one to eight
    stretches, up to 8,192 tokens. `samples` counts stretches: the first ones of all documents, then
    the second ones, and so on.

    With `documents="joined"` (GOAT, CABLE) stretches are cut from all documents in a row, parted by
    BOS. With "upto" (BAM's table 2) a length L reads the first L tokens of every document, or all
    of a shorter one.

    With `control` each token is predicted from at most as many tokens before it as training had, at
    least half as many: windows of the training length, half of it apart. Under "cut-bos" each
    window, at every length, begins with BOS.

    Means are over tokens, standard errors and paired comparisons over documents, or stretches of
    joined ones.
    """

    name = "perplexity"
    title = "held-out text"
    version = 3
    summary = (
        "NLL, perplexity and bits per byte of held-out documents against length, "
        "and NLL by position"
    )
    overview = Score("bits_per_byte", "bits per byte, less is better")
    scores = (Score("perplexity"), overview)
    paired_over = "documents"

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.lengths_for(model)

    def identity(self, model: Decoder) -> dict[str, object]:
        identity: dict[str, object] = {
            "text": self.heldout_for(model).fingerprint,
            "seed": self.settings.seed,
            "stretch": max(self.points(model)),
        }
        if self.settings.documents != "whole":
            identity["documents"] = self.settings.documents
        if self.settings.control:
            identity["control"] = self.settings.control
        return identity

    def samples_line(self, results: list[ModelResult]) -> str:
        row = results[0].rows[-1]
        units = "documents"
        if self.settings.documents == "joined":
            units = "stretches of joined documents"
        return f"{row['tokens']:,} tokens of {row['documents']:,} {units}"

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        heldout = self.heldout_for(model)
        longest = max(lengths)
        kind = self.settings.documents
        if kind == "whole":
            self.describe(heldout.items, longest)
        stretches = _stretches(
            heldout.items, model.config.tokenizer, longest, self.settings.seed, heldout.name, kind
        )
        most = min(8, DOCUMENT_TOKENS // longest)
        if kind == "joined":
            most = JOINED_TOKENS // longest
        default = sum(stretch["turn"] < max(1, most) for stretch in stretches)
        stretches = stretches[: self.settings.samples or default]
        cells = []
        for length in lengths:
            for k, stretch in enumerate(stretches):
                tokens = stretch["tokens"]
                if kind == "upto":
                    tokens = tokens[: length + 1]
                width = min(length, len(tokens) - 1)
                windows = windows_of(width, self.at_once(model, width))
                cost_of_row = sum(read.stop - read.start for read, _ in windows)
                cells.append(
                    Cell(
                        f"length={length}/stretch={k}",
                        cost=(len(tokens) - 1) // width * cost_of_row,
                        data={"length": length} | stretch | {"tokens": tokens},
                    )
                )
        return cells

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        length = cell.data["length"]
        tokens = torch.as_tensor(cell.data["tokens"], device=device_of(model))
        # A short document has fewer tokens than the length.
        width = min(length, len(tokens) - 1)
        count = (len(tokens) - 1) // width * width
        inputs = tokens[:count].view(-1, width)
        targets = tokens[1 : count + 1].view(-1, width)
        nll_by_position = torch.zeros(length, dtype=torch.float64)
        nll_by_position[:width] = self._summed_nll(model, inputs, targets)
        bucket = position_buckets(length)
        bucket_nll = np.bincount(bucket, weights=nll_by_position.numpy())
        bucket_tokens = np.bincount(bucket[:width], minlength=len(bucket_nll)) * len(targets)
        return {
            "length": length,
            "document": cell.data["document"],
            "tokens": count,
            "bytes": float(cell.data["bytes"][:count].sum()),
            "nll_sum": float(nll_by_position.sum()),
            "bucket_nll_sum": bucket_nll.tolist(),
            "bucket_tokens": bucket_tokens.tolist(),
        }

    def _summed_nll(
        self, model: Decoder, inputs: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """(W,) float64 on the CPU: NLL of each position of (N, W) windows, summed over windows."""
        width = targets.shape[1]
        total = torch.zeros(width, dtype=torch.float64)
        windows = list(windows_of(width, self.at_once(model, width)))
        most = self.settings.batch_size(windows[0][0].stop)
        for part in slices(len(targets), most):
            rows = part.stop - part.start
            # With a control several windows of each row are one batch.
            for numbers in slices(len(windows), max(1, most // rows)):
                batch = windows[numbers]
                before = torch.cat([inputs[part, read] for read, _ in batch])
                after = torch.cat([targets[part, read] for read, _ in batch])
                if self.settings.control == "cut-bos":
                    before[:, 0] = load_tokenizer(model.config.tokenizer).bos_id
                losses = token_nll(model, before, after, advance=self.advance).split(rows)
                for (read, scored), values in zip(batch, losses, strict=True):
                    total[scored] += values[:, scored.start - read.start :].sum(0).cpu()
        return total

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """A stretch of a document."""
        bits = cell["nll_sum"] / math.log(2)
        yield Observed(cell["length"], str(cell["document"]), "bits_per_byte", bits, cell["bytes"])

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            stretches = [c for c in cells.values() if c["length"] == length]
            tokens = sum(c["tokens"] for c in stretches)
            nll = sum(c["nll_sum"] for c in stretches) / tokens
            observations = [
                Observed(length, str(c["document"]), "nll", c["nll_sum"], c["tokens"])
                for c in stretches
            ]
            documents = scores_by_unit(observations)[length, "nll"]
            error = standard_error(np.array(list(documents.values())))
            # Bits per byte of one nat per token.
            bits = tokens / math.log(2) / sum(c["bytes"] for c in stretches)
            bucket_nll = np.sum([c["bucket_nll_sum"] for c in stretches], axis=0)
            bucket_tokens = np.sum([c["bucket_tokens"] for c in stretches], axis=0)
            rows.append(
                {
                    "length": length,
                    "nll": nll,
                    "nll_standard_error": error,
                    "perplexity": math.exp(min(nll, 700.0)),
                    "bits_per_byte": nll * bits,
                    "bits_per_byte_standard_error": error * bits,
                    "tokens": tokens,
                    "documents": len(documents),
                    "position_to": [2**k for k in range(len(bucket_nll))],
                    "position_nll": (bucket_nll / bucket_tokens).tolist(),
                }
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Bits per byte against length, and NLL by position inside windows of the longest
        length."""
        results = mean_of_seeds(results, self.axis.column)
        figure, axes = panels(1, 2, width=4.6, height=3.9)
        curves(axes[0], results, self.overview)
        name_panel(axes[0], "bits per byte")
        _position_curves(axes[1], results)
        finish(figure, axes, results, path)


def _position_curves(axis: Axes, results: Sequence[ModelResult]) -> None:
    """NLL by octaves of positions inside windows of each model's longest length; those of few
    predictions are noise."""
    rows = [max(result.rows, key=lambda row: row["length"]) for result in results]
    curve_values: list[float] = []
    for row, style in zip(rows, styles_of(results), strict=True):
        windows = row["tokens"] / row["length"]
        ends = []
        values = []
        start = 0
        for end, value in zip(row["position_to"], row["position_nll"], strict=True):
            positions = min(end, row["length"]) - start
            if windows * positions >= FEWEST:
                ends.append(end)
                values.append(value)
            start = end
        axis.plot(ends, values, **style)
        curve_values += values
    longest = max(row["length"] for row in rows)
    name_panel(axis, f"by position in windows of {compact(longest)}")
    axis.set(ylabel="nats per token", xlabel="tokens seen, up to (log₂)")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: compact(value))
    log_if_wide(axis, curve_values)
    mark_training(axis, results, LENGTH)


@lru_cache(maxsize=8)
def _stretches(
    documents: tuple[EncodedDocument, ...],
    spec: str,
    length: int,
    seed: int,
    source: str,
    kind: str,
) -> list[Stretch]:
    """Stretches of `length` tokens and the token before them, or up to as many; the first ones of
    all documents come first. ValueError where no document is as long."""
    tokenizer = load_tokenizer(spec)
    if kind == "joined":
        tokens, sizes = _join(documents, tokenizer)
        if len(tokens) < length:
            raise ValueError(
                f"the held-out documents of {source} have {len(tokens)} tokens, not {length}: "
                "choose shorter lengths"
            )
        starts = range(0, len(tokens) - length + 1, length)
        return _cut(tokens, sizes, starts, length, tokenizer, document=None)
    longest = max((len(document.tokens) for document in documents), default=0)
    if longest < length:
        advice = "choose shorter lengths"
        if kind == "whole" and len(documents) > 1:
            advice += ", or --documents joined"
        raise ValueError(
            f"no held-out document of {source} has {length} tokens; "
            f"the longest has {longest}: {advice}"
        )
    least = 1 if kind == "upto" else length
    numbers = [n for n, document in enumerate(documents) if len(document.tokens) >= least]
    stretches = []
    for i in np.random.default_rng(seed).permutation(len(numbers)):
        document = documents[numbers[i]]
        sizes = document.byte_lengths(tokenizer)
        starts = range(0, len(document.tokens) - length + 1, length)
        if kind == "upto":
            starts = range(1)
        stretches += _cut(document.tokens, sizes, starts, length, tokenizer, document=numbers[i])
    # Stable: a turn keeps the shuffled order of documents.
    return sorted(stretches, key=lambda stretch: stretch["turn"])


def _join(
    documents: Sequence[EncodedDocument], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all documents in a row, parted by BOS, and the bytes of each."""
    tokens: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    for document in documents:
        tokens += [np.array([tokenizer.bos_id]), document.tokens]
        sizes += [np.array([0]), document.byte_lengths(tokenizer)]
    return np.concatenate(tokens)[1:], np.concatenate(sizes)[1:]


def _cut(
    tokens: np.ndarray,
    sizes: np.ndarray,
    starts: range,
    length: int,
    tokenizer: Tokenizer,
    *,
    document: int | None,
) -> list[Stretch]:
    """The stretches that begin at `starts`.

    document: its number; None: a stretch is a unit of its own.
    """
    # Token t is predicted after read[t].
    read = np.concatenate([[tokenizer.bos_id], tokens])
    stretches = []
    for turn, start in enumerate(starts):
        stretch = {
            "tokens": read[start : start + length + 1],
            "bytes": sizes[start : start + length],
            "document": turn if document is None else document,
            "turn": turn,
        }
        stretches.append(stretch)
    return stretches
