"""Find and read: which is the marked object's category, among more and more others on a growing canvas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from modalities.evaluation import Score
from modalities.vision.objects import target_of
from modalities.vision.scenes import Canvas, SceneEvaluator
from modalities.vision.shapes import Shape

__all__ = ["Find"]


class Find(SceneEvaluator):
    """Top-1 of the marked object's category. Of tiles the one with the largest probability answers."""

    name = "find"
    summary = "the marked object's category, on canvases in which it keeps its pixels, beside reading them reduced or in tiles"
    target, default_source, main = "marked", "scenes", "top1"
    scores = (
        Score("top1", "top-1 of the marked object", unit_interval=True),
        Score("reduced_top1"),
        Score("multi_scale_top1"),
        Score("enlarged_top1"),
        Score("tiled_top1"),
        Score("overlapping_top1"),
        Score("chance_top1"),
        Score("gain", linear=True),
        Score("skipped", exception=True),
    )

    def combined(self, tiles: Sequence[tuple[Tensor, int, int]], shape: Shape, patch: int) -> Tensor:
        return max((answer for answer, _, _ in tiles), key=lambda answer: float(answer.max()))

    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """[right, 1]."""
        size = (canvas.image.height, canvas.image.width)
        return [float(int(answer.argmax()) == int(target_of(canvas.objects, self.target, size))), 1.0]

    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        return [1 / classes, 1.0]

    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        return {"top1": float(total[0] / total[1])}

    def observation(self, tally: Sequence[float]) -> tuple[str, float, float]:
        return "top1", tally[0], tally[1]
