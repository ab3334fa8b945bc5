"""The data section of text recipes."""

from __future__ import annotations

from dataclasses import dataclass

from modalities.text.rows import RowMix

__all__ = ["TextDataConfig"]


@dataclass(frozen=True)
class TextDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py). "tokens:FOLDER" is a source too: FOLDER/train and
        FOLDER/heldout as `TokenCorpus.save` writes them.
    context: L, tokens a model sees at once.
    facts_fraction: the share of training rows that state facts and ask for them (rows.py).
    facts_weight: what each token of an answer counts in the loss; every other token counts 1. A few targets in a row of
        hundreds are too few for a small model to learn copying from within a small budget.
    copies_fraction: the share of training rows in which a stretch of text comes again.
    cache_dir: keep tokenised corpora there; None keeps them in memory.
    heldout_source: where the held-out split comes from, when not from `source` (a dataset's own validation split).
        All of it is then held out.
    heldout_limit: documents taken for the held-out split of a stream.
    """

    source: str = "sotu-excerpt"
    tokenizer: str = "bytes"
    context: int = 128
    seed: int = 0
    facts_fraction: float = 0.0
    facts_weight: float = 1.0
    copies_fraction: float = 0.0
    cache_dir: str | None = None
    num_workers: int = 0
    heldout_source: str | None = None
    heldout_limit: int = 256

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context {self.context} must be at least 1")
        for name in ("facts_fraction", "copies_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} {getattr(self, name)} is outside 0..1")
        if self.facts_fraction + self.copies_fraction > 1.0:
            raise ValueError(
                f"facts_fraction {self.facts_fraction} and copies_fraction {self.copies_fraction} are shares of the rows: "
                "together at most 1"
            )
        if not self.facts_weight > 0:
            raise ValueError(f"facts_weight {self.facts_weight} must be positive")
        if self.num_workers < 0:
            raise ValueError(f"num_workers {self.num_workers} is negative")

    @property
    def row_mix(self) -> RowMix:
        return RowMix(self.facts_fraction, self.copies_fraction, self.facts_weight)
