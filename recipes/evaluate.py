"""Measure models of the zoo, of run folders, or of other libraries, and compare them.

    priorzoo evaluate MODEL|RUN_DIR [MODEL|RUN_DIR ...] EVAL --lengths 128,512,4096 --out results
    priorzoo evaluate --list                                                all evaluators and their
    options
    priorzoo evaluate 'text_*_tiny.*' passkey,perplexity                    every shipped tiny
    model, one figure
    priorzoo evaluate 'dna_*.genomes' 'markov-*' bits                       compared with baselines
    priorzoo evaluate dna_goat_tiny.genomes score --fasta FILE              every record's
    log-likelihood, as TSV
    priorzoo evaluate 'text_*_tiny.*' perplexity --against text_ggd_tiny.facts     paired
    differences
    priorzoo evaluate hf:FOLDER passkey,perplexity --lengths 512,4k         a causal LM of
    transformers
    priorzoo evaluate timm:NAME@CHECKPOINT resolution --source folder:DIR   a classifier of timm

The last argument names the evaluators, comma-separated or "all"; the others name models of one
modality: registry names, patterns of names with weights, run or saved-model folders, baselines, or
models of other libraries: hf:NAME, a folder or a name of the hub, whose tokenizer tells text from
DNA (hf:text:NAME and hf:dna:NAME insist), and timm:NAME[@CHECKPOINT], untrained without a file.
Lengths are in the model's own tokens, of DNA in bases.

The options of evaluators are below where a model is named: `priorzoo evaluate MODEL EVAL --help`.

Written to --out: EVAL/MODEL.json (settings, rows), EVAL.csv (a row per model and place on the
axis), EVAL.png (all models in one figure), overview.png where several evaluators share an axis, and
cells/, from which a run that was stopped continues and which runs at the same time share.
Evaluators that list a file's entries write EVAL.MODEL.tsv and no CSV. Runs whose recipe.json differ
only in seeds, and shipped weights of the same recipe, are seeds of one set-up: tables and figures
show their mean. With --against MODEL, EVAL.paired.csv has every other model's scores minus that
model's, with 95% intervals over documents, prompts or contigs. Exit codes: 0 done, 2 the request
cannot be served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import fnmatch
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import IO, Annotated

import torch
import typer
from torch import nn

from modalities.contract import find_modality, modality_names
from modalities.evaluation import Cell, Evaluator, Listing
from modalities.figures import FIGURE_FORMATS, figure_output, overview_figure
from modalities.results import CellValue, ModelResult, file_safe
from modalities.settings import Settings
from modalities.tables import write_table
from recipes.commands import (
    CommandError,
    call,
    clock,
    facts_table,
    option_name,
    short,
    with_options,
)
from recipes.report import CellProgress, console, print_paired, print_results, write_results
from recipes.targets import (
    Target,
    find_baselines,
    find_device,
    find_targets,
    modality_of,
    parse_overrides,
    seed_groups,
    split_names,
    target_name,
)
from zoo.cli import Import
from zoo.errors import nearest, ran_out_of_memory, require
from zoo.model import ZooModel
from zoo.plugins import import_named

DTYPES = ("float32", "bfloat16", "float64")


class CellStore:
    """Finished cells of one (evaluator, model, weights, settings) in a file of JSON lines: the key,
    then a cell a line.

    A stopped run continues from it, and processes may share it: each appends under an exclusive
    `flock` and first takes over what others appended. On file systems without locks among machines
    give each machine its folder. A line that a stopped process cut off is removed by the next one
    that appends.

    Attributes:
        finished: the cells by name. `add` updates it, also by those of other processes.
        damaged: numbers of the lines, from 1, that are not a cell or whose checksum differs; those
            cells are not in `finished`.

    Raises:
        ValueError: for a file that belongs to other settings, or whose key is damaged.
    """

    def __init__(self, folder: Path, key: dict[str, object]):
        self.key = json.loads(json.dumps(key, sort_keys=True))  # as it is when read back
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key['evaluator']}-{file_safe(str(key['model']))}-{digest}.jsonl"
        self.finished: dict[str, CellValue] = {}
        self.damaged: list[int] = []
        self._bytes = self._lines = 0  # of the whole lines read so far
        if self.path.exists():
            with open(self.path, "rb") as file:
                self._read(file)

    def add(self, name: str, value: CellValue) -> CellValue:
        """Store a cell. Returns its stored value: another process's where that was first.

        Raises:
            OSError: where the file cannot be locked or written; it is left as it was.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read(file)
            if name not in self.finished:
                file.truncate(self._bytes)  # an incomplete last line
                cell = {"cell": name, "value": value, "crc": _crc(name, value)}
                lines = [{"key": self.key}] * (self._bytes == 0) + [cell]
                text = "".join(json.dumps(line) + "\n" for line in lines).encode()
                if file.write(text) != len(text):
                    file.truncate(self._bytes)
                    raise OSError(f"{self.path} cannot be written: is the disk full?")
                self._read(file)
        return self.finished[name]

    def _read(self, file: IO[bytes]) -> None:
        """Take over the whole lines that follow what was read before."""
        file.seek(self._bytes)
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._take(line)
            self._bytes += len(line)
            self._lines += 1

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if not self._lines:
                if entry["key"] != self.key:
                    raise ValueError("it has other settings")
                return
            name = entry["cell"]
            value = entry["value"]
            if entry.get("crc", "") not in ("", _crc(name, value)):  # cells of 0.5 have none
                raise ValueError("its checksum differs")
            self.finished.setdefault(name, value)
        except (ValueError, KeyError, TypeError) as error:
            if not self._lines:
                what = f"{self.path} line 1 is not this measurement's key ({error})"
                raise ValueError(f"{what}; delete the file to measure again") from error
            self.damaged.append(self._lines + 1)


