"""What evaluators share: settings, cells to rows, means over seeds, paired differences, figures, memory."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from modalities import cost
from modalities.evaluation import (
    Axis,
    Cell,
    Evaluator,
    LengthSettings,
    ModelResult,
    Settings,
    counts,
    find_evaluators,
    option,
    standard_error,
)
from modalities.figures import curves, finish, panels, scores_figure
from modalities.paired import Observed, paired_rows, scores_by_unit, t_quantile
from modalities.results import Score, SeedMean, compact, mean_of_seeds, unconverged
from zoo.errors import ran_out_of_memory


@dataclass(frozen=True)
class HueSettings(Settings):
    strength: float = option(0.5, "of the colour")


class Hues(Evaluator[HueSettings]):
    """The least that an evaluator defines."""

    name, summary, scores = "hues", "mean hue", ()
    axis = Axis("hue", "hue")

    def cells(self, model):
        return [Cell(f"{hue}/{n}", 1, {"hue": hue, "n": n}) for hue in (30, 10) for n in range(2)]

    def measure(self, model, cell):
        hue, n = cell.data["hue"], cell.data["n"]
        return {"hue": hue, "value": hue + n, "list": [n, hue], "kind": "same", "label": f"{hue}"}


def test_settings_refuse_nonsense():
    for name, wrong in {"lengths": (1,), "samples": 0, "batch_tokens": 0}.items():
        with pytest.raises(ValueError, match=name):
            LengthSettings(**{name: wrong})
    with pytest.raises(ValueError, match="lengths"):
        LengthSettings(lengths=())
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        LengthSettings(seed=-1)
    assert LengthSettings(lengths=(64, 16, 64)).lengths == (16, 64)
    assert LengthSettings().resolved_lengths(128) == (128, 256, 512, 1024, 2048, 4096)
    assert Settings(batch_tokens=100).batch_size(30) == 3 and Settings(batch_tokens=10).batch_size(30) == 1


def test_counts_read_powers_of_two():
    assert counts("128,512,4k") == (128, 512, 4096) and counts("1M, 2") == (2**20, 2)
    for wrong in ("1x", "k", "-3", "1.5k"):
        with pytest.raises(ValueError, match=wrong):
            counts(wrong)
    ticks = {128: "128", 1008: "1008", 1024: "1k", 1536: "1.5k", 2**20 - 1024: "1023k", 2**20: "1M"}
    assert {n: compact(n) for n in ticks} == ticks


def test_rows_are_means_along_the_axis_and_finished_cells_are_passed_on():
    evaluator = Hues()
    cells = dict(evaluator.run(None, {"30/0": {"hue": 30, "value": 99, "list": [0, 0], "kind": "same", "label": "x"}}))
    assert list(cells) == ["30/0", "30/1", "10/0", "10/1"] and evaluator.points(None) == (30, 10)
    assert evaluator.rows(cells) == [
        {"hue": 10, "value": 10.5, "list": [0.5, 10], "kind": "same", "label": "10"},
        {"hue": 30, "value": 65.0, "list": [0.5, 15], "kind": "same", "label": None},
    ]


def test_a_cells_key_holds_every_setting_but_source_and_batch():
    evaluator = Hues(HueSettings(strength=0.25, source="x", batch_tokens=1, samples=3))
    assert evaluator.identity(None) == {"strength": 0.25, "samples": 3}


def seed(label, group="g", trained_at=16, **columns):
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return ModelResult(label, trained_at, rows, method="ggd", group=group, seconds=1.0)


def test_seeds_of_a_group_become_their_mean_in_the_place_of_the_first():
    one = seed("a", size=[1, 2], top1=[0.0, 0.5], parts=[[0.0, 1.0], [1.0, 1.0]], note=["x", "y"])
    two = seed("b", size=[2, 3], top1=[1.0, 0.7], parts=[[0.0, 1.0], [1.0, 1.0]], note=["z", "y"])
    alone = seed("c", group="", size=[1], top1=[0.1])
    mean, other = mean_of_seeds([one, alone, two], "size")
    assert isinstance(mean, SeedMean) and other is alone and (mean.label, mean.seeds, mean.seconds) == ("g", 2, 2.0)
    assert mean.rows == [{"size": 2, "top1": 0.75, "parts": [0.5, 1.0], "note": None}]  # what both have
    assert (mean.low[0]["top1"], mean.high[0]["top1"]) == (0.5, 1.0)
    assert mean.deviation[0]["top1"] == pytest.approx(math.sqrt(0.125))


def test_a_number_that_is_none_in_one_seed_is_none_in_the_mean():
    nan, infinite = (
        mean_of_seeds([seed("a", size=[1], x=[1.0]), seed("b", size=[1], x=[x])], "size")[0]
        for x in (math.nan, math.inf)
    )
    for rows in (nan.rows, nan.low, nan.high, nan.deviation, infinite.deviation):
        assert math.isnan(rows[0]["x"])
    assert infinite.rows[0]["x"] == math.inf and infinite.low[0]["x"] == 1.0


def test_a_score_that_an_older_result_lacks_is_the_mean_of_the_others():
    old, new = seed("a", size=[1], x=[1.0]), seed("b", size=[1], x=[3.0], y=[5.0])
    for members in ([old, new], [new, old]):
        mean = mean_of_seeds(members, "size")[0]
        assert (mean.rows[0]["x"], mean.rows[0]["y"]) == (2.0, 5.0)
        assert (mean.low[0]["y"], mean.high[0]["y"]) == (5.0, 5.0) and math.isnan(mean.deviation[0]["y"])


def test_only_seeds_of_one_set_up_are_averaged():
    results = [seed("run (a)", group="", size=[16], top1=[top1]) for top1 in (0.2, 0.4)]
    assert [result.rows[0]["top1"] for result in mean_of_seeds(results, "size")] == [0.2, 0.4]
    with pytest.raises(ValueError, match=r"\ba, b\b"):
        mean_of_seeds([seed("a", size=[1]), seed("b", trained_at=32, size=[1])], "size")


def test_students_t_and_the_standard_error_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 12: 2.1788, 30: 2.0423, 99: 1.9842, 5000: 1.9604}
    assert {n: round(t_quantile(0.95, n), 4) for n in table} == table
    assert t_quantile(0.5, 1) == pytest.approx(1.0)  # a quarter of a Cauchy distribution is above 1
    assert standard_error(np.array([1.0, 3.0])) == pytest.approx(1.0) and math.isnan(standard_error(np.array([1.0])))


def test_a_unit_is_the_weighted_mean_of_its_parts():
    parts = [Observed(1, "a", "x", 3.0, 1.0), Observed(1, "a", "x", 1.0, 3.0), Observed(1, "b", "x", 0.0, 0.0)]
    assert scores_by_unit([*parts, Observed(2, "a", "x", 5.0)]) == {(1, "x"): {"a": 1.0}, (2, "x"): {"a": 5.0}}


def test_a_paired_difference_is_of_seed_means_over_shared_units():
    def table(**scores):
        return {(16, "x"): scores, (32, "x"): {"a": 1.0, "b": 1.0}}

    mine = [table(a=1.0, b=2.0, c=4.0, d=9.0), table(a=3.0, b=2.0, c=6.0)]
    row, equal = paired_rows(mine, [table(a=1.0, b=1.0, c=1.0, e=7.0)], "length")
    gaps = np.array([1.0, 1.0, 4.0])  # of a, b and c, which all have
    half = 4.3027 * gaps.std(ddof=1) / math.sqrt(3)
    assert (row["length"], row["score"], row["units"]) == (16, "x", 3)
    assert (row["value"], row["against_value"], row["difference"]) == (3.0, 1.0, 2.0)
    assert (row["low"], row["high"]) == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert (
        row["lower_in"] == 0.0
        and paired_rows([table(a=0.0, b=1.0, c=4.0)], [table(a=1.0, b=2.0, c=1.0)])[0]["lower_in"] == 2 / 3
    )
    assert (row["seeds"], row["against_seeds"]) == (2, 1) and math.isnan(row["against_seed_deviation"])
    assert row["seed_deviation"] == pytest.approx(np.std([7 / 3, 11 / 3], ddof=1))
    assert equal["difference"] == 0 and math.isnan(equal["low"])  # nothing varies, nothing is known of other units
    assert paired_rows(mine, [{(16, "x"): {"z": 1.0}}]) == []


def test_pooled_units_weigh_as_much_as_they_hold():
    """Stratum A: units of 1 and 9 bases; B: of 2 and 2. A's ratios are 0.3 (mine) and 0.5, B's 1 and 1."""

    def side(*bits):
        weights, strata = (1.0, 9.0, 2.0, 2.0), "AABB"
        seen = zip("abcd", bits, weights, strata, strict=True)
        return scores_by_unit(Observed("p", unit, "x", total, weight, name) for unit, total, weight, name in seen)

    mine, theirs = side(2.0, 1.0, 1.0, 3.0), side(1.0, 4.0, 2.0, 2.0)
    (row,) = paired_rows([mine], [theirs])
    assert (row["units"], row["value"], row["against_value"]) == (4, pytest.approx(0.65), pytest.approx(0.75))
    assert row["difference"] == pytest.approx(-0.1)  # units weighed equally: +0.22
    # Residuals over the mean weight, mine less theirs: A ((1.7 − 0.5) / 5, its negative), B ((−1 − 0) / 2, its negative).
    variances = [2 * 0.24**2, 2 * 0.5**2]
    half = 4.3027 * math.sqrt(sum(s2 / 2 for s2 in variances)) / 2
    assert (row["low"], row["high"]) == pytest.approx((-0.1 - half, -0.1 + half), abs=1e-4)
    assert row["lower_in"] == 0.5
    (same,) = paired_rows([mine, mine], [mine])
    assert same["difference"] == 0 and math.isnan(same["low"]) and same["seed_deviation"] == 0
    (alone,) = paired_rows([{("p", "x"): {"a": mine["p", "x"]["a"]}}], [theirs])
    assert alone["difference"] == 1.0 and math.isnan(alone["low"])


def test_an_evaluator_compares_groups_with_a_label():
    class Paired(Hues):
        paired_over = "numbers"

        def observed(self, name, cell):
            return [Observed(cell["hue"], name, "value", cell["value"])]

    def result(label, shift, group=""):
        cells = {str(n): {"hue": 10, "value": n * (1 + shift)} for n in range(3)}
        return ModelResult(label, 1, [], cells=cells, group=group)

    results = [result("a", 1, "a"), result("b", 0), result("a-s1", 2, "a")]
    (row,) = Paired().paired(results, "b")
    assert (row["model"], row["against"], row["hue"], row["units"], row["seeds"]) == ("a", "b", 10, 3, 2)
    assert row["difference"] == pytest.approx(1.5)
    assert Paired().paired(results, "a-s1")[0]["difference"] == pytest.approx(-1.5)  # its seeds are one model
    for few, against in ((results, "c"), (results[::2], "a")):
        with pytest.raises(ValueError, match=f"'{against}'"):
            Paired().paired(few, against)
    assert not Hues().observed("10/0", {})


def test_a_folder_of_evaluators_is_found_by_itself(tmp_path, monkeypatch):
    source = "from tests.test_evaluation import Hues\n\nclass Own(Hues):\n    name = {name!r}\n"
    package = tmp_path / "found_evaluators"
    package.mkdir()
    (package / "__init__.py").touch()
    for module, name in {"b": "second", "a": "first"}.items():
        (package / f"{module}.py").write_text(source.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    assert list(find_evaluators("found_evaluators")) == ["first", "second"]  # and not Hues, which they import
    (package / "c.py").write_text(source.format(name="first"))
    with pytest.raises(ValueError, match="'first'"):
        find_evaluators("found_evaluators")
    for module in [name for name in sys.modules if name.startswith("found_evaluators")]:
        del sys.modules[module]


# ------------------------------------------------------------------------------------------------ figures

BITS = Score("bits", within=0.05)
EXACT = Score("exact", unit_interval=True, within=0.2)


def model(label, *, at=128, **values):
    rows = [{"length": n} | {name: value[k] for name, value in values.items()} for k, n in enumerate((128, 512))]
    return ModelResult(label, at, rows)


@pytest.mark.parametrize(
    ("score", "values", "late"),
    [
        (BITS, {"a": 2.0, "b": 2.09, "c": 2.11}, ["c"]),
        (EXACT, {"a": 0.9, "b": 0.7, "c": 0.69}, ["c"]),
        (BITS, {"a": math.nan, "b": 2.0}, ["a"]),
        (BITS, {"a": math.nan}, []),
        (Score("bits"), {"a": 2.0, "b": 9.0}, []),
    ],
)
def test_what_is_far_from_the_best_where_it_was_trained_has_not_converged(score, values, late):
    results = [model(label, **{score.column: (value, 5.0)}) for label, value in values.items()]
    assert [result.label for result in unconverged(results, score, "length")] == late


def test_models_are_judged_where_they_were_trained_alone():
    results = [model("a", bits=(2.0, 1.0)), model("b", at=512, bits=(9.0, 1.8)), model("c", at=512, bits=(9.0, 2.0))]
    results += [model("unmeasured", at=256, bits=(9.0, 9.0))]
    assert [result.label for result in unconverged(results, BITS, "length")] == ["c"]


def test_a_curve_ends_where_training_did_not_converge():
    _, (axis,) = panels(1, 1, width=4, height=3)
    cut = curves(axis, [model("a", bits=(2.0, 2.0)), model("b", bits=(3.0, 3.0))], BITS)
    drawn = {line.get_label(): list(line.get_xdata()) for line in axis.lines}
    assert drawn["a"] == [128, 512] and drawn["b"] == [128] and cut == ["b"]


def test_at_a_single_place_models_stand_side_by_side_with_bars():
    _, (axis,) = panels(1, 1, width=3, height=3)
    row = {"length": 16, "bits": 2.0, "bits_standard_error": 0.1}
    curves(axis, [ModelResult(name, 16, [row], method=name) for name in ("goat", "rope")], BITS)
    drawn = {line.get_label(): line.get_xdata()[0] for line in axis.lines}
    assert drawn["goat"] < 16 < drawn["rope"] and drawn["goat"] * drawn["rope"] == pytest.approx(256)
    bars = [bar.get_segments()[0] for bar in axis.collections if hasattr(bar, "get_segments")]
    assert np.allclose(bars, [[(drawn[name], 1.9), (drawn[name], 2.1)] for name in ("goat", "rope")])


@pytest.mark.parametrize(
    ("spread", "group", "bare", "bands"),
    [
        (0.1, "", (), 2),
        (0.1, "", ("rope",), 1),
        (0.1, "g", (), 2),
        (0.1, "g", ("rope",), 1),
        (math.nan, "", (), 0),
        (None, "g", (), 1),
    ],
)
def test_a_legend_names_the_dashed_band_where_there_is_one(spread, group, bare, bands, tmp_path):
    error = {} if spread is None else {"x_standard_error": spread}
    rows = [{"length": length, "x": 2.0} | error for length in (16, 32)]
    results = [ModelResult(f"goat-{n}", 16, rows, method="goat", group=group) for n in (0, 1)]
    results = mean_of_seeds([*results[: 2 if group else 1], ModelResult("rope", 16, rows, method="rope")], "length")
    figure, axes = panels(1, 1, width=6, height=3)
    curves(axes[0], results, Score("x"), bare=bare)
    assert len(axes[0].collections) == bands
    finish(figure, axes, results, tmp_path / "x.png")
    dashed = spread == 0.1 and not (group and bare)  # two seeds have a band of another kind
    assert ("standard error" in figure.legends[0].get_title().get_text()) == dashed


def test_panels_have_titles_levels_and_positions(tmp_path):
    rows = [{"length": n, "x": 2.0, "half": 0.5} for n in (128, 256)]
    rows[1] |= {"by_place": [1.0, 2.0, 3.0], "position_to": [1, 128, 256], "tokens": 2**20}
    scores = (Score("x", title="An x", level=1.5), Score("half", level="x"), Score("by_place", by_position=True))
    drawn = []
    original = pyplot.subplots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "subplots", lambda *a, **k: drawn.append(original(*a, **k)) or drawn[-1])
        scores_figure([ModelResult("a", 128, rows)], tmp_path / "x.png", scores)
    first, second, third = drawn[0][1].flat
    assert first.get_title() == "An x" and 1.5 in first.lines[1].get_ydata()
    assert list(second.lines[1].get_ydata()) == [2.0, 2.0]
    assert list(third.lines[0].get_ydata()) == [1.0, 2.0, 3.0] and (tmp_path / "x.png").exists()


# ------------------------------------------------------------------------------------------------ memory


def test_memory_is_the_least_of_its_limits(tmp_path, monkeypatch):
    group = tmp_path / "memory.max"
    monkeypatch.setattr(cost, "_GROUP_LIMIT", str(group))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, memory in (("max", machine), (f"{machine // 2}", machine // 2)):
        group.write_text(f"{limit}\n")
        assert cost.device_memory("cpu") == memory
    monkeypatch.setattr(resource, "getrlimit", lambda which: (machine // 4, machine))
    assert cost.device_memory("cpu") == machine // 4


def test_errors_of_allocators_are_known():
    for ask in (lambda: torch.empty(1 << 45), lambda: np.empty(1 << 50)):
        with pytest.raises((RuntimeError, MemoryError)) as error:
            ask()
        assert ran_out_of_memory(error.value)
    assert not ran_out_of_memory(RuntimeError("shapes differ")) and not ran_out_of_memory(ValueError("bad_alloc"))
