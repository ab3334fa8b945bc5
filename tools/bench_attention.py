"""Measure attention with priors beside everything else that computes attention: one command, one table, ratios in one run.

    python tools/bench_attention.py            # on CUDA 1k to 128k tokens; on the CPU 1k to 16k
    python tools/bench_attention.py --quick    # short lengths
    python tools/bench_attention.py --minutes 8 --out benchmarks/h200/attention.json

The baseline is torch's own attention without bias: its flash kernel on CUDA, its plain causal call on the CPU. Every contender
is first compared with float64 at a short length, outputs and gradients; one that is wrong is reported as wrong and not timed.
Then all of them take turns, and a ratio is the median over rounds. On CUDA times are of device events, with the second-level
cache flushed before each; on the CPU of the wall clock, or of processor time with `--clock cpu`, for a machine that is busy
with other things. What cannot be measured here stands below the table with its reason.

TFLOP/s count the visible pairs, so a kernel that skips tiles may pass the ceiling, a large matrix product of the same run.
Memory is what a pass adds at its peak, what it returns left out: on CUDA of torch's allocator, on the CPU the growth of a
fresh process's peak resident size over what it held with inputs and outputs allocated.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

from tools.benches.kit import (
    Budget,
    Shape,
    by_clock,
    by_events,
    matmul_ceiling,
    no_grad,
    paired,
    versions,
    write_record,
)
from tools.benches.ours import (
    PROMISES,
    TRAINING,
    cpu_target,
    decoders_on,
    judge_memory,
    no_target,
    ours_on,
    scaled_ggd,
    shapes_on_cuda,
)
from tools.benches.peers import peers_on
from tools.benches.problem import Contender, Problem
from tools.benches.sweep import CHECK_LENGTH, Findings, Sweep, label, show

__all__ = ["main", "no_grad", "paired", "write_record"]  # the last three for the benchmarks beside this one

MEMORY_LENGTH = 32768
LENGTHS = {"cuda": "1024,2048,4096,8192,16384,32768,65536,131072", "cpu": "1024,4096,8192,16384"}
QUICK_LENGTHS = {"cuda": "1024,8192", "cpu": "1024,2048"}
DECODE_LENGTHS = {"cuda": "8192,32768,131072,524288", "cpu": ""}
QUICK_DECODE = {"cuda": "32768", "cpu": ""}
WIDTHS = {"cuda": "64,128", "cpu": "64"}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
SECONDS = {"cuda": 0.3, "cpu": 4.0}
DECODE_HEADS = 12
SLOW_TO_COMPILE = "flex"


# ---------------------------------------------------------------------------------------------- memory on the CPU


def peak_growth(method: str, backward: bool) -> float:
    """MiB that one pass at 32k tokens, two heads of 64, adds to the peak of this process. Called in a fresh one."""

    def resident(line: str) -> float:
        status = Path("/proc/self/status")
        if status.exists():
            return next(int(row.split()[1]) for row in status.read_text().splitlines() if row.startswith(line)) / 1024
        scale = 2**20 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale

    contender = next(c for c in ours_on(torch.device("cpu")) if c.method == method)

    def made(length: int):
        problem = Problem(Shape(1, 2, length, 64), torch.float32)
        run = contender.prepare(problem)
        return problem, run, (lambda: run.step(problem.grad)) if backward else no_grad(run.forward)

    made(1024)[2]()  # loads and warms up the libraries
    problem, run, call = made(MEMORY_LENGTH)
    # What any implementation returns counts as output, not as extra: reserve it before looking.
    outputs = [torch.ones_like(problem.grad)] + ([torch.ones_like(x) for x in run.leaves.values()] if backward else [])
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # Linux: the peak counts from here
    before = resident("VmRSS")
    del outputs
    call()
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


# ----------------------------------------------------------------------------------------------------- the command


def numbers(option: str, text: str) -> list[int]:
    """Comma-separated integers above 0. typer.BadParameter names the option and what is not one."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if not word.isdigit() or not int(word):
            raise typer.BadParameter(f"--{option} takes whole numbers above 0, such as 1024,4096; got {word!r}")
        found.append(int(word))
    return found


