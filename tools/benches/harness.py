"""The benchmark harness: options, timing in turns, peak memory, a record that can be resumed, and its table.

Contenders take turns within a round, and a ratio is the median over rounds of two times of one round, so that whatever else
runs on the machine falls on both. `torch.utils.benchmark.Timer` and `triton.testing.do_bench` repeat one callable and then the
next; a ratio of their medians compares two different stretches of time, which is why neither is used here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import inspect
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from modalities.cost import Meter
from zoo.naming import did_you_mean

PACKAGES = ("triton", "flash-attn", "goat-attention", "flash-linear-attention", "deepspeed")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
PASSES = ("forward", "fwd+bwd")

Row = dict[str, Any]
Stopwatch = Callable[[Callable[[], object]], float]


# ------------------------------------------------------------------------------------------------------- options


def option(text: str) -> Any:
    """A field's command-line option."""
    return typer.Option(help=text)


@dataclass(frozen=True)
class Settings:
    """What every benchmark takes. Each field is an option of the command (see `command`)."""

    seconds: Annotated[float, option("of rounds for each ratio; 0: the benchmark's own")] = 0.0
    minutes: Annotated[float, option("stop in about this time, the longest cells dropped; 0: no limit")] = 0.0
    threads: Annotated[int, option("CPU threads; 0 leaves torch's own number")] = 0
    out: Annotated[Path | None, option("write the results as JSON here, after each cell")] = None
    resume: Annotated[bool, typer.Option("--resume", help="keep the cells that --out holds")] = False
    commit: Annotated[str, option("recorded where the checkout has no history")] = ""


def command(app: typer.Typer, name: str, benchmark: type[Benchmark]) -> None:
    """Add a benchmark to the command line; its options are the fields of its settings."""
    settings = benchmark.Settings
    hints = typing.get_type_hints(settings, include_extras=True)

    def run_it(**values: Any) -> None:
        run(benchmark(settings(**values)), Console())

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [f for f in fields(settings) if f.name not in Settings.__dataclass_fields__]
    order = [*own, *fields(Settings)]
    parameters = [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in order]
    run_it.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_it.__annotations__ = {f.name: hints[f.name] for f in order}
    app.command(name, help=inspect.getdoc(benchmark))(run_it)


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """The value, or typer.BadParameter that names the option, the value and what is known."""
    known = list(known)
    if value not in known:
        near = did_you_mean(value, known)
        raise typer.BadParameter(f"--{name} {value!r}: {near}must be one of {', '.join(known)}")
    return value


def words(text: str) -> list[str]:
    """Comma-separated words, each once."""
    return list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))


def numbers(name: str, text: str) -> list[int]:
    """Comma-separated integers above 0. typer.BadParameter names the option and the word that is not one."""
    for word in words(text):
        if not word.isdigit() or not int(word):
            raise typer.BadParameter(f"--{name} takes whole numbers above 0, such as 1024,4096; got {word!r}")
    return [int(word) for word in words(text)]


def device_of(name: str) -> torch.device:
    """The device of --device auto, cuda or cpu."""
    one_of("device", name, ("auto", "cuda", "cpu"))
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


# -------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Rounds:
    """Milliseconds of each run in each round, by the run's name."""

    rows: list[dict[Any, float]]

    def __len__(self) -> int:
        return len(self.rows)

    def ms(self, name: Any) -> float:
        return statistics.median(row[name] for row in self.rows)

    def ratio(self, name: Any, to: Any) -> float:
        """Median over rounds of one run's time by another's in the same round."""
        return statistics.median(row[name] / row[to] for row in self.rows)


def in_turns(runs: Mapping[Any, Callable[[], object]], seconds: float, stopwatch: Stopwatch) -> Rounds:
    """A warm-up, then rounds of all runs one after the other: three at least, 200 at most, for about `seconds`."""
    for run in runs.values():
        run()
    rows: list[dict[Any, float]] = []
    end = time.perf_counter() + seconds
    while len(rows) < 3 or (time.perf_counter() < end and len(rows) < 200):
        rows.append({name: stopwatch(run) for name, run in runs.items()})
    return Rounds(rows)


def by_clock(clock: str, device: torch.device | str = "cpu") -> Stopwatch:
    """Milliseconds of a run by a clock of the host; on CUDA after all queued work, before and after."""
    read, cuda = CLOCKS[one_of("clock", clock, CLOCKS)], torch.device(device).type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        return read()

    def watch(run: Callable[[], object]) -> float:
        start = now()
        run()
        return 1e3 * (now() - start)

    return watch


