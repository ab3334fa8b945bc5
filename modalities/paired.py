"""Paired comparisons: two models unit by unit, where a unit is what a measurement's data varies by
(documents, prompts)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from modalities.results import Row
from modalities.statistics import t_quantile

# On an evaluator's axis: a number or a name.
Place = Any


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


# Of a pooled unit: stratum → what it adds to numerator and denominator.
Ratio = dict[str, tuple[float, float]]
# (place, column of the score) → unit → score.
ScoresByUnit = dict[tuple[Place, str], dict[str, float | Ratio]]


class Comparison(NamedTuple):
    """Scores of units (seeds of both sides, units), the seeds' means, half the interval of the
    sides' difference."""

    scores: np.ndarray
    means: np.ndarray
    half: float


def scores_by_unit(observed: Iterable[Observed]) -> ScoresByUnit:
    """The score of each unit, of a pooled one what it is made of; a unit of weight 0 has none."""
    sums: dict[tuple[Place, str], dict[str, dict[str | None, tuple[float, float]]]] = {}
    for part in observed:
        units = sums.setdefault((part.point, part.column), {})
        strata = units.setdefault(part.unit, {})
        total, weight = strata.get(part.pooled, (0.0, 0.0))
        strata[part.pooled] = (total + part.total, weight + part.weight)
    table: ScoresByUnit = {}
    for key, units in sums.items():
        scores = table.setdefault(key, {})
        for unit, strata in units.items():
            weighty = {stratum: pair for stratum, pair in strata.items() if pair[1]}
            if None in weighty:
                total, weight = weighty[None]
                scores[unit] = total / weight
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
    one seed. That interval is over units and says nothing of other seeds: `seed_low` to `seed_high`
    is the 95% interval over seeds, difference ± t(0.975, ν)·√(s_a²/n_a + s_b²/n_b) of the seeds'
    means, with Welch's ν; a side of one seed adds nothing, and without a second seed it is NaN.

    Pooled units: a seed's mean is that over its strata of R_h = Σ total / Σ weight of all units in
    stratum h, and the interval that of the linearised ratios. With g_u = Σ_h (total_uh
    − R_h·weight_uh) / (H Σ_v weight_vh), a mean over a side's seeds less that of the other side, it
    is ± t(0.975, n − S)·√(Σ_s n_s/(n_s − 1) Σ_{u∈s} g_u²) over S samples of n_s units: the strata,
    or all units together where some are in several strata. A sample of one unit takes the mean
    variance of the others.
    """
    seeds = [*model, *against]
    keys = list(seeds[0])
    for seed in seeds[1:]:
        keys = [key for key in keys if key in seed]
    columns = list(dict.fromkeys(column for _, column in keys))
    # A stable sort: within a column places stay in order.
    keys.sort(key=lambda key: columns.index(key[1]))
    rows = []
    for place, column in keys:
        tables = [seed[place, column] for seed in seeds]
        units = list(tables[0])
        for table in tables[1:]:
            units = [unit for unit in units if unit in table]
        if units:
            measured = _compare(tables, units, len(model))
            rows.append({"score": column, axis: place, **measured})
    return rows


def _compare(tables: Sequence[Mapping[str, Any]], units: Sequence[str], first: int) -> Row:
    """The columns of one score at one place, of the `first` tables minus the others."""
    by_seed = []
    for table in tables:
        by_seed.append([table[unit] for unit in units])
    pooled = isinstance(by_seed[0][0], dict)
    comparison = _pooled(by_seed, first) if pooled else _equal(by_seed, first)
    gap = comparison.scores[:first].mean(0) - comparison.scores[first:].mean(0)
    means = comparison.means[:first]
    against_means = comparison.means[first:]
    difference = float(means.mean() - against_means.mean())
    seed_half = _seed_half_interval([means, against_means])
    return {
        "units": len(units),
        "value": float(means.mean()),
        "against_value": float(against_means.mean()),
        "difference": difference,
        "low": difference - comparison.half,
        "high": difference + comparison.half,
        "lower_in": float((gap < 0).mean()),
        "seeds": len(means),
        "seed_deviation": _deviation(means),
        "against_seeds": len(against_means),
        "against_seed_deviation": _deviation(against_means),
        "seed_low": difference - seed_half,
        "seed_high": difference + seed_half,
    }


def _seed_half_interval(sides: Sequence[np.ndarray]) -> float:
    """Half of Welch's 95% interval of a difference of means over seeds; NaN where none varies."""
    errors = []
    for means in sides:
        if len(means) > 1:
            errors.append((float(means.var(ddof=1)) / len(means), len(means) - 1))
    variance = sum(error for error, _ in errors)
    if not variance:
        return math.nan
    degrees = variance**2 / sum(error**2 / freedom for error, freedom in errors)
    # Whole degrees, and never more than there are.
    return t_quantile(0.95, max(1, int(degrees + 1e-9))) * math.sqrt(variance)


