"""Draws the pictures of docs/CONCEPTS.md from the priors themselves: python tools/draw_concepts.py"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import zoo
from zoo.prior_plot import save_figure

OUT = Path(__file__).resolve().parent.parent / "docs/pictures"
LINE = zoo.Positions.line(64)


def log_prior(name: str, heads: int = 1, **parameters: Tensor) -> tuple[Tensor, zoo.PriorTerms]:
    """(K of one head, the terms it comes from) of a prior with given parameters."""
    prior = zoo.create_prior(name, num_heads=heads)
    with torch.no_grad():
        for parameter, values in parameters.items():
            getattr(prior, parameter).copy_(values)
        terms = prior(LINE, LINE, causal=True)
    return terms.dense()[0, -1], terms


def draw() -> None:
    from matplotlib import pyplot

    shown = {
        "alibi, m = 1/256": log_prior("alibi", heads=8),
        "ggd, θα = −1, θβ = 0.5": log_prior("ggd", theta_alpha=torch.tensor([-1.0]), theta_beta=torch.tensor([0.5])),
        "spectral, R = 2": log_prior("spectral", alpha=torch.tensor([[1.0, 0.5]]), beta=torch.tensor([[0.3, -0.5]])),
    }
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    distance = torch.arange(64)
    for (name, (matrix, _)), dashes in zip(shown.items(), ("-", "--", ":"), strict=True):
        row = matrix[-1].double()
        left.plot(distance, row.flip(0), dashes, label=name)
        right.plot(distance, row.softmax(0).flip(0), dashes, label=name)
    left.set(title="log-prior K", xlabel="distance i − j")
    right.set(title="prior π = softmax(K), last row", xlabel="distance i − j")
    left.legend(fontsize=8)
    save_figure(figure, OUT / "prior.png")

    matrix, terms = shown["spectral, R = 2"]
    assert terms.q_lanes is not None and terms.k_lanes is not None
    product(
        "lane", {"query lanes (T × 4)": terms.q_lanes[0, -1], "key lanes, transposed": terms.k_lanes[0, -1].T}, matrix
    )

    matrix, _ = shown["ggd, θα = −1, θβ = 0.5"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7, 3), layout="constrained")
    left.plot(distance, matrix[-1].flip(0))
    left.set(title="the table t[h, d]", xlabel="displacement d = i − j")
    heat(right, matrix, "the matrix it stands for")
    save_figure(figure, OUT / "table.png")


def heat(axis, matrix: Tensor, title: str, *, causal: bool = True) -> None:
    hidden = torch.ones_like(matrix).triu(1).bool() if causal else torch.zeros_like(matrix).bool()
    axis.imshow(matrix.masked_fill(hidden, math.nan), cmap="viridis", aspect="auto", interpolation="nearest")
    axis.set(title=title, xticks=[], yticks=[])


def product(name: str, factors: dict[str, Tensor], matrix: Tensor) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3), layout="constrained", width_ratios=[1, 2, 2])
    for axis, (title, factor) in zip(axes, factors.items(), strict=False):
        heat(axis, factor, title, causal=False)
    heat(axes[2], matrix, "their product: K")
    save_figure(figure, OUT / f"{name}.png")


if __name__ == "__main__":
    draw()
