"""Verify a run: every file of its checkpoints and of its final weights, by size and SHA-256, and its metrics.

    python recipes/verify.py RUN_DIR…
    python recipes/verify.py FOLDER                 a checkpoint, or a saved model

Exit codes: 0 all is as it was written, 1 something is not, 2 the request cannot be served as written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import typer
from rich.console import Console
from rich.table import Table

from recipes.checkpoints import COMPLETE, checkpoint_facts, damage
from recipes.commands import CommandError, call
from recipes.ownership import RunLock
from recipes.runs import RunFolder
from zoo.model import MANIFEST, saved_model_damage

WHOLE, UNKNOWN = "whole", "no digests: written before version 0.6"


def verify_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="run folders, checkpoints, saved models")],
) -> int:
    console, found = Console(highlight=False), []
    for folder in folders:
        items = list(_items(folder))
        if not items:
            raise CommandError(f"{folder} is no run folder, checkpoint or saved model")
        table = Table(title=str(folder), title_justify="left")
        for column, side in (("", "left"), ("MB", "right"), ("", "left")):
            table.add_column(column, justify=side)  # type: ignore[arg-type]
        for name, size, state in items:
            table.add_row(name, f"{size / 1e6:,.1f}", state)
        console.print(table)
        found += [state for *_, state in items]
    return int(any(state.startswith("damaged") for state in found))


def _items(folder: Path) -> Iterator[tuple[str, int, str]]:
    """(name, bytes, state) of everything in a folder that can be verified."""
    run = RunFolder(folder)
    if (folder / COMPLETE).is_file():
        yield _item(folder.name, folder, _checkpoint(folder))
    elif (folder / "config.json").is_file():
        yield _item(folder.name, folder, _model(folder))
    elif (folder / "recipe.json").is_file():
        for path in sorted(run.checkpoint_root.glob("step_*")):
            if path.suffix in ("", ".universal"):
                state = _checkpoint(path)
            else:
                state = {".partial": "being written, or left over", ".aside": "set aside: not used"}.get(
                    path.suffix, ""
                )
            yield _item(path.name, path, state)
        if (folder / "model").is_dir():
            yield _item("model", folder / "model", _model(folder / "model"))
        lost, size = run.unreadable_metrics(), run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
        lines = f"{len(run.metrics()):,} records"
        yield run.metrics_path.name, size, f"damaged: {lost} unreadable of {lines}" if lost else lines
        if holder := RunLock.holder(folder):
            yield "run.lock", 0, f"held: {holder} trains here"


def _item(name: str, folder: Path, state: str) -> tuple[str, int, str]:
    return name, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), state


def _checkpoint(folder: Path) -> str:
    facts = checkpoint_facts(folder)
    if facts is not None and "files" not in facts:
        return UNKNOWN
    wrong = damage(folder)
    return f"damaged: {wrong}" if wrong else WHOLE


def _model(folder: Path) -> str:
    if not (folder / MANIFEST).is_file():
        return UNKNOWN
    wrong = saved_model_damage(folder)
    return f"damaged: {wrong}" if wrong else WHOLE


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/verify.py") -> int:
    return call(verify_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
