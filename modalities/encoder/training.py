"""Training classifiers of grids: the loss, what a batch weighs, and what a sample costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from modalities.contract import Cost
from modalities.cost import activation_numbers
from modalities.encoder.batches import BatchSettings, GridBatches
from modalities.encoder.config import Shape
from modalities.encoder.model import GridTransformer

# What `classification_loss` measures besides.
METRICS = ("top1", "top5")


def classification_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy of logits (N, classes), in nats, and METRICS: how often the label is the
    first answer, and how often it is among the first five.

    targets: labels int64 (N,), of which −1 does not count; or soft targets (N, classes), for which
    there are no metrics.
    """
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets), {}
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


def loss(
    model: Callable[..., Tensor], batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """`classification_loss` of a batch of `GridBatches` whose grids have the default name."""
    return classification_loss(model(batch[GridBatches.inputs]).float(), batch["targets"])


def weight(batch: dict[str, Tensor]) -> tuple[float, int]:
    """(sum of weights, targets) of a batch: every sample counts 1; places of held-out batches that
    do not count have target −1."""
    targets = batch["targets"]
    count = len(targets) if targets.is_floating_point() else int((targets >= 0).sum())
    return float(count), count


def cost(model: GridTransformer, data: BatchSettings, number_bytes: int) -> Cost:
    """One sample at the data's training shapes; number_bytes: bytes of a number."""
    return cost_at(model, data.train_shapes, number_bytes)


def cost_at(model: GridTransformer, shapes: Sequence[Shape], number_bytes: int) -> Cost:
    """One sample of T tokens. FLOPs: 6 a matrix parameter and token (the classifier's once), 12·C a
    (query, key) pair and layer: attention's two products are 4·C forward and 8·C backward, all T²
    pairs are visible. Of several training shapes (height, width) FLOPs are their mean, and
    activations those of the largest. number_bytes: bytes of a number.
    """
    config = model.config
    patch = config.patch_size
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
        number_bytes,
    )
    return Cost(1, flops, max(tokens) * number_bytes * numbers)
