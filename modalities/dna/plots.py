"""Figures of what models write, and of the records and variants they score; in the styles of `modalities.plots`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modalities.dna.bases import encode
from modalities.dna.completion import WINDOW, gc_trajectory
from modalities.dna.terminal import MOST_MODELS, agreement, examples, lines_of, short_name
from modalities.evaluation import ModelResult, mean_of_seeds
from modalities.plots import KMER, LENGTH, curves, finish, name_panel, panels, styles_of
from zoo.prior_plot import save_figure

PROMPT = dataclasses.replace(LENGTH, label="prompt (tokens, log₂)")
TRUTH = {"color": "black", "linewidth": 2.6, "zorder": 5, "label": "truth"}
REFERENCE = {"color": "0.35", "linewidth": 1.0, "linestyle": (0, (1, 2)), "zorder": 1}
MATCH, MISMATCH = "#0072B2", "#D55E00"
KINDS = {"snv": "#0072B2", "mnv": "#009E73", "insertion": "#E69F00", "deletion": "#D55E00"}
TRANSITIONS = {("A", "G"), ("G", "A"), ("C", "T"), ("T", "C")}
MOST_DOTS = 3000  # records, or drawn as quantiles
FEW_RECORDS = 20  # too few for a histogram
TRAJECTORIES = 3  # prompts whose GC content is drawn
LINES = 5  # models in a panel of trajectories


def completion_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Agreement and Pearson r against prompt length, with standard errors; below, GC trajectories beside the truth."""
    shown = examples(results, TRAJECTORIES)
    means = mean_of_seeds(results, LENGTH.column)
    figure, axes = panels(2, 6, width=2.05, height=3.7)
    grid = axes[0].get_gridspec()
    for axis in axes:
        axis.remove()
    top = [figure.add_subplot(grid[0, 3 * n : 3 * n + 3]) for n in range(2)]
    below = [figure.add_subplot(grid[1, 2 * n : 2 * n + 2]) for n in range(TRAJECTORIES)]
    curves(top[0], means, "accuracy", "share of bases equal", PROMPT, linear=True)
    curves(top[1], means, "gc_r", f"mean Pearson r, windows of {WINDOW}", PROMPT, linear=True)
    for axis, column in zip(top, ("accuracy", "gc_r"), strict=True):
        for result, style in zip(means, styles_of(means), strict=True):
            values = [(r["length"], r[column], r[f"{column}_standard_error"]) for r in result.rows]
            lengths, middle, error = np.array(values, float).T
            axis.errorbar(lengths, middle, error, fmt="none", ecolor=style["color"], alpha=0.6, capsize=2, zorder=2)
    name_panel(top[0], "Agreement with the truth")
    name_panel(top[1], "GC content")
    chance = means[0].rows
    if len(chance) > 1:
        top[0].plot([row["length"] for row in chance], [row["chance"] for row in chance], **REFERENCE)
    else:
        top[0].axhline(chance[0]["chance"], **REFERENCE)
    note = {"fontsize": 7.5, "color": "0.35", "ha": "right", "va": "bottom"}
    top[0].annotate("chance", (0.99, chance[-1]["chance"]), xycoords=("axes fraction", "data"), **note)
    top[1].axhline(0.0, **REFERENCE)
    styles = dict(
        zip([short_name(r, _shown(results)) for r in _shown(results)], styles_of(_shown(results)), strict=True)
    )
    for axis, example in zip(below, shown, strict=False):
        for name, text in example.written[:LINES]:
            style = styles[name] | {"marker": "", "linewidth": 1.3, "zorder": 3}
            axis.plot(_centres(text), gc_trajectory(encode(text)[None])[0], **style)
        axis.plot(_centres(example.truth), gc_trajectory(encode(example.truth)[None])[0], **TRUTH)
        axis.set(ylim=(-0.02, 1.02), xlabel="base written", title=f"{example.place}\nafter {example.length} tokens")
        axis.title.set_fontsize(8)
        axis.grid(alpha=0.25, linewidth=0.6)
    below[0].set_ylabel(f"GC content, windows of {WINDOW}")
    if shown:
        below[0].legend([below[0].lines[-1]], ["truth"], fontsize=8, frameon=False)
    for axis in below[len(shown) :]:
        axis.set_visible(False)
    finish(figure, top, means, path)


