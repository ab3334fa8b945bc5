"""python -m zoo list | show | plot-prior | doctor: models, what one is made of, its priors; kernels that can be trusted here.

`call` runs any typer app with the project's way of reporting errors.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zoo.errors import from_outside, one_line, require
from zoo.inputs import read_object
from zoo.outside import import_named
from zoo.pretrained import manifest
from zoo.priors import Compose
from zoo.registry import create_model, list_models, load_model, model_entry

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console(highlight=False)
Import = Annotated[
    list[str],
    typer.Option("--import", metavar="FILE.py|MODULE", help="import it first: it registers priors of your own"),
]


# click's base of usage errors, and what it makes of Ctrl-C; typer may keep click in a package of its own
_USAGE_ERROR = typer.BadParameter.__mro__[2]


def call(app: typer.Typer, argv: Sequence[str] | None = None, *, prog: str) -> int:
    """Run a typer app on `argv` (None: the process's) and return the exit code. Every command has the option --verbose.

    What cannot be carried out is one line on standard error, with --verbose its trace before it. The code is 2 where the cause
    is outside (usage, values, files, connections, devices, memory), 1 where it is a fault of this program, 130 for Ctrl-C, and
    141 where the reader of the output is gone. Of ranks that a launcher started, one a machine speaks.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"] * bool(app.info.no_args_is_help)
    code = 2
    try:
        command = typer.main.get_command(app)
        _offer_verbose(command)
        return command.main(words, prog, standalone_mode=False) or 0
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 141
    except _USAGE_ERROR as error:  # type: ignore[misc]
        message = error.format_message()
    except Exception as error:
        if "--verbose" in words:
            traceback.print_exc()
        message = one_line(error)
        if not from_outside(error):
            code, message = (
                1,
                f"{type(error).__name__}: {message}; this is a fault of priorzoo, and --verbose shows where",
            )
    if message and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}".encode(errors="backslashreplace").decode(), file=sys.stderr)
    return code


def _offer_verbose(command: Any) -> None:
    """Add --verbose to a command's options, and to those of its subcommands that parse their own; `call` reads it."""
    for inner in getattr(command, "commands", {}).values():
        if not inner.ignore_unknown_options:
            _offer_verbose(inner)
    if not any("--verbose" in option.opts for option in command.params):
        command.params.append(_verbose_option())


def _verbose_option() -> Any:
    """The option as typer makes it; its value is handed to no function."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(verbose: Annotated[bool, typer.Option("--verbose", help="show the trace of an error")] = False) -> None:
        pass

    (option,) = (option for option in typer.main.get_command(app).params if "--verbose" in option.opts)
    option.expose_value = False
    return option


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="shell pattern, such as 'text_ggd*'")] = "*",
    pretrained: Annotated[bool, typer.Option("--pretrained", help="names with weights only")] = False,
    modality: Annotated[str | None, typer.Option(help="such as text, vision or dna")] = None,
    import_: Import = [],  # noqa: B006
) -> None:
    """Names of models."""
    import_named(import_)
    names = list_models(pattern, modality=modality, pretrained=pretrained)
    if not names:
        kind = "models with weights" if pretrained else "models"
        raise ValueError(f"no {kind} match {pattern!r}; `python -m zoo list` prints all {len(list_models())}")
    print("\n".join(names))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a name of `list`, with or without a tag of weights, or a saved folder")],
    import_: Import = [],  # noqa: B006
) -> None:
    """Configuration, parameters, and for shipped weights their card and measured table."""
    import torch

    import_named(import_)
    if Path(name).is_dir():
        return _show_model(_run_title(Path(name)), load_model(name))
    entry = model_entry(name)
    card = _card(name)
    with torch.device("meta"):  # counts without memory: the largest models are several GB
        model = entry.build(**entry.config)
    _show_model(name, model)
    if card:
        names = card.pop("class_names", [])  # a line, not a row each
        card |= {"class_names": " ".join(names[:40]) + " …" * (len(names) > 40)} if names else {}
        _print_pairs("weights", {key: value for key, value in card.items() if not isinstance(value, (dict, list))})
        for key, value in card.items():
            if isinstance(value, (dict, list)):
                _print_nested(key, value)
    else:
        tags = list_models(f"{entry.name}.*", pretrained=True)
        console.print(f"weights: {', '.join(tags) if tags else 'none ship for this model'}")


def _show_model(title: str, model: Any) -> None:
    total = sum(p.numel() for p in model.parameters())
    console.print(f"[bold]{title}[/bold]  {model.modality}, {total:,} parameters")
    _print_pairs("configuration", dataclasses.asdict(model.config))
    _print_pairs("attention", _attention(model))
    _print_pairs("parameters", _parameter_groups(model))
    if described := model.describe_input():
        _print_pairs("a training sample", described)


def _attention(model: Any) -> dict[str, str]:
    """Columns of a head that hold content, and the prior's lanes; by layer where layers differ."""
    from zoo.layers import Attention

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    rows: dict[str, list[str]] = {"content columns per head": [], "lanes": []}
    for attention in layers:
        rows["content columns per head"].append(f"{attention.content_dim} of {attention.head_dim}")
        lanes = {
            name: part.num_lanes for name, part in attention.prior.named_children() if part in attention.prior.parts()
        }
        named = ", ".join(f"{name} {count}" for name, count in lanes.items() if count)
        summed = isinstance(attention.prior, Compose) and named
        total = attention.prior.num_lanes
        where = " beside the head" if attention.lanes == "beside" and total else ""
        rows["lanes"].append(f"{total}{where}" + (f" ({named})" if summed else ""))
    return {
        key: found[0] if len(set(found)) == 1 else "; ".join(f"layer {n}: {text}" for n, text in enumerate(found))
        for key, found in rows.items()
    }


