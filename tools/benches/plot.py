"""A figure of an attention record: ratios against length, a line for each contender.

A row of panels for each head width: forward, forward and backward, and decoding where it was measured. Ours are solid and
thick with filled markers, the others thin and hollow. Passes measured at one length only are left to the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from modalities.figures import DASHES, STYLES, log_if_wide, panels
from modalities.results import compact
from zoo.prior_plot import save_figure

TITLES = {"forward": "forward", "fwd+bwd": "forward and backward", "decode": "one token against a cache"}
PEERS = ("sdpa dense", "flex", "flash-attn", "goat-attention", "fla ")  # how their kernels' names begin


def styles_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(prior, kernel) → line style: colour by prior, dashes and markers by kernel."""
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    for method, kernel in dict.fromkeys((r["method"], r["kernel"]) for r in rows):
        again = sum(other == method for other, _ in styles)
        ours = method != "none" and not kernel.startswith(PEERS)
        colour = STYLES.get(method, ("black", "o"))[0]
        styles[method, kernel] = {
            "color": colour, "marker": "osD^v>P<X*"[again % 10], "linestyle": DASHES[again % len(DASHES)],
            "markerfacecolor": colour if ours else "white", "linewidth": 2.4 if ours else 1.2,
            "label": kernel if method == "none" else f"{method}, {kernel}",
        }  # fmt: skip
    return styles


def draw(record: dict[str, Any], path: Path) -> None:
    """One PNG. ValueError where the record holds no pass at two lengths."""
    rows = record["results"]
    plain = {r["kernel"] for r in rows if r["method"] == "none"}
    rows = [r for r in rows if r["method"] != "none" or len(plain) > 1]  # alone it is the line at 1
    lengths: dict[tuple[int, str], set[int]] = {}
    for r in rows:
        lengths.setdefault((r["shape"]["width"], r["what"]), set()).add(r["shape"]["length"])
    rows = [r for r in rows if len(lengths[r["shape"]["width"], r["what"]]) > 1]
    if not rows:
        raise ValueError("nothing to draw: no ratio at two lengths or more")
    widths = sorted({r["shape"]["width"] for r in rows})
    passes = [what for what in TITLES if any(what == r["what"] for r in rows)]
    figure, axes = panels(len(widths), len(passes), width=4.7, height=3.9)
    labelled = {}
    for axis, (width, what) in zip(axes, [(width, what) for width in widths for what in passes], strict=True):
        mine = [r for r in rows if (r["shape"]["width"], r["what"]) == (width, what)]
        axis.set_visible(bool(mine))
        for key, style in styles_of(rows).items():
            line = sorted((r["shape"]["length"], r["ratio"]) for r in mine if (r["method"], r["kernel"]) == key)
            if line:
                labelled[style["label"]] = axis.plot(*zip(*line, strict=True), **style)[0]
        axis.set_xscale("log", base=2)
        ticks = sorted({r["shape"]["length"] for r in mine})
        axis.set_xticks(ticks, [compact(length) for length in ticks])
        axis.set_xticks([], minor=True)
        axis.set(xlabel="length (tokens, log₂)", ylabel="time / that of the fastest attention without bias")
        axis.set_title(f"{TITLES[what]}, D = {width}", fontsize=10.5)
        axis.axhline(1.0, color="0.2", linewidth=1.2, zorder=2)
        log_if_wide(axis, [r["ratio"] for r in mine])
    figure.legend(
        labelled.values(), labelled, loc="outside right center", fontsize=8.5, frameon=False, handlelength=3.2
    )
    where = f"the CPU, {record['threads']} threads" if record["device"] == "cpu" else record["device"]
    figure.suptitle(f"attention on {where}, {record['dtype']}, causal; torch {record['torch']}", fontsize=10)
    save_figure(figure, path)


def main(
    source: Annotated[Path, typer.Argument(help="JSON of `bench.py attention`")],
    out: Annotated[Path | None, typer.Option(help="PNG; beside the JSON by default")] = None,
) -> None:
    """Draw an attention record; the PNG is written beside it."""
    try:
        path = out or source.with_suffix(".png")
        draw(json.loads(source.read_text()), path)
    except (OSError, json.JSONDecodeError, ValueError, KeyError) as error:
        raise typer.BadParameter(f"{source}: {error}") from None
    print(f"written to {path}")
