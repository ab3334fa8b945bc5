"""What an evaluator is: settings, cells, rows and a figure, in one file.

An evaluator is a set of *cells* (one length and depth, one stretch of text, one task), each computed on its own and
deterministic given the settings, so a run that is stopped loses one cell at most. As in big_vision, an evaluator yields
(name, value) pairs and is the same during training and after it; here a value is a small dictionary of numbers.

The least that a new evaluator defines is `name`, `summary`, `scores`, `cells` and `measure`: rows are then means over the
cells at each place of the axis, the figure has a panel for each score, and the options of the command are the fields of
`settings_class`. A modality finds the evaluators in its folder `evaluators/` (`find_evaluators`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from modalities.files import file_safe, write_table
from modalities.heldout import Heldout
from zoo.model import ZooModel
from zoo.naming import did_you_mean

__all__ = [
    "LENGTH",
    "Axis",
    "Cell",
    "CellValue",
    "Evaluator",
    "LengthSettings",
    "Listing",
    "ModelResult",
    "Score",
    "SeedMean",
    "Settings",
    "batches",
    "compact",
    "counts",
    "find_evaluators",
    "mean_of_seeds",
    "option",
    "standard_error",
]

CellValue = dict[str, Any]  # numbers, or lists of numbers: whatever JSON carries


# ------------------------------------------------------------------------------------------------ settings


def option(default: Any, help: str, *, parse: Callable[[str], Any] | None = None) -> Any:
    """A dataclass field that is also an option of the evaluate command: `--sizes` for `sizes`.

    parse: text to value, raising ValueError; by default the field's type is applied.
    """
    return field(default=default, metadata={"help": help, "parse": parse})


def counts(text: str) -> tuple[int, ...]:
    """ "128,512,4k" to (128, 512, 4096)."""
    scale = {"k": 2**10, "m": 2**20}
    found = []
    for part in filter(None, (p.strip().lower() for p in text.split(","))):
        number, factor = (part[:-1], scale[part[-1]]) if part[-1] in scale else (part, 1)
        if not number.isdigit():
            raise ValueError(f"{part!r} is not a count; expected numbers such as 128,512,4k")
        found.append(int(number) * factor)
    return tuple(found)


def check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """ValueError for a value that is neither None nor one of `choices`; it names the nearest."""
    if value is not None and value not in choices:
        raise ValueError(f"{name} {value!r}; {did_you_mean(str(value), choices)}expected {' or '.join(choices)}")


@dataclass(frozen=True)
class Settings:
    """How to measure. Every field is an option of the evaluate command; raises ValueError for values that cannot work."""

    samples: int | None = option(None, "per cell, or in all, as the evaluator says; default: the evaluator's own")
    source: str | None = option(None, "where held-out data comes from, as in a recipe; default: what training held out")
    batch_tokens: int = option(16384, "most tokens in one forward pass")

    def __post_init__(self) -> None:
        for name in ("samples", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def batch_size(self, tokens: int) -> int:
        return max(1, self.batch_tokens // tokens)


@dataclass(frozen=True)
class LengthSettings(Settings):
    """Settings of evaluators along a line of tokens."""

    lengths: tuple[int, ...] | None = option(
        None, "tokens, as 128,512,4k; default: multiples of the training length", parse=counts
    )
    seed: int = option(42, "of every random draw")

    factors: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32)  # default lengths, in training lengths

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lengths is not None:
            if not self.lengths or min(self.lengths) < 2:
                raise ValueError(f"lengths must be token counts of at least 2, got {list(self.lengths)}")
            object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))

    def resolved_lengths(self, train_context: int) -> tuple[int, ...]:
        """Ascending; by default `factors` times the training length."""
        return self.lengths or tuple(train_context * factor for factor in self.factors)


# ------------------------------------------------------------------------------------------------ results


def compact(number: float) -> str:
    """128, 1k, 1.5k, 32k, 1M: lengths as tick labels, in powers of two."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