def completion_text_figure(results: Sequence[ModelResult], path: Path, *, width: int = 100, count: int = 3) -> None:
    """The truth above what models wrote: bases that agree in upper case and blue, others in lower case and orange."""
    shown = examples(results, count)
    if not shown:
        path.unlink(missing_ok=True)  # that of other models
        return
    blocks = [
        (f"{one.place} after {one.length} tokens", dict(one.written), one.truth, list(lines_of(one, width)))
        for one in shown
    ]
    names = max(len(name) for one in shown for name, _ in [("truth", ""), *one.written])
    margin, line = min(names, 36) + 7, 0.145  # letters; inches
    height = sum(1.5 + sum(len(rows) + 0.6 for rows in lines) for *_, lines in blocks) + 1.5
    pyplot = _pyplot()
    figure = pyplot.figure(figsize=(0.0605 * (margin + width) + 0.3, line * height))
    letter = {"family": "DejaVu Sans Mono", "fontsize": 7, "va": "top", "ha": "left"}
    unit = figure.get_figheight()

    def put(column: float, row: float, text: str, **style: Any) -> None:
        x = (0.12 + column * 7 * 0.602 / 72) / figure.get_figwidth()
        figure.text(x, 1 - line * row / unit, text, **(letter | style))

    put(0, 0.3, "AGREES WITH THE TRUTH: UPPER CASE, BLUE", color=MATCH, fontweight="bold")
    put(44, 0.3, "differs from the truth: lower case, orange", color=MISMATCH)
    row = 2.0
    for title, written, truth, lines in blocks:
        put(0, row, title, fontweight="bold")
        row += 1.3
        for rows in lines:
            for name, same, other in rows:
                true = name == "truth"
                share = "" if true else f"{agreement(truth, written[name]):.0%}"
                put(0, row, f"{name[: margin - 7]:<{margin - 7}} {share:>4}", color="0.25")
                put(margin, row, same, color="black" if true else MATCH, fontweight="bold")
                put(margin, row, other, color=MISMATCH)
                row += 1
            row += 0.6
        row += 0.2
    save_figure(figure, path)


def spectrum_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Divergence against k, above the floor that two halves of the truth have."""
    results = mean_of_seeds(results, KMER.column)
    figure, (axis,) = panels(1, 1, width=6.8, height=4.2)
    for result, style in zip(results, styles_of(results), strict=True):
        axis.plot([row["k"] for row in result.rows], [max(row["divergence"], 1e-6) for row in result.rows], **style)
    rows = results[0].rows
    floor = [max(row["floor"], 1e-6) for row in rows]
    axis.fill_between([row["k"] for row in rows], floor, min(floor) / 10, color="0.85", zorder=0)
    axis.plot([row["k"] for row in rows], floor, **REFERENCE)
    axis.text(0.95, 0.08, "truth against truth", transform=axis.transAxes, fontsize=8.5, color="0.35", ha="right")
    axis.set_yscale("log")
    axis.set_ylim(bottom=min(floor) / 2)
    axis.set_xticks([row["k"] for row in rows])
    axis.set(
        xlabel=KMER.label, ylabel="Jensen-Shannon divergence (bits)", title="k-mers written, against the true ones"
    )
    axis.grid(alpha=0.25, linewidth=0.6)
    finish(figure, [axis], results, path)


def records_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Bits per base against length (dots, or quantiles where they are many), and how often each is found."""
    from matplotlib.ticker import LogLocator, NullFormatter

    many, crowded = (len(results[0].rows) > most for most in (FEW_RECORDS, MOST_DOTS))
    every = [row["bits_per_base"] for result in results for row in result.rows if math.isfinite(row["bits_per_base"])]
    figure, axes = panels(1, 2 if many else 1, width=5.2, height=4.0)
    for result, style in zip(results, styles_of(results), strict=True):
        lengths, bits = (np.array([row[name] for row in result.rows], float) for name in ("length", "bits_per_base"))
        lengths, bits = lengths[np.isfinite(bits)], bits[np.isfinite(bits)]
        if crowded and len(bits):
            _quantiles(axes[0], lengths, bits, style)
        else:
            dots = {"linestyle": "", "marker": style["marker"] or ".", "alpha": 0.7}
            axes[0].plot(lengths, bits, **(style | dots | {"markersize": 6.0 if len(bits) < 200 else 3.0}))
        if many and len(bits):
            outline = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.6}
            axes[1].hist(bits, bins=_bins(every, 60), histtype="step", **outline)
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0].xaxis.set_minor_formatter(NullFormatter())
    axes[0].axhline(2.0, **REFERENCE)
    axes[0].annotate(
        "uniform", (0.01, 2.0), xycoords=("axes fraction", "data"), fontsize=7.5, color="0.35", va="bottom"
    )
    title = "median, and a band with nine tenths of the records" if crowded else "every record"
    axes[0].set(xlabel="length of the record (bases, log)", ylabel="bits per base", title=title)
    if many:
        axes[1].set(xlabel="bits per base", ylabel="records", title=f"{len(results[0].rows):,} records")
        axes[1].axvline(2.0, **REFERENCE)
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.6)
    finish(figure, axes, results, path)


