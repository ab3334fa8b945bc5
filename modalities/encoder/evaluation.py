"""What evaluators over sizes share: the same held-out items at several (height, width), in whole
patches, and the table of controls."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from modalities.classes import is_identity, known_names, label_numbers, listing
from modalities.encoder.config import Shape, not_multiples
from modalities.encoder.items import HeldoutItems
from modalities.encoder.model import GridTransformer
from modalities.evaluation import Evaluator
from modalities.loading import Heldout
from modalities.results import Axis, CellValue, ModelResult, Row
from modalities.settings import Settings, counts, option
from modalities.tables import write_table

# Default sizes, in training sizes.
FACTORS = (1, 1.5, 2, 3, 4)
# A default size is one that this share of the first so many items reaches.
ENOUGH = 0.9
PROBED = 256


@dataclass(frozen=True)
class SizeSettings(Settings):
    """sizes: ascending; by default FACTORS of the training size, as far as items reach."""

    sizes: tuple[int, ...] | None = option(
        None, "cells of a side, as 96,192,384; default 1x to 4x trained", parse=counts
    )

    # The greatest product of two sides, and what is said of it.
    most_cells: ClassVar[int] = 2**27
    samples_name: ClassVar[str] = "samples"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.sizes
        if sizes is None:
            return
        if not sizes or min(sizes) < 1 or max(sizes) ** 2 > self.most_cells:
            expected = f"expected 1 or more, {self.samples_name} of at most {self.most_cells:,}"
            raise ValueError(f"sizes {list(sizes)}: {expected}")
        object.__setattr__(self, "sizes", tuple(sorted(set(sizes))))


Sizes = TypeVar("Sizes", bound=SizeSettings)
Grid = TypeVar("Grid", bound=GridTransformer)


class SizeEvaluator(Evaluator[Sizes, Grid]):
    """Base of evaluators that read the same items at several shapes (height, width).

    A subclass gives `heldout`, and where its cells are not squares of an image, `grows`: "both"
    keeps the aspect of training, and a size counts the shorter side; "width" keeps the height, and
    a size counts the width, such as the frames of a spectrogram.
    """

    axis = Axis("size", "size (cells, log₂)", "{:g}".format, "train_size")
    grows: ClassVar[str] = "both"
    # What messages call the items, and what sides count.
    items_name: ClassVar[str] = "items"
    cells_name: ClassVar[str] = "cells"
    # Whether items may be smaller than a size.
    enlarges: bool = False
    # The score that `controls` of rows are compared by.
    main: ClassVar[str] = "top1"
    # Of an error for sizes that no item reaches.
    way_out: ClassVar[str] = ""

    @property
    @abstractmethod
    def heldout(self) -> Heldout[Any]:
        """The held-out data; its items are `HeldoutItems`. Opened once per process."""

    @property
    def trained_shapes(self) -> Sequence[Shape]:
        """(height, width) of the training batches, by the data section `trained_on`; () where that
        does not say."""
        return ()

    @property
    def trained_range(self) -> tuple[int, ...]:
        """Least and greatest size of `trained_shapes`; () where training was at one size."""
        sizes = sorted({self.size_of(shape) for shape in self.trained_shapes})
        return (sizes[0], sizes[-1]) if len(sizes) > 1 else ()

    def measured(self, results: list[ModelResult]) -> str:
        rows = [row for result in results for row in result.rows]
        row = max(rows, key=lambda row: row["skipped"])
        if not row["skipped"]:
            return ""
        count = row[self.unit]
        hint = self.way_out if "too small" in row["skipped_because"] else ""
        left_out = f"left out: {row['skipped_because']}{hint}"
        share = f"{count} of {count + row['skipped']} {self.items_name}"
        return f"{self.name}: {share} measured; {left_out}"

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

    def class_names(self, model: Grid) -> tuple[str, ...]:
        """The names of the model's classes as sources call them; () where they are unknown."""
        return known_names(model)

    def assumed_names(self, model: Grid) -> tuple[str, ...]:
        """`class_names`, or those that the library of a model without names would give it on this
        source (`assume_names`)."""
        items = self.heldout.items.items
        names = self.class_names(model)
        assume_names = getattr(model, "assume_names", None)
        if names or not items.classes or assume_names is None:
            return names
        return assume_names(items.classes, items.class_order)

    def labels(self, model: Grid) -> tuple[int, ...]:
        """By label of the source, the model's number of the class of that name; () where labels are
        the model's numbers. ValueError for classes that the model does not have."""
        classes = self.heldout.items.items.classes
        names = self.assumed_names(model)
        if not classes or not names:
            return ()
        source = f"source {self.heldout.name!r}"
        return label_numbers(classes, names, source=source, model="the model")

    def label_identity(self, model: Grid) -> dict[str, object]:
        """What cells are keyed by besides the items: labels that are not the model's numbers."""
        numbers = self.labels(model)
        return {} if is_identity(numbers) else {"labels": list(numbers)}

    def model_note(self, model: Grid) -> str:
        """How the classes of the source become the model's, where names leave that open, and which
        of the model's are missing. ValueError as `labels`."""
        self.labels(model)
        classes = self.heldout.items.items.classes
        names = self.class_names(model)
        if not names and not classes:
            return ""
        source = self.heldout.name
        if not classes:
            return (
                f"{source} has no names of classes: its labels are taken as the model's numbers, "
                f"0… for {listing(names)}"
            )
        order = "" if names else self.order_note(model)
        names = names or self.assumed_names(model) or classes
        missing = len(names) - len(classes)
        shares = f"{source} has {len(classes)} of the model's {len(names)} classes"
        few = f"{shares}; it answers among all of them" if missing else ""
        return "; ".join(filter(None, (order, few)))

    def order_note(self, model: Grid) -> str:
        """What the numbers of a model without names are taken for."""
        names = self.assumed_names(model)
        order = f"in the order of {self.heldout.name}"
        if names:
            order = "as its library has them"
        classes = listing(names or self.heldout.items.items.classes)
        return f"the model has no names of classes: its numbers are taken {order}, 0… for {classes}"

    @property
    def class_way_out(self) -> str:
        """What to do about a source with another number of classes than a model without names."""
        items = self.items_name
        return f"only {items} of the model's own classes can be scored: give --source such {items}"

    def size_of(self, shape: Shape) -> int:
        """The size of a shape, as settings, rows and figures count it."""
        return shape[1] if self.grows == "width" else min(shape)

    def shape_of(self, model: Grid, size: int) -> Shape:
        """(height, width) of a size."""
        height, width = model.config.train_size
        if self.grows == "width":
            return height, size
        least = min(height, width)
        return size * height // least, size * width // least

    def step(self, model: Grid) -> int:
        """A size is a multiple of this where both sides are whole patches."""
        patch = model.config.patch_size
        if self.grows == "width":
            return patch
        trained = model.config.train_size
        return patch * min(trained) // math.gcd(*trained)

    def trained_at(self, model: Grid) -> int:
        return self.size_of(model.config.train_size)

    def points(self, model: Grid) -> tuple[int, ...]:
        return tuple(self.size_of(shape) for shape in self.shapes(model))

    def shapes(self, model: Grid) -> list[Shape]:
        """(height, width) of every point, ascending; that of training is among them."""
        sizes = {*self._sizes(model), self.trained_at(model)}
        return [self.shape_of(model, size) for size in sorted(sizes)]

    def _sizes(self, model: Grid) -> list[int]:
        """Those of the settings, a ValueError where they are not in whole patches; by default those
        of FACTORS that most items reach."""
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
        trained = self.trained_at(model)
        sizes = [max(1, round(factor * trained / step)) * step for factor in factors]
        if self.enlarges:
            return sizes
        sides = sorted(self.sides(model, PROBED).values(), reverse=True)
        reach = sides[math.ceil(ENOUGH * len(sides)) - 1]
        return [size for size in sizes if size <= reach]

    def sides(self, model: Grid, count: int) -> dict[int, int]:
        """By place, the size that each of the first `count` items reaches (`HeldoutItems.side`);
        without those that cannot be read."""
        items: HeldoutItems = self.heldout.items
        shape = model.config.train_size
        sides = {place: items.side(place, shape) for place in range(min(count, len(items)))}
        if not any(sides.values()):
            problem = f"none of its held-out {items.noun}s can be read: {items.name(0)}"
            raise ValueError(f"source {self.heldout.name!r}: {problem}")
        return {place: side for place, side in sides.items() if side}

    def check_reach(self, model: Grid, size: int, sides: Mapping[int, int]) -> None:
        """ValueError for a size that no item reaches; it names the largest."""
        most = max(sides.values())
        if size <= most:
            return
        step = self.step(model)
        largest = "they reach no valid size"
        if most >= step:
            largest = f"the largest size is {most // step * step}"
        items = f"held-out {self.items_name} of {self.heldout.name!r} have"
        raise ValueError(
            f"size {size} has more {self.cells_name} than {items}: {largest}{self.way_out}"
        )

    def shape_columns(self, cells: Sequence[CellValue], **counts: int) -> Row:
        """The first columns of the row of one shape: its sides, what was measured, and what was
        skipped. Cells have "size", "height", "width", and "skipped", counts by reason."""
        skipped: Counter[str] = Counter()
        for cell in cells:
            skipped.update(cell["skipped"])
        because = ", ".join(f"{number} {reason}" for reason, number in skipped.most_common())
        if not all(counts.values()):
            size = f"{cells[0]['size']} {self.cells_name}"
            raise ValueError(
                f"none of the held-out {self.items_name} can be measured at {size}: {because}"
            )
        row: Row = {name: cells[0][name] for name in ("size", "height", "width")}
        return row | counts | {"skipped": skipped.total(), "skipped_because": because}


def by_shape(cells: Iterable[CellValue]) -> dict[Shape, list[CellValue]]:
    """Cells by (height, width)."""
    shapes: dict[Shape, list[CellValue]] = {}
    for cell in cells:
        shapes.setdefault((cell["height"], cell["width"]), []).append(cell)
    return shapes
