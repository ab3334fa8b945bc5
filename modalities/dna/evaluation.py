"""What DNA evaluators share: settings of sources and strands, held-out data, tokens as windows of bases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from modalities.dna.baselines.base import Baseline
from modalities.dna.config import DEFAULT_SOURCE
from modalities.dna.data import open_heldout
from modalities.dna.scoring import STRANDS
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.splits import GenomeSplit
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import CellValue, Evaluator, LengthSettings, ModelResult, Settings, check_choice, option
from modalities.heldout import Heldout
from zoo.model import ZooModel

__all__ = ["DnaEvaluator", "DnaSettings", "StrandSettings", "short_name", "strands_of", "window_of"]


@dataclass(frozen=True)
class DnaSettings(Settings):
    """A source, and how it is split."""

    split: str | None = option(None, "BED file of what --source holds out; default: the source's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None and self.source is None:
            raise ValueError(f"split {self.split!r} needs the source that it splits")


@dataclass(frozen=True)
class StrandSettings(Settings):
    """Which strands likelihoods are of."""

    strands: str | None = option(
        None, "one, or both: the mean of a window and its reverse complement; default: as the model was trained"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("strands", self.strands, STRANDS)


@dataclass(frozen=True)
class DnaLengthSettings(LengthSettings, DnaSettings):
    """Lengths are in tokens."""

    factors: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32, 64)


class DnaEvaluator(Evaluator):
    """An evaluator whose held-out data is that of the model's training, unless settings name a source."""

    settings_class: ClassVar[type[Settings]] = DnaLengthSettings
    unit = "bases"

    @cached_property
    def source(self) -> DnaSource:
        if self.settings.source is not None:
            return find_source(self.settings.source, self.settings.split)
        return find_source(self.trained_on.get("source") or DEFAULT_SOURCE, self.trained_on.get("split") or None)

    @property
    def heldout(self) -> Heldout[GenomeSplit]:
        return open_heldout(self.source)

    @property
    def source_name(self) -> str:
        return self.source.name

    def run(self, model: ZooModel, finished: Mapping[str, CellValue] | None = None) -> Iterator[tuple[str, CellValue]]:
        """As `Evaluator.run`; baselines are fitted to the training split of the source first."""
        if isinstance(model, Baseline):
            model.fit(self.heldout)
        yield from super().run(model, finished)


def strands_of(model: ZooModel, settings: StrandSettings) -> str:
    return settings.strands or model.config.strands


def window_of(model: ZooModel, length: int) -> int:
    """Bases of a window of `length` tokens: `length` times the tokenizer's mean bases per token."""
    return round(length * load_tokenizer(model.config.tokenizer).bases_per_token)


def short_name(result: ModelResult, among: Sequence[ModelResult]) -> str:
    """The method where that tells models apart, else the label."""
    methods = {other.method for other in among}
    return result.method if result.method and len(methods) == len(among) else result.label
