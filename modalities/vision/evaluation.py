"""What evaluators of images share: held-out images, sizes in whole patches, and the table of
controls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from modalities.encoder.config import Shape, not_multiples
from modalities.evaluation import Evaluator
from modalities.loading import Heldout
from modalities.results import Axis, CellValue, ModelResult, Row
from modalities.settings import Settings, counts, option
from modalities.tables import write_table
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import (
    DEFAULT_SOURCE,
    HeldoutImages,
    heldout_by,
    heldout_name,
    open_heldout,
)
from modalities.vision.images import MAX_PIXELS
from modalities.vision.model import VisionTransformer
from modalities.vision.sources import HELD_OUT

# Default sizes, in training sizes.
FACTORS = (1, 1.5, 2, 3, 4)
# A default size is one that this share of the first so many pictures reaches.
ENOUGH = 0.9
PROBED = 256


@dataclass(frozen=True)
class SizeSettings(Settings):
    """sizes: ascending, of the shorter side; by default FACTORS of the training size, as far as
    pictures reach. The aspect is that of training."""

    sizes: tuple[int, ...] | None = option(
        None, "pixels of the shorter side, as 96,192,384; default 1x to 4x trained", parse=counts
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        if sizes is None:
            return
        if not sizes or min(sizes) < 1 or max(sizes) ** 2 > MAX_PIXELS:
            expected = f"expected 1 or more, images of at most {MAX_PIXELS:,}"
            raise ValueError(f"sizes {list(sizes)}: {expected}")
        object.__setattr__(self, "sizes", tuple(sorted(set(sizes))))


Sizes = TypeVar("Sizes", bound=SizeSettings)


class SizeEvaluator(Evaluator[Sizes, VisionTransformer]):
    """Base of the image evaluators: the same pictures at several sizes, in whole patches; of the
    source named, or what the model's own training held out."""

    axis = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format, "train_size")
    # Whether pictures may be smaller than a size.
    enlarges: bool = False
    # The score that `controls` of rows are compared by.
    main: ClassVar[str] = "top1"
    # Of an error for sizes that no picture reaches.
    way_out: ClassVar[str] = ""

    def __init__(
        self, settings: Sizes | None = None, trained_on: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(settings, trained_on)
        self.source: str | VisionDataConfig = DEFAULT_SOURCE
        if self.settings.source:
            self.source = self.settings.source
        elif self.trained_on:
            self.source = heldout_by(self.trained_on)

    @property
    def trained_range(self) -> tuple[int, ...]:
        """Least and greatest shorter side of `data.shapes`, in pixels; () where training was at one
        size."""
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
        """Says that a source which was named is read in part only, and how to read it as a
        whole."""
        source = self.settings.source
        images = self.heldout.items.images
        if source is None or not images.among:
            return ""
        joint = "&" if "?" in source else "?"
        part = f"{len(images):,} of the {images.among:,} pictures of {source} are held out"
        return f"{part}; '{source}{joint}{HELD_OUT}' is all of them"

    def measured(self, results: list[ModelResult]) -> str:
        rows = [row for result in results for row in result.rows]
        row = max(rows, key=lambda row: row["skipped"])
        if not row["skipped"]:
            return ""
        count = row[self.unit]
        hint = self.way_out if "too small" in row["skipped_because"] else ""
        left_out = f"left out: {row['skipped_because']}{hint}"
        return f"{self.name}: {count} of {count + row['skipped']} pictures measured; {left_out}"

    def write(self, results: list[ModelResult], out: Path) -> None:
        """EVAL.controls.csv: the main score less that of each control; no file where no row has
        `controls`."""
        table: list[Row] = []
        for result in results:
            for row in result.rows:
                facts: Row = {"model": result.label, "size": row["size"], "score": self.main}
                # Rows of earlier versions have none.
                for control in row.get("controls", ()):
                    table.append(facts | control | {"groups": row["groups"]})
        if table:
            write_table(out / f"{self.name}.controls.csv", table)

    def trained_at(self, model: VisionTransformer) -> int:
        return min(model.config.train_size)

    def points(self, model: VisionTransformer) -> tuple[int, ...]:
        return tuple(min(shape) for shape in self.shapes(model))

    def step(self, model: VisionTransformer) -> int:
        """The shorter side is a multiple of this where both sides are whole patches."""
        trained = model.config.train_size
        return model.config.patch_size * min(trained) // math.gcd(*trained)

    def shapes(self, model: VisionTransformer) -> list[Shape]:
        """(height, width) of every point, ascending, at the aspect of training; that of training is
        among them."""
        trained = model.config.train_size
        least = min(trained)
        sizes = {*self._sizes(model), least}
        return [(size * trained[0] // least, size * trained[1] // least) for size in sorted(sizes)]

    def _sizes(self, model: VisionTransformer) -> list[int]:
        """Those of the settings, a ValueError where they are not in whole patches; by default those
        of FACTORS that most pictures reach."""
        step = self.step(model)
        if self.settings.sizes is not None:
            for size in self.settings.sizes:
                wrong = not_multiples([size], step)
                if wrong:
                    patch = model.config.patch_size
                    raise ValueError(
                        f"size {size} does not divide into patches of {patch}: {wrong}"
                    )
            return list(self.settings.sizes)
        factors = (1,) if getattr(model.config, "fixed", False) else FACTORS
        least = min(model.config.train_size)
        sizes = [max(1, round(factor * least / step)) * step for factor in factors]
        if self.enlarges:
            return sizes
        sides = sorted(self.sides(model, PROBED).values(), reverse=True)
        reach = sides[math.ceil(ENOUGH * len(sides)) - 1]
        return [size for size in sizes if size <= reach]

    def sides(self, model: VisionTransformer, count: int) -> dict[int, int]:
        """By place, the shorter side that each of the first `count` pictures reaches; without those
        whose header is broken."""
        items = self.heldout.items
        shape = model.config.train_size
        sides = {place: items.side(place, shape) for place in range(min(count, len(items)))}
        if not any(sides.values()):
            problem = f"none of its held-out images can be read: {items.name(0)}"
            raise ValueError(f"source {self.heldout.name!r}: {problem}")
        return {place: side for place, side in sides.items() if side}

    def check_reach(self, model: VisionTransformer, size: int, sides: Mapping[int, int]) -> None:
        """ValueError for a size that no picture reaches; it names the largest."""
        most = max(sides.values())
        if size <= most:
            return
        step = self.step(model)
        largest = "they reach no valid size"
        if most >= step:
            largest = f"the largest size is {most // step * step}"
        pictures = f"held-out pictures of {self.heldout.name!r} have"
        raise ValueError(f"size {size} has more pixels than {pictures}: {largest}{self.way_out}")


def by_shape(cells: Iterable[CellValue]) -> dict[Shape, list[CellValue]]:
    """Cells by (height, width)."""
    shapes: dict[Shape, list[CellValue]] = {}
    for cell in cells:
        shapes.setdefault((cell["height"], cell["width"]), []).append(cell)
    return shapes


def counted(cells: Sequence[CellValue], **counts: int) -> Row:
    """The first columns of the row of one shape: its sides, what was measured, and what was
    skipped."""
    skipped: Counter[str] = Counter()
    for cell in cells:
        skipped.update(cell["skipped"])
    because = ", ".join(f"{number} {reason}" for reason, number in skipped.most_common())
    if not all(counts.values()):
        size = cells[0]["size"]
        raise ValueError(
            f"none of the held-out pictures can be measured at {size} pixels: {because}"
        )
    row: Row = {name: cells[0][name] for name in ("size", "height", "width")}
    return row | counts | {"skipped": skipped.total(), "skipped_because": because}
