"""Drawing that evaluators share: styles by method, curves over an axis, heat maps, one legend.

A method has the same colour and marker in every figure; SSMax makes the marker hollow, unless the
pair has a style of its own. Seeds of one set-up are one line, their mean, in a band from the least
to the greatest. A figure is one PNG, whole or not at all. matplotlib is imported when a figure is
drawn.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modalities.results import (
    LENGTH,
    Axis,
    ModelResult,
    Score,
    SeedMean,
    compact,
    mean_of_seeds,
    short_names,
)
from zoo.errors import printable
from zoo.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, then Tol's muted scheme.
with Path(__file__).with_name("styles.csv").open(encoding="utf-8") as _file:
    STYLES = {method: (color, marker) for method, color, marker in csv.reader(_file)}
SPARE = (
    ("#1F77B4", "o"),
    ("#BCBD22", "s"),
    ("#8C564B", "D"),
    ("#E377C2", "^"),
    ("#17BECF", "v"),
    ("#7F7F7F", "p"),
)
DASHES = ("-", "--", ":", "-.")
Style = dict[str, Any]  # arguments of matplotlib's plot
WIDTH = (
    9.6  # inches of a figure: where a page shows it 800 pixels wide, `SMALLEST` points are 9 pixels
)
SMALLEST = 8.0
LINE: Style = {"linewidth": 1.6, "markersize": 5.5, "alpha": 0.9, "zorder": 3}
RULE: Style = {"color": "0.35", "linewidth": 1.0, "zorder": 1}

FIGURE_FORMATS = ("png", "pdf", "svg")
# (formats, width in inches) of figures in a command; the default is what the path's suffix says, at
# its own width.
figure_output: ContextVar[tuple[Sequence[str], float | None]] = ContextVar(
    "figure_output", default=((), None)
)


def scores_figure(
    results: Sequence[ModelResult], path: Path, scores: Sequence[Score], along: Axis = LENGTH
) -> None:
    """A panel for each score that is drawn and that rows have, over the axis."""
    results = mean_of_seeds(results, along.column)
    columns = {name for result in results for row in result.rows for name in row}
    drawn = [
        score for score in scores if score.drawn and not score.exception and score.column in columns
    ]
    across = 2 if len(drawn) == 4 else min(3, len(drawn)) or 1
    figure, axes = panels(math.ceil(len(drawn) / across) or 1, across, width=4.6, height=3.5)
    for axis, score in zip(axes, drawn, strict=False):
        curves(axis, results, score, along)
    for axis in axes[len(drawn) :]:
        axis.set_visible(False)
    finish(figure, axes, results, path)


def overview_figure(
    measured: Sequence[tuple[str, Score, Sequence[ModelResult]]], path: Path, along: Axis = LENGTH
) -> None:
    """One panel an evaluator, of the score that represents it: (title, score, results) of each."""
    figure, axes = panels(1, len(measured), width=4.9, height=4.2)
    for axis, (title, score, results) in zip(axes, measured, strict=True):
        curves(axis, mean_of_seeds(results, along.column), score, along)
        name_panel(axis, title)
    finish(figure, axes, mean_of_seeds(measured[0][2], along.column), path)


def heatmap_figure(results: Sequence[ModelResult], path: Path, *, column: str, title: str) -> None:
    """One depth × length panel for each model, on one colour scale from 0 to 1.

    Rows hold the list `column` of scores by depth, and the depths (0 to 1) as "depths".
    """
    results = mean_of_seeds(results, LENGTH.column)
    across = min(4, len(results))
    width = max(
        3.0 if across > 1 else 5.0, 1.2 + 0.55 * max(len(result.rows) for result in results)
    )
    figure, axes = panels(math.ceil(len(results) / across), across, width=width, height=3.1)
    for axis in axes[len(results) :]:
        axis.set_visible(False)
    beyond = False
    for axis, result in zip(axes, results, strict=False):
        lengths = [row["length"] for row in result.rows]
        depths = result.rows[0]["depths"]
        grid = [[row[column][k] for row in result.rows] for k in range(len(depths))]
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
    figure.suptitle(
        title + "\nright of the dashed line: longer than in training" * beyond, fontsize=10
    )
    save_figure(figure, path)


def styles_of(results: Sequence[ModelResult]) -> list[Style]:
    """Line styles by method. A second model of a method keeps its colour and marker and takes the
    next dash pattern; a method without a style takes a spare one, dashed where these come again."""
    models: Counter[str] = Counter()
    spare: dict[str, int] = {}
    styles = []
    for result in results:
        method = result.method
        base = method if method in STYLES else method.removesuffix("_ssmax")
        round_, place = (
            (0, 0) if base in STYLES else divmod(spare.setdefault(base, len(spare)), len(SPARE))
        )
        color, marker = STYLES.get(base) or SPARE[place]
        dashes = DASHES[(models[method] + round_) % len(DASHES)]
        models[method] += 1
        style = {
            "color": color,
            "marker": marker,
            "markerfacecolor": color if base == method else "white",
        }
        styles.append(LINE | style | {"linestyle": dashes, "label": result.label})
    return styles


def panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """`width` × `height` inches a panel, narrower where a row would be wider than `WIDTH`, and 1.8
    at least."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (max(min(width, WIDTH / columns), 1.8) * columns, height * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, list(axes.flat)


