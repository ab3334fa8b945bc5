"""Progress of an evaluation (a bar on a terminal, plain lines elsewhere), tables of facts, and numbers to read."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TextIO

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from zoo.cli import Console
from zoo.errors import printable


class _Lasting:
    """A text stream that drops what nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # EPIPE of a pipe, EIO of a terminal
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error whose readers may go away: a closed pipe or terminal does not end a training."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class CellProgress:
    """How much of an evaluation's cells is read: a bar on a terminal, elsewhere a line every now and then.

    total: units of all cells. unit: what they are. every: seconds between two lines, at least.
    """

    def __init__(self, name: str, total: int, unit: str, console: Console, *, quiet: bool = False, every: float = 30.0):
        self.name, self.total, self.unit, self.console, self.every = printable(name), total, unit, console, every
        self.finished = self.part = 0  # units of finished cells, and of the one that is read
        self.started = self.last_line = time.perf_counter()
        self.prints_lines = not quiet and not console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}  left"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task(self.name, total=total, rate="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, units: int) -> None:
        """Count units of the cell that is being read."""
        self.part += units
        self._show()

    def finish(self, units: int) -> None:
        """Count a whole cell of `units`, in place of its parts."""
        self.finished, self.part = self.finished + units, 0
        self._show()

    def _show(self) -> None:
        now = time.perf_counter()
        done = min(self.finished + self.part, self.total)
        rate = done / max(now - self.started, 1e-9)
        self.bar.update(self.task, completed=done, rate=f"{short(rate)} {self.unit}/s")
        if self.prints_lines and now - self.last_line >= self.every:
            self.last_line = now
            left = clock((self.total - done) / rate) if rate else "…"
            text = f"{self.name}  {short(done)}/{short(self.total)} {self.unit}  {short(rate)}/s  left {left}"
            self.console.print(text, soft_wrap=True)


def facts_table(title: str, rows: dict[str, str]) -> Table:
    """Names and values in two columns."""
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
