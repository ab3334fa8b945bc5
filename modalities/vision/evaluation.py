"""What evaluators of images share: held-out images, sizes in whole patches, and the table of controls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from modalities.evaluation import Axis, Evaluator, ModelResult, Settings, counts, option
from modalities.loading import Heldout
from modalities.results import write_table
from modalities.vision.architectures import not_multiples
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import DEFAULT_SOURCE, HeldoutImages, heldout_by, heldout_name, open_heldout
from modalities.vision.images import MAX_PIXELS
from modalities.vision.model import VisionTransformer
from modalities.vision.sources import HELD_OUT
from modalities.vision.transforms import Shape

FACTORS = (1, 1.5, 2, 3, 4)  # default sizes, in training sizes
ENOUGH, PROBED = 0.9, 256  # share of the first so many pictures that reach a default size


def width_to_height(text: str) -> tuple[int, int]:
    """ "2:1" to (2, 1)."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not width:height in whole numbers, such as 2:1 or 3:4")
    return int(match[1]), int(match[2])


def lowest_terms(width: int, height: int) -> tuple[int, int]:
    return Fraction(width, height).as_integer_ratio()


def shape_at(size: int, aspect: tuple[int, int]) -> Shape:
    """(height, width) with `size` pixels on the shorter side, at an aspect (width, height)."""
    longer = size * max(aspect) // min(aspect)
    return (size, longer) if aspect[0] >= aspect[1] else (longer, size)


