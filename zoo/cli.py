"""priorzoo list | show | plot-prior | doctor: models, what one consists of, its priors, and a check of the kernels.

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
import typer
from rich.box import SIMPLE_HEAD
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from zoo.catalog import WEIGHTS, create_model, import_named, list_models, load_model, model_entry, weights_entry
from zoo.errors import from_outside, one_line, printable, require
from zoo.files import read_object
from zoo.layers import Attention
from zoo.model import ZooModel


class Console(rich.console.Console):
    """A terminal that prints text as it is: no markup, no highlighting, and control characters as \\x1b and the like."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError in whose handler rich calls this, for `call`


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()
Import = Annotated[
    list[str],
    typer.Option("--import", metavar="FILE.py|MODULE", help="import it first: it registers priors of your own"),
]
HEADLINES = ("top1", "free_generation", "bits_per_base", "bits_per_byte")  # scores of cards, the most telling first

# click's base of usage errors, and what it makes of Ctrl-C; typer may keep click in a package of its own
_USAGE_ERROR = typer.BadParameter.__mro__[2]


def call(app: typer.Typer, argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Run a typer app on `argv` (None: the process's) and return the exit code. Every command has the option --verbose.

    An error is one line on standard error, after its trace with --verbose. The code is 2 where the cause is outside (usage,
    values, files, connections, devices, memory), 1 for a fault of this program, 130 for Ctrl-C, and 141 where the reader of the
    output is gone. Of ranks that a launcher started, one per machine prints.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"] * bool(app.info.no_args_is_help)
    code, verbose = 2, "--verbose" in words
    try:
        command = typer.main.get_command(app)
        has_verbose = any("--verbose" in option.opts for option in command.params)
        if not has_verbose and not any(one.ignore_unknown_options for one in getattr(command, "commands", {}).values()):
            words = [word for word in words if word != "--verbose"]
        return command.main(words, prog, standalone_mode=False) or 0
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit) as leave:  # typer and rich make a SystemExit(1) of the first
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
            code, message = 1, f"{type(error).__name__}: {message}; this is a fault of priorzoo; --verbose shows where"
    if message and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="shell pattern, such as 'text_ggd*'")] = "*",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="a table of those with weights")] = False,
    import_: Import = [],  # noqa: B006
) -> None:
    """Names of models; with --pretrained a table of weights: size, training and scores."""
    import_named(import_)
    names = list_models(pattern, pretrained=pretrained)
    if not names:
        kind = "models with weights" if pretrained else "models"
        raise ValueError(f"no {kind} match {pattern!r}; `priorzoo list` prints all {len(list_models())}")
    if not pretrained:
        return print("\n".join(names))
    for title, columns, rows in pretrained_tables(names):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for n, column in enumerate(columns):
            table.add_column(column, justify="right" if n else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def pretrained_tables(names: Sequence[str]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) for the weights of each kind of data, with scores of the cards at the first and last place."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault((name.partition("_")[0], name.rpartition(".")[2]), []).append(name)
    tables = []
    for (modality, tag), members in groups.items():
        cards = [weights_entry(name) for name in members]
        measured = cards[0]["measured"]
        axis = next(iter(measured[0]))
        score = next(name for name in HEADLINES if max(row.get(name, 0.0) for row in measured) > 0.5)
        places = [row[axis] for row in measured if score in row]
        ends = list(dict.fromkeys([places[0], places[-1]]))
        trained = dict.fromkeys(str(card.get("train_context", card.get("image_size"))) for card in cards)
        title = f"{modality}, {tag}: {cards[0]['data'].partition(';')[0].partition(' (')[0]}"
        title += f"\ntrained at {axis} {', '.join(trained)}; {score} at {axis} {' and '.join(map(str, ends))}"
        rows = []
        for name, card in zip(members, cards, strict=True):
            scores = {row[axis]: f"{row[score]:.3f}" for row in card["measured"] if score in row}
            size = [f"{card['parameters'] / 1e6:.2f}M", f"{card['bytes'] / 1e6:.1f}"]
            rows.append([name, *size, *(scores.get(end, "–") for end in ends)])
        tables.append((title, ["name", "params", "MB", *map(str, ends)], rows))
    return tables


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a name of `list`, with or without a tag of weights, or a saved folder")],
    import_: Import = [],  # noqa: B006
) -> None:
    """Configuration and parameters, and for shipped weights their card with its table of scores."""
    import torch

    import_named(import_)
    if os.path.isdir(name):
        return _show_model(_title(name), load_model(name))
    entry = model_entry(name)
    if "." in name:
        weights_entry(name)
    # Counts without memory: the largest models are several GB.
    with torch.device("meta"):
        model = entry.build(**entry.config)
    _show_model(name, model)
    if "." not in name:
        tags = list_models(f"{entry.name}.*", pretrained=True)
        return console.print(f"weights: {', '.join(tags) if tags else 'none ship for this model'}")
    card = (WEIGHTS / f"{name}.md").read_text(encoding="utf-8")
    console.print(Markdown(card.partition("\n---\n")[2]))


