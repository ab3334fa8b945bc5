"""Accuracy against the size of the image, with nothing tuned and nothing resized in the model.

A cell is a size and a stretch of the held-out images, taken in one random order that is always the
same, so that the first N of them are a fair sample whatever order they are stored in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.encoder.config import Shape
from modalities.evaluation import Cell
from modalities.paired import Observed, ScoresByUnit, paired_rows, scores_by_unit
from modalities.results import CellValue, Row, Score
from modalities.settings import check_choice, option
from modalities.statistics import clustered_error
from modalities.vision.errors import BadImage
from modalities.vision.evaluation import SizeEvaluator, SizeSettings, by_shape, counted
from modalities.vision.model import VisionTransformer
from zoo.positions import slices

# Images in a cell.
CHUNK = 128
# Classes of which a cell keeps every logit.
MOST_SCORED = 64
MODES = ("native", "resized")
# What a cell's name starts with that is no point of the curve.
ENLARGED = "enlarged "
# Column by control.
GAINS = {
    "reduced": "gain",
    "multi_scale": "multi_scale_gain",
    "enlarged": "enlarged_gain",
}


@dataclass(frozen=True)
class ResolutionSettings(SizeSettings):
    """`samples` counts images, the first of a fixed random order (default: all).

    mode: "native" reduces stored images to the size, so that a larger one has real detail; images
        too small for one of the sizes are left out of all, and counted. "resized" takes every image
        and enlarges those, as papers do.
    enlarged: also read every image reduced to the training size and enlarged: the control without
        new detail.
    """

    mode: str = option("native", "native, or resized (enlarges too small images)")
    enlarged: bool = option(
        False, "also reduced to the training size and enlarged: the control without new detail"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)


class Resolution(SizeEvaluator[ResolutionSettings]):
    """Top-1 and top-5 of held-out images at every size, and the ratio of top-1 to that at the
    training size.

    The training size is always measured. With five classes or fewer there is no top-5.
    `chance_top1` is the share of the most frequent class.

    A larger size has controls, each with a column of what reading large gains over it (GAINS):
    `reduced_top1`, the best top-1 among the smaller sizes measured; `multi_scale_top1`, of the mean
    of the probabilities at every size up to it (up to MOST_SCORED classes); with `enlarged`,
    `enlarged_top1`. A control needs the same images. EVAL.controls.csv has top-1 less each of them.
    Its 95% intervals, `top1_standard_error` and paired differences are over the groups that the
    source names, such as fonts (over images where it names none, or one).
    """

    name = "resolution"
    version = 4
    paired_over = "groups of images"
    summary = "top-1 and top-5 of held-out images against their size, without fine-tuning"
    scores = (
        Score("top1", "top-1 accuracy", linear=True),
        Score("top5", drawn=False),
        Score("ratio", "top-1 / top-1 at the training size", linear=True, drawn=False),
        *(Score(f"{control}_top1", drawn=False) for control in GAINS),
        Score("chance_top1", tabled=False, drawn=False),
        Score(
            "gain",
            "top-1 − top-1 at the best smaller size",
            linear=True,
            tabled=False,
            level=0.0,
        ),
        Score(
            "multi_scale_gain",
            "top-1 − top-1 of the mean of sizes",
            linear=True,
            tabled=False,
            level=0.0,
        ),
        Score(
            "enlarged_gain",
            "top-1 − top-1 of the enlarged",
            linear=True,
            tabled=False,
            level=0.0,
        ),
        Score("skipped", exception=True),
    )
    unit = "images"
    way_out = "; or --mode resized"

    def __init__(
        self,
        settings: ResolutionSettings | None = None,
        trained_on: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(settings, trained_on)
        self.enlarges = self.settings.mode != "native"

    def identity(self, model: VisionTransformer) -> dict[str, object]:
        # "fit" and "scales" are of options that are gone; they stay for the cells that are stored.
        return {
            "images": self.heldout.fingerprint,
            "mode": self.settings.mode,
            "fit": "crop",
            "scales": [],
        }

    def cells(self, model: VisionTransformer) -> list[Cell]:
        images = self.heldout.items
        trained = model.config.train_size
        self._check_classes(model)
        shapes = self.shapes(model)
        roles = [("", shape) for shape in shapes]
        if self.settings.enlarged:
            roles += [(ENLARGED, shape) for shape in shapes if min(shape) > min(trained)]
        count = min(self.settings.samples or len(images), len(images))
        small: set[int] = set()
        if not self.enlarges:
            sides = self.sides(model, count)
            largest = min(shapes[-1])
            self.check_reach(model, largest, sides)
            small = {place for place, side in sides.items() if side < largest}
        ends = dict.fromkeys((trained, shapes[-1]))
        needed = "+".join(f"{height}x{width}" for height, width in ends)
        cells = []
        for role, (height, width) in roles:
            for part in slices(count, CHUNK):
                places = range(part.start, part.stop)
                small_places = small.intersection(places)
                name = f"{role}{height}x{width}/images={part.start}-{part.stop}"
                if small_places:
                    # The numbers depend on the other sizes.
                    name += f"/of {needed}"
                data = {
                    "shape": (height, width),
                    "places": places,
                    "small": small_places,
                    "enlarged": role == ENLARGED,
                }
                cells.append(Cell(name, cost=len(places), data=data))
        return cells

    def _check_classes(self, model: VisionTransformer) -> None:
        classes = self.heldout.items.classes
        if classes and len(classes) != model.config.num_classes:
            listed = f"{len(classes)} classes and the model {model.config.num_classes}"
            way_out = (
                "only images of the model's own classes can be scored: give --source such images"
            )
            raise ValueError(f"source {self.heldout.name!r} has {listed}; {way_out}")

    @torch.inference_mode()
    def measure(self, model: VisionTransformer, cell: Cell) -> CellValue:
        shape = cell.data["shape"]
        height, width = shape
        patch = model.config.patch_size
        tokens = model.num_prefix_tokens + (height // patch) * (width // patch)
        like = next(model.parameters())
        small = cell.data["small"]
        places = [place for place in cell.data["places"] if place not in small]
        skipped: Counter[str] = Counter()
        if small:
            skipped["too small"] = len(small)
        answers = _Answers(model.config.num_classes)
        for part in slices(len(places), min(self.settings.batch_size(tokens), CHUNK)):
            samples: list[tuple[Tensor, int, str]] = []
            for place in places[part.start : part.stop]:
                try:
                    samples.append(self._read(model, place, shape, enlarged=cell.data["enlarged"]))
                except BadImage as error:
                    skipped[error.reason] += 1
            if not samples:
                continue
            pixels, labels, groups = zip(*samples, strict=True)
            logits = model(torch.stack(pixels).to(like)).float().cpu()
            self.advance(len(labels))
            answers.add(logits, torch.tensor(labels), groups)
        facts = {
            "size": min(shape),
            "height": height,
            "width": width,
            "trained": shape == model.config.train_size,
            "skipped": dict(skipped),
        }
        return facts | answers.sums | answers.columns

    def _read(
        self, model: VisionTransformer, place: int, shape: Shape, *, enlarged: bool
    ) -> tuple[Tensor, int, str]:
        """Pixels, label and group of an image. Raises BadImage; ValueError for a label that the
        model does not have."""
        image, label = self.heldout.items[place]
        classes = model.config.num_classes
        if not isinstance(label, int) or not 0 <= label < classes:
            what = f"{self.heldout.name!r} has an image of class {label}"
            raise ValueError(f"{what}; the model has {classes} classes")
        pixels = model.pixels(image, *shape, enlarged=enlarged)
        return pixels, label, self.heldout.items.group(place)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        points = by_shape(cell for name, cell in cells.items() if not name.startswith(ENLARGED))
        enlarged = by_shape(cell for name, cell in cells.items() if name.startswith(ENLARGED))
        trained = next(measured for measured in points.values() if measured[0]["trained"])
        trained_top1 = _row(trained)["top1"]
        rows: list[Row] = []
        smaller: list[list[CellValue]] = []
        for shape, measured in points.items():
            row = _row(measured)
            row["ratio"] = row["top1"] / trained_top1 if trained_top1 else math.nan
            controls: dict[str, np.ndarray] = {}
            if smaller:
                controls["reduced"] = max(map(_right, smaller), key=np.mean)
                if all("logits" in cell for cell in measured):
                    controls["multi_scale"] = _mean_of_sizes([*smaller, measured])
            if shape in enlarged:
                controls["enlarged"] = _right(enlarged[shape])
            rows.append(row | _gains(measured, controls))
            smaller.append(measured)
        return rows

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Top-1 of every group, pooled by its images."""
        if not name.startswith(ENLARGED):
            for group, right in zip(cell["groups"], _right([cell]).tolist(), strict=True):
                yield Observed(cell["size"], group, "top1", right, pooled="all")


