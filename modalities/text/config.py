"""The data section of text recipes."""

from __future__ import annotations

from dataclasses import dataclass

from modalities.loading import MOST_WORKERS
from modalities.text.facts import TRAINING
from modalities.text.rows import RowMix
from modalities.text.tasks import is_task, open_task
from zoo.errors import LARGEST_SEED, LONGEST_CONTEXT, bounded, check_fields, nearest

DEFAULT_SOURCE = "sotu-excerpt"
# How documents share a row.
DOCUMENTS = ("masked", "packed")


@dataclass(frozen=True)
class TextDataConfig:
    """What to train on.

    source, tokenizer: spec strings (sources.py, tokenizers.py), or a sequence task (tasks.py).
    context: L, tokens a model sees at once.
    facts_fraction: share of training rows that state facts and ask for them (facts.py).
    facts_weight: what each token of an answer counts in the loss; other tokens count 1.
    facts_wordings: "train" or "wide": more wordings, some of whose questions use other words, and
        further kinds of value.
    copies_fraction: share of training rows in which a stretch of text comes again.
    cache_dir: see `tokenize_corpus`.
    heldout_limit: documents of the held-out split of a stream.
    heldout_source: a source that is held out as a whole, instead of a split of `source`.
    documents: "masked": tokens of a row see their own document alone, with positions from its first
        token in the row; "packed": a row is one text, whose documents BOS parts.
    """

    source: str = DEFAULT_SOURCE
    tokenizer: str = "bytes"
    context: int = bounded(128, 1, LONGEST_CONTEXT)
    seed: int = bounded(0, 0, LARGEST_SEED)
    facts_fraction: float = bounded(0.0, 0, 1)
    facts_weight: float = 1.0
    facts_wordings: str = "train"
    copies_fraction: float = bounded(0.0, 0, 1)
    cache_dir: str | None = None
    num_workers: int = bounded(0, 0, MOST_WORKERS)
    heldout_source: str | None = None
    heldout_limit: int = bounded(256, 1, 2**24)
    documents: str = "masked"

    def __post_init__(self) -> None:
        check_fields(self)
        for field, choices in (("documents", DOCUMENTS), ("facts_wordings", TRAINING)):
            value = getattr(self, field)
            if value not in choices:
                raise ValueError(f"{field}={value!r}: {nearest(value, choices)}")
        facts = self.facts_fraction
        copies = self.copies_fraction
        if facts + copies > 1.0:
            shares = f"facts_fraction {facts} and copies_fraction {copies}"
            raise ValueError(f"{shares} are shares of the rows: together at most 1")
        if not self.facts_weight > 0:
            raise ValueError(f"facts_weight {self.facts_weight} must be positive")
        if is_task(self.source):
            self._check_task()

    def _check_task(self) -> None:
        """ValueError for fields that a sequence task cannot have."""
        task = open_task(self.source)
        if self.tokenizer != task.tokenizer:
            raise ValueError(
                f"source {self.source!r} has symbols of its own: expected "
                f"tokenizer={task.tokenizer!r}, got {self.tokenizer!r}"
            )
        if self.context < task.context:
            raise ValueError(
                f"context={self.context} is too short for {self.source!r}: sources of "
                f"{task.most} tokens take {task.context}"
            )
        if self.facts_fraction or self.copies_fraction or self.heldout_source:
            raise ValueError(
                f"source {self.source!r} is a sequence task: facts_fraction, copies_fraction and "
                "heldout_source are of text"
            )

    @property
    def row_mix(self) -> RowMix:
        return RowMix(
            facts=self.facts_fraction,
            copies=self.copies_fraction,
            weight=self.facts_weight,
            wordings=self.facts_wordings,
        )
