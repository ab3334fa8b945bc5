"""What evaluators share: settings, cells to rows, means over seeds, paired differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from modalities.evaluation import Cell, Evaluator
from modalities.paired import Observed, paired_rows, scores_by_unit
from modalities.results import Axis, ModelResult, SeedMean, compact, mean_of_seeds
from modalities.settings import LengthSettings, Settings, counts, option
from modalities.statistics import standard_error, t_quantile
from tests.refusals import refuses


@dataclass(frozen=True)
class HueSettings(Settings):
    strength: float = option(0.5, "of the colour")


class Hues(Evaluator[HueSettings]):
    """The least that an evaluator defines."""

    name = "hues"
    summary = "mean hue"
    scores = ()
    axis = Axis("hue", "hue")

    def cells(self, model):
        return [Cell(f"{hue}/{n}", 1, {"hue": hue, "n": n}) for hue in (30, 10) for n in range(2)]

    def measure(self, model, cell):
        hue = cell.data["hue"]
        n = cell.data["n"]
        return {"hue": hue, "value": hue + n, "list": [n, hue], "kind": "same", "label": f"{hue}"}


def test_settings():
    for name, wrong in {"lengths": (1,), "samples": 0, "batch_tokens": 0, "seed": -1}.items():
        refuses(name, LengthSettings, **{name: wrong})
    assert LengthSettings(lengths=(64, 16, 64)).lengths == (16, 64)
    assert LengthSettings().resolved_lengths(128) == (128, 256, 512, 1024, 2048, 4096)
    assert counts("128,512,4k") == (128, 512, 4096)
    assert counts("1M, 2") == (2**20, 2)
    for wrong in ("1x", "k", "-3", "1.5k"):
        refuses(wrong, counts, wrong)
    ticks = {128: "128", 1008: "1008", 1024: "1k", 1536: "1.5k", 2**20 - 1024: "1023k", 2**20: "1M"}
    assert {n: compact(n) for n in ticks} == ticks


def test_rows_are_means():
    """Rows are means along the axis."""
    evaluator = Hues()
    finished = {"30/0": {"hue": 30, "value": 99, "list": [0, 0], "kind": "same", "label": "x"}}
    cells = dict(evaluator.run(None, finished))
    assert list(cells) == ["30/0", "30/1", "10/0", "10/1"]
    assert evaluator.points(None) == (30, 10)
    assert evaluator.rows(cells) == [
        {"hue": 10, "value": 10.5, "list": [0.5, 10], "kind": "same", "label": "10"},
        {"hue": 30, "value": 65.0, "list": [0.5, 15], "kind": "same", "label": None},
    ]
    evaluator = Hues(HueSettings(strength=0.25, source="x", batch_tokens=1, samples=3))
    assert evaluator.identity(None) == {"strength": 0.25, "samples": 3, "source": "x"}
    assert Hues().identity(None) == {"strength": 0.5, "samples": None}


def seed(label, group="g", trained_at=16, **columns):
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return ModelResult(label, trained_at, rows, method="ggd", group=group, seconds=1.0)


def test_means_of_seeds():
    one = seed("a", size=[1, 2], top1=[0.0, 0.5], parts=[[0.0, 1.0], [1.0, 1.0]], note=["x", "y"])
    two = seed("b", size=[2, 3], top1=[1.0, 0.7], parts=[[0.0, 1.0], [1.0, 1.0]], note=["z", "y"])
    alone = seed("c", group="", size=[1], top1=[0.1])
    mean, other = mean_of_seeds([one, alone, two], "size")
    assert isinstance(mean, SeedMean)
    assert other is alone
    assert (mean.label, mean.seeds, mean.seconds) == ("g", 2, 2.0)
    assert mean.rows == [
        {"size": 2, "top1": 0.75, "parts": [0.5, 1.0], "note": None}
    ]  # what both have
    assert (mean.low[0]["top1"], mean.high[0]["top1"]) == (0.5, 1.0)
    assert mean.deviation[0]["top1"] == pytest.approx(math.sqrt(0.125))
    refuses(
        r"\ba, b\b",
        mean_of_seeds,
        [seed("a", size=[1]), seed("b", trained_at=32, size=[1])],
        "size",
    )


def test_means_of_missing_numbers():
    for x in (math.nan, math.inf):
        mean = mean_of_seeds([seed("a", size=[1], x=[1.0]), seed("b", size=[1], x=[x])], "size")[0]
        columns = [rows[0]["x"] for rows in (mean.rows, mean.high, mean.low, mean.deviation)]
        np.testing.assert_equal(columns, [x, x, math.nan if math.isnan(x) else 1.0, math.nan])
    # an older version had no y
    old = seed("a", size=[1], x=[1.0])
    new = seed("b", size=[1], x=[3.0], y=[5.0])
    mean = mean_of_seeds([old, new], "size")[0]
    assert (mean.rows[0]["x"], mean.rows[0]["y"], mean.low[0]["y"]) == (2.0, 5.0, 5.0)
    assert math.isnan(mean.deviation[0]["y"])


def test_students_t_and_standard_error():
    """Students t and the standard error."""
    table = {
        1: 12.7062,
        2: 4.3027,
        3: 3.1824,
        4: 2.7764,
        9: 2.2622,
        12: 2.1788,
        30: 2.0423,
        99: 1.9842,
        5000: 1.9604,
    }
    assert {n: round(t_quantile(0.95, n), 4) for n in table} == table
    assert t_quantile(0.5, 1) == pytest.approx(1.0)  # a quarter of a Cauchy distribution is above 1
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0)
    assert math.isnan(standard_error(np.array([1.0])))


def test_paired_differences():
    """Of means of seeds over the units that all have: here a, b and c."""

    def table(**scores):
        return {(16, "x"): scores, (32, "x"): {"a": 1.0, "b": 1.0}}

    ours = [table(a=1.0, b=2.0, c=4.0, d=9.0), table(a=3.0, b=2.0, c=6.0)]
    row, equal = paired_rows(ours, [table(a=1.0, b=1.0, c=1.0, e=7.0)], "length")
    half = 4.3027 * np.array([1.0, 1.0, 4.0]).std(ddof=1) / math.sqrt(3)
    assert (row["length"], row["score"], row["units"]) == (16, "x", 3)
    assert (row["value"], row["against_value"], row["difference"]) == (3.0, 1.0, 2.0)
    assert (row["low"], row["high"]) == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert row["lower_in"] == 0.0
    assert (row["seeds"], row["against_seeds"]) == (2, 1)
    assert row["seed_deviation"] == pytest.approx(np.std([7 / 3, 11 / 3], ddof=1))
    assert math.isnan(row["against_seed_deviation"])
    # Two seeds, 7/3 and 11/3: half of ± 12.7 standard errors of their mean.
    seed_half = 12.7062 * np.std([7 / 3, 11 / 3], ddof=1) / math.sqrt(2)
    assert row["seed_high"] - 2 == pytest.approx(seed_half, rel=1e-4)
    # nothing varies, nothing is known of other units
    assert equal["difference"] == 0
    assert math.isnan(equal["low"])
    assert paired_rows(ours, [{(16, "x"): {"z": 1.0}}]) == []
    parts = [
        Observed(1, "a", "x", 3.0, 1.0),
        Observed(1, "a", "x", 1.0, 3.0),
        Observed(1, "b", "x", 0.0, 0.0),
    ]
    assert scores_by_unit([*parts, Observed(2, "a", "x", 5.0)]) == {
        (1, "x"): {"a": 1.0},
        (2, "x"): {"a": 5.0},
    }


def test_interval_over_seeds_is_welchs():
    """Two seeds against three, whose variances differ: Welch's degrees of freedom, rounded down."""

    def seed(mean):
        return {("p", "x"): {"a": mean, "b": mean + 1}}

    ours = [seed(1.0), seed(2.0)]
    theirs = [seed(4.0), seed(4.5), seed(5.5)]
    (row,) = paired_rows(ours, theirs)
    errors = [0.5 / 2, np.var([4.0, 4.5, 5.5], ddof=1) / 3]
    degrees = sum(errors) ** 2 / (errors[0] ** 2 / 1 + errors[1] ** 2 / 2)
    half = t_quantile(0.95, int(degrees)) * math.sqrt(sum(errors))
    assert row["difference"] == pytest.approx(1.5 - 14 / 3)
    assert row["seed_high"] - row["seed_low"] == pytest.approx(2 * half)
    (single,) = paired_rows(ours[:1], theirs[:1])
    assert math.isnan(single["seed_low"])


