"""Contenders checked and timed in turns, shape by shape; what is promised of their ratios; and the table of it all."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from modalities.cost import Meter
from tools.benches.kit import Budget, Result, Shape, in_turns, median_ratio, no_grad
from tools.benches.problem import Contender, Ours, Problem, Run, Verdict, check

PASSES = ("forward", "fwd+bwd")
# On CUDA long enough for tiles to be skipped; on the CPU the oracle's float64 matrix decides.
CHECK_LENGTH = {"cuda": 2048, "cpu": 512}


@dataclass(frozen=True)
class Promise:
    """time(ours) ≤ most · time(theirs), or for a speed-up time(theirs) ≥ least · time(ours), at some lengths.

    Attributes:
        name: what is said of it. ours, theirs: keys of contenders; theirs None is the baseline.
        what: passes it holds for. most, least: one of the two.
        shortest: the shortest length it is about.
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


@dataclass(frozen=True)
class Judgement:
    """A promise at one shape: `value` is the ratio of times or the speed-up it speaks of."""

    name: str
    shape: Shape
    what: str
    value: float
    bound: str
    met: bool


@dataclass
class Findings:
    """All that a sweep found.

    Attributes:
        left_out: contender → why it was not measured at all.
        skipped: contender → shapes it was not measured at, with the reason.
        wrong: contender → what it got wrong at the short check; it was not timed.
        failed: contender → the error it ended with. dropped: shapes for which the time was too short.
    """

    results: list[Result] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    checks: dict[str, dict[str, object]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    @property
    def ours_fail(self) -> bool:
        """Whether one of our own was wrong or broke down."""
        return any(name.startswith("ours: ") for name in (*self.wrong, *self.failed))


def label(contender: Contender) -> str:
    return f"ours: {contender.name}" if contender.ours else contender.name


class Sweep:
    """Measures contenders against the first of them, the baseline.

    Args:
        device, dtype: where and in what.
        stopwatch: milliseconds of a run. seconds: of rounds for each ratio.
        promises: judged where both of their contenders ran.
        ceiling: TFLOP/s of the run's matmul.
        report: called with a line of progress. saved: called after each shape, so that a run cut short leaves what it found.
        meter: whether peak memory is measured; on the CPU it is not exact enough inside one process.
        target: the most a ratio may be, by shape, method and pass; for results of ours.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        stopwatch: Callable[[Callable[[], object]], float],
        seconds: float,
        *,
        promises: Sequence[Promise] = (),
        ceiling: float | None = None,
        report: Callable[[str], None] = lambda line: None,
        saved: Callable[[], None] = lambda: None,
        meter: bool = True,
        target: Callable[[Shape, str, str], float | None] = lambda shape, method, what: None,
    ) -> None:
        self.device, self.dtype, self.stopwatch, self.seconds = device, dtype, stopwatch, seconds
        self.promises, self.ceiling, self.meter, self.target = promises, ceiling, meter, target
        self.report, self.saved = report, saved
        self.findings = Findings()

    # ---- before the clock runs

    def able(self, contenders: Iterable[Contender]) -> list[Contender]:
        """Those that can run here; the others are noted."""
        found = []
        for contender in contenders:
            reason = contender.available(self.device)
            if reason is None:
                found.append(contender)
            else:
                self.findings.left_out[label(contender)] = reason
        return found

    def right(self, contenders: Iterable[Contender], shapes: Sequence[Shape]) -> list[Contender]:
        """Those whose output and gradients are right at short shapes; the others are noted and never timed."""
        found = []
        for contender in contenders:
            verdicts = [self.verdict(contender, shape) for shape in shapes]
            if any(v is not None and v.right for v in verdicts) and label(contender) not in self.findings.wrong:
                found.append(contender)
        return [c for c in found if label(c) not in self.findings.failed]

    def verdict(self, contender: Contender, shape: Shape) -> Verdict | None:
        """How it did at a shape; None where it could not serve it or broke down, which is noted."""
        self.report(f"checking {contender.name}")
        problem, name, verdict = Problem(shape, self.dtype, self.device), label(contender), None
        with self.surviving(contender, shape):
            reason = contender.refuses(problem)
            if reason is None:
                verdict = check(contender, problem, backward=not shape.queries)
            else:
                self.findings.skipped.setdefault(name, {})[str(shape)] = reason
        if verdict is None:
            return None
        self.findings.checks[f"{name} at {shape}"] = asdict(verdict) | {"right": verdict.right}
        if not verdict.right:
            note = f"{verdict.worst} is off by {verdict.error:.2g}, allowed {verdict.bound:.2g} ({shape})"
            self.findings.wrong[name] = note
        return verdict

    @contextlib.contextmanager
    def surviving(self, contender: Contender, shape: Shape) -> Iterator[None]:
        """A contender that raises is noted; the run goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.findings.skipped.setdefault(label(contender), {})[str(shape)] = "out of memory"
        except Exception as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            self.findings.failed[label(contender)] = f"{shape}: {type(error).__name__}: {first[:200]}"
        finally:
            self.free()

    def free(self) -> None:
        """Give memory back to the GPU, that of reference cycles too."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    # ---- a shape

    def measure(self, shape: Shape, contenders: Sequence[Contender]) -> list[Result]:
        """All passes of all contenders at one shape, in turns. The baseline is the first contender."""
        problem, runs = Problem(shape, self.dtype, self.device), dict[tuple[str, str], tuple[Contender, Run]]()
        for contender in contenders:
            with self.surviving(contender, shape):
                reason = contender.refuses(problem)
                if reason is None:
                    runs[contender.key] = (contender, contender.prepare(problem))
                else:
                    self.findings.skipped.setdefault(label(contender), {})[str(shape)] = reason
        found: list[Result] = []
        for what in ("decode",) if shape.queries else PASSES:
            found += self.one_pass(problem, what, runs, contenders[0])
        del runs
        self.free()
        self.findings.results += found
        return found

    def one_pass(
        self, problem: Problem, what: str, runs: dict[tuple[str, str], tuple[Contender, Run]], baseline: Contender
    ) -> list[Result]:
        shape, ready, extra = problem.shape, dict[tuple[str, str], Callable[[], object]](), {}
        for key, (contender, run) in runs.items():
            if what == "fwd+bwd" and not contender.backward:
                self.findings.skipped.setdefault(label(contender), {})[what] = "it has no backward pass here"
                continue
            with self.surviving(contender, shape):
                self.report(f"{shape} {what}: {contender.name}")
                call = (lambda run=run: run.step(problem.grad)) if what == "fwd+bwd" else no_grad(run.forward)
                call()  # compiled and warm before memory is looked at
                extra[key] = self.extra_mib(call)
                ready[key] = call
        if baseline.key not in ready:
            return []
        keys = [baseline.key, *(key for key in ready if key != baseline.key)]
        self.report(f"{shape} {what}: timing {len(keys)} in turns")
        try:
            rounds = in_turns([ready[key] for key in keys], self.seconds * len(keys), self.stopwatch)
        except torch.OutOfMemoryError:
            self.findings.dropped.append(f"{shape} {what} (out of memory, though each had run alone)")
            return []
        found = []
        for n, key in enumerate(keys):
            contender, run = runs[key]
            ms = statistics.median(row[n] for row in rounds)
            rate = shape.flops(what == "fwd+bwd") / ms / 1e9
            kernel = contender.chosen(problem) if isinstance(contender, Ours) else contender.kernel
            found.append(
                Result(
                    shape, contender.method, kernel, what, statistics.median(row[0] for row in rounds), ms,
                    median_ratio(rounds, n, 0), self.bound(contender, shape, what), len(rounds), rate,
                    rate / self.ceiling if self.ceiling else None, extra[key], run.skipped() if run.skipped else None,
                )
            )  # fmt: skip
        self.judge(shape, what, keys, rounds)
        return found

    def extra_mib(self, call: Callable[[], object]) -> float | None:
        """Peak memory a pass adds, less what it returns."""
        if not self.meter:
            return None
        kept: list[object] = []
        with Meter(self.device) as meter:
            kept.append(call())
        if meter.peak_bytes is None:
            return None
        returned = kept[0] if isinstance(kept[0], tuple) else kept
        size = sum(x.numel() * x.element_size() for x in returned if isinstance(x, torch.Tensor))
        return (meter.peak_bytes - size) / 2**20

    def bound(self, contender: Contender, shape: Shape, what: str) -> float | None:
        """The most its ratio to the baseline may be."""
        most = [
            p.most for p in self.promises if p.theirs is None and p.ours == contender.key and p.applies(shape, what)
        ]
        if most:
            return most[0]
        return self.target(shape, contender.method, what) if contender.ours else None

    def judge(self, shape: Shape, what: str, keys: list[tuple[str, str]], rounds: list[list[float]]) -> None:
        for promise in self.promises:
            theirs = promise.theirs or keys[0]
            if not promise.applies(shape, what) or promise.ours not in keys or theirs not in keys:
                continue
            ratio = median_ratio(rounds, keys.index(promise.ours), keys.index(theirs))
            if promise.most is not None:
                entry = (ratio, f"≤ {promise.most:.2f}×", ratio <= promise.most)
            else:
                assert promise.least is not None
                entry = (1 / ratio, f"≥ {promise.least:.1f}×", 1 / ratio >= promise.least)
            self.findings.judgements.append(Judgement(promise.name, shape, what, *entry))

    # ---- all shapes

    def run(
        self, shapes: Sequence[Shape], contenders: Sequence[Contender], budget: Budget, progress: Progress, title: str
    ) -> None:
        """Every shape from the shortest, as long as the budget lasts; those it does not reach are noted as dropped."""
        shapes = sorted(shapes, key=lambda s: (s.length, s.width))
        task = progress.add_task(title, total=len(shapes))
        for n, shape in enumerate(shapes):
            if not budget.allows(title):
                self.findings.dropped += [f"{left} (out of time)" for left in shapes[n:]]
                self.report(f"out of time: {len(shapes) - n} {title} shapes dropped from {shape} on")
                break
            self.measure(shape, contenders)
            self.saved()
            progress.advance(task)
        budget.done()


# ---------------------------------------------------------------------------------------------------------- tables


def show(findings: Findings, title: str, console: Console) -> None:
    """The results, the promises, and a footnote for whatever is missing."""
    rows = findings.results
    optional = {"TFLOP/s": "tflops", "share": "ceiling_share", "MiB": "extra_mib", "skipped": "skipped"}
    extra = [name for name, attribute in optional.items() if any(getattr(r, attribute) is not None for r in rows)]
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("prior, kernel", no_wrap=True)
    for column in ("ms", "ratio", "target", *extra):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for r in rows:
        if (r.shape, r.what) != last:
            if last is not None:
                table.add_section()
            table.add_row(f"[bold]{r.shape} {r.what}[/]")
            last = (r.shape, r.what)
        cells = {"TFLOP/s": _rate(r.tflops), "share": _number(r.ceiling_share, ".0%"),
                 "MiB": _number(r.extra_mib, ".0f"), "skipped": _number(r.skipped, ".0%")}  # fmt: skip
        good = None if r.target is None else r.ratio <= r.target
        goal = "" if r.target is None else f"≤ {r.target:.2f}"
        name = r.kernel if r.method == "none" else f"{r.method}, {r.kernel}"
        more = (cells[name] for name in extra)
        table.add_row(f"  {name}", _ms(r.ms), _coloured(f"{r.ratio:.2f}", good), goal, *more)
    console.print(table)
    for j in findings.judgements:
        met = _coloured(f"{j.value:.2f}×", j.met)
        console.print(f"{escape(j.name)}, {j.shape} {j.what}: {met} (target {j.bound})", highlight=False)
    for line in footnotes(findings):
        console.print(escape(line), highlight=False)


def footnotes(findings: Findings) -> list[str]:
    """A line for each contender that is missing somewhere, with the reason, and for shapes the time was too short for."""
    lines = [f"WRONG, not timed: {name}: {note}" for name, note in findings.wrong.items()]
    lines += [f"failed: {name}: {note}" for name, note in findings.failed.items()]
    lines += [f"not measured: {name}: {reason}" for name, reason in findings.left_out.items()]
    for name, places in findings.skipped.items():
        for reason in dict.fromkeys(places.values()):
            at = ", ".join(shape for shape, why in places.items() if why == reason)
            lines.append(f"not measured: {name} at {at}: {reason}")
    if findings.dropped:
        lines.append(f"dropped: {', '.join(findings.dropped)}")
    unsteady = [name.partition(" at ")[0] for name, entry in findings.checks.items() if entry["deterministic"] is False]
    if unsteady := list(dict.fromkeys(unsteady)):
        lines.append(f"gradients differ from run to run: {', '.join(unsteady)}")
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _rate(value: float | None) -> str:
    return _number(value, ".0f" if (value or 0) >= 10 else ".3f")


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _coloured(text: str, good: bool | None) -> str:
    return text if good is None else f"[{'green' if good else 'red'}]{text}[/]"