@app.command("plot-prior")
def plot_prior(
    name: Annotated[str, typer.Argument(help="a model's name with a tag of weights, or a saved model's folder")],
    out: Annotated[Path | None, typer.Option(help="default: NAME.prior.png in this folder")] = None,
    length: Annotated[int | None, typer.Option(help="text: tokens; default 8 times the training length")] = None,
    size: Annotated[int | None, typer.Option(help="vision: side of the image in pixels; default as trained")] = None,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="text, DNA: parts of key and distance, K and π as matrices; default 96 tokens"),
    ] = False,
    head: Annotated[int | None, typer.Option(help="with --matrix; default: the one of the largest sink")] = None,
    import_: Import = [],  # noqa: B006
) -> None:
    """Every head's log-prior in one PNG, retrieval heads marked: against distance, or around the centre of an image.

    With --matrix instead, by layer, u(j) of the key, κ(d) of the distance, and K and π of a head.
    """
    import_named(import_)
    require("matplotlib", "drawing priors", "figures")
    from zoo.prior_plot import draw_priors
    from zoo.prior_plot_grid import draw_grid_priors

    if Path(name).is_dir():
        model, title = load_model(name), _run_title(Path(name))
    else:
        tags = [] if "." in name else list_models(f"{name}.*", pretrained=True)
        model = create_model(name)
        title = name if "." in name else f"{name} (untrained)"
        if tags:
            console.print(f"note: {name} is untrained; trained ones are {', '.join(tags)}", soft_wrap=True)
    path = out or Path(f"{Path(name).name}.prior.png")
    grid = model.train_positions().is_grid
    if length is not None and grid:
        raise ValueError("--length does not apply to a model of images; use --size, in pixels")
    if size is not None and not grid:
        raise ValueError("--size does not apply to a model along a line; use --length, in tokens")
    if grid and matrix:
        raise ValueError("--matrix does not apply to a model of images, whose positions have two coordinates")
    if head is not None and not matrix:
        raise ValueError("--head chooses a head of --matrix; without it every head is drawn")
    if grid:
        draw_grid_priors(model, title, path, size=size)
    elif matrix:
        from zoo.prior_plot_matrix import draw_prior_matrices

        draw_prior_matrices(model, title, path, length=length or 96, head=head)
    else:
        draw_priors(model, title, path, length=length or 8 * model.config.train_context)
    console.print(f"written: {path}", soft_wrap=True)


@app.command()
def doctor() -> int:
    """Check every attention kernel on every device against float64, forward and backward; exit code 1 if one is off."""
    from zoo.doctor import examine

    return 0 if examine(console) else 1


def _run_title(folder: Path) -> str:
    """A run's recipe and the name of its folder, "text.ggd_tiny (20261121-0800)"; of other folders the name alone."""
    folder = folder.resolve()
    run = folder.parent if folder.name == "model" else folder
    try:
        return f"{read_object(run / 'recipe.json')['name']} ({run.name})"
    except (OSError, ValueError, KeyError):
        return folder.name


def _card(name: str) -> dict[str, Any]:
    """The manifest's entry of a tagged name; empty for an architecture."""
    if "." not in name:
        return {}
    from zoo.pretrained import resolve_tag

    return dict(manifest()[resolve_tag(name)])


def _parameter_groups(model: Any) -> dict[str, int]:
    """Parameters by what they belong to: embedding, attention, prior, ssmax, mlp, norm, head, …"""
    groups: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        known = (
            "prior",
            "ssmax",
            "position_embedding",
            "embedding",
            "patch_embed",
            "prefix_tokens",
            "mlp",
            "attention",
            "head",
        )
        group = next((word for word in known if word in words), "norm" if "norm" in name else "other")
        groups[group] = groups.get(group, 0) + parameter.numel()
    return {group: groups[group] for group in sorted(groups, key=lambda g: -groups[g])}


def _print_pairs(title: str, pairs: dict[str, Any]) -> None:
    table = Table(title=title, show_header=False, title_justify="left", box=None, title_style="dim")
    for key, value in pairs.items():
        table.add_row(
            f"  {key}", f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        )
    console.print(table)


def _print_nested(title: str, value: Any) -> None:
    """A card's table: a list of rows, or a dictionary of them."""
    rows = value if isinstance(value, list) else [{"": key} | _row(inner) for key, inner in value.items()]
    if not rows or not all(isinstance(row, dict) for row in rows):
        return _print_pairs(title, {str(n): row for n, row in enumerate(rows)})
    table = Table(title=title, title_justify="left", title_style="dim")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    console.print(table)


def _row(inner: Any) -> dict[str, Any]:
    return inner if isinstance(inner, dict) else {"value": inner}


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
