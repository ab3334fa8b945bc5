"""The data section of DNA recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["DEFAULT_SOURCE", "DnaDataConfig"]

DEFAULT_SOURCE = "yeast-chr01"  # ships with the package


@dataclass(frozen=True)
class DnaDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py).
    split: a BED file whose fourth column is "train" or "heldout"; None: the source's own, or whole contigs by rule.
    context: L, tokens a model sees at once.
    reverse_complement: probability that a training window is read on the other strand.
    soft_mask_weight: weight in the loss of a soft-masked target (lower-case: repeats, by convention); 0 leaves them out.
    max_unknown: training windows with a larger share of unknown bases are skipped.
    cache_dir: where the parsed bases of large files are kept; None: <data folder>/cache.
    """

    source: str = DEFAULT_SOURCE
    split: str | None = None
    tokenizer: str = "bases"
    context: int = 256
    seed: int = 0
    reverse_complement: float = 0.5
    soft_mask_weight: float = 1.0
    max_unknown: float = 0.1
    cache_dir: str | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context {self.context} must be at least 1")
        for name in ("reverse_complement", "max_unknown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is outside 0..1")
        if not 0 <= self.soft_mask_weight < math.inf:
            raise ValueError(f"soft_mask_weight {self.soft_mask_weight} must be 0 or more, and finite")
        if self.num_workers < 0:
            raise ValueError(f"num_workers {self.num_workers} is negative")
