"""Measuring pictures in which objects keep their pixels while the canvas grows, and the controls that could empty the claim.

A canvas of H × W is a window on a stored picture, at its stored resolution, that holds the marked objects; smaller canvases of
a picture lie inside the larger ones. Each canvas is read in six ways, with the weights as they are:

    native       whole, at H × W
    reduced      resized to the training size first (its shorter side): the cheap way to read a large picture
    multi_scale  the mean of the probabilities at every size measured up to H × W, the smaller ones by reducing
    enlarged     the canvas of the training size and this aspect, enlarged to H × W: as many patches, and no more to be seen
    tiled        cut into windows of the training size, each read alone; how they are put together is the task's
    overlapping  the same with windows half a side apart: what the border of one cuts is whole in another; a place is taken
                 from the window in whose middle it lies most

A larger canvas has a point for a model where native is above all others. `gain` is native less the best of them;
EVAL.controls.csv has native less each, with 95% intervals over the groups of pictures.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from modalities.evaluation import Axis, Cell, CellValue, ModelResult, Score
from modalities.figures import RULE, curves, finish, name_panel, panels
from modalities.heldout import Heldout
from modalities.paired import Observed, t_quantile
from modalities.results import mean_of_seeds
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import HeldoutScenes, heldout_by, open_scenes
from modalities.vision.evaluation import ImageEvaluator, write_controls
from modalities.vision.images import BadImage
from modalities.vision.model import VisionTransformer
from modalities.vision.objects import Objects, check_objects, cut, window_on
from modalities.vision.shapes import Shape, SizeSettings, check_sizes, lowest_terms, shape_at
from zoo.slices import slices

__all__ = ["READINGS", "SceneEvaluator", "SceneSettings"]

READINGS = ("native", "reduced", "multi_scale", "enlarged", "tiled", "overlapping")
CHUNK = 64  # scenes in a cell
FACTORS = (1, 1.5, 2, 3, 4)  # default sizes, in training sizes


@dataclass(frozen=True)
class SceneSettings(SizeSettings):
    """`samples` counts pictures, the first of a fixed random order (default: all).

    Attributes:
        sizes: ascending; the training size is always among them. Default: 1, 1.5, 2, 3 and 4 times the training size, in whole
            patches, as far as the first picture reaches.
        aspect: (width, height) in lowest terms, of the canvases larger than the training size. Default: that of training.
    """


@dataclass(frozen=True)
class Canvas:
    """A window on a picture, and the objects in it."""

    image: Image.Image
    objects: Objects

    def window(self, left: int, top: int, shape: Shape) -> Canvas:
        window = (left, top, shape[1], shape[0])
        return Canvas(cut(self.image, window), self.objects.in_window(window))

    def resized(self, shape: Shape) -> Canvas:
        """Bicubic, antialiased."""
        before = (self.image.height, self.image.width)
        if before == shape:
            return self
        image = self.image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
        return Canvas(image, self.objects.resized(before, shape))


class SceneEvaluator(ImageEvaluator):
    """Base of the evaluators of scenes; a subclass says what is asked and how an answer is scored.

    Pictures that cannot be asked for the target, or are smaller than a canvas, are left out and counted as `skipped`.
    A picture's answer becomes a *tally*, a list of numbers that add up over pictures; `scores_of` makes scores of their sum.
    `<score>_standard_error` is the delete-one-group jackknife over the groups that pictures vary by (the font of the marked
    letter, in "scenes"), where a source names no groups over pictures; the intervals of `controls` are of the same jackknife of
    differences, by Student's t.
    """

    version = 3
    # 1 has neither overlapping tiles nor intervals: its gain is over the other readings. 2 enlarged a canvas of the training's
    # aspect, whatever that of the larger one.
    readable = (1, 2)

    settings_class = SceneSettings
    axis = Axis("size", "shorter side of the canvas (pixels, log₂)", "{:g}".format, "train_size")
    unit = "canvases"
    paired_over = "groups of pictures"
    target: ClassVar[str]  # of objects.py
    default_source: ClassVar[str]
    main: ClassVar[str]  # the score of figures: rows have it by reading, `<main>` of native and `<reading>_<main>`

    def __init__(self, settings: Any = None, trained_on: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, trained_on)
        trained = heldout_by(self.trained_on) if self.trained_on else None
        own = trained if trained is not None and self.target in trained.target.split("+") else self.default_source
        self.source: str | VisionDataConfig = self.settings.source or own
        # What is asked of pictures is known of a model with a recipe; one trained on labels may name a category too.
        labelled = trained is None or (trained.target == "label" and self.target == "marked")
        self.trained_for = None if labelled or trained is None else trained.target

    @property
    def heldout(self) -> Heldout[HeldoutScenes]:
        return open_scenes(self.source)

    def trained_at(self, model: VisionTransformer) -> int:
        return min(model.config.train_size)

    def identity(self, model: VisionTransformer) -> dict[str, Any]:
        """The sizes too: multi_scale reads them all."""
        return {"pictures": self.heldout.fingerprint, "shapes": [list(shape) for shape in self._shapes(model)]}

    # ---- what a subclass defines ----

    @abstractmethod
    def combined(self, tiles: Sequence[tuple[Tensor, int, int]], shape: Shape, patch: int) -> Tensor:
        """One answer for a canvas of `shape` from its tiles: (probabilities, left, top) of each, in pixels."""

    def stitched(self, tiles: Sequence[tuple[Tensor, int, int]], owner: np.ndarray, patch: int, tile: Shape) -> Tensor:
        """As `combined`, of tiles that overlap; owner (rows, columns): which of them each patch of the canvas is taken from."""
        rows, columns = owner.shape
        return self.combined(tiles, (rows * patch, columns * patch), patch)

    @abstractmethod
    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """What an answer, probabilities as the model gives them for one picture, counts on a canvas."""

    @abstractmethod
    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        """Scores from the sum of tallies."""

    @abstractmethod
    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        """The tally to be expected of an answer given without looking."""

    def answers(self, model: VisionTransformer) -> int:
        """Among how many answers chance draws."""
        return self._classes(model)

    @abstractmethod
    def observation(self, tally: Sequence[float]) -> tuple[str, float, float]:
        """(score, total, weight) of a tally as a part of its group's score, for paired comparisons."""

    def resampled(self, answer: Tensor, shape: Shape, patch: int) -> Tensor:
        """An answer of another size as one of a canvas of `shape`; an answer about the whole picture is one of any size."""
        return answer

    # ---- measurement ----

    def cells(self, model: VisionTransformer) -> list[Cell]:
        if self.trained_for is not None and self.target not in self.trained_for.split("+"):
            raise ValueError(
                f"{self.name} asks for {self.target!r}; the model was trained with data.target={self.trained_for!r}"
            )
        scenes, shapes = self.heldout.items, self._shapes(model)
        count = min(self.settings.samples or len(scenes), len(scenes))
        most = scenes.largest(shapes[-1], "crop", share=0, count=count)
        if most < min(shapes[-1]):
            (across, down), step = self._aspect(model), self._step(model)
            raise ValueError(
                f"size {min(shapes[-1])} is larger than every held-out picture of {self.source_name!r}: at aspect "
                f"{across}:{down} the largest size is {most // step * step or 'none at all'}"
            )
        cells = []
        for height, width in shapes:
            for part in slices(count, CHUNK):
                places = range(part.start, part.stop)
                name = f"{height}x{width}/scenes={part.start}-{part.stop}"
                data = {"size": min(height, width), "shape": (height, width), "places": places}
                cells.append(Cell(name, cost=len(places), data=data))
        return cells

    @torch.inference_mode()
    def measure(self, model: VisionTransformer, cell: Cell) -> CellValue:
        shape, shapes = cell.data["shape"], self._shapes(model)
        config, trained = model.config, tuple(model.config.train_size)
        before = shape_at(min(trained), lowest_terms(shape[1], shape[0]))  # what is enlarged: of the canvas's aspect
        skipped: Counter[str] = Counter()
        details: dict[str, str] = {}
        groups: list[str] = []
        tallies: dict[str, list[list[float]]] = {name: [] for name in (*READINGS, "chance")}
        for place in cell.data["places"]:
            try:
                image, objects = self.heldout.items[place]
                check_objects(objects, image.size, self.target, [trained], self._classes(model))
                across, down = np.random.default_rng([place, 0]).random(2).tolist()  # the same for every size
                canvas, small = (self._canvas(image, objects, one, (across, down)) for one in (shape, before))
            except BadImage as error:
                skipped[error.reason] += 1
                details.setdefault(error.reason, f"{self.heldout.items.name(place)}: {error.detail or error.reason}")
                continue
            answers = self._answers(model, canvas, small, [one for one in shapes if min(one) <= min(shape)])
            for name, (answer, seen) in answers.items():
                tallies[name].append(self.tally(answer, seen, config.patch_size))
            tallies["chance"].append(self.chance(canvas, self.answers(model), config.patch_size))
            groups.append(objects.group or f"picture {int(self.heldout.items.order[place])}")
            self.advance(1)
        height, width = shape
        found = {"size": min(shape), "height": height, "width": width, "skipped": dict(skipped)}
        return found | {"skipped_details": details, "groups": groups, "tallies": tallies}

    def _canvas(self, image: Image.Image, objects: Objects, shape: Shape, at: tuple[float, float]) -> Canvas:
        window = window_on(image.size, objects, shape, at)
        return Canvas(cut(image, window), objects.in_window(window))

    def _answers(
        self, model: VisionTransformer, canvas: Canvas, small: Canvas, shapes: Sequence[Shape]
    ) -> dict[str, tuple[Tensor, Canvas]]:
        """The answer of each reading, and the canvas it is about."""
        shape, patch = (canvas.image.height, canvas.image.width), model.config.patch_size
        aspect = lowest_terms(shape[1], shape[0])
        trained = min(model.config.train_size)
        scales = [shape_at(size, aspect) for size in sorted({trained, *map(min, shapes)})]
        at_shape = {one: self.resampled(self._read(model, canvas.resized(one))[0], shape, patch) for one in scales}
        native, reduced = at_shape[shape], at_shape[scales[0]]
        grown = small.resized(shape)
        enlarged = native if shape == (small.image.height, small.image.width) else self._read(model, grown)[0]
        multi_scale = torch.stack(list(at_shape.values())).mean(0)
        return {
            "native": (native, canvas),
            "reduced": (reduced, canvas),
            "multi_scale": (multi_scale, canvas),
            "enlarged": (enlarged, grown),
            "tiled": (self._tiled(model, canvas), canvas),
            "overlapping": (self._overlapping(model, canvas), canvas),
        }

    def _tiled(self, model: VisionTransformer, canvas: Canvas) -> Tensor:
        """Tiles of the training size, the last of a row or column moved inwards where it would stick out."""
        height, width = model.config.train_size
        shape = (canvas.image.height, canvas.image.width)
        tops, lefts = (
            [min(n * side, most - side) for n in range(-(-most // side))]
            for side, most in ((height, shape[0]), (width, shape[1]))
        )
        return self.combined(self._tiles(model, canvas, tops, lefts), shape, model.config.patch_size)

    def _overlapping(self, model: VisionTransformer, canvas: Canvas) -> Tensor:
        """Tiles half a side, in whole patches, apart."""
        patch, tile = model.config.patch_size, tuple(model.config.train_size)
        corners, nearest = [], []
        for side, most in zip(tile, (canvas.image.height, canvas.image.width), strict=True):
            step = max(1, side // 2 // patch) * patch
            starts = np.array([min(n * step, most - side) for n in range(-(-(most - side) // step) + 1)])
            middles = np.arange(0, most, patch) + patch / 2
            nearest.append(np.abs(middles[:, None] - (starts + side / 2)).argmin(1))
            corners.append(starts.tolist())
        owner = nearest[0][:, None] * len(corners[1]) + nearest[1]
        return self.stitched(self._tiles(model, canvas, *corners), owner, patch, tile)

    def _tiles(
        self, model: VisionTransformer, canvas: Canvas, tops: Sequence[int], lefts: Sequence[int]
    ) -> list[tuple[Tensor, int, int]]:
        """Answers with their tiles' (left, top), row by row."""
        shape, corners = tuple(model.config.train_size), [(left, top) for top in tops for left in lefts]
        read = self._read(model, *(canvas.window(left, top, shape) for left, top in corners))
        return [(answer, left, top) for answer, (left, top) in zip(read, corners, strict=True)]

    def _read(self, model: VisionTransformer, *canvases: Canvas) -> list[Tensor]:
        """Probabilities in float64 of canvases of one shape; of maps (rows, columns, classes)."""
        first = canvases[0].image
        patch, like = model.config.patch_size, next(model.parameters())
        rows, columns = first.height // patch, first.width // patch
        size = self.settings.batch_size(rows * columns)
        found: list[Tensor] = []
        for part in slices(len(canvases), size):
            pixels = [
                model.pixels(one.image, first.height, first.width, mode="resized")
                for one in canvases[part.start : part.stop]
            ]
            found += self._answer(model, model(torch.stack(pixels).to(like)).double().cpu())
        return [one.unflatten(0, (rows, columns)) for one in found] if self.target == "map" else found

    def _answer(self, model: VisionTransformer, logits: Tensor) -> Tensor:
        """Probabilities (B, classes), or of maps (B, patches, classes), from a model's logits."""
        if self.target == "map":
            if logits.ndim != 3:
                raise ValueError(
                    f"{self.name} needs a model with logits of every token: trained with data.target='map'"
                )
            return logits[:, model.num_prefix_tokens :].softmax(-1)
        if logits.ndim == 3:
            if not model.config.class_token:
                raise ValueError(
                    f"{self.name} needs a model that answers for the picture: data.target='{self.target}+map'"
                )
            logits = logits[:, 0]
            logits = logits[:, 1:] if self.target == "marked" else logits  # of "marked+map", 0 is the background
        return logits.softmax(-1)

    def _classes(self, model: VisionTransformer) -> int:
        """Answers that the model has."""
        return model.config.num_classes - (self.target == "marked" and getattr(model.config, "global_pool", None) == "")

    # ---- rows, figure, comparison ----

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        by_shape: dict[Shape, list[CellValue]] = {}
        for cell in cells.values():
            by_shape.setdefault((cell["height"], cell["width"]), []).append(cell)
        return [self._row(shape, mine) for shape, mine in sorted(by_shape.items(), key=lambda item: min(item[0]))]

    def _row(self, shape: Shape, cells: list[CellValue]) -> dict[str, Any]:
        groups = [group for cell in cells for group in cell["groups"]]
        skipped: Counter[str] = sum((Counter(cell["skipped"]) for cell in cells), Counter())
        if not groups:
            details = {reason: text for cell in cells for reason, text in cell.get("skipped_details", {}).items()}
            why = ", ".join(
                f"{number} {reason}" + (f" ({details[reason]})" if reason in details else "")
                for reason, number in skipped.most_common()
            )
            raise ValueError(
                f"none of the held-out pictures can be asked for {self.target!r} at {shape[1]}×{shape[0]}: {why}"
            )
        row: dict[str, Any] = {"size": min(shape), "height": shape[0], "width": shape[1], "canvases": len(groups)}
        row |= {"groups": len(set(groups)), "skipped": skipped.total()}
        row["skipped_because"] = ", ".join(f"{number} {reason}" for reason, number in skipped.most_common())
        by_reading: dict[str, np.ndarray] = {}
        for reading in (*READINGS, "chance"):
            tallies = by_reading[reading] = np.array(
                [tally for cell in cells for tally in cell["tallies"][reading]], float
            )
            scores, errors = self._with_errors(tallies, groups)
            lead = "" if reading == "native" else f"{reading}_"
            row |= {f"{lead}{name}": value for name, value in scores.items()}
            row |= {f"{lead}{name}_standard_error": value for name, value in errors.items() if reading != "chance"}
        row["gain"] = row[self.main] - max(row[f"{reading}_{self.main}"] for reading in READINGS[1:])
        row["controls"] = [
            {"control": reading} | self._difference(by_reading["native"], by_reading[reading], groups)
            for reading in READINGS[1:]
        ]
        return row

    def _with_errors(self, tallies: np.ndarray, groups: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Scores of all tallies (N, n), and their standard errors √((G − 1)/G · Σ_g (θ_g − θ̄)²), θ_g without group g."""
        total, left_out = _by_group(tallies, groups)
        scores = self.scores_of(total)
        if len(left_out) < 2:
            return scores, dict.fromkeys(scores, math.nan)
        without = [self.scores_of(one) for one in left_out]
        return scores, {name: _jackknife([one[name] for one in without]) for name in scores}

    def _difference(self, native: np.ndarray, control: np.ndarray, groups: Sequence[str]) -> dict[str, float]:
        """Of the main score: both readings', and native less the control with its interval; NaN where groups do not differ."""
        (mine, without), (theirs, without_too) = _by_group(native, groups), _by_group(control, groups)
        value, other = (self.scores_of(total)[self.main] for total in (mine, theirs))
        gaps = [
            self.scores_of(a)[self.main] - self.scores_of(b)[self.main]
            for a, b in zip(without, without_too, strict=True)
            if len(without) > 1
        ]
        half = math.nan
        if gaps and (error := _jackknife(gaps)) > 0:
            half = t_quantile(0.95, len(gaps) - 1) * error
        difference = value - other
        found = {"value": value, "control_value": other, "difference": difference}
        return found | {"low": difference - half, "high": difference + half}

    def write(self, results: list[ModelResult], out: Path) -> None:
        """EVAL.controls.csv: native less each control."""
        write_controls(out / f"{self.name}.controls.csv", results, self.main)

    def observed(self, name: str, cell: CellValue) -> Iterable[Observed]:
        for group, tally in zip(cell["groups"], cell["tallies"]["native"], strict=True):
            yield Observed(cell["size"], group, *self.observation(tally))

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """A panel for each way of reading, all on one scale, with chance; and native less the best of the others."""
        results = mean_of_seeds(results, self.axis.column)
        figure, axes = panels(2, 4, width=4.6, height=3.8)
        columns = [self.main, *(f"{reading}_{self.main}" for reading in READINGS[1:])]
        titles = (
            "Read whole; dotted: chance",
            "Reduced to the training size",
            "Mean of the sizes up to it",
            "Enlarged, no more to see",
            "In tiles",
            "In overlapping tiles",
        )
        label = next(score.label for score in self.scores if score.column == self.main)
        for axis, column, title in zip(axes, columns, titles, strict=False):
            curves(axis, results, Score(column, label, unit_interval=True), self.axis)
            chance = results[0].rows
            axis.plot(
                [r["size"] for r in chance], [r[f"chance_{self.main}"] for r in chance], **RULE | {"linestyle": ":"}
            )
            name_panel(axis, title)
            if not any(column in row for result in results for row in result.rows):
                axis.text(0.5, 0.6, "not measured", transform=axis.transAxes, ha="center", color="0.35")
        curves(axes[6], results, Score("gain", "whole − best of the others", linear=True), self.axis)
        axes[6].axhline(0.0, **RULE)
        name_panel(axes[6], "What reading large gains")
        axes[7].set_visible(False)
        finish(figure, axes, results, path)

    # ---- sizes ----

    def _shapes(self, model: VisionTransformer) -> list[Shape]:
        """(height, width) of every canvas, ascending: that of training, then those of the settings."""
        settings, config = self.settings, model.config
        height, width = config.train_size
        aspect, step, trained = self._aspect(model), self._step(model), min(height, width)
        if settings.sizes is None:
            sizes = {round(factor * trained / step) * step for factor in FACTORS}
            reach = self._reach(aspect)
            sizes = {size for size in sizes if size <= reach}
        else:
            check_sizes(settings.sizes, step, config.patch_size, aspect)
            sizes = set(settings.sizes)
        if small := sorted(size for size in sizes if size < trained):
            raise ValueError(f"sizes {small} are below the training size; expected {trained} or more")
        if aspect == lowest_terms(width, height):
            sizes.add(trained)
        if not sizes:
            raise ValueError(
                f"pictures of {self.heldout.name!r} are smaller than a canvas of {trained} pixels at this aspect"
            )
        return [shape_at(size, aspect) for size in sorted(sizes)]

    def _aspect(self, model: VisionTransformer) -> tuple[int, int]:
        height, width = model.config.train_size
        return self.settings.aspect or lowest_terms(width, height)

    def _step(self, model: VisionTransformer) -> int:
        """The shorter side is a multiple of this where both sides are whole patches at the aspect."""
        return model.config.patch_size * min(self._aspect(model))

    def _reach(self, aspect: tuple[int, int]) -> int:
        """The largest shorter side at an aspect that the first picture has; ValueError where none can be read."""
        scenes, why = self.heldout.items, ""
        for place in range(len(scenes)):
            try:
                image, _ = scenes[place]
            except BadImage as error:
                why = why or f"; of {scenes.name(place)}: {error}"
                continue
            unit = shape_at(min(aspect), aspect)  # (height, width) in lowest terms
            return min(image.height // unit[0], image.width // unit[1]) * min(aspect)
        raise ValueError(f"none of the held-out pictures of {self.heldout.name!r} can be read{why}")


def _by_group(tallies: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of tallies (N, n), and (G, n) that without each group."""
    names, of = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), tallies.shape[1]))
    np.add.at(sums, of, tallies)
    total = sums.sum(0)
    return total, total - sums


def _jackknife(left_out: Sequence[float]) -> float:
    """√((G − 1)/G · Σ_g (θ_g − θ̄)²)."""
    values, many = np.array(left_out), len(left_out)
    return math.sqrt((many - 1) / many * float(((values - values.mean()) ** 2).sum()))
