"""Attention of heads that forget, from thousands of tokens to half a million, beside attention to all keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch

from modalities.cost import Meter
from tools.benches import harness
from tools.benches.attention import Setting, admitted, correct, pass_of
from tools.benches.contenders import Contender, Problem, Shape, by_prior, flex, sdpa
from tools.benches.harness import PASSES, Record, Refused, Row, text_of
from tools.benches.screen import Option
from zoo import create_prior
from zoo.priors.base import Prior

WIDTH = 64
CHECK = 4096  # tokens at which contenders are compared with float64: the fewest of which any are left out


def halving(heads: int, *, distance: int) -> Prior:
    """GGD heads whose weight halves every `distance` tokens; never for 0."""
    prior = create_prior("ggd", num_heads=heads)
    with torch.no_grad():
        prior.theta_beta.fill_(1.0)
        prior.theta_alpha.fill_(math.log(math.log(2) / distance) if distance else -40.0)
    return prior


def contenders(distances: list[int]) -> list[Contender]:
    """Plain causal attention first; of each kind of head ours, with nothing left out and with what is negligible left out."""
    found = [Contender("none", "sdpa", sdpa), Contender("ggd", "flex", flex, backward=False)]
    for distance in distances:
        name = f"half every {distance}" if distance else "never"
        for kernel, skip in (("all keys", False), ("auto", True)):
            prepare = partial(by_prior, make=partial(halving, distance=distance), kernel="auto", skip=skip)
            found.append(Contender(name, kernel, prepare, ours=True))
    return found


@dataclass(frozen=True)
class Took:
    """A pass of one contender: seconds at a length, and whether it left most keys out."""

    length: int
    seconds: float
    forgot: bool

    def at(self, length: int) -> float:
        """Seconds expected at a greater length: as many times as many where most keys are left out, else its square."""
        return self.seconds * (length / self.length) ** (1 if self.forgot else 2)


def added_mib(distances: list[int], index: int, length: int, heads: int, backward: bool) -> float | None:
    """MiB that a pass of one contender adds. For a fresh process."""
    problem = Problem(Shape(1, heads, length, WIDTH), torch.float32, torch.device("cpu"))
    contender = contenders(distances)[index]
    short = Problem(Shape(1, heads, 256, WIDTH), torch.float32, torch.device("cpu"))
    pass_of(contender.prepare(short), short, backward)()  # loads the libraries
    call = pass_of(contender.prepare(problem), problem, backward)
    with Meter("cpu") as meter:
        kept = call()
    del kept
    return None if meter.peak_bytes is None else meter.peak_bytes / 2**20


def main(
    lengths: Annotated[str, Option(help="tokens, ascending")] = "4096,16384,65536,262144,524288",
    distances: Annotated[str, Option(help="over which a head's weight halves; 0: it never does")] = "8,64,512,0",
    without: Annotated[str, Option(help="leave out contenders whose names contain one of these")] = "",
    heads: Annotated[int, Option(help="of a call")] = 2,
    limit: Annotated[float, Option(help="seconds of a pass beyond which a contender is left out")] = 60.0,
    memory: Annotated[int, Option(help="the length at which memory is measured too; 0: none")] = 65536,
    seconds: harness.Seconds = 4.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Heads by the distance over which their weight halves, against length, on the CPU: time, and what is left out.

    One call of causal attention in float32, heads of 64, forward and with the gradients of q, k, v and the prior's table. Every
    contender is first compared with float64 at 4,096 tokens. All contenders of a length take turns; ratios are to torch's
    plain causal attention. Memory is what a pass adds at its peak, its output and gradients included, in a process of its own.
    FlexAttention reads a table of the same size, and has no backward pass on CPUs. What would take
    longer than --limit, by its time at the length before, is left out.
    """
    place, dtype = torch.device("cpu"), torch.float32
    halves = [int(word) for word in harness.words(distances)]
    known = contenders(halves)
    about = {"device": "cpu", "dtype": "float32", "heads": heads, "width": WIDTH}
    record, watch = Record(about, out=out, commit=commit, minutes=minutes), harness.by_clock(place)
    ceiling = harness.matmul_ceiling(place, dtype, watch)
    setting = Setting(record, place, dtype, watch, seconds or 4.0, ceiling)
    took: dict[tuple[Contender, str], Took] = {}

    def measure(usable: list[Contender], length: int, what: str) -> list[Row]:
        problem = Problem(Shape(1, heads, length, WIDTH), dtype, place)
        runs, calls = {}, {}
        for contender in usable:
            with record.guard(contender.name, f"{length} {what}"):
                if what != PASSES[0] and not contender.backward:
                    raise Refused("it has no backward pass here")
                before = took.get((contender, what))
                if before and before.at(length) > limit:
                    raise Refused(f"it would take about {before.at(length):.0f} s, limit {limit:.0f}")
                run = contender.prepare(problem)
                call = pass_of(run, problem, what != PASSES[0])
                call()
                runs[contender], calls[contender] = run, call
        if not calls:
            return []
        record.status.update(f"{length} {what}: timing {len(calls)} in turns")
        rounds = harness.in_turns(calls, setting.seconds * len(calls), watch)
        rows = []
        for contender in calls:
            share = runs[contender].skipped
            skipped = share() if share else None
            took[contender, what] = Took(length, rounds.ms(contender) / 1e3, (skipped or 0) > 0.5)
            mib = None
            if length == memory:
                record.status.update(f"{length} {what}: memory of {contender.name}")
                mib = harness.in_fresh_process(
                    added_mib, halves, known.index(contender), length, heads, what != PASSES[0]
                )
            rows.append({
                "length": length, "what": what, "heads": contender.method, "kernel": contender.kernel,
                "ms": rounds.ms(contender), "pairs": len(rounds.rows), "skipped": skipped, "mib": mib,
                "ratio": rounds.ratio(contender, known[0]) if known[0] in calls else None,
            })  # fmt: skip
        return rows

    with record.status:
        usable = correct(setting, admitted(setting, known, (), harness.words(without)), [Shape(1, heads, CHECK, WIDTH)])
        cells = [
            (f"{length} {what}", what, partial(measure, usable, length, what))
            for length in sorted(harness.numbers("lengths", lengths))
            for what in PASSES
        ]
        record.measure(cells)
    columns = {
        "heads": lambda row: row["kernel"] if row["heads"] == "none" else f"{row['heads']}, {row['kernel']}",
        "ms": text_of("ms", ",.1f"),
        "µs a token": lambda row: f"{1e3 * row['ms'] / row['length']:.2f}",
        "ratio to sdpa": text_of("ratio", ".2f"),
        "left out": text_of("skipped", ".0%"),
        "MiB": text_of("mib", ",.0f"),
    }
    title = f"causal attention on the CPU, {record.about['threads']} threads, {heads} heads of {WIDTH}, float32"
    record.show(title, columns, section=lambda row: f"{row['length']:,} tokens, {row['what']}")
    harness.end(record)
