"""Small runs of every modality that are broken at a file operation and continued: the end must be that of an unbroken run.

Byte by byte: the records but their times, the weights, the names of all files.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults.injector import Fault, Server, Trial

IMPORTS = [
    "recipes.train", "recipes.engine", "recipes.evaluate", "recipes.ownership", "recipes.checkpoints", "modalities.text",
    "modalities.vision.modality", "modalities.dna", "deepspeed", "matplotlib.pyplot", "torch._dynamo", "setuptools",
]  # fmt: skip
SMALL = [
    "model.options.num_layers=1", "model.options.dim=32", "model.options.num_heads=1", "model.options.hidden_dim=32",
    "train.batch=4", "train.steps=3", "train.save_every=1", "train.keep=2", "train.log_every=1", "optim.warmup=1",
    "evaluate.every=0",
]  # fmt: skip
RECIPES = {
    "text": [
        "text.ggd_ssmax_tiny", "optim.name=adamw", "data.tokenizer=bytes", "data.context=16", "data.facts_fraction=0",
        "data.copies_fraction=0",
    ],
    "vision": ["vision.ggd2d_ssmax_tiny", "data.source=glyphs-builtin", "data.image_size=16", "train.ema=0.9"],
    "dna": ["dna.ggd_ssmax_tiny", "data.source=yeast-chr01", "data.context=16"],
}  # fmt: skip
EVALUATIONS = {
    "text": ["passkey,perplexity", "--lengths", "128,256", "--samples", "1"],
    "vision": ["resolution", "--sizes", "16,24", "--samples", "8"],
    "dna": ["bits", "--lengths", "16,32", "--samples", "4"],
}
# Of the machine and the hour: in records, and in tables of evaluations.
TIMED = ("seconds", "tokens_per_s", "images_per_s", "bases_per_s", "images_per_second", "peak_memory_mib")


def words(modality: str, folder: Path, *more: str) -> list[str]:
    """The command line of a small run."""
    recipe, *settings = RECIPES[modality]
    return [recipe, *(w for s in [*settings, *SMALL] for w in ("--set", s)), "--run-dir", str(folder), *more]


def train(*arguments: str) -> int:
    from recipes.engine import stop
    from recipes.train import main

    code = main(arguments)
    if code == 0:
        stop()
    return code


def contents(run: Path) -> dict[str, object]:
    """What two runs of one recipe have in common: names of files, records without times, and the weights' bytes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")}
    return {
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        "records": [{k: v for k, v in line.items() if k not in TIMED} for line in lines],
        "weights": weights,
        "latest": (run / "checkpoints" / "latest").read_text(),
    }


@dataclass
class Outcome:
    """Trials of one kind, and what was wrong in them."""

    name: str
    trials: int = 0
    wrong: list[str] = field(default_factory=list)


def broken_runs(
    server: Server, modality: str, kind: str, places: Iterable[int], whole: dict[str, object], folder: Path
) -> Outcome:
    """Runs that break at these operations and are continued by `--resume auto`.

    A killed one dies by SIGKILL and one whose operation fails says so in one line; after that each must end as the unbroken
    run `whole` did.
    """
    outcome = Outcome(f"{modality}, {kind}")
    for at in places:
        run = folder / f"{modality}-{kind.replace(' ', '-')}-{at}"
        first = server.run(train, *words(modality, run), fault=Fault(run, kind, at))
        again = server.run(train, *words(modality, run, "--resume", "auto"))
        outcome.trials += 1
        problem = _broken(first, kind) or _ended(again, run, whole)
        if problem:
            outcome.wrong.append(f"operation {at}: {problem}")
        else:
            shutil.rmtree(run)
    return outcome


def _broken(trial: Trial, kind: str) -> str:
    if trial.hung:
        return f"hangs: {trial.said[-300:]}"
    if kind in ("kill", "half"):
        return "" if trial.code == -9 else f"was not killed: exit code {trial.code}, {trial.said[-300:]}"
    if trial.code == 0:  # the operation that failed was none that matters, such as a flush of a picture
        return ""
    return "" if _one_line(trial) else f"exit code {trial.code} and not one line: {trial.said[-600:]}"


def _one_line(trial: Trial) -> bool:
    """Whether it could not go on, and said so in one line."""
    errors = [line for line in trial.said.splitlines() if line.startswith("error: ")]
    return trial.code == 2 and len(errors) == 1 and "Traceback" not in trial.said


