"""Attention of heads that forget, from thousands of tokens to half a million, beside attention to all keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

import torch
import typer

from tools.benches import harness
from tools.benches.attention import pass_of
from tools.benches.contenders import Contender, Problem, Run, Shape, by_prior, flex, sdpa
from tools.benches.harness import PASSES, Record, Refused, Row, text_of
from zoo import create_prior
from zoo.priors.base import Prior

WIDTH = 64
PLAIN = "sdpa"


def halving(heads: int, *, distance: int) -> Prior:
    """GGD heads whose weight halves every `distance` tokens; never for 0."""
    prior = create_prior("ggd", num_heads=heads)
    with torch.no_grad():
        prior.theta_beta.fill_(1.0)
        prior.theta_alpha.fill_(math.log(math.log(2) / distance) if distance else -40.0)
    return prior


def contenders(distances: list[int]) -> dict[str, Contender]:
    """Plain causal attention first; of each kind of head ours, with nothing left out and with what is negligible left out."""
    found = {PLAIN: Contender("none", PLAIN, sdpa), "flex": Contender("ggd", "flex", flex, backward=False)}
    for distance in distances:
        name = f"half every {distance}" if distance else "never"
        for suffix, skip in ((", all keys", False), ("", True)):
            make = partial(by_prior, make=partial(halving, distance=distance), kernel="auto", skip=skip)
            found[name + suffix] = Contender("ggd", name + suffix, make, ours=True)
    return found


def main(
    lengths: Annotated[str, typer.Option(help="tokens, ascending")] = "4096,16384,65536,262144,524288",
    distances: Annotated[str, typer.Option(help="over which a head's weight halves; 0: it never does")] = "8,64,512,0",
    without: Annotated[str, typer.Option(help="leave out contenders whose names contain one of these")] = "",
    heads: Annotated[int, typer.Option(help="of a call")] = 2,
    limit: Annotated[float, typer.Option(help="seconds of a pass beyond which a contender is left out")] = 60.0,
    seconds: harness.Seconds = 4.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Heads by the distance over which their weight halves, against length, on the CPU: time, memory and what is left out.

    One call of causal attention in float32, heads of 64, forward and with the gradients of q, k, v and the prior's table. All
    contenders of a length take turns; ratios are to torch's plain causal attention. FlexAttention reads a table of the same
    size, and has no backward pass on CPUs. What would take longer than --limit, by its time at the length before, is left out.
    """
    place = torch.device("cpu")
    every = contenders([int(word) for word in harness.words(distances)])
    left_out = [name for name in every if name != PLAIN and any(part in name for part in harness.words(without))]
    known = {name: contender for name, contender in every.items() if name not in left_out}
    record = Record(
        {"device": "cpu", "dtype": "float32", "heads": heads, "width": WIDTH}, out=out, commit=commit, minutes=minutes
    )
    record.left_out |= dict.fromkeys(left_out, "left out by --without")
    last: dict[tuple[str, str], tuple[int, float]] = {}

    def measure(length: int, what: str) -> list[Row]:
        problem = Problem(Shape(1, heads, length, WIDTH), torch.float32, place)
        runs: dict[str, Run] = {}
        for name, contender in known.items():
            cell = f"{length} {what}"
            with record.guard(name, cell):
                if what != PASSES[0] and not contender.backward:
                    raise Refused("it has no backward pass here")
                if (name, what) in last:
                    before, ms = last[name, what]
                    expected = (
                        ms / 1e3 * (length / before) ** (1 if contender.ours and not name.endswith("all keys") else 2)
                    )
                    if expected > limit:
                        raise Refused(f"it would take about {expected:.0f} s, limit {limit:.0f}")
                runs[name] = contender.prepare(problem)
        return rows_of(problem, what, runs)

    def rows_of(problem: Problem, what: str, runs: Mapping[str, Run]) -> list[Row]:
        calls: dict[str, Callable[[], object]] = {
            name: pass_of(run, problem, what != PASSES[0]) for name, run in runs.items()
        }
        memory = {name: harness.extra_bytes(call, place) for name, call in calls.items()}
        record.status.update(f"{problem.shape.length} {what}: timing {len(calls)} in turns")
        rounds = harness.in_turns(calls, seconds, harness.by_clock(place))
        rows = []
        for name, run in runs.items():
            ms, extra, skipped = rounds.ms(name), memory[name], run.skipped
            last[name, what] = (problem.shape.length, ms)
            rows.append({
                "length": problem.shape.length, "what": what, "method": name, "ms": ms, "pairs": len(rounds.rows),
                "ratio": rounds.ratio(name, PLAIN) if PLAIN in runs else None,
                "extra_mib": None if extra is None else extra / 2**20,
                "skipped": skipped() if skipped else None,
            })  # fmt: skip
        return rows

    cells = [
        (f"{n} {what}", what, partial(measure, n, what))
        for n in sorted(harness.numbers("lengths", lengths))
        for what in PASSES
    ]
    with record.status:
        record.measure(cells)
    columns = {
        "heads": lambda row: row["method"],
        "ms": text_of("ms", ",.1f"),
        "µs a token": lambda row: f"{1e3 * row['ms'] / row['length']:.2f}",
        f"ratio to {PLAIN}": text_of("ratio", ".2f"),
        "MiB": text_of("extra_mib", ".0f"),
        "left out": text_of("skipped", ".0%"),
    }
    title = f"causal attention on the CPU, {record.about['threads']} threads, {heads} heads of {WIDTH}, float32"
    record.show(title, columns, section=lambda row: f"{row['length']:,} tokens, {row['what']}")
    if record.failed:
        raise typer.Exit(1)
