"""Paired comparisons: two models unit by unit, where a unit is what a measurement's data varies by
(documents, prompts)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from modalities.results import Axis, Row

Place = Any  # on an evaluator's axis: a number or a name


class Observed(NamedTuple):
    """A score of one unit at one place of the axis, or a part of it: the score is Σ total / Σ
    weight over the parts.

    pooled: the name of the stratum, such as a contig or a class, in which units are pooled by their
    weights, so that one with few bases counts little; None: units weigh equally.
    """

    point: Place
    unit: str
    column: str
    total: float
    weight: float = 1.0
    pooled: str | None = None


Comparison = tuple[np.ndarray, np.ndarray, float]
Ratio = dict[
    str, tuple[float, float]
]  # of a pooled unit: stratum → what it adds to numerator and denominator
ScoresByUnit = dict[
    tuple[Place, str], dict[str, float | Ratio]
]  # (place, column of the score) → unit → score


def scores_by_unit(observed: Iterable[Observed]) -> ScoresByUnit:
    """The score of each unit, of a pooled one what it is made of; a unit of weight 0 has none."""
    sums: dict[tuple[Place, str], dict[str, dict[str | None, tuple[float, float]]]] = {}
    for one in observed:
        strata = sums.setdefault((one.point, one.column), {}).setdefault(one.unit, {})
        total, weight = strata.get(one.pooled, (0.0, 0.0))
        strata[one.pooled] = total + one.total, weight + one.weight
    table: ScoresByUnit = {}
    for key, units in sums.items():
        scores = table.setdefault(key, {})
        for unit, strata in units.items():
            weighty = {stratum: pair for stratum, pair in strata.items() if pair[1]}
            if None in weighty:
                scores[unit] = weighty[None][0] / weighty[None][1]
            elif weighty:
                scores[unit] = {str(stratum): pair for stratum, pair in weighty.items()}
    return table


def paired_rows(
    model: Sequence[ScoresByUnit], against: Sequence[ScoresByUnit], axis: str = "point"
) -> list[Row]:
    """The seeds of one model minus those of another: a row for each score and place that all have,
    places in column `axis`.

    d_u is the difference at unit u between means over a side's seeds, for the n units that all
    seeds of both have. Columns: `units` = n; `value` and `against_value`, means over units;
    `difference` = mean d_u with its two-sided 95% interval `low` to `high`, mean ± t(0.975, n
    − 1)·s_d/√n, NaN where s_d is 0 or n is 1; `lower_in`, the share of units with d_u < 0; `seeds`
    and `seed_deviation` of each side: the sample standard deviation of its seeds' means, NaN for
    one seed. The interval says nothing of other seeds.

    Pooled units: a seed's mean is that over its strata of R_h = Σ total / Σ weight of all units in
    stratum h, and the interval that of the linearised ratios. With g_u = Σ_h (total_uh
    − R_h·weight_uh) / (H Σ_v weight_vh), a mean over a side's seeds less that of the other side, it
    is ± t(0.975, n − S)·√(Σ_s n_s/(n_s − 1) Σ_{u∈s} g_u²) over S samples of n_s units: the strata,
    or all units together where some are in several strata. A sample of one unit takes the mean
    variance of the others.
    """
    sides = [*model, *against]
    rows = []
    shared = [key for key in sides[0] if all(key in side for side in sides)]
    columns = list(dict.fromkeys(column for _, column in shared))
    for point, column in sorted(
        shared, key=lambda key: columns.index(key[1])
    ):  # stable: places stay in order
        tables = [side[point, column] for side in sides]
        units = [unit for unit in tables[0] if all(unit in table for table in tables)]
        if not units:
            continue
        compare: Callable[..., Comparison] = (
            _pooled if isinstance(tables[0][units[0]], dict) else _equal
        )
        scores, means, half = compare(
            [[table[unit] for unit in units] for table in tables], len(model)
        )
        gap = scores[: len(model)].mean(0) - scores[len(model) :].mean(0)
        both = means[: len(model)], means[len(model) :]
        values = [float(side.mean()) for side in both]
        middle = float(both[0].mean() - both[1].mean())
        row: Row = {
            "score": column,
            axis: point,
            "units": len(units),
            "value": values[0],
            "against_value": values[1],
        }
        row |= {
            "difference": middle,
            "low": middle - half,
            "high": middle + half,
            "lower_in": float((gap < 0).mean()),
        }
        for name, side in zip(("", "against_"), both, strict=True):
            row[f"{name}seeds"] = len(side)
            row[f"{name}seed_deviation"] = (
                statistics.stdev(side.tolist()) if len(side) > 1 else math.nan
            )
        rows.append(row)
    return rows


def _equal(units: list[list[float]], first: int) -> Comparison:
    """Scores of units (seeds of both, units), their means, and half the interval of the `first`
    rows minus the others."""
    scores = np.array(units)
    gap = scores[:first].mean(0) - scores[first:].mean(0)
    half = math.nan
    if np.ptp(gap) > 0:  # where all units differ alike, nothing tells how others would
        half = t_quantile(0.95, gap.size - 1) * float(gap.std(ddof=1)) / math.sqrt(gap.size)
    return scores, scores.mean(1), half


def _pooled(units: list[list[Ratio]], first: int) -> Comparison:
    """As `_equal`, of `Ratio`s."""
    names = list(dict.fromkeys(name for row in units for unit in row for name in unit))
    pairs = np.array(
        [[[unit.get(name, (0.0, 0.0)) for name in names] for unit in row] for row in units]
    )
    # (seeds of both, units, strata)
    total = pairs[..., 0]
    weight = pairs[..., 1]
    held = weight.sum(1, keepdims=True)
    there = (held > 0).sum(2)  # strata that a side has
    ratio = _divided(total.sum(1, keepdims=True), held)
    residual = _divided(total - ratio * weight, held).sum(2) / there
    gap = residual[:first].mean(0) - residual[first:].mean(0)
    inside = (weight > 0).any(0)
    sample = np.zeros(len(gap), int) if (inside.sum(1) > 1).any() else inside.argmax(1)
    groups = [gap[sample == one] for one in np.unique(sample)]
    variances = [
        len(group) * float(group.var(ddof=1)) if len(group) > 1 else math.nan for group in groups
    ]
    of_one = [v * len(group) for v, group in zip(variances, groups, strict=True) if len(group) > 1]
    half = math.nan
    if of_one and max(of_one) > 0:
        error = math.sqrt(sum(float(np.mean(of_one)) if math.isnan(v) else v for v in variances))
        half = t_quantile(0.95, len(gap) - len(groups)) * error
    return (
        _divided(total, weight).sum(2) / (weight > 0).sum(2),
        ratio.sum(2)[:, 0] / there[:, 0],
        half,
    )


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0."""
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)


