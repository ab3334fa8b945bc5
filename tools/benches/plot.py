"""A figure of an attention record: ratios or rates against length, a line for each contender.

A row of panels for each head width: forward, forward and backward, and decoding where it was measured. Ours are in strong
colours and thick lines, the others muted and thin with hollow markers; dashes and markers tell kernels of one prior apart.
Shapes that no other length shares head width and pass with (a training step's) are left to the table.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from modalities.figures import DASHES, STYLES, panels
from modalities.results import compact
from tools.benches.harness import one_of
from zoo.prior_plot import save_figure

TITLES = {"forward": "forward", "fwd+bwd": "forward and backward", "decode": "one token against a cache"}
SHOWN = {
    "ratio": ("ratio", "time / that of {baseline} without bias"),
    "tflops": ("tflops", "TFLOP/s of the visible pairs"),
    "memory": ("extra_mib", "MiB added at the peak"),
}
COLOURS = {"none": "#000000", "goat": "#E69F00", "ggd": "#0072B2", "alibi": "#117733", "cable": "#44AA99"}
MARKERS = "osD^v>P<X*"
OUR_KERNELS = ("triton", "toeplitz", "flash", "sdpa", "gathered")
PEERS = ("sdpa dense bias", "flash-attn", "sdpa flash", "sdpa cudnn")


def is_ours(method: str, kernel: str) -> bool:
    """Peers have kernels of their own name; a prior by a plain kernel is ours."""
    return method != "none" and kernel not in PEERS and kernel.split()[0] in OUR_KERNELS


def series_of(
    record: dict[str, Any], column: str
) -> dict[tuple[int, str], dict[tuple[str, str], list[tuple[int, float]]]]:
    """(head width, pass) → (prior, kernel) → [(length, value)], where there are two lengths or more."""
    rows = [r for r in record["results"] if r.get(column) is not None]
    lengths: dict[tuple[int, str], set[int]] = {}
    for r in rows:
        lengths.setdefault((r["shape"]["width"], r["what"]), set()).add(r["shape"]["length"])
    found: dict[tuple[int, str], dict[tuple[str, str], list[tuple[int, float]]]] = {}
    for r in rows:
        panel = (r["shape"]["width"], r["what"])
        if len(lengths[panel]) > 1:
            line = found.setdefault(panel, {}).setdefault((r["method"], r["kernel"]), [])
            line.append((r["shape"]["length"], r[column]))
    return found


def style_of(key: tuple[str, str], again: int) -> dict[str, Any]:
    """The line of the `again`-th kernel of a prior."""
    method, kernel = key
    ours = is_ours(method, kernel)
    base = method.partition("+")[0]
    colour = COLOURS.get(base) or STYLES.get(base, ("#777777", "o"))[0]
    return {
        "color": colour, "marker": MARKERS[again % len(MARKERS)], "markerfacecolor": colour if ours else "white",
        "linestyle": "-" if ours and again == 0 else DASHES[again % len(DASHES)], "linewidth": 2.4 if ours else 1.2,
        "markersize": 6.5 if ours else 5.0, "alpha": 1.0 if ours else 0.8, "zorder": 4 if ours else 3,
        "label": kernel if method == "none" else f"{method}, {kernel}",
    }  # fmt: skip


def styles_of(keys: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """One style for each contender in every panel; kernels of one prior are numbered, ours first."""
    styles = {}
    counters: dict[str, count] = {}
    for key in sorted(keys, key=lambda k: not is_ours(*k)):
        styles[key] = style_of(key, next(counters.setdefault(key[0], count())))
    return styles


def draw(record: dict[str, Any], path: Path, shown: str = "ratio") -> None:
    """One PNG. ValueError where the record holds no contender at two lengths."""
    column, ylabel = SHOWN[shown]
    found = series_of(record, column)
    if not found:
        raise ValueError(f"nothing to draw: no {column} at two lengths or more")
    baseline = record.get("baseline", "plain attention")
    widths = sorted({width for width, _ in found})
    passes = [what for what in TITLES if any(what == w for _, w in found)]
    keys = list(dict.fromkeys(key for lines in found.values() for key in lines))
    if column == "ratio":
        keys = [key for key in keys if key != ("none", baseline)]  # the line at 1
    styles = styles_of(keys)
    figure, axes = panels(len(widths), len(passes), width=4.7, height=3.9)
    for n, width in enumerate(widths):
        for axis, what in zip(axes[n * len(passes) :], passes, strict=False):
            lines = found.get((width, what), {})
            axis.set_visible(bool(lines))
            panel(axis, {key: lines[key] for key in keys if key in lines}, styles, column)
            axis.set_title(TITLES[what] + (f", D = {width}" if len(widths) > 1 else ""), fontsize=10.5)
            axis.set_ylabel(ylabel.format(baseline=baseline) if what == passes[0] else "")
    drawn = dict(pair for axis in axes for pair in zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    order = [style["label"] for style in styles.values() if style["label"] in drawn]
    figure.legend(
        [drawn[name] for name in order],
        order,
        loc="outside right center",
        fontsize=8.5,
        frameon=False,
        handlelength=3.2,
    )
    device = record.get("device", "cpu")
    threads = f"{record['threads']} thread{'s' * (record['threads'] > 1)}"
    where = f"the CPU, {threads}" if device == "cpu" else device
    figure.suptitle(f"attention on {where}, {record['dtype']}, causal; torch {record['torch']}", fontsize=10)
    save_figure(figure, path)


def panel(axis, lines: dict[tuple[str, str], list[tuple[int, float]]], styles, column: str) -> None:
    lengths = sorted({length for line in lines.values() for length, _ in line})
    for key, line in lines.items():
        axis.plot(*zip(*sorted(line), strict=True), **styles[key])
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [compact(length) for length in lengths])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("length (tokens, log₂)")
    axis.grid(alpha=0.25, linewidth=0.6)
    values = [value for line in lines.values() for _, value in line if value > 0]
    if column == "ratio":
        axis.axhline(1.0, color="0.2", linewidth=1.2, zorder=2)
    if values and max(values) > 4 * min(values):
        from matplotlib.ticker import LogLocator

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(LogLocator(subs=()))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    elif values:
        axis.set_ylim(bottom=0, top=1.08 * max(*values, 1.0 if column == "ratio" else 0.0))


def main(
    source: Annotated[Path, typer.Argument(help="JSON of `bench.py attention`")],
    out: Annotated[Path | None, typer.Option(help="PNG; beside the JSON by default")] = None,
    show: Annotated[str, typer.Option(help=", ".join(SHOWN))] = "ratio",
) -> None:
    """Draw an attention record; the PNG is written beside it."""
    one_of("show", show, SHOWN)
    try:
        record = json.loads(source.read_text())
        path = out or source.with_name(source.stem + ("" if show == "ratio" else f"_{show}") + ".png")
        draw(record, path, show)
    except (OSError, json.JSONDecodeError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"{source}: {error}") from None
    print(f"written to {path}")
