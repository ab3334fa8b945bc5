"""Exact match: whole targets of a sequence task, at sources as long as in training and longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from modalities.decoder.model import Decoder
from modalities.decoder.scoring import device_of
from modalities.evaluation import Cell, Evaluator
from modalities.paired import Observed
from modalities.results import CellValue, Row, Score
from modalities.settings import LengthSettings
from modalities.statistics import standard_error
from modalities.text.tasks import Task, is_task, open_task, row_of
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.symbols import SymbolTokenizer


@dataclass(frozen=True)
class ExactMatchSettings(LengthSettings):
    """`samples` counts examples at each length, by default 128; lengths are those of sources."""

    factors: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16)
    counted: ClassVar[str] = "tokens of a source"

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        """By default 1, 1½, 2, 4, 8 and 16 times the longest source of training."""
        if self.lengths:
            return self.lengths
        half_more = train_context + train_context // 2
        return tuple(sorted([half_more, *super().resolved_lengths(train_context)]))


class ExactMatch(Evaluator[ExactMatchSettings, Decoder]):
    """Share of examples of a sequence task whose target is right as a whole.

    The task is the one of training, or `--source task:NAME`; its examples have random keys that
    training has not.

    | column | |
    |---|---|
    | `exact` | share of targets all of whose tokens are the likeliest: greedy writing is right |
    | `tokens_right` | share of tokens that are the likeliest, given the true ones before |
    | `examples` | how many |

    ± is the standard error over examples. A target is written greedily right exactly where each of
    its tokens is the likeliest after the true ones before it, so that one reading tells.
    """

    name = "exact_match"
    summary = "whole targets of a sequence task (reverse, sort, …), at longer sources"
    title = "sequence task"
    scores = (
        Score("exact", "targets exactly right", unit_interval=True),
        Score("tokens_right", "tokens of targets", unit_interval=True),
    )
    overview = scores[0]
    paired_over = "examples"

    @property
    def task(self) -> Task:
        """ValueError where neither settings nor training name a task."""
        source = self.settings.source or self.trained_on.get("source")
        if not isinstance(source, str) or not is_task(source):
            raise ValueError(
                f"exact_match measures sequence tasks, and the source is {source!r}: "
                "expected --source task:NAME, such as task:reverse"
            )
        return open_task(source)

    @property
    def source_name(self) -> str | None:
        return f"task:{self.task.name}"

    def trained_at(self, model: Decoder) -> int:
        return self.task.most

    def identity(self, model: Decoder) -> Row:
        return {"task": self.task.name, "seed": self.settings.seed}

    def cells(self, model: Decoder) -> list[Cell]:
        task = self.task
        tokenizer = model.config.tokenizer
        if tokenizer != task.tokenizer:
            raise ValueError(
                f"task {task.name!r} has the tokenizer {task.tokenizer!r}, "
                f"and the model reads {tokenizer!r}"
            )
        samples = self.settings.samples or 128
        cells = []
        for length in self.lengths_for(model):
            size = self.settings.batch_size(task.row_length(length))
            for first in range(0, samples, size):
                count = min(size, samples - first)
                data = {"length": length, "first": first, "count": count}
                cost = count * task.row_length(length)
                cells.append(Cell(f"length={length} first={first} count={count}", cost, data))
        return cells

    @torch.inference_mode()
    def measure(self, model: Decoder, cell: Cell) -> CellValue:
        tokenizer = load_tokenizer(model.config.tokenizer)
        assert isinstance(tokenizer, SymbolTokenizer)
        length = cell.data["length"]
        rows = []
        targets = []
        for number in range(cell.data["first"], cell.data["first"] + cell.data["count"]):
            example = self.task.example([self.settings.seed, length, number], length)
            rows.append(row_of(example, tokenizer))
            targets.append(len(example.target))
        tokens = np.full((len(rows), max(map(len, rows))), tokenizer.pad_id)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = row
        ids = torch.as_tensor(tokens, device=device_of(model))
        # Padding is behind the tokens, where causal attention does not look.
        features = model.forward_features(ids[:, :-1])
        right = []
        for number, (row, count) in enumerate(zip(rows, targets, strict=True)):
            # The features before each token of the target.
            before = features[number, len(row) - 1 - count : len(row) - 1]
            likeliest = model.forward_head(before).argmax(-1)
            target = ids[number, len(row) - count : len(row)]
            right.append(int((likeliest == target).sum()))
        return {"length": length, "first": cell.data["first"], "right": right, "tokens": targets}

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        for number, (right, tokens) in enumerate(zip(cell["right"], cell["tokens"], strict=True)):
            unit = str(cell["first"] + number)
            yield Observed(cell["length"], unit, "exact", float(right == tokens), 1)
            yield Observed(cell["length"], unit, "tokens_right", float(right), tokens)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        exact: dict[int, list[float]] = {}
        shares: dict[int, list[float]] = {}
        for cell in cells.values():
            for right, tokens in zip(cell["right"], cell["tokens"], strict=True):
                exact.setdefault(cell["length"], []).append(float(right == tokens))
                shares.setdefault(cell["length"], []).append(right / tokens)
        rows = []
        for length in sorted(exact):
            values = np.array(exact[length])
            row = {
                "length": length,
                "exact": float(values.mean()),
                "exact_standard_error": standard_error(values),
                "tokens_right": float(np.mean(shares[length])),
                "examples": len(values),
            }
            rows.append(row)
        return rows
