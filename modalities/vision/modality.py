"""The object that the rest of the project knows vision by; importing it registers the models with timm."""

from __future__ import annotations

from functools import partial

import modalities.vision.registry  # noqa: F401  registers the models with timm
from modalities.contract import Modality
from modalities.loading import first_heldout
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_loader
from modalities.vision.evaluators import EVALUATORS
from modalities.vision.model import VisionTransformer
from modalities.vision.outside import OUTSIDE
from modalities.vision.pictures import draw_predictions
from modalities.vision.training import build, cost, example, loss, weight

__all__ = ["MODALITY"]

MODALITY = Modality(
    name="vision",
    unit="images",
    model=VisionTransformer,
    config=VisionDataConfig,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_loader),
    loss=loss,
    weight=weight,
    cost=cost,
    example=example,
    draw=draw_predictions,
    evaluators=EVALUATORS,
    outside={"timm": OUTSIDE},
    metrics=("top1", "top5"),
    recipes="recipes.vision",
    task="image-classification",
)
