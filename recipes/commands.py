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

from zoo.console import OnceCommand, new_app
from zoo.console import call as call_app
from zoo.errors import check_fields, printable


class ConfigError(ValueError):
    """A recipe, an override or a DeepSpeed file that cannot be run as written."""


class CommandError(ValueError):
    """A command that cannot be carried out as written."""


def replace_setting(recipe: object, key: str, value: object, place: str) -> None:
    """Set `section.name` of a recipe; ConfigError where the value does not fit the field."""
    section_name, name = key.split(".")
    section = getattr(recipe, section_name)
    try:
        # A data section checks itself here.
        changed = dataclasses.replace(section, **{name: value})
        check_fields(changed, f"{section_name}.")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from None
    setattr(recipe, section_name, changed)


def call(
    function: Callable[..., int | None],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    any_option: bool = False,
) -> int:
    """`zoo.console.call` of a typer function. any_option: ignore options that the function does not
    have."""
    # Heads that forget have denormal weights, and products with these take ten times as long.
    torch.set_flush_denormal(True)
    app = new_app()
    text = inspect.getdoc(function) or sys.modules[function.__module__].__doc__ or ""
    # \b is click's mark of a block that keeps its lines, here of commands.
    text = text.replace("\n\n    ", "\n\n\b\n    ")
    settings = {"ignore_unknown_options": any_option}
    app.command(cls=OnceCommand, help=text, context_settings=settings)(function)
    return call_app(app, argv, prog=prog)


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def handled_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass SIGTERM, Ctrl-C, and SIGHUP of a closed terminal to a function. Under `nohup` SIGHUP
    stays ignored."""
    before = {}
    for number in STOPS:
        ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not ignored:
            before[number] = signal.signal(number, handle)
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
    """`function(…, **options)` with an option for every field of the settings classes, by the
    classes' names for the help.

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
    options: dict[str, inspect.Parameter] = {}
    for name, (field, hint) in fields.items():
        # The help names the classes of an option that not all have.
        shared = len(owners[name]) == len(settings)
        prefix = "" if shared else f"{', '.join(owners[name])}: "
        options[name] = _parameter(field, hint, prefix)

    def command(**values: object) -> int | None:
        chosen = {k: v for k, v in values.items() if k not in options or v is not None}
        return function(**chosen)

    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += options.values()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    command.__module__ = function.__module__
    command.__name__ = function.__name__
    return command


def _parameter(field: dataclasses.Field[object], hint: object, prefix: str) -> inspect.Parameter:
    """The keyword of a settings field, as typer reads it. prefix: of its help."""
    default = "" if field.default in (None, False) else f"; default {field.default}"
    text = prefix + field.metadata.get("help", "") + default
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
        # `int` of `int | None`.
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if kinds:
            hint = kinds[0]
    annotation = Annotated[typing.Optional[hint], info]  # type: ignore[valid-type]  # noqa: UP045
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=annotation,
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
            except OSError:
                # EPIPE of a pipe, EIO of a terminal.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

        return call if name in ("write", "flush") else method


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard output and error whose readers may go away: a closed pipe or terminal does not end a
    training."""
    output = sys.stdout
    errors = sys.stderr
    sys.stdout = _Lasting(output)
    sys.stderr = _Lasting(errors)
    try:
        yield
    finally:
        sys.stdout = output
        sys.stderr = errors


def facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """Names and values in two columns."""
    table = Table(
        Column(overflow="fold"),
        Column(overflow="fold"),
        title=title,
        show_header=False,
        title_justify="left",
    )
    for name, value in rows.items():
        table.add_row(name, value)
    return table


SCALES = {"Z": 1e21, "E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for letter, scale in SCALES.items():
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def clock(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
