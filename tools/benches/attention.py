"""Attention with priors beside everything else that computes attention: one table of ratios to plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch

from tools.benches import harness
from tools.benches.contenders import DECODE_HEADS, Contender, Problem, Run, Shape, contenders_on
from tools.benches.harness import PASSES, Record, Row, Stopwatch, text_of
from tools.benches.oracle import check
from tools.benches.screen import Exit, Option, say

MEMORY_LENGTH = 32768  # of the CPU's memory measurement, in tokens
ROWS, TOKENS = 64, 2**20  # on CUDA: batch times heads of a shape, and the most tokens times heads


@dataclass(frozen=True)
class Defaults:
    """By device; `check` is the length at which contenders are compared with float64, on CUDA long enough to skip tiles."""

    lengths: str
    decode: str
    width: str
    dtype: torch.dtype
    seconds: float
    check: int


LONG = "1024,2048,4096,8192,16384,32768,65536,131072"
DEFAULTS = {
    "cuda": Defaults(LONG, "8192,32768,131072,524288", "64,128", torch.bfloat16, 0.3, 2048),
    "cpu": Defaults("1024,4096,8192,16384", "none", "64", torch.float32, 4.0, 512),
}


@dataclass
class Setting:
    """What all measurements of a run share. seconds: of rounds for each contender. ceiling: TFLOP/s of a matrix product."""

    record: Record
    device: torch.device
    dtype: torch.dtype
    stopwatch: Stopwatch
    seconds: float
    ceiling: float


def main(
    device: harness.Device = "auto",
    lengths: Annotated[str, Option(help="default 1k to 128k on CUDA, 1k to 16k on the CPU")] = "",
    decode: Annotated[str, Option(help="cached keys of a decoding step, or none; on CUDA 8k to 512k")] = "",
    width: Annotated[str, Option(help="head widths; default 64,128 on CUDA, 64 on the CPU")] = "",
    methods: Annotated[str, Option(help="only these priors, beside the baseline; default all")] = "",
    without: Annotated[str, Option(help="leave out contenders whose names contain one of these")] = "",
    seconds: harness.Seconds = 0.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Attention with priors beside other implementations, as ratios to plain attention.

    The baseline is attention without bias: at each shape and pass the fastest of torch's flash and cuDNN kernels and of
    flash-attn on CUDA, torch's plain causal call on the CPU. "with prior" is a step with the prior's own work, from its
    parameters to attention and back; rows without it begin at the table or lanes. Every contender is first compared with
    float64 at a short length, outputs and gradients; one that is wrong is not timed. On CUDA times are of device events, with
    the second-level cache flushed before each; host is what the call takes of the processor beside. TFLOP/s count the visible
    pairs, so a kernel that skips tiles may pass the ceiling, a large matrix product of the same run. Memory is what a pass adds
    at its peak, less what it returns. Whatever cannot be measured stands below the table with its reason.
    """
    place = harness.device_of(device)
    default = DEFAULTS[place.type]
    widths = harness.numbers("width", width or default.width)
    shapes = shapes_of(place, harness.numbers("lengths", lengths or default.lengths), widths)
    cached = [] if (decode or default.decode) == "none" else harness.numbers("decode", decode or default.decode)
    steps = [Shape(1, DECODE_HEADS, keys, w, queries=1) for keys in sorted(cached) for w in widths]
    watch = harness.by_events(place) if place.type == "cuda" else harness.by_clock(place)
    known = contenders_on(place)
    setting = Setting(
        Record({}, out=out, commit=commit, minutes=minutes), place, default.dtype, watch, seconds or default.seconds,
        harness.matmul_ceiling(place, default.dtype, watch),
    )  # fmt: skip
    record = setting.record
    record.about |= {
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu", "cuda": torch.version.cuda,
        "dtype": str(default.dtype).removeprefix("torch."), "matmul_tflops": setting.ceiling,
    }  # fmt: skip
    with record.status:
        usable = admitted(setting, known, harness.words(methods), harness.words(without))
        short = Shape(2, 4, default.check, widths[0])
        cells = []
        for kind, wanted, brief in (
            ("decode", steps, Shape(1, DECODE_HEADS, default.check, widths[0], queries=1)),
            ("attention", shapes, short),
        ):
            fitting = [c for c in usable if (c.decodes if kind == "decode" else c.whole)]
            right = correct(setting, fitting, [replace(brief, width=w) for w in widths]) if wanted else []
            cells += [(str(s), kind, lambda s=s, right=right: measure(setting, s, right)) for s in wanted]
        record.measure(cells)
        if place.type == "cpu" and not lengths:
            memory = {what: harness.in_fresh_process(cpu_memory, what == "fwd+bwd") for what in PASSES}
            record.about["extra_memory_mib"] = {f"ggd {what}": mib for what, mib in memory.items()}
    show(record)
    if any(name.startswith("ours: ") for name in (*record.wrong, *record.failed)):
        raise Exit(1)


