"""Passkey and needle: is a value that a text states written after the question at its end?

`passkey` hides it in sentences that repeat, `niah` in real text.
"""

from __future__ import annotations

import re
from pathlib import Path

from modalities.figures import heatmap_figure
from modalities.results import ModelResult
from modalities.text.retrieval import Retrieval


class Passkey(Retrieval):
    """A key at 20 depths k·L/19 of a text; `samples` random keys at each (default 5).

    By default the text is one key among sentences that repeat, in the project's own wording.
    `--template heldout --facts 1,5` asks for one of several facts in held-out text.
    `--template bam` builds the published prompt, whose score is `teacher_forced`. A prompt and its
    answer together have L tokens (bam: the prompt has at most L).
    """

    name = "passkey"
    title = "facts recalled"
    # Results of version 2 have other names of cells, and distractors.
    version = 3
    summary = "a key hidden in text at several depths, alone or among other facts: exact match"
    default_depths = 20

    def write(self, results: list[ModelResult], out: Path) -> None:
        super().write(results, out)
        for condition in self.conditions.values():
            title = f"Passkey{condition}: exact match of the generated key"
            # "" gives passkey_depth.png, " (facts=5)" gives passkey_depth-facts-5.png.
            words = re.findall("[a-z0-9]+", condition)
            name = "-".join([f"{self.name}_depth", *words])
            column = f"free_generation_by_depth{condition}"
            heatmap_figure(results, out / f"{name}.png", column=column, title=title)


class NeedleGrid(Retrieval):
    """The passkey sentence at 11 depths of real held-out text: the length × depth heat map.

    Question, needle and scores are the passkey's, so the two differ in the haystack alone.
    `samples` keys, each in another stretch of text, per cell (default 5).
    """

    name = "niah"
    title = "needles recalled"
    # Results of version 2 have other names of cells, and distractors.
    version = 3
    summary = "a needle in held-out text: length × depth heat map of exact match"
    default_depths = 11
    default_filler = "text"

    def draw(self, results: list[ModelResult], path: Path) -> None:
        # Of several numbers of facts, `overview` has the last.
        condition = self.overview.column.removeprefix("free_generation")
        title = f"Needle in held-out text{condition}: exact match of the generated key"
        heatmap_figure(results, path, column=f"free_generation_by_depth{condition}", title=title)
