"""Train recipes with several seeds each, side by side, one thread each; then measure all runs
together.

    priorzoo train-seeds text.ggd_tiny text.rope_tiny --seeds 0,1,2 --jobs 2 --out runs/compared
    priorzoo train-seeds text.ggd_tiny text.rope_tiny --out runs/compared --evaluate 'passkey
    --lengths 256,1024'

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
from collections.abc import Sequence
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
from zoo.cli import Import
from zoo.errors import require
from zoo.plugins import import_named

EVERY = 15.0  # seconds between two lines of a run


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
    imports = [word for name in import_ for word in ("--import", name)]
    require("deepspeed", "training", "train")
    runs: dict[Path, list[str]] = {}  # folder → what `priorzoo train` is called with
    for recipe, seed in itertools.product(dict.fromkeys(recipes), numbers):
        # The settings of seed 0 are the recipe's own.
        settings = [*set_, *([f"train.seed={seed}", f"data.seed={seed}"] if seed else [])]
        # What cannot run is an error before anything runs.
        modality = apply_overrides(open_recipe(recipe), settings)[0].modality
        if names := list(
            itertools.takewhile(lambda word: not word.startswith("-"), shlex.split(evaluate))
        ):
            evaluation.find_evaluators(names[-1], modality)
        folder = out / f"{file_safe(Path(recipe).name if '.py' in recipe else recipe)}-s{seed}"
        runs[folder] = [
            recipe,
            *(word for setting in settings for word in ("--set", setting)),
            *imports,
        ]
    print(f"{len(runs)} runs, folders in {out}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    codes = []
    processes = list[subprocess.Popen[str]]()
    stops = list[int]()
    with ThreadPoolExecutor(jobs) as pool, handled_signals(partial(_stop, processes, stops)):
        results = [pool.submit(_train, processes, stops, *run) for run in runs.items()]
        for folder, result in zip(runs, results, strict=True):
            # A signal that arrives between two instructions of a wait does not end it; its handler
            # runs after the wait.
            while not wait([result], timeout=1).done:
                pass
            if result.exception():
                pool.shutdown(cancel_futures=True)
            codes.append(code := result.result())
            print(
                f"{folder.name}: {f'failed ({code})' if code else 'trained'}, see {folder}.log",
                flush=True,
            )
    if stops or any(codes) or not evaluate.strip():
        return 128 + stops[0] if stops else int(any(codes))
    return evaluation.main(
        [*map(str, runs), *shlex.split(evaluate), "--out", str(out / "results"), *imports]
    )


def _stop(
    processes: Sequence[subprocess.Popen[str]], stops: list[int], number: int, _: object
) -> None:
    """Starts no further run, and passes the signal on: runs save a checkpoint. They get a
    terminal's Ctrl-C by themselves."""
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
    shown = -math.inf
    pipe = subprocess.PIPE
    both = subprocess.STDOUT
    with (
        Path(f"{folder}.log").open("a") as log,
        subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=both, text=True, errors="replace"
        ) as process,
    ):
        processes.append(process)
        if stops:
            process.send_signal(stops[0])
        for line in process.stdout or ():
            log.write(line)
            log.flush()
            if line.startswith("step") and time.monotonic() > shown + EVERY:
                print(f"{folder.name}: {line.rstrip()}", flush=True)
                shown = time.monotonic()
        return process.wait()


main = partial(call, train_seeds_command, prog="priorzoo train-seeds")