@dataclass(frozen=True)
class SizeSettings(Settings):
    """sizes: ascending, of the shorter side; by default FACTORS of the training size, as far as pictures reach. aspect: (width,
    height) in lowest terms; by default that of training."""

    sizes: tuple[int, ...] | None = option(
        None, "pixels of the shorter side, as 96,192,384; default 1x to 4x trained", parse=counts
    )
    aspect: tuple[int, int] | None = option(None, "width:height, as 2:1; default as trained", parse=width_to_height)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1:
                raise ValueError(f"sizes must be pixel counts of at least 1, got {list(self.sizes)}")
            object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        if self.aspect is not None:
            if min(self.aspect) < 1:
                raise ValueError(f"aspect must be width:height, both at least 1, got {self.aspect[0]}:{self.aspect[1]}")
            object.__setattr__(self, "aspect", lowest_terms(*self.aspect))
        side, aspect = max(self.sizes or (1,)), self.aspect or (1, 1)
        if (pixels := side**2 * max(aspect) // min(aspect)) > MAX_PIXELS:
            shape = f"sizes {side}, aspect {aspect[0]}:{aspect[1]}"
            raise ValueError(f"images of {pixels:,} pixels ({shape}); at most {MAX_PIXELS:,}")


Sizes = TypeVar("Sizes", bound=SizeSettings)


class SizeEvaluator(Evaluator[Sizes, VisionTransformer]):
    """Base of the image evaluators: the same pictures at several sizes, in whole patches.

    They are of the source named, or what the model's own training held out.
    """

    axis = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format, "train_size")
    fitting: str = "crop"  # how pictures get the aspect, see `preprocess`
    enlarges: bool = False  # whether pictures may be smaller than a size
    way_out: ClassVar[str] = ""  # of an error for sizes that no picture reaches

    def __init__(self, settings: Sizes | None = None, trained_on: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings, trained_on)
        self.source: str | VisionDataConfig = self.settings.source or (
            heldout_by(self.trained_on) if self.trained_on else DEFAULT_SOURCE
        )

    @property
    def trained_range(self) -> tuple[int, ...]:
        """Least and greatest shorter side of `data.shapes`, in pixels; () where training was at one size."""
        shapes = VisionDataConfig(shapes=tuple(self.trained_on.get("shapes", ()))).train_shapes
        sides = sorted({min(shape) for shape in shapes})
        return (sides[0], sides[-1]) if len(sides) > 1 else ()

    @property
    def heldout(self) -> Heldout[HeldoutImages]:
        return open_heldout(self.source)

    @property
    def source_name(self) -> str:
        return heldout_name(self.source)

    @property
    def note(self) -> str:
        """Says that a source which was named is read in part only, and how to read it as a whole."""
        source = self.settings.source
        if source is None or not (images := self.heldout.items.images).among:
            return ""
        whole = f"{source}{'&' if '?' in source else '?'}{HELD_OUT}"
        part = f"{len(images):,} of the {images.among:,} pictures of {source} are read, those that training on it holds out"
        return f"{part}; '{whole}' is all of them"

    def measured(self, results: list[ModelResult]) -> str:
        row = max((row for result in results for row in result.rows), key=lambda row: row["skipped"])
        if not row["skipped"]:
            return ""
        count = row.get("images", row.get("canvases"))
        largest = max(row["size"] for result in results for row in result.rows)
        because = row["skipped_because"].replace("too small", f"smaller than {largest} pixels")
        hint = self.way_out.replace("or ", "") if because != row["skipped_because"] else ""
        return f"{self.name}: {count} of {count + row['skipped']} pictures measured; left out: {because}{hint}"

    def trained_at(self, model: VisionTransformer) -> int:
        return min(model.config.train_size)

    def points(self, model: VisionTransformer) -> tuple[int, ...]:
        return tuple(min(shape) for shape in self.shapes(model))

    def aspect(self, model: VisionTransformer) -> tuple[int, int]:
        height, width = model.config.train_size
        return self.settings.aspect or lowest_terms(width, height)

    def step(self, model: VisionTransformer) -> int:
        """The shorter side is a multiple of this where both sides are whole patches at the aspect."""
        return model.config.patch_size * min(self.aspect(model))

    def shapes(self, model: VisionTransformer) -> list[Shape]:
        """(height, width) of every point, ascending; that of training is always among them where it has the aspect.

        Raises ValueError for a size of which a side is no multiple of the patch, naming the nearest sizes.
        """
        aspect, step, trained = self.aspect(model), self.step(model), self.trained_at(model)
        for size in self.settings.sizes or ():
            if wrong := not_multiples([size], step):
                at = "" if max(aspect) == 1 else f" at aspect {aspect[0]}:{aspect[1]}"
                raise ValueError(f"size {size}{at} does not divide into patches of {model.config.patch_size}: {wrong}")
        factors = (1,) if getattr(model.config, "fixed", False) else FACTORS
        sizes = set(self.settings.sizes or (max(1, round(factor * trained / step)) * step for factor in factors))
        smallest = shape_at(min(sizes), aspect)
        if self.settings.sizes is None and not self.enlarges:
            most = self.heldout.items.largest(smallest, self.fitting, share=ENOUGH, count=PROBED)
            sizes = {size for size in sizes if size <= most}
        height, width = model.config.train_size
        if aspect == lowest_terms(width, height):
            sizes.add(trained)
        if not sizes:
            self.check_reach(model, [smallest], PROBED, ENOUGH)
        return [shape_at(size, aspect) for size in sorted(sizes)]

    def check_reach(self, model: VisionTransformer, shapes: Sequence[Shape], count: int, share: float = 0) -> None:
        """ValueError for a size that none (not this share) of the first `count` pictures reaches; it names the largest."""
        items, step, (width, height) = self.heldout.items, self.step(model), self.aspect(model)
        reach = {shape: items.largest(shape, self.fitting, share=share, count=count) for shape in shapes}
        shape = max(shapes, key=lambda shape: min(shape) / reach[shape])
        if min(shape) <= reach[shape]:
            return
        most, at = reach[shape] // step * step, f"at aspect {width}:{height}"
        largest = f"the largest size {at} is {most}" if most else f"no stored picture reaches any valid size {at}"
        pictures = f"held-out pictures of {self.heldout.name!r} have"
        raise ValueError(f"size {min(shape)} has more pixels than {pictures}: {largest}{self.way_out}")


def write_controls(path: Path, results: Sequence[ModelResult], score: str) -> None:
    """The score less that of each control, a row for each model, size and control; no file where no row has `controls`."""
    rows = [
        {"model": result.label, "size": row["size"], "score": score} | control | {"groups": row["groups"]}
        for result in results
        for row in result.rows
        for control in row.get("controls", ())  # earlier versions have none
    ]
    if rows:
        write_table(path, rows)
