"""Command lines: typer functions called with one way of reporting errors, and options made from settings classes."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from zoo.cli import call as call_app
from zoo.errors import check_fields


class ConfigError(ValueError):
    """A recipe, an override or a DeepSpeed file that cannot be run as written."""


class CommandError(ValueError):
    """A command that cannot be carried out as written."""


def replace_setting(recipe: object, key: str, value: Any, place: str) -> None:
    """Set `section.name` of a recipe; ConfigError, naming the place, where it does not fit the field."""
    section, name = key.split(".")
    try:
        changed = dataclasses.replace(getattr(recipe, section), **{name: value})  # a data configuration checks itself
        check_fields(changed, f"{section}.")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from None
    setattr(recipe, section, changed)


def call(
    function: Callable[..., int | None], argv: Sequence[str] | None, *, prog: str, any_option: bool = False
) -> int:
    """Call a typer function with the arguments in `argv` (None: the process's); the exit code as `zoo.cli.call` has it.

    any_option: ignore options that the function does not have.
    """
    # Heads that forget have denormal weights, and products with these take ten times as long.
    torch.set_flush_denormal(True)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"ignore_unknown_options": True} if any_option else None
    app.command(help=_help(function), context_settings=settings)(function)
    return call_app(app, argv, prog=prog)


def _help(function: Callable[..., Any]) -> str:
    """The docstring of the function's module, or its own; blocks of commands keep their lines."""
    text = inspect.getdoc(function) or (sys.modules[function.__module__].__doc__ or "")
    return text.replace("\n\n    ", "\n\n\b\n    ")


def option_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def with_options(function: Callable[..., Any], settings: Mapping[str, type]) -> Callable[..., Any]:
    """`function(…, **options)` with an option for every field of the settings classes, which are named for the help.

    Options that are not given are left out of `options`.
    """
    options: dict[str, inspect.Parameter] = {}
    for field, owners in _fields(settings).items():
        names = "" if len(owners) == len(settings) else f"{', '.join(owners)}: "
        options[field.name] = _parameter(field, names, typing.get_type_hints(next(iter(owners.values())))[field.name])

    def command(**values: Any) -> Any:
        return function(**{k: v for k, v in values.items() if k not in options or v is not None})

    fixed = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = inspect.Signature([*fixed, *options.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*fixed, *options.values()]}
    command.__doc__, command.__module__, command.__name__ = function.__doc__, function.__module__, function.__name__
    return command


def _fields(settings: Mapping[str, type]) -> dict[dataclasses.Field[Any], dict[str, type]]:
    """The first field of each name, and which classes have one of that name.

    Raises:
        TypeError: for two of one name that are read from text in different ways.
    """
    first: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    owners: dict[str, dict[str, type]] = {}
    for name, kind in settings.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            reader = field.metadata.get("parse") or _base(hints[field.name])
            if first.setdefault(field.name, (field, reader))[1] != reader:
                other, option = next(iter(owners[field.name])), option_name(field.name)
                raise TypeError(f"{other} and {name} read the option {option} in different ways: rename one")
            owners.setdefault(field.name, {})[name] = kind
    return {field: owners[name] for name, (field, _) in first.items()}


def _base(hint: Any) -> Any:
    """`int` of `int | None`."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds[0] if kinds else hint


def _parameter(field: dataclasses.Field[Any], owners: str, hint: Any) -> inspect.Parameter:
    default = "" if field.default in (None, False) else f"; default {field.default}"
    text, parse = owners + field.metadata.get("help", "") + default, field.metadata.get("parse")
    info = typer.Option(option_name(field.name), help=text)
    if parse is not None:
        info, hint = typer.Option(option_name(field.name), help=text, parser=_parser(parse), metavar="VALUE"), Any
    else:
        hint = _base(hint) | None
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint, info])


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed
