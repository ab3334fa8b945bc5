"""What every evaluator shares: its settings, its cells and what becomes of them.

An evaluator is a set of *cells* (one length and depth, one stretch of text, one task), each computed on its own and
deterministic given the settings, so that a run stopped at any moment loses one cell at most. In the manner of
big_vision an evaluator yields ``(name, value)`` pairs; unlike there, a value is a small dictionary of numbers.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from modalities.store import CellValue, file_safe, write_table


@dataclass(frozen=True)
class Settings:
    """How to measure; a modality adds what its evaluators understand. What is no field here or there is no option of it.

    Every field either enters ``Evaluator.identity`` or cannot change a number.

    Args:
        samples: how many samples (in each cell, or in all, as the evaluator says); None takes the evaluator's default.
        source: where held-out data comes from, in the words of the modality's recipes.
        batch_tokens: most tokens in one forward pass; the batch size is this over the tokens of a sample, at least 1.
    """

    samples: int | None = None
    source: str | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens must be at least 1, got {self.batch_tokens}")

    def batch_size(self, tokens: int) -> int:
        return max(1, self.batch_tokens // tokens)


@dataclass(frozen=True)
class EvalSettings(Settings):
    """Settings of evaluators along a line of tokens.

    Args:
        lengths: sequence lengths in tokens, ascending once built; None takes 1, 2, ... 32 times the training length.
        seed: everything drawn at random follows from it.
    """

    lengths: tuple[int, ...] | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths is not None:
            bad = [length for length in self.lengths if length < 2]
            if bad or not self.lengths:
                raise ValueError(f"lengths must be token counts of at least 2, got {list(self.lengths)}")
            object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        return self.lengths or tuple(train_context * 2**k for k in range(6))


@dataclass(frozen=True)
class Cell:
    """One unit of work: ``name`` keys its result, ``cost`` (the evaluator's units to read) drives the progress bar."""

    name: str
    cost: int
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ModelResult:
    """All that one evaluator found about one model: what tables, files and figures are made from."""

    label: str
    trained_at: int  # on the evaluator's axis
    rows: list[dict[str, Any]]
    cells: dict[str, CellValue]
    method: str = ""  # "ggd_ssmax": gives the model its colour
    weights: str = ""
    seconds: float = 0.0
    group: str = ""  # models of one group are seeds of one set-up: tables and figures show their mean
    source: str | None = None  # of held-out data; None is the evaluator's own


@dataclass(frozen=True)
class SeedMean(ModelResult):
    """Several seeds of one set-up as one result: ``rows`` are means, the others extremes and deviations, row by row."""

    low: list[dict[str, Any]] = field(default_factory=list)
    high: list[dict[str, Any]] = field(default_factory=list)
    deviation: list[dict[str, Any]] = field(default_factory=list)  # sample standard deviation
    seeds: int = 1


def mean_of_seeds(results: Sequence[ModelResult], axis: str) -> list[ModelResult]:
    """``results`` with those of each group replaced by one `SeedMean`, at the place of the first.

    A row of it is the mean over seeds of every number, where all seeds have a row of the same ``axis``. Where one seed's
    number is NaN, mean and extremes are; a deviation is NaN unless all are finite.

    Raises:
        ValueError: for a group of models that were not trained at the same place.
    """
    groups: dict[tuple[str, str], list[ModelResult]] = {}
    for n, result in enumerate(results):
        key = ("group", result.group) if result.group else ("single", str(n))
        groups.setdefault(key, []).append(result)
    return [members[0] if len(members) == 1 else _seed_mean(members, axis) for members in groups.values()]


def _seed_mean(members: list[ModelResult], axis: str) -> SeedMean:
    first = members[0]
    if len({(member.trained_at, member.method) for member in members}) > 1:
        raise ValueError(
            f"{', '.join(m.label for m in members)} are no seeds of one set-up: they were trained differently"
        )
    by_point = [{row[axis]: row for row in member.rows} for member in members]
    points = [point for point in by_point[0] if all(point in rows for rows in by_point)]

    def reduced(how: Callable[[list[float]], float]) -> list[dict[str, Any]]:
        rows = []
        for point in points:
            row = {name: _reduce([rows[point].get(name) for rows in by_point], how) for name in by_point[0][point]}
            rows.append(row | {axis: point})
        return rows

    return SeedMean(
        first.group,
        first.trained_at,
        reduced(_mean),
        {},
        method=first.method,
        seconds=sum(member.seconds for member in members),
        group=first.group,
        source=first.source,
        low=reduced(lambda values: _extreme(min, values)),
        high=reduced(lambda values: _extreme(max, values)),
        deviation=reduced(_deviation),
        seeds=len(members),
    )


def _mean(values: list[float]) -> float:
    # fmean refuses the sum of an infinity and its negative
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def _extreme(choose: Callable[[list[float]], float], values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else choose(values)  # where a NaN stands would decide


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _reduce(values: list[Any], how: Callable[[list[float]], float]) -> Any:
    """Numbers by ``how``, lists of numbers place by place; anything else stays where all agree, else is None."""
    if all(isinstance(value, (int, float)) for value in values):
        return how(values)
    if all(isinstance(value, list) for value in values):
        return [_reduce(list(column), how) for column in zip(*values, strict=False)]
    return values[0] if all(value == values[0] for value in values) else None


class Evaluator(ABC):
    """Base of all evaluators. A modality lists its own in ``modalities.<modality>.evals.EVALUATORS``."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line, for --help and error texts
    version: ClassVar[int] = 1  # raised when prompts or scoring change, so that cells of before are not reused
    headline: ClassVar[tuple[str, ...]]  # the columns of a row that a person looks at first; rows may lack some
    exceptions: ClassVar[tuple[str, ...]] = ()  # counts among them that are shown where they are not 0
    settings: ClassVar[type[Settings]] = EvalSettings
    axis: ClassVar[str] = "length"  # the column of a row that curves run along
    unit: ClassVar[str] = "tokens"  # what the cost of a cell counts
    trained: ClassVar[str] = "train_context"  # what files call the place of training on the axis

    def trained_at(self, model: nn.Module) -> int:
        """The place of training on the axis."""
        return model.config.train_context

    def points(self, model: nn.Module, settings: Any) -> tuple[int, ...]:
        """The places on the axis that ``settings`` ask for."""
        return settings.resolved_lengths(self.trained_at(model))

    def source_of(self, data: Mapping[str, Any]) -> Any:
        """What ``settings.source`` becomes where none was asked for, from the data section of the recipe a model was trained
        by; None leaves it to the evaluator. Raises ValueError where the recipe does not say what is held out."""
        return None

    def source_name(self, settings: Any) -> str | None:
        """What files call the held-out data."""
        return settings.source

    @abstractmethod
    def identity(self, model: nn.Module, settings: Any) -> dict[str, Any]:
        """The settings that change a cell's number (lengths only where cells of one length depend on the others)."""

    @abstractmethod
    def cells(self, model: nn.Module, settings: Any) -> list[Cell]:
        """Every cell, in order, with its samples made. Raises ValueError for what cannot be measured."""

    @abstractmethod
    def measure(self, model: nn.Module, cell: Cell, settings: Any) -> CellValue:
        """The numbers of one cell."""

    @abstractmethod
    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """Cells gathered into table rows: what is printed and written as CSV."""

    @abstractmethod
    def draw(self, results: list[ModelResult], path: Path) -> None:
        """All models in one figure, written to ``path``; further ones next to it, by names that start with the evaluator's."""

    def show(self, results: list[ModelResult], console: Any) -> None:
        """What a rich ``console`` shows besides the table; nothing unless an evaluator has more to say."""
        return None

    def write(self, results: list[ModelResult], out: Path) -> None:
        """Files in folder ``out`` besides JSON, CSV and PNG; none unless an evaluator has its own."""
        return None

    def run(
        self, model: nn.Module, settings: Any, *, finished: Mapping[str, CellValue] | None = None
    ) -> Iterator[tuple[str, CellValue]]:
        """Yield ``(cell name, value)`` for every cell, in order; those in ``finished`` are handed on, not computed."""
        finished = finished or {}
        for cell in self.cells(model, settings):
            value = finished.get(cell.name)
            yield cell.name, self.measure(model, cell, settings) if value is None else value


class Listing(Evaluator):
    """An evaluator of the entries of a file: a row for each, in the file's order, and no places on an axis.

    ``show`` prints instead of the table of the others. ``write`` gives every model a table of its own, EVAL.MODEL.tsv.
    """

    axis = "name"

    def points(self, model: nn.Module, settings: Any) -> tuple[int, ...]:
        return ()

    @abstractmethod
    def show(self, results: list[ModelResult], console: Any) -> None:
        """The rows that a person looks at first, and totals."""

    def write(self, results: list[ModelResult], out: Path) -> None:
        for result in results:
            write_table(out / f"{self.name}.{file_safe(result.label)}.tsv", result.rows, delimiter="\t")


def batches(count: int, size: int) -> Iterable[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def standard_error(values: np.ndarray) -> float:
    """Of the mean of N values, from their sample standard deviation; NaN for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