def chosen(contenders: list[Contender], peers: bool, without: dict[str, str], findings: Findings) -> list[Contender]:
    """Without those that options leave out, which are noted; the baseline stays.

    without: part of a contender's name → why it is left out.
    """
    baseline, *rest = contenders
    found = [baseline]
    for contender in rest:
        reasons = [why for part, why in without.items() if part in contender.name]
        if not contender.ours and not peers:
            reasons.insert(0, "left out by --no-peers")
        if reasons:
            findings.left_out[label(contender)] = reasons[0]
        else:
            found.append(contender)
    return found


def sweep_all(
    sweep: Sweep,
    shapes: list[Shape],
    decode: list[Shape],
    choose: Callable[[list[Contender]], list[Contender]],
    budget: Budget,
    console: Console,
) -> None:
    """Check everything, then measure decoding and then whole sequences, each from the shortest."""
    device, short = sweep.device, CHECK_LENGTH[sweep.device.type]
    baseline, *others = peers_on(device)
    whole = choose([baseline, *ours_on(device), *others])
    steps = [c for c in choose([baseline, *decoders_on(device), *others]) if c.decodes]
    with Progress(console=console, transient=True) as progress:
        note = progress.add_task("", total=None)
        sweep.report = lambda line: progress.update(note, description=line)
        whole = sweep.right(sweep.able(whole), [Shape(2, 4, short, width) for width in widths_of(shapes)])
        at = [Shape(1, DECODE_HEADS, short, width, queries=1) for width in widths_of(decode)]
        steps = sweep.right(sweep.able(steps), at) if decode else []
        for kind, work, able in (("decode", decode, steps), ("attention", shapes, whole)):
            if work and able and able[0].key == baseline.key:
                sweep.run(work, able, budget, progress, kind)
        if device.type == "cpu" and whole:
            scaled = sweep.right([scaled_ggd()], [Shape(2, 4, short, TRAINING.width)])
            sweep.run([TRAINING], [*whole, *scaled], budget, progress, "training")


def widths_of(shapes: list[Shape]) -> list[int]:
    return sorted({shape.width for shape in shapes})


def shapes_of(
    kind: str, lengths: str, decode: str, width: str, heads: int, tokens: int
) -> tuple[list[Shape], list[Shape]]:
    """Shapes of whole sequences and of decoding steps, from options as given. typer.BadParameter for what is no number."""
    sizes, keys = numbers("lengths", lengths), numbers("decode", decode)
    widths = numbers("width", width)
    if kind == "cuda":
        shapes = shapes_on_cuda(sizes, widths, heads or 64, tokens)
    else:
        shapes = [Shape(1, heads or 2, length, w) for length in sizes for w in widths]
    return shapes, [Shape(1, DECODE_HEADS, length, w, queries=1) for length in keys for w in widths]


def report(findings: Findings, made_by: dict[str, Any], memories: dict[str, float], console: Console) -> None:
    """The table and what belongs below it."""
    on_cpu = made_by["device"] == "cpu"
    name = f"the CPU, {torch.get_num_threads()} threads" if on_cpu else made_by["device"]
    show(
        findings,
        f"attention on {name}, {made_by['dtype']}; ratios to {made_by['baseline']} without bias; "
        f"share of a large matrix product's {made_by['matmul_tflops']:.2f} TFLOP/s",
        console,
    )
    for what, extra in memories.items():
        console.print(
            f"extra memory at {MEMORY_LENGTH} tokens, two heads of 64, {what}: {extra:.0f} MiB (target < 200)"
        )