def _ended(trial: Trial, run: Path, whole: dict[str, object]) -> str:
    if trial.code:
        return f"resume ended with {trial.code}: {trial.said[-600:]}"
    return _same(run, whole)


def _difference(a: object, b: object) -> str:
    if isinstance(a, list) and isinstance(b, list):
        return f"{[x for x in a if x not in b][:4]} for {[x for x in b if x not in a][:4]}"
    if isinstance(a, dict) and isinstance(b, dict):
        return f"of {[name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]}"
    return f"{a!r} for {b!r}"


def train_in(folder: str, *arguments: str) -> int:
    """`train` from another working directory."""
    os.chdir(folder)
    return train(*arguments)


def launches(server: Server, modality: str, count: int, whole: dict[str, object], folder: Path) -> Outcome:
    """Many at once: without --run-dir as many whole runs; with one folder for all one whole run and refusals of one line."""
    outcome = Outcome(f"{modality}, {count} launches at once", count)
    folder.mkdir()
    command = words(modality, folder)[:-2]
    for trial in [server.start(train_in, str(folder), *command) for _ in range(count)]:
        if trial.wait().code:
            outcome.wrong.append(f"exit code {trial.code}: {trial.said[-300:]}")
    runs = sorted((folder / "runs").glob("*/*"))
    if len(runs) != count:
        outcome.wrong.append(f"{len(runs)} folders")
    outcome.wrong += [f"{run}: {wrong}" for run in runs if (wrong := _same(run, whole))]
    for more in ([], ["--resume", "auto"]):
        run = folder / f"one{len(more)}"
        trials = [server.start(train, *words(modality, run, *more)) for _ in range(count)]
        outcome.trials += count
        refused = [t for t in trials if t.wait().code]
        # One after the other `--resume auto` may find a run that has ended, and has nothing left to train.
        if len(refused) == count or (not more and len(refused) != count - 1):
            outcome.wrong.append(f"{len(refused)} of {count} refused for one folder")
        outcome.wrong += [
            t.said[-300:] for t in refused if t.code != 2 or t.said.count("error: ") != 1 or "Traceback" in t.said
        ]
        if wrong := _same(run, whole):
            outcome.wrong.append(wrong)
    return outcome


def damaged_files(server: Server, modality: str, whole: Path, folder: Path, *, flips: int = 1) -> Outcome:
    """Each file of the newest checkpoint with a bit turned over, empty, cut in half, or gone: resume takes the older one, and
    ends as the unbroken run did."""
    outcome = Outcome(f"{modality}, damaged files")
    newest, expected = sorted((whole / "checkpoints").glob("step_*"))[-1].name, contents(whole)
    rng = random.Random(0)
    for path in sorted(p for p in (whole / "checkpoints" / newest).rglob("*") if p.is_file()):
        for how in ("gone", "empty", "half", *["flip"] * flips):
            run = folder / "damaged"
            shutil.copytree(whole, run)
            _damage(run / path.relative_to(whole), how, rng)
            trial = server.run(train, *words(modality, run, "--resume", "auto"))
            outcome.trials += 1
            gone = (
                how == "gone" and path.name == "complete.json"
            )  # is a checkpoint that was never finished: nothing to tell
            told = gone or newest in trial.said
            if wrong := _ended(trial, run, expected) or ("" if told else "the damage was not told"):
                outcome.wrong.append(f"{path.relative_to(whole)} {how}: {wrong}")
            shutil.rmtree(run)
    return outcome


