"""What the attention benchmarks share: shapes, results, timing in turns, the matmul ceiling, errors, records."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

HERE = Path(__file__).parent
PACKAGES = ("triton", "flash-attn", "goat-attention", "flash-linear-attention", "deepspeed")

# How far outputs and gradients may be from float64, relative. Rounding of the operands alone is 2^-9 in bfloat16 and 2^-12 in
# float16, once in the logits and once in the weights; a prior that is missing or a tile that is lost is off by far more.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Shape:
    """B sequences of H heads, S keys and T queries (T = S where `queries` is 0), D columns of a head."""

    batch: int
    heads: int
    length: int
    width: int
    queries: int = 0

    def __str__(self) -> str:
        text = f"B{self.batch} H{self.heads} L{self.length} D{self.width}"
        return f"{text} T{self.queries}" if self.queries else text

    @property
    def rows(self) -> int:
        return self.queries or self.length

    def flops(self, backward: bool) -> float:
        """Of causal attention: 4·B·H·D for each of the visible pairs, 2.5 times as many again backward. Tiles that are
        skipped count as done, so that the rate of a kernel that skips is a rate of work saved and done."""
        pairs = self.rows * self.length - self.rows * (self.rows - 1) / 2
        return 4.0 * self.batch * self.heads * self.width * pairs * (3.5 if backward else 1.0)


@dataclass(frozen=True)
class Result:
    """One contender at one shape and pass.

    Attributes:
        method, kernel, what: prior, kernel, and "forward", "fwd+bwd" or "decode".
        plain_ms, ms, ratio: median time of the baseline and its own, and the median over rounds of own by baseline's.
        target: the most that ratio may be, or None where nothing was promised.
        pairs: rounds.
        tflops, ceiling_share: operations of the visible pairs by time, and that by the rate of the run's matmul.
        extra_mib: peak memory a pass adds beside what it returns.
        skipped: share of the visible tiles that were not computed.
    """

    shape: Shape
    method: str
    kernel: str
    what: str
    plain_ms: float
    ms: float
    ratio: float
    target: float | None
    pairs: int
    tflops: float | None = None
    ceiling_share: float | None = None
    extra_mib: float | None = None
    skipped: float | None = None


# -------------------------------------------------------------------------------------------------------- timing


def in_turns(
    runs: Sequence[Callable[[], object]], seconds: float, stopwatch: Callable[[Callable[[], object]], float]
) -> list[list[float]]:
    """Milliseconds of each run in each round, (rounds × runs): a warm-up, then at least three rounds and at most 200, for
    about `seconds`. Runs of a round follow each other, so that whatever else happens on the machine falls on all."""
    for run in runs:
        run()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 3 or (time.perf_counter() < end and len(rounds) < 200):
        rounds.append([stopwatch(run) for run in runs])
    return rounds


def median_ratio(rounds: Sequence[Sequence[float]], ours: int, theirs: int) -> float:
    """Median over rounds of run `ours` by run `theirs`."""
    return statistics.median(row[ours] / row[theirs] for row in rounds)


def by_clock(clock: Callable[[], float]) -> Callable[[Callable[[], object]], float]:
    """A stopwatch that reads `clock`, in seconds, before and after."""

    def watch(run: Callable[[], object]) -> float:
        start = clock()
        run()
        return 1e3 * (clock() - start)

    return watch


def by_events(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A stopwatch of the device: events around the run, in a queue that a sleep keeps from running dry while the host
    launches, after writes that push everything out of the second-level cache."""
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


def paired(
    plain: Callable[[], object], ours: Callable[[], object], seconds: float, clock: Callable[[], float]
) -> tuple[float, float, float, int]:
    """(plain ms, our ms, median ratio, pairs), for about `seconds`, with at least three pairs after a warm-up."""
    rounds = in_turns((plain, ours), seconds, by_clock(clock))
    plain_ms, our_ms = (statistics.median(column) for column in zip(*rounds, strict=True))
    return plain_ms, our_ms, median_ratio(rounds, 1, 0), len(rounds)


def no_grad(run: Callable[[], object]) -> Callable[[], object]:
    def inner() -> object:
        with torch.no_grad():
            return run()

    return inner


def matmul_ceiling(
    device: torch.device, dtype: torch.dtype, stopwatch: Callable[[Callable[[], object]], float], size: int = 0
) -> float:
    """TFLOP/s of a square product of random matrices: 2·n³ operations by the median time of ten. n = 8192 on CUDA, 1024 on
    the CPU, unless `size` says otherwise."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    for _ in range(3):
        torch.mm(a, b, out=out)
    ms = statistics.median(stopwatch(lambda: torch.mm(a, b, out=out)) for _ in range(10))
    return 2 * size**3 / ms / 1e9


class Budget:
    """Minutes to spend, 0 for no end. Work comes in kinds whose pieces grow; a piece starts if twice the last one fits."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.end = clock, clock() + 60 * minutes if minutes else math.inf
        self._last: dict[str, float] = {}
        self._running: tuple[str, float] | None = None

    def allows(self, kind: str) -> bool:
        """Whether the next piece of `kind` is likely to end in time; if so it has begun, and the one before has ended."""
        self.done()
        now = self.clock()
        if now + 2 * self._last.get(kind, 0.0) > self.end:
            return False
        self._running = (kind, now)
        return True

    def done(self) -> None:
        """The piece that runs has ended."""
        if self._running is not None:
            kind, begun = self._running
            self._last[kind] = self.clock() - begun
            self._running = None


# -------------------------------------------------------------------------------------------------------- errors


def row_error(found: Tensor, right: Tensor) -> float:
    """Greatest relative error ‖found − right‖/‖right‖ of a row (last axis) of an output; NaN counts as infinite."""
    wrong = (found.double() - right.double()).norm(dim=-1) / right.double().norm(dim=-1).clamp(min=1e-300)
    return _finite(wrong.max())


def norm_error(found: Tensor, right: Tensor) -> float:
    """Relative error of a gradient as a whole; its rows may vanish by cancellation. NaN counts as infinite."""
    wrong = (found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-300)
    return _finite(wrong)


def _finite(error: Tensor) -> float:
    return math.inf if not torch.isfinite(error) else float(error)


# -------------------------------------------------------------------------------------------------------- records


def versions() -> dict[str, str]:
    """Of the packages in play that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit_of_checkout() -> str | None:
    """What `git describe` says; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    except OSError:
        return None
    return done.stdout.strip() or None


def write_record(path: Path, record: Mapping[str, object], console: Console | None = None) -> None:
    """What was measured, as JSON, after what it was measured with, and a line about it if there is a console. A `commit` in
    the record stands for the checkout's."""
    made_by = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": commit_of_checkout(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(made_by | dict(record), indent=1) + "\n")
    os.replace(partial, path)
    if console is not None:
        console.print(f"written to {path}")
