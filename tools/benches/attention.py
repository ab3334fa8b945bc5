"""Attention with priors beside everything else that computes attention: one table of ratios to plain attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from tools.benches import harness
from tools.benches.contenders import (
    GOAT,
    LAW,
    PAGED,
    SKIPPING,
    TABLE,
    Contender,
    Ours,
    Problem,
    Run,
    Shape,
    decoders_on,
    ours_on,
    peers_on,
    scaled_ggd,
)
from tools.benches.harness import PASSES, Cell, Column, Row, Settings, option
from tools.benches.oracle import check

DECODE_HEADS = 12
MEMORY_LENGTH = 32768
TRAINING = Shape(32, 4, 128, 32)  # a training step of the smallest language model, on the CPU
SLOW_TO_COMPILE = "flex"


@dataclass(frozen=True)
class Defaults:
    """By device; `check` is the length at which contenders are compared with float64, on CUDA long enough to skip tiles."""

    lengths: str
    quick: str
    decode: str
    quick_decode: str
    width: str
    dtype: str
    seconds: float
    heads: int
    check: int


DEFAULTS = {
    "cuda": Defaults(
        "1024,2048,4096,8192,16384,32768,65536,131072", "1024,8192", "8192,32768,131072,524288", "32768",
        "64,128", "bfloat16", 0.3, 64, 2048,
    ),
    "cpu": Defaults("1024,4096,8192,16384", "1024,2048", "", "", "64", "float32", 4.0, 2, 512),
}  # fmt: skip


@dataclass(frozen=True)
class AttentionSettings(Settings):
    quick: Annotated[bool, typer.Option("--quick", help="short lengths, few rounds")] = False
    device: Annotated[str, option("auto, cuda or cpu")] = "auto"
    lengths: Annotated[str, option("sequence lengths; default 1k to 128k on CUDA, 1k to 16k on the CPU")] = ""
    decode: Annotated[str, option("cached keys of a decoding step, or none; default 8k to 512k on CUDA")] = ""
    methods: Annotated[str, option("only these priors, beside the baseline; default all")] = ""
    heads: Annotated[int, option("batch times heads; default 64 on CUDA, 2 on the CPU")] = 0
    width: Annotated[str, option("head widths; default 64,128 on CUDA, 64 on the CPU")] = ""
    tokens: Annotated[int, option("on CUDA, the most tokens times heads of a shape")] = 2**20
    dtype: Annotated[str, option(f"{', '.join(harness.DTYPES)}; default bfloat16 on CUDA, else float32")] = ""
    clock: Annotated[str, option("on the CPU: wall, or cpu for processor time of this process")] = "wall"
    peers: Annotated[bool, option("measure other implementations too")] = True
    without: Annotated[str, option("leave out contenders whose names contain one of these")] = ""


# ------------------------------------------------------------------------------------------------------- promises


@dataclass(frozen=True)
class Promise:
    """time(ours) ≤ most · time(theirs), or time(theirs) ≥ least · time(ours), in some passes from a length on.

    theirs: a contender's key; None for the baseline.
    """

    name: str
    ours: tuple[str, str]
    theirs: tuple[str, str] | None
    what: tuple[str, ...]
    most: float | None = None
    least: float | None = None
    shortest: int = 8192

    def applies(self, shape: Shape, what: str) -> bool:
        return what in self.what and shape.length >= self.shortest


PLAIN, FLEX = "against plain attention", "faster than FlexAttention with a table"
PROMISES = (
    Promise(f"goat {PLAIN}", GOAT, None, PASSES, most=1.03),
    Promise(f"ggd, every tile, {PLAIN}", LAW, None, ("forward",), most=1.20),
    Promise(f"ggd, every tile, {PLAIN}", LAW, None, ("fwd+bwd",), most=1.30),
    Promise(f"ggd with a learned table {PLAIN}", TABLE, None, ("forward",), most=1.20),
    Promise(f"ggd with a learned table {PLAIN}", TABLE, None, ("fwd+bwd",), most=1.30),
    Promise(f"ggd {FLEX}", TABLE, ("ggd", "flex table"), ("forward",), least=1.5),
    Promise(f"ggd {FLEX}", TABLE, ("ggd", "flex table"), ("fwd+bwd",), least=3.0),
    Promise(
        "paged cache faster than dense, 3 of 12 heads retrieve", PAGED, LAW, ("decode",), least=2.5, shortest=524288
    ),
    Promise("skipping faster than every tile, ALiBi-like", SKIPPING, LAW, PASSES, least=6.0, shortest=65536),
)


def cpu_target(shape: Shape, method: str, what: str) -> float | None:
    """The most a ratio may be on the CPU; None where nothing is promised."""
    if shape.length < 1024 or what == "decode":
        return None
    if method == "goat":
        return 1.10
    if method == "ggd":
        return 2.0 if what == "fwd+bwd" else 1.35 if shape.length >= 8192 else None
    return None


def judge_memory(findings: harness.Findings) -> None:
    """Memory O(L): what a pass adds per token and head at the longest length, by the same at 8k or the next above."""
    found: dict[tuple[str, str, str, int], list[tuple[Shape, float]]] = {}
    for r in findings.results:
        shape = Shape(**r["shape"])
        if (r["method"], r["kernel"]) in (LAW, TABLE, SKIPPING) and shape.length >= 8192 and r["extra_mib"] is not None:
            each = r["extra_mib"] / (shape.batch * shape.heads * shape.length)
            found.setdefault((r["method"], r["kernel"], r["what"], shape.width), []).append((shape, each))
    for (method, kernel, what, _), rows in found.items():
        (first, least), (last, most) = (choose(rows, key=lambda row: row[0].length) for choose in (min, max))
        if first != last:
            growth = most / max(least, 1e-12)
            name = f"memory per token and head of {method}, {kernel}, by that at {first.length}"
            findings.judge(f"{name}, {last} {what}", growth, "≤ 1.25×", growth <= 1.25)


# ------------------------------------------------------------------------------------------------------ benchmark


def label(contender: Contender) -> str:
    return f"ours: {contender.name}" if contender.ours else contender.name


def cpu_memory(method: str, backward: bool) -> float | None:
    """MiB that one pass at 32k tokens, two heads of 64, adds on the CPU beside output and gradients. For a fresh process."""
    contender = next(c for c in ours_on(torch.device("cpu")) if c.method == method)

    def call_at(length: int) -> tuple[Callable[[], object], int]:
        problem = Problem(Shape(1, 2, length, 64), torch.float32)
        # A pass with gradients returns those; its output counts as returned too.
        return pass_of(contender.prepare(problem), problem.grad, backward), problem.grad.nbytes if backward else 0

    call_at(1024)[0]()  # loads the libraries
    call, output = call_at(MEMORY_LENGTH)
    extra = harness.extra_bytes(call, "cpu")
    return None if extra is None else (extra - output) / 2**20


def pass_of(run: Run, grad: Tensor, backward: bool) -> Callable[[], object]:
    return (lambda: run.step(grad)) if backward else harness.no_grad(run.forward)


class Attention(harness.Benchmark):
    """Attention with priors beside other implementations, as ratios to plain attention.

    The baseline is torch's own attention without bias: its flash kernel on CUDA, its plain causal call on the CPU. Every
    contender is first compared with float64 at a short length, outputs and gradients; one that is wrong is not timed. On CUDA
    times are of device events, with the second-level cache flushed before each. TFLOP/s count the visible pairs, so a kernel
    that skips tiles may pass the ceiling, a large matrix product of the same run. Memory is what a pass adds at its peak, less
    what it returns. Whatever cannot be measured stands below the table with its reason.
    """

    Settings = AttentionSettings
    chooses = ("lengths", "decode")
    promises: Sequence[Promise] = PROMISES

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        self.device = harness.device_of(settings.device)
        self.on_cuda = self.device.type == "cuda"
        d = self.defaults = DEFAULTS[self.device.type]
        self.dtype_name = harness.one_of("dtype", settings.dtype or d.dtype, harness.DTYPES)
        self.dtype = harness.DTYPES[self.dtype_name]
        self.stopwatch = harness.by_events(self.device) if self.on_cuda else harness.by_clock(settings.clock)
        self.seconds = settings.seconds or (min(d.seconds, 1.0) if settings.quick else d.seconds)
        self.ceiling: float | None = None
        self.baseline, *self.peers = peers_on(self.device)
        widths = harness.numbers("width", settings.width or d.width)
        lengths = harness.numbers("lengths", settings.lengths or (d.quick if settings.quick else d.lengths))
        decode = settings.decode or (d.quick_decode if settings.quick else d.decode)
        self.shapes = self._shapes(lengths, widths)
        cached = harness.numbers("decode", "" if decode == "none" else decode)
        self.steps = [Shape(1, DECODE_HEADS, keys, width, queries=1) for keys in cached for width in widths]

    def _shapes(self, lengths: list[int], widths: list[int]) -> list[Shape]:
        """`heads` = B·H of each length and width; on CUDA fewer where B·H·L would pass `tokens`, and at most 16 to a batch."""
        rows = self.settings.heads or self.defaults.heads
        if not self.on_cuda:
            return [Shape(1, rows, length, width) for length in lengths for width in widths]
        found = []
        for length in lengths:
            count = max(1, min(rows, self.settings.tokens // length))
            heads = max(h for h in range(1, min(16, count) + 1) if count % h == 0)
            found += [Shape(count // heads, heads, length, width) for width in widths]
        return found

    def about(self) -> Row:
        self.ceiling = harness.matmul_ceiling(self.device, self.dtype, self.stopwatch)
        return {
            "device": torch.cuda.get_device_name(self.device) if self.on_cuda else "cpu", "cuda": torch.version.cuda,
            "dtype": self.dtype_name, "clock": "device" if self.on_cuda else self.settings.clock,
            "baseline": self.baseline.kernel, "matmul_tflops": self.ceiling,
        }  # fmt: skip

    # ---- before the clock runs

    def cells(self) -> list[Cell]:
        """Decoding steps, whole sequences, and on the CPU a training shape; each with the contenders that are correct."""
        short = self.defaults.check
        whole = self.usable([self.baseline, *ours_on(self.device), *self.peers])
        steps = [c for c in self.usable([self.baseline, *decoders_on(self.device), *self.peers]) if c.decodes]
        whole = self.correct(whole, [Shape(2, 4, short, width) for width in widths_of(self.shapes)])
        steps = self.correct(steps, [Shape(1, DECODE_HEADS, short, w, queries=1) for w in widths_of(self.steps)])
        work = [("decode", self.steps, steps), ("attention", self.shapes, whole)]
        if not self.on_cuda:
            scaled = self.correct(self.usable([scaled_ggd()]), [Shape(2, 4, short, TRAINING.width)])
            work.append(("training", [TRAINING], [*whole, *scaled]))
        return [
            Cell(str(shape), kind, (shape, contenders))
            for kind, shapes, contenders in work
            if contenders and contenders[0].key == self.baseline.key
            for shape in sorted(shapes, key=lambda s: (s.length, s.width))
        ]

    def usable(self, contenders: Iterable[Contender]) -> list[Contender]:
        """Those that options and this machine admit; the reason is noted for the others."""
        found = []
        for contender in contenders:
            reason = None if contender.key == self.baseline.key else self.left_out(contender)
            reason = reason or contender.available(self.device)
            if reason is None:
                found.append(contender)
            else:
                self.findings.left_out[label(contender)] = reason
        return found

    def left_out(self, contender: Contender) -> str | None:
        """The option that leaves a contender out."""
        settings = self.settings
        if not contender.ours and not settings.peers:
            return "left out by --no-peers"
        if settings.methods and contender.method not in harness.words(settings.methods):
            return "left out by --methods"
        if any(part in contender.name for part in harness.words(settings.without)):
            return "left out by --without"
        if settings.quick and SLOW_TO_COMPILE in contender.name:
            return "left out by --quick: it compiles for seconds at every shape"
        return None

    def correct(self, contenders: Iterable[Contender], shapes: Sequence[Shape]) -> list[Contender]:
        """Those that agree with float64 at short shapes; the others are noted and never timed."""
        found = []
        for contender in contenders:
            verdicts = [self.check(contender, shape) for shape in shapes]
            name = label(contender)
            if any(verdicts) and name not in self.findings.wrong and name not in self.findings.failed:
                found.append(contender)
        return found

    def check(self, contender: Contender, shape: Shape) -> bool:
        """Whether it agrees with float64 at a shape; an error, a refusal and a wrong result are noted."""
        self.report(f"checking {contender.name}")
        problem, name, verdict = Problem(shape, self.dtype, self.device), label(contender), None
        with self.findings.guard(name, str(shape)):
            reason = contender.refuses(problem)
            if reason is None:
                verdict = check(contender, problem, backward=not shape.queries)
            else:
                self.findings.skip(name, str(shape), reason)
        harness.free(self.device)
        if verdict is None:
            return False
        self.findings.checks[f"{name} at {shape}"] = asdict(verdict) | {"correct": verdict.correct}
        if not verdict.correct:
            note = f"{verdict.worst} is off by {verdict.error:.2g}, allowed {verdict.bound:.2g} ({shape})"
            self.findings.wrong[name] = note
        return verdict.correct

    # ---- a shape

    def measure(self, cell: Cell) -> list[Row]:
        """All passes of all contenders at one shape, in turns."""
        shape, contenders = cell.value
        problem, runs = Problem(shape, self.dtype, self.device), dict[tuple[str, str], tuple[Contender, Run]]()
        for contender in contenders:
            with self.findings.guard(label(contender), cell.name):
                reason = contender.refuses(problem)
                if reason is None:
                    runs[contender.key] = (contender, contender.prepare(problem))
                else:
                    self.findings.skip(label(contender), cell.name, reason)
        passes = ("decode",) if shape.queries else PASSES
        found = [row for what in passes for row in self.one_pass(problem, what, runs)]
        del runs
        harness.free(self.device)
        return found

    def one_pass(self, problem: Problem, what: str, runs: dict[tuple[str, str], tuple[Contender, Run]]) -> list[Row]:
        shape, backward = problem.shape, what == "fwd+bwd"
        ready, extra = dict[tuple[str, str], Callable[[], object]](), dict[tuple[str, str], int | None]()
        for key, (contender, run) in runs.items():
            if backward and not contender.backward:
                self.findings.skip(label(contender), what, "it has no backward pass here")
                continue
            with self.findings.guard(label(contender), f"{shape} {what}"):
                self.report(f"{shape} {what}: {contender.name}")
                call = pass_of(run, problem.grad, backward)
                call()  # compiles it, before memory is looked at
                # Memory of the CPU is that of the process: exact in a fresh one only, see `finish`.
                extra[key] = harness.extra_bytes(call, self.device) if self.on_cuda else None
                ready[key] = call
        if self.baseline.key not in ready:
            return []
        self.report(f"{shape} {what}: timing {len(ready)} in turns")
        try:
            rounds = harness.in_turns(ready, self.seconds * len(ready), self.stopwatch)
        except torch.OutOfMemoryError:
            self.findings.dropped.append(f"{shape} {what} (out of memory, though each ran alone)")
            return []
        self.judge(shape, what, rounds)
        return [self.row(problem, what, *runs[key], rounds, extra[key]) for key in ready]

    def row(
        self, problem: Problem, what: str, contender: Contender, run: Run, rounds: harness.Rounds, extra: int | None
    ) -> Row:
        shape, ms = problem.shape, rounds.ms(contender.key)
        rate = shape.flops(what == "fwd+bwd") / ms / 1e9
        return {
            "shape": asdict(shape), "method": contender.method,
            "kernel": contender.chosen(problem) if isinstance(contender, Ours) else contender.kernel, "what": what,
            "plain_ms": rounds.ms(self.baseline.key), "ms": ms,
            "ratio": rounds.ratio(contender.key, self.baseline.key), "target": self.target(contender, shape, what),
            "pairs": len(rounds), "tflops": rate, "ceiling_share": rate / self.ceiling if self.ceiling else None,
            "extra_mib": None if extra is None else extra / 2**20, "skipped": run.skipped() if run.skipped else None,
        }  # fmt: skip

    def target(self, contender: Contender, shape: Shape, what: str) -> float | None:
        """The most its ratio to the baseline may be."""
        if not self.on_cuda:
            return cpu_target(shape, contender.method, what) if contender.ours else None
        own = (p for p in self.promises if p.theirs is None and p.ours == contender.key)
        return next((p.most for p in own if p.applies(shape, what)), None)

    def judge(self, shape: Shape, what: str, rounds: harness.Rounds) -> None:
        measured = rounds.rows[0].keys()
        for promise in self.promises if self.on_cuda else ():
            theirs = promise.theirs or self.baseline.key
            if not promise.applies(shape, what) or promise.ours not in measured or theirs not in measured:
                continue
            ratio = rounds.ratio(promise.ours, theirs)
            if promise.most is not None:
                found = (ratio, f"≤ {promise.most:.2f}×", ratio <= promise.most)
            else:
                assert promise.least is not None
                found = (1 / ratio, f"≥ {promise.least:.1f}×", 1 / ratio >= promise.least)
            self.findings.judge(f"{promise.name}, {shape} {what}", *found)

    # ---- all shapes

    def finish(self) -> None:
        if self.on_cuda:
            judge_memory(self.findings)
        elif not self.settings.quick:
            for what in PASSES:
                extra = harness.in_fresh_process(cpu_memory, "ggd", what == "fwd+bwd")
                if extra is not None:
                    name = f"MiB that ggd adds, two heads of 64 and {MEMORY_LENGTH} tokens, {what}"
                    self.findings.judge(name, extra, "< 200", extra < 200)
        names = [name.partition(" at ")[0] for name, c in self.findings.checks.items() if c["deterministic"] is False]
        if names:
            self.findings.notes.append(f"gradients differ from run to run: {', '.join(dict.fromkeys(names))}")

    def failed(self) -> bool:
        return any(name.startswith("ours: ") for name in (*self.findings.wrong, *self.findings.failed))

    def title(self, record: Row) -> str:
        name = record["device"] if self.on_cuda else f"the CPU, {record['threads']} threads"
        return (
            f"attention on {name}, {record['dtype']}; ratios to {record['baseline']} without bias; "
            f"share of a large matrix product's {record['matmul_tflops']:.2f} TFLOP/s"
        )

    def section(self, row: Row) -> str:
        return f"{Shape(**row['shape'])} {row['what']}"

    def columns(self) -> list[Column]:
        def name(row: Row) -> str:
            return row["kernel"] if row["method"] == "none" else f"{row['method']}, {row['kernel']}"

        def ratio(row: Row) -> str:
            text, target = f"{row['ratio']:.2f}", row["target"]
            return text if target is None else f"[{'green' if row['ratio'] <= target else 'red'}]{text}[/]"

        return [
            Column("prior, kernel", name),
            Column("ms", harness.text_of("ms", ".4g")),
            Column("ratio", ratio),
            Column("target", harness.text_of("target", ".2f")),
            Column("TFLOP/s", harness.text_of("tflops", ".3g")),
            Column("share", harness.text_of("ceiling_share", ".0%")),
            Column("MiB", harness.text_of("extra_mib", ".0f")),
            Column("skipped", harness.text_of("skipped", ".0%")),
        ]


def widths_of(shapes: list[Shape]) -> list[int]:
    return sorted({shape.width for shape in shapes})
