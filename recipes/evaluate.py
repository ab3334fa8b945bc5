"""Measure models of the zoo, of run folders, or of other libraries, and compare them.

    priorzoo evaluate MODEL|RUN_DIR [MODEL|RUN_DIR ...] EVAL --lengths 128,512,4096 --out results

    # all evaluators and their options
    priorzoo evaluate --list
    # every shipped tiny model, one figure
    priorzoo evaluate 'text_*_tiny.*' passkey,perplexity
    # compared with baselines
    priorzoo evaluate 'dna_*.genomes' 'markov-*' bits
    # every record's log-likelihood, as TSV
    priorzoo evaluate dna_goat_tiny.genomes score --fasta FILE
    # paired differences
    priorzoo evaluate 'text_*_tiny.*' perplexity --against text_ggd_tiny.facts
    # a causal LM of transformers
    priorzoo evaluate hf:FOLDER passkey,perplexity --lengths 512,4k
    # a classifier of timm
    priorzoo evaluate timm:NAME@CHECKPOINT resolution --source folder:DIR

The last argument names the evaluators, comma-separated or "all"; the others name models of one
modality: registry names, patterns of names with weights, run or saved-model folders, baselines, or
models of other libraries: hf:NAME, a folder or a name of the hub, whose tokenizer tells text from
DNA (hf:text:NAME and hf:dna:NAME insist), and timm:NAME[@CHECKPOINT], untrained without a file, or
timm:FOLDER, which timm's save_for_hf or zoo.save_adapted wrote. Lengths are in the model's own
tokens, of DNA in bases.

The options of evaluators are below where a model is named: `priorzoo evaluate MODEL EVAL --help`.

Written to --out: EVAL/MODEL.json (settings, rows), EVAL.csv (a row per model and place on the
axis), EVAL.png (all models in one figure), overview.png where several evaluators share an axis, and
cells/, from which a run that was stopped continues and which runs at the same time share.
Evaluators that list a file's entries write EVAL.MODEL.tsv and no CSV. Runs whose recipe.json differ
only in seeds, and shipped weights of the same recipe, are seeds of one set-up: tables and figures
show their mean. With --against MODEL, EVAL.paired.csv has every other model's scores minus that
model's, with 95% intervals over documents, prompts or contigs, and over seeds where there are
several. Exit codes: 0 done, 2 the request cannot be served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Annotated

import typer

from modalities.contract import find_modality, modality_names
from modalities.evaluation import Evaluator, Listing
from modalities.figures import FIGURE_FORMATS, figure_output, overview_figure
from modalities.results import ModelResult, Row
from modalities.settings import Settings
from modalities.tables import write_table
from recipes.commands import (
    CommandError,
    call,
    facts_table,
    option_name,
    with_options,
)
from recipes.measurement import Measurement, print_plan
from recipes.models import find_baselines, find_device, modality_of, plain_name, split_names
from recipes.overrides import parse_overrides
from recipes.report import console, print_paired, print_results, write_results
from recipes.targets import Target, find_targets, seed_groups
from zoo.console import Import
from zoo.errors import nearest, require
from zoo.plugins import import_named

DTYPES = ("float32", "bfloat16", "float64")


def find_reference(targets: Sequence[Target], groups: Mapping[str, str], name: str) -> str:
    """The label of the target called `name`.

    It is the first one's where names or a pattern are several seeds of one set-up.
    """
    patterns = [plain_name(part) for part in split_names(name)]
    labels = [target.label for target in targets if _is_named(target.name, patterns)]
    set_ups = {groups.get(label, label) for label in labels}
    if len(set_ups) > 1:
        raise CommandError(
            f"--against {name!r} names {', '.join(labels)}; expected one model, or seeds of one"
        )
    all_set_ups = {groups.get(target.label, target.label) for target in targets}
    if len(all_set_ups) == 1:
        raise CommandError(f"--against {name!r}: name another model to compare with it")
    return labels[0]


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns, or matches one."""
    return name in patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def check_sources(measurements: Sequence[Measurement]) -> None:
    """CommandError where models of one evaluator would be measured on different data."""
    by_evaluator: dict[str, dict[str, str | None]] = {}
    for m in measurements:
        by_evaluator.setdefault(m.evaluator.name, {})[m.target.label] = m.evaluator.source_name
    for sources in by_evaluator.values():
        if len(set(sources.values())) > 1:
            differ = ", ".join(f"{label} from {source}" for label, source in sources.items())
            raise CommandError(
                f"models of different data ({differ}) are not comparable; name one with --source"
            )


