"""Figures of evaluation results: curves against length or image size, depth × length heatmaps, the README's overview.

Every function takes ``ModelResult``s and writes one PNG atomically. A method looks the same in every figure: our priors
in strong colours and thick lines, the others muted and thin, each with a marker of its own, so that neither colour
vision nor a legend is all there is to tell them apart. SSMax on top of a method makes its marker hollow, unless the
pair has a style of its own. Seeds of one set-up are one line, their mean, in a band from the least to the greatest.
matplotlib is imported when a figure is drawn, not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from modalities.evaluation import ModelResult, SeedMean, mean_of_seeds
from zoo.prior_plot import save_figure

# Okabe and Ito's colours for the priors this project is about; Tol's muted scheme for what they are compared with.
OURS = {
    "ggd_ssmax": ("#0072B2", "o"),
    "ggd": ("#56B4E9", "s"),
    "goat_ssmax": ("#D55E00", "D"),
    "goat": ("#E69F00", "^"),
    "ggd2d_ssmax": ("#0072B2", "o"),
    "ggd2d": ("#56B4E9", "s"),
    "ggd2d_separable": ("#009E73", ">"),
}
OTHERS = {
    "alibi": ("#117733", "v"),
    "alibi_ssmax": ("#117733", "1"),
    "rope": ("#882255", "X"),
    "rope_ssmax": ("#CC6677", "P"),
    "nope": ("#666666", "<"),
    "nope_ssmax": ("#666666", "2"),
    "cable": ("#44AA99", ">"),
    "t5": ("#999933", "p"),
    "sinusoidal": ("#332288", "*"),
    "learned": ("#AA4499", "h"),
    "kerple": ("#6699CC", "d"),
    "fire": ("#661100", "H"),
    "rope2d_axial": ("#882255", "X"),
    "rope2d_mixed": ("#CC6677", "P"),
}
# Baselines of DNA, which are no priors: greys without markers, darker for chains of higher order.
BASELINES = {"uniform": ("#BBBBBB", ""), "gzip": ("#C8B8A8", ""), "xz": ("#A89888", "")}
BASELINES |= {f"markov-{order}": (f"#{3 * f'{190 - 11 * order:02X}'}", "") for order in range(13)}
SPARE = (("#000000", "o"), ("#777777", "s"), ("#AAAAAA", "D"), ("#444444", "^"))
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Axis:
    """What curves run along: a column of rows, its label, and how a tick is written."""

    column: str
    label: str
    tick: Callable[[float], str]


def compact(number: float) -> str:
    """128, 1k, 1.5k, 32k, 1M: lengths as tick labels, in powers of two."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


LENGTH = Axis("length", "length (tokens, log₂)", compact)
SIZE = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format)
CONTIG = Axis("contig", "held-out contig", str)
KMER = Axis("k", "k (bases)", "{:g}".format)
AXES = {axis.column: axis for axis in (LENGTH, SIZE, CONTIG, KMER)}


def recall_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Retrieval against length in two panels, free generation and teacher forcing, which are never mixed."""
    results = mean_of_seeds(results, LENGTH.column)
    figure, axes = panels(1, 2, width=4.6, height=3.9)
    curves(axes[0], results, "free_generation", "exact match", unit_interval=True)
    curves(axes[1], results, "teacher_forced", "exact match", unit_interval=True)
    name_panel(axes[0], "free generation")
    name_panel(axes[1], "teacher-forced")
    finish(figure, axes, results, path)


def perplexity_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Perplexity and bits per byte against length, and NLL by position inside windows of the longest length."""
    results = mean_of_seeds(results, LENGTH.column)
    figure, axes = panels(1, 3, width=4.2, height=3.9)
    curves(axes[0], results, "perplexity", "perplexity")
    curves(axes[1], results, "bits_per_byte", "bits per byte")
    name_panel(axes[0], "perplexity per token")
    name_panel(axes[1], "bits per byte")
    styles = styles_of(results)
    for result, style in zip(results, styles, strict=True):
        row = max(result.rows, key=lambda r: r["length"])
        axes[2].plot(row["position_to"], row["position_nll"], **style)
    longest = max(row["length"] for result in results for row in result.rows)
    name_panel(axes[2], f"NLL by position in windows of {compact(longest)}")
    axes[2].set_ylabel("nats per token")
    axes[2].set_xlabel("tokens seen, up to (log₂)")
    axes[2].set_xscale("log", base=2)
    axes[2].xaxis.set_major_formatter(lambda value, _: compact(value))
    _log_if_wide(axes[2], [v for r in results for v in max(r.rows, key=lambda row: row["length"])["position_nll"]])
    mark_training(axes[2], results)
    finish(figure, axes, results, path)