def by_events(device: torch.device) -> Stopwatch:
    """Milliseconds of a run between events of the device. A sleep keeps the queue from running dry while the host launches;
    writes before it empty the second-level cache."""
    flushed = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def watch(run: Callable[[], object]) -> float:
        flushed.zero_()
        torch.cuda._sleep(2_000_000)  # about a millisecond
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return watch


def no_grad(run: Callable[[], object]) -> Callable[[], object]:
    def inner() -> object:
        with torch.no_grad():
            return run()

    return inner


def matmul_ceiling(device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """TFLOP/s of a square matrix product, n = 8192 on CUDA and 1024 on the CPU: 2·n³ by the median time of ten."""
    size = 8192 if device.type == "cuda" else 1024
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    for _ in range(3):
        torch.mm(a, b, out=out)
    ms = statistics.median(stopwatch(lambda: torch.mm(a, b, out=out)) for _ in range(10))
    return 2 * size**3 / ms / 1e9


class Budget:
    """Minutes to spend, 0 for no end. Cells of a kind grow; a cell starts if twice the last one of its kind still fits."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.end = clock, clock() + 60 * minutes if minutes else math.inf
        self._last: dict[str, float] = {}

    @contextlib.contextmanager
    def cell(self, kind: str) -> Iterator[bool]:
        """`with budget.cell(kind) as fits:` whether the cell is likely to end in time; its duration is noted."""
        begun = self.clock()
        fits = begun + 2 * self._last.get(kind, 0.0) <= self.end
        yield fits
        if fits:
            self._last[kind] = self.clock() - begun


# -------------------------------------------------------------------------------------------------------- memory


def extra_bytes(call: Callable[[], object], device: torch.device | str) -> int | None:
    """Peak memory a call adds, less the tensors it returns; None where it cannot be read."""
    with Meter(device) as meter:
        result = call()
    if meter.peak_bytes is None:
        return None
    tensors = result if isinstance(result, tuple) else (result,)
    return meter.peak_bytes - sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a module's function in a process of its own, so that memory freed earlier is not used again."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def free(device: torch.device) -> None:
    """Give memory back to the GPU, that of reference cycles too."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------ findings


@dataclass
class Findings:
    """All that a run found, as it is written to JSON.

    Attributes:
        results: a row for each measurement. cells: those that are complete.
        left_out: name → why it was not measured at all. skipped: name → cells it was not measured at, with the reason.
        wrong: name → the error that kept it from being timed. failed: name → the exception it ended with.
        checks: comparisons with float64. judgements: promise → the value found, its bound, whether it is met.
        dropped: cells there was no time for.
    """

    results: list[Row] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    checks: dict[str, Row] = field(default_factory=dict)
    judgements: dict[str, Row] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def guard(self, name: str, cell: str) -> Iterator[None]:
        """Note an exception of one contender and go on with the others."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.skip(name, cell, "out of memory")
        except Exception as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            self.failed[name] = f"{cell}: {type(error).__name__}: {first[:200]}"

    def skip(self, name: str, cell: str, reason: str) -> None:
        self.skipped.setdefault(name, {})[cell] = reason

    def judge(self, promise: str, value: float, bound: str, met: bool) -> None:
        self.judgements[promise] = {"value": value, "bound": bound, "met": met}

    def footnotes(self) -> list[str]:
        """A line for each promise, and for whatever is missing from the table the reason."""
        lines = [
            f"{promise}: {j['value']:.2f} (target {j['bound']}, {'met' if j['met'] else 'NOT MET'})"
            for promise, j in self.judgements.items()
        ]
        lines += [*self.notes, *(f"WRONG, not timed: {name}: {note}" for name, note in self.wrong.items())]
        lines += [f"failed: {name}: {note}" for name, note in self.failed.items()]
        lines += [f"not measured: {name}: {reason}" for name, reason in self.left_out.items()]
        for name, places in self.skipped.items():
            for reason in dict.fromkeys(places.values()):
                at = ", ".join(cell for cell, why in places.items() if why == reason)
                lines.append(f"not measured: {name} at {at}: {reason}")
        return [*lines, *([f"dropped: {', '.join(self.dropped)}"] if self.dropped else [])]


def environment(commit: str) -> Row:
    """Versions, machine, threads and commit."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if not commit:
        with contextlib.suppress(OSError):
            argv = ["git", "describe", "--always", "--dirty"]
            commit = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
        "threads": torch.get_num_threads(), "commit": commit or None, "packages": found,
    }  # fmt: skip


