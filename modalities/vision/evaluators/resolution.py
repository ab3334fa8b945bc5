"""Accuracy against the size of the image, with nothing tuned and nothing resized in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from modalities.encoder.accuracy import CONTROLS, SizeAccuracy, accuracy_scores
from modalities.encoder.config import Shape
from modalities.settings import check_choice, option
from modalities.vision.evaluation import ImageEvaluator, ImageSizeSettings
from modalities.vision.model import VisionTransformer

MODES = ("native", "resized")
ENLARGED = "enlarged"


@dataclass(frozen=True)
class ResolutionSettings(ImageSizeSettings):
    """`samples` counts images, the first of a fixed random order (default: all).

    mode: "native" reduces stored images to the size, so that a larger one has real detail; images
        too small for one of the sizes are left out of all, and counted. "resized" takes every image
        and enlarges those, as papers do.
    enlarged: also read every image reduced to the training size and enlarged: the control without
        new detail.
    """

    mode: str = option("native", "native, or resized (enlarges too small images)")
    enlarged: bool = option(
        False, "also reduced to the training size and enlarged: the control without new detail"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, MODES)


class Resolution(
    ImageEvaluator[ResolutionSettings], SizeAccuracy[ResolutionSettings, VisionTransformer]
):
    """`SizeAccuracy` of images, with `enlarged_top1` as a control if the settings ask for it."""

    name = "resolution"
    version = 4
    paired_over = "groups of images"
    summary = "top-1 and top-5 of held-out images against their size, without fine-tuning"
    scores = accuracy_scores(CONTROLS | {ENLARGED: "top-1 − top-1 of the enlarged"})
    unit = "images"
    extra_controls = (ENLARGED,)
    way_out = "; or --mode resized"

    def __init__(
        self,
        settings: ResolutionSettings | None = None,
        trained_on: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(settings, trained_on)
        self.enlarges = self.settings.mode != "native"

    def identity(self, model: VisionTransformer) -> dict[str, object]:
        # "fit" and "scales" are of options that are gone; they stay for the cells that are stored.
        settings = {"mode": self.settings.mode, "fit": "crop", "scales": []}
        return super().identity(model) | settings

    def readings(self, model: VisionTransformer, shapes: list[Shape]) -> list[tuple[str, Shape]]:
        readings = super().readings(model, shapes)
        if self.settings.enlarged:
            trained = min(model.config.train_size)
            readings += [(ENLARGED, shape) for shape in shapes if min(shape) > trained]
        return readings

    def grid(
        self, model: VisionTransformer, item: Image.Image, shape: Shape, control: str
    ) -> Tensor:
        return model.pixels(item, *shape, enlarged=control == ENLARGED)