def overview_figure(passkey: Sequence[ModelResult], perplexity: Sequence[ModelResult], path: Path) -> None:
    """What extrapolates: passkey retrieval and bits per byte of the same models side by side."""
    passkey, perplexity = (mean_of_seeds(results, LENGTH.column) for results in (passkey, perplexity))
    figure, axes = panels(1, 2, width=4.9, height=4.2)
    curves(axes[0], passkey, "free_generation", "keys written exactly", unit_interval=True)
    curves(axes[1], perplexity, "bits_per_byte", "bits per byte, less is better")
    name_panel(axes[0], "Passkey retrieval")
    name_panel(axes[1], "Held-out text")
    finish(figure, axes, passkey, path)


def ruler_figure(results: Sequence[ModelResult], path: Path, *, tasks: Sequence[str]) -> None:
    """The average and every task against length."""
    results, names = mean_of_seeds(results, LENGTH.column), ["average", *tasks]
    columns = 3
    figure, axes = panels(math.ceil(len(names) / columns), columns, width=3.7, height=2.7)
    for axis, name in zip(axes, names, strict=True):
        curves(axis, results, name, "references found", unit_interval=True)
        name_panel(axis, name, fontweight="bold" if name == "average" else "normal")
    finish(figure, axes, results, path)


def resolution_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Top-1 against size and its ratio to the top-1 at the training size; tuned numbers, if any, in panels of their own."""
    results = mean_of_seeds(results, SIZE.column)
    tuned = [r for r in results if any("tuned_top1" in row for row in r.rows)]
    figure, axes = panels(2 if tuned else 1, 2, width=4.9, height=4.2)
    _resolution_panels(axes[:2], results, "")
    if tuned:
        _resolution_panels(axes[2:], tuned, "tuned_")
        for above, below in zip(axes[:2], axes[2:], strict=True):  # what tuning changes is seen on one scale
            low, high = (choose(above.get_ylim()[n], below.get_ylim()[n]) for n, choose in enumerate((min, max)))
            above.set_ylim(low, high)
            below.set_ylim(low, high)
    finish(figure, axes, results, path)


def _resolution_panels(axes, results: Sequence[ModelResult], kind: str) -> None:
    tuned, note = ("TUNED ", ", TUNED at each size") if kind else ("", "")
    curves(axes[0], results, f"{kind}top1", f"{tuned}top-1 accuracy", SIZE, linear=True)
    curves(axes[1], results, f"{kind}ratio", f"{tuned}top-1 / top-1 at the training size", SIZE, linear=True)
    axes[1].axhline(1.0, color="0.35", linewidth=1.0, zorder=1)
    name_panel(axes[0], f"Top-1{note}")
    name_panel(axes[1], f"Share kept{note}")


def heatmap_figure(results: Sequence[ModelResult], path: Path, *, title: str, score: str = "free_generation") -> None:
    """One depth × length panel for each model, on one colour scale from 0 to 1."""
    import numpy as np

    columns = min(4, len(results))
    rows = math.ceil(len(results) / columns)
    width = max(
        3.0 if columns > 1 else 5.0, 1.2 + 0.55 * max(len({c["length"] for c in r.cells.values()}) for r in results)
    )
    figure, axes = panels(rows, columns, width=width, height=3.1)
    for axis in axes[len(results) :]:
        axis.set_visible(False)
    image, beyond = None, False
    for axis, result in zip(axes, results, strict=False):
        lengths = sorted({c["length"] for c in result.cells.values()})
        depths = sorted({c["depth"] for c in result.cells.values()})
        grid = np.full((len(depths), len(lengths)), np.nan)
        for cell in result.cells.values():
            grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = cell[score]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="upper")
        axis.set_xticks(range(len(lengths)), [compact(length) for length in lengths])
        shown = range(0, len(depths), max(1, len(depths) // 5))
        axis.set_yticks(shown, [f"{depths[k]:.0%}" for k in shown])
        axis.set(title=result.label, xlabel="length (tokens)", ylabel="depth of the needle")
        inside = sum(length <= result.trained_at for length in lengths)
        if 0 < inside < len(lengths):
            beyond = True
            axis.axvline(inside - 0.5, color="white", linewidth=2.5)
            axis.axvline(inside - 0.5, color="black", linewidth=1.2, linestyle=(0, (3, 2)))
        axis.title.set_fontsize(9)
    figure.colorbar(image, ax=axes[: len(results)], label="exact match", shrink=0.8)
    note = "\nright of the dashed line: longer than in training" if beyond else ""
    figure.suptitle(title + note, fontsize=10)
    save_figure(figure, path)


def styles_of(results: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """Line styles by method. A second model of one method keeps its colour and takes the next dash pattern."""
    seen: dict[str, int] = {}
    styles = []
    for result in results:
        again = seen[result.method] = seen.get(result.method, -1) + 1
        known = OURS | OTHERS | BASELINES
        base = result.method if result.method in known else result.method.removesuffix("_ssmax")
        ours = base in OURS
        # without markers, dashes tell greys apart
        dash = again + (list(BASELINES).index(base) if base in BASELINES else 0)
        color, marker = known.get(base) or SPARE[len(seen) % len(SPARE)]
        styles.append(
            {
                "color": color,
                "marker": marker,
                "markerfacecolor": color if base == result.method else "white",
                "linestyle": DASHES[dash % len(DASHES)],
                "linewidth": 2.4 if ours else 1.2,
                "markersize": 6.5 if ours else 5.0,
                "alpha": 1.0 if ours else 0.8,
                "zorder": 4 if ours else 3,
                "label": result.label,
            }
        )
    return styles


def panels(rows: int, columns: int, *, width: float, height: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    return figure, list(axes.flat)


def curves(
    axis,
    results: Sequence[ModelResult],
    column: str,
    ylabel: str,
    along: Axis = LENGTH,
    *,
    unit_interval: bool = False,
    linear: bool = False,
) -> None:
    """One line per model or group of seeds. Scores in 0..1 often coincide: there markers stand side by side."""
    styles = styles_of(results)
    for k, (result, style) in enumerate(zip(results, styles, strict=True)):
        dodge = 2 ** (0.36 * ((k + 0.5) / len(results) - 0.5)) if unit_interval else 1.0
        places = [row[along.column] * dodge for row in result.rows]
        alone = (
            {"marker": "_", "markersize": 12.0} if len(places) == 1 and not style["marker"] else {}
        )  # no line to see
        axis.plot(places, [row[column] for row in result.rows], **style | alone)
        if isinstance(result, SeedMean):
            low, high = ([row[column] for row in rows] for rows in (result.low, result.high))
            axis.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0, zorder=2)
    ticks = sorted({row[along.column] for result in results for row in result.rows})
    axis.set_xscale("log", base=2)
    gaps = [math.log2(b / a) for a, b in pairwise(ticks)]
    room = min(gaps) / sum(gaps) if gaps else 1.0
    axis.set_xticks(ticks, [along.tick(tick) for tick in ticks], rotation=0 if room > 0.07 and len(ticks) < 10 else 60)
    if room < 0.12:
        axis.tick_params(axis="x", labelsize=8)
    axis.set_xticks([], minor=True)
    octaves = (
        5.0 if unit_interval else max(1.0, min(5.0, math.log2(ticks[-1] / ticks[0])))
    )  # less room where they are few
    axis.set_xlim(ticks[0] / 2 ** (0.11 * octaves), ticks[-1] * 2 ** (0.07 * octaves))
    axis.set(xlabel=along.label, ylabel=ylabel)
    axis.grid(alpha=0.25, linewidth=0.6)
    if unit_interval:
        axis.set_ylim(-0.04, 1.04)
    elif not linear:
        _log_if_wide(axis, [row[column] for result in results for row in result.rows])
    mark_training(axis, results, along)


def _log_if_wide(axis, values: Sequence[float]) -> None:
    """A logarithmic y axis, with plain numbers at readable places, where values span more than a factor of 1.8."""
    from matplotlib.ticker import LogLocator, NullFormatter

    good = [v for v in values if math.isfinite(v) and v > 0]
    axis.grid(alpha=0.25, linewidth=0.6)
    if not good or max(good) < 1.8 * min(good):
        return
    axis.set_yscale("log")
    decades = math.log10(max(good) / min(good))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_minor_locator(LogLocator(subs=()))


def mark_training(axis, results: Sequence[ModelResult], along: Axis = LENGTH) -> None:
    """A dashed line at each place of training in view, named above the panel, where no curve runs."""
    low, high = axis.get_xlim()
    for trained_at in sorted({result.trained_at for result in results}):
        if low <= trained_at <= high:
            axis.axvline(trained_at, color="0.35", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axis.annotate(
                f"trained at {along.tick(trained_at)}", (trained_at, 1.01), fontsize=7.5, color="0.35", **place
            )


def name_panel(axis, text: str, **style: Any) -> None:
    axis.set_title(text, pad=17, **style)  # above the line that names the training length


def finish(figure, axes, results: Sequence[ModelResult], path: Path) -> None:
    """One legend for all panels, to their right, in the order of the models."""
    handles, labels = axes[0].get_legend_handles_labels()
    named = {result.label: result for result in results}
    short = all(r.method for r in results) and len({r.method for r in results}) == len(labels)  # it tells them apart
    seeds = {getattr(result, "seeds", 1) for result in results}
    names = [named[label].method if short else label for label in labels]
    if len(seeds) > 1:
        counts = [getattr(named[label], "seeds", 1) for label in labels]
        learned = [named[label].method not in BASELINES for label in labels]
        names = [
            f"{name}, {n} seed{'s' * (n > 1)}" if t else name for name, n, t in zip(names, counts, learned, strict=True)
        ]
    title = (
        None
        if seeds == {1}
        else f"mean of {seeds.pop() if len(seeds) == 1 else 'the'} seeds,\nband from least to greatest"
    )
    columns = 1 + (len(names) > 16)  # more would not fit under each other
    style: dict[str, Any] = dict(fontsize=8.5, frameon=False, handlelength=2.8, ncols=columns)
    legend = figure.legend(handles, names, loc="outside right center", **style)
    legend.set_title(title, prop={"size": 8.5})
    save_figure(figure, path)
