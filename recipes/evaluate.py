"""Measure models of the zoo, or of run folders, beside each other.

    python recipes/evaluate.py MODEL|RUN_DIR [MODEL|RUN_DIR ...] EVAL --lengths 128,512,4096 --out results
    python recipes/evaluate.py 'text_*_tiny.*' passkey,perplexity          every shipped tiny model, one figure
    python recipes/evaluate.py 'vision_*.glyphs*' resolution --sizes 96,192,384
    python recipes/evaluate.py 'dna_*.genomes' 'markov-*' uniform bits,contigs      beside baselines
    python recipes/evaluate.py dna_goat_tiny.genomes score --fasta FILE             log-likelihood of every record, as TSV

The last argument names the evaluators, comma-separated; the others name models of one modality: registry names,
patterns of names with weights, run folders, or baselines. Written to --out: EVAL.json (everything), EVAL.csv (a row per
model and length or size), EVAL.png (all models in one figure), overview.png where passkey and perplexity were both
measured, and cells/, from which a run that was stopped goes on. Evaluators that list a file's entries write
EVAL.MODEL.tsv and no CSV. Run folders whose recipe.json differ in the seeds alone, and shipped weights of the same
recipe, are seeds of one set-up: tables and figures show their mean, files keep every model. Options of another modality
are refused. Exit codes: 0 done, 2 the request cannot be served as written.
"""

from __future__ import annotations

import dataclasses
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

from modalities.evaluation import Evaluator, ModelResult, Settings
from modalities.store import CellStore, weights_hash
from recipes import targets as asked
from recipes.config import nearest
from recipes.console import short
from recipes.report import console, print_plan, print_results, progress_bar, write_results
from recipes.targets import RequestError, Target


def evaluate(
    targets: list[Target],
    evaluators: list[Evaluator],
    settings: Settings,
    out: Path,
    *,
    overrides: dict[str, Any] | None = None,
    groups: dict[str, str] | None = None,
    quiet: bool = False,
) -> dict[str, list[ModelResult]]:
    """Run every evaluator on every model and write its files. Returns the results by evaluator.

    `groups` names the group of seeds of a label that belongs to one.
    """
    everything = {}
    for evaluator in evaluators:
        results = []
        for target in targets:
            result = _measure(target, evaluator, _own(settings, evaluator, target), out, overrides or {}, quiet)
            results.append(dataclasses.replace(result, group=(groups or {}).get(target.label, "")))
        write_results(evaluator, results, settings, out)
        everything[evaluator.name] = results
    if {"passkey", "perplexity"} <= everything.keys():
        from modalities.plots import overview_figure

        overview_figure(everything["passkey"], everything["perplexity"], out / "overview.png")
    return everything


def _own(settings: Settings, evaluator: Evaluator, target: Target) -> Settings:
    """The settings for one model: where no source was asked for, some evaluators take what its training held out."""
    if settings.source is None and target.data:
        return dataclasses.replace(settings, source=evaluator.source_of(target.data))
    return settings


def _measure(
    target: Target, evaluator: Evaluator, settings: Settings, out: Path, overrides: dict[str, Any], quiet: bool
) -> ModelResult:
    """One model through one evaluator, each finished cell stored at once."""
    model = target.model
    cells = evaluator.cells(model, settings)
    store = CellStore(out / "cells", _store_key(target, evaluator, settings, overrides))
    todo = {cell.name: cell.cost for cell in cells if cell.name not in store.finished}
    started = time.perf_counter()
    values = {}
    with progress_bar(quiet) as bar:
        task = bar.add_task(f"{evaluator.name}  {target.label}", total=sum(todo.values()), rate="")
        for name, value in evaluator.run(model, settings, finished=dict(store.finished)):
            values[name] = value
            if name in todo:
                store.add(name, value)
                bar.advance(task, todo[name])
                done = bar.tasks[0].completed
                rate = done / max(time.perf_counter() - started, 1e-9)
                bar.update(task, rate=f"{short(rate)} {evaluator.unit}/s")
    return ModelResult(
        label=target.label,
        method=target.method,
        trained_at=evaluator.trained_at(model),
        rows=evaluator.rows(values),
        cells=values,
        weights=store.key["weights"],
        seconds=time.perf_counter() - started,
        source=evaluator.source_name(settings),
    )


def _store_key(target: Target, evaluator: Evaluator, settings: Settings, overrides: dict[str, Any]) -> dict:
    """Everything a cell's number depends on. The device and the batch size change rounding and costs alone, and are
    left out: a cell that was finished before keeps the time and the memory it took then."""
    return {
        "evaluator": evaluator.name,
        "version": evaluator.version,
        "model": target.label,
        "weights": weights_hash(target.model),
        "config": dataclasses.asdict(target.model.config),
        "dtype": str(next((p.dtype for p in target.model.parameters()), None)),
        "overrides": overrides,
        "settings": evaluator.identity(target.model, settings),
    }


