"""Times measured in turns, peak memory and the record of both: what the benchmarks share.

Contenders take turns within a round, and a ratio is the median over rounds of two times of one
round, so that whatever else runs on the machine falls on both. `torch.utils.benchmark.Timer` and
`triton.testing.do_bench` repeat one callable and then the next: their medians compare two different
stretches of time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from modalities.cost import Meter, device_name
from zoo.files import write_json

Row = dict[str, object]
Call = Callable[[], object]
# Cycles: more than the host takes to launch a step.
SLEEP = 10_000_000


class Refused(Exception):
    """Why something cannot be measured at a shape."""


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that all benchmarks have."""
    options = argparse.ArgumentParser(
        f"bench.py {name}", description=description, allow_abbrev=False
    )
    options.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options.add_argument("--seconds", type=float, default=1.0, help="of rounds for each contender")
    options.add_argument("--out", type=Path, help="write the rows here as JSON, after each shape")
    return options


def numbers(text: str) -> list[int]:
    """Whole numbers above 0 with commas, ascending; for argparse."""
    values = sorted({int(word) for word in text.split(",")})
    if values[0] < 1:
        raise ValueError(text)
    return values


def words(text: str) -> list[str]:
    """Words with commas, each once; for argparse."""
    return list(dict.fromkeys(filter(None, text.split(","))))


def device_of(options: argparse.Namespace) -> torch.device:
    """The device of --device; SystemExit where it is not available."""
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    if options.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda")


# ---- time and memory


def in_turns(
    calls: Mapping[str, Call], seconds: float, device: torch.device
) -> list[dict[str, float]]:
    """Milliseconds by name of rounds of all calls one after the other, after a warm-up: 3 to 200,
    about `seconds` a call."""
    for call in calls.values():
        call()
    clock = _events(device) if device.type == "cuda" else _wall
    rows: list[dict[str, float]] = []
    end = time.perf_counter() + seconds * len(calls)
    while len(rows) < 3 or (time.perf_counter() < end and len(rows) < 200):
        rows.append({name: clock(call) for name, call in calls.items()})
    return rows


def _wall(call: Call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _events(device: torch.device) -> Callable[[Call], float]:
    """A clock of the device's events. A sleep keeps the queue full while the host launches; writes
    before it empty the second-level cache."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flushed = torch.empty(2 * cache_bytes, dtype=torch.int8, device=device)
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)

    def clock(call: Call) -> float:
        flushed.zero_()
        torch.cuda._sleep(SLEEP)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return clock


def peak_mib(call: Call, device: torch.device) -> float | None:
    """MiB that a call adds at its peak, its result included; None where it cannot be read."""
    with Meter(device) as meter:
        result = call()
    del result
    return None if meter.peak_bytes is None else meter.peak_bytes / 2**20


# ---- record


class Record:
    """Rows of a benchmark with what they were measured on, saved after each shape.

    `missing` says why something was not measured, `failed` has exceptions.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, **about: object) -> None:
        self.about = environment() | {"device": device_name(device)} | about
        self.device = device
        self.out = options.out
        self.seconds = options.seconds
        self.rows: list[Row] = []
        self.missing: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    @contextlib.contextmanager
    def guard(self, name: str, shape: str) -> Iterator[None]:
        """Note an exception of one contender and go on with the others."""
        try:
            yield
        except Refused as error:
            self.missing[f"{name} at {shape}"] = str(error)
        except torch.OutOfMemoryError:
            self.missing[f"{name} at {shape}"] = "out of memory"
        # Errors of a compiler and of a library have no common type.
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            self.failed[f"{name} at {shape}"] = f"{type(error).__name__}: {first_line[:200]}"

    def compare(
        self,
        shape: str,
        what: str,
        calls: Mapping[str, Call],
        baselines: Sequence[str],
        **units: float,
    ) -> None:
        """Time calls in turns and add a row for each, with its ratio to the fastest of the
        `baselines` that ran.

        units: how many of something a call computes, such as tokens=2048; the row has them by the
            second.
        """
        runnable = {}
        memory = {}
        for name, call in calls.items():
            with self.guard(name, f"{shape}, {what}"):
                # Compiles it and loads libraries.
                call()
                memory[name] = peak_mib(call, self.device)
                runnable[name] = call
        if not runnable:
            return
        rounds = in_turns(runnable, self.seconds, self.device)
        times = {}
        for name in runnable:
            times[name] = statistics.median(row[name] for row in rounds)
        measured = [name for name in baselines if name in runnable]
        baseline = min(measured or list(runnable)[:1], key=times.__getitem__)
        for name, ms in times.items():
            row: Row = {
                "shape": shape,
                "what": what,
                "name": name,
                "ms": ms,
                "mib": memory[name],
                "ratio": statistics.median(row[name] / row[baseline] for row in rounds),
                "baseline": baseline,
                "rounds": len(rounds),
            }
            for unit, count in units.items():
                row[f"{unit}_per_s"] = 1e3 * count / ms
            self.rows.append(row)
        self.save()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def save(self) -> None:
        if self.out is not None:
            notes = {"missing": self.missing, "failed": self.failed}
            write_json(self.out, self.about | {"rows": self.rows} | notes)

    def finish(self) -> int:
        """Print the table and what is missing from it; returns the exit status, 1 where something
        failed."""
        facts = {name: value for name, value in self.about.items() if value not in (None, {})}
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        heading = ""
        for row in self.rows:
            row_heading = f"\n{row['shape']}, {row['what']}; ratios to {row['baseline']}"
            if row_heading != heading:
                heading = row_heading
                print(heading)
            line = f"  {row['name']:34} {row['ms']:10.3f} ms {row['ratio']:7.2f} "
            if row["mib"] is not None:
                line += f"{row['mib']:9,.0f} MiB"
            for name, value in row.items():
                if name.endswith("_per_s"):
                    line += f" {value:12,.1f} {name.removesuffix('_per_s')}/s"
            print(line)
        for name, note in self.failed.items():
            print(f"failed: {name}: {note}")
        for name, note in self.missing.items():
            print(f"not measured: {name}: {note}")
        self.save()
        return 1 if self.failed or not self.rows else 0


def environment() -> Row:
    """Versions, machine, threads and commit."""
    versions = {}
    for name in ("torch", "triton", "flash-attn", "transformers", "timm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or None,
        "cuda": torch.version.cuda,
        "packages": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
