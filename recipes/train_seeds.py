"""Train recipes with several seeds each, side by side, one thread each; then measure all runs together.

    priorzoo train-seeds text.ggd_tiny text.rope_tiny --seeds 0,1,2 --jobs 2 --out runs/compared
    priorzoo train-seeds text.ggd_tiny text.rope_tiny --out runs/compared --evaluate 'passkey --lengths 256,1024'

Each run has a folder OUT/RECIPE-sSEED and a log beside it. The same command again keeps finished runs and goes on with
others. Tables and figures of --evaluate, which is what `priorzoo evaluate` takes after the models, show the mean and the
deviation over seeds; they go to OUT/results. Exit codes: 0 done, 1 a run failed, 2 the request cannot be served as written.
"""

from __future__ import annotations

import itertools
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

from modalities.files import file_safe
from recipes.commands import CommandError, call
from recipes.config import apply_overrides, require_packages
from recipes.registry import recipe_named
from zoo.cli import Import
from zoo.outside import import_named

__all__ = ["Run", "seed_settings", "train_all"]

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """A call of `recipes/train.py`: a recipe, `--set` settings, the run folder, and files to import."""

    recipe: str
    folder: Path
    settings: tuple[str, ...]
    imports: tuple[str, ...] = ()

    def train(self) -> int:
        """Train in one thread, with a log next to the folder; a finished run is kept. Returns the exit code."""
        command = [
            sys.executable,
            str(HERE / "train.py"),
            self.recipe,
            "--run-dir",
            str(self.folder),
            "--resume",
            "auto",
        ]
        command += [word for value in self.settings for word in ("--set", value)]
        command += [word for value in self.imports for word in ("--import", value)]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.folder.name}.log").open("a") as log:
            return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log).returncode


def seed_settings(seed: int) -> tuple[str, ...]:
    """Settings of the weights' and the data's seed; those of seed 0 are the recipe's own."""
    return (f"train.seed={seed}", f"data.seed={seed}") if seed else ()


def train_all(queue: Sequence[Run], jobs: int) -> None:
    """Train runs side by side. Raises typer.Exit, with 1, after all of them, where one failed."""
    codes = []
    with ThreadPoolExecutor(jobs) as pool:
        for run, code in zip(queue, pool.map(Run.train, queue), strict=True):
            codes.append(code)
            print(f"{run.folder.name}: {f'failed ({code})' if code else 'trained'}, see {run.folder}.log", flush=True)
    if any(codes):
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
    import_named(import_)
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError as error:
        raise CommandError(f"--seeds {seeds!r}: expected whole numbers with commas, such as 0,1,2") from error
    queue = []
    for recipe, seed in itertools.product(dict.fromkeys(recipes), numbers):
        settings = (*set_, *seed_settings(seed))
        changed, _ = apply_overrides(recipe_named(recipe), settings)  # what cannot run is said before anything does
        if not dry_run:
            require_packages(changed, {})
        name = file_safe(Path(recipe).name if ".py" in recipe else recipe)
        queue.append(Run(recipe, out / f"{name}-s{seed}", settings, tuple(import_)))
    print(f"{len(queue)} runs, folders in {out}", flush=True)
    if dry_run:
        for run in queue:
            print(f"{run.folder}: {' '.join([run.recipe, *run.settings])}")
        return 0
    train_all(queue, jobs)
    words = [*(str(run.folder) for run in queue), *shlex.split(evaluate), "--out", str(out / "results")]
    words += [word for name in import_ for word in ("--import", name)]
    return subprocess.run([sys.executable, str(HERE / "evaluate.py"), *words]).returncode if evaluate else 0


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/train_seeds.py") -> int:
    return call(train_seeds_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