def _crc(name: str, value: CellValue) -> str:
    return f"{zlib.crc32(json.dumps([name, value], sort_keys=True).encode()):08x}"


def weights_hash(model: nn.Module) -> str:
    """16 hex digits over every parameter and buffer that is saved: name, dtype, shape and bytes."""
    return _tensors_digest(model.state_dict()).hexdigest()[:16]


def outside_hash(model: nn.Module) -> str | None:
    """16 hex digits over what a model of another library computes by besides its weights:
    configurations, modules, and buffers that are not saved, such as RoPE's frequencies. None for
    the zoo's, whose own configuration says all."""
    if isinstance(model, ZooModel):
        return None
    saved = model.state_dict().keys()
    digest = _tensors_digest(
        {name: value for name, value in model.named_buffers() if name not in saved}
    )
    configs = [
        getattr(m, name)
        for m in model.modules()
        for name in ("config", "pretrained_cfg")
        if hasattr(m, name)
    ]
    digest.update(
        "".join([str(model), *map(str, {id(one): one for one in configs}.values())]).encode()
    )
    return digest.hexdigest()[:16]


def _tensors_digest(tensors: Mapping[str, torch.Tensor]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One evaluator on one model; its cells are stored in `out`/cells."""

    target: Target
    evaluator: Evaluator
    overrides: Mapping[str, object]
    out: Path

    def store(self) -> CellStore:
        """Finished cells, keyed by everything that a cell's number depends on. The device and the
        batch size change rounding
        and costs alone, and are left out: a finished cell keeps the time and the memory it took."""
        model = self.target.model
        evaluator = self.evaluator
        key = {
            "evaluator": evaluator.name,
            "version": evaluator.version,
            "model": self.target.label,
            "weights": weights_hash(model),
            "config": dataclasses.asdict(model.config),
            "dtype": str(next((p.dtype for p in model.parameters()), None)),
            "overrides": self.overrides,
            "settings": evaluator.identity(model),
        }
        if outside := outside_hash(model):
            key["outside"] = outside
        return CellStore(self.out / "cells", key)

    def work(self, cell: Cell) -> float:
        """What a unit of a cell takes more of, the further along the axis: tokens of a window,
        pixels of an image."""
        place = cell.data.get(self.evaluator.axis.column, 0)
        return (
            float(place) ** (2 if self.evaluator.unit == "images" else 1)
            if isinstance(place, int | float)
            else 0.0
        )

    def timed(self, todo: Sequence[Cell], store: CellStore | None) -> tuple[float, float]:
        """(a, b): a unit takes a + b·work seconds, by the cheapest `trials` at each of the two
        least places, which are stored where there is a store and they are cells."""
        points = []
        trials = sorted(self.evaluator.trials(list(todo)), key=lambda cell: -cell.cost)
        cheapest = {self.work(cell): cell for cell in trials}
        for work, cell in sorted(cheapest.items())[:2]:
            started = time.perf_counter()
            value = self.evaluator.measure(self.target.model, cell)
            points.append((work, (time.perf_counter() - started) / (cell.cost or 1)))
            if store and cell in todo:
                store.add(cell.name, value)
        (near, rate), (far, slower) = points[0], points[-1]
        slope = max(0.0, (slower - rate) / (far - near)) if far > near else 0.0
        return max(0.0, rate - slope * near), slope

    def run(self, group: str) -> ModelResult:
        """Every cell, each stored as soon as it is finished; those that another process finishes
        first are taken over.

        Raises CommandError where memory ends, with the options that take less.
        """
        model = self.target.model
        evaluator = self.evaluator
        label = self.target.label
        store = self.store()
        if store.damaged:
            lines = ", ".join(map(str, store.damaged[:5])) + ", …" * (len(store.damaged) > 5)
            console.print(
                f"note: {store.path} has no cell in line {lines}: measured again", soft_wrap=True
            )
        cells = evaluator.cells(model)
        todo = {cell.name: cell.cost for cell in cells if cell.name not in store.finished}
        started = time.perf_counter()
        values: dict[str, CellValue] = {}
        try:
            progress = CellProgress(
                f"{evaluator.name}  {label}", sum(todo.values()), evaluator.unit, console
            )
            evaluator.advance = progress.advance
            for name, value in evaluator.run(model, store.finished):
                values[name] = store.add(name, value) if name in todo else value
                if name in todo:
                    progress.finish(todo[name])
        except KeyboardInterrupt:
            console.print(
                f"stopped in {evaluator.name} of {label}; the same command measures the rest"
            )
            raise
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            names = [field.name for field in dataclasses.fields(evaluator.settings)]
            sizes = ("batch_tokens", "lengths", "sizes", "window")
            lower = " or ".join(option_name(name) for name in names if name in sizes)
            place = f"{evaluator.name} of {label} ran out of memory at {cells[len(values)].name}"
            raise CommandError(f"{place}: lower {lower}; finished cells are kept") from error
        return ModelResult(
            label=label,
            method=self.target.method,
            trained_at=evaluator.trained_at(model),
            trained_range=evaluator.trained_range,
            rows=evaluator.rows(values),
            cells=values,
            weights=store.key["weights"],
            seconds=time.perf_counter() - started,
            source=evaluator.source_name,
            group=group,
        )


def print_plan(measurements: Sequence[Measurement], *, keep: bool) -> None:
    """What is to be measured and how long that takes, at the rate of each evaluator's first model.
    keep: cells that are timed.

    Raises ValueError for what cannot be measured.
    """
    rates: dict[str, tuple[float, float]] = {}
    rows = {}
    seconds = 0.0
    for m in measurements:
        cells = m.evaluator.cells(m.target.model)
        store = m.store()
        todo = [cell for cell in cells if cell.name not in store.finished]
        units = f"{short(sum(cell.cost for cell in todo))} {m.evaluator.unit} to read"
        rows[f"{m.evaluator.name} of {m.target.label}"] = (
            f"{units}; {len(todo)} of {len(cells)} cells"
        )
        if todo:
            with contextlib.suppress(
                MemoryError, RuntimeError
            ):  # which the measurement itself reports
                if m.evaluator.name not in rates:
                    rates[m.evaluator.name] = m.timed(todo, store if keep else None)
                constant, slope = rates[m.evaluator.name]
                seconds += sum(cell.cost * (constant + slope * m.work(cell)) for cell in todo)
    console.print(
        facts_table(
            "plan", rows | {"expected": f"{clock(seconds)}, by two cells of each evaluator"}
        )
    )


def find_reference(targets: Sequence[Target], groups: Mapping[str, str], name: str) -> str:
    """The label of the target called `name`; of the first where names or a pattern are several
    seeds of one set-up."""
    parts = [target_name(part) for part in split_names(name)]
    labels = [
        t.label
        for t in targets
        if t.name in parts or any(fnmatch.fnmatch(t.name, part) for part in parts)
    ]
    if len({groups.get(label, label) for label in labels}) > 1:
        raise CommandError(
            f"--against {name!r} names {', '.join(labels)}; expected one model, or seeds of one"
        )
    if len({groups.get(target.label, target.label) for target in targets}) == 1:
        raise CommandError(f"--against {name!r}: name another model to compare with it")
    return labels[0]


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
        str, typer.Option(metavar="MODEL", help="also write the paired differences to this model")
    ] = "",
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
        return list_evaluators()
    if len(arguments) < 2:
        example = "such as `text_ggd_ssmax_tiny.facts passkey`; `priorzoo evaluate --list` names the evaluators"
        raise CommandError(
            f"expected MODEL... EVAL, at least one model and an evaluator, {example}"
        )
    if dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype!r}: {nearest(dtype, DTYPES)}")
    for name in format_.split(","):
        if name not in FIGURE_FORMATS:
            raise CommandError(f"--format {name!r}: {nearest(name, FIGURE_FORMATS)}")
    figure_output.set((format_.split(","), width))
    device = find_device(device)
    overrides = parse_overrides(set_)
    import_named(import_)
    targets = find_targets(arguments[:-1] + [against] * bool(against), overrides, device, dtype)
    known = find_modality(targets[0].modality).evaluators
    kinds = find_evaluators(arguments[-1], targets[0].modality)
    if not all(issubclass(kind, Listing) for kind in kinds):
        require("matplotlib", "drawing figures", "figures")
    groups = seed_groups(targets)
    reference = find_reference(targets, groups, against) if against else ""
    if against and not any(kind.paired_over for kind in kinds):
        able = (
            ", ".join(name for name, kind in known.items() if kind.paired_over)
            or "none of this modality"
        )
        raise CommandError(f"--against does not apply to {arguments[-1]}; it does to {able}")
    measurements = [
        Measurement(target, kind(settings, target.data), overrides, out)
        for kind, settings in make_settings(kinds, options).items()
        for target in targets
    ]
    for target in targets:
        if not target.trained:
            console.print(
                f"note: {target.label} has random weights; a name with a tag after a dot has trained ones"
            )
    check_sources(measurements)
    for note in filter(None, dict.fromkeys(m.evaluator.note for m in measurements)):
        console.print(f"note: {note}", soft_wrap=True)
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
    panels = [
        (e.title or name, e.overview, results[name]) for name, e in evaluators.items() if e.overview
    ]
    axes = {evaluator.axis for evaluator in evaluators.values() if evaluator.overview}
    if len(panels) > 1 and len(axes) == 1:
        overview_figure(panels, out / "overview.png", axes.pop())
    for name, evaluator in evaluators.items():
        print_results(evaluator, results[name])
        if reference and evaluator.paired_over:
            differences = evaluator.paired(results[name], reference)
            write_table(out / f"{name}.paired.csv", differences)
            print_paired(evaluator, differences)
            if not differences:
                console.print(
                    f"{name}: no {evaluator.paired_over} were read by {reference} and another model"
                )
    # a file system's clock may be a few milliseconds late
    written = [
        path
        for path in sorted(out.glob("*.*"))
        if path.is_file() and path.stat().st_mtime > started - 0.1
    ]
    console.print("written: " + ", ".join(map(str, written)), soft_wrap=True)


def find_evaluators(names: str, modality: str) -> list[type[Evaluator]]:
    """The evaluators called `names` (comma-separated, or "all") of a modality."""
    known = find_modality(modality).evaluators
    wanted = list(known) if names == "all" else [name for name in names.split(",") if name]
    if not wanted:
        raise CommandError(
            f"{names!r} names no evaluator; those of {modality} models are {', '.join(known)}"
        )
    for name in wanted:
        if name not in known:
            raise CommandError(
                f"no evaluator {name!r} for {modality} models; {nearest(name, known)}"
            )
    return [known[name] for name in dict.fromkeys(wanted)]


def make_settings(
    kinds: Sequence[type[Evaluator]], options: Mapping[str, object]
) -> dict[type[Evaluator], Settings]:
    """Settings of each evaluator from the command's options; CommandError for an option that none
    of them has."""
    fields = {
        kind: {field.name for field in dataclasses.fields(kind.settings_class)} for kind in kinds
    }
    known = set().union(*fields.values())
    for name in options:
        if name not in known:
            theirs = ", ".join(option_name(field) for field in sorted(known))
            names = ", ".join(kind.name for kind in kinds)
            raise CommandError(f"{option_name(name)} does not apply to {names}; it has {theirs}")
    chosen = {
        kind: {name: value for name, value in options.items() if name in fields[kind]}
        for kind in kinds
    }
    return {kind: kind.settings_class(**chosen[kind]) for kind in kinds}  # type: ignore[arg-type]  # by their parsers


def list_evaluators() -> None:
    """A table for each modality: every evaluator, what it measures, and its options."""
    for name in modality_names():
        try:
            kinds = find_modality(name).evaluators
        except ImportError as error:  # its packages are not installed
            console.print(f"{name}: {error}", soft_wrap=True)
            continue
        table = facts_table(name, {})
        for kind in kinds.values():
            options = " ".join(
                option_name(field.name) for field in dataclasses.fields(kind.settings_class)
            )
            table.add_row(kind.name, f"{kind.summary}\n{options}")
        console.print(table)


def main(argv: Sequence[str] | None = None, *, prog: str = "priorzoo evaluate") -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    names = [part for word in words if not word.startswith("-") for part in split_names(word)]
    settings: dict[
        str, type[Settings]
    ] = {}  # of the evaluators of the models' modality; others are not imported
    with contextlib.suppress(ImportError, ValueError):  # of models that the command itself reports
        find = partial(modality_of, registered="--import" not in " ".join(words))
        baselines = (
            modality.name for word in names[:1] for modality, _ in find_baselines(word).values()
        )
        for name in dict.fromkeys(filter(None, map(find, names))) or dict.fromkeys(baselines):
            settings |= {
                kind.name: kind.settings_class for kind in find_modality(name).evaluators.values()
            }
    # Options of an unknown model's evaluators are unknown; its name is the error. In a context:
    # figures are this command's.
    command = with_options(evaluate_command, settings)
    return copy_context().run(call, command, words, prog=prog, any_option=not settings)
