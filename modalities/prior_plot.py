"""`priorzoo plot-prior`, a model's log-priors: curves over distance (the last row of K), maps
around an image's centre."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer
from torch import Tensor, nn

from modalities.figures import DASHES, SMALLEST, panels, save_figure
from zoo.catalog import create_model, load_model
from zoo.cli import console, title_of
from zoo.console import Import, OnceCommand, call, new_app
from zoo.errors import require
from zoo.layers import Attention
from zoo.model import ZooModel
from zoo.plugins import import_named
from zoo.positions import Positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lower end of a scale: exp(−12) = 6e-6 of the best key's weight.
FLOOR = -12.0
# Nats on the colour scale of a map, so that noise around 0 does not look like structure.
LEAST_RANGE = 0.1
# Tokens of the curves of `prior_curves`.
CURVE_LENGTH = 1024
# Okabe and Ito's vermilion, of heads that look away from the query.
RETRIEVAL = "#D55E00"


def retrieval_heads(layer: Attention) -> list[bool]:
    """Whether each head looks away from the query.

    Where SSMax's s is negative the prior is turned round.
    """
    negated = None
    if layer.ssmax is not None and layer.scale_prior:
        negated = layer.ssmax.scales() < 0
    return layer.prior.retrieval_heads(negated).tolist()


def _log_prior(layer: Attention, queries: Positions, keys: Positions, *, causal: bool) -> Tensor:
    """(1 or B, H, T, S) float64: what a layer adds to the content's logits: K, or s_h·ln n·K where
    SSMax scales it."""
    log_prior = layer.prior.log_prior(queries, keys, causal=causal).double().cpu()
    if layer.ssmax is None or not layer.scale_prior:
        return log_prior
    return log_prior * layer.ssmax(queries, causal=causal).double().cpu()[..., None]


def layers_with_priors(model: ZooModel) -> list[Attention]:
    """The attention of each layer of a model; ValueError where all K = 0, or a K depends on the
    model's input."""
    attentions = [cast(Attention, layer.attention) for layer in cast(nn.ModuleList, model.layers)]
    if all(attention.prior.is_zero for attention in attentions):
        raise ValueError(
            "this model's log-prior is 0: "
            "its method acts on queries, keys or embeddings, or it has none"
        )
    if any(attention.prior.depends_on_content for attention in attentions):
        raise ValueError("this model's log-prior depends on its input, so it has no fixed curve")
    return attentions


@torch.no_grad()
def log_prior_curve(layer: Attention, length: int) -> Tensor:
    """(H, length) float64: K at distances d = 0 … length − 1 from a query at position length − 1,
    less each head's maximum.

    Terms that depend on the key's position alone, such as GOAT's sink, are part of the curve: key 0
    is its last point.
    """
    query = Positions.line(1, offset=length - 1)
    keys = Positions.line(length)
    row = _log_prior(layer, query, keys, causal=True)[0, :, 0].flip(-1)
    return row - row.max(dim=-1, keepdim=True).values


@torch.no_grad()
def centre_log_prior(layer: Attention, positions: Positions) -> tuple[Tensor, Tensor]:
    """K from the patch in the centre of a grid (the later one of an even side), less each head's
    maximum over patches.

    Returns:
        (H, height, width) to the patches, and (H, P) to the prefix tokens, float64.
    """
    assert positions.shape is not None
    height, width = positions.shape
    query = positions.num_prefix + height // 2 * width + width // 2
    row = _log_prior(layer, positions, positions, causal=False)[0, :, query]
    prefix, patches = row.tensor_split([positions.num_prefix], dim=1)
    highest = patches.max(dim=-1, keepdim=True).values
    return (patches - highest).unflatten(-1, (height, width)), prefix - highest


