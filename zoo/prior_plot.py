"""One figure of a model's learned priors: every head's log-prior against distance, and its parameters.

A curve is the last row of K from the prior's oracle: one query at position N − 1, all N keys, O(N) memory. matplotlib is
imported when a figure is drawn.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import replacing
from zoo.positions import Positions
from zoo.priors.base import Prior

__all__ = ["draw_priors", "head_style", "layer_priors", "log_prior_curve", "mark_training", "save_figure"]

FLOOR = -12.0  # lower end of the panels: exp(−12) = 6e-6 of the best key's weight
RETRIEVAL = "#D55E00"  # Okabe and Ito's vermilion


def layer_priors(model: nn.Module) -> list[Prior]:
    """The prior of each layer of a model.

    Raises:
        ValueError: for a model without layers, with K = 0, or whose K depends on its input.
    """
    priors = [layer.attention.prior for layer in getattr(model, "layers", [])]
    if not priors:
        raise ValueError("this model has no layers with a prior")
    if all(prior.is_zero for prior in priors):
        raise ValueError(
            "this model's log-prior is 0: its position method acts on queries, keys or embeddings, or it has none"
        )
    if any(prior.depends_on_content for prior in priors):
        raise ValueError("this model's log-prior depends on its input, so it has no fixed curve")
    return priors


@torch.no_grad()
def log_prior_curve(prior: Prior, length: int) -> Tensor:
    """(H, length) float64: K at distances d = 0 … length − 1 from a query at position length − 1, less each head's maximum.

    Terms that depend on the key's position alone, such as GOAT's sink, are part of the curve: key 0 is its last point.
    """
    query, keys = Positions.line(1, offset=length - 1), Positions.line(length)
    row = prior.log_prior(query, keys, causal=True)[0, :, 0].double().cpu().flip(-1)
    return row - row.max(dim=-1, keepdim=True).values


def draw_priors(model: nn.Module, title: str, path: Path, *, length: int) -> None:
    """Write one PNG: a panel of curves for each layer, and below them the parameters as layer × head tables.

    Raises:
        ValueError: see `layer_priors`; or for a length below 2.
    """
    if length < 2:
        raise ValueError(f"a curve needs a length of at least 2, got {length}")
    priors = layer_priors(model)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(priors))
    rows = math.ceil(len(priors) / columns)
    tables = [_head_parameters(prior) for prior in priors]
    names = list(dict.fromkeys(name for table in tables for name in table))
    heads = max(prior.num_heads for prior in priors)
    absent = [math.nan] * heads  # a parameter of other layers' methods
    table_height = 0.9 + 0.28 * len(priors) if names else 0.0
    figure = pyplot.figure(figsize=(3.6 * columns + 1.4, 2.7 * rows + table_height + 0.6), layout="constrained")
    top, *below = figure.subfigures(
        2 if names else 1, 1, height_ratios=[2.7 * rows, table_height][: 1 + bool(names)], squeeze=False
    ).flat
    axes = list(top.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for n, (axis, prior) in enumerate(zip(axes, priors, strict=False)):
        _draw_layer(axis, prior, length, trained_at=getattr(model.config, "train_context", None))
        axis.set_title(f"layer {n}", fontsize=10)
        if n % columns == 0:
            axis.set_ylabel("K − max K (nats)")
        if n + columns >= len(priors):  # the lowest of its column
            axis.set_xlabel("distance + 1 (tokens, log₂)")
            axis.tick_params(labelbottom=True)
    for axis in axes[len(priors) :]:
        axis.set_visible(False)
    _legend(top, priors, heads)
    if names:
        for axis, name in zip(below[0].subplots(1, len(names), squeeze=False).flat, names, strict=True):
            _draw_table(
                axis,
                name,
                [table.get(name, absent) for table in tables],
                [prior.retrieval_heads().tolist() for prior in priors],
            )
    figure.suptitle(f"{title}: log-prior of every head against distance", fontsize=11)
    save_figure(figure, path)


@torch.no_grad()
def _head_parameters(prior: Prior) -> dict[str, list[float]]:
    return {name: value.double().cpu().tolist() for name, value in prior.head_parameters().items()}


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG, whole or not at all, and close it."""
    from matplotlib import pyplot

    with replacing(path, "wb") as file:
        figure.savefig(file, dpi=130, format="png")
    pyplot.close(figure)


def _draw_layer(axis, prior: Prior, length: int, *, trained_at: int | None) -> None:
    curves = log_prior_curve(prior, length)
    at = _sampled(length)
    for head, (curve, retrieval) in enumerate(zip(curves, prior.retrieval_heads().tolist(), strict=True)):
        axis.plot(at + 1, curve[at], **head_style(head, prior.num_heads, retrieval))
    axis.set_xscale("log", base=2)
    axis.set_ylim(FLOOR, 0.6)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    mark_training(axis, trained_at, length)


def mark_training(axis: Any, trained_at: int | None, length: int) -> None:
    """A dashed line at the training length, where it is in view."""
    if trained_at and trained_at < length:
        axis.axvline(trained_at, color="0.35", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
        low = axis.get_ylim()[0]
        axis.annotate(
            f"trained at {trained_at}", (trained_at, low + 0.2), rotation=90, ha="right", fontsize=7, color="0.35"
        )


def _legend(figure, priors: list[Prior], heads: int) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **head_style(h, heads, False), label=f"head {h}") for h in range(heads)]
    if any(flag for prior in priors for flag in prior.retrieval_heads().tolist()):
        handles.append(
            Line2D([], [], color=RETRIEVAL, linewidth=2.6, label="retrieval head\n(β < 0), in its\nhead's dashes")
        )
    figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False, handlelength=3.2)


def _draw_table(axis, name: str, rows: list[list[float]], marked: list[list[bool]]) -> None:
    """Layers × heads, printed and shaded; a marked cell is framed."""
    from matplotlib.patches import Rectangle

    axis.set_title(name, fontsize=9)
    largest = max((abs(v) for row in rows for v in row if not math.isnan(v)), default=1.0) or 1.0
    axis.imshow(rows, cmap="PuOr_r", vmin=-largest, vmax=largest, aspect="auto", alpha=0.55)
    heads = max(map(len, rows))
    size = 8 if heads <= 8 else 5.5 if heads <= 16 else 4
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            text = "–" if math.isnan(value) else f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.0e}"
            axis.text(x, y, text, ha="center", va="center", fontsize=size)
            if marked[y][x]:
                axis.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, edgecolor=RETRIEVAL, linewidth=2))
    axis.set_xticks(range(heads))
    axis.set_yticks(range(len(rows)))
    axis.tick_params(labelsize=7, length=0)
    axis.set_xlabel("head", fontsize=8)
    axis.set_ylabel("layer", fontsize=8)


def head_style(head: int, heads: int, retrieval: bool) -> dict:
    """Grey level and dash by head index; retrieval heads in their own colour."""
    dashes = ("-", "--", "-.", ":")[head % 4]
    if retrieval:
        return {"color": RETRIEVAL, "linewidth": 2.6, "linestyle": dashes, "zorder": 4}
    from matplotlib import colormaps

    return {"color": colormaps["cividis"](0.9 * head / max(heads - 1, 1)), "linewidth": 1.7, "linestyle": dashes}


def _sampled(length: int) -> Tensor:
    """At most a few hundred distances, all small ones included: the resolution of a log axis."""
    if length <= 512:
        return torch.arange(length)
    spaced = torch.logspace(math.log10(256), math.log10(length - 1), 256, dtype=torch.float64).round().long()
    return torch.unique(torch.cat([torch.arange(256), spaced.clamp(max=length - 1)]))