@dataclass(frozen=True)
class Axis:
    """What curves run along: a column of rows, its label, how a tick is written, what files call the place of training."""

    column: str
    label: str
    tick: Callable[[Any], str] = str
    trained: str = "train_context"


LENGTH = Axis("length", "length (tokens, log₂)", compact)


@dataclass(frozen=True)
class Score:
    """A column of rows that tables and figures show.

    Attributes:
        column: its name; rows may lack it.
        label: of the figure's panel; the name where empty.
        unit_interval: the panel's axis is 0 to 1.
        linear: the panel's axis is never logarithmic.
        exception: a count that tables show where it is not 0, and figures do not.
        tabled, drawn: whether tables show it, and the default figure has a panel for it.
    """

    column: str
    label: str = ""
    unit_interval: bool = False
    linear: bool = False
    exception: bool = False
    tabled: bool = True
    drawn: bool = True


@dataclass(frozen=True)
class Cell:
    """One unit of work: `name` keys its result, `cost` (the evaluator's units to read) drives the progress bar."""

    name: str
    cost: int
    data: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ModelResult:
    """All that one evaluator found about one model: what tables, files and figures are made from."""

    label: str
    trained_at: int  # on the evaluator's axis
    rows: list[dict[str, Any]]
    cells: dict[str, CellValue] = field(default_factory=dict)
    method: str = ""  # "ggd_ssmax": gives the model its colour
    weights: str = ""
    seconds: float = 0.0
    group: str = ""  # models of one group are seeds of one set-up: tables and figures show their mean
    source: str | None = None  # of held-out data; None for evaluators that have none


@dataclass(frozen=True)
class SeedMean(ModelResult):
    """Several seeds of one set-up as one result: `rows` are means, the others extremes and deviations, row by row."""

    low: list[dict[str, Any]] = field(default_factory=list)
    high: list[dict[str, Any]] = field(default_factory=list)
    deviation: list[dict[str, Any]] = field(default_factory=list)  # sample standard deviation
    seeds: int = 1


