"""Evaluators of the entries of a user's files: what scores of records and of variants share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from modalities.dna.baselines import Baseline
from modalities.dna.evaluation import DnaEvaluator, DnaSettings, StrandSettings, strands_of, window_of
from modalities.dna.genome import Genome, open_genome
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import DnaTokenizer, load_tokenizer
from modalities.evaluation import Listing, counts, option
from zoo.model import ZooModel

__all__ = ["FileEvaluator", "FileSettings", "bin_edges", "number", "step_of", "table"]

REFERENCE = {"color": "0.35", "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 1}


def one_count(text: str) -> int:
    """ "4k" to 4096."""
    found = counts(text)
    if len(found) != 1:
        raise ValueError(f"expected one number of bases, such as 4096 or 4k, got {text!r}")
    return found[0]


@dataclass(frozen=True)
class FileSettings(DnaSettings, StrandSettings):
    """A file of sequences; the source is that which baselines are fitted to."""

    fasta: str | None = option(None, "file of sequences (FASTA, 2bit, GenBank; also compressed)")
    window: int | None = option(
        None, "bases read at once, as 4096 or 4k; default: the evaluator's own", parse=one_count
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            raise ValueError(f"every entry of a file is read; samples ({self.samples}) do not apply")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")


class FileEvaluator(DnaEvaluator, Listing):
    """Evaluators that read sequences of `fasta` in windows of `window` bases."""

    default_window: ClassVar[int]  # in training lengths
    window_step: ClassVar[int] = 1  # windows are this many k-mers, or a multiple

    @property
    def source_name(self) -> str:
        return f"{self.settings.fasta}"

    def genome(self) -> Genome:
        if self.settings.fasta is None:
            raise ValueError(f"{self.name} reads a file of sequences: name one with --fasta")
        return open_genome(find_source(self.settings.fasta))

    def window(self, model: ZooModel) -> int:
        """`window`, or the default, rounded down to a multiple of `window_step` k-mers. ValueError where that is 0."""
        tokenizer = load_tokenizer(model.config.tokenizer)
        step = step_of(tokenizer) * self.window_step
        window = self.settings.window or window_of(model, self.default_window * model.config.train_context)
        if window < step:
            raise ValueError(f"window {window}: tokenizer {tokenizer.name!r} needs at least {step} bases")
        return window // step * step

    def identity(self, model: ZooModel) -> dict[str, Any]:
        """The reading of a window; a baseline's numbers also depend on what it is fitted to."""
        return {
            "window": self.window(model),
            "strands": strands_of(model, self.settings),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
            "fitted_to": self.heldout.fingerprint if isinstance(model, Baseline) else None,
        }


def step_of(tokenizer: DnaTokenizer) -> int:
    """K for k-mers, 1 for single bases and for BPE: windows are multiples of it."""
    widths = np.unique(tokenizer.widths[: tokenizer.num_targets])
    return int(widths[0]) if len(widths) == 1 else 1


def bin_edges(values: Sequence[float], count: int) -> np.ndarray:
    """Of `count` bins over all values; around them where they are equal."""
    low, high = min(values), max(values)
    pad = 0.0 if high - low > 1e-6 else 0.5
    return np.linspace(low - pad, high + pad, count + 1)


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        found.add_column(name, overflow="fold")
    for name in right:
        found.add_column(name, justify="right", overflow="fold", min_width=6)
    return found


def number(value: float, how: str = ".4f") -> str:
    return "–" if math.isnan(value) else format(value, how)
