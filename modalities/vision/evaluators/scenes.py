"""Find and map: pictures in which objects keep their pixels while the canvas grows, with the
controls.

A canvas of H × W is a window on a stored picture, at its stored resolution, that holds the
evidence; smaller canvases of a picture lie inside the larger ones. Each canvas is read in these
ways, with the weights as they are:

    native       whole, at H × W
    reduced      resized to the training size first (its shorter side): the cheap way to read a
                 large picture
    multi_scale  the mean of the probabilities at every size measured up to H × W, the smaller ones
                 by reducing
    enlarged     the canvas of the training size, enlarged to H × W: as many patches, and no more to
                 be seen
    tiled        cut into windows of the training size, each read alone; how they are put together
                 is the task's
    overlapping  the same with windows half a side apart; a place is taken from the window in whose
                 middle it lies most
    cropped      of `find`: the window of the training size round the ring, which code that learns
                 nothing finds (rings.py)

`gain` is native less the best of the others; EVAL.controls.csv has native less each, with 95%
intervals over the groups.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from modalities.encoder.config import Shape
from modalities.encoder.evaluation import by_shape
from modalities.evaluation import Cell
from modalities.loading import Heldout
from modalities.paired import Observed
from modalities.results import CellValue, Row, Score
from modalities.settings import check_choice, option
from modalities.statistics import t_quantile
from modalities.vision.changes import CHANGES, changed
from modalities.vision.classes import renumbered
from modalities.vision.config import TARGETS
from modalities.vision.data import HeldoutImages, open_heldout
from modalities.vision.errors import BadImage
from modalities.vision.evaluation import ImageEvaluator, ImageSizeSettings
from modalities.vision.model import VisionTransformer
from modalities.vision.objects import Objects, at_patches, check_objects, cut, target_of, window_on
from modalities.vision.rings import ring_centre
from zoo.positions import slices

# Titles of panels, by reading.
TITLES = {
    "native": "read whole",
    "reduced": "reduced to the training size",
    "multi_scale": "mean of the sizes up to it",
    "enlarged": "enlarged, no more to see",
    "tiled": "in tiles",
    "overlapping": "in overlapping tiles",
    "cropped": "cut to the training size",
}
READINGS = ("native", "reduced", "multi_scale", "enlarged", "tiled", "overlapping")
# Scenes in a cell.
CHUNK = 64
CONTROLS = (
    "on canvases in which objects keep their pixels, compared with reading them reduced or in tiles"
)


@dataclass(frozen=True)
class SceneSettings(ImageSizeSettings):
    """And how pictures are changed before they are read."""

    change: str | None = option(None, f"{', '.join(CHANGES)}: pictures unlike those of training")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("change", self.change, CHANGES)


@dataclass(frozen=True)
class Canvas:
    """A picture, or a window on it, and its objects."""

    image: Image.Image
    objects: Objects

    @property
    def shape(self) -> Shape:
        return self.image.height, self.image.width

    def window(self, left: int, top: int, shape: Shape) -> Canvas:
        window = (left, top, shape[1], shape[0])
        return Canvas(cut(self.image, window), self.objects.in_window(window))

    def resized(self, shape: Shape) -> Canvas:
        """Bicubic, antialiased."""
        if self.shape == shape:
            return self
        image = self.image.resize((shape[1], shape[0]), Image.Resampling.BICUBIC)
        down = shape[0] / self.image.height
        across = shape[1] / self.image.width
        boxes = self.objects.boxes * [across, down, across, down]
        return Canvas(image, replace(self.objects, boxes=boxes))


def scene_scores(
    main: Score, *others: Score, readings: Sequence[str] = READINGS
) -> tuple[Score, ...]:
    """The scores of a task: its own, the main one of every other reading, chance and the gain."""
    controls = [
        replace(main, column=f"{reading}_{main.column}", title=TITLES[reading])
        for reading in readings[1:]
    ]
    gain = Score(
        "gain",
        "whole − best of the others",
        linear=True,
        title="what reading large gains",
        level=0.0,
    )
    return (
        replace(main, title=TITLES["native"]),
        *others,
        *controls,
        Score(f"chance_{main.column}", drawn=False),
        gain,
        Score("skipped", exception=True),
    )


class SceneEvaluator(ImageEvaluator[SceneSettings]):
    """Base of the evaluators of scenes; a subclass says what is asked and how an answer is scored.

    `samples` counts pictures, the first of a fixed random order (default: all). Those that cannot
    be asked for the target, or are smaller than a canvas, are left out and counted as `skipped`. A
    picture's answer becomes a *tally*, a list of numbers that add up over pictures.
    `<score>_standard_error` is the jackknife that leaves out one group of pictures that a source
    names (in "scenes" a font of marked letters), else one picture; the intervals of `controls` are
    of the same jackknife of differences, by Student's t.
    """

    # Since 5 class 0 takes part of the probability.
    version = 5
    unit = "canvases"
    paired_over = "groups of pictures"
    # One of objects.py.
    target: ClassVar[str]
    readings: ClassVar[tuple[str, ...]] = READINGS

    def __init__(
        self, settings: SceneSettings | None = None, trained_on: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        if not self.settings.source and self.trained_on.get("target", "label") == "label":
            self.source = "scenes"

    @property
    def heldout(self) -> Heldout[HeldoutImages]:
        return open_heldout(self.source, objects=True)

    def identity(self, model: VisionTransformer) -> dict[str, object]:
        """The sizes too: multi_scale reads them all."""
        change: Row = {"change": self.settings.change} if self.settings.change else {}
        shapes = [list(shape) for shape in self.shapes(model)]
        pictures: Row = {"pictures": self.heldout.fingerprint, "shapes": shapes}
        return change | pictures | self.label_identity(model)

    def class_names(self, model: VisionTransformer) -> tuple[str, ...]:
        """Without the background, which a model that answers for every token has first."""
        names = super().class_names(model)
        return names[model.config.num_classes - self._objects(model) :]

    @abstractmethod
    def merged(self, answers: list[Tensor], corners: np.ndarray, owner: np.ndarray) -> Tensor:
        """One answer for a canvas from those about its tiles, which `_tiles` gives."""

    @abstractmethod
    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """What an answer, probabilities as the model gives them for one picture, counts on a
        canvas."""

    @abstractmethod
    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        """The tally to be expected of an answer given without looking."""

    @abstractmethod
    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        """Scores from the sum of tallies."""

    def resampled(self, answer: Tensor, shape: Shape, patch: int) -> Tensor:
        """An answer of another size as one of a canvas of `shape`; an answer about the whole
        picture is one of any size."""
        return answer

    def shapes(self, model: VisionTransformer) -> list[Shape]:
        shapes = super().shapes(model)
        trained = self.trained_at(model)
        small = [min(shape) for shape in shapes if min(shape) < trained]
        if small:
            raise ValueError(
                f"sizes {small} are below the training size; expected {trained} or more"
            )
        return shapes

    def cells(self, model: VisionTransformer) -> list[Cell]:
        trained = self.trained_on.get("target", "marked+map")
        accepted = ("marked+map",) if self.target == "map" else TARGETS
        if trained not in accepted:
            model_target = f"the model was trained with target={trained!r}"
            raise ValueError(f"{self.name} asks for {self.target!r}; {model_target}")
        scenes = self.heldout.items
        shapes = self.shapes(model)
        count = min(self.settings.samples or len(scenes), len(scenes))
        labels = self.labels(model)
        self.check_reach(model, min(shapes[-1]), self.sides(model, count))
        cells = []
        for height, width in shapes:
            data = {
                "shape": (height, width),
                "read": [shape for shape in shapes if shape <= (height, width)],
                "labels": labels,
            }
            for part in slices(count, CHUNK):
                name = f"{height}x{width}/scenes={part.start}-{part.stop}"
                places = range(part.start, part.stop)
                cells.append(Cell(name, cost=len(places), data=data | {"places": places}))
        return cells

    @torch.inference_mode()
    def measure(self, model: VisionTransformer, cell: Cell) -> CellValue:
        shape = cell.data["shape"]
        patch = model.config.patch_size
        skipped: Counter[str] = Counter()
        groups: list[str] = []
        tallies: dict[str, list[list[float]]] = {name: [] for name in (*self.readings, "chance")}
        for place in cell.data["places"]:
            try:
                canvas, small = self._canvases(model, place, shape, cell.data["labels"])
            except BadImage as error:
                skipped[error.reason] += 1
                continue
            answers = self._answers(model, canvas, small, cell.data["read"])
            for name, (answer, subject) in answers.items():
                tallies[name].append(self.tally(answer, subject, patch))
            tallies["chance"].append(self.chance(canvas, self._classes(model), patch))
            picture = int(self.heldout.items.order[place])
            groups.append(canvas.objects.group or f"picture {picture}")
            self.advance(1)
        return {
            "size": min(shape),
            "height": shape[0],
            "width": shape[1],
            "skipped": dict(skipped),
            "groups": groups,
            "tallies": tallies,
        }

    def _canvases(
        self, model: VisionTransformer, place: int, shape: Shape, labels: tuple[int, ...]
    ) -> tuple[Canvas, Canvas]:
        """The canvas of `shape` on a picture, and that of the training size in it, with the model's
        numbers of classes. Raises BadImage."""
        image, objects = self.heldout.items[place]
        assert isinstance(objects, Objects)
        objects = renumbered(objects, labels)
        if self.settings.change:
            image, objects = changed(image, objects, self.settings.change)
        trained = model.config.train_size
        check_objects(objects, image.size, self.target, [trained], self._classes(model))
        # The same for every size.
        across, down = np.random.default_rng([place, 0]).random(2).tolist()
        picture = Canvas(image, objects)
        left, top, _, _ = window_on(image.size, objects, shape, (across, down))
        small_left, small_top, _, _ = window_on(image.size, objects, trained, (across, down))
        canvas = picture.window(left, top, shape)
        return canvas, picture.window(small_left, small_top, trained)

    def _answers(
        self, model: VisionTransformer, canvas: Canvas, small: Canvas, shapes: list[Shape]
    ) -> dict[str, tuple[Tensor, Canvas]]:
        """The answer of each reading, and the canvas it is about. shapes: those up to the canvas's
        own."""
        shape = canvas.shape
        patch = model.config.patch_size
        by_size = []
        for size in shapes:
            [answer] = self._read(model, canvas.resized(size))
            by_size.append(self.resampled(answer, shape, patch))
        native = by_size[-1]
        grown = small.resized(shape)
        grown_answer = native
        if shape != small.shape:
            [grown_answer] = self._read(model, grown)
        tiled = self.merged(*self._tiles(model, canvas, overlapping=False))
        overlapping = self.merged(*self._tiles(model, canvas, overlapping=True))
        answers: dict[str, tuple[Tensor, Canvas]] = {
            "native": (native, canvas),
            "reduced": (by_size[0], canvas),
            "multi_scale": (torch.stack(by_size).mean(0), canvas),
            "enlarged": (grown_answer, grown),
            "tiled": (tiled, canvas),
            "overlapping": (overlapping, canvas),
        }
        if "cropped" in self.readings:
            [answer] = self._read(model, _round_the_ring(canvas, small.shape))
            answers["cropped"] = (answer, canvas)
        return answers

    def _tiles(
        self, model: VisionTransformer, canvas: Canvas, *, overlapping: bool
    ) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
        """Answers about tiles of the training size, row by row; the top and left (N, 2) of each, in
        patches; and the tile from which each patch of the canvas is taken.

        Tiles are one or half a side in whole patches apart, the last moved inwards at the border. A
        patch is taken from the last tile that shows it; of overlapping ones from that whose middle
        is nearest.
        """
        patch = model.config.patch_size
        tile = model.config.train_size
        tops, rows = _cuts(canvas.shape[0], tile[0], patch, overlapping=overlapping)
        lefts, columns = _cuts(canvas.shape[1], tile[1], patch, overlapping=overlapping)
        corners = [(top, left) for top in tops for left in lefts]
        tiles = [canvas.window(left, top, tile) for top, left in corners]
        owner = rows[:, None] * len(lefts) + columns
        return self._read(model, *tiles), np.array(corners) // patch, owner

    def _read(self, model: VisionTransformer, *canvases: Canvas) -> list[Tensor]:
        """Probabilities in float64 of canvases of one shape; of maps (rows, columns, classes)."""
        height, width = canvases[0].shape
        patch = model.config.patch_size
        size = (height // patch, width // patch)
        like = next(model.parameters())
        answers: list[Tensor] = []
        for part in slices(len(canvases), self.settings.batch_size(size[0] * size[1])):
            images = [canvas.image for canvas in canvases[part.start : part.stop]]
            pixels = torch.stack([model.pixels(image, height, width) for image in images])
            logits = model(pixels.to(like)).double().cpu()
            answers += self._probabilities(model, logits)
        if self.target == "map":
            answers = [answer.unflatten(0, size) for answer in answers]
        return answers

    def _probabilities(self, model: VisionTransformer, logits: Tensor) -> Tensor:
        """(B, classes), or of maps (B, patches, classes), from a model's logits."""
        if self.target == "map":
            if logits.ndim != 3:
                raise ValueError(
                    "map needs logits of every token, "
                    "of a model trained with data.target='marked+map'"
                )
            return logits[:, model.num_prefix_tokens :].softmax(-1)
        if logits.ndim == 3:
            if not model.config.class_token:
                need = "a model that answers for the picture: data.target='marked+map'"
                raise ValueError(f"{self.name} needs {need}")
            # Of "marked+map"; what is missing to 1 is that nothing is marked.
            return logits[:, 0].softmax(-1)[:, 1:]
        return logits.softmax(-1)

    def _classes(self, model: VisionTransformer) -> int:
        """Answers that the model has: to `find`, one that answers for every token has one fewer,
        that nothing is marked."""
        return self._objects(model) if self.target == "marked" else model.config.num_classes

    def _objects(self, model: VisionTransformer) -> int:
        """Classes of objects: one that answers for every token has the background besides."""
        every_token = getattr(model.config, "global_pool", None) == ""
        return model.config.num_classes - int(every_token)

    def rows(self, cells: Mapping[str, CellValue]) -> list[Row]:
        shapes = by_shape(cells.values())
        return [self._row(shapes[shape]) for shape in sorted(shapes, key=min)]

    def _row(self, cells: list[CellValue]) -> Row:
        groups = [group for cell in cells for group in cell["groups"]]
        row = self.shape_columns(cells, canvases=len(groups), groups=len(set(groups)))
        # The main score without each group, by reading.
        left_out: dict[str, np.ndarray] = {}
        for reading in (*self.readings, "chance"):
            tallies = [tally for cell in cells for tally in cell["tallies"][reading]]
            total, without = _by_group(np.array(tallies, float), groups)
            scores = self.scores_of(total)
            resampled = [self.scores_of(rest) for rest in without]
            left_out[reading] = np.array([rest[self.main] for rest in resampled])
            lead = "" if reading == "native" else f"{reading}_"
            for name, value in scores.items():
                row[f"{lead}{name}"] = value
            if reading == "chance":
                continue
            for name in scores:
                error = _jackknife(np.array([rest[name] for rest in resampled]))
                row[f"{lead}{name}_standard_error"] = error
        controls = self.readings[1:]
        best = max(row[f"{reading}_{self.main}"] for reading in controls)
        row["gain"] = row[self.main] - best
        row["controls"] = []
        for reading in controls:
            error = _jackknife(left_out["native"] - left_out[reading])
            row["controls"].append(self._control(row, reading, error))
        return row

    def _control(self, row: Row, reading: str, error: float) -> Row:
        """The main score less that of a reading, with its 95% interval."""
        value = row[self.main]
        control = row[f"{reading}_{self.main}"]
        half = t_quantile(0.95, row["groups"] - 1) * error if error > 0 else math.nan
        return {
            "control": reading,
            "value": value,
            "control_value": control,
            "difference": value - control,
            "low": value - control - half,
            "high": value - control + half,
        }


