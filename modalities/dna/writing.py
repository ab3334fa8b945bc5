"""Continuations of DNA, by a decoder's KV cache or by a baseline of its own means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from modalities.decoder.generation import stream
from modalities.decoder.model import Decoder
from modalities.dna.tokenizers import load_tokenizer

__all__ = ["SequenceWriter", "check_writer", "write_bases"]


class SequenceWriter(ABC):
    """A module that continues sequences itself, instead of through a decoder's cache."""

    @abstractmethod
    def write_bases(self, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
        """(B, new_bases) codes after prompts (B, P); the likeliest ones at temperature 0."""


def write_bases(model: Any, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
    """(B, new_bases) base codes after prompts (B, P), which begin with BOS.

    Where a prompt is not a whole number of k-mers, its first bases are left out.

    Raises:
        ValueError: for a model that cannot continue a sequence, such as a compressor.
    """
    check_writer(model)
    if isinstance(model, SequenceWriter):
        return model.write_bases(prompts, new_bases=new_bases, temperature=temperature, seed=seed)
    tokenizer = load_tokenizer(model.config.tokenizer)
    rows: list[Any] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt[tokenizer.encode(prompt).left_over :]).ids
        rows.append(np.concatenate([[tokenizer.bos_id], ids]))
    steps, bases = [], np.zeros(len(rows), np.int64)
    for tokens in stream(model, rows, max_new_tokens=new_bases, temperature=temperature, seed=seed):
        steps.append(tokens.cpu().numpy())
        bases += tokenizer.widths[steps[-1]]
        if bases.min() >= new_bases:
            break
    return np.stack([tokenizer.decode(ids)[:new_bases] for ids in np.stack(steps, axis=1)])


def check_writer(model: Any) -> None:
    """Raises ValueError for a model that cannot continue a sequence."""
    if not isinstance(model, SequenceWriter | Decoder):
        raise ValueError(f"{model.config.position} cannot continue a sequence; leave it out")
