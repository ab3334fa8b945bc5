"""Which models have not converged in context, and how figures and tables say so."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.evaluation import LENGTH, ModelResult
from modalities.figures import curves, panels
from modalities.results import Score, unconverged

BITS = Score("bits", within=0.05)
EXACT = Score("exact", unit_interval=True, within=0.2)


def model(label: str, *, at: int = 128, **values: tuple[float, ...]) -> ModelResult:
    rows = [{"length": n} | {name: value[k] for name, value in values.items()} for k, n in enumerate((128, 512))]
    return ModelResult(label, at, rows)


@pytest.mark.parametrize(
    ("score", "values", "late"),
    [
        (BITS, {"a": 2.0, "b": 2.09, "c": 2.11}, ["c"]),
        (EXACT, {"a": 0.9, "b": 0.7, "c": 0.69}, ["c"]),
        (BITS, {"a": float("nan"), "b": 2.0}, ["a"]),
        (BITS, {"a": float("nan")}, []),
        (Score("bits"), {"a": 2.0, "b": 9.0}, []),
    ],
)
def test_what_is_far_from_the_best_where_it_was_trained_has_not_converged(score, values, late):
    results = [model(label, **{score.column: (value, 5.0)}) for label, value in values.items()]
    assert [result.label for result in unconverged(results, score, "length")] == late


def test_a_model_that_was_not_measured_where_it_was_trained_is_not_judged():
    results = [model("a", bits=(2.0, 2.0)), model("b", at=256, bits=(9.0, 9.0))]
    assert unconverged(results, BITS, "length") == []


def test_models_are_compared_where_they_were_trained_and_not_across():
    results = [
        model("a", at=128, bits=(2.0, 1.0)),
        model("b", at=512, bits=(9.0, 1.8)),
        model("c", at=512, bits=(9.0, 2.0)),
    ]
    assert [result.label for result in unconverged(results, BITS, "length")] == ["c"]


def test_a_curve_ends_where_training_did_not_converge():
    _, (axis,) = panels(1, 1, width=4, height=3)
    curves(axis, [model("a", bits=(2.0, 2.0)), model("b", bits=(3.0, 3.0))], BITS, LENGTH)
    drawn = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
    assert drawn["a"] == [128, 512] and drawn["b"] == [128]


def test_at_a_single_place_models_stand_side_by_side_with_bars():
    _, (axis,) = panels(1, 1, width=3, height=3)
    row = {"length": 16, "bits": 2.0, "bits_standard_error": 0.1}
    curves(axis, [ModelResult(name, 16, [row], method=name) for name in ("goat", "rope")], BITS, LENGTH)
    drawn = {line.get_label(): line.get_xdata()[0] for line in axis.lines}
    assert drawn["goat"] < 16 < drawn["rope"] and drawn["goat"] * drawn["rope"] == pytest.approx(256)
    bars = [bar.get_segments()[0] for bar in axis.collections if hasattr(bar, "get_segments")]
    assert np.allclose(bars, [[(drawn[name], 1.9), (drawn[name], 2.1)] for name in ("goat", "rope")])
