"""Vision evaluators: accuracy against the size of the image, with nothing tuned and nothing resized in the model.

A cell is a size and a stretch of the held-out images (see ``modalities/evaluation.py``), taken in one random order that is
always the same, so that the first N of them are a fair sample whatever order they are stored in.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modalities.cost import Meter, device_name
from modalities.evaluation import Cell, CellValue, Evaluator, ModelResult, Settings, batches
from modalities.vision.held_out import DEFAULT_SOURCE, HeldOutImages, held_out
from modalities.vision.images import BadImage
from modalities.vision.transforms import preprocess
from zoo.naming import did_you_mean

CHUNK = 128  # images in a cell
FACTORS = (1, 1.5, 2, 3, 4)  # default sizes, in training sizes
SCALES = tuple(2 ** (k / 4) for k in range(-4, 5))  # of the logits, among which tuning chooses
_CHOICES = {"mode": ("native", "upsampled"), "fit": ("extend", "crop")}


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Settings of evaluators over images; ``samples`` counts images, the first of a fixed random order (default: all).

    Args:
        sizes: pixels of the shorter side, ascending once built; None takes 1, 1.5, 2, 3 and 4 times the training size,
            rounded to whole patches, as far as the held-out images are large enough.
        aspect: (width, height) in lowest terms once built; None takes that of the training images.
        mode: "native" reduces stored images to the size, so that a larger one has real detail; "upsampled" reduces them to the
            training size first, then enlarges: the control without new detail.
        fit: how an image gets the aspect: "extend" repeats its edge pixels, "crop" cuts the centre out.
        tune_temperature: measure besides what one factor on all attention logits, chosen at each size, gives.
    """

    sizes: tuple[int, ...] | None = None
    aspect: tuple[int, int] | None = None
    mode: str = "native"
    fit: str = "extend"
    tune_temperature: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1:
                raise ValueError(f"sizes must be pixel counts of at least 1, got {list(self.sizes)}")
            object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        if self.aspect is not None:
            if min(self.aspect) < 1:
                raise ValueError(f"aspect must be width:height, both at least 1, got {self.aspect[0]}:{self.aspect[1]}")
            object.__setattr__(self, "aspect", _lowest_terms(*self.aspect))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                hint = did_you_mean(value, choices)
                raise ValueError(f"--{name} {value!r}; {hint}expected {' or '.join(choices)}")


