"""Helpers of every command: the terminal, the option --import, and one way of reporting errors."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import rich.console
import typer
import typer.core
from rich.text import Text

from zoo.errors import from_outside, one_line, printable


class Console(rich.console.Console):
    """A terminal that prints text as it is, but control characters as \\x1b and the like: no
    markup, emoji or highlighting."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        # rich calls this in a handler of BrokenPipeError, which `call` reports.
        raise


Import = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="FILE.py|MODULE",
        help="import it first: it registers priors of your own",
    ),
]

# click's base of usage errors; typer may keep click in a package of its own.
_USAGE_ERROR = typer.BadParameter.__mro__[2]


class OnceCommand(typer.core.TyperCommand):
    """A command that refuses an option with one value given twice, of which click would take the
    last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        remaining = super().parse_args(ctx, list(args))
        # Parsed once more, for its order has an entry for each time that an option is given.
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        once = [option for option in order if _takes_one_value(option)]
        for option in once:
            if once.count(option) > 1:
                raise typer.BadParameter("given twice, and takes one value", ctx, param=option)  # type: ignore[arg-type]
        return remaining


def _takes_one_value(parameter: Any) -> bool:
    """Whether a parameter of a command is an option with a value, and not one for several."""
    if not isinstance(parameter, typer.core.TyperOption):
        return False
    return not (parameter.multiple or parameter.count or parameter.is_flag)


def new_app(**settings: Any) -> typer.Typer:
    """A typer app that prints plain help and leaves errors to `call`."""
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **settings,
    )


def call(app: typer.Typer, argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Run a typer app on `argv` (None: the process's) and return the exit code. Every command has
    the option --verbose.

    An error is one line on standard error, after its trace with --verbose. The code is 2 where the
    cause is outside (usage, values, files, connections, devices, memory), 1 for a fault of this
    program, 130 for Ctrl-C, and 141 where the reader of the output is gone. Of ranks that a
    launcher started, one per machine prints.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words and app.info.no_args_is_help:
        words = ["--help"]
    code = 2
    verbose = "--verbose" in words
    try:
        command = typer.main.get_command(app)
        if not _takes_verbose(command, words):
            words = [word for word in words if word != "--verbose"]
        return command.main(words, prog, standalone_mode=False) or 0
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except SystemExit as leave:
        # typer and rich make a SystemExit(1) of a BrokenPipeError.
        if not isinstance(leave.__context__, BrokenPipeError):
            raise
        _discard_output()
        return 141
    except _USAGE_ERROR as error:  # type: ignore[misc]
        message = error.format_message()
    except Exception as error:
        if verbose:
            traceback.print_exc()
        message = one_line(error)
        if not from_outside(error):
            code = 1
            message = (
                f"{type(error).__name__}: {message}; a bug in priorzoo; append --verbose for a "
                "trace"
            )
    if message and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code


def _takes_verbose(command: Any, words: Sequence[str]) -> bool:
    """Whether a click command has the option --verbose, or a subcommand that reads all words."""
    if any("--verbose" in option.opts for option in command.params):
        return True
    subcommands = getattr(command, "commands", {})
    chosen = subcommands.get(words[0]) if words else None
    return chosen is not None and bool(chosen.context_settings.get("ignore_unknown_options"))


def _discard_output() -> None:
    """Send standard output to nowhere: Python flushes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
