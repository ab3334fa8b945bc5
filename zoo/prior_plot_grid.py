"""One figure of a vision model's learned priors: every head's log-prior around the patch in the centre.

A panel is one row of K, that of the centre patch, laid out over the grid; only this row is computed, so that grids far
larger than those of training can be drawn. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.positions import Positions
from zoo.prior_plot import FLOOR, RETRIEVAL, layer_priors, save_figure
from zoo.priors.base import Prior, PriorTerms
from zoo.priors.blocked import bias_block

__all__ = ["centre_log_prior", "draw_grid_priors"]

LEAST_RANGE = 0.1  # nats on the colour scale, so that noise around 0 does not look like structure


def centre_patch(positions: Positions) -> tuple[int, int]:
    """(row, column) of the centre patch of a grid; for an even side the later of the two."""
    assert positions.shape is not None
    return positions.shape[0] // 2, positions.shape[1] // 2


@torch.no_grad()
def centre_log_prior(prior: Prior, positions: Positions) -> tuple[Tensor, Tensor]:
    """K from the patch in the centre of a grid, less each head's maximum over patches, in float64.

    Returns:
        (H, height, width) to the patches, and (H, P) to the prefix tokens.
    """
    assert positions.shape is not None
    y, x = centre_patch(positions)
    query = positions.num_prefix + y * positions.shape[1] + x
    row = query_row(prior(positions, positions, causal=False), query, positions).double().cpu()
    row = row.expand(prior.num_heads, -1)
    prefix, patches = row[:, : positions.num_prefix], row[:, positions.num_prefix :]
    highest = patches.max(dim=-1, keepdim=True).values
    return (patches - highest).unflatten(-1, positions.shape), prefix - highest


def query_row(terms: PriorTerms, query: int, positions: Positions) -> Tensor:
    """(1 or H, S): K of one query that is a patch, without the matrix it is a row of."""
    row = torch.zeros(1, positions.length)
    if terms.q_lanes is not None and terms.k_lanes is not None:
        row = row + (terms.q_lanes[0, :, query : query + 1] @ terms.k_lanes[0].transpose(-1, -2))[:, 0].cpu()
    if terms.table is not None:
        table = terms.table
        values = table.table[:, table.q_code[query] - table.k_code + table.center].cpu()
        row = row + torch.where(torch.arange(positions.length) >= table.num_prefix, values, 0.0)
    if terms.bias is not None:
        row = row + bias_block(terms.bias, slice(None), slice(query, query + 1), positions.length)[0, :, 0].cpu()
    return row


def draw_grid_priors(model: Any, title: str, path: Path, *, size: int | None = None) -> None:
    """Write one PNG: a heat map for each head, layers downwards, on one colour scale.

    Args:
        model: has `layers[n].attention.prior`, `positions(height, width)` of an image in pixels, and `config.train_size`.
        size: side of the image in pixels; None takes the training size. On larger grids the displacements that training
            has seen are framed.

    Raises:
        ValueError: see `layer_priors`; or for a size that is no multiple of the patch.
    """
    priors = layer_priors(model)
    height, width = (size, size) if size is not None else model.config.train_size
    positions, trained = model.positions(height, width), model.positions(*model.config.train_size)
    maps = [centre_log_prior(prior, positions) for prior in priors]
    lowest = min(float(patches.min()) for patches, _ in maps)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, columns = len(priors), max(prior.num_heads for prior in priors)
    named = positions.num_prefix > 0 and any(float(prefix.abs().max()) > 0 for _, prefix in maps)
    panel = 1.25 if columns > 4 else 1.5
    panel_height = panel * positions.shape[0] / positions.shape[1] + (0.18 if named else 0.05)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(panel * columns + 1.7, panel_height * rows + 1.1), layout="compressed", squeeze=False
    )
    scale = dict(cmap="viridis", vmin=max(FLOOR, min(lowest, -LEAST_RANGE)), vmax=0.0)
    image: Any = None
    for n, (prior, (patches, prefix)) in enumerate(zip(priors, maps, strict=True)):
        for h, retrieval in enumerate(prior.retrieval_heads().tolist()):
            axis = axes[n][h]
            image = axis.imshow(patches[h].numpy(), **scale)
            _decorate(axis, positions, trained, retrieval)
            if named:
                axis.set_xlabel(f"prefix {float(prefix[h].mean()):+.2f}", fontsize=7, labelpad=1)
        axes[n][0].set_ylabel(f"layer {n}", fontsize=8)
    for h in range(columns):
        axes[0][h].set_title(f"head {h}", fontsize=8)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 3.0 / (panel_height * rows)) if rows > 2 else 1.0, aspect=24)
    bar.set_label("K − max K (nats)" + (f", {FLOOR:g} or less in the darkest" if lowest < FLOOR else ""), fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(_caption(title, priors, positions, trained, (height, width)), fontsize=9)
    save_figure(figure, path)


def _decorate(axis, positions: Positions, trained: Positions, retrieval: bool) -> None:
    """The centre patch, the displacements seen in training where there are others, and a retrieval head's frame."""
    from matplotlib.patches import Rectangle

    y, x = centre_patch(positions)
    axis.set_xticks([x])
    axis.set_yticks([y])
    axis.tick_params(top=True, right=True, labelbottom=False, labelleft=False, length=3)
    if _extrapolates(positions, trained):
        assert trained.shape is not None
        far_y, far_x = trained.shape[0] - 1, trained.shape[1] - 1
        corner, extent = (x - far_x - 0.5, y - far_y - 0.5), (2 * far_x + 1, 2 * far_y + 1)
        axis.add_patch(Rectangle(corner, *extent, fill=False, edgecolor="white", linewidth=1.6, clip_on=True))
        axis.add_patch(Rectangle(corner, *extent, fill=False, edgecolor="black", linewidth=0.8, linestyle=(0, (3, 2))))
    for side in axis.spines.values():
        side.set(color=RETRIEVAL if retrieval else "0.4", linewidth=2.2 if retrieval else 0.6)


def _extrapolates(positions: Positions, trained: Positions) -> bool:
    """Whether the centre patch sees a displacement that no two patches of a training image have."""
    assert positions.shape is not None and trained.shape is not None
    return any(now // 2 > then - 1 for now, then in zip(positions.shape, trained.shape, strict=True))


def _caption(title: str, priors: list[Prior], positions: Positions, trained: Positions, pixels: tuple[int, int]) -> str:
    assert positions.shape is not None
    height, width = positions.shape
    lines = [
        title,
        "log-prior of every head from the patch in the centre (at the ticks)",
        f"{pixels[0]} × {pixels[1]} pixels, {height} × {width} patches",
    ]
    if _extrapolates(positions, trained):
        lines[2] += "; dashed: displacements seen in training"
    if any(flag for prior in priors for flag in prior.retrieval_heads().tolist()):
        lines.append("framed in vermilion: retrieval heads (β < 0)")
    return "\n".join(lines)