def variants_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Histograms of the log-likelihood ratio: by kind of variant, and of transitions beside transversions; a row a model."""
    figure, axes = panels(len(results), 2, width=5.2, height=2.9)
    for result, left, right in zip(results, axes[::2], axes[1::2], strict=True):
        rows = [row for row in result.rows if not row["reason"]]
        kinds = {kind: [row["llr_nats"] for row in rows if row["kind"] == kind] for kind in KINDS}
        changes = {"transitions": [], "transversions": []}
        for row in rows:
            if row["kind"] == "snv":
                change = "transitions" if (row["ref"], row["alt"]) in TRANSITIONS else "transversions"
                changes[change].append(row["llr_nats"])
        _histograms(left, kinds, list(KINDS.values()))
        _histograms(right, changes, ["#0072B2", "#D55E00"])
        left.set_title(f"{short_name(result, results)}: by kind", fontsize=9)
        right.set_title("single bases", fontsize=9)
        left.set_ylabel("variants")
    for axis in axes[-2:]:
        axis.set_xlabel("log p(alternative) − log p(reference), nats")
    save_figure(figure, path)


def _histograms(axis, groups: dict[str, list[float]], colors: Sequence[str]) -> None:
    """One outline a group on common bins, each in a dash of its own, with its median below."""
    values = [value for group in groups.values() for value in group]
    axis.grid(alpha=0.25, linewidth=0.6)
    if not values:
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", color="0.35")
        return
    bins = _bins(values, max(8, min(60, round(math.sqrt(len(values)) * 2))))
    for (name, group), color, dash in zip(groups.items(), colors, ("-", "--", "-.", ":"), strict=False):
        if group:
            label = f"{name}, {len(group):,}: median {np.median(group):+.2f}"
            axis.hist(group, bins=bins, histtype="step", color=color, linestyle=dash, linewidth=1.8, label=label)
    axis.axvline(0.0, **REFERENCE)
    axis.set_ylim(top=axis.get_ylim()[1] * (1.1 + 0.1 * sum(map(bool, groups.values()))))  # room for the legend
    axis.legend(fontsize=7, frameon=False, loc="upper left")


def _bins(values: Sequence[float], count: int) -> np.ndarray:
    """Edges of bins over all values; around them where they are one."""
    low, high = min(values), max(values)
    pad = 0.0 if high - low > 1e-6 else 0.5
    return np.linspace(low - pad, high + pad, count + 1)


def _quantiles(axis, lengths: np.ndarray, bits: np.ndarray, style: dict[str, Any]) -> None:
    """The median by length, in a band that holds nine tenths."""
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 25)))
    bins = np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, max(0, len(edges) - 2))
    filled = np.unique(bins)
    centres = [np.median(lengths[bins == b]) for b in filled]
    low, middle, high = np.array([np.quantile(bits[bins == b], (0.05, 0.5, 0.95)) for b in filled]).T
    axis.plot(centres, middle, **style)
    axis.fill_between(centres, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _shown(results: Sequence[ModelResult]) -> list[ModelResult]:
    """The models that examples show."""
    first = {result.group or result.label: result for result in reversed(results)}
    return list(reversed(first.values()))[:MOST_MODELS]


def _centres(text: str) -> np.ndarray:
    return np.arange(len(text) - WINDOW + 1) + (WINDOW + 1) / 2


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