def test_pooled_units_are_weighted():
    """Stratum A: units of 1 and 9 bases; B: of 2 and 2. A's ratios are 0.3 (ours) and 0.5, B's 1
    and 1."""

    def side(*bits):
        weights = (1.0, 9.0, 2.0, 2.0)
        strata = "AABB"
        seen = zip("abcd", bits, weights, strata, strict=True)
        return scores_by_unit(
            Observed("p", unit, "x", total, weight, name) for unit, total, weight, name in seen
        )

    ours, theirs = side(2.0, 1.0, 1.0, 3.0), side(1.0, 4.0, 2.0, 2.0)
    (row,) = paired_rows([ours], [theirs])
    assert (row["units"], row["value"], row["against_value"]) == (
        4,
        pytest.approx(0.65),
        pytest.approx(0.75),
    )
    assert row["difference"] == pytest.approx(-0.1)  # units weighed equally: +0.22
    # Residuals over the mean weight, ours less theirs: A ((1.7 − 0.5) / 5, its negative), B ((−1
    # − 0) / 2, its negative).
    half = 4.3027 * math.sqrt(0.24**2 + 0.5**2) / 2
    assert (row["low"], row["high"]) == (
        pytest.approx(-0.1 - half, abs=1e-4),
        pytest.approx(-0.1 + half, abs=1e-4),
    )
    assert row["lower_in"] == 0.5
    (same,) = paired_rows([ours, ours], [ours])
    assert same["difference"] == 0
    assert math.isnan(same["low"])
    assert same["seed_deviation"] == 0
    (alone,) = paired_rows([{("p", "x"): {"a": ours["p", "x"]["a"]}}], [theirs])
    assert alone["difference"] == 1.0
    assert math.isnan(alone["low"])


def test_groups_compared_with_label():
    """Groups are compared with a label."""

    class Paired(Hues):
        paired_over = "numbers"

        def observed(self, name, cell):
            return [Observed(cell["hue"], name, "value", cell["value"])]

    def result(label, shift, group=""):
        cells = {str(n): {"hue": 10, "value": n * (1 + shift)} for n in range(3)}
        return ModelResult(label, 1, [], cells=cells, group=group)

    results = [result("a", 1, "a"), result("b", 0), result("a-s1", 2, "a")]
    (row,) = Paired().paired(results, "b")
    assert (row["model"], row["against"], row["hue"], row["units"], row["seeds"]) == (
        "a",
        "b",
        10,
        3,
        2,
    )
    assert row["difference"] == pytest.approx(1.5)
    assert Paired().paired(results, "a-s1")[0]["difference"] == pytest.approx(
        -1.5
    )  # its seeds are one model
    refuses("'c'", Paired().paired, results, "c")