class Resolution(Evaluator):
    """Top-1 and top-5 of held-out images at every size, and the ratio of top-1 to that at the training size.

    The training size is always measured. If the asked aspect is another than that of training, it is no point of the
    curve and only the ratio's denominator. Images that cannot be decoded are left out and counted as ``skipped``.

    ``tuned_*`` columns exist with ``tune_temperature`` alone: every image is scored at the factor of the logits, one of
    ``SCALES``, that was best at that size for the other half of the images (even and odd places of the order), never for
    its own. ``tuned_scale`` is the mean of the two; ``tuned_ratio`` is to the untuned top-1 at the training size.

    images_per_second is the median over cells of images per wall time of the forward pass alone; peak_memory_mib is its
    memory beyond weights and input, at ``batch`` images in a pass (see ``Meter``). A cell measured before keeps the cost
    it had then, on the ``device`` it names.
    """

    name = "resolution"
    summary = "top-1 and top-5 of held-out images against their size, without fine-tuning"
    headline = (
        "top1", "top5", "ratio", "tuned_top1", "tuned_ratio", "tuned_scale", "images_per_second", "peak_memory_mib",
    )  # fmt: skip
    settings = ImageSettings
    axis = "size"
    unit = "images"
    trained = "train_size"
    trained_source = True
    default_source = DEFAULT_SOURCE

    def trained_at(self, model: nn.Module) -> int:
        return min(model.config.train_size)

    def points(self, model: nn.Module, settings: ImageSettings) -> tuple[int, ...]:
        return tuple(min(shape) for shape in self._shapes(model, settings))

    def identity(self, model: nn.Module, settings: ImageSettings) -> dict[str, Any]:
        images = held_out(settings.source)
        scales = list(SCALES) if settings.tune_temperature else []
        return {"images": images.fingerprint, "mode": settings.mode, "fit": settings.fit, "scales": scales}

    def cells(self, model: nn.Module, settings: ImageSettings) -> list[Cell]:
        images = held_out(settings.source)
        _check_classes(model, images)
        shapes = self._shapes(model, settings)
        trained = tuple(model.config.train_size)
        named = [("", shape) for shape in shapes]
        if trained not in shapes:
            named = [("reference ", trained), *named]
        if settings.mode == "native":
            _check_detail(named[-1][1], images, settings.fit)
            _check_detail(trained, images, settings.fit)
        count = min(settings.samples or len(images), len(images))
        if settings.tune_temperature and count < 2:
            raise ValueError("--tune-temperature needs at least 2 images: it scores one half at what suits the other")
        cells = []
        for role, (height, width) in named:
            for part in batches(count, CHUNK):
                name = f"{role}{height}x{width}/images={part.start}-{part.stop}"
                data = {"shape": (height, width), "places": range(part.start, part.stop)}
                cells.append(Cell(name, cost=part.stop - part.start, data=data))
        return cells

    def measure(self, model: nn.Module, cell: Cell, settings: ImageSettings) -> CellValue:
        height, width = cell.data["shape"]
        images, labels, places = _load(model, settings, cell.data["places"], height, width)
        batch = min(settings.batch_size(_tokens(model, height, width)), CHUNK)
        meter = Meter(next(model.parameters()).device)
        value: CellValue = {
            "size": min(height, width),
            "height": height,
            "width": width,
            "images": len(labels),
            "trained": (height, width) == tuple(model.config.train_size),
            "skipped": len(cell.data["places"]) - len(labels),
            "batch": batch,
            "device": device_name(meter.device),
        }
        logits = _logits(model, images, batch, meter)
        value |= {
            "top1": int(_right(logits, labels, 1).sum()),
            "top5": int(_right(logits, labels, 5).sum()),
            "nll_sum": float(nn.functional.cross_entropy(logits, labels, reduction="sum")),
            "seconds": meter.seconds,
            "peak_bytes": meter.peak_bytes,
        }
        if settings.tune_temperature:
            value |= _by_scale(model, images, labels, places, batch, logits)
        return value

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        by_shape: dict[tuple[int, int], list[CellValue]] = {}
        for name, cell in cells.items():
            if not name.startswith("reference "):
                by_shape.setdefault((cell["height"], cell["width"]), []).append(cell)
        trained = _row([cell for cell in cells.values() if cell["trained"]])["top1"]
        rows = [_row(mine) for mine in by_shape.values()]
        for row in rows:
            for kind in ("", "tuned_"):
                if f"{kind}top1" in row:
                    row[f"{kind}ratio"] = row[f"{kind}top1"] / trained if trained else math.nan
        return sorted(rows, key=lambda row: row["size"])

    def draw(self, results: list[ModelResult], path: Path) -> None:
        from modalities.plots import resolution_figure

        resolution_figure(results, path)

    def _shapes(self, model: nn.Module, settings: ImageSettings) -> list[tuple[int, int]]:
        """(height, width) of every point, ascending; that of training among them where it has the asked aspect."""
        height, width = model.config.train_size
        aspect = settings.aspect or _lowest_terms(width, height)
        step = (1 if model.config.pad else model.config.patch_size) * min(aspect)  # of the shorter side
        if settings.sizes is None:
            sizes = {max(1, round(factor * min(height, width) / step)) * step for factor in FACTORS}
            if settings.mode == "native":
                largest = held_out(settings.source).smallest_side(aspect, settings.fit)
                sizes = {size for size in sizes if size <= largest}
        else:
            _check_sizes(settings.sizes, step, model.config.patch_size, aspect)
            sizes = set(settings.sizes)
        if aspect == _lowest_terms(width, height):
            sizes.add(min(height, width))
        return [_shape(size, aspect) for size in sorted(sizes)]


def _lowest_terms(width: int, height: int) -> tuple[int, int]:
    common = math.gcd(width, height)
    return width // common, height // common


def _shape(size: int, aspect: tuple[int, int]) -> tuple[int, int]:
    """(height, width) with ``size`` pixels on the shorter side."""
    longer = size * max(aspect) // min(aspect)
    return (size, longer) if aspect[0] >= aspect[1] else (longer, size)