def main(
    quick: bool = typer.Option(False, help="Short lengths and few rounds."),
    seconds: float = typer.Option(0.0, help="Seconds of rounds for each ratio; default 0.3 on CUDA, 4 on the CPU."),
    minutes: float = typer.Option(0.0, help="Stop in about this time: the longest shapes are dropped. 0: no limit."),
    device: str = typer.Option("auto", help="auto, cuda or cpu."),
    lengths: str = typer.Option(
        "", help=f"Sequence lengths; default {LENGTHS['cuda']} on CUDA, {LENGTHS['cpu']} else."
    ),
    decode: str = typer.Option("", help=f"Cached keys of a decoding step; default {DECODE_LENGTHS['cuda']} on CUDA."),
    heads: int = typer.Option(0, help="Batch times heads; default 64 on CUDA, 2 on the CPU."),
    width: str = typer.Option("", help="Head widths; default 64,128 on CUDA, 64 on the CPU."),
    tokens: int = typer.Option(2**20, help="On CUDA, the most tokens times heads of a shape; fewer heads beyond."),
    dtype: str = typer.Option(
        "", help="float32, bfloat16, float16 or float64; default bfloat16 on CUDA, else float32."
    ),
    clock: str = typer.Option("wall", help="On the CPU: wall, or cpu for processor time of this process."),
    peers: bool = typer.Option(True, help="Measure other implementations too."),
    without: str = typer.Option("", help="Leave out contenders whose names contain one of these, comma-separated."),
    commit: str = typer.Option("", help="What to record as the commit, where the checkout has no history."),
    out: Path | None = typer.Option(None, help="Write the results as JSON here."),
    memory_of: str = typer.Option("", hidden=True),
    backward: bool = typer.Option(False, hidden=True),
) -> None:
    """Print the table of ratios and, with --out, save it."""
    if memory_of:
        print(peak_growth(memory_of, backward))
        return
    if device not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter(f"--device must be auto, cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch sees no CUDA device here")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    clocks: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
    if clock not in clocks:
        raise typer.BadParameter(f"--clock must be wall or cpu, got {clock!r}")
    number = getattr(torch, dtype or DTYPES[kind], None)
    if number not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise typer.BadParameter(f"--dtype must be float32, float64, bfloat16 or float16, got {dtype!r}")
    at, console = torch.device(kind), Console()
    lengths = lengths or (QUICK_LENGTHS if quick else LENGTHS)[kind]
    decode = decode or (QUICK_DECODE if quick else DECODE_LENGTHS)[kind]
    shapes, steps = shapes_of(kind, lengths, decode, width or WIDTHS[kind], heads, tokens)
    stopwatch = by_events(at) if kind == "cuda" else by_clock(clocks[clock])
    ceiling = matmul_ceiling(at, number, stopwatch)
    sweep = Sweep(
        at, number, stopwatch, min(seconds or SECONDS[kind], 1.0) if quick else seconds or SECONDS[kind],
        promises=PROMISES if kind == "cuda" else (), ceiling=ceiling, meter=kind == "cuda",
        target=cpu_target if kind == "cpu" else no_target,
    )  # fmt: skip
    parts = {part.strip(): "left out by --without" for part in without.split(",") if part.strip()}
    if quick:
        parts[SLOW_TO_COMPILE] = "left out by --quick: it compiles for seconds at every shape"
    choose = partial(chosen, peers=peers, without=parts, findings=sweep.findings)
    memories: dict[str, float] = {}
    made_by: dict[str, Any] = ({"commit": commit} if commit else {}) | {
        "device": torch.cuda.get_device_name(at) if kind == "cuda" else "cpu", "cuda": torch.version.cuda,
        "packages": versions(), "dtype": dtype or DTYPES[kind], "clock": "device" if kind == "cuda" else clock,
        "baseline": peers_on(at)[0].kernel, "matmul_tflops": ceiling,
    }  # fmt: skip

    def save() -> None:
        found = asdict(sweep.findings)
        record = made_by | {"results": found.pop("results"), "extra_memory_mib": memories, **found}
        if out is not None:
            write_record(out, record)

    sweep.saved = save
    sweep_all(sweep, shapes, steps, choose, Budget(minutes), console)
    if kind == "cpu" and not quick:
        memories |= {"ggd forward": memory("ggd", False), "ggd fwd+bwd": memory("ggd", True)}
    if kind == "cuda":
        judge_memory(sweep.findings)
    report(sweep.findings, made_by, memories, console)
    save()
    if out is not None:
        console.print(f"written to {out}")
    if sweep.findings.ours_fail:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
