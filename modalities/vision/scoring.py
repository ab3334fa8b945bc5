"""Scores of a classifier beside top-1: balanced accuracy, calibration error, area under the ROC curve."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["auc", "class_scores", "expected_calibration_error"]

BINS = 15  # of confidence, of one width


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

    Each class that occurs and is not all weighs the same, in scores (N, C); NaN where there is none, or a score is NaN.
    """
    if np.isnan(scores).any():
        return math.nan
    areas = []
    for label in range(scores.shape[1]):
        inside = labels == label
        many, rest = int(inside.sum()), int((~inside).sum())
        if many and rest:
            _, place, count = np.unique(scores[:, label], return_inverse=True, return_counts=True)
            ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share their mean rank
            areas.append((ranks[inside].sum() - many * (many + 1) / 2) / (many * rest))
    return float(np.mean(areas)) if areas else math.nan
