"""Progress of training and of evaluation: a bar on a terminal, plain lines elsewhere; and tables of facts."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table


class _Display:
    """A context in which a bar, where there is one, is on the terminal."""

    bar: Progress | None

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()


class TrainingDisplay(_Display):
    """Progress of the lead rank; on other ranks (`show=False`) every method does nothing."""

    def __init__(self, name: str, steps: int, done: int, *, show: bool, log_every: int):
        self.console = Console(highlight=False, quiet=not show)
        self.steps, self.done, self.first, self.log_every, self.show = steps, done, done, log_every, show
        self.clock = time.perf_counter()
        self.bar = None
        if show and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[rate]}"),
                TimeElapsedColumn(), TextColumn("left {task.fields[left]}"),
            )  # fmt: skip
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task(name, total=steps, completed=done, loss="…", lr="…", rate="", left="…")

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self, record: dict[str, Any], unit: str) -> None:
        """Show the figures of one step."""
        if not self.show:
            return
        self.done = record["step"]
        per_step = (time.perf_counter() - self.clock) / max(1, self.done - self.first)
        figures: dict[str, Any] = {
            "loss": f"{record['loss']:.4f}",
            "lr": f"{record['lr']:.2e}",
            "rate": f"{short(record[unit + '_per_s'])} {unit}/s",
            "left": clock(per_step * (self.steps - self.done)),
        }
        if self.bar:
            self.bar.update(self.task, completed=self.done, **figures)
        elif self.done % self.log_every == 0 or self.done == self.steps:
            norm = f"grad {record['grad_norm']:.3g}  " if "grad_norm" in record else ""
            self.print(
                f"step {self.done}/{self.steps}  loss {figures['loss']}  lr {figures['lr']}  "
                f"{norm}{figures['rate']}  left {figures['left']}"
            )

    def table(self, title: str, rows: dict[str, str]) -> None:
        self.console.print(facts_table(title, rows))


class CellProgress(_Display):
    """How much of the cells of one evaluation is read: a bar on a terminal, elsewhere a line every now and then.

    Args:
        name: what is evaluated.
        total: units of all cells.
        unit: what they are.
        every: seconds between two lines, at least; none comes sooner.
    """

    def __init__(self, name: str, total: int, unit: str, console: Console, *, quiet: bool = False, every: float = 30.0):
        self.name, self.total, self.unit, self.console, self.every = name, total, unit, console, every
        self.finished = self.part = 0  # units of finished cells, and of the one that is read
        self.started = self.told = time.perf_counter()
        self.lines, self.bar = not quiet and not console.is_terminal, None
        if not quiet and console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(bar_width=16), TaskProgressColumn(),
                TextColumn("{task.fields[rate]}  left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task(name, total=total, rate="")

    def advance(self, units: int) -> None:
        """So many more units of the cell that is being read."""
        self.part += units
        self._show()

    def finish(self, units: int) -> None:
        """A cell of `units` is read, whatever was told of its parts."""
        self.finished, self.part = self.finished + units, 0
        self._show()

    def _show(self) -> None:
        now = time.perf_counter()
        done = min(self.finished + self.part, self.total)
        rate = done / max(now - self.started, 1e-9)
        if self.bar:
            self.bar.update(self.task, completed=done, rate=f"{short(rate)} {self.unit}/s")
        elif self.lines and now - self.told >= self.every:
            self.told = now
            left = clock((self.total - done) / rate) if rate else "…"
            text = f"{self.name}  {short(done)}/{short(self.total)} {self.unit}  {short(rate)}/s  left {left}"
            self.console.print(text, markup=False, soft_wrap=True)


def facts_table(title: str, rows: dict[str, str]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for scale, letter in [(1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