def t_quantile(share: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = `share` for Student's T of `degrees` degrees of freedom, by bisection to
    1e-12 of its angle."""
    # of θ = atan(t / √ν)
    low = 0.0
    high = math.pi / 2
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _t_share(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν tan θ): the finite series in cos θ of Abramowitz & Stegun 26.7.3 (ν odd) and
    26.7.4 (ν even)."""
    odd = degrees % 2
    cos2 = math.cos(angle) ** 2
    k = np.arange(1, (degrees - odd) // 2)
    ratios = (2 * k - 1 + odd) / (2 * k + odd)  # of one term to that before it, without cos²
    terms = float(1 + np.cumprod(ratios * cos2).sum()) if degrees > 1 else 0.0
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * terms)
    return math.sin(angle) * terms


def paired_tables(rows: Sequence[Row], name: str, units: str, axis: Axis) -> Iterator[Table]:
    """A table for each score: every model's difference at every place, its 95% interval, and how
    many units it is over."""
    seeds = any(max(row["seeds"], row["against_seeds"]) > 1 for row in rows)
    for score in dict.fromkeys(row["score"] for row in rows):
        over = f"95% interval over n {units}; lower: in what share of them"
        table = result_table(f"{name}: {score} minus that of {rows[0]['against']}, {over}")
        table.add_column(
            "model", overflow="fold", min_width=14
        )  # a terminal of 80 has room for all columns
        for column in [axis.column, "difference", "95% interval", "lower", "n"] + ["seeds"] * seeds:
            table.add_column(
                column, justify="right", no_wrap=column != axis.column, overflow="fold"
            )
        for row in (row for row in rows if row["score"] == score):
            interval = "–" if math.isnan(row["low"]) else f"{row['low']:+.4f} to {row['high']:+.4f}"
            shown = [
                axis.tick(row[axis.column]),
                f"{row['difference']:+.4f}",
                interval,
                f"{row['lower_in']:.0%}",
            ]
            shown += [str(row["units"])] + [f"{row['seeds']}, {row['against_seeds']}"] * seeds
            table.add_row(row["model"], *shown)
        yield table


def result_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
