"""Counting marked objects on a growing canvas: as many of them, among more and more others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from modalities.evaluation import Score
from modalities.vision.images import BadImage
from modalities.vision.model import VisionTransformer
from modalities.vision.scenes import Canvas, SceneEvaluator
from modalities.vision.shapes import Shape

__all__ = ["Count"]


class Count(SceneEvaluator):
    """Top-1 of the count, and its mean absolute error. Tiles are counted one by one, their likeliest counts added up."""

    name = "count"
    summary = (
        "how many marked objects, on canvases in which they keep their pixels, beside reading them reduced or in tiles"
    )
    target, default_source, main = "count", "scenes-count", "top1"
    scores = (
        Score("top1", "top-1 of the count", unit_interval=True),
        Score("error", "mean absolute error"),
        Score("reduced_top1"),
        Score("multi_scale_top1"),
        Score("enlarged_top1"),
        Score("tiled_top1"),
        Score("tiled_error"),
        Score("overlapping_top1"),
        Score("overlapping_error"),
        Score("chance_top1"),
        Score("gain", linear=True),
        Score("skipped", exception=True),
    )

    def combined(self, tiles: Sequence[tuple[Tensor, int, int]], shape: Shape, patch: int) -> Tensor:
        """The sum, limited to the largest count that the model has. Tiles that overlap count twice what both show."""
        most = len(tiles[0][0]) - 1
        total = min(sum(int(answer.argmax()) for answer, _, _ in tiles), most)
        return torch.nn.functional.one_hot(torch.tensor(total), most + 1).double()

    def stitched(self, tiles: Sequence[tuple[Tensor, int, int]], owner: np.ndarray, patch: int, tile: Shape) -> Tensor:
        """The sum of each tile's count times the share of it that no other tile has nearer to its middle, rounded."""
        most = len(tiles[0][0]) - 1
        counts = np.array([int(answer.argmax()) for answer, _, _ in tiles])
        share = np.bincount(owner.ravel(), minlength=len(tiles)) / (tile[0] // patch * (tile[1] // patch))
        total = min(math.floor(float(counts @ share) + 0.5), most)
        return torch.nn.functional.one_hot(torch.tensor(total), most + 1).double()

    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """[right, absolute error, 1]."""
        wrong = abs(int(answer.argmax()) - int(canvas.objects.marked.sum()))
        return [float(not wrong), float(wrong), 1.0]

    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        wrong = np.abs(np.arange(classes) - int(canvas.objects.marked.sum()))
        return [float((wrong == 0).mean()), float(wrong.mean()), 1.0]

    def answers(self, model: VisionTransformer) -> int:
        """The counts from 0 to the largest of the held-out pictures."""
        return 1 + self._largest

    @cached_property
    def _largest(self) -> int:
        images, found = self.heldout.items.images, 0
        for index in range(len(images)):
            with contextlib.suppress(BadImage):  # counted as skipped when it is measured
                found = max(found, int(images.read_objects(index)[1].marked.sum()))
        return found

    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        return {"top1": float(total[0] / total[2]), "error": float(total[1] / total[2])}

    def observation(self, tally: Sequence[float]) -> tuple[str, float, float]:
        return "top1", tally[0], tally[2]
