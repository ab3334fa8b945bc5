"""Accuracy of a classifier of grids against the size of what it reads, with nothing tuned and
nothing resized in the model.

A cell is a size and a stretch of the held-out items, taken in one random order that is always the
same, so that the first N of them are a fair sample whatever order they are stored in.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.encoder.config import Shape
from modalities.encoder.evaluation import Grid, SizeEvaluator, Sizes, by_shape
from modalities.encoder.items import BadSample
from modalities.evaluation import Cell
from modalities.paired import Observed, ScoresByUnit, paired_rows, scores_by_unit
from modalities.results import CellValue, Row, Score
from modalities.statistics import clustered_error
from zoo.positions import slices

# Items in a cell.
CHUNK = 128
# Classes of which a cell keeps every logit.
MOST_SCORED = 64
# What a larger size is compared with, and the title of what it gains.
CONTROLS = {
    "reduced": "top-1 − top-1 at the best smaller size",
    "multi_scale": "top-1 − top-1 of the mean of sizes",
}


def gain_column(control: str) -> str:
    """The column of what reading large gains over a control."""
    return "gain" if control == "reduced" else f"{control}_gain"


def accuracy_scores(controls: Mapping[str, str] = CONTROLS) -> tuple[Score, ...]:
    """The scores of a `SizeAccuracy`. controls: titles of gains by control, in the order of the
    table."""
    gains = [
        Score(gain_column(control), title, linear=True, tabled=False, level=0.0)
        for control, title in controls.items()
    ]
    return (
        Score("top1", "top-1 accuracy", linear=True),
        Score("top5", drawn=False),
        Score("ratio", "top-1 / top-1 at the training size", linear=True, drawn=False),
        *(Score(f"{control}_top1", drawn=False) for control in controls),
        Score("chance_top1", tabled=False, drawn=False),
        *gains,
        Score("skipped", exception=True),
    )


class SizeAccuracy(SizeEvaluator[Sizes, Grid]):
    """Top-1 and top-5 of held-out items at every size, and the ratio of top-1 to that at the
    training size. A subclass says what a model reads (`grid`).

    `samples` counts items, the first of a fixed random order (default: all). Labels become the
    model's numbers by the names of classes (`SizeEvaluator.labels`); the model answers among all of
    its classes. The training size is always measured. With five classes or fewer there is no top-5.
    `chance_top1` is the share of the most frequent class. Items too small for one of the sizes are
    left out of all, and counted, unless the evaluator `enlarges`.

    A larger size has controls, each with a column of what reading large gains over it:
    `reduced_top1`, the best top-1 among the smaller sizes measured; `multi_scale_top1`, of the mean
    of the probabilities at every size up to it (up to MOST_SCORED classes); and those that a
    subclass reads besides (`extra_controls`). A control needs the same items. EVAL.controls.csv has
    top-1 less each of them. Its 95% intervals, `top1_standard_error` and paired differences are
    over the groups that the source names, such as fonts (over items where it names none, or one).
    """

    scores = accuracy_scores()
    unit = "items"
    paired_over = "groups of items"
    # Controls that are read of the same items in another way; a gain of each is in `scores`.
    extra_controls: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def grid(self, model: Grid, item: Any, shape: Shape, control: str) -> Tensor:
        """(in_chans, height, width): what the model reads of an item at a shape, prepared as in
        training. control: "", or one of `extra_controls`."""

    def identity(self, model: Grid) -> dict[str, object]:
        return {self.unit: self.heldout.fingerprint} | self.label_identity(model)

    def readings(self, model: Grid, shapes: list[Shape]) -> list[tuple[str, Shape]]:
        """(control, shape) of all that is read; "" for the items as they are."""
        return [("", shape) for shape in shapes]

    def cells(self, model: Grid) -> list[Cell]:
        items = self.heldout.items
        self._check_classes(model)
        labels = self.labels(model)
        shapes = self.shapes(model)
        count = min(self.settings.samples or len(items), len(items))
        small: set[int] = set()
        if not self.enlarges:
            sides = self.sides(model, count)
            largest = self.size_of(shapes[-1])
            self.check_reach(model, largest, sides)
            small = {place for place, side in sides.items() if side < largest}
        ends = dict.fromkeys((model.config.train_size, shapes[-1]))
        needed = "+".join(f"{height}x{width}" for height, width in ends)
        cells = []
        for control, (height, width) in self.readings(model, shapes):
            lead = f"{control} " if control else ""
            for part in slices(count, CHUNK):
                places = range(part.start, part.stop)
                small_places = small.intersection(places)
                name = f"{lead}{height}x{width}/{self.unit}={part.start}-{part.stop}"
                if small_places:
                    # The numbers depend on the other sizes.
                    name += f"/of {needed}"
                data = {
                    "shape": (height, width),
                    "places": places,
                    "small": small_places,
                    "control": control,
                    "labels": labels,
                }
                cells.append(Cell(name, cost=len(places), data=data))
        return cells

    def _check_classes(self, model: Grid) -> None:
        """ValueError for a source of other classes; where names are unknown their count decides."""
        items = self.heldout.items
        self.labels(model)
        names = self.assumed_names(model) if items.items.classes else ()
        count = len(names or items.classes)
        if count and count != model.config.num_classes:
            listed = f"{count} classes and the model {model.config.num_classes}"
            raise ValueError(f"source {self.heldout.name!r} has {listed}; {self.class_way_out}")

    @torch.inference_mode()
    def measure(self, model: Grid, cell: Cell) -> CellValue:
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
        answers = _Answers(model.config.num_classes, self.unit)
        for part in slices(len(places), min(self.settings.batch_size(tokens), CHUNK)):
            samples: list[tuple[Tensor, int, str]] = []
            for place in places[part.start : part.stop]:
                try:
                    samples.append(self._read(model, place, shape, cell))
                except BadSample as error:
                    skipped[error.reason] += 1
            if not samples:
                continue
            grids, labels, groups = zip(*samples, strict=True)
            logits = model(torch.stack(grids).to(like)).float().cpu()
            self.advance(len(labels))
            answers.add(logits, torch.tensor(labels), groups)
        facts = {
            "size": self.size_of(shape),
            "height": height,
            "width": width,
            "trained": shape == model.config.train_size,
            "skipped": dict(skipped),
        }
        return facts | answers.sums | answers.columns

    def _read(self, model: Grid, place: int, shape: Shape, cell: Cell) -> tuple[Tensor, int, str]:
        """Grid, the model's number of the class, and group of an item. Raises BadSample; ValueError
        for a label that the model does not have."""
        items = self.heldout.items
        item, label = items[place]
        classes = model.config.num_classes
        numbers = cell.data["labels"]
        if numbers and label in range(len(numbers)):
            label = numbers[label]
        if not isinstance(label, int) or not 0 <= label < classes:
            what = f"{items.noun} {items.name(place)} of {self.heldout.name!r} is of class {label}"
            raise ValueError(f"{what}; the model has {classes} classes")
        grid = self.grid(model, item, shape, cell.data["control"])
        return grid, label, items.group(place)

    def _control_of(self, name: str) -> str:
        """The control that a cell is of, by its name; "" for a point of the curve."""
        control, _, _ = name.partition(" ")
        return control if control in self.extra_controls else ""

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        by_control: dict[str, list[CellValue]] = {"": []}
        for name, cell in cells.items():
            by_control.setdefault(self._control_of(name), []).append(cell)
        shapes = {control: by_shape(values) for control, values in by_control.items()}
        points = shapes.pop("")
        trained = next(measured for measured in points.values() if measured[0]["trained"])
        trained_top1 = self._row(trained)["top1"]
        rows: list[Row] = []
        smaller: list[list[CellValue]] = []
        for shape, measured in points.items():
            row = self._row(measured)
            row["ratio"] = row["top1"] / trained_top1 if trained_top1 else math.nan
            controls: dict[str, np.ndarray] = {}
            if smaller:
                controls["reduced"] = max(map(_right, smaller), key=np.mean)
                if all("logits" in cell for cell in measured):
                    controls["multi_scale"] = _mean_of_sizes([*smaller, measured])
            for control, control_cells in shapes.items():
                if shape in control_cells:
                    controls[control] = _right(control_cells[shape])
            rows.append(row | _gains(measured, controls))
            smaller.append(measured)
        return rows

    def _row(self, cells: list[CellValue]) -> Row:
        """A table row from the cells of one shape, without the ratio and the controls."""
        count = sum(cell[self.unit] for cell in cells)
        row = self.shape_columns(cells, **{self.unit: count})
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

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Top-1 of every group, pooled by its items."""
        if self._control_of(name):
            return
        for group, right in zip(cell["groups"], _right([cell]).tolist(), strict=True):
            yield Observed(cell["size"], group, "top1", right, pooled="all")


class _Answers:
    """What a cell keeps of a model's answers: sums, and columns with an entry for each item. unit:
    the column that counts them."""

    def __init__(self, num_classes: int, unit: str) -> None:
        self.unit = unit
        self.ranks = (1, 5) if num_classes > 5 else (1,)
        self.sums: dict[str, float] = {unit: 0, "nll_sum": 0.0}
        self.sums |= {f"top{rank}": 0 for rank in self.ranks}
        self.columns: dict[str, list[object]] = {"labels": [], "said": [], "groups": []}
        if num_classes <= MOST_SCORED:
            self.columns["logits"] = []

    def add(self, logits: Tensor, labels: Tensor, groups: Sequence[str]) -> None:
        """Count the answers (N, classes) to N items."""
        self.sums[self.unit] += len(labels)
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
    """What errors are over: the group of each item; the items themselves where all are of one
    group."""
    groups = [group for cell in cells for group in cell["groups"]]
    if len(set(groups)) > 1:
        return groups
    return [str(n) for n in range(len(groups))]


def _mean_of_sizes(sizes: list[list[CellValue]]) -> np.ndarray:
    """(N,) as `_right`, of the mean of the probabilities at every size; an item with a logit that
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
        columns[gain_column(name)] = row["difference"]
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
