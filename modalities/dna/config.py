"""The data section of DNA recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modalities.dna.sources import DEFAULT_SOURCE
from modalities.loading import MOST_WORKERS
from zoo.errors import LARGEST_SEED, LONGEST_CONTEXT, bounded, check_fields


@dataclass(frozen=True)
class DnaDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py).
    split: a BED file whose fourth column is "train" or "heldout"; None: the source's own, or whole
    contigs by rule.
    context: L, tokens a model sees at once.
    reverse_complement: probability that a training window is read on the other strand.
    soft_mask_weight: weight in the loss of a soft-masked target (lower-case: repeats, by
    convention); 0 leaves them out.
    max_unknown: training windows with a larger share of unknown bases are skipped.
    cache_dir: of version 0.5; without effect.
    """

    source: str = DEFAULT_SOURCE
    split: str | None = None
    tokenizer: str = "bases"
    context: int = bounded(256, 1, LONGEST_CONTEXT)
    seed: int = bounded(0, 0, LARGEST_SEED)
    reverse_complement: float = bounded(0.5, 0, 1)
    soft_mask_weight: float = bounded(1.0, 0, math.inf)
    max_unknown: float = bounded(0.1, 0, 1)
    cache_dir: str | None = None
    num_workers: int = bounded(0, 0, MOST_WORKERS)

    def __post_init__(self) -> None:
        check_fields(self)
