"""Measure models of the zoo, or of run folders, beside each other.

    python recipes/evaluate.py MODEL|RUN_DIR [MODEL|RUN_DIR ...] EVAL --lengths 128,512,4096 --out results
    python recipes/evaluate.py 'text_*_tiny.*' passkey,perplexity          every shipped tiny model, one figure

The last argument names the evaluators, comma-separated; the others name models: registry names, patterns of names with
weights, or run folders. Written to --out: EVAL.json (everything), EVAL.csv (a row per model and length), EVAL.png (all
models in one figure), overview.png where passkey and perplexity were both measured, and cells/, from which a run that
was stopped goes on. Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # `recipes` from the checkout, and this folder's files as no top-level names
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    # Threads that wait by spinning starve each other when something else wants a core; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from modalities.evaluation import CellStore, EvalSettings, Evaluator, ModelResult, weights_hash, write_json, write_text
from modalities.plots import compact
from recipes.config import nearest
from recipes.console import short
from recipes.targets import RequestError, Target, find_evaluators, find_targets, parse_lengths, parse_overrides

console = Console(highlight=False)


def evaluate(
    targets: list[Target],
    evaluators: list[Evaluator],
    settings: EvalSettings,
    out: Path,
    *,
    overrides: dict[str, Any] | None = None,
    quiet: bool = False,
) -> dict[str, list[ModelResult]]:
    """Run every evaluator on every model and write its files. Returns the results by evaluator."""
    everything = {}
    for evaluator in evaluators:
        results = [_measure(target, evaluator, settings, out, overrides or {}, quiet) for target in targets]
        write_results(evaluator, results, settings, out)
        everything[evaluator.name] = results
    if {"passkey", "perplexity"} <= everything.keys():
        from modalities.plots import overview_figure

        overview_figure(everything["passkey"], everything["perplexity"], out / "overview.png")
    return everything


def _measure(
    target: Target, evaluator: Evaluator, settings: EvalSettings, out: Path, overrides: dict[str, Any], quiet: bool
) -> ModelResult:
    """One model through one evaluator, each finished cell stored at once."""
    model = target.model
    cells = evaluator.cells(model, settings)
    store = CellStore(out / "cells", _store_key(target, evaluator, settings, overrides))
    todo = {cell.name: cell.cost for cell in cells if cell.name not in store.finished}
    started = time.perf_counter()
    values = {}
    with _bar(quiet) as bar:
        task = bar.add_task(f"{evaluator.name}  {target.label}", total=sum(todo.values()), rate="")
        for name, value in evaluator.run(model, settings, finished=dict(store.finished)):
            values[name] = value
            if name in todo:
                store.add(name, value)
                bar.advance(task, todo[name])
                done = bar.tasks[0].completed
                rate = done / max(time.perf_counter() - started, 1e-9)
                bar.update(task, rate=f"{short(rate)} tokens/s")
    return ModelResult(
        label=target.label,
        method=target.method,
        train_context=model.config.train_context,
        rows=evaluator.rows(values),
        cells=values,
        weights=store.key["weights"],
        seconds=time.perf_counter() - started,
    )


def _store_key(target: Target, evaluator: Evaluator, settings: EvalSettings, overrides: dict[str, Any]) -> dict:
    """Everything a cell's number depends on. The device and the batch size change rounding alone, and are left out."""
    return {
        "evaluator": evaluator.name,
        "version": evaluator.version,
        "model": target.label,
        "weights": weights_hash(target.model),
        "config": dataclasses.asdict(target.model.config),
        "dtype": str(next(target.model.parameters()).dtype),
        "overrides": overrides,
        "settings": evaluator.identity(target.model, settings),
    }


def write_results(evaluator: Evaluator, results: list[ModelResult], settings: EvalSettings, out: Path) -> None:
    """EVAL.json, EVAL.csv and EVAL.png, each replaced as a whole."""
    models = [dataclasses.asdict(result) for result in results]
    content = {"evaluator": evaluator.name, "settings": dataclasses.asdict(settings), "models": models}
    write_json(out / f"{evaluator.name}.json", content)
    rows = [
        {"model": result.label, "method": result.method, "train_context": result.train_context}
        | {name: value for name, value in row.items() if not isinstance(value, list)}
        for result in results
        for row in result.rows
    ]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
    table.writeheader()
    table.writerows(rows)
    write_text(out / f"{evaluator.name}.csv", text.getvalue())
    evaluator.draw(results, out / f"{evaluator.name}.png")