def curves(axis: Axes, results: Sequence[ModelResult], score: Score, along: Axis = LENGTH) -> None:
    """One line per model or group of seeds, over a logarithmic axis of base 2, from the rows that
    have the score."""
    column = along.column
    whiskers = not any(isinstance(result, SeedMean) for result in results)
    for result, style in zip(results, styles_of(results), strict=True):
        shown = [row.get(score.column) is not None for row in result.rows]
        places = [row[column] for row in compress(result.rows, shown)]
        axis.plot(places, [row[score.column] for row in compress(result.rows, shown)], **style)
        _draw_band(axis, places, result, score.column, shown, style["color"], whiskers)
    _scale_along(axis, sorted({row[column] for result in results for row in result.rows}), along)
    axis.set_xlabel(along.label, fontsize=9)
    axis.set_ylabel(score.label or score.column.replace("_", " "), fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.6)
    if score.unit_interval:
        axis.set_ylim(-0.04, 1.04)
    elif not score.linear:
        log_if_wide(
            axis,
            [
                row[score.column]
                for r in results
                for row in r.rows
                if row.get(score.column) is not None
            ],
        )
    if score.level is not None:
        axis.axhline(score.level, **RULE)
    name = f"chance_{score.column}"
    chance = [(row[column], row[name]) for row in results[0].rows if name in row]
    if chance:
        axis.plot(*zip(*chance, strict=True), **RULE | {"linestyle": ":"})
        axis.annotate("chance", chance[0], fontsize=SMALLEST, color="0.35", va="bottom")
    mark_training(axis, results, along)
    if score.title:
        name_panel(axis, score.title)


def _draw_band(
    axis: Axes,
    places: list[float],
    result: ModelResult,
    column: str,
    shown: list[bool],
    color: str,
    whiskers: bool,
) -> None:
    """From the least to the greatest seed; whiskers of the standard error where no model has
    several."""
    name, space, condition = column.partition(" (")
    error = f"{name}_standard_error{space}{condition}"
    errors = [row.get(error) or 0.0 for row in compress(result.rows, shown)]
    if isinstance(result, SeedMean):
        low, high = (
            [row[column] for row in compress(rows, shown)] for rows in (result.low, result.high)
        )
        axis.fill_between(places, low, high, color=color, alpha=0.07, linewidth=0, zorder=2)
        for edge in (low, high):
            axis.plot(places, edge, color=color, alpha=0.45, linewidth=0.7, zorder=2)
    elif whiskers and any(errors):
        values = [row[column] for row in compress(result.rows, shown)]
        axis.errorbar(
            places, values, errors, fmt="none", ecolor=color, elinewidth=1.0, capsize=2.5, alpha=0.7
        )


def _scale_along(axis: Axes, ticks: list[float], along: Axis) -> None:
    """A logarithmic x axis with a tick at each place, turned or small where there is little
    room."""
    axis.set_xscale("log", base=2)
    gaps = [math.log2(b / a) for a, b in pairwise(ticks)]
    room = min(gaps) / sum(gaps) if gaps else 1.0
    axis.set_xticks(
        ticks,
        [along.tick(tick) for tick in ticks],
        rotation=0 if room > 0.07 and len(ticks) < 10 else 60,
    )
    if room < 0.12:
        axis.tick_params(axis="x", labelsize=SMALLEST)
    axis.set_xticks([], minor=True)
    margin = 2 ** (0.07 * max(1.0, min(5.0, math.log2(ticks[-1] / ticks[0]))))
    axis.set_xlim(ticks[0] / margin, ticks[-1] * margin)


