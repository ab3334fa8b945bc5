"""Command lines: typer functions with one way of reporting errors, options from settings classes,
what terminals show."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, TextIO

import torch
import typer
from rich.table import Column, Table

from zoo.cli import Console as Console
from zoo.cli import call as call_app
from zoo.errors import check_fields, printable


class ConfigError(ValueError):
    """A recipe, an override or a DeepSpeed file that cannot be run as written."""


class CommandError(ValueError):
    """A command that cannot be carried out as written."""


def replace_setting(recipe: object, key: str, value: object, place: str) -> None:
    """Set `section.name` of a recipe; ConfigError where the value does not fit the field."""
    section, name = key.split(".")
    try:
        section_with_value = dataclasses.replace(
            getattr(recipe, section), **{name: value}
        )  # data checks itself
        check_fields(section_with_value, f"{section}.")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from None
    setattr(recipe, section, section_with_value)


def call(
    function: Callable[..., int | None],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    any_option: bool = False,
) -> int:
    """`zoo.cli.call` of a typer function. any_option: ignore options that the function does not
    have."""
    # Heads that forget have denormal weights, and products with these take ten times as long.
    torch.set_flush_denormal(True)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    text = inspect.getdoc(function) or (sys.modules[function.__module__].__doc__ or "")
    settings = {"ignore_unknown_options": any_option}
    text = text.replace("\n\n    ", "\n\n\b\n    ")
    app.command(help=text, context_settings=settings)(
        function
    )  # \b: blocks of commands keep their lines
    return call_app(app, argv, prog=prog)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def handled_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass SIGTERM, Ctrl-C, and SIGHUP of a closed terminal to a function. Under `nohup` SIGHUP
    stays ignored."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {number: signal.signal(number, handle) for number in STOPS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------
# options


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def with_options(
    function: Callable[..., int | None], settings: Mapping[str, type]
) -> Callable[..., int | None]:
    """`function(…, **options)` with an option for every field of the settings classes, which are
    named for the help.

    Options that a command line leaves out are not in `options`. Fields of one name are read by the
    first class that has it.
    """
    fields: dict[str, tuple[dataclasses.Field[object], object]] = {}
    owners: dict[str, list[str]] = {}
    for name, kind in settings.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            fields.setdefault(field.name, (field, hints[field.name]))
            owners.setdefault(field.name, []).append(name)
    options = {
        name: _parameter(
            field, hint, f"{', '.join(owners[name])}: " * (len(owners[name]) < len(settings))
        )
        for name, (field, hint) in fields.items()
    }

    def command(**values: object) -> int | None:
        return function(**{k: v for k, v in values.items() if k not in options or v is not None})

    fixed = [
        p
        for p in inspect.signature(function, eval_str=True).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    command.__signature__ = inspect.Signature([*fixed, *options.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*fixed, *options.values()]}
    command.__doc__ = function.__doc__
    command.__module__ = function.__module__
    command.__name__ = function.__name__
    return command


def _parameter(field: dataclasses.Field[object], hint: object, owners: str) -> inspect.Parameter:
    default = "" if field.default in (None, False) else f"; default {field.default}"
    text = owners + field.metadata.get("help", "") + default
    parse = field.metadata.get("parse")
    if parse is not None:

        def parsed(word: str) -> object:
            try:
                return parse(word)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error

        info = typer.Option(option_name(field.name), help=text, parser=parsed, metavar="VALUE")
        hint = object
    else:
        info = typer.Option(option_name(field.name), help=text)
        hint = next(
            (kind for kind in typing.get_args(hint) if kind is not type(None)), hint
        )  # `int` of `int | None`
    annotation = Annotated[typing.Optional[hint], info]  # type: ignore[valid-type]  # noqa: UP045
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


# ------------------------------------------------------------------------------------------------
# terminals


def warn(message: str) -> None:
    """Print a line to standard error."""
    print(printable(message), file=sys.stderr, flush=True)


class _Lasting:
    """A text stream that drops what nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        method = getattr(self._stream, name)

        def call(*text: str) -> None:
            try:
                method(*text)
            except OSError:  # EPIPE of a pipe, EIO of a terminal
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

        return call if name in ("write", "flush") else method


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error whose readers may go away: a closed pipe or terminal does not end a
    training."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """Names and values in two columns."""
    columns = Column(overflow="fold"), Column(overflow="fold")
    table = Table(*columns, title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for scale, letter in [
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ]:
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