def _damage(path: Path, how: str, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "gone":
        return path.unlink()
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif how == "half":
        content = content[: len(content) // 2]
    else:
        content = bytearray()
    path.write_bytes(content)


def both_ranks(server: Server, modality: str, run: Path) -> dict[str, object]:
    """An unbroken run of two ranks, and its contents."""
    for trial in _both(server, modality, run, None, 0):
        assert trial.code == 0, trial.said
    return contents(run)


def two_ranks(
    server: Server, modality: str, kind: str, rank: int, places: Iterable[int], whole: dict[str, object], folder: Path
) -> Outcome:
    """One of two ranks breaks at an operation, says why where it can, and the launcher kills the other; both continue."""
    outcome = Outcome(f"{modality}, two ranks, {kind} of rank {rank}")
    for at in places:
        run = folder / f"{modality}-ranks-{rank}-{at}"
        first = _both(server, modality, run, Fault(run, kind, at), rank)[rank]
        if kind == "no space" and first.code and (f"rank {rank}: " if rank else "error: ") not in first.said:
            outcome.wrong.append(f"operation {at}: the cause was not told: {first.said[-300:]}")
        again = _both(server, modality, run, None, rank, "--resume", "auto")
        outcome.trials += 1
        if problem := "".join(trial.said[-300:] for trial in again if trial.code) or _same(run, whole):
            outcome.wrong.append(f"operation {at}: {problem}")
        else:
            shutil.rmtree(run)
    return outcome


def _both(server: Server, modality: str, run: Path, fault: Fault | None, broken: int, *more: str) -> list[Trial]:
    command = [*words(modality, run, *more), "--set", "train.zero_stage=1"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    trials = [
        server.start(train, *command, fault=fault if n == broken else None, RANK=str(n), LOCAL_RANK=str(n), **place)
        for n in range(2)
    ]
    if fault is not None:
        trials[broken].wait(60)
        if trials[broken].code == 0:  # it had fewer operations
            return [trial.wait() for trial in trials]
        trials[1 - broken].process.kill()
    return [trial.wait() for trial in trials]


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def convert(source: str, target: str) -> int:
    from recipes.checkpoints import convert

    convert(Path(source), Path(target))
    return 0


def conversions(server: Server, modality: str, ranks: Path, kinds: Iterable[str], every: int, folder: Path) -> Outcome:
    """The newest checkpoint of a run of two ranks, whose conversion breaks at each `every`-th operation, continued by one rank
    all the same."""
    outcome, newest = Outcome(f"{modality}, conversion"), sorted((ranks / "checkpoints").glob("step_*"))[-1].name
    more = ("--resume", "auto", "--set", "train.zero_stage=1", "--set", "train.steps=4")

    def converted(run: Path, kind: str, at: int) -> Trial:
        shutil.copytree(ranks, run)
        source = run / "checkpoints" / newest
        return server.run(convert, str(source), f"{source}.universal", fault=Fault(run, kind, at))

    unbroken = folder / f"{modality}-converted"
    operations = converted(unbroken, "count", -1).operations
    if (trial := server.run(train, *words(modality, unbroken, *more))).code:
        outcome.wrong.append(trial.said[-400:])
        return outcome
    for kind, at in itertools.product(kinds, range(every // 2, operations, every)):
        run = folder / "conversion"
        converted(run, kind, at)
        trial = server.run(train, *words(modality, run, *more))
        outcome.trials += 1
        if wrong := _ended(trial, run, contents(unbroken)):
            outcome.wrong.append(f"{kind}, operation {at}: {wrong}")
        shutil.rmtree(run)
    return outcome


def evaluate(*arguments: str) -> int:
    from recipes.evaluate import main

    return main(arguments)


def results(out: Path) -> dict[str, object]:
    """Tables of an evaluation but their times, and the names of all its files; temporary ones of a killed process stay for an
    hour."""
    files = [path for path in out.rglob("*") if not path.name.startswith(".")]
    tables: dict[str, object] = {}
    for path in files:
        if path.suffix == ".csv":
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            tables[str(path.relative_to(out))] = [{k: v for k, v in row.items() if k not in TIMED} for row in rows]
    return tables | {"files": sorted(str(path.relative_to(out)) for path in files)}


def evaluations(server: Server, modality: str, run: Path, kinds: Iterable[str], every: int, folder: Path) -> Outcome:
    """Evaluations that break at each `every`-th operation and are made again: the same results, and no other file."""
    outcome, unbroken = Outcome(f"{modality}, evaluation"), folder / f"{modality}-evaluated"

    def evaluated(out: Path, fault: Fault | None = None) -> Trial:
        return server.run(evaluate, str(run), *EVALUATIONS[modality], "--out", str(out), fault=fault)

    trial = evaluated(unbroken, Fault(unbroken))
    if trial.code:
        outcome.wrong.append(trial.said[-400:])
        return outcome
    for kind, at in itertools.product(kinds, range(every // 2, trial.operations, every)):
        out = folder / "evaluation"
        evaluated(out, Fault(out, kind, at))
        again = evaluated(out)
        outcome.trials += 1
        found, expected = results(out), results(unbroken)
        if again.code or found != expected:
            outcome.wrong.append(f"{kind}, operation {at}: {again.said[-300:]} {_difference(found, expected)}")
        shutil.rmtree(out)
    return outcome


def _same(run: Path, whole: dict[str, object]) -> str:
    found = contents(run)
    return "".join(
        f"{name} differ: {_difference(found[name], whole[name])}; " for name in whole if found[name] != whole[name]
    )
