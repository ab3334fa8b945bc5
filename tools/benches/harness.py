"""What the benchmarks share: options, timing in turns, peak memory, a record on disk, and its table.

Contenders take turns within a round, and a ratio is the median over rounds of two times of one round, so that whatever else
runs on the machine falls on both. `torch.utils.benchmark.Timer` and `triton.testing.do_bench` repeat one callable and then the
next; a ratio of their medians compares two different stretches of time, which is why neither is used here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import math
import multiprocessing
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from modalities.cost import Meter
from tools.benches.screen import BadParameter, Exit, Option, Status, say, show_table
from zoo.files import write_json
from zoo.naming import did_you_mean

PACKAGES = ("triton", "liger-kernel", "flash-attn", "goat-attention", "flash-linear-attention", "deepspeed")
PASSES = ("forward", "fwd+bwd")

Device = Annotated[str, Option(help="auto, cuda or cpu")]
Seconds = Annotated[float, Option(help="of rounds for each contender; 0: the benchmark's own")]
Minutes = Annotated[float, Option(help="stop in about this time, the longest cells dropped; 0: no limit")]
Out = Annotated[Path | None, Option(help="write the results as JSON here, after each cell")]
Commit = Annotated[str, Option(help="recorded where the checkout has no history")]

Row = dict[str, Any]
Stopwatch = Callable[[Callable[[], object]], float]


class Refused(Exception):
    """Why something cannot be measured at a shape; shown below the table."""


# ------------------------------------------------------------------------------------------------------- options


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """The value, or BadParameter that names the option, the value and what is known."""
    known = list(known)
    if value not in known:
        near = did_you_mean(value, known)
        raise BadParameter(f"--{name} {value!r}: {near}must be one of {', '.join(known)}")
    return value


def words(text: str) -> list[str]:
    """Comma-separated words, each once."""
    return list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))


def numbers(name: str, text: str) -> list[int]:
    """Comma-separated integers above 0. BadParameter names the option and the word that is not one."""
    for word in words(text):
        if not word.isdigit() or not int(word):
            raise BadParameter(f"--{name} takes whole numbers above 0, such as 1024,4096; got {word!r}")
    return [int(word) for word in words(text)]


def device_of(name: str) -> torch.device:
    """The device of --device auto, cuda or cpu."""
    one_of("device", name, ("auto", "cuda", "cpu"))
    if name == "cuda" and not torch.cuda.is_available():
        raise BadParameter("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


# -------------------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Rounds:
    """Milliseconds of each run in each round, by the run's name."""

    rows: list[dict[Any, float]]

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


def by_clock(device: torch.device) -> Stopwatch:
    """Wall time of a run in milliseconds; on CUDA after all queued work, before and after."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def watch(run: Callable[[], object]) -> float:
        start = now()
        run()
        return 1e3 * (now() - start)

    return watch


SLEEP = 10_000_000  # cycles, about five milliseconds: more than the host takes to launch a step


def by_events(device: torch.device) -> Stopwatch:
    """Milliseconds of a run between events of the device. A sleep keeps the queue from running dry while the host launches;
    writes before it empty the second-level cache."""
    flushed = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def watch(run: Callable[[], object]) -> float:
        flushed.zero_()
        torch.cuda._sleep(SLEEP)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return watch


def host_microseconds(run: Callable[[], object], device: torch.device) -> float | None:
    """What a run takes of the host while the device is busy with something else: its launches, and what decides on them. The
    median of ten; None on the CPU, where host and device are one."""
    if device.type != "cuda":
        return None
    times = []
    for _ in range(10):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(SLEEP)
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize(device)
    return statistics.median(times)


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


# -------------------------------------------------------------------------------------------------------- memory


def extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
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


# -------------------------------------------------------------------------------------------------------- record


class Record:
    """All that a run found, as it is written to JSON: what is in `about`, and

    results: a row for each measurement. left_out: name, or name and cell → why it was not measured. wrong: name → how far it
    is off, for which it was not timed. failed: name → the exception it ended with. dropped: cells there was no time for.
    """

    def __init__(self, about: Row, *, out: Path | None = None, commit: str = "", minutes: float = 0.0) -> None:
        self.about, self.out = environment(commit) | about, out
        self.end = time.perf_counter() + 60 * minutes if minutes else math.inf
        self.results: list[Row] = []
        self.left_out: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.dropped: list[str] = []
        self.status = Status()

    @contextlib.contextmanager
    def guard(self, name: str, cell: str) -> Iterator[None]:
        """Note an exception of one contender and go on with the others."""
        try:
            yield
        except (Refused, torch.OutOfMemoryError) as error:
            self.left_out[f"{name} at {cell}"] = str(error) if isinstance(error, Refused) else "out of memory"
        except Exception as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            self.failed[name] = f"{cell}: {type(error).__name__}: {first[:200]}"

    def measure(self, cells: Iterable[tuple[str, str, Callable[[], list[Row]]]]) -> None:
        """Measure cells (name, kind, call) and save after each. Cells of a kind grow; one starts if twice the time of the last
        one of its kind is left."""
        last: dict[str, float] = {}
        for name, kind, call in cells:
            begun = time.perf_counter()
            if begun + 2 * last.get(kind, 0.0) > self.end:
                self.dropped.append(name)
                continue
            self.status.update(name)
            self.results += call()
            last[kind] = time.perf_counter() - begun
            self.save()

    def save(self) -> None:
        if self.out is not None:
            found = {name: getattr(self, name) for name in ("results", "left_out", "wrong", "failed", "dropped")}
            write_json(self.out, self.about | found)

    def show(self, title: str, columns: Mapping[str, Callable[[Row], str]], section: Callable[[Row], str]) -> None:
        """The rows as a table, those of a `section` below its name, and whatever is missing from it with its reason. Columns
        are title → text of a row; one without any text is left out."""
        shown = {name: text for name, text in columns.items() if any(text(row) for row in self.results)}
        sections: list[tuple[str, list[list[str]]]] = []
        for row in self.results:
            if not sections or section(row) != sections[-1][0]:
                sections.append((section(row), []))
            sections[-1][1].append([text(row) for text in shown.values()])
        show_table(title, list(shown), sections)
        kinds = {"WRONG, not timed": self.wrong, "failed": self.failed, "not measured": self.left_out}
        lines = [f"{kind}: {name}: {note}" for kind, notes in kinds.items() for name, note in notes.items()]
        for line in [*lines, *([f"no time left for: {', '.join(self.dropped)}"] if self.dropped else [])]:
            say(line)
        self.save()
        if self.out is not None:
            say(f"written to {self.out}")


def end(record: Record) -> None:
    """Exit(1) where something failed or was wrong."""
    if record.failed or record.wrong:
        raise Exit(1)


def text_of(name: str, form: str = "", unit: float = 1) -> Callable[[Row], str]:
    """A column's text: a value of the row, a number in `unit`s where it has a form, or nothing where the row has none."""
    return lambda row: "" if row.get(name) is None else format(row[name] / unit if form else row[name], form)


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