def mean_of_seeds(results: Sequence[ModelResult], axis: str) -> list[ModelResult]:
    """`results` with those of each group replaced by one `SeedMean`, at the place of the first.

    Its rows are means over seeds of every number, where all seeds have a row of the same `axis`. Where one seed's number is
    NaN, mean and extremes are NaN; a deviation is NaN unless all are finite.

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
            f"{', '.join(m.label for m in members)} are not seeds of one set-up: they were trained differently"
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
    return math.nan if any(map(math.isnan, values)) else choose(values)  # min and max depend on where a NaN is


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _reduce(values: list[Any], how: Callable[[list[float]], float]) -> Any:
    """Numbers by `how`, lists of numbers place by place; anything else is kept where all agree, else None."""
    if all(isinstance(value, (int, float)) for value in values):
        return how(values)
    if all(isinstance(value, list) for value in values):
        return [_reduce(list(column), how) for column in zip(*values, strict=False)]
    return values[0] if all(value == values[0] for value in values) else None


# ------------------------------------------------------------------------------------------------ evaluators


class Evaluator(ABC):
    """One measurement, bound to its settings and to the held-out data that they name.

    Args:
        settings: of `settings_class`.
        trained_on: the data section of the recipe that the model was trained by; where settings name no source, an
            evaluator may take what that training held out.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line, for --help and error messages
    version: ClassVar[int] = 1  # raised when prompts or scoring change, so that earlier cells are not reused
    scores: ClassVar[tuple[Score, ...]]  # what tables show and figures draw
    overview: ClassVar[Score | None] = None  # what represents it in overview.png, beside other evaluators of its axis
    settings_class: ClassVar[type[Settings]] = LengthSettings
    axis: ClassVar[Axis] = LENGTH
    unit: ClassVar[str] = "tokens"  # what the cost of a cell counts

    def __init__(self, settings: Any = None, trained_on: Mapping[str, Any] | None = None) -> None:
        self.settings: Any = self.settings_class() if settings is None else settings
        self.trained_on = trained_on or {}

    @property
    def heldout(self) -> Heldout[Any] | None:
        """The held-out data, opened once per process; None for evaluators that make their own samples."""
        return None

    @property
    def source_name(self) -> str | None:
        """What files call the held-out data; known without opening it."""
        return self.settings.source

    def trained_at(self, model: ZooModel) -> int:
        """The place of training on the axis."""
        return model.config.train_context

    def identity(self, model: ZooModel) -> dict[str, Any]:
        """What a cell's number depends on besides the model: by default all settings but the source, and the held-out data.

        Stored cells are keyed by it. Leave out what only decides which cells there are.
        """
        kept = {k: v for k, v in dataclasses.asdict(self.settings).items() if k not in ("source", "batch_tokens")}
        return kept | ({"heldout": self.heldout.fingerprint} if self.heldout else {})

    def points(self, model: ZooModel) -> tuple[Any, ...]:
        """The places on the axis that are measured."""
        return tuple(dict.fromkeys(cell.data[self.axis.column] for cell in self.cells(model)))

    @abstractmethod
    def cells(self, model: ZooModel) -> list[Cell]:
        """Every cell, in order, with its samples drawn. Raises ValueError for what cannot be measured."""

    @abstractmethod
    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """The numbers of one cell, the axis's column among them."""

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        """Cells gathered into table rows; by default the mean of every number at each place of the axis."""
        column = self.axis.column
        by_point: dict[Any, list[CellValue]] = {}
        for cell in cells.values():
            by_point.setdefault(cell[column], []).append(cell)
        return [
            {column: point}
            | {name: _reduce([cell.get(name) for cell in mine], _mean) for name in mine[0] if name != column}
            for point, mine in sorted(by_point.items())
        ]

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """All models in one figure, written to `path`; by default a panel of curves for each score."""
        from modalities.figures import scores_figure

        scores_figure(results, path, self.scores, self.axis)

    def show(self, results: list[ModelResult], console: Any) -> None:
        """What a rich `console` shows besides the table; nothing by default."""
        return None

    def write(self, results: list[ModelResult], out: Path) -> None:
        """Files in folder `out` besides JSON, CSV and PNG; none by default."""
        return None

    def run(self, model: ZooModel, finished: Mapping[str, CellValue] | None = None) -> Iterator[tuple[str, CellValue]]:
        """Yield (cell name, value) for every cell, in order; those in `finished` are passed on, not computed."""
        finished = finished or {}
        for cell in self.cells(model):
            value = finished.get(cell.name)
            yield cell.name, self.measure(model, cell) if value is None else value


class Listing(Evaluator):
    """An evaluator of the entries of a file: a row for each, in the file's order, without an axis.

    `show` prints instead of the table of the others, and every model gets a table of its own, EVAL.MODEL.tsv.
    """

    axis = Axis("name", "entry")

    def points(self, model: ZooModel) -> tuple[Any, ...]:
        return ()

    @abstractmethod
    def show(self, results: list[ModelResult], console: Any) -> None:
        """The first rows, and totals."""

    def write(self, results: list[ModelResult], out: Path) -> None:
        for result in results:
            write_table(out / f"{self.name}.{file_safe(result.label)}.tsv", result.rows, delimiter="\t")


def find_evaluators(package: str) -> dict[str, type[Evaluator]]:
    """The evaluators of all modules of a package, by name, in the order of their modules' names."""
    found: dict[str, type[Evaluator]] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        for kind in vars(importlib.import_module(module.name)).values():
            own = inspect.isclass(kind) and issubclass(kind, Evaluator) and kind.__module__ == module.name
            if own and not inspect.isabstract(kind):
                if kind.name in found:
                    raise ValueError(f"two evaluators of {package} are called {kind.name!r}")
                found[kind.name] = kind
    return found


def batches(count: int, size: int) -> Iterable[slice]:
    """0…count − 1 in slices of at most `size`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def standard_error(values: np.ndarray) -> float:
    """Of the mean of N values, from their sample standard deviation; NaN for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