def shapes_of(device: torch.device, lengths: Sequence[int], widths: Sequence[int]) -> list[Shape]:
    """Two heads of each length and width on the CPU; on CUDA ROWS, fewer where their tokens would pass TOKENS, and at most 16
    to a sequence."""
    found = []
    for length in sorted(lengths):
        rows = max(1, min(ROWS, TOKENS // length)) if device.type == "cuda" else 2
        heads = max(h for h in range(1, min(16, rows) + 1) if rows % h == 0)
        found += [Shape(rows // heads, heads, length, width) for width in widths]
    return found


# ---- before the clock runs


def label(contender: Contender) -> str:
    return f"ours: {contender.name}" if contender.ours else contender.name


def admitted(
    setting: Setting, known: Sequence[Contender], methods: Sequence[str], without: Sequence[str]
) -> list[Contender]:
    """Those that options and this machine admit; the reason is noted for the others."""
    found = []
    for contender in known:
        reason = contender.missing(setting.device)
        if contender.method != "none" and methods and contender.method not in methods:
            reason = "left out by --methods"
        if contender is not known[0] and any(part in contender.name for part in without):
            reason = "left out by --without"
        if reason is None:
            found.append(contender)
        else:
            setting.record.left_out[label(contender)] = reason
    return found


def correct(setting: Setting, contenders: Iterable[Contender], shapes: Sequence[Shape]) -> list[Contender]:
    """Those that agree with float64 at each of the shapes that they take; the others are noted and never timed."""
    found, record = [], setting.record
    for contender in contenders:
        name, agrees = label(contender), False
        for shape in shapes:
            record.status.update(f"checking {contender.name}")
            with record.guard(name, str(shape)):
                problem = Problem(shape, setting.dtype, setting.device)
                verdict = check(contender, problem, backward=not shape.queries)
                agrees = True
                if not verdict.correct:
                    note = f"{verdict.worst} is off by {verdict.error:.2g}, allowed {verdict.bound:.2g} ({shape})"
                    record.wrong[name] = note
            harness.free(setting.device)
        if agrees and name not in record.wrong and name not in record.failed:
            found.append(contender)
    return found


# ---- a shape


def measure(setting: Setting, shape: Shape, contenders: Sequence[Contender]) -> list[Row]:
    """All passes of all contenders at one shape, in turns."""
    problem = Problem(shape, setting.dtype, setting.device)
    runs: dict[Contender, Run] = {}
    for contender in contenders:
        with setting.record.guard(label(contender), str(shape)):
            runs[contender] = contender.prepare(problem)
    found = [
        row for what in (("decode",) if shape.queries else PASSES) for row in one_pass(setting, problem, what, runs)
    ]
    runs.clear()
    harness.free(setting.device)
    return found


def one_pass(setting: Setting, problem: Problem, what: str, runs: dict[Contender, Run]) -> list[Row]:
    shape, backward, record = problem.shape, what == "fwd+bwd", setting.record
    ready: dict[Contender, Callable[[], object]] = {}
    extra: dict[Contender, int | None] = {}
    for contender, run in runs.items():
        if backward and not contender.backward:
            record.left_out[f"{label(contender)}, {what}"] = "it has no backward pass here"
            continue
        with record.guard(label(contender), f"{shape} {what}"):
            record.status.update(f"{shape} {what}: {contender.name}")
            call = pass_of(run, problem, backward)
            call()  # compiles it, before memory is looked at
            # Memory of the CPU is that of the process: exact in a fresh one only, see `cpu_memory`.
            extra[contender] = harness.extra_bytes(call, setting.device) if setting.device.type == "cuda" else None
            ready[contender] = call
    plain = [contender for contender in ready if contender.method == "none"]
    if not plain:
        return []
    record.status.update(f"{shape} {what}: timing {len(ready)} in turns")
    try:
        rounds = harness.in_turns(ready, setting.seconds * len(ready), setting.stopwatch)
    except torch.OutOfMemoryError:
        record.dropped.append(f"{shape} {what} (out of memory, though each ran alone)")
        return []
    rows = []
    baseline = min(plain, key=rounds.ms)
    for contender in ready:
        run, ms = runs[contender], rounds.ms(contender)
        rate = shape.flops(backward) / ms / 1e9
        rows.append({
            "shape": asdict(shape), "method": contender.method, "kernel": run.kernel or contender.kernel, "what": what,
            "ours": contender.ours, "baseline": baseline.kernel, "ms": ms, "ratio": rounds.ratio(contender, baseline),
            "pairs": len(rounds.rows), "tflops": rate, "ceiling_share": rate / setting.ceiling,
            "host_us": harness.host_microseconds(ready[contender], setting.device),
            "extra_mib": None if extra[contender] is None else extra[contender] / 2**20,
            "skipped": run.skipped() if run.skipped else None,
        })  # fmt: skip
    return rows


def pass_of(run: Run, problem: Problem, backward: bool) -> Callable[[], object]:
    return (lambda: run.step(problem.grad)) if backward else harness.no_grad(run.forward)


def cpu_memory(backward: bool) -> float | None:
    """MiB that one pass of ggd, two heads of 64 at MEMORY_LENGTH tokens, adds on the CPU beside output and gradients. For a
    fresh process."""
    cpu = torch.device("cpu")
    ggd = next(c for c in contenders_on(cpu) if c.ours and c.method == "ggd" and c.whole)

    def call_at(length: int) -> tuple[Callable[[], object], int]:
        problem = Problem(Shape(1, 2, length, 64), torch.float32, cpu)
        # A pass with gradients returns those; its output counts as returned too.
        return pass_of(ggd.prepare(problem), problem, backward), problem.grad.nbytes if backward else 0

    call_at(1024)[0]()  # loads the libraries
    call, output = call_at(MEMORY_LENGTH)
    extra = harness.extra_bytes(call, cpu)
    return None if extra is None else (extra - output) / 2**20


def show(record: Record) -> None:
    about = record.about
    device = f"the CPU, {about['threads']} threads" if about["device"] == "cpu" else about["device"]
    title = (
        f"attention on {device}, {about['dtype']}; ratios to the fastest attention without bias; "
        f"share of a large matrix product's {about['matmul_tflops']:.2f} TFLOP/s"
    )
    columns = {
        "prior, kernel": lambda row: row["kernel"] if row["method"] == "none" else f"{row['method']}, {row['kernel']}",
        "ms": text_of("ms", ".4g"),
        "ratio": text_of("ratio", ".2f"),
        "host µs": text_of("host_us", ".0f"),
        "TFLOP/s": text_of("tflops", ".3g"),
        "share": text_of("ceiling_share", ".0%"),
        "MiB": text_of("extra_mib", ".0f"),
        "skipped": text_of("skipped", ".0%"),
    }
    record.show(title, columns, section=lambda row: f"{Shape(**row['shape'])} {row['what']}")
    for what, mib in about.get("extra_memory_mib", {}).items():
        say(f"{what} adds {mib} MiB at {MEMORY_LENGTH} tokens, two heads of 64")
