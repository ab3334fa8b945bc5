"""Perplexity against length: held-out text cut into windows of each length, the same tokens
predicted at every length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
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
from modalities.text.retrieval import TextEvaluator
from modalities.text.tokenizers import load_tokenizer
from zoo.positions import slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DOCUMENTS = ("whole", "joined", "upto")
DOCUMENT_TOKENS = 8192  # read of each document by default
JOINED_TOKENS = 1 << 18  # of documents in a row
FEWEST = 100  # predictions of an octave of positions that is drawn
Stretch = dict[str, Any]  # "tokens" with the one before them, "bytes", "document", "turn"


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
    summary = "NLL, perplexity and bits per byte of held-out documents against length, and NLL by position"
    overview = Score("bits_per_byte", "bits per byte, less is better")
    scores = (Score("perplexity"), overview)
    paired_over = "documents"

    def points(self, model: Decoder) -> tuple[int, ...]:
        return self.lengths_for(model)

    def identity(self, model: Decoder) -> dict[str, object]:
        text = self.heldout_for(model).fingerprint
        key = {"text": text, "seed": self.settings.seed, "stretch": max(self.points(model))}
        key |= {} if self.settings.documents == "whole" else {"documents": self.settings.documents}
        return key | ({"control": self.settings.control} if self.settings.control else {})

    def samples_line(self, results: list[ModelResult]) -> str:
        row = results[0].rows[-1]
        units = (
            "stretches of joined documents" if self.settings.documents == "joined" else "documents"
        )
        return f"{row['tokens']:,} tokens of {row['documents']:,} {units}"

    def cells(self, model: Decoder) -> list[Cell]:
        lengths = self.points(model)
        heldout = self.heldout_for(model)
        longest = max(lengths)
        kind = self.settings.documents
        stretches = _stretches(
            heldout.items, model.config.tokenizer, longest, self.settings.seed, heldout.name, kind
        )
        most = JOINED_TOKENS // longest if kind == "joined" else min(8, DOCUMENT_TOKENS // longest)
        if kind == "whole":
            self.describe(heldout.items, longest)
        stretches = stretches[
            : self.settings.samples or sum(stretch["turn"] < max(1, most) for stretch in stretches)
        ]
        cells = []
        for length in lengths:
            for k, stretch in enumerate(stretches):
                read = stretch["tokens"][: length + 1] if kind == "upto" else stretch["tokens"]
                data = {"length": length} | stretch | {"tokens": read}
                width = min(length, len(read) - 1)
                parts = windows_of(width, self.at_once(model, width))
                cost = (len(read) - 1) // width * sum(part.stop - part.start for part, _ in parts)
                cells.append(Cell(f"length={length}/stretch={k}", cost=cost, data=data))
        return cells

    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        length = cell.data["length"]
        tokens = torch.as_tensor(cell.data["tokens"], device=device_of(model))
        width = min(length, len(tokens) - 1)  # less than the length in a short document
        count = (len(tokens) - 1) // width * width
        inputs = tokens[:count].view(-1, width)
        targets = tokens[1 : count + 1].view(-1, width)
        by_position = torch.zeros(length, dtype=torch.float64)
        windows = list(windows_of(width, self.at_once(model, width)))
        most = self.settings.batch_size(windows[0][0].stop)
        for part in slices(len(targets), most):
            rows = part.stop - part.start
            for some in (windows[k] for k in slices(len(windows), max(1, most // rows))):
                before, after = (
                    torch.cat([side[part, read] for read, _ in some]) for side in (inputs, targets)
                )
                if self.settings.control == "cut-bos":
                    before[:, 0] = load_tokenizer(model.config.tokenizer).bos_id
                losses = token_nll(model, before, after, advance=self.advance).split(rows)
                for (read, scored), values in zip(some, losses, strict=True):
                    by_position[scored] += values[:, scored.start - read.start :].sum(0).cpu()
        bucket = position_buckets(length)
        sums = np.bincount(bucket, weights=by_position.numpy())
        return {
            "length": length,
            "document": cell.data["document"],
            "tokens": count,
            "bytes": float(cell.data["bytes"][:count].sum()),
            "nll_sum": float(by_position.sum()),
            "bucket_nll_sum": sums.tolist(),
            "bucket_tokens": (
                np.bincount(bucket[:width], minlength=len(sums)) * len(targets)
            ).tolist(),
        }

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """A stretch of a document."""
        bits = cell["nll_sum"] / math.log(2)
        yield Observed(cell["length"], str(cell["document"]), "bits_per_byte", bits, cell["bytes"])

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            stretches = [c for c in cells.values() if c["length"] == length]
            tokens, size, nll = (
                sum(c[k] for c in stretches) for k in ("tokens", "bytes", "nll_sum")
            )
            nll /= tokens
            means = (
                Observed(length, str(c["document"]), "nll", c["nll_sum"], c["tokens"])
                for c in stretches
            )
            documents = scores_by_unit(means)[length, "nll"]
            error = standard_error(np.array(list(documents.values())))
            bits = tokens / math.log(2) / size  # a byte, of one nat a token
            keys = ("bucket_nll_sum", "bucket_tokens")
            bucket_sum, bucket_count = (np.sum([c[k] for c in stretches], axis=0) for k in keys)
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
                    "position_to": [2**k for k in range(len(bucket_sum))],
                    "position_nll": (bucket_sum / bucket_count).tolist(),
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
    drawn: list[float] = []
    for row, style in zip(rows, styles_of(results), strict=True):
        ends = row["position_to"]
        windows = row["tokens"] / row["length"]
        sizes = [
            min(end, row["length"]) - start
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        enough = [windows * size >= FEWEST for size in sizes]
        values = list(compress(row["position_nll"], enough))
        axis.plot(list(compress(ends, enough)), values, **style)
        drawn += values
    name_panel(axis, f"by position in windows of {compact(max(row['length'] for row in rows))}")
    axis.set(ylabel="nats per token", xlabel="tokens seen, up to (log₂)")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: compact(value))
    log_if_wide(axis, drawn)
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
    """Stretches of `length` tokens and the token before them, or up to as many; all documents'
    first ones come first."""
    tokenizer = load_tokenizer(spec)
    of_line = np.zeros(0)
    if kind == "joined":
        line = np.concatenate(
            [part for document in documents for part in ([tokenizer.bos_id], document.tokens)]
        )
        of_line = np.concatenate(
            [part for d in documents for part in ([0], d.byte_lengths(tokenizer))]
        )[1:]
        documents = (EncodedDocument("", line[1:], int(of_line.sum())),)
    long = [
        (n, d)
        for n, d in enumerate(documents)
        if len(d.tokens) >= (1 if kind == "upto" else length)
    ]
    longest = max((len(d.tokens) for d in documents), default=0)
    if longest < length:
        has = f"no held-out document of {source} has {length} tokens; the longest has {longest}"
        has = (
            f"the held-out documents of {source} have {longest} tokens, not {length}"
            if kind == "joined"
            else has
        )
        joined = ", or --documents joined" * (kind == "whole" and len(documents) > 1)
        raise ValueError(f"{has}: choose shorter lengths{joined}")
    stretches = []
    for number, document in (long[i] for i in np.random.default_rng(seed).permutation(len(long))):
        read = np.concatenate(
            [[tokenizer.bos_id], document.tokens]
        )  # token t is predicted after read[t]
        sizes = of_line if kind == "joined" else document.byte_lengths(tokenizer)
        starts = range(0, 1 if kind == "upto" else len(document.tokens) - length + 1, length)
        for k, start in enumerate(starts):
            stretch = {
                "tokens": read[start : start + length + 1],
                "bytes": sizes[start : start + length],
            }
            stretches.append(stretch | {"document": k if kind == "joined" else number, "turn": k})
    # Stable: a turn keeps the shuffled order of documents.
    return sorted(stretches, key=lambda stretch: stretch["turn"])
