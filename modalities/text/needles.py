"""A needle in real text: the passkey's sentence and question around held-out documents, length × depth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modalities.evaluation import Cell, CellValue, EvalSettings, Evaluator, ModelResult
from modalities.text import passkey
from modalities.text.held_out import held_out_documents, held_out_fingerprint
from modalities.text.recall import recall_cell, recall_rows


class NeedleGrid(Evaluator):
    """The passkey sentence at 11 depths of real held-out text: the length × depth heatmap.

    Question, needle and scores are the passkey's, so that the two differ in the haystack alone. ``samples`` keys, each
    in another stretch of text, per cell (default 5).
    """

    name = "niah"
    summary = "a needle in held-out text: length × depth heatmap of exact match"
    headline = ("teacher_forced", "free_generation")
    default_samples = 5
    depths = 11

    def identity(self, model: nn.Module, settings: EvalSettings) -> dict[str, Any]:
        count = settings.samples or self.default_samples
        text = held_out_fingerprint(model.config.tokenizer, settings.source)
        return {"text": text, "seed": settings.seed, "samples": count, "depths": self.depths}

    def cells(self, model: nn.Module, settings: EvalSettings) -> list[Cell]:
        count = settings.samples or self.default_samples
        cells = []
        for length in settings.resolved_lengths(model.config.train_context):
            for k in range(self.depths):
                depth = k / (self.depths - 1)
                prompts, answers = _grid_cell(
                    model.config.tokenizer, settings.source, length, depth, count, settings.seed
                )
                data = {"length": length, "depth": depth, "prompts": prompts, "answers": answers}
                cells.append(Cell(f"length={length}/depth={depth:.2f}", cost=count * length, data=data))
        return cells

    def measure(self, model: nn.Module, cell: Cell, settings: EvalSettings) -> CellValue:
        return recall_cell(model, cell, settings)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        return recall_rows(cells)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.plots import heatmap_figure

        heatmap_figure(results, path, title="Needle in held-out text: exact match of the generated key")


@lru_cache(maxsize=512)
def _grid_cell(
    tokenizer_name: str, source: str | None, length: int, depth: float, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` prompts (N, P) and answers (N, A): the passkey's sentences around real text instead of filler."""
    tokenizer, documents = held_out_documents(tokenizer_name, source)
    long = [d.tokens for d in documents if len(d.tokens) >= length]
    if not long:
        longest = max((len(d.tokens) for d in documents), default=0)
        raise ValueError(f"no held-out document has {length} tokens for a haystack; the longest has {longest}")
    digits = np.concatenate([tokenizer.encode(str(d)) for d in range(10)])
    before, after = (tokenizer.encode(part) for part in passkey.INFO)
    question = tokenizer.encode(passkey.QUESTION)
    least = passkey.minimum_length(tokenizer)
    if length < least:
        raise ValueError(f"length {length} is too short for a needle and its question, which take {least} tokens")
    rng = np.random.default_rng([seed, length, round(depth * 1e6)])
    prompts, answers = [], []
    for _ in range(count):
        text = long[int(rng.integers(len(long)))]
        start = int(rng.integers(len(text) - (length - least) + 1))
        hay = text[start : start + length - least]
        key = digits[rng.integers(0, 10, size=passkey.NUM_DIGITS)]
        at = round(depth * len(hay))
        prompts.append(np.concatenate([[tokenizer.bos_id], hay[:at], before, key, after, hay[at:], question]))
        answers.append(key)
    return np.stack(prompts), np.stack(answers)
