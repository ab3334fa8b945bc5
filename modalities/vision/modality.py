"""Vision as the rest of the project knows it: building a model, its loss and cost.

Importing it registers the models with timm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import modalities.vision.registry  # noqa: F401  registers the models with timm
from modalities.contract import Cost, Evaluators, Modality
from modalities.cost import activation_numbers
from modalities.encoder.config import Options
from modalities.loading import first_heldout
from modalities.vision import HEADLINE, RECIPES_MODULE
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
    names = class_names(data.source)
    if data.target == "marked+map":
        names = ("background", *names) if names else ()
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
        map_loss = MAP_WEIGHT * _counted(patches.flatten(0, 1), patch_targets.flatten())[0]
        logits = logits[:, 0]
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets), {}
    value, metrics = _counted(logits, targets)
    return value + map_loss.to(value.device), metrics


def _counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy and accuracies of the targets that are not −1."""
    counted = targets >= 0
    logits = logits[counted]
    targets = targets[counted]
    with torch.no_grad():
        best = logits.topk(min(5, logits.shape[-1])).indices
        hits = best == targets[:, None]
        metrics = {
            "top1": hits[:, 0].float().mean(),
            "top5": hits.any(dim=1).float().mean(),
        }
    return F.cross_entropy(logits, targets), metrics


def weight(batch: dict[str, Tensor]) -> tuple[float, int]:
    """Every image counts 1; places of held-out batches that do not count have target −1."""
    targets = batch["targets"]
    count = len(targets) if targets.is_floating_point() else int((targets >= 0).sum())
    return float(count), count


def cost(model: VisionTransformer, data: VisionDataConfig, width: int) -> Cost:
    """One image of T tokens. FLOPs: 6 a matrix parameter and token (the classifier's once), 12·C a
    (query, key) pair and layer: attention's two products are 4·C forward and 8·C backward, all T²
    pairs are visible. Of several training shapes FLOPs are their mean, and activations those of the
    largest.
    """
    config = model.config
    patch = config.patch_size
    shapes = data.train_shapes if data.shapes else [config.train_size]
    tokens = [(high // patch) * (wide // patch) + model.num_prefix_tokens for high, wide in shapes]
    mean_tokens = sum(tokens) / len(tokens)
    mean_pairs = sum(count**2 for count in tokens) / len(tokens)
    other = ("prefix_tokens", "position_embedding", "head")
    matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and not name.startswith(other):
            matrices += parameter.numel()
    flops = 6.0 * (matrices * mean_tokens + config.dim * config.num_classes)
    flops += 12.0 * config.dim * mean_pairs * config.num_layers
    numbers = activation_numbers(
        config.num_layers,
        config.dim,
        4 * config.hidden_dim,
        config.activation_checkpointing,
        width,
    )
    return Cost(1, flops, max(tokens) * width * numbers)


MODALITY = Modality(
    name="vision",
    unit="images",
    model=VisionTransformer,
    config=VisionDataConfig,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_heldout),
    loss=loss,
    weight=weight,
    cost=cost,
    evaluators=Evaluators("modalities.vision.evaluators"),
    outside={"timm": OUTSIDE},
    metrics=("top1", "top5"),
    headline=HEADLINE,
    recipes=RECIPES_MODULE,
    task="image-classification",
)