def evaluate_command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|RUN_DIR... EVAL", help="models, then the evaluators"),
    ] = [],  # noqa: B006
    *,
    list_: Annotated[
        bool, typer.Option("--list", help="name every evaluator and its options, and stop")
    ] = False,
    out: Annotated[Path, typer.Option(help="folder for JSON, CSV, PNG and finished cells")] = Path(
        "results"
    ),
    against: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL",
            help="also write the paired differences to this model; again for another one",
        ),
    ] = [],  # noqa: B006
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="change the model's configuration"),
    ] = [],  # noqa: B006
    import_: Import = [],  # noqa: B006
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="FORMATS", help=f"of figures, some of {','.join(FIGURE_FORMATS)}"
        ),
    ] = "png",
    width: Annotated[
        float | None, typer.Option(min=1, max=40, help="of figures in inches; default: by panels")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64")] = "float32",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what is measured and how long it takes")
    ] = False,
    **options: object,
) -> None:
    if list_:
        list_evaluators()
        return
    formats = format_.split(",")
    check_words(arguments, dtype, formats)
    figure_output.set((formats, width))
    device = find_device(device)
    overrides = parse_overrides(set_)
    import_named(import_)
    names = [*arguments[:-1], *against]
    targets = find_targets(names, overrides, device, dtype)
    kinds = find_evaluators(arguments[-1], targets[0].modality)
    if not all(issubclass(kind, Listing) for kind in kinds):
        require("matplotlib", "drawing figures", "figures")
    groups = seed_groups(targets)
    references = [find_reference(targets, groups, name) for name in against]
    if references:
        check_paired(kinds, arguments[-1], targets[0].modality)
    measurements = [
        Measurement(target, kind(settings, target.data), overrides, out)
        for kind, settings in make_settings(kinds, options).items()
        for target in targets
    ]
    print_untrained(targets)
    check_sources(measurements)
    print_notes(measurements)
    print_plan(measurements, keep=not dry_run)
    if dry_run:
        return
    started = time.time()
    evaluators = {m.evaluator.name: m.evaluator for m in measurements}
    results: dict[str, list[ModelResult]] = {}
    for name, evaluator in evaluators.items():
        results[name] = [
            m.run(groups.get(m.target.label, "")) for m in measurements if m.evaluator.name == name
        ]
        write_results(evaluator, results[name], out)
    draw_overview(evaluators, results, out)
    for name, evaluator in evaluators.items():
        print_results(evaluator, results[name])
        if references and evaluator.paired_over:
            compare(evaluator, results[name], references, out)
    # A file system's clock may be a few milliseconds late.
    since = started - 0.1
    files = [path for path in sorted(out.glob("*.*")) if path.is_file()]
    written = [str(path) for path in files if path.stat().st_mtime > since]
    console.print("written: " + ", ".join(written), soft_wrap=True)


def check_words(arguments: Sequence[str], dtype: str, formats: Sequence[str]) -> None:
    """CommandError for words of the command line that cannot be served, whatever the models are."""
    if len(arguments) < 2:
        raise CommandError(
            "expected MODEL... EVAL, at least one model and an evaluator, such as "
            "`text_ggd_ssmax_tiny.facts passkey`; "
            "`priorzoo evaluate --list` names the evaluators"
        )
    if dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    for name in formats:
        if name not in FIGURE_FORMATS:
            raise CommandError(f"--format {name!r}: {nearest(name, FIGURE_FORMATS)}")


def check_paired(kinds: Sequence[type[Evaluator]], names: str, modality: str) -> None:
    """CommandError where none of the evaluators called `names` can compare models unit by unit."""
    if any(kind.paired_over for kind in kinds):
        return
    evaluators = find_modality(modality).evaluators
    able = [name for name, kind in evaluators.items() if kind.paired_over]
    listing = ", ".join(able) or "none of this modality"
    raise CommandError(f"--against does not apply to {names}; it does to {listing}")


def print_untrained(targets: Sequence[Target]) -> None:
    """Say which models have random weights."""
    for target in targets:
        if not target.trained:
            console.print(
                f"note: {target.label} has random weights; "
                "a name with a tag after a dot has trained ones"
            )


def print_notes(measurements: Sequence[Measurement]) -> None:
    """What the evaluators have to say of their data, which they read for it."""
    notes: list[str] = []
    for m in measurements:
        notes.append(m.evaluator.note)
        note = m.evaluator.model_note(m.target.model)
        notes.append(f"{m.target.label}: {note}" if note else "")
    for note in dict.fromkeys(notes):
        if note:
            console.print(f"note: {note}", soft_wrap=True)


