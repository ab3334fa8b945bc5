"""Name what images show: the likeliest classes of each, with probabilities.

    priorzoo predict vision_goat_ssmax_tiny_patch8.glyphs letter.png
    priorzoo predict RUN_DIR *.png --top 3 --size 96

The model is a name with weights, a run folder or a saved model's folder. An image's largest central
window is resized to the training size, or to --size. Exit codes: 0 done, 2 the request cannot be
served as written.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from modalities.contract import Classifier
from recipes.commands import CommandError, Console, call
from recipes.targets import find_trained
from zoo.cli import Import


def predict_command(
    name: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR", help="one that has weights")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="files")],
    *,
    top: Annotated[int, typer.Option(min=1, help="so many classes of each")] = 5,
    size: Annotated[
        int | None, typer.Option(min=1, help="side in pixels; default: as trained")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    import_: Import = [],  # noqa: B006
) -> None:
    if missing := [image for image in images if not os.path.isfile(image)]:
        raise CommandError(f"{missing[0]!r} is no file")
    target = find_trained(name, device, import_)
    model = target.model
    console = Console()
    if not isinstance(model, Classifier):
        raise CommandError(
            f"{target.label} has no classes: models of {target.modality} name nothing"
        )
    read = f"{size} pixels" if size else "the training size (larger: --size)"
    table = Table(title=f"{target.label}, read at {read}", title_justify="left")
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right")
    for image in images:
        for rank, (label, share) in enumerate(model.classify(image, size=size)[:top]):
            table.add_row("" if rank else image, label, f"{share:.4f}")
        table.add_section()
    console.print(table)


main = partial(call, predict_command, prog="priorzoo predict")
