"""What evaluators of images share: held-out images, sizes in whole patches, and the table of controls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def shape_at(size: int, trained: Shape) -> Shape:
    """(height, width) with `size` pixels on the shorter side, at the aspect of training."""
    return size * trained[0] // min(trained), size * trained[1] // min(trained)


@dataclass(frozen=True)
class SizeSettings(Settings):
    """sizes: ascending, of the shorter side; by default FACTORS of the training size, as far as pictures reach. The aspect
    is that of training."""

    sizes: tuple[int, ...] | None = option(
        None, "pixels of the shorter side, as 96,192,384; default 1x to 4x trained", parse=counts
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1 or max(self.sizes) ** 2 > MAX_PIXELS:
                raise ValueError(
                    f"sizes {list(self.sizes)}: expected 1 pixel and more, images of at most {MAX_PIXELS:,}"
                )
            object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))


Sizes = TypeVar("Sizes", bound=SizeSettings)


class SizeEvaluator(Evaluator[Sizes, VisionTransformer]):
    """Base of the image evaluators: the same pictures at several sizes, in whole patches.

    They are of the source named, or what the model's own training held out.
    """

    axis = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format, "train_size")
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

    def step(self, model: VisionTransformer) -> int:
        """The shorter side is a multiple of this where both sides are whole patches."""
        trained = model.config.train_size
        return model.config.patch_size * min(trained) // math.gcd(*trained)

    def shapes(self, model: VisionTransformer) -> list[Shape]:
        """(height, width) of every point, ascending; that of training is among them.

        Raises ValueError for a size of which a side is no multiple of the patch, naming the nearest sizes.
        """
        step, trained = self.step(model), model.config.train_size
        for size in self.settings.sizes or ():
            if wrong := not_multiples([size], step):
                raise ValueError(f"size {size} does not divide into patches of {model.config.patch_size}: {wrong}")
        factors = (1,) if getattr(model.config, "fixed", False) else FACTORS
        sizes = set(self.settings.sizes or (max(1, round(factor * min(trained) / step)) * step for factor in factors))
        if self.settings.sizes is None and not self.enlarges:
            most = self.heldout.items.largest(trained, share=ENOUGH, count=PROBED)
            sizes = {size for size in sizes if size <= most}
        return [shape_at(size, trained) for size in sorted(sizes | {min(trained)})]

    def check_reach(self, model: VisionTransformer, shape: Shape, count: int) -> None:
        """ValueError for a size that none of the first `count` pictures reaches; it names the largest."""
        most = self.heldout.items.largest(shape, count=count)
        if min(shape) > most:
            step, pictures = self.step(model), f"held-out pictures of {self.heldout.name!r} have"
            largest = f"the largest size is {most // step * step}" if most >= step else "they reach no valid size"
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
