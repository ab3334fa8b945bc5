"""Vision as the rest of the project knows it: building a model, its loss and cost.

Importing it registers the models with timm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

import modalities.vision.registry  # noqa: F401  registers the models with timm
from modalities.contract import Cost, Evaluators, Modality
from modalities.encoder import training
from modalities.encoder.config import Options
from modalities.encoder.training import classification_loss
from modalities.loading import first_heldout
from modalities.vision import HEADLINE, RECIPES_MODULE
from modalities.vision.classes import target_names
from modalities.vision.config import VisionDataConfig
from modalities.vision.data import build_heldout, build_loader
from modalities.vision.model import VisionTransformer
from modalities.vision.objects import at_patches
from modalities.vision.outside import OUTSIDE
from modalities.vision.sources import class_names
from zoo.catalog import create_model
from zoo.model import ZooModel

# Weight of a map's loss relative to a picture's: most patches are background, soon known.
MAP_WEIGHT = 4.0


def build(name: str, options: Mapping[str, object], data: VisionDataConfig) -> ZooModel:
    """A registered model at the data's image size, classes and normalisation, with the names of
    classes where known."""
    facts: Options = {
        "img_size": data.image_size,
        "num_classes": data.num_classes,
        "mean": data.mean,
        "std": data.std,
    }
    model = create_model(name, **facts | dict(options))
    names = target_names(class_names(data.source), data.target)
    model.class_names = names if len(names) == model.config.num_classes else ()
    return model


def loss(
    model: Callable[..., Tensor], batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy to labels or soft targets, in nats; top-1 and top-5 accuracy where there
    are labels.

    With maps it is the class token's + MAP_WEIGHT · the mean over the patches, each asked for the
    pixel in its middle. Raises ValueError for a model without these logits.
    """
    logits = model(batch["images"]).float()
    targets = batch["targets"]
    map_loss = torch.zeros(())
    if "maps" in batch:
        num_prefix: int = model.num_prefix_tokens  # type: ignore[attr-defined]
        if logits.ndim != 3 or not num_prefix:
            way_out = "set model.options.global_pool='' and class_token=true"
            raise ValueError(
                f"a target with a map needs logits of the class token and of every patch: {way_out}"
            )
        patches = logits[:, num_prefix:]
        patch_targets = at_patches(batch["maps"], patches.shape[1])
        patch_loss, _ = classification_loss(patches.flatten(0, 1), patch_targets.flatten())
        map_loss = MAP_WEIGHT * patch_loss
        logits = logits[:, 0]
    value, metrics = classification_loss(logits, targets)
    return value + map_loss.to(value.device), metrics


def cost(model: VisionTransformer, data: VisionDataConfig, width: int) -> Cost:
    """That of an image at the shapes of the data (`modalities.encoder.training.cost_at`)."""
    shapes = data.train_shapes if data.shapes else [model.config.train_size]
    return training.cost_at(model, shapes, width)


MODALITY = Modality(
    name="vision",
    unit="images",
    model=VisionTransformer,
    config=VisionDataConfig,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_heldout),
    loss=loss,
    weight=training.weight,
    cost=cost,
    evaluators=Evaluators("modalities.vision.evaluators"),
    outside={"timm": OUTSIDE},
    metrics=training.METRICS,
    headline=HEADLINE,
    recipes=RECIPES_MODULE,
    task="image-classification",
)
