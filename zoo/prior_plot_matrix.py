"""One figure of a model's priors taken apart: the part of the key alone, the part of the distance, K as a matrix, and π.

GOAT (arXiv 2601.15380), fig. 1, 2b and 3b. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zoo.model import ZooModel
from zoo.positions import Positions
from zoo.prior_plot import head_style, layer_priors, mark_training, save_figure
from zoo.priors.base import Prior
from zoo.priors.key_bias import KeyBias

__all__ = ["draw_prior_matrices", "key_and_distance_parts"]

SHOWN = 8.0  # logits below a row's largest that the matrix of K resolves


@torch.no_grad()
def key_and_distance_parts(prior: Prior, length: int) -> tuple[Tensor, Tensor]:
    """u(j) of the parts that see the key's position alone, and κ(d) of all others, (H, length) float64 each.

    κ is read off the last row, for d = 0 … length − 1. The slope of a key bias is in κ: up to a row constant it is linear in d.
    A part is 0 where the prior has none of its kind.
    """
    query, keys = Positions.line(1, offset=length - 1), Positions.line(length)
    of_key, of_distance = torch.zeros(2, prior.num_heads, length, dtype=torch.float64)
    for part in prior.parts() or [prior]:
        if isinstance(part, KeyBias):
            of_key += part.bias(keys.index(), False, torch.float64)[0].cpu()
            of_distance -= part.slopes().cpu()[:, None] * torch.arange(length)
        else:
            of_distance += part.log_prior(query, keys, causal=True)[0, :, 0].double().cpu().flip(-1)
    return of_key, of_distance


@torch.no_grad()
def draw_prior_matrices(model: ZooModel, title: str, path: Path, *, length: int, head: int | None = None) -> None:
    """Write one PNG: a line for each layer with u(j), κ(d), and of one head K[i,j] before the mask and π after it.

    Args:
        head: whose matrices are drawn; None: in each layer the one with most of π on the first key in the last row.

    Raises:
        ValueError: see `layer_priors`; for a length below 2, or a head that the model does not have.
    """
    if length < 2:
        raise ValueError(f"a matrix needs a length of at least 2, got {length}")
    priors = layer_priors(model)
    heads = priors[0].num_heads
    if head is not None and not 0 <= head < heads:
        raise ValueError(f"head {head}: expected one of 0 to {heads - 1}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(priors), 4, figsize=(13.5, 2.7 * len(priors) + 0.4), squeeze=False, layout="constrained"
    )
    at = Positions.line(length)
    for n, (line, prior) in enumerate(zip(axes, priors, strict=True)):
        whole = prior.log_prior(at, at, causal=True)[0].double().cpu()
        pi = whole.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        shown = int(pi[:, -1, 0].argmax()) if head is None else head
        parts = key_and_distance_parts(prior, length)
        for axis, part, name, of in zip(line, parts, ("u(j)", "κ(d)"), ("key j", "distance d"), strict=False):
            _draw_curves(axis, part, prior, f"layer {n}: {name}", of, model.config.train_context)
        _draw_matrix(line[2], whole[shown], f"K[i, j], head {shown}, before the mask", figure)
        masked = f"π = softmax K, masked; π[{length - 1}, 0] = {float(pi[shown, -1, 0]):.2g}"
        _draw_matrix(line[3], pi[shown], masked, figure, gamma=0.35)
    figure.suptitle(f"{title}: the prior of the key's position, that of the distance, and both", fontsize=11)
    save_figure(figure, path)


def _draw_curves(axis: Any, part: Tensor, prior: Prior, title: str, of: str, trained_at: int) -> None:
    """Each head's curve, with its value at 0 and, where it is in view, at the training length."""
    retrieval = prior.retrieval_heads().tolist()
    for h, curve in enumerate(part):
        axis.plot(curve, **head_style(h, prior.num_heads, retrieval[h]))
    high = float(part.max())
    if float(part.min()) < high - 4 * SHOWN:
        axis.set_ylim(high - 4 * SHOWN, high + 0.15 * SHOWN)
    mark_training(axis, trained_at, len(part[0]))
    ends = [f"at 0: {float(part[:, 0].min()):.3g} … {float(part[:, 0].max()):.3g}"]
    if trained_at < part.shape[1]:
        there = part[:, trained_at]
        ends.append(f"at {trained_at}: {float(there.min()):.3g} … {float(there.max()):.3g}")
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(f"{of}   ({'; '.join(ends)})", fontsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)


def _draw_matrix(axis: Any, matrix: Tensor, title: str, figure: Any, *, gamma: float = 1.0) -> None:
    from matplotlib.colors import PowerNorm

    low, high = max(float(matrix.min()), float(matrix.max()) - SHOWN), float(matrix.max())
    image = axis.imshow(matrix, cmap="cividis", norm=PowerNorm(gamma, low, high), interpolation="nearest")
    figure.colorbar(image, ax=axis, shrink=0.85)
    axis.set_title(title, fontsize=9)
    axis.set(xlabel="key j", ylabel="query i")