def _deviation(means: np.ndarray) -> float:
    return statistics.stdev(means.tolist()) if len(means) > 1 else math.nan


def _equal(units: list[list[float]], first: int) -> Comparison:
    """Of units that weigh equally: (seeds of both sides, units), the `first` rows minus the
    others."""
    scores = np.array(units)
    gap = scores[:first].mean(0) - scores[first:].mean(0)
    half = math.nan
    # Where all units differ alike, nothing tells how others would.
    if np.ptp(gap) > 0:
        quantile = t_quantile(0.95, gap.size - 1)
        half = quantile * float(gap.std(ddof=1)) / math.sqrt(gap.size)
    return Comparison(scores, scores.mean(1), half)


def _pooled(units: list[list[Ratio]], first: int) -> Comparison:
    """As `_equal`, of `Ratio`s."""
    total, weight = _totals_and_weights(units)
    side_weight = weight.sum(1, keepdims=True)
    num_strata = (side_weight > 0).sum(2)
    ratio = _divided(total.sum(1, keepdims=True), side_weight)
    residual = _divided(total - ratio * weight, side_weight).sum(2) / num_strata
    gap = residual[:first].mean(0) - residual[first:].mean(0)
    in_stratum = np.any(weight > 0, axis=0)
    return Comparison(
        _divided(total, weight).sum(2) / (weight > 0).sum(2),
        ratio.sum(2)[:, 0] / num_strata[:, 0],
        _half_interval(gap, in_stratum),
    )


def _totals_and_weights(units: list[list[Ratio]]) -> tuple[np.ndarray, np.ndarray]:
    """(seeds of both sides, units, strata) each; 0 where a unit is not in a stratum."""
    columns: dict[str, int] = {}
    for row in units:
        for unit in row:
            for stratum in unit:
                columns.setdefault(stratum, len(columns))
    total = np.zeros((len(units), len(units[0]), len(columns)))
    weight = np.zeros_like(total)
    for n, row in enumerate(units):
        for u, unit in enumerate(row):
            for stratum, pair in unit.items():
                place = (n, u, columns[stratum])
                total[place], weight[place] = pair
    return total, weight


def _half_interval(gap: np.ndarray, in_stratum: np.ndarray) -> float:
    """Half the 95% interval of Σ gap, of gaps (units,) whose samples are the strata; NaN where no
    sample varies. in_stratum: (units, strata) bool."""
    stratum = in_stratum.argmax(1)
    if (in_stratum.sum(1) > 1).any():
        # Some units are in several strata: all are one sample.
        stratum = np.zeros(len(gap), int)
    samples = [gap[stratum == number] for number in np.unique(stratum)]
    variances = []
    unit_variances = []
    for sample in samples:
        variance = math.nan
        if len(sample) > 1:
            variance = len(sample) * float(sample.var(ddof=1))
            unit_variances.append(variance * len(sample))
        variances.append(variance)
    if not unit_variances or max(unit_variances) <= 0:
        return math.nan
    # A sample of one unit takes the mean variance of the others.
    mean_variance = float(np.mean(unit_variances))
    error = math.sqrt(sum(mean_variance if math.isnan(v) else v for v in variances))
    return t_quantile(0.95, len(gap) - len(samples)) * error


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0."""
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)
