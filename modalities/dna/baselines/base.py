"""What baselines have in common, and the one that learns nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from modalities.dna.bases import UNKNOWN
from modalities.dna.scoring import BIT, Scores, WindowScorer
from modalities.dna.splits import GenomeSplit
from modalities.heldout import Heldout

__all__ = ["Baseline", "BaselineConfig", "SequenceWriter", "Uniform"]

VERSION = 1  # raised when counts or the choice of τ change, so that stored numbers and tables are not reused


@dataclass(frozen=True)
class BaselineConfig:
    """The part of a model's configuration that tables, figures and evaluators read.

    Attributes:
        position: the baseline's name, which gives it its style in figures.
        train_context: default lengths are multiples of it; that of the models beside it.
        version: of what a chain learns, so that older stored numbers are not reused.
    """

    position: str
    train_context: int = 256
    ssmax: bool = False
    tokenizer: str = "bases"
    strands: str = "one"
    version: int = VERSION


class Baseline(WindowScorer):
    """A module without parameters that evaluators measure as they measure models."""

    version: ClassVar[int] = VERSION

    def __init__(self, config: BaselineConfig) -> None:
        super().__init__()
        self.config = config

    def fit(self, data: Heldout[GenomeSplit]) -> None:
        """Learn from the training regions of a source; Markov chains do."""
        return None

    def score(self, windows: np.ndarray) -> Scores:
        nll, correct = self.costs(windows)
        known = torch.from_numpy(windows < UNKNOWN)
        return Scores(nll.where(known, 0.0), known.long(), correct.where(known, 0.0))

    @abstractmethod
    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """nll and correct as in `Scores`, both (B, T) float64; any value where a base is unknown."""


class SequenceWriter(ABC):
    """A module that continues sequences itself, instead of through a decoder's cache."""

    @abstractmethod
    def write_bases(self, prompts: np.ndarray, *, new_bases: int, temperature: float, seed: int) -> np.ndarray:
        """(B, new_bases) codes after prompts (B, P); the likeliest ones at temperature 0."""


class Uniform(Baseline):
    def costs(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        nll = torch.full(windows.shape, 2 * BIT, dtype=torch.float64)
        return nll, torch.full_like(nll, 0.25)
