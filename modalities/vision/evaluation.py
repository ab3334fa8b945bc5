"""What evaluators of images share: the held-out images of the source named, or of the model's own
training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from modalities.classes import listing
from modalities.encoder.config import Shape
from modalities.encoder.evaluation import SizeEvaluator, SizeSettings
from modalities.loading import Heldout
from modalities.results import Axis
from modalities.settings import counts, option
from modalities.vision.classes import ORDERS, sort_classes
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
from modalities.vision.sources import DEFAULT_ORDER, HELD_OUT


@dataclass(frozen=True)
class ImageSizeSettings(SizeSettings):
    """sizes: ascending, of the shorter side in pixels; the aspect is that of training."""

    sizes: tuple[int, ...] | None = option(
        None, "pixels of the shorter side, as 96,192,384; default 1x to 4x trained", parse=counts
    )

    most_cells: ClassVar[int] = MAX_PIXELS
    samples_name: ClassVar[str] = "images"


Sizes = TypeVar("Sizes", bound=ImageSizeSettings)


class ImageEvaluator(SizeEvaluator[Sizes, VisionTransformer]):
    """Base of the image evaluators: the same pictures at several sizes; of the source named, or
    what the model's own training held out."""

    axis = Axis("size", "shorter side of the image (pixels, log₂)", "{:g}".format, "train_size")
    items_name = "pictures"
    cells_name = "pixels"

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
    def trained_shapes(self) -> Sequence[Shape]:
        return VisionDataConfig(shapes=tuple(self.trained_on.get("shapes", ()))).train_shapes

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

    def _order_option(self) -> str:
        """The source as far as the option that orders its folders."""
        source = self.heldout.name
        return f"{source}{'&' if '?' in source else '?'}order"

    @property
    def class_way_out(self) -> str:
        """Of class folders also the file that lists all of the model's classes."""
        if self.heldout.items.images.class_order != "sorted":
            return super().class_way_out
        file = f"'{self._order_option()}=FILE'"
        return f"{super().class_way_out}, or list all of its classes in a file, {file}"

    def order_note(self, model: VisionTransformer) -> str:
        """Of class folders also the orders that a source can name."""
        classes = self.heldout.items.images.classes or ()
        names = self.assumed_names(model)
        folders = self.heldout.items.images.class_order == "sorted"
        if not folders or len(names or classes) != len(classes):
            return super().order_note(model)
        library = "timm" if names else DEFAULT_ORDER
        other = next(order for order in ORDERS if order != library)
        option = self._order_option()
        way_out = f"'{option}=FILE' as a file with a class a line"
        if sort_classes(classes, other) != (names or classes):
            way_out = f"'{option}={other}' numbers them as {other} does, {way_out}"
        return (
            f"the model has no names of classes: folders are numbered as {library} does, "
            f"0… for {listing(names or classes)}; {way_out}"
        )