class _Answers:
    """What a cell keeps of a model's answers: sums, and columns with an entry for each image."""

    def __init__(self, num_classes: int) -> None:
        self.ranks = (1, 5) if num_classes > 5 else (1,)
        self.sums: dict[str, float] = {"images": 0, "nll_sum": 0.0}
        self.sums |= {f"top{rank}": 0 for rank in self.ranks}
        self.columns: dict[str, list[object]] = {"labels": [], "said": [], "groups": []}
        if num_classes <= MOST_SCORED:
            self.columns["logits"] = []

    def add(self, logits: Tensor, labels: Tensor, groups: Sequence[str]) -> None:
        """Count the answers (N, classes) to N images."""
        self.sums["images"] += len(labels)
        self.sums["nll_sum"] += float(F.cross_entropy(logits, labels, reduction="sum"))
        # With a NaN or infinite logit the answer is −1.
        finite = logits.isfinite().all(1)
        for rank in self.ranks:
            best = logits.topk(min(rank, logits.shape[1]), dim=1).indices
            hits = (best == labels[:, None]).any(1)
            self.sums[f"top{rank}"] += int((hits & finite).sum())
        self.columns["labels"] += labels.tolist()
        self.columns["said"] += logits.argmax(1).where(finite, -1).tolist()
        self.columns["groups"] += groups
        if "logits" in self.columns:
            self.columns["logits"] += np.round(logits.double().numpy(), 4).tolist()