def _round_the_ring(canvas: Canvas, shape: Shape) -> Canvas:
    """The window of `shape` whose middle is nearest to the ring that `ring_centre` finds."""
    x, y = ring_centre(np.asarray(canvas.image.convert("RGB")))
    height, width = shape
    left = min(max(0, x - width // 2), canvas.image.width - width)
    top = min(max(0, y - height // 2), canvas.image.height - height)
    return canvas.window(left, top, shape)


def _cuts(length: int, side: int, patch: int, *, overlapping: bool) -> tuple[list[int], np.ndarray]:
    """Of tiles of `side` along `length` pixels: where each begins, and the tile from which each
    patch is taken."""
    step = max(1, side // 2 // patch) * patch if overlapping else side
    last = length - side
    # Rounded up, so that the border is covered.
    steps = -(-last // step)
    begins = [min(n * step, last) for n in range(steps + 1)]
    places = np.arange(0, length, patch)
    if not overlapping:
        return begins, np.searchsorted(begins, places, side="right") - 1
    distances = np.abs((places + patch / 2)[:, None] - (np.array(begins) + side / 2))
    return begins, distances.argmin(1)


def _by_group(tallies: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of tallies (N, n), and (G, n) that without each group."""
    names, group_of = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), tallies.shape[1]))
    np.add.at(sums, group_of, tallies)
    return sums.sum(0), sums.sum(0) - sums


def _jackknife(left_out: np.ndarray) -> float:
    """√((G − 1)/G · Σ_g (θ_g − θ̄)²) of scores without each group; NaN for one group."""
    groups = len(left_out)
    if groups < 2:
        return math.nan
    squares = float(((left_out - left_out.mean()) ** 2).sum())
    return math.sqrt((groups - 1) / groups * squares)


class Find(SceneEvaluator):
    """Top-1 of the marked object's category. Of tiles the one with the largest probability answers;
    models that learned from windows with a mark answer with confidence where there is none, which
    `cropped` avoids."""

    name = "find"
    summary = f"the marked object's category, {CONTROLS}"
    target = "marked"
    readings = (*READINGS, "cropped")
    scores = scene_scores(
        Score("top1", "top-1 of the marked object", unit_interval=True), readings=readings
    )

    def merged(self, answers: list[Tensor], corners: np.ndarray, owner: np.ndarray) -> Tensor:
        return max(answers, key=lambda answer: float(answer.max()))

    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """[right, 1]."""
        truth = int(target_of(canvas.objects, self.target, canvas.shape))
        return [float(int(answer.argmax()) == truth), 1.0]

    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        return [1 / classes, 1.0]

    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        return {"top1": float(total[0] / total[1])}

    def observed(self, name: str, cell: CellValue) -> Iterable[Observed]:
        for group, tally in zip(cell["groups"], cell["tallies"]["native"], strict=True):
            yield Observed(cell["size"], group, "top1", tally[0], tally[1])


class Map(SceneEvaluator):
    """Mean intersection over union of the classes, the background among them, over the patches of
    all pictures.

    IoU_c = Σ |said c and is c| / Σ |said c or is c|, sums over pictures (Pascal VOC); classes that
    are neither said nor there have none. `objects` is the share of the patches with an object that
    are named right. A map read at another size is resized bilinearly, its probabilities; tiles are
    put side by side. Chance says background everywhere.
    """

    name = "map"
    summary = f"what is at each patch (mean IoU), {CONTROLS}"
    target = "map"
    main = "miou"
    scores = scene_scores(
        Score("miou", "mean IoU of the patches", unit_interval=True),
        Score("objects", "patches with an object named right", unit_interval=True),
    )

    def resampled(self, answer: Tensor, shape: Shape, patch: int) -> Tensor:
        size = (shape[0] // patch, shape[1] // patch)
        if tuple(answer.shape[:2]) == size:
            return answer
        channels = answer.permute(2, 0, 1)[None]
        [resized] = F.interpolate(channels, size=size, mode="bilinear", align_corners=False)
        return resized.permute(1, 2, 0)

    def merged(self, answers: list[Tensor], corners: np.ndarray, owner: np.ndarray) -> Tensor:
        rows, columns = np.indices(owner.shape)
        tops, lefts = corners[owner].transpose(2, 0, 1)
        return torch.stack(answers)[owner, rows - tops, columns - lefts]

    def tally(self, answer: Tensor, canvas: Canvas, patch: int) -> list[float]:
        """[intersections (K), unions (K), patches with an object named right, patches with one]."""
        return self._compared(answer.flatten(0, 1).argmax(-1), canvas, answer.shape[-1])

    def chance(self, canvas: Canvas, classes: int, patch: int) -> list[float]:
        patches = (canvas.shape[0] // patch) * (canvas.shape[1] // patch)
        return self._compared(torch.zeros(patches, dtype=torch.int64), canvas, classes)

    def _compared(self, predicted: Tensor, canvas: Canvas, classes: int) -> list[float]:
        pixels = torch.from_numpy(target_of(canvas.objects, self.target, canvas.shape))
        true = at_patches(pixels[None], len(predicted))[0]
        predicted = predicted[true >= 0]
        true = true[true >= 0]
        right = torch.bincount(true[predicted == true], minlength=classes)
        said_counts = torch.bincount(predicted, minlength=classes)
        true_counts = torch.bincount(true, minlength=classes)
        union = said_counts + true_counts - right
        named = ((predicted == true) & (true > 0)).sum()
        return [*right.tolist(), *union.tolist(), float(named), float((true > 0).sum())]

    def scores_of(self, total: np.ndarray) -> dict[str, float]:
        right, union = np.split(total[:-2], 2)
        present = union > 0
        iou = right[present] / union[present]
        objects = float(total[-2] / total[-1]) if total[-1] else math.nan
        return {"miou": float(iou.mean()), "objects": objects}

    def observed(self, name: str, cell: CellValue) -> Iterable[Observed]:
        """The mean IoU, pooled class by class over groups of pictures, and `objects`."""
        pairs = list(zip(cell["groups"], cell["tallies"]["native"], strict=True))
        for group, tally in pairs:
            right, union = np.split(np.array(tally[:-2]), 2)
            for label in np.flatnonzero(union):
                hits = float(right[label])
                patches = float(union[label])
                yield Observed(cell["size"], group, "miou", hits, patches, pooled=str(label))
        for group, tally in pairs:
            yield Observed(cell["size"], group, "objects", tally[-2], tally[-1])
