"""The data section of text recipes."""

from __future__ import annotations

from dataclasses import dataclass

from modalities.loading import MOST_WORKERS
from modalities.text.rows import RowMix
from zoo.bounds import LARGEST_SEED, LONGEST_CONTEXT, bounded, check_fields

__all__ = ["TextDataConfig"]


@dataclass(frozen=True)
class TextDataConfig:
    """What to train on.

    Attributes:
        source, tokenizer: spec strings (sources.py, tokenizers.py).
        context: L, tokens a model sees at once.
        facts_fraction: share of training rows that state facts and ask for them (rows.py).
        facts_weight: what each token of an answer counts in the loss; other tokens count 1.
        copies_fraction: share of training rows in which a stretch of text comes again.
        cache_dir: see `tokenize_corpus`.
        heldout_source: a source that is held out as a whole, instead of a split of `source`.
        heldout_limit: documents of the held-out split of a stream.
    """

    source: str = "sotu-excerpt"
    tokenizer: str = "bytes"
    context: int = bounded(128, 1, LONGEST_CONTEXT)
    seed: int = bounded(0, 0, LARGEST_SEED)
    facts_fraction: float = bounded(0.0, 0, 1)
    facts_weight: float = 1.0
    copies_fraction: float = bounded(0.0, 0, 1)
    cache_dir: str | None = None
    num_workers: int = bounded(0, 0, MOST_WORKERS)
    heldout_source: str | None = None
    heldout_limit: int = bounded(256, 1, 2**24)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.facts_fraction + self.copies_fraction > 1.0:
            shares = f"facts_fraction {self.facts_fraction} and copies_fraction {self.copies_fraction}"
            raise ValueError(f"{shares} are shares of the rows: together at most 1")
        if not self.facts_weight > 0:
            raise ValueError(f"facts_weight {self.facts_weight} must be positive")

    @property
    def row_mix(self) -> RowMix:
        return RowMix(self.facts_fraction, self.copies_fraction, self.facts_weight)
