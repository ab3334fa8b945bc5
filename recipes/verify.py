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

from recipes.checkpoints import COMPLETE, checkpoint_facts, damage
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
    if (folder / "config.json").is_file():
        has_digests = (folder / MANIFEST).is_file()
        yield folder, _state(saved_model_damage(folder), has_digests)
    elif (folder / COMPLETE).is_file():
        facts = checkpoint_facts(folder)
        has_digests = facts is not None and "files" in facts
        yield folder, _state(damage(folder), has_digests)
    elif (folder / "recipe.json").is_file():
        yield from _run_states(RunFolder(folder))


def _state(reason: str | None, has_digests: bool) -> str:
    """reason: what is damaged; None for nothing."""
    if reason:
        return f"damaged: {reason}"
    return "whole" if has_digests else "no digests"


def _run_states(run: RunFolder) -> Iterator[tuple[Path, str]]:
    """(path, state) of a run's checkpoints, final weights and metrics."""
    for path in sorted(run.checkpoint_root.glob("step_*")):
        if not NAME.fullmatch(path.name):
            yield path, "not used"
        elif (path / COMPLETE).is_file():
            yield from _states(path)
        else:
            yield path, f"damaged: {damage(path)}"
    if (run.path / "model").is_dir():
        yield from _states(run.path / "model")
    records, unreadable = run.read_metrics()
    if not run.metrics_path.is_file():
        state = "damaged: missing"
    elif unreadable:
        state = f"damaged: {unreadable} unreadable of {len(records):,} records"
    else:
        state = f"{len(records):,} records"
    yield run.metrics_path, state


main = partial(call, verify_command, prog="priorzoo verify")
