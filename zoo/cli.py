"""priorzoo list | show | doctor: models, what one consists of, and a check of the kernels.

`call` runs any typer app with the project's way of reporting errors.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import rich.console
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from zoo.adapters import list_adapters
from zoo.attention.dispatch import KERNELS
from zoo.catalog import list_models, load_model, model_entry
from zoo.errors import from_outside, one_line, printable
from zoo.files import read_object
from zoo.layers import Attention
from zoo.model import ZooModel
from zoo.plugins import import_named
from zoo.pretrained import WEIGHTS, weights_entry
from zoo.tables import adapters_table, pretrained_tables


class Console(rich.console.Console):
    """A terminal that prints text as it is, but control characters as \\x1b and the like: no
    markup, emoji or highlighting."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError in whose handler rich calls this, for `call`


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()
Import = Annotated[
    list[str],
    typer.Option(
        "--import",
        metavar="FILE.py|MODULE",
        help="import it first: it registers priors of your own",
    ),
]

# click's base of usage errors, and what it makes of Ctrl-C; typer may keep click in a package of
# its own
_USAGE_ERROR = typer.BadParameter.__mro__[2]


def call(app: typer.Typer, argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Run a typer app on `argv` (None: the process's) and return the exit code. Every command has
    the option --verbose.

    An error is one line on standard error, after its trace with --verbose. The code is 2 where the
    cause is outside (usage, values, files, connections, devices, memory), 1 for a fault of this
    program, 130 for Ctrl-C, and 141 where the reader of the output is gone. Of ranks that a
    launcher started, one per machine prints.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"] * bool(
        app.info.no_args_is_help
    )
    code = 2
    verbose = "--verbose" in words
    try:
        command = typer.main.get_command(app)
        chosen = getattr(command, "commands", {}).get(words[0] if words else "", command)
        has_verbose = any("--verbose" in option.opts for option in command.params)
        if not has_verbose and (
            chosen is command or not chosen.context_settings.get("ignore_unknown_options")
        ):
            words = [word for word in words if word != "--verbose"]
        return command.main(words, prog, standalone_mode=False) or 0
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (
        BrokenPipeError,
        SystemExit,
    ) as leave:  # typer and rich make a SystemExit(1) of the first
        if isinstance(leave, SystemExit) and not isinstance(leave.__context__, BrokenPipeError):
            raise
        # Python flushes it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except _USAGE_ERROR as error:  # type: ignore[misc]
        message = error.format_message()
    except Exception as error:
        if verbose:
            traceback.print_exc()
        message = one_line(error)
        if not from_outside(error):
            code = 1
            message = f"{type(error).__name__}: {message}; a bug in priorzoo; append --verbose for a trace"
    if message and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="shell pattern, such as 'text_ggd*'")] = "*",
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="a table of those with weights")
    ] = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="a table of adapters of released models")
    ] = False,
    import_: Import = [],  # noqa: B006
) -> None:
    """Names of models; with --pretrained a table of weights, with --adapters of adapters: size,
    training and scores."""
    import_named(import_)
    names = list_adapters(pattern) if adapters else list_models(pattern, pretrained=pretrained)
    if not names:
        kind = "adapters" if adapters else "models with weights" if pretrained else "models"
        raise ValueError(
            f"no {kind} match {pattern!r}; `priorzoo list` prints all {len(list_models())}"
        )
    if not pretrained and not adapters:
        return print("\n".join(names))
    for title, columns, rows in [adapters_table(names)] if adapters else pretrained_tables(names):
        headings = [
            Column(name, justify="right" if n else "left", overflow="fold")
            for n, name in enumerate(columns)
        ]
        headings[0].no_wrap = adapters
        table = Table(
            *headings,
            title=title,
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for row in rows:
            table.add_row(*row)
        console.print(table)


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="a name of `list`, with or without a tag of weights, or a saved folder"
        ),
    ],
    import_: Import = [],  # noqa: B006
) -> None:
    """Configuration and parameters, and for shipped weights their card with its table of scores."""
    import_named(import_)
    if os.path.isdir(name):
        return _show_model(title_of(name), load_model(name))
    entry = model_entry(name)
    # Counts without memory: the largest models are several GB.
    with torch.device("meta"):
        model = entry.build(**entry.config)
    if "." not in name:
        _show_model(name, model)
        tags = list_models(f"{entry.name}.*", pretrained=True)
        return console.print(f"weights: {', '.join(tags) or 'none ship for this model'}")
    weights_entry(name)
    _show_model(name, model)
    # Here, because importing it takes 40 ms.
    from rich.markdown import Markdown

    console.print(
        Markdown((WEIGHTS / f"{name}.md").read_text(encoding="utf-8").partition("\n---\n")[2])
    )


