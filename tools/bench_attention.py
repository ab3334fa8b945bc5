"""Measure the attention kernels on the CPU against plain causal attention of the same shapes.

    python tools/bench_attention.py            # 1k to 16k tokens, a few minutes on two idle cores
    python tools/bench_attention.py --quick    # short lengths, well under a minute

Each ratio is the median over paired runs: plain, then the contender, alternated, so that other work on the machine falls
on both. `--clock cpu` counts processor time instead of the wall clock, for a machine that is busy with other things.
Memory is the growth of a fresh process's peak resident size over what it held with inputs and outputs allocated.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zoo import Positions, create_prior, prior_attention
from zoo.attention.base import AttentionCall
from zoo.attention.dispatch import choose_kernel

HERE = Path(__file__).parent
MEMORY_LENGTH = 32768
QUICK_LENGTHS = "1024,2048"


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    length: int
    width: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} L{self.length} D{self.width}"


# A training step of the smallest language model.
TRAINING = Shape(32, 4, 128, 32)


@dataclass(frozen=True)
class Result:
    """One ratio. target: the most it may be, or None where nothing was promised."""

    shape: Shape
    method: str
    kernel: str
    what: str
    plain_ms: float
    ms: float
    ratio: float
    target: float | None
    pairs: int


class Problem:
    """Inputs of one shape, and the same attention with and without a prior."""

    def __init__(self, shape: Shape, method: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        name, _, scaled = method.partition("+")
        options = {"train_context": 128} if name == "goat" else {"init": "alibi"}
        self.prior = create_prior(name, num_heads=shape.heads, **options)
        content = shape.width - self.prior.num_lanes  # lanes are inside the head width

        def heads(width: int) -> torch.Tensor:
            made = torch.randn(shape.batch, shape.length, shape.heads, width, dtype=dtype)
            return made.transpose(1, 2).requires_grad_()

        self.plain_leaves = [heads(shape.width) for _ in range(3)]
        self.q, self.k, self.v = heads(content), heads(content), heads(shape.width)
        self.grad = torch.randn(shape.batch, shape.heads, shape.length, shape.width, dtype=dtype)
        line = Positions.line(shape.length)
        self.terms = self.prior(line, line, causal=True)
        # The prior's own parameters are a few numbers; the gradient asked for is that of what it hands to attention.
        given = [self.terms.q_lanes, self.terms.k_lanes, self.terms.table and self.terms.table.table]
        self.scale = None
        if scaled:
            self.scale = (torch.arange(shape.length) + 1.0).log().expand(shape.heads, -1).clone().requires_grad_()
        self.leaves = [self.q, self.k, self.v]
        self.leaves += [t for t in (*given, self.scale) if t is not None and t.requires_grad]

    def kernel(self) -> str:
        return choose_kernel(AttentionCall(self.q, self.k, self.v, self.terms, True, self.scale))

    def plain(self) -> torch.Tensor:
        return F.scaled_dot_product_attention(*self.plain_leaves, is_causal=True)

    def ours(self) -> torch.Tensor:
        return prior_attention(self.q, self.k, self.v, self.terms, causal=True, query_scale=self.scale)

    def plain_step(self) -> None:
        torch.autograd.grad(self.plain(), self.plain_leaves, self.grad)

    def our_step(self) -> None:
        torch.autograd.grad(self.ours(), self.leaves, self.grad, retain_graph=True)


def paired(
    plain: Callable[[], object], ours: Callable[[], object], seconds: float, clock: Callable[[], float]
) -> tuple[float, float, float, int]:
    """(plain ms, our ms, median ratio, pairs), for about `seconds`, with at least three pairs after a warm-up."""
    plain(), ours()
    ours_ms, plain_ms = [], []
    end = time.perf_counter() + seconds
    while len(ours_ms) < 3 or (time.perf_counter() < end and len(ours_ms) < 200):
        for run, kept in ((plain, plain_ms), (ours, ours_ms)):
            start = clock()
            run()
            kept.append(1e3 * (clock() - start))
    ratios = [a / b for a, b in zip(ours_ms, plain_ms, strict=True)]
    return statistics.median(plain_ms), statistics.median(ours_ms), statistics.median(ratios), len(ratios)


def no_grad(run: Callable[[], object]) -> Callable[[], object]:
    def inner() -> object:
        with torch.no_grad():
            return run()

    return inner


def write_record(path: Path, record: dict[str, object], console: Console) -> None:
    """What was measured, as JSON, after what it was measured with."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    made_by = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "commit": commit.stdout.strip() or None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(made_by | record, indent=1) + "\n")
    os.replace(partial, path)
    console.print(f"written to {path}")


def target_of(shape: Shape, method: str, what: str) -> float | None:
    if shape.length < 1024:
        return None
    if method == "goat":
        return 1.10
    if method == "ggd":
        return 2.0 if what == "fwd+bwd" else 1.35 if shape.length >= 8192 else None
    return None


