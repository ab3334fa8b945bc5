"""Break small runs of every modality at their file operations, and see that nothing is lost.

    python tools/inject_faults.py                        every 25th operation: minutes
    python tools/inject_faults.py --every 1              every one: hours
    python tools/inject_faults.py --only 'dna, kill'     one kind

At an operation a run is killed, is killed with half of its bytes written, finds no space from there on, or fails once. Then
`--resume auto` has to end as the unbroken run did, byte by byte. So has a run whose files were damaged, one whose ranks were
killed, a conversion and an evaluation. Needs a C compiler. Exit code 1 where something was lost.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from recipes.runs import git_commit
from tools.faults import trials
from tools.faults.injector import KINDS, Fault, Server, server
from tools.faults.trials import Outcome
from zoo.cli import call
from zoo.files import write_json

app = typer.Typer(add_completion=False, help=(__doc__ or "").split("\n", maxsplit=1)[0])
console = Console(highlight=False)
BREAKS = KINDS[1:]


def campaign(at: Server, folder: Path, every: int) -> dict[str, Callable[[], Outcome]]:
    """Kinds of trials by name. Unbroken runs are made here."""
    found: dict[str, Callable[[], Outcome]] = {}
    for modality in trials.RECIPES:
        whole, ranks = folder / f"{modality}-whole", folder / f"{modality}-ranks"
        unbroken = at.run(trials.train, *trials.words(modality, whole), fault=Fault(whole))
        expected, places = trials.contents(whole), range(0, unbroken.operations, every)
        of_both = trials.both_ranks(at, modality, ranks)
        for kind in BREAKS:
            found[f"{modality}, {kind}"] = partial(trials.broken_runs, at, modality, kind, places, expected, folder)
        for kind, rank in itertools.product(("kill", "no space"), range(2)):
            name = f"{modality}, two ranks, {kind} of rank {rank}"
            found[name] = partial(trials.two_ranks, at, modality, kind, rank, places, of_both, folder)
        found[f"{modality}, conversion"] = partial(trials.conversions, at, modality, ranks, BREAKS, every, folder)
        found[f"{modality}, evaluation"] = partial(trials.evaluations, at, modality, whole, BREAKS, every, folder)
        found[f"{modality}, damaged files"] = partial(trials.damaged_files, at, modality, whole, folder)
        found[f"{modality}, 8 launches at once"] = partial(
            trials.launches, at, modality, 8, expected, folder / f"{modality}-launches"
        )
    return found


@app.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
def main(
    every: Annotated[int, typer.Option(min=1, help="of so many operations one is broken")] = 25,
    only: Annotated[str, typer.Option(help="kinds of trials whose names contain this")] = "",
    out: Annotated[Path | None, typer.Option(help="a JSON file for the counts; those of other kinds stay")] = None,
) -> int:
    outcomes: list[tuple[Outcome, float]] = []
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), trials.IMPORTS) as at:
        console.print("unbroken runs …")
        for name, run in campaign(at, Path(scratch), every).items():
            if only in name:
                begun = time.perf_counter()
                outcome = run()
                outcomes.append((outcome, time.perf_counter() - begun))
                console.print(
                    f"{name}: {outcome.trials} trials, {len(outcome.wrong)} lost or wrong", *outcome.wrong, sep="\n  "
                )
    table = Table(title="what broke, and what was lost", title_justify="left")
    for column in ("", "trials", "lost or wrong", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for outcome, seconds in outcomes:
        table.add_row(outcome.name, f"{outcome.trials:,}", f"{len(outcome.wrong):,}", f"{seconds:,.0f}")
    console.print(table)
    if out:
        rows = json.loads(out.read_text()) if out.exists() else {}
        about = {"every": every, "commit": git_commit()}
        rows |= {o.name: {"trials": o.trials, "wrong": o.wrong, "seconds": round(s)} | about for o, s in outcomes}
        write_json(out, rows)
    return int(any(outcome.wrong for outcome, _ in outcomes))


if __name__ == "__main__":
    sys.exit(call(app, None, prog="tools/inject_faults.py"))
