"""One evaluator on one model: its stored cells, how long it takes, and its run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from modalities.evaluation import Cell, Evaluator
from modalities.results import CellValue, ModelResult
from recipes.cell_store import CellStore, outside_hash, weights_hash
from recipes.commands import (
    CommandError,
    clock,
    facts_table,
    option_name,
    short,
)
from recipes.report import CellProgress, console
from recipes.targets import Target
from zoo.errors import ran_out_of_memory


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One evaluator on one model; its cells are stored in `out`/cells."""

    target: Target
    evaluator: Evaluator
    overrides: Mapping[str, object]
    out: Path

    def store(self) -> CellStore:
        """Finished cells, keyed by everything that a cell's number depends on.

        The device and the batch size change rounding and costs alone, and are left out: a finished
        cell keeps the time and the memory it took.
        """
        model = self.target.model
        evaluator = self.evaluator
        first_parameter = next(model.parameters(), None)
        key = {
            "evaluator": evaluator.name,
            "version": evaluator.version,
            "model": self.target.label,
            "weights": weights_hash(model),
            "config": dataclasses.asdict(model.config),
            "dtype": str(None if first_parameter is None else first_parameter.dtype),
            "overrides": self.overrides,
            "settings": evaluator.identity(model),
        }
        outside = outside_hash(model)
        if outside:
            key["outside"] = outside
        return CellStore(self.out / "cells", key)

    def work(self, cell: Cell) -> float:
        """What grows with a cell's place on the axis, and a unit's time with it.

        It is the tokens of a window, or the pixels of an image.
        """
        place = cell.data.get(self.evaluator.axis.column, 0)
        if not isinstance(place, int | float):
            return 0.0
        if self.evaluator.unit == "images":
            return float(place) ** 2
        return float(place)

    def timed(self, todo: Sequence[Cell], store: CellStore | None) -> tuple[float, float]:
        """(a, b): a unit takes a + b·work seconds.

        Measured on the cheapest of `trials` at each of the two least places. Those that are cells
        are stored where there is a store.
        """
        points = []
        trials = sorted(self.evaluator.trials(list(todo)), key=lambda cell: -cell.cost)
        # Later ones replace earlier ones: the cheapest at each place stays.
        cheapest = {self.work(cell): cell for cell in trials}
        for work, cell in sorted(cheapest.items())[:2]:
            started = time.perf_counter()
            value = self.evaluator.measure(self.target.model, cell)
            seconds = time.perf_counter() - started
            points.append((work, seconds / (cell.cost or 1)))
            if store and cell in todo:
                store.add(cell.name, value)
        near_work, near_rate = points[0]
        far_work, far_rate = points[-1]
        slope = 0.0
        if far_work > near_work:
            slope = max(0.0, (far_rate - near_rate) / (far_work - near_work))
        return max(0.0, near_rate - slope * near_work), slope

    def run(self, group: str) -> ModelResult:
        """Measure every cell, and store each as soon as it is finished.

        Cells that another process finishes first are taken over. CommandError where memory ends,
        with the options that take less.
        """
        model = self.target.model
        evaluator = self.evaluator
        store = self.store()
        if store.damaged:
            numbers = ", ".join(map(str, store.damaged[:5]))
            if len(store.damaged) > 5:
                numbers += ", …"
            console.print(
                f"note: {store.path} has no cell in line {numbers}: measured again", soft_wrap=True
            )
        started = time.perf_counter()
        values = self._measure(store)
        return ModelResult(
            label=self.target.label,
            method=self.target.method,
            trained_at=evaluator.trained_at(model),
            trained_range=evaluator.trained_range,
            rows=evaluator.rows(values),
            cells=values,
            weights=store.key["weights"],
            seconds=time.perf_counter() - started,
            source=evaluator.source_name,
            group=group,
        )

    def _measure(self, store: CellStore) -> dict[str, CellValue]:
        """The values of all cells by name, with progress."""
        model = self.target.model
        evaluator = self.evaluator
        label = self.target.label
        cells = evaluator.cells(model)
        costs = {cell.name: cell.cost for cell in cells if cell.name not in store.finished}
        values: dict[str, CellValue] = {}
        progress = CellProgress(
            f"{evaluator.name}  {label}",
            sum(costs.values()),
            evaluator.unit,
            console,
        )
        evaluator.advance = progress.advance
        try:
            for name, value in evaluator.run(model, store.finished):
                if name in costs:
                    values[name] = store.add(name, value)
                    progress.finish(costs[name])
                else:
                    values[name] = value
        except KeyboardInterrupt:
            console.print(
                f"stopped in {evaluator.name} of {label}; the same command measures the rest"
            )
            raise
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            place = f"{evaluator.name} of {label} ran out of memory at {cells[len(values)].name}"
            raise CommandError(
                f"{place}: lower {self._size_options()}; finished cells are kept"
            ) from error
        return values

    def _size_options(self) -> str:
        """The options of the evaluator that say how much is read at once."""
        sizes = ("batch_tokens", "lengths", "sizes", "window")
        names = [field.name for field in dataclasses.fields(self.evaluator.settings)]
        return " or ".join(option_name(name) for name in names if name in sizes)


def print_plan(measurements: Sequence[Measurement], *, keep: bool) -> None:
    """Print what is to be measured, and how long it takes at the rate of each evaluator's first
    model.

    keep: store the cells that are timed. ValueError for what cannot be measured.
    """
    rates: dict[str, tuple[float, float]] = {}
    rows = {}
    seconds = 0.0
    for m in measurements:
        name = m.evaluator.name
        cells = m.evaluator.cells(m.target.model)
        store = m.store()
        todo = [cell for cell in cells if cell.name not in store.finished]
        units = short(sum(cell.cost for cell in todo))
        rows[f"{name} of {m.target.label}"] = (
            f"{units} {m.evaluator.unit} to read; {len(todo)} of {len(cells)} cells"
        )
        if not todo:
            continue
        # Errors are reported by the measurement itself.
        with contextlib.suppress(MemoryError, RuntimeError):
            if name not in rates:
                rates[name] = m.timed(todo, store if keep else None)
            constant, slope = rates[name]
            seconds += sum(cell.cost * (constant + slope * m.work(cell)) for cell in todo)
    rows["expected"] = f"{clock(seconds)}, by two cells of each evaluator"
    console.print(facts_table("plan", rows))
