"""Name what images show: the likeliest classes of each, with probabilities.

    priorzoo predict vision_goat_ssmax_tiny_patch8.glyphs letter.png
    priorzoo predict RUN_DIR *.png --top 3 --size 96
    priorzoo predict timm:NAME@CHECKPOINT *.png

The model is a name with weights, a run folder, a saved model's folder, or a classifier of timm. An
image's largest central window is resized to the training size, or to --size; a model of timm has
timm's own preparation. Exit codes: 0 done, 2 the request cannot be
served as written.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from modalities.contract import Classifier
from recipes.commands import CommandError, call
from recipes.models import load_trained
from zoo.console import Console, Import


def predict_command(
    name: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR", help="one that has weights")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE…", help="files")],
    *,
    top: Annotated[int, typer.Option(min=1, help="number of classes of each image")] = 5,
    size: Annotated[
        int | None, typer.Option(min=1, help="side in pixels; default: as trained")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    import_: Import = [],  # noqa: B006
) -> None:
    for image in images:
        if not os.path.isfile(image):
            raise CommandError(f"{image!r} is no file")
    named, model = load_trained(name, device, import_)
    if not isinstance(model, Classifier):
        raise CommandError(
            f"{named.label} names no classes: it is a model of {named.modality}; expected a "
            "classifier of images"
        )
    read = f"{size} pixels" if size else "the training size (larger: --size)"
    table = Table(title=f"{named.label}, read at {read}", title_justify="left")
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right")
    for image in images:
        classes = model.classify(image, size=size)[:top]
        for rank, (label, probability) in enumerate(classes):
            # The image's name stands in its first row.
            table.add_row(image if rank == 0 else "", label, f"{probability:.4f}")
        table.add_section()
    Console().print(table)


main = partial(call, predict_command, prog="priorzoo predict")
