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
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modalities.results import (
    LENGTH,
    Axis,
    ModelResult,
    Row,
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
# Arguments of matplotlib's plot.
Style = dict[str, Any]
# Inches of a figure: where a page shows it 800 pixels wide, `SMALLEST` points are 9 pixels.
WIDTH = 9.6
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
    columns: set[str] = set()
    for row in _all_rows(results):
        columns.update(row)
    panel_scores = []
    for score in scores:
        if score.drawn and not score.exception and score.column in columns:
            panel_scores.append(score)
    # Four panels are two by two; a figure without a score has an empty one.
    count = max(1, len(panel_scores))
    across = 2 if count == 4 else min(3, count)
    figure, axes = panels(math.ceil(count / across), across, width=4.6, height=3.5)
    for axis, score in zip(axes, panel_scores, strict=False):
        curves(axis, results, score, along)
    for axis in axes[len(panel_scores) :]:
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
    most_lengths = max(len(result.rows) for result in results)
    least_width = 3.0 if across > 1 else 5.0
    width = max(least_width, 1.2 + 0.55 * most_lengths)
    figure, axes = panels(math.ceil(len(results) / across), across, width=width, height=3.1)
    for axis in axes[len(results) :]:
        axis.set_visible(False)
    any_beyond = False
    for axis, result in zip(axes, results, strict=False):
        lengths = [row["length"] for row in result.rows]
        depths = result.rows[0]["depths"]
        by_length = [row[column] for row in result.rows]
        grid = list(zip(*by_length, strict=True))
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="upper")
        axis.set_xticks(range(len(lengths)), [compact(length) for length in lengths])
        ticks = range(0, len(depths), max(1, len(depths) // 5))
        axis.set_yticks(ticks, [f"{depths[k]:.0%}" for k in ticks])
        axis.set(title=result.label, xlabel="length (tokens)", ylabel="depth of the needle")
        inside = sum(length <= result.trained_at for length in lengths)
        if 0 < inside < len(lengths):
            any_beyond = True
            # Black dashes on white are seen on every colour of the map.
            axis.axvline(inside - 0.5, color="white", linewidth=2.5)
            axis.axvline(inside - 0.5, color="black", linewidth=1.2, linestyle=(0, (3, 2)))
        axis.title.set_fontsize(9)
    figure.colorbar(image, ax=axes[: len(results)], label="exact match", shrink=0.8)
    if any_beyond:
        title += "\nright of the dashed line: longer than in training"
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def styles_of(results: Sequence[ModelResult]) -> list[Style]:
    """Line styles by method.

    A second model of a method keeps its colour and marker and takes the next dash pattern; a method
    without a style takes a spare one, dashed where these come again.
    """
    models: Counter[str] = Counter()
    spare: dict[str, int] = {}
    styles = []
    for result in results:
        method = result.method
        base = method if method in STYLES else method.removesuffix("_ssmax")
        dash = models[method]
        if base in STYLES:
            color, marker = STYLES[base]
        else:
            number = spare.setdefault(base, len(spare))
            color, marker = SPARE[number % len(SPARE)]
            dash += number // len(SPARE)
        models[method] += 1
        styles.append(
            {
                **LINE,
                "color": color,
                "marker": marker,
                "markerfacecolor": color if base == method else "white",
                "linestyle": DASHES[dash % len(DASHES)],
                "label": result.label,
            }
        )
    return styles


def panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """`width` × `height` inches a panel, narrower where a row would be wider than `WIDTH`, and 1.8
    at least."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panel_width = max(min(width, WIDTH / columns), 1.8)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(panel_width * columns, height * rows),
        layout="constrained",
        squeeze=False,
    )
    return figure, list(axes.flat)


def curves(axis: Axes, results: Sequence[ModelResult], score: Score, along: Axis = LENGTH) -> None:
    """One line per model or group of seeds, over a logarithmic axis of base 2, from the rows that
    have the score."""
    column = along.column
    whiskers = not any(isinstance(result, SeedMean) for result in results)
    for result, style in zip(results, styles_of(results), strict=True):
        has_score = [row.get(score.column) is not None for row in result.rows]
        rows = list(compress(result.rows, has_score))
        places = [row[column] for row in rows]
        axis.plot(places, [row[score.column] for row in rows], **style)
        if isinstance(result, SeedMean):
            low = [row[score.column] for row in compress(result.low, has_score)]
            high = [row[score.column] for row in compress(result.high, has_score)]
            _draw_band(axis, places, low, high, style["color"])
        elif whiskers:
            _draw_whiskers(axis, places, rows, score.column, style["color"])
    _scale_along(axis, sorted({row[column] for row in _all_rows(results)}), along)
    axis.set_xlabel(along.label, fontsize=9)
    axis.set_ylabel(score.label or score.column.replace("_", " "), fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.6)
    if score.unit_interval:
        axis.set_ylim(-0.04, 1.04)
    elif not score.linear:
        values = [row.get(score.column) for row in _all_rows(results)]
        log_if_wide(axis, [value for value in values if value is not None])
    if score.level is not None:
        axis.axhline(score.level, **RULE)
    chance = f"chance_{score.column}"
    rows = [row for row in results[0].rows if chance in row]
    if rows:
        axis.plot(
            [row[column] for row in rows],
            [row[chance] for row in rows],
            **RULE | {"linestyle": ":"},
        )
        first = (rows[0][column], rows[0][chance])
        axis.annotate("chance", first, fontsize=SMALLEST, color="0.35", va="bottom")
    mark_training(axis, results, along)
    if score.title:
        name_panel(axis, score.title)


def _all_rows(results: Sequence[ModelResult]) -> Iterator[Row]:
    for result in results:
        yield from result.rows


def _draw_band(
    axis: Axes, places: list[float], low: list[float], high: list[float], color: str
) -> None:
    """From the least to the greatest seed."""
    axis.fill_between(places, low, high, color=color, alpha=0.07, linewidth=0, zorder=2)
    for edge in (low, high):
        axis.plot(places, edge, color=color, alpha=0.45, linewidth=0.7, zorder=2)


def _draw_whiskers(
    axis: Axes, places: list[float], rows: Sequence[Row], column: str, color: str
) -> None:
    """Of the standard error, where rows have it: "nll_standard_error (512)" of "nll (512)"."""
    name, space, condition = column.partition(" (")
    error = f"{name}_standard_error{space}{condition}"
    errors = [row.get(error) or 0.0 for row in rows]
    if any(errors):
        axis.errorbar(
            places,
            [row[column] for row in rows],
            errors,
            fmt="none",
            ecolor=color,
            elinewidth=1.0,
            capsize=2.5,
            alpha=0.7,
        )


def _scale_along(axis: Axes, ticks: list[float], along: Axis) -> None:
    """A logarithmic x axis with a tick at each place, turned or small where there is little
    room."""
    axis.set_xscale("log", base=2)
    gaps = [math.log2(b / a) for a, b in pairwise(ticks)]
    room = min(gaps) / sum(gaps) if gaps else 1.0
    rotation = 0 if room > 0.07 and len(ticks) < 10 else 60
    axis.set_xticks(ticks, [along.tick(tick) for tick in ticks], rotation=rotation)
    if room < 0.12:
        axis.tick_params(axis="x", labelsize=SMALLEST)
    axis.set_xticks([], minor=True)
    octaves = math.log2(ticks[-1] / ticks[0])
    margin = 2 ** (0.07 * max(1.0, min(5.0, octaves)))
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
    factors = (1, 1.5, 2, 3, 4, 6, 8) if narrow else (1, 2, 5)
    axis.yaxis.set_major_locator(LogLocator(subs=factors))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_minor_locator(LogLocator(subs=()))


def mark_training(axis: Axes, results: Sequence[ModelResult], along: Axis) -> None:
    """Dashed lines at places of training in view, two at the ends of a range, named above the
    panel, where no curve runs."""
    low, high = axis.get_xlim()
    ranges = sorted({result.trained_range or (result.trained_at,) for result in results})
    in_view = [place for place in chain.from_iterable(ranges) if low <= place <= high]
    for place in in_view:
        axis.axvline(place, **RULE | {"linestyle": (0, (4, 3))})
    if in_view:
        names = ", ".join(" to ".join(map(along.tick, places)) for places in ranges)
        middle = math.exp(sum(map(math.log, in_view)) / len(in_view))
        axis.annotate(
            f"trained at {names}",
            (middle, 1.01),
            fontsize=SMALLEST,
            color="0.35",
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
        )


def name_panel(axis: Axes, text: str) -> None:
    # Above the line that names the training length.
    axis.set_title(text, pad=17, fontsize=11)


def finish(
    figure: Figure, axes: Sequence[Axes], results: Sequence[ModelResult], path: Path
) -> None:
    """One legend for all panels, below them, in the order of the models; then save."""
    handles, labels = axes[0].get_legend_handles_labels()
    counts = [result.seeds if isinstance(result, SeedMean) else 1 for result in results]
    same_count = len(set(counts)) == 1
    names = {label: label for label in labels}
    for result, name, count in zip(results, short_names(results), counts, strict=True):
        if not same_count:
            name += f", {count} seeds" if count > 1 else ", one seed"
        names[result.label] = name
    texts = [names[label] for label in labels]
    width, height = figure.get_size_inches()
    longest = max(map(len, texts))
    # A name takes 0.7 inches for its line and 0.075 for a letter; a row of the legend is 0.18 high.
    columns = max(1, min(len(texts), int(width / (0.7 + 0.075 * longest))))
    figure.set_size_inches(width, height + 0.18 * math.ceil(len(texts) / columns))
    legend = figure.legend(
        handles,
        texts,
        loc="outside lower center",
        fontsize=8.5,
        frameon=False,
        handlelength=2.8,
        ncols=columns,
        title_fontsize=8.5,
    )
    if set(counts) != {1}:
        number = str(counts[0]) if same_count else "the"
        legend.set_title(f"mean of {number} seeds, band from least to greatest")
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
    unknown = set(formats) - set(FIGURE_FORMATS)
    if unknown:
        raise ValueError(
            f"figure {path.name}: format {min(unknown)!r}; expected {', '.join(FIGURE_FORMATS)}"
        )
    if width:
        before, height = figure.get_size_inches()
        figure.set_size_inches(width, height * width / before)
    for text in figure.findobj(Text):
        text.set_text(_shown(text.get_text()))
        # Ticks of logarithmic axes are formulas of \mathdefault.
        if "$" in text.get_text() and "\\mathdefault" not in text.get_text():
            text.set_parse_math(False)
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    for name in formats:
        with replacing(path.with_suffix(f".{name}"), "wb") as file:
            figure.savefig(file, dpi=130, format=name, metadata=undated.get(name))
    pyplot.close(figure)


def _shown(text: str) -> str:
    """Lines without control characters, and words above 60 characters without their middle."""
    lines = [printable(line) for line in text.split("\n")]
    return re.sub(r"\S{61,}", lambda word: f"{word[0][:28]}…{word[0][-28:]}", "\n".join(lines))