@torch.no_grad()
def prior_curves(model: ZooModel) -> dict[str, Any]:
    """{at, layers[layer][head][n], unit, trained}: K less its maximum, cut below `FLOOR`.

    On a line from the last of `CURVE_LENGTH` tokens. On a grid the mean over patches at one
    distance from the centre of an image of twice the training side. ValueError: see
    `layers_with_priors`.
    """
    priors = layers_with_priors(model)
    if model.train_positions().is_grid:
        unit = "patches"
        distances, curves, trained = _grid_curves(model, priors)
    else:
        unit = "tokens"
        trained = model.config.train_context
        from_one = torch.logspace(0, math.log2(CURVE_LENGTH), 81, base=2, dtype=torch.float64)
        distances = from_one.sub(1).round().unique().long()
        inside = distances.clamp(max=CURVE_LENGTH - 1)
        curves = [log_prior_curve(prior, CURVE_LENGTH)[:, inside] for prior in priors]
    return {
        "at": [round(distance, 3) for distance in distances.tolist()],
        "layers": [_rounded(curve) for curve in curves],
        "unit": unit,
        "trained": trained,
    }


def _grid_curves(model: ZooModel, priors: list[Attention]) -> tuple[Tensor, list[Tensor], int]:
    """(distances (n,) in patches, curve (H, n) of each layer, patches of the training height)."""
    height, width = model.config.train_size
    positions = model.positions(2 * height, 2 * width)
    rows, columns = positions.shape
    dy = torch.arange(rows)[:, None] - rows // 2
    dx = torch.arange(columns) - columns // 2
    distance = torch.hypot(dy.double(), dx.double()).flatten()
    distances, group = distance.unique(return_inverse=True)
    curves = []
    for prior in priors:
        patches = centre_log_prior(prior, positions)[0].flatten(1)
        means = [patches[:, group == n].mean(-1) for n in range(len(distances))]
        curves.append(torch.stack(means, dim=-1))
    pixels_per_patch = 2 * height // rows
    return distances, curves, height // pixels_per_patch


def _rounded(curve: Tensor) -> list[list[float]]:
    """(H, n) numbers, cut below `FLOOR`."""
    heads = []
    for head in curve.tolist():
        heads.append([round(max(value, FLOOR), 3) for value in head])
    return heads


def draw_priors(model: ZooModel, title: str, path: Path, *, length: int) -> None:
    """Write one PNG: a panel of curves for each layer. ValueError as in `layers_with_priors`."""
    if length < 2:
        raise ValueError(f"a curve needs a length of at least 2, got {length}")
    priors = layers_with_priors(model)
    trained = model.config.train_context
    columns = min(4, len(priors))
    figure, axes = panels(math.ceil(len(priors) / columns), columns, width=3.6, height=3.2)
    from matplotlib import colormaps

    # Of the legend: the first layer's heads.
    handles = []
    distance = torch.logspace(0, math.log2(length), 512, base=2).round().long().unique() - 1
    for n, (axis, prior) in enumerate(zip(axes, priors, strict=False)):
        last_head = max(prior.num_heads - 1, 1)
        curves = log_prior_curve(prior, length)[:, distance]
        for head, (curve, retrieval) in enumerate(zip(curves, retrieval_heads(prior), strict=True)):
            color = colormaps["cividis"](0.9 * head / last_head)
            dashes = DASHES[head % 4]
            axis.plot(
                distance + 1,
                curve,
                color=RETRIEVAL if retrieval else color,
                linestyle=dashes,
                linewidth=2.6 if retrieval else 1.7,
            )
            if n == 0:
                handles += axis.plot([], [], color=color, linestyle=dashes, label=f"head {head}")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set(title=f"layer {n}", ylim=(FLOOR, 0.6), xlabel="distance + 1 (tokens, log₂)")
        axis.tick_params(labelsize=8.5)
        if n % columns == 0:
            axis.set_ylabel("log-prior − its maximum (nats)", fontsize=8.5)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if trained < length:
            _mark_trained(axis, trained)
    for axis in axes[len(priors) :]:
        axis.set_visible(False)
    handles += axes[0].plot(
        [], [], color=RETRIEVAL, linewidth=2.6, label="thick: looks away from the query"
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        fontsize=8.5,
        frameon=False,
        ncols=min(5, len(handles)),
    )
    figure.suptitle(f"{title}: log-prior of every head against distance", fontsize=11)
    save_figure(figure, path)