def write_json(path: Path, record: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


# ----------------------------------------------------------------------------------------------------- benchmarks


@dataclass(frozen=True)
class Cell:
    """What is measured in one piece and kept whole: cells of one kind come from the cheapest to the dearest."""

    name: str
    kind: str
    value: Any


@dataclass(frozen=True)
class Column:
    """A column of the table; it is left out where every text is empty."""

    title: str
    text: Callable[[Row], str]


class Benchmark:
    """One problem. Subclasses are given settings, and define what is below."""

    Settings: ClassVar[type[Settings]] = Settings
    chooses: ClassVar[tuple[str, ...]] = ()  # settings that choose cells and change no number of any

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.findings = Findings()
        self.report: Callable[[str], None] = lambda line: None

    def about(self) -> Row:
        """What was measured and with what, for the record. Runs once, before the cells."""
        raise NotImplementedError

    def cells(self) -> list[Cell]:
        raise NotImplementedError

    def measure(self, cell: Cell) -> list[Row]:
        raise NotImplementedError

    def finish(self) -> None:
        """What is to be found once all cells are complete."""

    def title(self, record: Row) -> str:
        raise NotImplementedError

    def columns(self) -> list[Column]:
        """The first is the name of a row, and aligned to the left."""
        raise NotImplementedError

    def section(self, row: Row) -> str:
        """Rows with the same section stand together below its name."""
        return ""

    def failed(self) -> bool:
        """Whether the command ends with status 1."""
        return bool(self.findings.failed)


def run(benchmark: Benchmark, console: Console) -> None:
    """Measure cell by cell, write the record after each, print the table. typer.Exit(1) where the benchmark failed."""
    settings, findings = benchmark.settings, benchmark.findings
    if settings.threads:
        torch.set_num_threads(settings.threads)
    own = environment(settings.commit) | benchmark.about()
    free_to_change = {*RUN_ONLY, *benchmark.chooses}
    wanted = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in free_to_change}
    if settings.resume:
        restore(findings, settings.out, wanted)

    def record() -> Row:
        return own | {"settings": wanted} | asdict(findings)

    def save() -> None:
        if settings.out is not None:
            write_json(settings.out, record())

    budget = Budget(settings.minutes)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        benchmark.report = lambda line: progress.update(task, description=line)
        cells = [cell for cell in benchmark.cells() if cell.name not in findings.cells]
        progress.update(task, total=len(cells))
        for cell in cells:
            with budget.cell(cell.kind) as fits:
                if fits:
                    benchmark.report(cell.name)
                    findings.results += benchmark.measure(cell)
                    findings.cells.append(cell.name)
                    save()
                else:
                    findings.dropped.append(f"{cell.name} (out of time)")
            progress.advance(task)
    benchmark.finish()
    show(benchmark.title(record()), benchmark.columns(), findings.results, console, benchmark.section)
    for line in findings.footnotes():
        console.print(escape(line), highlight=False)
    save()
    if settings.out is not None:
        console.print(f"written to {settings.out}")
    if benchmark.failed():
        raise typer.Exit(1)


# Settings that change how far a run gets, and none of its numbers.
RUN_ONLY = ("minutes", "out", "resume", "commit")


def restore(findings: Findings, path: Path | None, wanted: Row) -> None:
    """Take over the complete cells of an earlier run. typer.BadParameter where there is none, or its settings were others."""
    try:
        earlier = json.loads(path.read_text()) if path is not None else None
    except (OSError, json.JSONDecodeError) as error:
        raise typer.BadParameter(f"--resume: {path}: {error}") from None
    if earlier is None:
        raise typer.BadParameter("--resume needs --out, the record to go on from")
    before = earlier.get("settings", {})
    other = [name for name, value in wanted.items() if before.get(name) != value]
    if other:
        raise typer.BadParameter(f"--resume: {path} was measured with other values of {', '.join(other)}")
    findings.results, findings.cells = earlier["results"], earlier["cells"]
    findings.skipped, findings.failed, findings.judgements = (earlier[n] for n in ("skipped", "failed", "judgements"))


def show(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    console: Console,
    section: Callable[[Row], str] = lambda row: "",
) -> None:
    """The rows as a table."""
    columns = [c for n, c in enumerate(columns) if n == 0 or any(c.text(row) for row in rows)]
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column.title, justify="right" if number else "left", no_wrap=True)
    last = ""
    for row in rows:
        if section(row) != last:
            if last:
                table.add_section()
            last = section(row)
            table.add_row(f"[bold]{last}[/]")
        table.add_row(*(("  " if last and not n else "") + column.text(row) for n, column in enumerate(columns)))
    console.print(table)


def text_of(name: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """A column's text: a number of the row by `scale`, or nothing where the row has none."""
    return lambda row: "" if row.get(name) is None else format(row[name] / scale, form)
