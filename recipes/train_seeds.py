"""Train recipes with several seeds each, side by side, one thread each; then measure all runs together.

    priorzoo train-seeds text.ggd_tiny text.rope_tiny --seeds 0,1,2 --jobs 2 --out runs/compared
    priorzoo train-seeds text.ggd_tiny text.rope_tiny --out runs/compared --evaluate 'passkey --lengths 256,1024'

Each run has a folder OUT/RECIPE-sSEED and a log beside it. The same command again keeps finished runs and goes on with
others. Tables and figures of --evaluate, which is what `priorzoo evaluate` takes after the models, show the mean and the
deviation over seeds; they go to OUT/results. Exit codes: 0 done, 1 a run failed, 2 the request cannot be served as written.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from rich.console import Console

from modalities.files import file_safe
from recipes.commands import CommandError, call
from recipes.config import apply_overrides
from recipes.registry import recipe_named
from zoo.cli import Import
from zoo.outside import import_named

__all__ = ["Run", "seed_settings", "train_all"]

HERE = Path(__file__).resolve().parent
console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """A call of `recipes/train.py`: a recipe, `--set` settings, the run folder, and files to import."""

    recipe: str
    folder: Path
    settings: tuple[str, ...]
    imports: tuple[str, ...] = ()


def seed_settings(seed: int) -> tuple[str, ...]:
    """Of the weights and of the data; those of seed 0 are the recipe's own."""
    return (f"train.seed={seed}", f"data.seed={seed}") if seed else ()


def train_all(queue: Sequence[Run], jobs: int) -> None:
    """Runs side by side, one thread each, with logs beside their folders; finished ones are kept, others continue.

    Raises typer.Exit, with 1, after all of them, where one failed.
    """

    def one(run: Run) -> int:
        command = [sys.executable, str(HERE / "train.py"), run.recipe, "--run-dir", str(run.folder), "--resume", "auto"]
        for option, values in (("--set", run.settings), ("--import", run.imports)):
            command += [word for value in values for word in (option, value)]
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        with run.folder.with_name(f"{run.folder.name}.log").open("a") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.run(command, env=environment, stdout=log, stderr=log).returncode

    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for run, status in zip(queue, pool.map(one, queue), strict=True):
            state = "trained" if status == 0 else f"failed ({status})"
            console.print(f"{run.folder.name}: {state}, see {run.folder}.log", soft_wrap=True, markup=False)
            failed |= status != 0
    if failed:
        raise typer.Exit(1)


def train_seeds_command(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE…", help="as `priorzoo train` takes them")],
    *,
    seeds: Annotated[str, typer.Option(help="comma-separated")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="where run folders and results go")] = Path("runs/seeds"),
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="of every run")] = [],  # noqa: B006
    evaluate: Annotated[str, typer.Option(help="then measure all: 'EVAL [options]'")] = "",
    import_: Import = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would run, and run nothing")] = False,
) -> int:
    from recipes.config import require_packages

    import_named(import_)
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError as error:
        raise CommandError(f"--seeds {seeds!r}: expected whole numbers with commas, such as 0,1,2") from error
    queue = []
    for recipe in dict.fromkeys(recipes):
        for seed in numbers:
            settings = (*set_, *seed_settings(seed))
            changed, _ = apply_overrides(
                recipe_named(recipe), list(settings)
            )  # what cannot run is said before anything does
            if not dry_run:
                require_packages(changed, {})
            name = file_safe(Path(recipe).name if ".py" in recipe else recipe)
            queue.append(Run(recipe, out / f"{name}-s{seed}", settings, tuple(import_)))
    words = shlex.split(evaluate)
    command = [str(HERE / "evaluate.py"), *(str(run.folder) for run in queue), *words, "--out", str(out / "results")]
    command += [word for name in import_ for word in ("--import", name)]
    console.print(f"{len(queue)} runs, folders in {out}", soft_wrap=True, markup=False)
    if dry_run:
        for run in queue:
            console.print(f"{run.folder}: {' '.join([run.recipe, *run.settings])}", soft_wrap=True, markup=False)
        return 0
    train_all(queue, jobs)
    return subprocess.run([sys.executable, *command]).returncode if words else 0


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/train_seeds.py") -> int:
    return call(train_seeds_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
