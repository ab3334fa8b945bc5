"""priorzoo list | show | doctor: models, what one consists of, and a check of the kernels."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from zoo.adapters import list_adapters
from zoo.attention.dispatch import KERNELS
from zoo.catalog import list_models, load_model, model_entry
from zoo.console import Console, Import, OnceCommand, new_app
from zoo.files import read_object
from zoo.layers import Attention
from zoo.model import ZooModel
from zoo.plugins import import_named
from zoo.pretrained import WEIGHTS, weights_entry
from zoo.priors import SHIPPED, list_priors
from zoo.tables import adapters_table, pretrained_tables

app = new_app(no_args_is_help=True)
console = Console()


@app.command("list", cls=OnceCommand)
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
    if adapters:
        kind = "adapters"
        names = list_adapters(pattern)
    else:
        kind = "models with weights" if pretrained else "models"
        names = list_models(pattern, pretrained=pretrained)
    if not names:
        raise ValueError(
            f"no {kind} match {pattern!r}; `priorzoo list` prints all {len(list_models())}"
        )
    if adapters:
        _print_table(adapters_table(names), fold_names=False)
    elif pretrained:
        for table in pretrained_tables(names):
            _print_table(table, fold_names=True)
    else:
        print("\n".join(names))


def _print_table(table: tuple[str, list[str], list[list[str]]], *, fold_names: bool) -> None:
    """Print (title, columns, rows) with the first column to the left and numbers to the right."""
    title, columns, rows = table
    headings = [Column(columns[0], overflow="fold", no_wrap=not fold_names)]
    headings += [Column(name, justify="right", overflow="fold") for name in columns[1:]]
    printed = Table(
        *headings,
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        printed.add_row(*row)
    console.print(printed)


@app.command(cls=OnceCommand)
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

    card = (WEIGHTS / f"{name}.md").read_text(encoding="utf-8")
    # Behind its fields.
    console.print(Markdown(card.partition("\n---\n")[2]))


def _show_model(title: str, model: ZooModel) -> None:
    """Print a model's configuration and its parameters by part."""
    counts: Counter[str] = Counter()
    priors = model.prior_parameters()
    for name, parameter in model.named_parameters():
        part = "priors" if name in priors else name.partition(".")[0]
        counts[part] += parameter.numel()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    columns = dict.fromkeys(f"{layer.content_dim} of {layer.head_dim}" for layer in layers)
    config = dataclasses.asdict(model.config)
    config["content columns per head"] = ", ".join(columns)
    console.print(f"{title}  {model.modality}, {counts.total():,} parameters", style="bold")
    _print_pairs("configuration", config)
    _print_pairs("parameters", {part: f"{count:,}" for part, count in counts.items()})


def _print_pairs(heading: str, pairs: Mapping[str, object]) -> None:
    table = Table(
        title=heading,
        title_justify="left",
        title_style="dim",
        show_header=False,
        box=None,
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


@app.command(cls=OnceCommand)
def doctor(import_: Import = []) -> int:  # noqa: B006
    """Check every attention kernel on every device against float64, forward and backward, and the
    priors that --import registers against their formulas; exit code 1 if one is off."""
    from zoo.attention.selfcheck import BOUNDS, check_kernel, device_name

    import_named(import_)

    devices = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    console.print(_versions(", ".join(map(device_name, devices))))
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in BOUNDS}
    table = Table(
        "device",
        "kernel",
        *dtypes,
        title="largest relative error to float64",
        title_justify="left",
        box=None,
    )
    wrong: list[str] = []
    for device, (name, kernel) in product(devices, KERNELS.items()):
        cells = []
        for label, dtype in dtypes.items():
            with console.status(f"{device} {name} {label}"):
                verdict = check_kernel(kernel, device, dtype)
            wrong += [f"{device}, {name}, {label}: {line}" for line in verdict.wrong]
            if verdict.wrong:
                cells.append(f"wrong ({len(verdict.wrong)})")
            elif verdict.worst is None:
                cells.append("not served")
            else:
                cells.append(f"{verdict.worst:.0e}")
        table.add_row(device_name(device), name, *cells)
    console.print(table)
    wrong_priors = _check_registered(devices, dtypes)
    if wrong_priors:
        for line in wrong_priors:
            console.print(f"wrong: {line}", style="red", soft_wrap=True)
        if not wrong:
            return 1
    if not wrong:
        console.print("all that is served can be trusted")
        return 0
    for line in wrong:
        console.print(f"wrong: {line}", style="red", soft_wrap=True)
    console.print(
        'some kernels are wrong here: `kernel="auto"` leaves out triton where it is; '
        "name another than the others"
    )
    return 1


def _check_registered(devices: Sequence[str], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Print the errors of priors of other packages, where there are any, and return what is
    wrong."""
    from zoo.prior_check import check_prior

    names = [name for name in list_priors() if name not in SHIPPED]
    if not names:
        return []
    table = Table(
        "device",
        "prior",
        *dtypes,
        title="largest relative error of registered priors to their log_prior",
        title_justify="left",
        box=None,
    )
    wrong = []
    for device, name in product(devices, names):
        cells = []
        for label, dtype in dtypes.items():
            verdict = check_prior(name, device, dtype)
            wrong += [f"{device}, prior {name}, {label}: {line}" for line in verdict.wrong]
            cells.append("wrong" if verdict.wrong else f"{verdict.worst:.0e}")
        table.add_row(device, name, *cells)
    console.print(table)
    return wrong


def _versions(devices: str) -> Table:
    """Versions of what attention and models need, and the devices."""
    packages = ("torch", "triton", "flash-attn", "timm", "transformers", "deepspeed", "datasets")
    table = Table(show_header=False, box=None)
    table.add_row("python", platform.python_version())
    for package in packages:
        with suppress(PackageNotFoundError):
            table.add_row(package, version(package))
    table.add_row("devices", devices)
    return table
