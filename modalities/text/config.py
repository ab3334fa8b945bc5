"""The data section of text recipes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TextDataConfig"]


@dataclass(frozen=True)
class TextDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py). "tokens:FOLDER" is a source too: FOLDER/train and
        FOLDER/heldout as `TokenCorpus.save` writes them.
    context: L, tokens a model sees at once.
    passkey_fraction: the share of training rows that are passkey documents instead of text.
    passkey_weight: what each of the five answer tokens counts in the loss; every other token counts 1. Five targets in a
        row of hundreds are too few for a small model to learn copying from within a small budget.
    cache_dir: keep tokenised corpora there; None keeps them in memory.
    heldout_source: where the held-out split comes from, when not from `source` (a dataset's own validation split).
        All of it is then held out.
    heldout_limit: documents taken for the held-out split of a stream.
    """

    source: str = "sotu-excerpt"
    tokenizer: str = "bytes"
    context: int = 128
    seed: int = 0
    passkey_fraction: float = 0.0
    passkey_weight: float = 1.0
    cache_dir: str | None = None
    num_workers: int = 0
    heldout_source: str | None = None
    heldout_limit: int = 256

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context {self.context} must be at least 1")
        if not 0.0 <= self.passkey_fraction <= 1.0:
            raise ValueError(f"passkey_fraction {self.passkey_fraction} is outside 0..1")
        if not self.passkey_weight > 0:
            raise ValueError(f"passkey_weight {self.passkey_weight} must be positive")
        if self.num_workers < 0:
            raise ValueError(f"num_workers {self.num_workers} is negative")
