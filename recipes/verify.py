"""Verify a run: every file of its checkpoints and of its final weights, by size and SHA-256, and
its metrics.

    priorzoo verify RUN_DIR…
    priorzoo verify FOLDER                 a checkpoint, or a saved model

Exit codes: 0 all is as it was written, 1 something is not, 2 the request cannot be served as
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from recipes.checkpoints import COMPLETE, FACTS, checkpoint_facts, damage
from recipes.commands import CommandError, call
from recipes.run_folder import NAME, RunFolder
from zoo.errors import printable
from zoo.model import MANIFEST, saved_model_damage


def verify_command(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR…", help="run folders, checkpoints, saved models"),
    ],
) -> int:
    damaged = False
    for folder in folders:
        states = list(_states(folder))
        if not states:
            raise CommandError(f"{folder} is no run folder, checkpoint or saved model")
        print(printable(str(folder)))
        for path, state in states:
            print(f"  {printable(path.name):28} {state}")
            damaged |= state.startswith("damaged")
    return int(damaged)


def _states(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path, state) of everything in a folder that can be verified."""
    if (folder / COMPLETE).is_file() or (folder / "config.json").is_file():
        is_model = (folder / "config.json").is_file()
        reason = (saved_model_damage if is_model else damage)(folder)
        has_digests = (
            (folder / MANIFEST).is_file()
            if is_model
            else "files" in (checkpoint_facts(folder) or FACTS)
        )
        yield folder, f"damaged: {reason}" if reason else "whole" if has_digests else "no digests"
    elif (folder / "recipe.json").is_file():
        run = RunFolder(folder)
        for path in sorted(run.checkpoint_root.glob("step_*")):
            if not NAME.fullmatch(path.name):
                yield path, "not used"
            else:
                yield from (
                    _states(path)
                    if (path / COMPLETE).is_file()
                    else [(path, f"damaged: {damage(path)}")]
                )
        if (folder / "model").is_dir():
            yield from _states(folder / "model")
        records, unreadable = run.read_metrics()
        lines = f"{len(records):,} records" if run.metrics_path.is_file() else "damaged: missing"
        yield (
            run.metrics_path,
            f"damaged: {unreadable} unreadable of {lines}" if unreadable else lines,
        )


main = partial(call, verify_command, prog="priorzoo verify")