def print_results(evaluator: Evaluator, results: list[ModelResult]) -> None:
    lengths = sorted({row["length"] for result in results for row in result.rows})
    table = Table(title=f"{evaluator.name}: {evaluator.summary}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("score", style="dim", no_wrap=True)
    for length in lengths:  # numbers are never cut; on a narrow terminal names wrap
        table.add_column(compact(length), justify="right", no_wrap=True, min_width=5)
    methods = {result.method for result in results}
    for result in results:
        name = result.method if len(methods) == len(results) else result.label  # short where that tells them apart
        by_length = {row["length"]: row for row in result.rows}
        for k, score in enumerate(evaluator.headline):
            values = [by_length[n][score] if n in by_length else None for n in lengths]
            shown = ["" if value is None else _short(value) for value in values]
            table.add_row(name if k == 0 else "", score, *shown, end_section=k + 1 == len(evaluator.headline))
    console.print(table)


# ------------------------------------------------------------------------------------------------------ command line

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
def main(
    arguments: Annotated[
        list[str], typer.Argument(metavar="MODEL|RUN_DIR... EVAL", help="models, then the evaluators")
    ],
    lengths: Annotated[str | None, typer.Option(help="such as 128,512,4096 or 4k; default 1x to 32x trained")] = None,
    out: Annotated[Path, typer.Option(help="folder for JSON, CSV, PNG and finished cells")] = Path("results"),
    samples: Annotated[int | None, typer.Option(help="in each cell; default: the evaluator's own")] = None,
    seed: Annotated[int, typer.Option(help="of every random draw")] = 42,
    source: Annotated[str | None, typer.Option(help="where held-out text comes from, as in a recipe")] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="change the model's configuration")
    ] = [],  # noqa: B006
    batch_tokens: Annotated[int, typer.Option(help="most tokens in one forward pass")] = 16384,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64")] = "float32",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be measured, and measure nothing")] = False,
) -> None:
    try:
        if len(arguments) < 2:
            raise RequestError("name at least one model and, last, an evaluator, such as `text_ggd_ssmax_tiny passkey`")
        if dtype not in ("float32", "bfloat16", "float64"):
            raise RequestError(f"--dtype {dtype!r}: {nearest(dtype, ('float32', 'bfloat16', 'float64'))}")
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        overrides = parse_overrides(set_ or [])
        settings = EvalSettings(parse_lengths(lengths), samples, seed, source, batch_tokens)
        targets = find_targets(arguments[:-1], overrides, device, dtype)
        evaluators = find_evaluators(arguments[-1], targets[0].modality)
        for target in targets:
            if not target.trained:
                console.print(
                    f"note: {target.label} has random weights; a name with a tag after a dot has trained ones"
                )
        print_plan(targets, evaluators, settings, out, overrides, device)
        if dry_run:
            return
        results = evaluate(targets, evaluators, settings, out, overrides=overrides)
    except (ValueError, FileNotFoundError, ImportError) as error:  # whatever models, sources, evaluators cannot serve
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    for evaluator in evaluators:
        print_results(evaluator, results[evaluator.name])
    console.print("written: " + ", ".join(str(p) for p in sorted(out.iterdir()) if p.is_file()), soft_wrap=True)


def print_plan(
    targets: list[Target], evaluators: list[Evaluator], settings: EvalSettings, out: Path, overrides: dict, device: str
) -> None:
    """What will be measured, cell by cell count; it also draws all samples, so impossible requests fail here."""
    table = Table(title=f"plan (device {device}, files to {out})", title_justify="left")
    for column in ("evaluator", "model", "lengths", "cells", "finished", "tokens to read"):
        table.add_column(column, justify="left" if column in ("evaluator", "model") else "right")
    for evaluator in evaluators:
        for target in targets:
            cells = evaluator.cells(target.model, settings)
            finished = CellStore(out / "cells", _store_key(target, evaluator, settings, overrides)).finished
            todo = sum(cell.cost for cell in cells if cell.name not in finished)
            done = sum(cell.name in finished for cell in cells)
            lengths = settings.resolved_lengths(target.model.config.train_context)
            shown = ",".join(compact(n) for n in lengths)
            table.add_row(evaluator.name, target.label, shown, str(len(cells)), str(done), f"{todo:,}")
    console.print(table)


def _bar(quiet: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=quiet,
    )


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    app()
