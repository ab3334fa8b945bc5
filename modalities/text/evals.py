"""Text evaluators: perplexity against length and passkey retrieval here, the needle tasks in ``needles.py``.

Each yields one cell at a time (see ``modalities/evaluation.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modalities.evaluation import Cell, CellValue, EvalSettings, Evaluator, ModelResult, batches, standard_error
from modalities.text.held_out import DEFAULT_SOURCE, held_out_documents, held_out_fingerprint
from modalities.text.needles import NeedleGrid
from modalities.text.passkey import make_passkey
from modalities.text.recall import Recall
from modalities.text.ruler import Ruler
from modalities.text.scoring import device_of, token_nll
from modalities.text.tokenizers import load_tokenizer


class Perplexity(Evaluator):
    """Mean NLL, perplexity and bits per byte of held-out text, cut into windows of each length.

    The same stretches of text, as long as the longest length, serve every length: a stretch is cut into
    non-overlapping windows that predict L tokens each, from the token before the window (BOS at a document's start)
    and the first L − 1 of it. So every length predicts the same tokens, only the context differs, and windows look as
    they did in training, where BOS stands at the start of documents alone. ``samples`` counts stretches (default 8),
    taken from documents at least that long, in turn.
    """

    name = "perplexity"
    summary = "NLL, perplexity and bits per byte of held-out documents against length, and NLL by position"
    headline = ("perplexity", "bits_per_byte")
    default_samples = 8

    def identity(self, model: nn.Module, settings: EvalSettings) -> dict[str, Any]:
        lengths = settings.resolved_lengths(model.config.train_context)
        text = held_out_fingerprint(model.config.tokenizer, settings.source)
        return {"text": text, "seed": settings.seed, "stretch": max(lengths)}

    def cells(self, model: nn.Module, settings: EvalSettings) -> list[Cell]:
        lengths = settings.resolved_lengths(model.config.train_context)
        count = settings.samples or self.default_samples
        stretches = _stretches(model.config.tokenizer, settings.source, max(lengths), settings.seed)[:count]
        return [
            Cell(
                f"length={length}/stretch={k}", cost=max(lengths) // length * length, data={"length": length} | stretch
            )
            for length in lengths
            for k, stretch in enumerate(stretches)
        ]

    def measure(self, model: nn.Module, cell: Cell, settings: EvalSettings) -> CellValue:
        length, tokens = cell.data["length"], torch.as_tensor(cell.data["tokens"], device=device_of(model))
        count = (len(tokens) - 1) // length * length
        inputs, targets = tokens[:count].view(-1, length), tokens[1 : count + 1].view(-1, length)
        by_position = torch.zeros(length, dtype=torch.float64)
        for part in batches(len(targets), settings.batch_size(length)):
            by_position += token_nll(model, inputs[part], targets[part]).sum(0).cpu()
        bucket = bucket_of(length)
        sums = np.bincount(bucket, weights=by_position.numpy())
        return {
            "length": length,
            "tokens": count,
            "bytes": count * cell.data["bytes_per_token"],
            "nll_sum": float(by_position.sum()),
            "bucket_nll_sum": sums.tolist(),
            "bucket_tokens": (np.bincount(bucket) * len(targets)).tolist(),
        }

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        rows = []
        for length in sorted({c["length"] for c in cells.values()}):
            mine = [c for c in cells.values() if c["length"] == length]
            nll = sum(c["nll_sum"] for c in mine) / sum(c["tokens"] for c in mine)
            means = np.array([c["nll_sum"] / c["tokens"] for c in mine])
            bucket_sum, bucket_count = (
                np.sum([c[k] for c in mine], axis=0) for k in ("bucket_nll_sum", "bucket_tokens")
            )
            rows.append(
                {
                    "length": length,
                    "nll": nll,
                    "nll_standard_error": standard_error(means),
                    "perplexity": math.exp(min(nll, 700.0)),
                    "bits_per_byte": nll * sum(c["tokens"] for c in mine) / math.log(2) / sum(c["bytes"] for c in mine),
                    "tokens": sum(c["tokens"] for c in mine),
                    "position_to": [2**k for k in range(len(bucket_sum))],
                    "position_nll": (bucket_sum / bucket_count).tolist(),
                }
            )
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.plots import perplexity_figure

        perplexity_figure(results, path)


class Passkey(Recall):
    """A five-digit key hidden at 20 depths k·L/19 of filler text; ``samples`` random keys at each (default 5).

    A prompt and its answer are together L tokens. Scores as in ``answer_scores``: teacher-forced and free-generation
    exact match, kept apart, and the share of digits right under teacher forcing (0.1 by chance).
    """

    name = "passkey"
    summary = "a five-digit key hidden in filler text at 20 depths: exact match, teacher-forced and generated"
    depths = 20
    depth_decimals = 3

    def identity(self, model: nn.Module, settings: EvalSettings) -> dict[str, Any]:
        return {"seed": settings.seed, "samples": settings.samples or self.default_samples, "depths": self.depths}

    def draw_samples(
        self, model: nn.Module, settings: EvalSettings, length: int, depth: float, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return _passkeys(model.config.tokenizer, length, depth, count, settings.seed)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.plots import recall_figure

        recall_figure(results, path)


def bucket_of(length: int) -> np.ndarray:
    """Bucket of each target by the tokens n its prediction sees: bucket k holds 2^(k−1) < n ≤ 2^k, bucket 0 n = 1."""
    return np.frexp(np.arange(length))[1].astype(np.int64)  # of n − 1; exact, where log2 in floating point is not


@lru_cache(maxsize=8)
def _stretches(tokenizer_name: str, source: str | None, length: int, seed: int) -> list[dict[str, Any]]:
    """Stretches of ``length`` tokens with the token before them; the first stretches of all documents come first."""
    tokenizer, documents = held_out_documents(tokenizer_name, source)
    long = [d for d in documents if len(d.tokens) >= length]
    if not long:
        longest = max((len(d.tokens) for d in documents), default=0)
        raise ValueError(
            f"no held-out document of {source or DEFAULT_SOURCE} has {length} tokens; the longest has {longest}: "
            "choose shorter lengths, or a source with longer documents"
        )
    order = np.random.default_rng(seed).permutation(len(long))
    found = []
    for document in (long[i] for i in order):
        read = np.concatenate([[tokenizer.bos_id], document.tokens])  # token t is predicted after read[t]
        for k, start in enumerate(range(0, len(document.tokens) - length + 1, length)):
            stretch = {"tokens": read[start : start + length + 1], "bytes_per_token": document.bytes_per_token}
            found.append((k, stretch))
    found.sort(key=lambda pair: pair[0])  # stable: keeps the shuffled order of documents within a round
    return [stretch for _, stretch in found]


@lru_cache(maxsize=512)
def _passkeys(tokenizer_name: str, length: int, depth: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts (N, P) and answers (N, A). Keyed by its arguments alone, so no cell depends on another being drawn."""
    tokenizer = load_tokenizer(tokenizer_name)
    rng = np.random.default_rng([seed, length, round(depth * 1e6)])
    pairs = [make_passkey(length, depth, rng, tokenizer) for _ in range(count)]
    return np.stack([p for p, _ in pairs]), np.stack([a for _, a in pairs])


EVALUATORS: dict[str, Evaluator] = {e.name: e for e in (Perplexity(), Passkey(), NeedleGrid(), Ruler())}
