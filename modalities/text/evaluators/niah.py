"""A needle in real text: the passkey's sentence and question around held-out documents, length × depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from modalities.decoder.model import Decoder
from modalities.evaluation import ModelResult
from modalities.figures import heatmap_figure
from modalities.text import passkey
from modalities.text.retrieval import Retrieval, TextEvaluator
from modalities.text.tokenizers import load_tokenizer

__all__ = ["NeedleGrid"]


class NeedleGrid(Retrieval, TextEvaluator):
    """The passkey sentence at 11 depths of real held-out text: the length × depth heat map.

    Question, needle and scores are the passkey's, so the two differ in the haystack alone. `samples` keys, each in another
    stretch of text, per cell (default 5).
    """

    name = "niah"
    summary = "a needle in held-out text: length × depth heat map of exact match"
    depths = 11
    depth_decimals = 2

    def identity(self, model: Decoder) -> dict[str, Any]:
        return {"text": self.heldout_for(model).fingerprint, **super().identity(model)}

    def draw_samples(self, model: Decoder, length: int, depth: float) -> tuple[np.ndarray, np.ndarray]:
        """Prompts (N, P) and answers (N, A): the passkey's sentences around real text instead of filler."""
        tokenizer = load_tokenizer(model.config.tokenizer)
        documents = self.heldout_for(model).items
        long = [d.tokens for d in documents if len(d.tokens) >= length]
        if not long:
            longest = max((len(d.tokens) for d in documents), default=0)
            raise ValueError(f"no held-out document has {length} tokens for a haystack; the longest has {longest}")
        least = passkey.minimum_length(tokenizer)
        if length < least:
            raise ValueError(f"length {length} is too short for a needle and its question, which take {least} tokens")
        rng = np.random.default_rng([self.settings.seed, length, round(depth * 1e6)])
        prompts, answers = [], []
        for _ in range(self.samples):
            text = long[int(rng.integers(len(long)))]
            start = int(rng.integers(len(text) - (length - least) + 1))
            hay = text[start : start + length - least]
            key = passkey.draw_key(rng, tokenizer)
            prompts.append(passkey.hide_key(key, hay, round(depth * len(hay)), tokenizer))
            answers.append(key)
        return np.stack(prompts), np.stack(answers)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        title = "Needle in held-out text: exact match of the generated key"
        heatmap_figure(results, path, column="free_generation_by_depth", title=title)