def _show_model(title: str, model: ZooModel) -> None:
    groups: dict[str, int] = {}
    priors = model.prior_parameters()
    for name, parameter in model.named_parameters():
        group = "priors" if name in priors else name.partition(".")[0]
        groups[group] = groups.get(group, 0) + parameter.numel()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    columns = dict.fromkeys(f"{layer.content_dim} of {layer.head_dim}" for layer in layers)
    console.print(f"{title}  {model.modality}, {sum(groups.values()):,} parameters", style="bold")
    for heading, pairs in (
        ("configuration", dataclasses.asdict(model.config)),
        ("attention", {"content columns per head": ", ".join(columns)}),
        ("parameters", {group: f"{count:,}" for group, count in groups.items()}),
    ):
        table = Table(title=heading, title_justify="left", title_style="dim", show_header=False, box=None)
        for key, value in pairs.items():
            table.add_row(f"  {key}", str(value))
        console.print(table)


def _title(name: str) -> str:
    """Of a run's folder its recipe and name, "text.ggd_tiny (20261121-0800)"; of another the folder's name."""
    folder = Path(name).resolve()
    run = folder.parent if folder.name == "model" else folder
    try:
        return f"{read_object(run / 'recipe.json')['name']} ({run.name})"
    except (OSError, ValueError, KeyError):
        return folder.name


@app.command("plot-prior")
def plot_prior(
    name: Annotated[str, typer.Argument(help="a model's name with a tag of weights, or a saved model's folder")],
    out: Annotated[Path | None, typer.Option(help="default: NAME.prior.png in this folder")] = None,
    length: Annotated[int | None, typer.Option(help="text: tokens; default 8 times the training length")] = None,
    size: Annotated[int | None, typer.Option(help="vision: side of the image in pixels; default as trained")] = None,
    import_: Import = [],  # noqa: B006
) -> None:
    """Every head's log-prior in one PNG, retrieval heads marked: against distance, or around the centre of an image."""
    import_named(import_)
    require("matplotlib", "drawing priors", "figures")
    from zoo import prior_plot

    if os.path.isdir(name):
        model, title = load_model(name), _title(name)
    else:
        model, title = create_model(name), name if "." in name else f"{name} (untrained)"
    path, grid = out or Path(f"{Path(name).name}.prior.png"), model.train_positions().is_grid
    if (length if grid else size) is not None:
        wrong, right = ("length", "size, in pixels") if grid else ("size", "length, in tokens")
        raise ValueError(f"--{wrong} does not apply to this model; use --{right}")
    if grid:
        prior_plot.draw_grid_priors(model, title, path, size=size)
    else:
        prior_plot.draw_priors(model, title, path, length=length or 8 * model.config.train_context)
    console.print(f"written: {path}", soft_wrap=True)


@app.command()
def doctor() -> int:
    """Check every attention kernel on every device against float64, forward and backward; exit code 1 if one is off."""
    import torch

    from zoo.attention.dispatch import KERNELS
    from zoo.attention.selfcheck import BOUNDS, check_kernel, device_name

    facts = Table(show_header=False, box=None)
    facts.add_row("python", platform.python_version())
    for package in ("torch", "triton", "flash-attn", "timm", "transformers", "deepspeed", "datasets"):
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