def log_if_wide(axis: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis, with plain numbers at readable places, where values span more than a
    factor of 1.8."""
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [v for v in values if math.isfinite(v) and v > 0]
    axis.grid(alpha=0.25, linewidth=0.6)
    if not positive or max(positive) < 1.8 * min(positive):
        return
    axis.set_yscale("log")
    narrow = max(positive) < 10 * min(positive)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8) if narrow else (1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_minor_locator(LogLocator(subs=()))


def mark_training(axis: Axes, results: Sequence[ModelResult], along: Axis) -> None:
    """Dashed lines at places of training in view, two at the ends of a range, named above the
    panel, where no curve runs."""
    low, high = axis.get_xlim()
    ranges = sorted({result.trained_range or (result.trained_at,) for result in results})
    shown = [place for places in ranges for place in places if low <= place <= high]
    for place in shown:
        axis.axvline(place, **RULE | {"linestyle": (0, (4, 3))})
    if shown:
        names = ", ".join(" to ".join(map(along.tick, places)) for places in ranges)
        where: Style = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        middle = math.exp(sum(map(math.log, shown)) / len(shown))
        axis.annotate(
            f"trained at {names}", (middle, 1.01), fontsize=SMALLEST, color="0.35", **where
        )


def name_panel(axis: Axes, text: str) -> None:
    axis.set_title(text, pad=17, fontsize=11)  # above the line that names the training length


def finish(
    figure: Figure, axes: Sequence[Axes], results: Sequence[ModelResult], path: Path
) -> None:
    """One legend for all panels, below them, in the order of the models; then save."""
    handles, labels = axes[0].get_legend_handles_labels()
    counts = [result.seeds if isinstance(result, SeedMean) else 1 for result in results]
    seeds = set(counts)
    names = {label: label for label in labels}
    for result, name, count in zip(results, short_names(results), counts, strict=True):
        names[result.label] = name + (
            "" if len(seeds) == 1 else f", {count} seeds" if count > 1 else ", one seed"
        )
    texts = [names[label] for label in labels]
    width, height = figure.get_size_inches()
    columns = max(1, min(len(texts), int(width / (0.7 + 0.075 * max(map(len, texts))))))
    figure.set_size_inches(width, height + 0.18 * math.ceil(len(texts) / columns))
    style: Style = dict(
        fontsize=8.5, frameon=False, handlelength=2.8, ncols=columns, title_fontsize=8.5
    )
    legend = figure.legend(handles, texts, loc="outside lower center", **style)
    if seeds != {1}:
        legend.set_title(
            f"mean of {counts[0] if len(seeds) == 1 else 'the'} seeds, band from least to greatest"
        )
    elif any(axis.containers for axis in axes):
        legend.set_title("whiskers: standard error")
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a matplotlib figure in the formats and at the width of `figure_output`, whole or not at
    all, and close it.

    Names with $ in them are not formulas, control characters are escaped, and words above 60
    characters are shortened.

    Raises:
        ValueError: for a suffix other than .png, .pdf and .svg.
    """
    from matplotlib import pyplot
    from matplotlib.text import Text

    formats, width = figure_output.get()
    formats = formats or (path.suffix.removeprefix("."),)
    if unknown := set(formats) - set(FIGURE_FORMATS):
        raise ValueError(
            f"figure {path.name}: format {min(unknown)!r}; expected {', '.join(FIGURE_FORMATS)}"
        )
    if width:
        before, height = figure.get_size_inches()
        figure.set_size_inches(width, height * width / before)
    for text in figure.findobj(Text):
        words = "\n".join(map(printable, text.get_text().split("\n")))
        text.set_text(re.sub(r"\S{61,}", lambda word: f"{word[0][:28]}…{word[0][-28:]}", words))
        if (
            "$" in text.get_text() and "\\mathdefault" not in text.get_text()
        ):  # which ticks of logarithmic axes have
            text.set_parse_math(False)
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    for name in formats:
        with replacing(path.with_suffix(f".{name}"), "wb") as file:
            figure.savefig(file, dpi=130, format=name, metadata=undated.get(name))
    pyplot.close(figure)
