"""What all DNA evaluators share: their settings, and where held-out data comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from modalities.dna.held_out import DnaSource, held_out, source_name
from modalities.evaluation import CellValue, EvalSettings, Evaluator, Settings
from zoo.naming import did_you_mean

FACTORS = (1, 2, 4, 8, 16, 32, 64)  # default lengths, in training lengths
STRANDS = ("one", "both")


@dataclass(frozen=True)
class DnaSettings(EvalSettings):
    """Settings of evaluators over DNA. Lengths are in tokens; None takes 1, 2, 4, ... 64 times the training length.

    Args:
        strands: "one" reads a sequence as it is written, "both" takes the mean of it and its reverse complement; None is what
            the model's configuration says, else "one".
        new_bases: to write in a continuation.
        temperature: of sampling; 0 is the likeliest base each time.
        fasta: file of sequences to score.
        variants: file of variants to score.
        split: BED that says what of ``source`` is held out, where its own does not.
        window: bases of a sequence, or around a variant, that are read at once; None is the evaluator's default.
    """

    strands: str | None = None
    new_bases: int = 200
    temperature: float = 1.0
    fasta: str | None = None
    variants: str | None = None
    window: int | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None and not isinstance(self.source, DnaSource):
            if self.source is None:
                raise ValueError(f"split {self.split!r} needs the source that it splits")
            object.__setattr__(self, "source", DnaSource(self.source, self.split))
        if self.strands not in (None, *STRANDS):
            raise ValueError(
                f"strands {self.strands!r}: {did_you_mean(str(self.strands), STRANDS)}expected 'one' or 'both'"
            )
        for name in ("new_bases", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number from 0 on, got {self.temperature}")

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        return self.lengths or tuple(train_context * factor for factor in FACTORS)


class DnaEvaluator(Evaluator):
    """An evaluator whose held-out data is that of the recipe a model was trained by, unless another source is asked for."""

    settings: ClassVar[type[Settings]] = DnaSettings
    unit = "bases"

    def source_of(self, data: Mapping[str, Any]) -> DnaSource:
        return DnaSource(**{name: data[name] for name in ("source", "split") if data.get(name)})

    def source_name(self, settings: DnaSettings) -> str:
        return source_name(settings.source)

    def run(
        self, model: nn.Module, settings: DnaSettings, *, finished: Mapping[str, CellValue] | None = None
    ) -> Iterator[tuple[str, CellValue]]:
        """As `Evaluator.run`; a baseline learns from the training split of the source before."""
        if hasattr(model, "learn_from"):
            model.learn_from(held_out(settings.source))
        yield from super().run(model, settings, finished=finished)
