"""A dense map on a growing canvas: what is at each patch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.evaluation import CellValue, Observed, Score
from modalities.vision.objects import at_patches, target_of
from modalities.vision.scenes import Canvas, SceneEvaluator
from modalities.vision.shapes import Shape

__all__ = ["Map"]


class Map(SceneEvaluator):
    """Mean intersection over union of the classes, the background among them, over the patches of all pictures.

    IoU_c = Σ |said c and is c| / Σ |said c or is c|, sums over pictures (Pascal VOC); classes that are neither said nor there
    have none. `objects` is the share of the patches with an object that are named right. A map read at another size is
    resized bilinearly, its probabilities; tiles are put side by side, of those that overlap each patch from the one in whose
    middle it lies most. Chance says background everywhere.
    """

    name = "map"
    summary = (
        "what is at each patch (mean IoU), on canvases in which objects keep their pixels, beside reduced and tiled"
    )
    target, default_source, main = "map", "scenes", "miou"
    scores = (
        Score("miou", "mean IoU of the patches", unit_interval=True),
        Score("objects", "patches with an object named right", unit_interval=True),
        Score("reduced_miou"),
        Score("multi_scale_miou"),
        Score("enlarged_miou"),
        Score("tiled_miou"),
        Score("overlapping_miou"),
        Score("chance_miou"),
        Score("gain", linear=True),
        Score("skipped", exception=True),
    )

    def resampled(self, answer: Tensor, shape: Shape, patch: int) -> Tensor:
        size = (shape[0] // patch, shape[1] // patch)
        if tuple(answer.shape[:2]) == size:
            return answer
        channels = answer.permute(2, 0, 1)[None]
        return F.interpolate(channels, size=size, mode="bilinear", align_corners=False)[0].permute(1, 2, 0)

    def combined(self, tiles: Sequence[tuple[Tensor, int, int]], shape: Shape, patch: int) -> Tensor:
        whole = tiles[0][0].new_zeros(shape[0] // patch, shape[1] // patch, tiles[0][0].shape[-1])
        for answer, left, top in tiles:
            rows, columns = answer.shape[:2]
            whole[top // patch : top // patch + rows, left // patch : left // patch + columns] = answer
        return whole

    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """[intersections (K), unions (K), patches with an object named right, patches with one]."""
        return self._compared(answer.flatten(0, 1).argmax(-1), canvas, answer.shape[-1])

    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        patches = (canvas.image.height // patch) * (canvas.image.width // patch)
        return self._compared(torch.zeros(patches, dtype=torch.int64), canvas, classes)

    def _compared(self, said: Tensor, canvas: Canvas, classes: int) -> list[float]:
        shape = (canvas.image.height, canvas.image.width)
        true = at_patches(torch.from_numpy(target_of(canvas.objects, self.target, shape))[None], len(said))[0]
        said, true = said[true >= 0], true[true >= 0]
        right = torch.bincount(true[said == true], minlength=classes)
        union = torch.bincount(said, minlength=classes) + torch.bincount(true, minlength=classes) - right
        objects = true > 0
        named = (said == true)[objects].sum()
        return [*right.tolist(), *union.tolist(), float(named), float(objects.sum())]

    def stitched(self, tiles: Sequence[tuple[Tensor, int, int]], owner: np.ndarray, patch: int, tile: Shape) -> Tensor:
        rows, columns = np.indices(owner.shape)
        read = torch.stack([answer for answer, _, _ in tiles])
        lefts, tops = (np.array([tile[k] // patch for tile in tiles])[owner] for k in (1, 2))
        return read[owner, rows - tops, columns - lefts]

    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        right, union = np.split(total[:-2], 2)
        return {
            "miou": float((right[union > 0] / union[union > 0]).mean()),
            "objects": float(total[-2] / total[-1]) if total[-1] else math.nan,
        }

    def observed(self, name: str, cell: CellValue) -> Iterable[Observed]:
        """The mean IoU too: groups of pictures, pooled class by class."""
        for group, tally in zip(cell["groups"], cell["tallies"]["native"], strict=True):
            right, union = np.split(np.array(tally[:-2]), 2)
            for k in np.flatnonzero(union):
                yield Observed(cell["size"], group, "miou", float(right[k]), float(union[k]), pooled=str(k))
        yield from super().observed(name, cell)

    def observation(self, tally: Sequence[float]) -> tuple[str, float, float]:
        return "objects", tally[-2], tally[-1]
