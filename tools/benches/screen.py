"""The command line and the tables of benchmarks: typer and rich, or argparse and plain text where these are not installed.

A GPU machine may hold torch, triton and numpy alone, and nothing can be fetched there; the same signatures serve both.

    Seconds = Annotated[float, Option(help="of rounds for each contender")]

    def main(seconds: Seconds = 0.3) -> None: ...
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from typer import BadParameter, Exit, Option, Typer

    BARE = False
except ImportError:
    BARE = True

    class BadParameter(ValueError):  # type: ignore[no-redef]
        """An option's value that cannot be served."""

    class Exit(SystemExit):  # type: ignore[no-redef]
        """The end of the command, with its exit status."""

    @dataclass
    class _Option:
        names: tuple[str, ...]
        help: str

    def Option(*names: str, help: str = "") -> Any:  # type: ignore[no-redef]
        return _Option(names, help)


__all__ = ["BadParameter", "Exit", "Option", "Status", "command_line", "say", "show_table"]

Section = tuple[str, Sequence[Sequence[str]]]


def command_line(name: str, command: Callable[..., None] | None, text: str) -> Callable[[], object]:
    """The command line of one command, which runs when called; without a command, one that shows `text`."""
    if BARE:
        return lambda: _run_bare(name, command, text)
    app = Typer(add_completion=False, no_args_is_help=True, help=text, rich_markup_mode=None)
    app.callback()(lambda: None)  # with one command alone, typer would take its name for an argument
    if command is not None:
        app.command(name)(command)
    return app


def _run_bare(name: str, command: Callable[..., None] | None, text: str) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    if command is None:
        print(text.replace("\b\n", ""), *([f"no command {name!r}"] if name and name[0] != "-" else []), sep="\n")
        raise Exit(0 if name == "--help" else 2)
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}", description=command.__doc__, formatter_class=raw, allow_abbrev=False
    )
    hints = typing.get_type_hints(command, include_extras=True)
    for parameter, known in inspect.signature(command).parameters.items():
        kind, option = typing.get_args(hints[parameter])  # of Annotated[kind, Option(…)]
        kind = next(each for each in (*typing.get_args(kind), kind) if each is not NoneType)
        flags = option.names or (f"--{parameter.replace('_', '-')}",)
        parser.add_argument(*flags, dest=parameter, type=kind, default=known.default, help=option.help)
    given = vars(parser.parse_args(sys.argv[2:]))
    try:
        command(**given)
    except BadParameter as error:
        parser.error(str(error))


# --------------------------------------------------------------------------------------------------------- tables

if not BARE:
    console = Console(width=max(110, Console().width))  # a table cut short says nothing


class Status(contextlib.AbstractContextManager["Status"]):
    """A line that says what is under way; without rich, one line each."""

    def __init__(self) -> None:
        self._live = None if BARE else console.status("")

    def __enter__(self) -> Status:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, text: str) -> None:
        if self._live is not None:
            self._live.update(text)
        else:
            print(text, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """A line of text, wrapped by the terminal."""
    if BARE:
        print(line, flush=True)
    else:
        console.print(escape(line), highlight=False, soft_wrap=True)


def show_table(title: str, columns: Sequence[str], sections: Iterable[Section]) -> None:
    """Rows below the names of their sections; the first column to the left, numbers to the right."""
    if BARE:
        _show_bare(title, columns, list(sections))
        return
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for name, rows in sections:
        table.add_section()
        table.add_row(f"[bold]{name}[/]")
        for row in rows:
            table.add_row(*row)
    console.print(table)


def _show_bare(title: str, columns: Sequence[str], sections: Sequence[Section]) -> None:
    if not columns:  # nothing could be measured
        print(title)
        return
    every = [columns, *(row for _, rows in sections for row in rows)]
    widths = [max(len(row[place]) for row in every) for place in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        first, *numbers = row
        return "  ".join([first.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))])

    print(title, line(columns), "-" * min(len(line(columns)), shutil.get_terminal_size().columns), sep="\n")
    for name, rows in sections:
        print(f"\n{name}", *map(line, rows), sep="\n", flush=True)