def draw_overview(
    evaluators: Mapping[str, Evaluator], results: Mapping[str, list[ModelResult]], out: Path
) -> None:
    """overview.png, where several evaluators share an axis."""
    panels = []
    axes = set()
    for name, evaluator in evaluators.items():
        if evaluator.overview:
            panels.append((evaluator.title or name, evaluator.overview, results[name]))
            axes.add(evaluator.axis)
    if len(panels) > 1 and len(axes) == 1:
        overview_figure(panels, out / "overview.png", axes.pop())


def compare(
    evaluator: Evaluator,
    results: Sequence[ModelResult],
    references: Sequence[str],
    out: Path,
) -> None:
    """Write and print the paired differences to each of several models."""
    every_row: list[Row] = []
    for reference in dict.fromkeys(references):
        rows = evaluator.paired(results, reference)
        every_row += rows
        print_paired(evaluator, rows)
        if not rows:
            console.print(
                f"{evaluator.name}: no {evaluator.paired_over} were read by {reference} "
                "and another model"
            )
    write_table(out / f"{evaluator.name}.paired.csv", every_row)


def find_evaluators(names: str, modality: str) -> list[type[Evaluator]]:
    """The evaluators called `names` (comma-separated, or "all") of a modality."""
    evaluators = find_modality(modality).evaluators
    chosen = [name for name in names.split(",") if name]
    if names == "all":
        chosen = list(evaluators)
    if not chosen:
        raise CommandError(
            f"{names!r} names no evaluator; those of {modality} models are {', '.join(evaluators)}"
        )
    for name in chosen:
        if name not in evaluators:
            raise CommandError(
                f"no evaluator {name!r} for {modality} models; {nearest(name, evaluators)}"
            )
    return [evaluators[name] for name in dict.fromkeys(chosen)]


def make_settings(
    kinds: Sequence[type[Evaluator]], options: Mapping[str, object]
) -> dict[type[Evaluator], Settings]:
    """Settings of each evaluator from the command's options.

    CommandError for an option that none of them has.
    """
    fields = {kind: _field_names(kind.settings_class) for kind in kinds}
    all_fields = set().union(*fields.values())
    for name in options:
        if name not in all_fields:
            theirs = ", ".join(option_name(field) for field in sorted(all_fields))
            names = ", ".join(kind.name for kind in kinds)
            raise CommandError(f"{option_name(name)} does not apply to {names}; it has {theirs}")
    settings = {}
    for kind in kinds:
        values = {name: value for name, value in options.items() if name in fields[kind]}
        # Their types are right by the options' parsers.
        settings[kind] = kind.settings_class(**values)  # type: ignore[arg-type]
    return settings


def _field_names(settings: type[Settings]) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def list_evaluators() -> None:
    """A table for each modality: every evaluator, what it measures, and its options."""
    for name in modality_names():
        try:
            kinds = find_modality(name).evaluators
        except ImportError as error:
            # The modality's packages are not installed.
            console.print(f"{name}: {error}", soft_wrap=True)
            continue
        table = facts_table(name, {})
        for kind in kinds.values():
            options = " ".join(map(option_name, _field_names(kind.settings_class)))
            table.add_row(kind.name, f"{kind.summary}\n{options}")
        console.print(table)


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo evaluate") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    settings: dict[str, type[Settings]] = {}
    # Errors of models are reported by the command itself.
    with contextlib.suppress(ImportError, ValueError):
        for modality in _named_modalities(words):
            for kind in find_modality(modality).evaluators.values():
                settings[kind.name] = kind.settings_class
    command = with_options(evaluate_command, settings)
    # Options of an unknown model's evaluators are unknown, and pass: its name is the error.
    any_option = not settings
    # In a context of its own: the figures' format is this command's.
    return copy_context().run(call, command, words, prog=prog, any_option=any_option)


def _named_modalities(words: Sequence[str]) -> list[str]:
    """The modalities of the models that a command line names; others are not imported."""
    names = [part for word in words if not word.startswith("-") for part in split_names(word)]
    # With --import models may be registered that are not known before.
    registered = "--import" not in " ".join(words)
    modalities = [modality_of(name, registered=registered) for name in names]
    if not any(modalities):
        modalities = [
            modality.name for word in names[:1] for modality, _ in find_baselines(word).values()
        ]
    return [name for name in dict.fromkeys(modalities) if name]
