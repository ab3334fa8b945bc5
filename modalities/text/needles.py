"""A needle in real text: the passkey's sentence and question around held-out documents, length × depth."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from modalities.evaluation import EvalSettings, ModelResult
from modalities.text import passkey
from modalities.text.held_out import held_out_documents, held_out_fingerprint
from modalities.text.recall import Recall


class NeedleGrid(Recall):
    """The passkey sentence at 11 depths of real held-out text: the length × depth heatmap.

    Question, needle and scores are the passkey's, so that the two differ in the haystack alone. ``samples`` keys, each
    in another stretch of text, per cell (default 5).
    """

    name = "niah"
    summary = "a needle in held-out text: length × depth heatmap of exact match"
    depths = 11
    depth_decimals = 2

    def identity(self, model: nn.Module, settings: EvalSettings) -> dict[str, Any]:
        count = settings.samples or self.default_samples
        text = held_out_fingerprint(model.config.tokenizer, settings.source)
        return {"text": text, "seed": settings.seed, "samples": count, "depths": self.depths}

    def draw_samples(
        self, model: nn.Module, settings: EvalSettings, length: int, depth: float, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return _grid_cell(model.config.tokenizer, settings.source, length, depth, count, settings.seed)

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
    least = passkey.minimum_length(tokenizer)
    if length < least:
        raise ValueError(f"length {length} is too short for a needle and its question, which take {least} tokens")
    rng = np.random.default_rng([seed, length, round(depth * 1e6)])
    prompts, answers = [], []
    for _ in range(count):
        text = long[int(rng.integers(len(long)))]
        start = int(rng.integers(len(text) - (length - least) + 1))
        hay = text[start : start + length - least]
        key = passkey.draw_key(rng, tokenizer)
        prompts.append(passkey.hide_key(key, hay, round(depth * len(hay)), tokenizer))
        answers.append(key)
    return np.stack(prompts), np.stack(answers)