def _check_sizes(sizes: tuple[int, ...], step: int, patch: int, aspect: tuple[int, int]) -> None:
    """ValueError unless both sides of every size are whole patches; it names the nearest sizes for which they are."""
    for size in sizes:
        if size % step:
            near = [n for n in (size // step * step, (size // step + 1) * step) if n]
            at = "" if max(aspect) == 1 else f" at aspect {aspect[0]}:{aspect[1]}"
            raise ValueError(
                f"size {size}{at} does not divide into patches of {patch}; nearest valid: {' and '.join(map(str, near))}"
            )


def _check_detail(shape: tuple[int, int], images: HeldOutImages, fit: str) -> None:
    """ValueError for a size that stored images do not have."""
    height, width = shape
    least = images.smallest_side(_lowest_terms(width, height), fit)
    if min(shape) > least:
        raise ValueError(
            f"size {min(shape)} has more pixels than held-out images of {images.source!r}, of which one gives {least} on "
            "the shorter side at this aspect: choose sizes up to that, or --mode upsampled"
        )


def _check_classes(model: nn.Module, images: HeldOutImages) -> None:
    """ValueError where the source's list of classes is not as long as the model's."""
    classes = model.config.num_classes
    if images.classes and len(images.classes) != classes:
        raise ValueError(
            f"source {images.source!r} has {len(images.classes)} classes and the model {classes}; "
            "name the data it was trained on with --source"
        )


def _tokens(model: nn.Module, height: int, width: int) -> int:
    patch = model.config.patch_size
    return model.num_prefix_tokens + -(-height // patch) * -(-width // patch)


def _load(
    model: nn.Module, settings: ImageSettings, places: range, height: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, 3, height, width), labels (N,) and places (N,) of those at ``places`` of the order that can be decoded."""
    images, config = held_out(settings.source), model.config
    options = {"mode": settings.mode, "fit": settings.fit, "mean": config.mean, "std": config.std}
    found = []
    for place in places:
        try:
            image, label = images[place]
        except BadImage:
            continue
        if not 0 <= label < config.num_classes:
            raise ValueError(
                f"{images.source!r} has an image of class {label}; the model has {config.num_classes} classes"
            )
        pixels = preprocess(image, height, width, train_size=min(config.train_size), **options)
        found.append((pixels, label, place))
    if not found:
        empty = torch.zeros(0, dtype=torch.int64)
        return torch.zeros(0, 3, height, width), empty, empty
    pixels, labels, kept = zip(*found, strict=True)
    return torch.stack(pixels), torch.tensor(labels), torch.tensor(kept)


@torch.inference_mode()
def _logits(model: nn.Module, images: Tensor, batch: int, meter: Meter | None = None, scale: float = 1.0) -> Tensor:
    """(N, classes) float32 on the CPU. ``scale`` multiplies all attention logits."""
    like = next(model.parameters())
    options = {} if scale == 1.0 else {"logit_scale": scale}
    parts = [torch.zeros(0, model.config.num_classes)]
    for part in batches(len(images), batch):
        pixels = images[part].to(like)
        with meter or contextlib.nullcontext():
            logits = model(pixels, **options)
        parts.append(logits.float().cpu())
    return torch.cat(parts)


def _right(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """(N,) whether the label is among the k largest logits; rows with a logit that is no number are wrong."""
    top = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (top == labels[:, None]).any(1) & logits.isfinite().all(1)


def _by_scale(model: nn.Module, images: Tensor, labels: Tensor, places: Tensor, batch: int, plain: Tensor) -> CellValue:
    """How many are right at each of ``SCALES``, images at even and odd places apart: what tuning chooses from."""
    logits = [plain if scale == 1.0 else _logits(model, images, batch, scale=scale) for scale in SCALES]
    halves = [places % 2 == half for half in (0, 1)]
    return {
        f"half_top{k}": [[int(_right(at, labels, k)[half].sum()) for at in logits] for half in halves] for k in (1, 5)
    }


def _row(cells: list[CellValue]) -> dict[str, Any]:
    """One line of the table from the cells of one shape, but for the ratios."""
    count = sum(cell["images"] for cell in cells)
    if not count:
        raise ValueError("none of the held-out images could be decoded")
    top1, top5, nll = (sum(cell[name] for cell in cells) / count for name in ("top1", "top5", "nll_sum"))
    row = {name: cells[0][name] for name in ("size", "height", "width")} | {
        "images": count,
        "skipped": sum(cell["skipped"] for cell in cells),
        "top1": top1,
        "top1_standard_error": math.sqrt(top1 * (1 - top1) / count),
        "top5": top5,
        "nll": nll,
        "ratio": math.nan,
    }
    if "half_top1" in cells[0]:
        row |= _tuned(cells, count)
    row["images_per_second"] = statistics.median(cell["images"] / cell["seconds"] for cell in cells if cell["images"])
    if all(cell["peak_bytes"] is not None for cell in cells):
        row["peak_memory_mib"] = max(cell["peak_bytes"] for cell in cells) / 2**20
    devices = dict.fromkeys(cell["device"] for cell in cells)
    return row | {"batch": max(cell["batch"] for cell in cells), "device": " and ".join(devices)}


def _tuned(cells: list[CellValue], count: int) -> dict[str, float]:
    """Each half scored at the factor that is best for the other; among equals, the one nearest 1."""
    top1, top5 = (np.sum([cell[name] for cell in cells], axis=0) for name in ("half_top1", "half_top5"))
    order = sorted(range(len(SCALES)), key=lambda k: abs(math.log(SCALES[k])))
    chosen = [max(order, key=lambda k, half=half: top1[1 - half][k]) for half in (0, 1)]
    return {
        "tuned_top1": sum(int(top1[half][k]) for half, k in enumerate(chosen)) / count,
        "tuned_top5": sum(int(top5[half][k]) for half, k in enumerate(chosen)) / count,
        "tuned_ratio": math.nan,
        "tuned_scale": sum(SCALES[k] for k in chosen) / 2,
    }


EVALUATORS: dict[str, Evaluator] = {e.name: e for e in (Resolution(),)}
