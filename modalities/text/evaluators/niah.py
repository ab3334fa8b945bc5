"""A needle in real text: the passkey's sentence and question around held-out documents, length × depth."""

from __future__ import annotations

from pathlib import Path

from modalities.evaluation import ModelResult
from modalities.figures import heatmap_figure
from modalities.text.retrieval import Retrieval

__all__ = ["NeedleGrid"]


class NeedleGrid(Retrieval):
    """The passkey sentence at 11 depths of real held-out text: the length × depth heat map.

    Question, needle and scores are the passkey's, so the two differ in the haystack alone. `samples` keys, each in another
    stretch of text, per cell (default 5).
    """

    name = "niah"
    title = "needles recalled"
    version = 2
    summary = "a needle in held-out text: length × depth heat map of exact match"
    default_depths = 11
    default_filler = "text"

    def draw(self, results: list[ModelResult], path: Path) -> None:
        condition = self.overview.column.removeprefix("free_generation")  # the last of several
        title = f"Needle in held-out text{condition}: exact match of the generated key"
        heatmap_figure(results, path, column=f"free_generation_by_depth{condition}", title=title)
