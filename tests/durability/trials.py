"""Small runs that break at a file operation and are continued: the end must be that of an unbroken
run, byte by byte.

    LD_PRELOAD=inject.so python tests/durability/trials.py FOLDER STRIDE

Every STRIDE-th operation of a run that saves, prunes and exports is broken, by each kind in turn;
STRIDE 1 tries all of them. The process imports what training needs once and forks for each run.
Prints JSON: how many operations a run has, and what was wrong in which trial; run by
test_faults.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KINDS = ("count", "kill", "half", "no space")  # as inject.c numbers them
SETTINGS = (
    *(
        "data.source=yeast-chr01",
        "data.context=16",
        "model.options.num_layers=1",
        "model.options.dim=32",
    ),
    *("model.options.num_heads=1", "model.options.hidden_dim=32", "train.batch=4", "train.steps=3"),
    *(
        "train.save_every=1",
        "train.keep=2",
        "train.log_every=1",
        "optim.warmup=1",
        "evaluate.every=0",
    ),
)
WORDS = ["dna.ggd_ssmax_tiny", *(word for setting in SETTINGS for word in ("--set", setting))]
TIMED = ("seconds", "tokens_per_s")  # of the machine and the hour


@dataclass(frozen=True)
class Trial:
    """How a process ended: negative where a signal killed it; and what it printed."""

    code: int
    output: str
    operations: int = 0

    @property
    def one_line(self) -> bool:
        """Whether it could not go on and said so in one line."""
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return self.code == 2 and len(errors) == 1 and "Traceback" not in self.output


def train(run: Path, *more: str) -> int:
    from recipes.ranks import stop
    from recipes.train import main

    code = main([*WORDS, "--run-dir", str(run), *more])
    if code == 0:
        stop()
    return code


def fork(call: Callable[[], int], log: Path, folder: Path, kind: str = "", at: int = -1) -> Trial:
    """Run `call` in a fork of this process, with a fault of a kind at an operation below a
    folder."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = os.fdopen(1, "w", buffering=1)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            library = ctypes.CDLL(None)
            if kind:
                library.fault_arm(os.fsencode(folder), KINDS.index(kind), ctypes.c_long(at))
            try:
                code = call()
            except BaseException:
                traceback.print_exc()
            if kind == "count":
                print("operations:", library.fault_operations())
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text()
    return Trial(
        code,
        output,
        int(output.rpartition("operations: ")[2]) if kind == "count" and code == 0 else 0,
    )


def contents(run: Path) -> dict[str, object]:
    """What two runs of one recipe have in common: names of files, records without times, and the
    weights' bytes."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*")),
        "records": [{k: v for k, v in record.items() if k not in TIMED} for record in records],
        "weights": {
            str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")
        },
        "latest": (run / "checkpoints" / "latest").read_text(),
    }


def broken_run(folder: Path, kind: str, at: int, whole: dict[str, object]) -> str:
    """Break a run at an operation and continue it; returns what was wrong."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    first = fork(lambda: train(run), folder / "log", run, kind, at)
    if kind != "no space" and first.code != -9:
        return f"was not killed: exit code {first.code}: {first.output[-300:]}"
    if kind == "no space" and first.code and not first.one_line:
        return f"exit code {first.code} and not one line: {first.output[-600:]}"
    return continued(folder, run, whole)


def continued(folder: Path, run: Path, whole: dict[str, object]) -> str:
    again = fork(lambda: train(run, "--resume", "auto"), folder / "log", run)
    if again.code:
        return f"resume ended with {again.code}: {again.output[-600:]}"
    end = contents(run)
    return "; ".join(f"{name} differ" for name in whole if end[name] != whole[name])


def main(folder: Path, stride: int) -> None:
    for name in ("deepspeed", "matplotlib.pyplot", "torch._dynamo", "modalities.dna"):
        __import__(name)
    unbroken = folder / "unbroken"
    first = fork(lambda: train(unbroken), folder / "log", unbroken, "count")
    if first.code:
        sys.exit(first.output)
    whole = contents(unbroken)
    wrong = {}
    trials = 0
    for number, at in enumerate(range(stride // 2, first.operations, stride)):
        for kind in KINDS[1:] if stride == 1 else [KINDS[1 + number % 3]]:
            trials += 1
            if problem := broken_run(folder, kind, at, whole):
                wrong[f"{kind} at {at}"] = problem
    changed = whole | {"latest": "step_00000001"}  # or every trial could pass without a comparison
    seen = bool(broken_run(folder, "kill", first.operations // 2, changed))
    print(
        json.dumps(
            {
                "operations": first.operations,
                "trials": trials,
                "wrong": wrong,
                "differences_seen": seen,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
