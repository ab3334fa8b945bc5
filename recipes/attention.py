"""Show what heads attend to in a text, a sequence of bases or an image: the prior, the content and their product.

    python recipes/attention.py text_ggd_ssmax_tiny.facts "The pass key is 71432. … What is the pass key? The pass key is"
    python recipes/attention.py text_cable_tiny.facts,text_alibi_tiny.facts "$(cat speech.txt)" --parts prior
    python recipes/attention.py vision_goat_ssmax_tiny_patch8.glyphs letter.png --row centre --layer 2 --head 1

The models are names with weights, run folders or saved models' folders. By default the picture shows, of each model, the head
whose content says most beside its prior at the row: that of largest KL(p‖π). Exit codes: 0 done, 2 it cannot be served.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer
from rich.console import Console

from modalities.attention_maps import PARTS, View, draw_attention
from modalities.contract import Reader, Reading
from recipes.commands import CommandError, call
from recipes.targets import Target, find_targets
from zoo.analysis import analyse
from zoo.cli import Import
from zoo.errors import require
from zoo.naming import nearest
from zoo.outside import import_named


def attention_command(
    models: Annotated[str, typer.Argument(metavar="MODEL|RUN_DIR[,…]", help="that read the same tokens")],
    given: Annotated[str, typer.Argument(metavar="TEXT|BASES|IMAGE", help='"-" reads a text from standard input')],
    *,
    layer: Annotated[
        int | None, typer.Option(help="from 0; negative ones from the last; default: the head decides")
    ] = None,
    head: Annotated[int | None, typer.Option(help="from 0; default: the one of largest KL(p‖π)")] = None,
    row: Annotated[str, typer.Option(help="the query: a number from 0, a negative one from the end, or centre")] = "-1",
    parts: Annotated[str, typer.Option(help=f"comma-separated of {', '.join(PARTS)}")] = ",".join(PARTS),
    out: Annotated[Path, typer.Option(help="the PNG")] = Path("attention.png"),
    import_: Import = [],  # noqa: B006
) -> None:
    import_named(import_)
    require("matplotlib", "drawing attention", "figures")
    wanted = [part for part in parts.split(",") if part]
    for part in wanted:
        if part not in PARTS:
            raise CommandError(f"--parts: {part!r} is not a part of attention; {nearest(part, PARTS)}")
    targets = find_targets(models.split(","), {}, "cpu", "float32")
    text = sys.stdin.read().removesuffix("\n") if given == "-" else given
    views: list[View] = []
    reading: Reading | None = None
    for target in targets:
        found = _reading(target, text)
        if reading is not None and (found.names, found.grid) != (reading.names, reading.grid):
            raise CommandError(f"{target.label} cuts the input into other tokens than {targets[0].label}")
        reading = reading or found
        views.append(_view(target, found, layer, head, _query(row, found)))
    assert reading is not None
    draw_attention(views, reading, out, parts=wanted)
    Console(highlight=False).print(f"written: {out}", soft_wrap=True)


def _reading(target: Target, given: str) -> Reading:
    model = target.model.eval()
    if not isinstance(model, Reader):
        raise CommandError(f"{target.label} reads nothing that a command line can name")
    if not target.trained:
        raise CommandError(f"{target.label} has random weights; a name with a tag after a dot has trained ones")
    return model.read(given)


def _query(word: str, reading: Reading) -> int:
    if word == "centre" and reading.grid is not None:
        height, width = reading.grid
        return reading.prefix + height // 2 * width + width // 2
    try:
        return int(word)
    except ValueError as error:
        allowed = "a number" if reading.grid is None else "a number, or centre"
        raise CommandError(f"--row {word!r}: expected {allowed}") from error


def _view(target: Target, reading: Reading, layer: int | None, head: int | None, row: int) -> View:
    """The asked head, or the one whose content says most."""
    layers = None if layer is None else [layer]
    heads = None if head is None else [head]
    found = analyse(target.model, *reading.inputs, layers=layers, heads=heads, rows=[row], full=True)
    gains = torch.stack([one.divergence[0, :, 0] for one in found])
    best, chosen = divmod(int(gains.argmax()), gains.shape[1])
    return View(target.label, found[best], chosen, 0)


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/attention.py") -> int:
    return call(attention_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