def _plan(
    targets: list[Target], evaluators: list[Evaluator], settings: Settings, out: Path, overrides: dict
) -> list[tuple[Evaluator, str, tuple[int, ...], int, int, int]]:
    """The rows of the plan. All samples are drawn for it, so impossible requests fail here."""
    rows = []
    for evaluator in evaluators:
        sources = {t.label: evaluator.source_name(_own(settings, evaluator, t)) for t in targets}
        if len(set(sources.values())) > 1:
            differ = ", ".join(f"{label} from {source}" for label, source in sources.items())
            raise RequestError(f"models of different data ({differ}) are not comparable; name one with --source")
        for target in targets:
            own = _own(settings, evaluator, target)
            cells = evaluator.cells(target.model, own)
            finished = CellStore(out / "cells", _store_key(target, evaluator, own, overrides)).finished
            todo = [cell.cost for cell in cells if cell.name not in finished]
            points = evaluator.points(target.model, own)
            rows.append((evaluator, target.label, points, len(cells), len(cells) - len(todo), sum(todo)))
    return rows


# ------------------------------------------------------------------------------------------------------ command line

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=(__doc__ or "").replace("\n\n    python", "\n\n\b\n    python"))
def main(
    arguments: Annotated[
        list[str], typer.Argument(metavar="MODEL|RUN_DIR... EVAL", help="models, then the evaluators")
    ],
    out: Annotated[Path, typer.Option(help="folder for JSON, CSV, PNG and finished cells")] = Path("results"),
    samples: Annotated[int | None, typer.Option(help="in each cell, or images; default: the evaluator's own")] = None,
    source: Annotated[str | None, typer.Option(help="where held-out data comes from, as in a recipe")] = None,
    split: Annotated[str | None, typer.Option(help="dna: BED file of what --source holds out")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="text, dna: as 128,512,4096 or 4k; default from 1x trained up")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="text, dna: of every random draw; default 42")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="vision: pixels of the shorter side, as 96,192,384; default 1x to 4x trained")
    ] = None,
    aspect: Annotated[str | None, typer.Option(help="vision: width:height, as 2:1; default as trained")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="vision: native (default), resized (too small images too), or upsampled from the training size"
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="vision: crop (default), or extend to the aspect (default with --aspect)"),
    ] = None,
    tune_temperature: Annotated[
        bool, typer.Option("--tune-temperature", help="vision: besides, logits scaled at each size; marked as tuned")
    ] = False,
    fasta: Annotated[str | None, typer.Option(help="dna: the file that score or variants reads")] = None,
    variants: Annotated[str | None, typer.Option(help="dna: VCF, or a table of chrom, pos, ref, alt")] = None,
    strands: Annotated[
        str | None, typer.Option(help="dna: one, or both: the mean of a window and its reverse complement")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="dna: bases that score and variants read at once, as 4096 or 4k")
    ] = None,
    new_bases: Annotated[int | None, typer.Option(help="dna: length of a completion; default 200")] = None,
    temperature: Annotated[float | None, typer.Option(help="dna: of sampling; 0 takes the likeliest")] = None,
    group_seeds: Annotated[
        bool | None,
        typer.Option(help="show the mean of seeds of one set-up; default: where each has a seed of its own"),
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="change the model's configuration")
    ] = [],  # noqa: B006
    batch_tokens: Annotated[int | None, typer.Option(help="most tokens in one forward pass; default 16384")] = None,
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
        overrides = asked.parse_overrides(set_ or [])
        given = {"samples": samples, "source": source, "seed": seed, "mode": mode, "fit": fit}
        given |= {"lengths": asked.parse_lengths(lengths), "sizes": asked.parse_sizes(sizes)}
        given |= {"fasta": fasta, "variants": variants, "strands": strands, "window": asked.parse_window(window)}
        given |= {"new_bases": new_bases, "temperature": temperature, "split": split}
        given |= {"aspect": asked.parse_aspect(aspect), "tune_temperature": tune_temperature or None}
        targets = asked.find_targets(arguments[:-1], overrides, device, dtype)
        modality = targets[0].modality
        evaluators = asked.find_evaluators(arguments[-1], modality)
        settings = asked.make_settings(evaluators, modality, given | {"batch_tokens": batch_tokens})
        for target in targets:
            if not target.trained:
                console.print(
                    f"note: {target.label} has random weights; a name with a tag after a dot has trained ones"
                )
        rows = _plan(targets, evaluators, settings, out, overrides)
        print_plan(evaluators, rows, f"device {device}, files to {out}")
        if dry_run:
            return
        groups = asked.seed_groups(targets, group_seeds)
        results = evaluate(targets, evaluators, settings, out, overrides=overrides, groups=groups)
    except (ValueError, FileNotFoundError, ImportError) as error:  # whatever models, sources, evaluators cannot serve
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    for evaluator in evaluators:
        print_results(evaluator, results[evaluator.name])
    console.print("written: " + ", ".join(str(p) for p in sorted(out.iterdir()) if p.is_file()), soft_wrap=True)


if __name__ == "__main__":
    app()
