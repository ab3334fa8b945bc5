"""Pictures of attention over what was read: the prior, the content and their product side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from modalities.contract import Reading
from zoo.analysis import Analysis
from zoo.prior_plot import save_figure

__all__ = ["PARTS", "View", "draw_attention"]

PARTS = {"prior": "prior π = softmax K", "content": "content = softmax s", "weights": "attention p = softmax(s + K)"}
LINE = 64  # characters of a line of text
SIZE = 0.078  # inches of a character
COLORS = "YlOrRd"


@dataclass(frozen=True)
class View:
    """One row of one head of one model.

    Attributes:
        title: of the model.
        found: of the layer, with its weights.
        head, row: their places among those that were analysed.
    """

    title: str
    found: Analysis
    head: int
    row: int

    def values(self, part: str) -> np.ndarray:
        """(S,) weights, of keys."""
        whole: Tensor = getattr(self.found, part)
        return whole[0, self.head, self.row].numpy()


def draw_attention(views: Sequence[View], reading: Reading, path: Path, *, parts: Sequence[str] = tuple(PARTS)) -> None:
    """One PNG: a line for each view, a panel for each part. The deepest colour is the largest weight of its line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = (LINE * SIZE, 0.0) if reading.image is None else (3.0, 3.0)
    places = _laid_out(reading.names) if reading.image is None else []
    height = height or 0.21 * (1 + max((y for _, y in places), default=0))
    size = (width * len(parts) + 0.3, (height + 0.75) * len(views))
    figure = pyplot.figure(figsize=size, layout="constrained")
    for line, view in zip(figure.subfigures(len(views), 1, squeeze=False).flat, views, strict=True):
        query = int(view.found.rows[view.row])
        largest = max(float(view.values(part).max()) for part in parts)
        for axis, part in zip(line.subplots(1, len(parts), squeeze=False).flat, parts, strict=True):
            values = view.values(part)
            if reading.image is None:
                _draw_tokens(axis, reading.names, places, values / largest, query)
            else:
                _draw_patches(axis, reading, values / largest, query)
            axis.set_title(f"{PARTS[part]}   (largest {values.max():.2g})", fontsize=8)
        where = f"{view.title}: layer {view.found.layer}, head {int(view.found.heads[view.head])}"
        line.suptitle(where, fontsize=9, x=0.01, ha="left")
    save_figure(figure, path)


def _laid_out(names: Sequence[str]) -> list[tuple[int, int]]:
    """(column, line) of each token, in characters; lines break where they are full or the text says so."""
    places, x, y = [], 0, 0
    for name in names:
        shown = _shown(name)
        if x and (x + len(shown) > LINE or (x > LINE - 10 and name.startswith(" "))):
            x, y = 0, y + 1
        places.append((x, y))
        x += len(shown)
        if "\n" in name:
            x, y = 0, y + 1
    return places


def _shown(name: str) -> str:
    """A token as it is printed: line breaks as ¶, nothing as ·, what has no glyph as □."""
    printed = name.replace("\n", "¶").replace("\t", " ") or "·"
    return "".join(letter if letter.isprintable() else "□" for letter in printed)


def _draw_tokens(
    axis: Any, names: Sequence[str], places: list[tuple[int, int]], values: np.ndarray, query: int
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    lines = 1 + max(y for _, y in places)
    axis.set(xlim=(0, LINE), ylim=(lines, 0))
    axis.axis("off")
    shade = colormaps[COLORS]
    for n, (name, (x, y), value) in enumerate(zip(names, places, values, strict=True)):
        shown = _shown(name)
        if value > 0.01:
            axis.add_patch(Rectangle((x, y + 0.08), len(shown), 0.84, color=shade(0.9 * math.sqrt(value)), linewidth=0))
        ink = "white" if value > 0.5 else "0.15" if value > 0.01 else "0.45"
        for k, letter in enumerate(shown):  # one by one: a column is a character, whatever the font
            axis.text(
                x + k + 0.5, y + 0.5, letter, ha="center", va="center", fontsize=7.5, family="monospace", color=ink
            )
        if n == query:
            axis.add_patch(Rectangle((x, y + 0.08), len(shown), 0.84, fill=False, edgecolor="#0072B2", linewidth=1.4))


def _draw_patches(axis: Any, reading: Reading, values: np.ndarray, query: int) -> None:
    """Values in 0…1."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    assert reading.grid is not None
    (rows, columns), (height, width) = reading.grid, reading.image.shape[:2]
    patches = values[reading.prefix :].reshape(rows, columns)
    whole = (0, width, height, 0)
    axis.imshow(reading.image.mean(-1), cmap="gray", vmin=-0.3, vmax=1, extent=whole)
    axis.imshow(
        colormaps[COLORS](np.ones_like(patches)), alpha=0.85 * np.sqrt(patches), extent=whole, interpolation="nearest"
    )
    if query >= reading.prefix:
        y, x = divmod(query - reading.prefix, columns)
        box = (x * width / columns, y * height / rows), width / columns, height / rows
        axis.add_patch(Rectangle(*box, fill=False, edgecolor="#0072B2", linewidth=2))
    axis.axis("off")
