"""Passkey retrieval: a five-digit key in filler text, written after the question at its end."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from modalities.decoder.model import Decoder
from modalities.evaluation import ModelResult
from modalities.figures import heatmap_figure
from modalities.text.passkey import make_passkey
from modalities.text.retrieval import Retrieval
from modalities.text.tokenizers import load_tokenizer

__all__ = ["Passkey"]


class Passkey(Retrieval):
    """A five-digit key at 20 depths k·L/19 of filler text; `samples` random keys at each (default 5).

    A prompt and its answer are together L tokens. Scores as in `answer_scores`: exact match under teacher forcing and by
    free generation, kept apart, and the share of digits right under teacher forcing (0.1 by chance).
    """

    name = "passkey"
    summary = "a five-digit key hidden in filler text at 20 depths: exact match, teacher-forced and generated"
    depths = 20
    depth_decimals = 3

    @property
    def source_name(self) -> None:  # it makes its own filler
        return None

    def draw_samples(self, model: Decoder, length: int, depth: float) -> tuple[np.ndarray, np.ndarray]:
        return _passkeys(model.config.tokenizer, length, depth, self.samples, self.settings.seed)

    def write(self, results: list[ModelResult], out: Path) -> None:
        title = "Passkey in filler: exact match of the generated key"
        heatmap_figure(results, out / f"{self.name}_depth.png", column="free_generation_by_depth", title=title)


@lru_cache(maxsize=512)
def _passkeys(tokenizer_name: str, length: int, depth: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts (N, P) and answers (N, A). Keyed by its arguments alone, so no cell depends on another being drawn."""
    tokenizer = load_tokenizer(tokenizer_name)
    rng = np.random.default_rng([seed, length, round(depth * 1e6)])
    pairs = [make_passkey(length, depth, rng, tokenizer) for _ in range(count)]
    return np.stack([p for p, _ in pairs]), np.stack([a for _, a in pairs])
