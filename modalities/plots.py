"""Figures of evaluation results: curves against length, depth × length heatmaps, and the overview of the README.

Every function takes ``ModelResult``s and writes one PNG atomically. A method looks the same in every figure: our priors
in strong colours and thick lines, the others muted and thin, each with a marker of its own, so that neither colour
vision nor a legend is all there is to tell them apart. matplotlib is imported when a figure is drawn, not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modalities.evaluation import ModelResult
from zoo.prior_plot import save_figure

# Okabe and Ito's colours for the priors this project is about; Tol's muted scheme for what they are compared with.
OURS = {
    "ggd_ssmax": ("#0072B2", "o"),
    "ggd": ("#56B4E9", "s"),
    "goat_ssmax": ("#D55E00", "D"),
    "goat": ("#E69F00", "^"),
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
}
SPARE = (("#000000", "o"), ("#777777", "s"), ("#AAAAAA", "D"), ("#444444", "^"))
DASHES = ("-", "--", ":", "-.")


def recall_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Retrieval against length in two panels, free generation and teacher forcing, which are never mixed."""
    figure, axes = _panels(1, 2, width=4.6, height=3.9)
    _curves(axes[0], results, "free_generation", "exact match", unit_interval=True)
    _curves(axes[1], results, "teacher_forced", "exact match", unit_interval=True)
    _title(axes[0], "free generation")
    _title(axes[1], "teacher-forced")
    _finish(figure, axes, results, path)


def perplexity_figure(results: Sequence[ModelResult], path: Path) -> None:
    """Perplexity and bits per byte against length, and NLL by position inside windows of the longest length."""
    figure, axes = _panels(1, 3, width=4.2, height=3.9)
    _curves(axes[0], results, "perplexity", "perplexity")
    _curves(axes[1], results, "bits_per_byte", "bits per byte")
    _title(axes[0], "perplexity per token")
    _title(axes[1], "bits per byte")
    styles = styles_of(results)
    for result, style in zip(results, styles, strict=True):
        row = max(result.rows, key=lambda r: r["length"])
        axes[2].plot(row["position_to"], row["position_nll"], **style)
    longest = max(row["length"] for result in results for row in result.rows)
    _title(axes[2], f"NLL by position in windows of {compact(longest)}")
    axes[2].set_ylabel("nats per token")
    axes[2].set_xlabel("tokens seen, up to (log₂)")
    axes[2].set_xscale("log", base=2)
    axes[2].xaxis.set_major_formatter(lambda value, _: compact(value))
    _log_if_wide(axes[2], [v for r in results for v in max(r.rows, key=lambda row: row["length"])["position_nll"]])
    _mark_training(axes[2], results)
    _finish(figure, axes, results, path)


def overview_figure(passkey: Sequence[ModelResult], perplexity: Sequence[ModelResult], path: Path) -> None:
    """What extrapolates: passkey retrieval and bits per byte of the same models side by side."""
    figure, axes = _panels(1, 2, width=4.9, height=4.2)
    _curves(axes[0], passkey, "free_generation", "keys written exactly", unit_interval=True)
    _curves(axes[1], perplexity, "bits_per_byte", "bits per byte, less is better")
    _title(axes[0], "Passkey retrieval")
    _title(axes[1], "Held-out text")
    _finish(figure, axes, passkey, path)


def ruler_figure(results: Sequence[ModelResult], path: Path, *, tasks: Sequence[str]) -> None:
    """The average and every task against length."""
    names = ["average", *tasks]
    columns = 3
    figure, axes = _panels(math.ceil(len(names) / columns), columns, width=3.7, height=2.7)
    for axis, name in zip(axes, names, strict=True):
        _curves(axis, results, name, "references found", unit_interval=True)
        _title(axis, name, fontweight="bold" if name == "average" else "normal")
    _finish(figure, axes, results, path)


def heatmap_figure(results: Sequence[ModelResult], path: Path, *, title: str, score: str = "free_generation") -> None:
    """One depth × length panel for each model, on one colour scale from 0 to 1."""
    import numpy as np

    columns = min(4, len(results))
    rows = math.ceil(len(results) / columns)
    width = max(
        3.0 if columns > 1 else 5.0, 1.2 + 0.55 * max(len({c["length"] for c in r.cells.values()}) for r in results)
    )
    figure, axes = _panels(rows, columns, width=width, height=3.1)
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
        inside = sum(length <= result.train_context for length in lengths)
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
        ours = result.method in OURS
        color, marker = (OURS | OTHERS).get(result.method) or SPARE[len(seen) % len(SPARE)]
        styles.append(
            {
                "color": color,
                "marker": marker,
                "linestyle": DASHES[again % len(DASHES)],
                "linewidth": 2.4 if ours else 1.2,
                "markersize": 6.5 if ours else 5.0,
                "alpha": 1.0 if ours else 0.8,
                "zorder": 4 if ours else 3,
                "label": result.label,
            }
        )
    return styles


def compact(number: float) -> str:
    """128, 1k, 1.5k, 32k, 1M: lengths as tick labels, in powers of two."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _panels(rows: int, columns: int, *, width: float, height: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    return figure, list(axes.flat)


def _curves(axis, results: Sequence[ModelResult], column: str, ylabel: str, *, unit_interval: bool = False) -> None:
    """One line per model over log₂ length. Scores in 0..1 often coincide: there markers stand side by side."""
    styles = styles_of(results)
    for k, (result, style) in enumerate(zip(results, styles, strict=True)):
        dodge = 2 ** (0.36 * ((k + 0.5) / len(results) - 0.5)) if unit_interval else 1.0
        axis.plot([row["length"] * dodge for row in result.rows], [row[column] for row in result.rows], **style)
    lengths = sorted({row["length"] for result in results for row in result.rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [compact(length) for length in lengths], rotation=0 if len(lengths) < 10 else 60)
    axis.set_xticks([], minor=True)
    axis.set_xlim(lengths[0] / 2**0.55, lengths[-1] * 2**0.35)
    axis.set(xlabel="length (tokens, log₂)", ylabel=ylabel)
    axis.grid(alpha=0.25, linewidth=0.6)
    if unit_interval:
        axis.set_ylim(-0.04, 1.04)
    else:
        _log_if_wide(axis, [row[column] for result in results for row in result.rows])
    _mark_training(axis, results)


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


def _mark_training(axis, results: Sequence[ModelResult]) -> None:
    """A dashed line at each training length in view, named above the panel, where no curve runs."""
    low, high = axis.get_xlim()
    for context in sorted({result.train_context for result in results}):
        if low <= context <= high:
            axis.axvline(context, color="0.35", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
            place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axis.annotate(f"trained at {compact(context)}", (context, 1.01), fontsize=7.5, color="0.35", **place)


def _title(axis, text: str, **style: Any) -> None:
    axis.set_title(text, pad=17, **style)  # above the line that names the training length


def _finish(figure, axes, results: Sequence[ModelResult], path: Path) -> None:
    """One legend for all panels, to their right, in the order of the models."""
    handles, labels = axes[0].get_legend_handles_labels()
    methods = {result.label: result.method for result in results}
    if all(methods.values()) and len(set(methods.values())) == len(labels):  # the method tells them apart
        labels = [methods[label] for label in labels]
    figure.legend(handles, labels, loc="outside right center", fontsize=8.5, frameon=False, handlelength=2.8)
    save_figure(figure, path)
