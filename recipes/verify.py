"""Verify a run: every file of its checkpoints and of its final weights, by size and SHA-256, and its metrics.

    priorzoo verify RUN_DIR…
    priorzoo verify FOLDER                 a checkpoint, or a saved model

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

from recipes.checkpoints import COMPLETE, checkpoint_facts, damage
from recipes.commands import CommandError, call
from recipes.runs import RunFolder, RunLock
from zoo.errors import printable
from zoo.model import MANIFEST, saved_model_damage


def verify_command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR…", help="run folders, checkpoints, saved models")],
) -> int:
    damaged = False
    for folder in folders:
        items = list(_items(folder))
        if not items:
            raise CommandError(f"{folder} is no run folder, checkpoint or saved model")
        print(printable(str(folder)))
        for path, state in items:
            print(f"  {printable(path.name):28} {state}")
            damaged |= state.startswith("damaged")
    return int(damaged)


def _items(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, state) of everything in a folder that can be verified."""
    if (folder / COMPLETE).is_file() or (folder / "config.json").is_file():
        yield folder, _state(folder)
    elif (folder / "recipe.json").is_file():
        run = RunFolder(folder)
        for path in sorted(run.checkpoint_root.glob("step_*")):
            yield path, _state(path) if path.suffix in ("", ".universal") else "not used"
        if (folder / "model").is_dir():
            yield folder / "model", _state(folder / "model")
        records, unreadable = run.read_metrics()
        lines = f"{len(records):,} records" if run.metrics_path.is_file() else "damaged: missing"
        yield run.metrics_path, f"damaged: {unreadable} unreadable of {lines}" if unreadable else lines
        if holder := RunLock.holder(folder):
            yield folder / "run.lock", f"held: {holder} trains here"


def _state(folder: Path) -> str:
    """Whether a checkpoint or a saved model is as it was written."""
    if (folder / "config.json").is_file():
        has_digests, reason = (folder / MANIFEST).is_file(), saved_model_damage(folder)
    else:
        facts, reason = checkpoint_facts(folder), damage(folder)
        has_digests = facts is None or "files" in facts
    if not has_digests:
        return "no digests: written by an early version"
    return f"damaged: {reason}" if reason else "whole"


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo verify") -> int:
    return call(verify_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
