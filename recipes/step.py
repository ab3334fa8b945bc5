"""One step of the optimiser: what the training loop repeats and `--calibrate` times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from modalities.contract import Batch, Modality
from modalities.loading import to_device

if TYPE_CHECKING:
    from recipes.engine import Engine

__all__ = ["Step", "TrainingFailure", "take_step"]


class TrainingFailure(RuntimeError):
    """The loss or the gradient is not a finite number."""


class Step(NamedTuple):
    """What a step was, the same on every rank.

    loss: mean over the targets of the whole batch. norm: of the gradient, before clipping. lr: of the first parameter group.
    targets: how many the batch has. stop: whether a rank has a signal.
    """

    loss: float
    norm: float | None
    lr: float
    targets: float
    stop: bool


def take_step(
    engine: Engine, modality: Modality, batches: Iterator[Batch], number: int, signals: Sequence[int] = ()
) -> Step:
    """Step `number`, from 1, on the next micro-batches of this rank. Every rank must call.

    Raises:
        TrainingFailure: for the first loss or gradient that is not a number, before it reaches a checkpoint.
    """
    ranks, settings = engine.ranks, engine.plan.recipe.train
    # A seed per step and rank, so that dropout resumes exactly with no stored random state.
    torch.manual_seed((settings.seed * 1_000_003 + number - 1) * ranks.world + ranks.rank)
    accumulation = settings.accumulation or 1
    micro = [next(batches) for _ in range(accumulation)]
    # Micro-batches differ in what their targets weigh. Weighting each by its share of all makes the loss, and so
    # the gradient, the mean over the whole batch's targets, however the batch is cut.
    weights, counts = zip(*(modality.weight(batch) for batch in micro), strict=True)
    micro = [to_device(batch, ranks.device) for batch in micro]
    total, count = engine.sum(sum(weights) / ranks.shared, sum(counts) / ranks.shared)
    summed = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for batch, weight in zip(micro, weights, strict=True):
        loss, _ = modality.loss(engine, batch)
        engine.backward(loss * (weight / total * ranks.world * accumulation))
        summed += loss.detach().double() * weight
        if batch is micro[-1]:
            mean, stop = engine.sum(summed / total, float(signals[0] if signals else 0))
            _check_finite("loss", mean, number)
        lr = engine.lr
        norm = engine.step()
    _check_finite("gradient norm", norm, number)
    return Step(mean, norm, lr, count, bool(stop))


def _check_finite(what: str, value: float | None, number: int) -> None:
    if value is not None and not math.isfinite(value):
        raise TrainingFailure(f"{what} is {value} at step {number}")
