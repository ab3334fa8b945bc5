"""Train recipes with several seeds each, side by side, one thread each; then measure all runs
together.

    priorzoo train-seeds text.ggd_tiny text.rope_tiny --seeds 0,1,2 --jobs 2 --out runs/compared
    priorzoo train-seeds text.ggd_tiny text.rope_tiny --out runs/compared \\
        --evaluate 'passkey --lengths 256,1024'

Each run has a folder OUT/RECIPE-sSEED and a log next to it. The same command again keeps finished
runs and goes on with others. Tables and figures of --evaluate, which is what `priorzoo evaluate`
takes after the models, show the mean and the deviation over seeds; they go to OUT/results. Exit
codes: 0 done, 1 a run failed, 2 the request cannot be served as written.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from modalities.results import file_safe
from recipes import evaluate as evaluation
from recipes.commands import CommandError, call, handled_signals
from recipes.registry import open_recipe
from recipes.settings import apply_overrides
from zoo.console import Import
from zoo.errors import require
from zoo.plugins import import_named

# Between two lines of a run.
PRINT_SECONDS = 15.0


def train_seeds_command(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE…", help="as `priorzoo train` takes them")
    ],
    *,
    seeds: Annotated[str, typer.Option(help="comma-separated")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="where run folders and results go")] = Path(
        "runs/seeds"
    ),
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="of every run")
    ] = [],  # noqa: B006
    evaluate: Annotated[str, typer.Option(help="then measure all: 'EVAL [options]'")] = "",
    import_: Import = [],  # noqa: B006
) -> int:
    import_named(import_)
    try:
        numbers = list(dict.fromkeys(int(seed) for seed in seeds.split(",")))
    except ValueError as error:
        raise CommandError(
            f"--seeds {seeds!r}: expected whole numbers with commas, such as 0,1,2"
        ) from error
    require("deepspeed", "training", "train")
    imports: list[str] = []
    for name in import_:
        imports += ["--import", name]
    evaluate_words = shlex.split(evaluate)
    # Folder → the words that `priorzoo train` is called with.
    runs: dict[Path, list[str]] = {}
    for recipe, seed in itertools.product(dict.fromkeys(recipes), numbers):
        # The settings of seed 0 are the recipe's.
        settings = list(set_)
        if seed != 0:
            settings += [f"train.seed={seed}", f"data.seed={seed}"]
        check_run(recipe, settings, evaluate_words)
        words = [recipe]
        for setting in settings:
            words += ["--set", setting]
        title = Path(recipe).name if ".py" in recipe else recipe
        runs[out / f"{file_safe(title)}-s{seed}"] = words + imports
    print(f"{len(runs)} runs, folders in {out}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    codes, stops = train_all(runs, jobs)
    if stops:
        return 128 + stops[0]
    if any(codes):
        return 1
    if not evaluate_words:
        return 0
    folders = [str(folder) for folder in runs]
    return evaluation.main([*folders, *evaluate_words, "--out", str(out / "results"), *imports])


def check_run(recipe: str, settings: Sequence[str], evaluate_words: Sequence[str]) -> None:
    """ConfigError or CommandError for a recipe that cannot run, or an evaluator that its modality
    has not, before any run starts."""
    modality = apply_overrides(open_recipe(recipe), settings)[0].modality
    # Models to compare with may stand before the evaluators.
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), evaluate_words))
    if names:
        evaluation.find_evaluators(names[-1], modality)


def train_all(runs: Mapping[Path, list[str]], jobs: int) -> tuple[list[int], list[int]]:
    """(exit code of each run, signals that arrived), with `jobs` runs at a time."""
    codes: list[int] = []
    processes: list[subprocess.Popen[str]] = []
    stops: list[int] = []
    with ThreadPoolExecutor(jobs) as pool, handled_signals(partial(_stop, processes, stops)):
        results = [pool.submit(_train, processes, stops, *run) for run in runs.items()]
        for folder, result in zip(runs, results, strict=True):
            # A signal that arrives between two instructions of a wait does not end it; its handler
            # runs after the wait.
            while not wait([result], timeout=1).done:
                pass
            if result.exception():
                pool.shutdown(cancel_futures=True)
            code = result.result()
            codes.append(code)
            outcome = f"failed ({code})" if code else "trained"
            print(f"{folder.name}: {outcome}, see {folder}.log", flush=True)
    return codes, stops


def _stop(
    processes: Sequence[subprocess.Popen[str]], stops: list[int], number: int, _: object
) -> None:
    """Start no further run, and pass the signal on: runs save a checkpoint. They get a terminal's
    Ctrl-C by themselves."""
    stops.append(number)
    if number != signal.SIGINT or not sys.stdin.isatty():
        for process in processes:
            process.send_signal(number)


def _train(
    processes: list[subprocess.Popen[str]], stops: Sequence[int], folder: Path, words: list[str]
) -> int:
    """Train in one thread, with a log next to the folder; returns the exit code. A signal may
    precede `processes.append`."""
    if stops:
        return 128 + stops[0]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *words]
    command += ["--run-dir", str(folder), "--resume", "auto"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = -math.inf
    with (
        Path(f"{folder}.log").open("a") as log,
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        processes.append(process)
        if stops:
            process.send_signal(stops[0])
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            if line.startswith("step") and time.monotonic() > printed + PRINT_SECONDS:
                print(f"{folder.name}: {line.rstrip()}", flush=True)
                printed = time.monotonic()
        return process.wait()


main = partial(call, train_seeds_command, prog="priorzoo train-seeds")
