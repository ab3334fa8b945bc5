"""What the training loop needs of vision models: building, loss, weight and cost of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.contract import Cost
from modalities.vision.config import VisionDataConfig
from modalities.vision.model import VisionTransformer
from modalities.vision.objects import at_patches
from modalities.vision.sources import class_names
from zoo.model import ZooModel
from zoo.registry import create_model

__all__ = ["build", "cost", "example", "loss", "weight"]

MAP_WEIGHT = 4.0  # of a map's loss beside a picture's: most patches are background, soon known


def build(name: str, options: Mapping[str, Any], data: VisionDataConfig) -> ZooModel:
    """A registered model at the data's image size, classes and normalisation, with the names of classes where known."""
    given: dict[str, Any] = {
        "img_size": data.image_size,
        "num_classes": data.num_classes,
        "mean": data.mean,
        "std": data.std,
    }
    model = create_model(name, **given | dict(options))
    names = class_names(data.source)
    if data.target == "count+map":  # a class is a count to the class token, a category to a patch
        names = ()
    elif "map" in data.target:
        names = ("background", *names) if names else ()
    elif data.target == "count":
        names = tuple(map(str, range(data.num_classes)))
    model.class_names = names if len(names) == model.config.num_classes else ()
    return model


def loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy to labels or soft targets, in nats; top-1 and top-5 accuracy where there are labels.

    Of a map the mean is over the patches, each asked for the pixel in its middle. Of "…+map" the class token answers for the
    picture, and the loss is its own + MAP_WEIGHT · the map's; the accuracies are of the class token.

    Raises ValueError for a map where the model gives no logits of tokens, or for "…+map" has no class token.
    """
    logits, targets, extra = model(batch["images"]).float(), batch["targets"], torch.zeros(())
    if targets.ndim == 3 or "maps" in batch:
        patches, prefix = _of_patches(model, logits)
        if "maps" in batch:
            if not prefix:
                raise ValueError(
                    "target='…+map': the class token answers for the picture; set model.options.class_token=true"
                )
            here = at_patches(batch["maps"], patches.shape[1])
            extra = MAP_WEIGHT * _counted(patches.flatten(0, 1), here.flatten())[0]
            logits = logits[:, 0]
        else:
            logits, targets = patches.flatten(0, 1), at_patches(targets, patches.shape[1]).flatten()
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets), {}
    own, metrics = _counted(logits, targets)
    return own + extra.to(own.device), metrics


def _of_patches(model: Any, logits: Tensor) -> tuple[Tensor, int]:
    """Logits of the patches alone, and how many tokens are before them."""
    if logits.ndim != 3:
        raise ValueError("a map needs logits of every token: set model.options.global_pool=''")
    prefix = model.num_prefix_tokens
    return logits[:, prefix:], prefix


def _counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy and accuracies of the targets that are not −1."""
    counted = targets >= 0
    logits, targets = logits[counted], targets[counted]
    with torch.no_grad():
        ranked = logits.topk(min(5, logits.shape[-1])).indices == targets[:, None]
        metrics = {"top1": ranked[:, 0].float().mean(), "top5": ranked.any(dim=1).float().mean()}
    return F.cross_entropy(logits, targets), metrics


def weight(batch: dict[str, Tensor]) -> tuple[float, int]:
    """Every image counts 1, also one with a map; places of held-out batches that do not count have target −1."""
    targets = batch["targets"]
    if targets.ndim == 3:
        targets = targets.flatten(1).amax(1)
    count = len(targets) if targets.is_floating_point() else int((targets >= 0).sum())
    return float(count), count


def example(model: VisionTransformer, data: VisionDataConfig, images: int) -> dict[str, Tensor]:
    """A random batch of the largest training shape, with a label, a map or both, as `data.target` says."""
    shape = max(data.train_shapes, key=lambda sides: sides[0] * sides[1])
    labels, maps = (torch.randint(model.config.num_classes, size) for size in ((images,), (images, *shape)))
    batch = {"images": torch.randn(images, 3, *shape), "targets": maps if data.target == "map" else labels}
    return batch | ({"maps": maps} if data.target.endswith("+map") else {})


def cost(model: VisionTransformer, data: VisionDataConfig, width: int) -> Cost:
    """One image of T tokens. FLOPs: 6 a matrix parameter and token (the classifier's once), 12·C a (query, key) pair and layer.

    (Attention's two products are 4·C forward and 8·C backward a pair; all T² pairs are visible.) Activations, in numbers of
    `width` bytes a token and layer: 10·C + 4·hidden (norms, q, k, v, output, residuals, MLP), or 2·C where blocks are
    recomputed. Of several training shapes FLOPs are their mean, and activations those of the largest.
    """
    config = model.config
    patch = config.patch_size
    grids = (
        [(height // patch, width // patch) for height, width in data.train_shapes]
        if data.shapes
        else [config.train_grid]
    )
    counts = [rows * columns + model.num_prefix_tokens for rows, columns in grids]
    kept = ("prefix_tokens", "position_embedding", "head")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and not name.startswith(kept))
    flops = 6.0 * (matrices * (sum(counts) / len(counts)) + config.dim * config.num_classes)
    flops += 12.0 * config.dim * (sum(tokens**2 for tokens in counts) / len(counts)) * config.num_layers
    per_layer = 2 * config.dim if config.activation_checkpointing else 10 * config.dim + 4 * config.hidden_dim
    return Cost(1, flops, max(counts) * width * config.num_layers * per_layer)