def _column(cells: list[CellValue], name: str) -> np.ndarray:
    return np.array([value for cell in cells for value in cell[name]])


def _right(cells: list[CellValue]) -> np.ndarray:
    """(N,) 1 where the answer is right, else 0."""
    return (_column(cells, "said") == _column(cells, "labels")).astype(float)


def _units(cells: list[CellValue]) -> list[str]:
    """What errors are over: the group of each image; the images themselves where all are of one
    group."""
    groups = [group for cell in cells for group in cell["groups"]]
    if len(set(groups)) > 1:
        return groups
    return [str(n) for n in range(len(groups))]


def _row(cells: list[CellValue]) -> Row:
    """A table row from the cells of one shape, without the ratio and the controls."""
    count = sum(cell["images"] for cell in cells)
    row = counted(cells, images=count)
    top1 = sum(cell["top1"] for cell in cells) / count
    units = _units(cells)
    row["top1"] = top1
    if len(set(units)) == len(units):
        row["top1_standard_error"] = math.sqrt(top1 * (1 - top1) / count)
    else:
        row["top1_standard_error"] = clustered_error(_right(cells), units)
    if "top5" in cells[0]:
        row["top5"] = sum(cell["top5"] for cell in cells) / count
    row["nll"] = sum(cell["nll_sum"] for cell in cells) / count
    row["ratio"] = math.nan
    return row


def _mean_of_sizes(sizes: list[list[CellValue]]) -> np.ndarray:
    """(N,) as `_right`, of the mean of the probabilities at every size; an image with a logit that
    is not finite is wrong."""
    logits = torch.stack([torch.from_numpy(_column(cells, "logits")) for cells in sizes])
    finite = logits.isfinite().all(-1).all(0)
    predicted = logits.softmax(-1).mean(0).argmax(-1).where(finite, -1)
    return (predicted.numpy() == _column(sizes[-1], "labels")).astype(float)


def _gains(cells: list[CellValue], controls: Mapping[str, np.ndarray]) -> Row:
    """Columns of a row: top-1 by each control and what is gained over it; under `controls` with 95%
    intervals over units."""
    units = _units(cells)
    labels = _column(cells, "labels")

    def by_unit(right: np.ndarray) -> ScoresByUnit:
        pairs = zip(units, right.tolist(), strict=True)
        return scores_by_unit(
            Observed(None, unit, "top1", score, pooled="all") for unit, score in pairs
        )

    columns: Row = {
        "chance_top1": float(np.bincount(labels).max() / len(labels)),
        "groups": len(set(units)),
        "controls": [],
    }
    for name, right in controls.items():
        (row,) = paired_rows([by_unit(_right(cells))], [by_unit(right)])
        columns[f"{name}_top1"] = row["against_value"]
        columns[GAINS[name]] = row["difference"]
        control = {
            "control": name,
            "value": row["value"],
            "control_value": row["against_value"],
            "difference": row["difference"],
            "low": row["low"],
            "high": row["high"],
        }
        columns["controls"].append(control)
    return columns
