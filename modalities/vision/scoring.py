"""Scores of a classifier beside top-1, and recalibration."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["auc", "calibrated", "class_scores", "expected_calibration_error"]

BINS = 15  # of confidence, of one width
RIDGE = 1e-3  # on the biases, whose likelihood has no maximum where a class is never mistaken


def class_scores(labels: np.ndarray, said: np.ndarray, confidence: np.ndarray, classes: int) -> dict[str, object]:
    """Balanced accuracy, calibration error and recalls of N answers `said` (N,) with their probabilities (N,).

    balanced_accuracy: the mean over classes, of those that occur, of recall: the share of a class that is called so.
    ece: as `expected_calibration_error`. per_class: recall by label, NaN for classes that do not occur.
    """
    there = np.bincount(labels, minlength=classes)
    right = np.bincount(labels[said == labels], minlength=classes)
    recall = np.where(there > 0, right / np.maximum(there, 1), math.nan)
    return {
        "balanced_accuracy": float(np.nanmean(recall)),
        "ece": expected_calibration_error(confidence, said == labels),
        "per_class": recall.tolist(),
    }


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Σ_b n_b/N · |share right − mean confidence| over BINS bins of confidence (Guo et al., arXiv 1706.04599)."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=right.astype(float) - confidence, minlength=BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: the mean over classes of P(score of one of the class > score of another), ties one half.

    One class against the rest, of scores (N, C), each class that occurs and is not all weighing the same; NaN where there is
    none, or a score is NaN. Of two classes it is the usual AUC.
    """
    if np.isnan(scores).any():
        return math.nan
    found = []
    for label in range(scores.shape[1]):
        inside = labels == label
        many, rest = int(inside.sum()), int((~inside).sum())
        if many and rest:
            _, place, count = np.unique(scores[:, label], return_inverse=True, return_counts=True)
            ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # the mean rank of equal ones
            found.append((ranks[inside].sum() - many * (many + 1) / 2) / (many * rest))
    return float(np.mean(found)) if found else math.nan


def calibrated(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """(1/T, b (C,)) with the least −ln softmax(logits/T + b) of labels, as bias-corrected temperature scaling has it.

    logits (N, C) and the result float64 (arXiv 1901.06852). The biases' mean is 0; RIDGE·Σb² is added to the mean loss.
    """
    logits = logits.double()
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([log_scale, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(logits * log_scale.exp() + bias, labels) + RIDGE * bias.square().sum()
        loss.backward()
        return loss

    with torch.inference_mode(False), torch.enable_grad():
        optimiser.step(closure)
    return float(log_scale.detach().exp()), (bias - bias.mean()).detach()