def _mark_trained(axis: Axes, trained: int) -> None:
    axis.axvline(trained, color="0.35", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    axis.annotate(
        f"trained at {trained}",
        (trained, FLOOR),
        rotation=90,
        ha="right",
        fontsize=SMALLEST,
    )


def draw_grid_priors(model: Any, title: str, path: Path, *, size: int | None = None) -> None:
    """Write one PNG: a heat map for each head, layers downwards, on one colour scale; framed heads
    look away from the query.

    Args:
        model: has `layers[n].attention.prior`, `positions(height, width)` of an image in pixels,
            and `config.train_size`.
        size: side of the image in pixels; None takes the training size. On larger grids the
            displacements that training has seen are framed.
    """
    priors = layers_with_priors(model)
    pixels = model.config.train_size if size is None else (size, size)
    positions = model.positions(*pixels)
    trained = model.positions(*model.config.train_size)
    maps = [centre_log_prior(prior, positions) for prior in priors]
    least = min(float(patches.min()) for patches, _ in maps)
    darkest = max(FLOOR, min(-LEAST_RANGE, least))
    height, width = positions.shape
    trained_height, trained_width = trained.shape
    y = height // 2
    x = width // 2
    beyond_training = y > trained_height - 1 or x > trained_width - 1
    columns = max(prior.num_heads for prior in priors)
    figure, axes = panels(len(priors), columns, width=1.8, height=1.7 * height / width + 0.3)
    for n, (prior, (patches, prefix)) in enumerate(zip(priors, maps, strict=True)):
        for h, retrieval in enumerate(retrieval_heads(prior)):
            axis = axes[n * columns + h]
            image = axis.imshow(patches[h].numpy(), cmap="viridis", vmin=darkest, vmax=0.0)
            axis.set_title(f"layer {n}, head {h}", fontsize=9)
            axis.set(xticks=[x], yticks=[y], xticklabels=[], yticklabels=[])
            if bool(prefix.any()):
                axis.set_xlabel(f"prefix {float(prefix[h].mean()):+.2f}", fontsize=7)
            if beyond_training:
                _frame_trained(axis, x, y, trained_height, trained_width)
            for side in axis.spines.values():
                side.set_color(RETRIEVAL if retrieval else "0.4")
                side.set_linewidth(2.2 if retrieval else 0.6)
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("log-prior − its maximum (nats)")
    grids = (
        f"{pixels[0]} × {pixels[1]} pixels, {height} × {width} patches; "
        "dashed: displacements seen in training"
    )
    heading = f"{title}\nlog-prior of every head from the centre (ticks)\n{grids}"
    figure.suptitle(heading, fontsize=8)
    save_figure(figure, path)


def _frame_trained(axis: Axes, x: int, y: int, height: int, width: int) -> None:
    """Frame the displacements from (x, y) that a grid of height × width has."""
    from matplotlib.patches import Rectangle

    frame = Rectangle(
        (x - width + 0.5, y - height + 0.5),
        2 * width - 1,
        2 * height - 1,
        fill=False,
        color="white",
        linestyle="--",
    )
    axis.add_patch(frame)


app = new_app()
main = partial(call, app)


@app.command(cls=OnceCommand)
def plot_prior(
    name: Annotated[
        str, typer.Argument(help="a model's name with a tag of weights, or a saved model's folder")
    ],
    out: Annotated[Path | None, typer.Option(help="default: NAME.prior.png in this folder")] = None,
    length: Annotated[
        int | None, typer.Option(help="text: tokens; default 8 times the training length")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="vision: side of the image in pixels; default as trained")
    ] = None,
    import_: Import = [],  # noqa: B006
) -> None:
    """Every head's log-prior in one PNG, retrieval heads marked: against distance, or around the
    centre of an image."""
    import_named(import_)
    require("matplotlib", "drawing priors", "figures")
    if os.path.isdir(name):
        model = load_model(name)
        title = title_of(name)
    else:
        model = create_model(name)
        title = name if "." in name else f"{name} (untrained)"
    path = out or Path(f"{Path(name).name}.prior.png")
    grid = model.train_positions().is_grid
    if grid and length is not None:
        raise ValueError("--length does not apply to this model; use --size, in pixels")
    if not grid and size is not None:
        raise ValueError("--size does not apply to this model; use --length, in tokens")
    if grid:
        draw_grid_priors(model, title, path, size=size)
    else:
        draw_priors(model, title, path, length=length or 8 * model.config.train_context)
    console.print(f"written: {path}", soft_wrap=True)
