"""Stretches of held-out DNA whose attention is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np

from modalities.attention import AttentionEvaluator
from modalities.dna.evaluation import DnaEvaluator, DnaSettings, window_of
from modalities.dna.model import DnaDecoder
from modalities.dna.splits import GenomeSplit, Region
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import option
from zoo.model import ZooModel

__all__ = ["DnaProbes", "ProbeSettings"]


@lru_cache(maxsize=8)  # every sample asks for all of them
def _in_turn(data: GenomeSplit, length: int, count: int, seed: int) -> list[Region]:
    """Held-out stretches, of the contigs in turn."""
    found = data.stretches(length, count, seed)
    return [one for of_all in zip_longest(*found.values()) for one in of_all if one is not None]


@dataclass(frozen=True)
class ProbeSettings(DnaSettings):
    """`samples` counts stretches, of all held-out contigs in turn."""

    length: int | None = option(None, "tokens of a sample; default: the training length", parse=int)
    seed: int = option(42, "of every random draw")


class DnaProbes(DnaEvaluator, AttentionEvaluator):
    """Base of the evaluators that look into attention."""

    settings_class = ProbeSettings
    unit = AttentionEvaluator.unit
    trained_at = AttentionEvaluator.trained_at  # in tokens, as lengths are here

    def identity(self, model: ZooModel) -> dict[str, Any]:
        kept = AttentionEvaluator.identity(self, model)
        return kept | {"tokenizer": load_tokenizer(model.config.tokenizer).fingerprint}

    def tokens(self, model: DnaDecoder, index: int, count: int) -> np.ndarray:
        """(count,) int64: the start token and the first ones of a held-out stretch."""
        data, tokenizer = self.heldout.items, load_tokenizer(model.config.tokenizer)
        every = self.settings.samples or self.default_samples
        # A stretch whose tokens happen to be long has room for fewer.
        in_turn = _in_turn(data, window_of(model, count) * 5 // 4, every, self.settings.seed)
        ids = tokenizer.encode(data.codes(in_turn[index % len(in_turn)])).ids[: count - 1]
        return np.concatenate([[tokenizer.bos_id], ids]).astype(np.int64)

    def length(self, model: DnaDecoder) -> int:
        return self.settings.length or model.config.train_context