def _show_model(title: str, model: ZooModel) -> None:
    groups: dict[str, int] = {}
    priors = model.prior_parameters()
    for name, parameter in model.named_parameters():
        group = "priors" if name in priors else name.partition(".")[0]
        groups[group] = groups.get(group, 0) + parameter.numel()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    columns = dict.fromkeys(f"{layer.content_dim} of {layer.head_dim}" for layer in layers)
    console.print(f"{title}  {model.modality}, {sum(groups.values()):,} parameters", style="bold")
    config = dataclasses.asdict(model.config) | {"content columns per head": ", ".join(columns)}
    counts = {group: f"{count:,}" for group, count in groups.items()}
    for heading, pairs in (("configuration", config), ("parameters", counts)):
        table = Table(
            title=heading, title_justify="left", title_style="dim", show_header=False, box=None
        )
        for key, value in pairs.items():
            table.add_row(f"  {key}", str(value))
        console.print(table)


def title_of(name: str) -> str:
    """Of a run's folder its recipe and name, "text.ggd_tiny (20261121-0800)"; of another the
    folder's name."""
    folder = Path(name).resolve()
    run = folder.parent if folder.name == "model" else folder
    try:
        return f"{read_object(run / 'recipe.json')['name']} ({run.name})"
    except (OSError, ValueError, KeyError):
        return folder.name


@app.command()
def doctor() -> int:
    """Check every attention kernel on every device against float64, forward and backward; exit code
    1 if one is off."""
    from zoo.attention.selfcheck import BOUNDS, check_kernel, device_name

    facts = Table(show_header=False, box=None)
    facts.add_row("python", platform.python_version())
    for package in (
        "torch",
        "triton",
        "flash-attn",
        "timm",
        "transformers",
        "deepspeed",
        "datasets",
    ):
        with suppress(PackageNotFoundError):
            facts.add_row(package, version(package))
    devices = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    facts.add_row("devices", ", ".join(map(device_name, devices)))
    console.print(facts)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}
    heading = "largest relative error to float64"
    table = Table("device", "kernel", *dtypes, title=heading, title_justify="left", box=None)
    wrong: list[str] = []
    for device, (name, kernel) in product(devices, KERNELS.items()):
        cells = []
        for label, dtype in dtypes.items():
            with console.status(f"{device} {name} {label}"):
                verdict = check_kernel(kernel, device, dtype)
            wrong += [f"{device}, {name}, {label}: {line}" for line in verdict.wrong]
            error = "not served" if verdict.worst is None else f"{verdict.worst:.0e}"
            cells.append(f"wrong ({len(verdict.wrong)})" if verdict.wrong else error)
        table.add_row(device_name(device), name, *cells)
    console.print(table)
    for line in wrong:
        console.print(f"wrong: {line}", style="red", soft_wrap=True)
    advice = 'some kernels are wrong here: `kernel="auto"` leaves out triton where it is; name another than the others'
    console.print(advice if wrong else "all that is served can be trusted")
    return 1 if wrong else 0