def measure(shape: Shape, method: str, dtype: torch.dtype, seconds: float, clock: Callable[[], float]) -> list[Result]:
    problem = Problem(shape, method, dtype)
    runs = {
        "forward": (no_grad(problem.plain), no_grad(problem.ours)),
        "fwd+bwd": (problem.plain_step, problem.our_step),
    }
    results = []
    for what, (plain, ours) in runs.items():
        plain_ms, ms, ratio, pairs = paired(plain, ours, seconds, clock)
        target = target_of(shape, method, what)
        results.append(Result(shape, method, problem.kernel(), what, plain_ms, ms, ratio, target, pairs))
    return results


def peak_growth(method: str, backward: bool) -> float:
    """MiB that one pass at 32k tokens, two heads of 64, adds to the peak of this process. Called in a fresh one."""

    def resident(line: str) -> float:
        status = Path("/proc/self/status")
        if status.exists():
            return next(int(row.split()[1]) for row in status.read_text().splitlines() if row.startswith(line)) / 1024
        scale = 2**20 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale

    small = Problem(Shape(1, 2, 1024, 64), method, torch.float32)  # loads and warms up the libraries
    small.our_step() if backward else no_grad(small.ours)()
    problem = Problem(Shape(1, 2, MEMORY_LENGTH, 64), method, torch.float32)
    # What any implementation returns counts as output, not as extra: reserve it before looking.
    outputs = [torch.ones_like(problem.grad)] + ([torch.ones_like(x) for x in problem.leaves] if backward else [])
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # Linux: the peak counts from here
    before = resident("VmRSS")
    del outputs
    problem.our_step() if backward else no_grad(problem.ours)()
    return resident("VmHWM") - before


def memory(method: str, backward: bool) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--memory-of", method, *(["--backward"] if backward else [])],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    return float(done.stdout.split()[-1])


def show(results: list[Result], memories: dict[str, float], console: Console) -> None:
    table = Table(
        title=f"attention on the CPU against plain causal SDPA, {torch.get_num_threads()} threads",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for column in ("shape", "prior", "kernel", "pass", "plain ms", "ms", "ratio", "target"):
        table.add_column(
            column, no_wrap=True, justify="right" if column in ("plain ms", "ms", "ratio", "target") else "left"
        )
    for r in results:
        colour = "" if r.target is None else "green" if r.ratio <= r.target else "red"
        ratio = f"[{colour}]{r.ratio:.2f}[/]" if colour else f"{r.ratio:.2f}"
        goal = "" if r.target is None else f"≤ {r.target:.2f}"
        table.add_row(str(r.shape), r.method, r.kernel, r.what, f"{r.plain_ms:.1f}", f"{r.ms:.1f}", ratio, goal)
    console.print(table)
    for name, extra in memories.items():
        console.print(
            f"extra memory at {MEMORY_LENGTH} tokens, two heads of 64, {name}: {extra:.0f} MiB (target < 200)"
        )


def main(
    quick: bool = typer.Option(False, help="Short lengths and few pairs."),
    seconds: float = typer.Option(4.0, help="Seconds of paired runs for each ratio."),
    lengths: str = typer.Option(
        "1024,4096,8192,16384", help="Sequence lengths, for one sequence of --heads of --width."
    ),
    heads: int = typer.Option(2),
    width: int = typer.Option(64),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64."),
    clock: str = typer.Option("wall", help="wall, or cpu: processor time of this process."),
    out: Path | None = typer.Option(None, help="Write the results as JSON here."),
    memory_of: str = typer.Option("", hidden=True),
    backward: bool = typer.Option(False, hidden=True),
) -> None:
    """Print the table of ratios and, with --out, save it."""
    if memory_of:
        print(peak_growth(memory_of, backward))
        return
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    if clock not in clocks:
        raise typer.BadParameter(f"--clock must be wall or cpu, got {clock!r}")
    kind = getattr(torch, dtype, None)
    if kind not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise typer.BadParameter(f"--dtype must be float32, float64, bfloat16 or float16, got {dtype!r}")
    if quick:
        lengths, seconds = QUICK_LENGTHS, min(seconds, 1.0)
    console = Console()
    shapes = [Shape(1, heads, int(length), width) for length in lengths.split(",")]
    work = [(shape, method) for shape in shapes for method in ("goat", "ggd")]
    work += [(TRAINING, method) for method in ("goat", "ggd", "ggd+ssmax")]
    results: list[Result] = []
    for shape, method in track(work, description="measuring", console=console):
        results += measure(shape, method, kind, seconds, clocks[clock])
    memories = {}
    if not quick:
        memories = {"ggd forward": memory("ggd", False), "ggd fwd+bwd": memory("ggd", True)}
    show(results, memories, console)
    if out is not None:
        shown = {"dtype": dtype, "clock": clock, "results": [asdict(r) for r in results]}
        write_record(out, shown | {"extra_memory_mib": memories}, console)


if __name__ == "__main__":
    typer.run(main)
