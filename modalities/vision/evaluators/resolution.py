"""Accuracy against the size of the image, with nothing tuned and nothing resized in the model.

A cell is a size and a stretch of the held-out images, taken in one random order that is always the same, so that the first
N of them are a fair sample whatever order they are stored in.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from modalities.cost import Meter, device_name
from modalities.evaluation import (
    Axis,
    Cell,
    CellValue,
    ModelResult,
    Observed,
    Score,
    check_choice,
    clustered_error,
    option,
)
from modalities.figures import RULE, curves, finish, name_panel, panels
from modalities.files import file_safe, write_table
from modalities.paired import ScoresByUnit, paired_rows, scores_by_unit
from modalities.results import mean_of_seeds
from modalities.vision.evaluation import ImageEvaluator, write_controls
from modalities.vision.images import BadImage
from modalities.vision.model import VisionTransformer
from modalities.vision.scoring import auc, calibrated, class_scores
from modalities.vision.shapes import Shape, SizeSettings, check_sizes, lowest_terms, shape_at
from modalities.vision.transforms import MODES
from zoo.slices import slices

__all__ = ["SCALES", "Resolution", "ResolutionSettings"]

CHUNK = 128  # images in a cell
FACTORS = (1, 1.5, 2, 3, 4)  # default sizes, in training sizes
SCALES = tuple(2 ** (k / 4) for k in range(-4, 5))  # of the logits, among which tuning chooses
ENOUGH = 0.9  # share of the images that reach a default size
PROBED = 256  # images by which default sizes are chosen
MOST_SCORED = 64  # classes of which a cell keeps every logit
# Of a larger size: the column that says what reading large gains over a control, and the title of its panel.
CONTROLS = {
    "reduced": (
        Score("gain", "top-1 − top-1 at the best smaller size", linear=True, tabled=False),
        "Read large, minus reduced first",
    ),
    "multi_scale": (
        Score("multi_scale_gain", "top-1 − top-1 of the mean of sizes", linear=True, tabled=False),
        "Read large, minus the mean of sizes",
    ),
    "enlarged": (
        Score("enlarged_gain", "top-1 − top-1 of the enlarged", linear=True, tabled=False),
        "Read large, minus enlarged, no more to see",
    ),
}
ENLARGED, REFERENCE = "enlarged ", "reference "  # what a cell's name starts with that is no point of the curve
_CHOICES = {"mode": MODES, "fit": ("extend", "crop")}


# ------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class ResolutionSettings(SizeSettings):
    """`samples` counts images, the first of a fixed random order (default: all).

    Attributes:
        sizes: ascending. Default: 1, 1.5, 2, 3 and 4 times the training size, rounded to whole patches; in native mode as far
            as nine in ten of the held-out images are large enough.
        aspect: (width, height) in lowest terms. Default: that of the training images.
        mode: "native" reduces stored images to the size, so that a larger one has real detail; images too small for one of
            the sizes are left out of all, and counted. "resized" takes every image and enlarges those, as papers do.
            "upsampled" reduces them to the training size first, then enlarges: the control without new detail.
        fit: how an image gets the aspect: "extend" repeats its edge pixels, "crop" cuts the centre. Default: "extend" with
            `aspect`, else "crop", as in training.
        tune_temperature: measure also with one factor on all attention logits, chosen at each size.
        recalibrate: score also logits/T + b, T and the classes' b fitted on labels at the training size alone.
        enlarged: read every image also as "upsampled" would, beside itself: the control without new detail.
    """

    mode: str = option("native", "native, resized (enlarges too small images), or upsampled from the training size")
    fit: str | None = option(None, "crop (default), or extend to the aspect (default with --aspect)")
    tune_temperature: bool = option(False, "also with logits scaled at each size; marked as tuned")
    recalibrate: bool = option(False, "also with temperature and biases fitted at the training size alone; marked")
    enlarged: bool = option(False, "also reduced to the training size and enlarged: the control without new detail")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.enlarged and self.mode == "upsampled":
            raise ValueError(
                "--enlarged is what --mode upsampled measures: expected --mode native or resized beside it"
            )

    @property
    def fitting(self) -> str:
        return self.fit or ("crop" if self.aspect is None else "extend")


# ------------------------------------------------------------------------------------------------ measurement


class Resolution(ImageEvaluator):
    """Top-1 and top-5 of held-out images at every size, and the ratio of top-1 to that at the training size.

    The training size is always measured. With another aspect than in training it is not a point of the curve, only the
    ratio's denominator. Images that cannot be decoded, and in native mode those too small for one of the sizes, are left out
    and counted as `skipped`. With five classes or fewer there is no top-5.

    The controls of a larger size, each with a column of what reading large gains over it (`CONTROLS`): `reduced_top1`, the best
    top-1 among the smaller sizes measured, which is what the same images give when they are reduced before the model;
    `multi_scale_top1`, of the mean of the probabilities at every size measured up to it (up to MOST_SCORED classes);
    with `enlarged`, `enlarged_top1`, of the images reduced to the training size and enlarged again. A control that other images
    could be read for is left out. EVAL.controls.csv has top-1 less each of them, with 95% intervals over the groups.
    `chance_top1` is the share of the most frequent class.

    `top1_standard_error` is over the groups that the source names, such as fonts (over images where it names none, or
    one), and so are paired differences of top-1.

    `tuned_*` columns exist with `tune_temperature` alone: every image is scored at the factor of the logits, one of `SCALES`,
    that was best at that size for the other half of the images (even and odd places of the order), never for its own.
    `tuned_scale` is the mean of the two; `tuned_ratio` is to the untuned top-1 at the training size.

    Beside top-1: `balanced_accuracy`, the mean recall of the classes, which saying one more often cannot raise; `ece`, how far
    confidence is from the share that is right; `auc`, whether a class's probabilities rank its images above others, which of
    two classes a shift of the decision leaves as it is (up to MOST_SCORED classes); and the recall of every class, in a file of
    each model. With `recalibrate` the `recalibrated_*` columns score logits/T + b, fitted at the training size on the images at
    even places for those at odd ones, and the other way round, and applied as they are at every size.

    images_per_second is the median over cells of images per wall time of the forward pass alone; peak_memory_mib is its
    memory beyond weights and input, at `batch` images in a pass (see `Meter`). The first batch of every size is run once
    before anything is timed. A cell measured before keeps the cost of then, on the `device` it names.
    """

    name = "resolution"
    version = 4
    readable = (2, 3)  # before balanced accuracy, calibration and recalls; before groups, by images alone
    paired_over = "groups of images"
    summary = "top-1 and top-5 of held-out images against their size, without fine-tuning"
    scores = (
        Score("top1", "top-1 accuracy", linear=True),
        Score("top5"),
        Score("ratio", "top-1 / top-1 at the training size", linear=True),
        Score("balanced_accuracy"),
        Score("auc"),
        Score("ece"),
        Score("recalibrated_top1", "RECALIBRATED top-1 accuracy"),
        Score("recalibrated_balanced_accuracy"),
        Score("recalibrated_ece"),
        Score("reduced_top1"),
        Score("multi_scale_top1"),
        Score("enlarged_top1"),
        Score("chance_top1", tabled=False),
        *(gain for gain, _ in CONTROLS.values()),
        Score("tuned_top1", "TUNED top-1 accuracy", linear=True),
        Score("tuned_ratio", "TUNED top-1 / top-1 at the training size", linear=True),
        Score("tuned_scale"),
        Score("images_per_second"),
        Score("peak_memory_mib"),
        Score("skipped", exception=True),
    )
    settings_class = ResolutionSettings
    axis = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format, "train_size")
    unit = "images"
    _warm: ClassVar[WeakKeyDictionary[nn.Module, set[Shape]]] = WeakKeyDictionary()  # shapes that each model has seen

    def trained_at(self, model: VisionTransformer) -> int:
        return min(model.config.train_size)

    def points(self, model: VisionTransformer) -> tuple[int, ...]:
        return tuple(min(shape) for shape in self._shapes(model))

    def identity(self, model: VisionTransformer) -> dict[str, Any]:
        settings = self.settings
        scales = list(SCALES) if settings.tune_temperature else []
        return {"images": self.heldout.fingerprint, "mode": settings.mode, "fit": settings.fitting, "scales": scales}

    def cells(self, model: VisionTransformer) -> list[Cell]:
        settings, images = self.settings, self.heldout.items
        self._check_classes(model)
        shapes = self._shapes(model)
        trained = tuple(model.config.train_size)
        named = [("", shape) for shape in shapes]
        if trained not in shapes:
            named = [(REFERENCE, trained), *named]
        if settings.enlarged:
            named += [(ENLARGED, shape) for shape in shapes if min(shape) > min(trained)]
        every = [shape for _, shape in named] + [trained]
        count = min(settings.samples or len(images), len(images))
        small = set() if settings.mode != "native" else images.too_small(range(count), every, settings.fitting)
        if small and len(small) + images.unreadable(range(count)) == count:
            raise self._too_large(model, every, count)
        if settings.recalibrate and model.config.num_classes > MOST_SCORED:
            raise ValueError(
                f"--recalibrate keeps every logit: expected at most {MOST_SCORED} classes, the model has "
                f"{model.config.num_classes}"
            )
        if settings.recalibrate and count - len(small) < 2:
            raise ValueError("--recalibrate needs at least 2 images: it fits on one half what the other is scored with")
        if settings.tune_temperature and count - len(small) < 2:
            raise ValueError("--tune-temperature needs at least 2 images: it scores one half at what suits the other")
        needed = "+".join(f"{h}x{w}" for h, w in dict.fromkeys((trained, shapes[-1])))
        cells = []
        for role, (height, width) in named:
            for part in slices(count, CHUNK):
                places = range(part.start, part.stop)
                without = small.intersection(places)
                name = f"{role}{height}x{width}/images={part.start}-{part.stop}"
                name += f"/of {needed}" if without else ""  # here the numbers depend on the other sizes
                mode = "upsampled" if role == ENLARGED else settings.mode
                data = {"shape": (height, width), "places": places, "small": without, "mode": mode}
                cells.append(Cell(name, cost=len(places), data=data))
        return cells

    @torch.inference_mode()
    def measure(self, model: VisionTransformer, cell: Cell) -> CellValue:
        settings = self.settings
        height, width = shape = cell.data["shape"]
        batch = min(settings.batch_size(_tokens(model, height, width)), CHUNK)
        meter = Meter(next(model.parameters()).device)
        skipped: Counter[str] = Counter({"too small": len(cell.data["small"])} if cell.data["small"] else {})
        sums: dict[str, Any] = {"images": 0, "nll_sum": 0.0} | {f"top{k}": 0 for k in _ranks(model)}
        if settings.tune_temperature and cell.data["mode"] == settings.mode:
            sums |= {f"half_top{k}": np.zeros((2, len(SCALES)), int) for k in _ranks(model)}
        answers: dict[str, list[Any]] = {"labels": [], "said": [], "confidence": [], "odd": [], "groups": []}
        if model.config.num_classes <= MOST_SCORED:
            answers["logits"] = []
        places = [place for place in cell.data["places"] if place not in cell.data["small"]]
        for images, labels, kept in self._loaded(model, places, shape, cell.data["mode"], batch, skipped):
            self._warm_up(model, images, shape)
            with meter:
                logits = model(images)
            logits = logits.float().cpu()
            sums["images"] += len(labels)
            self.advance(len(labels))
            sums["nll_sum"] += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            for k in _ranks(model):
                sums[f"top{k}"] += int(_right(logits, labels, k).sum())
            _keep(answers, logits, labels, kept)
            answers["groups"] += [self.heldout.items.group(place) for place in kept.tolist()]
            if "half_top1" in sums:
                for name, counts in _by_scale(model, images, labels, kept, logits).items():
                    sums[name] += counts
        return {
            "size": min(height, width),
            "height": height,
            "width": width,
            "trained": (height, width) == tuple(model.config.train_size),
            "skipped": dict(skipped),
            "batch": batch,
            "device": device_name(meter.device),
            **{name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sums.items()},
            **answers,
            "seconds": meter.seconds,
            "peak_bytes": meter.peak_bytes,
        }

    def _warm_up(self, model: VisionTransformer, images: Tensor, shape: Shape) -> None:
        """An untimed pass: the first at a size is slower, as it selects kernels and allocates memory."""
        seen = self._warm.setdefault(model, set())
        if shape not in seen:
            seen.add(shape)
            model(images)

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        by_shape, enlarged = _by_shape(cells, ""), _by_shape(cells, ENLARGED)
        reference = [cell for cell in cells.values() if cell["trained"]]
        trained = _row(reference)["top1"]
        names = list(self.heldout.items.classes)
        rows = [_row(mine) | {"classes": names} for mine in by_shape.values()]
        if self.settings.recalibrate:
            fitted = _calibrations(reference)
            rows = [row | _recalibrated(mine, fitted) for row, mine in zip(rows, by_shape.values(), strict=True)]
        read: list[list[CellValue]] = []  # up to a row's size
        for row, (shape, mine) in zip(rows, by_shape.items(), strict=True):
            for kind in ("", "tuned_"):
                if f"{kind}top1" in row:
                    row[f"{kind}ratio"] = row[f"{kind}top1"] / trained if trained else math.nan
            controls: dict[str, np.ndarray | None] = {}
            alike = [cells for cells in read if _same_images(cells, mine)]
            if alike:
                controls["reduced"] = max(map(_answers, alike), key=np.mean)
                controls["multi_scale"] = _mean_of_sizes([*read, mine]) if alike == read else None
            if shape in enlarged and _same_images(enlarged[shape], mine):
                controls["enlarged"] = _answers(enlarged[shape])
            row |= _gains(mine, controls)
            read.append(mine)
        return rows

    def observed(self, name: str, cell: CellValue) -> Iterator[Observed]:
        """Top-1 of every group, pooled by its images."""
        if name.startswith((REFERENCE, ENLARGED)):
            return
        right = np.array(cell["said"]) == np.array(cell["labels"])
        for group, one in zip(cell["groups"], right.tolist(), strict=True):
            yield Observed(cell["size"], group, "top1", float(one), pooled="all")

    def write(self, results: list[ModelResult], out: Path) -> None:
        """EVAL.MODEL.classes.tsv: the recall of each class at every size. EVAL.controls.csv: top-1 less each control."""
        write_controls(out / f"{self.name}.controls.csv", results, "top1")
        for result in results:
            if any("per_class" not in row for row in result.rows):
                continue  # a mean of seeds, or of an earlier version
            recalls = {f"{row['size']}": row["per_class"] for row in result.rows}
            names = result.rows[0]["classes"]
            many = max(map(len, recalls.values()))
            rows = [
                {"class": names[n] if n < len(names) else n} | {size: each[n] for size, each in recalls.items()}
                for n in range(many)
            ]
            write_table(out / f"{self.name}.{file_safe(result.label)}.classes.tsv", rows, delimiter="\t")

    def _shapes(self, model: VisionTransformer) -> list[Shape]:
        """(height, width) of every point, ascending; that of training among them where it has the aspect."""
        settings = self.settings
        height, width = model.config.train_size
        aspect, step = self._aspect(model), self._step(model)
        if settings.sizes is None:
            factors = (1,) if getattr(model.config, "fixed", False) else FACTORS
            sizes = {max(1, round(factor * min(height, width) / step)) * step for factor in factors}
            if settings.mode == "native":
                shape = shape_at(step, aspect)
                most = self.heldout.items.largest(shape, settings.fitting, share=ENOUGH, count=PROBED)
                least, sizes = min(sizes), {size for size in sizes if size <= most}
        else:
            check_sizes(settings.sizes, step, model.config.patch_size, aspect)
            sizes = set(settings.sizes)
        if aspect == lowest_terms(width, height):
            sizes.add(min(height, width))
        if not sizes:
            raise self._too_large(model, [shape_at(least, aspect)], PROBED, share=ENOUGH)
        return [shape_at(size, aspect) for size in sorted(sizes)]

    def _aspect(self, model: VisionTransformer) -> tuple[int, int]:
        height, width = model.config.train_size
        return self.settings.aspect or lowest_terms(width, height)

    def _step(self, model: VisionTransformer) -> int:
        """The shorter side is a multiple of this where both sides are whole patches at the aspect."""
        return (1 if model.config.pad else model.config.patch_size) * min(self._aspect(model))

    def _too_large(self, model: VisionTransformer, shapes: list[Shape], count: int, share: float = 0) -> ValueError:
        """The error for sizes that no stored image reaches; it names the largest one that works."""
        step, fit, heldout = self._step(model), self.settings.fitting, self.heldout
        largest = {shape: heldout.items.largest(shape, fit, share=share, count=count) for shape in shapes}
        shape = max(shapes, key=lambda shape: min(shape) / largest[shape])
        most, (width, height) = largest[shape] // step * step, self._aspect(model)
        at = f"at aspect {width}:{height}"
        reach = f"the largest size {at} is {most}. Choose sizes up to that, or" if most else ""
        return ValueError(
            f"size {min(shape)} has more pixels than held-out images of {heldout.name!r} have: "
            f"{reach or f'no stored image reaches any valid size {at}. Choose'} --mode resized"
        )

    def _check_classes(self, model: VisionTransformer) -> None:
        """ValueError where the source's list of classes is not that of the model, as far as its length tells."""
        theirs, classes = len(self.heldout.items.classes), model.config.num_classes
        if theirs and theirs != classes:
            raise ValueError(
                f"source {self.heldout.name!r} has {theirs} classes and the model {classes}; only images of the model's own "
                "classes can be scored: give --source such images, as those it was trained on"
            )

    def _loaded(
        self, model: VisionTransformer, places: list[int], shape: Shape, mode: str, batch: int, skipped: Counter[str]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Images (B, 3, height, width) on the model's device, labels (B,) and places (B,), a batch at a time; images that
        cannot be decoded are counted by reason in `skipped`."""
        like, classes = next(model.parameters()), model.config.num_classes
        found: list[tuple[Tensor, int, int]] = []
        for n, place in enumerate(places):
            try:
                image, label = self.heldout.items[place]
                if not 0 <= label < classes:
                    raise ValueError(
                        f"{self.heldout.name!r} has an image of class {label}; the model has {classes} classes"
                    )
                pixels = model.pixels(image, *shape, mode=mode, fit=self.settings.fitting)
                found.append((pixels, label, place))
            except BadImage as error:
                skipped[error.reason] += 1
            if found and (len(found) == batch or n + 1 == len(places)):
                images, labels, kept = zip(*found, strict=True)
                found.clear()
                yield torch.stack(images).to(like), torch.tensor(labels), torch.tensor(kept)

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """Top-1 against size, with chance; what reading large gains over each control measured; tuned top-1 if any."""
        results = mean_of_seeds(results, self.axis.column)
        by_column = {score.column: score for score in self.scores}
        columns = {name for result in results for row in result.rows for name in row}
        chance = [row["chance_top1"] for result in results for row in result.rows if "chance_top1" in row]
        gains = {score.column: title for score, title in CONTROLS.values()}
        named = {
            "top1": "Top-1; dotted: chance" if chance else "Top-1",
            **gains,
            "tuned_top1": "Top-1, TUNED at each size",
        }
        named = {column: name for column, name in named.items() if column in columns}
        figure, axes = panels(1, len(named), width=4.9, height=4.2)
        for axis, (column, name) in zip(axes, named.items(), strict=True):
            curves(axis, results, by_column[column], self.axis)
            name_panel(axis, name)
            if column in gains:
                axis.axhline(0.0, **RULE)
        beside = [axis for axis, column in zip(axes, named, strict=True) if column in gains]
        limits = [axis.get_ylim() for axis in beside]
        for axis in beside:  # on one scale
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if chance:
            axes[0].axhline(chance[0], **RULE | {"linestyle": ":"})  # of the same images
        finish(figure, axes, results, path)


def _tokens(model: VisionTransformer, height: int, width: int) -> int:
    patch = model.config.patch_size
    return model.num_prefix_tokens + -(-height // patch) * -(-width // patch)


def _ranks(model: VisionTransformer) -> tuple[int, ...]:
    return (1, 5) if model.config.num_classes > 5 else (1,)


def _right(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """(N,) whether the label is among the k largest logits; rows with a NaN or infinite logit are wrong."""
    top = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (top == labels[:, None]).any(1) & logits.isfinite().all(1)


def _by_scale(
    model: VisionTransformer, images: Tensor, labels: Tensor, places: Tensor, plain: Tensor
) -> dict[str, np.ndarray]:
    """(2, scales): how many are right at each of `SCALES`, for images at even and at odd places."""
    counts = {f"half_top{k}": np.zeros((2, len(SCALES)), int) for k in _ranks(model)}
    for n, scale in enumerate(SCALES):
        logits = plain if scale == 1.0 else model(images, logit_scale=scale).float().cpu()
        for k in _ranks(model):
            right = _right(logits, labels, k)
            counts[f"half_top{k}"][:, n] = [int(right[places % 2 == half].sum()) for half in (0, 1)]
    return counts


def _row(cells: list[CellValue]) -> dict[str, Any]:
    """A table row from the cells of one shape, without ratios and the control."""
    count = sum(cell["images"] for cell in cells)
    if not count:
        raise ValueError("none of the held-out images could be decoded")
    skipped: Counter[str] = sum((Counter(cell["skipped"]) for cell in cells), Counter())
    top1, nll = (sum(cell[name] for cell in cells) / count for name in ("top1", "nll_sum"))
    row = (
        {name: cells[0][name] for name in ("size", "height", "width")}
        | {
            "images": count,
            "skipped": skipped.total(),
            "skipped_because": ", ".join(f"{number} {reason}" for reason, number in skipped.most_common()),
            "top1": top1,
            "top1_standard_error": _standard_error(cells, top1),
            **({"top5": sum(cell["top5"] for cell in cells) / count} if "top5" in cells[0] else {}),
            "nll": nll,
            "ratio": math.nan,
        }
        | _scores(cells)
    )
    if "half_top1" in cells[0]:
        row |= _tuned(cells, count)
    row["images_per_second"] = statistics.median(cell["images"] / cell["seconds"] for cell in cells if cell["images"])
    if all(cell["peak_bytes"] is not None for cell in cells):
        row["peak_memory_mib"] = max(cell["peak_bytes"] for cell in cells) / 2**20
    devices = dict.fromkeys(cell["device"] for cell in cells)
    return row | {"batch": max(cell["batch"] for cell in cells), "device": " and ".join(devices)}


def _standard_error(cells: list[CellValue], top1: float) -> float:
    """Of the share that is right, over groups or images (`_units`)."""
    units = _units(cells)
    if len(set(units)) == len(units):
        return math.sqrt(top1 * (1 - top1) / len(units))
    return clustered_error(_answers(cells), units)


def _units(cells: list[CellValue]) -> list[str]:
    """What errors are over: the group of each image; the images themselves where all are of one group."""
    groups = [group for cell in cells for group in cell["groups"]]
    return groups if len(set(groups)) > 1 else [str(n) for n in range(len(groups))]


def _by_shape(cells: Mapping[str, CellValue], role: str) -> dict[Shape, list[CellValue]]:
    """The cells whose name starts with a role, by shape; both in the order of `Resolution.cells`."""
    found: dict[Shape, list[CellValue]] = {}
    for name, cell in cells.items():
        if name.startswith(role) if role else name[0].isdigit():
            found.setdefault((cell["height"], cell["width"]), []).append(cell)
    return found


def _same_images(a: list[CellValue], b: list[CellValue]) -> bool:
    return all(np.array_equal(_gathered(a, name), _gathered(b, name)) for name in ("labels", "odd", "groups"))


def _answers(cells: list[CellValue]) -> np.ndarray:
    """(N,) 1 where the answer is right, else 0."""
    return (_gathered(cells, "said") == _gathered(cells, "labels")).astype(float)


def _mean_of_sizes(sizes: list[list[CellValue]]) -> np.ndarray | None:
    """(N,) as `_answers`, of the mean of the probabilities at every size; None without logits. An image with a logit that is no
    finite number, at any size, is wrong."""
    if not all("logits" in cell for cells in sizes for cell in cells):
        return None
    logits = torch.stack([torch.from_numpy(_gathered(cells, "logits")) for cells in sizes])
    said = logits.softmax(-1).mean(0).argmax(-1).where(logits.isfinite().all(-1).all(0), -1)
    return (said.numpy() == _gathered(sizes[-1], "labels")).astype(float)


def _gains(cells: list[CellValue], controls: Mapping[str, np.ndarray | None]) -> dict[str, Any]:
    """Columns of a row: top-1 by each control and what is gained over it; under `controls` with 95% intervals over units."""
    answers, units = _answers(cells), _units(cells)

    def by_unit(right: np.ndarray) -> ScoresByUnit:
        return scores_by_unit(
            Observed(None, unit, "top1", one, pooled="all") for unit, one in zip(units, right.tolist(), strict=True)
        )

    labels = _gathered(cells, "labels")
    found: dict[str, Any] = {"chance_top1": float(np.bincount(labels).max() / len(labels))}
    found |= {"groups": len(set(units)), "controls": []}
    for name, theirs in controls.items():
        if theirs is None:
            continue
        (row,) = paired_rows([by_unit(answers)], [by_unit(theirs)])
        found |= {f"{name}_top1": row["against_value"], CONTROLS[name][0].column: row["difference"]}
        found["controls"].append(
            {"control": name, "value": row["value"], "control_value": row["against_value"]}
            | {column: row[column] for column in ("difference", "low", "high")}
        )
    return found


def _keep(answers: dict[str, list[Any]], logits: Tensor, labels: Tensor, places: Tensor) -> None:
    """What a batch's scores are made of; with a NaN or infinite logit the answer is −1, of confidence 0."""
    finite = logits.isfinite().all(1)
    confidence, said = logits.double().softmax(1).max(1)
    confidence = confidence.where(finite, 0.0)
    answers["labels"] += labels.tolist()
    answers["said"] += said.where(finite, -1).tolist()
    answers["confidence"] += np.round(confidence.numpy(), 6).tolist()
    answers["odd"] += (places % 2).tolist()
    if "logits" in answers:
        answers["logits"] += np.round(logits.double().numpy(), 4).tolist()


def _gathered(cells: list[CellValue], name: str) -> np.ndarray:
    return np.array([value for cell in cells for value in cell[name]])


def _scores(cells: list[CellValue]) -> dict[str, Any]:
    labels, said, confidence = (_gathered(cells, name) for name in ("labels", "said", "confidence"))
    scored = all("logits" in cell for cell in cells)
    logits = torch.from_numpy(_gathered(cells, "logits")) if scored else None
    classes = int(max(labels.max(), said.max()) + 1) if logits is None else logits.shape[1]
    found = class_scores(labels, said, confidence, classes)
    return found if logits is None else found | {"auc": auc(logits.softmax(1).numpy(), labels)}


def _calibrations(cells: list[CellValue]) -> list[tuple[float, Tensor]]:
    """Of the images at even places, then at odd ones."""
    logits, labels = (torch.from_numpy(_gathered(cells, name)) for name in ("logits", "labels"))
    odd = torch.from_numpy(_gathered(cells, "odd"))
    return [calibrated(logits[odd == half], labels[odd == half]) for half in (0, 1)]


def _recalibrated(cells: list[CellValue], fitted: list[tuple[float, Tensor]]) -> dict[str, Any]:
    """Scores of each half by what was fitted on the other."""
    logits, labels = (torch.from_numpy(_gathered(cells, name)) for name in ("logits", "labels"))
    odd = torch.from_numpy(_gathered(cells, "odd"))[:, None] == 1
    (even_scale, even_bias), (odd_scale, odd_bias) = fitted
    moved = torch.where(odd, logits * even_scale + even_bias, logits * odd_scale + odd_bias)
    confidence, said = moved.softmax(1).max(1)
    scores = class_scores(labels.numpy(), said.numpy(), confidence.numpy(), logits.shape[1])
    del scores["per_class"]
    scores |= {
        "top1": float((said == labels).double().mean()),
        "nll": float(nn.functional.cross_entropy(moved, labels)),
    }
    return {f"recalibrated_{name}": value for name, value in scores.items()}


def _tuned(cells: list[CellValue], count: int) -> dict[str, float]:
    """Each half scored at the factor that is best for the other; among equals, the one nearest 1."""
    top = {k: np.sum([cell[f"half_top{k}"] for cell in cells], axis=0) for k in (1, 5) if f"half_top{k}" in cells[0]}
    order = sorted(range(len(SCALES)), key=lambda k: abs(math.log(SCALES[k])))
    chosen = [max(order, key=top[1][1 - half].__getitem__) for half in (0, 1)]
    return {
        **{f"tuned_top{k}": sum(int(right[h][at]) for h, at in enumerate(chosen)) / count for k, right in top.items()},
        "tuned_ratio": math.nan,
        "tuned_scale": sum(SCALES[k] for k in chosen) / 2,
    }
