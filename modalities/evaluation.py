"""What an evaluator is: cells, rows and a figure, by its settings, in one file.

An evaluator is a set of *cells* (one length and depth, one stretch of text, one task), each
computed on its own and deterministic given the settings, so a run that is stopped loses one cell at
most. It is the same during training and after.

The least that a new evaluator defines is `name`, `summary`, `scores`, `cells` and `measure`: rows
are then means over the cells at each place of the axis, and the figure has a panel for each score.
Its class names its settings, whose fields are options of the command, and its models:
`class Find(Evaluator[SceneSettings, VisionTransformer])`. With `paired_over` and `observed` models
can be compared unit by unit too (`--against`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, cast, get_args

from typing_extensions import TypeVar

from modalities.figures import scores_figure
from modalities.loading import Heldout
from modalities.paired import Observed, Place, ScoresByUnit, paired_rows, scores_by_unit
from modalities.results import (
    LENGTH,
    Axis,
    CellValue,
    ModelResult,
    Row,
    Score,
    file_safe,
    mean_of_rows,
)
from modalities.settings import LengthSettings, Settings
from modalities.tables import write_table
from zoo.errors import nearest

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Cell:
    """One unit of work: `name` keys its result, `cost` (the evaluator's units to read) drives the
    progress bar."""

    name: str
    cost: int
    data: Row = field(default_factory=dict, compare=False)


S = TypeVar("S", bound=Settings, default=Any)
Model = TypeVar("Model", default=Any)


class Evaluator(ABC, Generic[S, Model]):
    """One measurement, bound to its settings and to the held-out data that they name. trained_on:
    the data section of the model's recipe; where settings name no source, what that training held
    out may be measured."""

    # Its name on the command line; a line for --help and errors; a title of its panel in
    # overview.png, the name where empty.
    name: ClassVar[str]
    summary: ClassVar[str]
    title: ClassVar[str] = ""
    # Raised when prompts or scoring change, so that earlier cells are not reused.
    version: ClassVar[int] = 1
    # What tables show and figures draw; set on the instance where it depends on settings.
    scores: tuple[Score, ...]
    # What represents it in overview.png, next to other evaluators of its axis.
    overview: Score | None = None
    # By default the S of the nearest class that names one.
    settings_class: ClassVar[type[Settings]] = LengthSettings
    axis: ClassVar[Axis] = LENGTH
    # What the cost of a cell counts.
    unit: ClassVar[str] = "tokens"
    # What `observed` tells apart, such as "documents"; empty: no paired comparison.
    paired_over: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings = _settings_argument(cls)
        if settings is not None and "settings_class" not in vars(cls):
            cls.settings_class = settings

    def __init__(
        self, settings: S | None = None, trained_on: Mapping[str, Any] | None = None
    ) -> None:
        self.settings: S = cast(S, self.settings_class()) if settings is None else settings
        self.trained_on = trained_on or {}
        # `measure` calls it with the units of its cell that it has read; the rest is added when the
        # cell is done.
        self.advance: Callable[[int], object] = lambda units: None

    # The held-out data.

    @property
    def heldout(self) -> Heldout[Any] | None:
        """The held-out data, opened once per process; None for evaluators that make their own
        samples."""
        return None

    @property
    def source_name(self) -> str | None:
        """What files call the held-out data; known without opening it."""
        return self.settings.source

    @property
    def note(self) -> str:
        """What is to be said of the held-out data before they are measured; empty: nothing."""
        return ""

    def model_note(self, model: Model) -> str:
        """What is to be said of a model on the held-out data before it is measured; empty:
        nothing."""
        return ""

    # The model on the axis.

    def trained_at(self, model: Model) -> int:
        """The place of training on the axis."""
        return cast(Any, model).config.train_context

    @property
    def trained_range(self) -> tuple[int, ...]:
        """Least and greatest place of training on the axis, for models that `trained_on` trained at
        several; else ()."""
        return ()

    def longest(self, model: Model) -> int | None:
        """The greatest length for which the model has positions; None where it has no table of
        them."""
        return getattr(cast(Any, model).config, "max_context", None)

    def lengths_for(self, model: Model) -> tuple[int, ...]:
        """`lengths` of the settings, a ValueError where the model has no positions for one; by
        default those of `factors` for which it has."""
        settings = cast(LengthSettings, self.settings)
        most = self.longest(model)
        lengths = settings.resolved_lengths(self.trained_at(model))
        greatest = lengths[-1]
        if most is None or greatest <= most:
            return lengths
        if settings.lengths:
            reason = f"is beyond the {most} positions that the model has"
            raise ValueError(f"length {greatest} {reason}: at most --lengths {most}")
        return tuple(length for length in lengths if length <= most)

    def at_once(self, model: Model, length: int) -> int:
        """How much of a text of `length` is read: at most the training length under a control
        (`CutSettings`)."""
        if getattr(self.settings, "control", None):
            return min(length, self.trained_at(model))
        return length

    # Cells.

    def identity(self, model: Model) -> Row:
        """What a cell's number depends on besides the model, the key of stored cells: by default
        the bytes of the held-out data and all settings, the source by its name where there is no
        `heldout`. Leave out what only decides which cells there are."""
        identity = dataclasses.asdict(self.settings)
        del identity["source"]
        del identity["batch_tokens"]
        if self.heldout:
            identity["heldout"] = self.heldout.fingerprint
        elif self.source_name is not None:
            identity["source"] = self.source_name
        return identity

    def points(self, model: Model) -> tuple[Place, ...]:
        """The places on the axis that are measured."""
        places = [cell.data[self.axis.column] for cell in self.cells(model)]
        return tuple(dict.fromkeys(places))

    @abstractmethod
    def cells(self, model: Model) -> list[Cell]:
        """Every cell, in order, with its samples drawn.

        Raises ValueError for what cannot be measured.
        """

    def trials(self, cells: list[Cell]) -> list[Cell]:
        """The cells that may be timed before the measurement; shorter ones made for it where every
        cell takes long."""
        return cells

    @abstractmethod
    def measure(self, model: Model, cell: Cell) -> CellValue:
        """The numbers of one cell, the axis's column among them."""

    def run(
        self, model: Model, finished: Mapping[str, CellValue] | None = None
    ) -> Iterator[tuple[str, CellValue]]:
        """Yield (cell name, value) for every cell, in order; those in `finished`, which may grow
        meanwhile, are passed on."""
        for cell in self.cells(model):
            value = None if finished is None else finished.get(cell.name)
            if value is None:
                value = self.measure(model, cell)
            yield cell.name, value

    # Rows and comparisons.

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        """Cells gathered into table rows; by default the mean of every number at each place of the
        axis."""
        column = self.axis.column
        by_place: dict[Place, list[CellValue]] = {}
        for cell in cells.values():
            by_place.setdefault(cell[column], []).append(cell)
        rows = []
        for place in sorted(by_place):
            mean = mean_of_rows(by_place[place])
            del mean[column]
            rows.append({column: place, **mean})
        return rows

    def observed(self, name: str, cell: CellValue) -> Iterable[Observed]:
        """The scores of the units in the cell called `name`: of the documents, prompts or contigs
        that the data varies by. A unit has one name for all models and in all cells."""
        return ()

    def paired(self, results: Sequence[ModelResult], against: str) -> list[Row]:
        """Differences to the model labelled `against`, as `paired_rows`; seeds of a group are one
        model, by their means. ValueError where no result has that label, or there is no other."""
        scores: dict[str, list[ScoresByUnit]] = {}
        reference = None
        for result in results:
            name = result.group or result.label
            scores.setdefault(name, []).append(scores_by_unit(self._observed_in(result)))
            if reference is None and result.label == against:
                reference = name
        if reference is None or len(scores) < 2:
            measured = f"measured are {', '.join(scores)} (seeds of a set-up count as one)"
            raise ValueError(f"nothing to compare with {against!r}: {measured}")
        rows = []
        for name in scores:
            if name != reference:
                for row in paired_rows(scores[name], scores[reference], self.axis.column):
                    rows.append({"model": name, "against": reference, **row})
        return rows

    def _observed_in(self, result: ModelResult) -> Iterator[Observed]:
        for name, value in result.cells.items():
            yield from self.observed(name, value)

    def numbers(self, model: Model) -> dict[str, float]:
        """The finite scores of a model by name and place, such as {"passkey/free_generation@512":
        0.98}."""
        rows = self.rows(dict(self.run(model)))
        scores = [score for score in self.scores if score.tabled and not score.exception]
        numbers: dict[str, float] = {}
        for row in rows:
            place = self.axis.tick(row[self.axis.column])
            for score in scores:
                value = row.get(score.column)
                if value is not None and math.isfinite(value):
                    numbers[f"{self.name}/{score.column}@{place}"] = float(value)
        return numbers

    # Figures, tables and files.

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """All models in one figure, written to `path`; by default a panel of curves for each
        score."""
        scores_figure(results, path, self.scores, self.axis)

    def measured(self, results: list[ModelResult]) -> str:
        """A line above the table: what was measured of what was asked for, and what was left out;
        "" where that is all."""
        return ""

    def show(self, results: list[ModelResult], console: Console) -> None:
        """What a rich `console` shows besides the table; nothing by default."""

    def write(self, results: list[ModelResult], out: Path) -> None:
        """Files in folder `out` besides JSON, CSV and PNG; none by default."""


def _settings_argument(kind: type) -> type[Settings] | None:
    """`SceneSettings` of `class Find(Evaluator[SceneSettings, VisionTransformer])`."""
    for base in vars(kind).get("__orig_bases__", ()):
        for argument in get_args(base):
            if inspect.isclass(argument) and issubclass(argument, Settings):
                return argument
    return None


class Listing(Evaluator[S, Model]):
    """An evaluator of entries, such as those of a file: a row for each, in order, without an axis
    and a figure. `show` prints instead of the table of the others, and every model gets a table of
    its own, EVAL.MODEL.tsv."""

    axis = Axis("name", "entry")

    def points(self, model: Model) -> tuple[Place, ...]:
        return ()

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Nothing."""

    @abstractmethod
    def show(self, results: list[ModelResult], console: Console) -> None:
        """The first rows, and totals."""

    def write(self, results: list[ModelResult], out: Path) -> None:
        for result in results:
            name = f"{self.name}.{file_safe(result.label)}.tsv"
            write_table(out / name, result.rows, delimiter="\t")


def find_evaluators(package: str) -> dict[str, type[Evaluator]]:
    """The evaluators of all modules of a package, by name, in the order of their modules' names."""
    evaluators: dict[str, type[Evaluator]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(kind) or not issubclass(kind, Evaluator):
                continue
            if kind.__module__ == module.name and not inspect.isabstract(kind):
                evaluators[kind.name] = kind
    return evaluators


def scheduled_evaluators(
    during: Mapping[str, object],
    known: Mapping[str, type[Evaluator]],
    trained_on: Mapping[str, Any],
) -> list[tuple[int, Evaluator]]:
    """(steps between its runs, evaluator) of each entry of a recipe's `evaluate.during`; ValueError
    for a wrong entry."""
    kinds = {name: kind for name, kind in known.items() if not issubclass(kind, Listing)}
    evaluators: list[tuple[int, Evaluator]] = []
    for name, entry in during.items():
        if name not in kinds:
            raise ValueError(
                f"evaluate.during: no evaluator {name!r} for these models; {nearest(name, kinds)}"
            )
        values: dict[str, Any] = {**entry} if isinstance(entry, Mapping) else {"every": entry}
        every = values.pop("every", None)
        if type(every) is not int or every < 1:
            raise ValueError(
                f"evaluate.during: {name}={entry!r}: "
                "expected a number of steps or settings with 'every'"
            )
        try:
            settings = _read_settings(kinds[name], values)
            evaluators.append((every, kinds[name](settings, trained_on)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"evaluate.during: {name}={entry!r}: {error}") from error
    return evaluators


def _read_settings(kind: type[Evaluator], values: Mapping[str, Any]) -> Settings:
    """An evaluator's settings from JSON values, or from texts as on the command line."""
    parsers = {}
    for setting in dataclasses.fields(kind.settings_class):
        parsers[setting.name] = setting.metadata.get("parse")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if key not in parsers:
            raise ValueError(f"{kind.name} has no setting {key!r}; {nearest(key, parsers)}")
        parse = parsers[key]
        if parse is not None and isinstance(value, str | int | float):
            value = parse(str(value))
        settings[key] = tuple(value) if isinstance(value, list) else value
    return kind.settings_class(**settings)
