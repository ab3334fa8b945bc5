"""Scores beside top-1 against their definitions, and what recalibration may and may not change."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from modalities.vision.scoring import BINS, RIDGE, auc, calibrated, class_scores, expected_calibration_error


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("steps", [4, 1000])  # few steps: many ties
def test_auc_is_the_share_of_pairs_in_order(classes, steps):
    rng = np.random.default_rng(classes)
    labels = rng.integers(classes, size=41)
    scores = rng.integers(steps, size=(41, classes)) / steps
    scores[np.arange(41), labels] += 0.3
    found = []
    for label in range(classes):
        pairs = itertools.product(scores[labels == label, label], scores[labels != label, label])
        found.append(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))
    assert auc(scores, labels) == pytest.approx(np.mean(found), abs=1e-12)
    assert auc(scores, labels) == pytest.approx(auc(3 * scores - 7, labels), abs=1e-12)  # of ranks alone


def test_auc_leaves_out_classes_that_tell_nothing():
    assert auc(np.array([[0.1, 0.9, 0.5], [0.8, 0.2, 0.5]]), np.array([1, 0])) == 1.0
    assert math.isnan(auc(np.ones((3, 2)), np.zeros(3, int)))
    assert math.isnan(auc(np.array([[math.nan, 1.0], [0.0, 1.0]]), np.array([0, 1])))


def test_scores_by_hand():
    labels, said = np.array([0, 0, 0, 0, 2, 2]), np.array([0, 0, 0, 1, 0, 2])
    found = class_scores(labels, said, np.array([0.9, 0.9, 0.6, 0.6, 1.0, 1.0]), 4)
    recalls = found["per_class"]
    assert recalls[0] == 0.75 and recalls[2] == 0.5 and math.isnan(recalls[1]) and math.isnan(recalls[3])
    assert found["balanced_accuracy"] == (0.75 + 0.5) / 2
    # Of 0.9 both are right, of 0.6 one in two, of 1.0 one in two; 0.6 = 9/15 and 0.9 fall into bins of their own.
    assert found["ece"] == pytest.approx((2 * 0.1 + 2 * 0.1 + 2 * 0.5) / 6)


def test_calibration_error_is_that_of_its_bins():
    rng = np.random.default_rng(0)
    confidence, right = rng.random(500), rng.random(500) < 0.4
    expected = 0.0
    for n in range(BINS):
        inside = (confidence > n / BINS) & (confidence <= (n + 1) / BINS)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert expected_calibration_error(confidence, right) == pytest.approx(expected)
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0.0


def test_recalibration_finds_the_temperature_and_the_shift_that_were_put_in():
    torch.manual_seed(0)
    true = 2 * torch.randn(4000, 3, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=true).sample()
    shift = torch.tensor([0.8, -0.3, -0.5], dtype=torch.float64)
    given = (true - shift) * 3.0
    scale, bias = calibrated(given, labels)
    assert scale == pytest.approx(1 / 3, rel=0.06) and torch.allclose(bias, shift, atol=0.12)
    assert abs(float(bias.sum())) < 1e-9

    def cost(scale, bias):
        return float(F.cross_entropy(given * scale + bias, labels) + RIDGE * bias.square().sum())

    for factor, change in ((1.02, 0.0), (0.98, 0.0), (1.0, 0.02)):  # a minimum
        assert cost(scale, bias) <= cost(scale * factor, bias + change * torch.tensor([1.0, -1.0, 0.0]))


def test_recalibration_has_an_end_where_the_classes_are_never_mistaken():
    labels = torch.arange(20) % 2
    scale, bias = calibrated(F.one_hot(labels, 2).double(), labels)
    assert math.isfinite(scale) and scale > 1 and bias.isfinite().all()
