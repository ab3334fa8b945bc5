"""Paired comparisons: two models unit by unit, where a unit is what a measurement's data varies by (documents, prompts)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Observed", "Ratio", "ScoresByUnit", "paired_rows", "scores_by_unit", "t_quantile"]


class Observed(NamedTuple):
    """A score of one unit at one place of the axis, or a part of it: the score is Σ total / Σ weight over the parts.

    pooled: the name of the stratum, such as a contig, in which units are pooled by their weights, so that one with few bases
    counts little; None: units weigh equally.
    """

    point: Any
    unit: str
    column: str
    total: float
    weight: float = 1.0
    pooled: str | None = None


class Ratio(NamedTuple):
    """What a pooled unit adds to the ratio of its stratum."""

    total: float
    weight: float
    stratum: str


# (place, column of the score) → unit → score; of pooled units, what the score is made of
ScoresByUnit = dict[tuple[Any, str], dict[str, float | Ratio]]


def scores_by_unit(observed: Iterable[Observed]) -> ScoresByUnit:
    """The score of each unit; a unit of weight 0 has none."""
    sums: dict[tuple[Any, str], dict[str, tuple[float, float, str | None]]] = {}
    for one in observed:
        units = sums.setdefault((one.point, one.column), {})
        total, weight, _ = units.get(one.unit, (0.0, 0.0, None))
        units[one.unit] = total + one.total, weight + one.weight, one.pooled
    return {
        key: {
            unit: total / weight if stratum is None else Ratio(total, weight, stratum)
            for unit, (total, weight, stratum) in units.items()
            if weight
        }
        for key, units in sums.items()
    }


def paired_rows(
    model: Sequence[ScoresByUnit], against: Sequence[ScoresByUnit], axis: str = "point"
) -> list[dict[str, Any]]:
    """The seeds of one model minus those of another: a row for each score and place that all have, places in column `axis`.

    Each side's score of a unit is the mean of its seeds; d_u is the difference at unit u, over the n units that all seeds of
    both have. Columns: `score`; `units` = n; `value` and `against_value`, means over these units; `difference` = mean d_u with
    its two-sided 95% interval `low` to `high`, mean ± t(0.975, n − 1)·s_d/√n, NaN where s_d is 0 or n is 1; `lower_in`, the
    share of the units with d_u < 0; `seeds`, `against_seeds`, and `seed_deviation`, `against_seed_deviation`: the sample
    standard deviation over a side's seeds of their means, NaN for one seed. The interval is of the units; it says
    nothing of other seeds.

    Pooled units: a seed's mean is that over strata of R_h = Σ total / Σ weight of the units in stratum h. With the residual
    z_u = (total_u − R_h·weight_u) / mean weight of h, a mean over a side's seeds, less that of the other side, the interval is
    that of the linearised ratios: ± t(0.975, n − H)·√(Σ_h s²_h / n_h) / H over H strata of n_h units. A stratum of one unit
    takes the mean s² of the others.
    """
    sides, rows = [*model, *against], []
    shared = [key for key in sides[0] if all(key in side for side in sides)]
    columns = list(dict.fromkeys(column for _, column in shared))
    for point, column in sorted(shared, key=lambda key: columns.index(key[1])):  # stable: places stay in order
        tables = [side[point, column] for side in sides]
        units = [unit for unit in tables[0] if all(unit in table for table in tables)]
        if not units:
            continue
        made = _pooled if isinstance(tables[0][units[0]], Ratio) else _equal
        scores, means, half = made([[table[unit] for unit in units] for table in tables], len(model))
        gap = scores[: len(model)].mean(0) - scores[len(model) :].mean(0)
        mine, theirs = means[: len(model)], means[len(model) :]
        middle = float(mine.mean() - theirs.mean())
        row = {"score": column, axis: point, "units": len(units)}
        row |= {"value": float(mine.mean()), "against_value": float(theirs.mean())}
        row |= {"difference": middle, "low": middle - half, "high": middle + half}
        row["lower_in"] = float((gap < 0).mean())
        for name, side in (("", mine), ("against_", theirs)):
            row[f"{name}seeds"] = len(side)
            row[f"{name}seed_deviation"] = statistics.stdev(side.tolist()) if len(side) > 1 else math.nan
        rows.append(row)
    return rows


def _equal(units: list[list[Any]], mine: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Scores of units (seeds of both, units), their means, and half the interval of the difference of the first `mine` rows."""
    scores = np.array(units)
    gap, half = scores[:mine].mean(0) - scores[mine:].mean(0), math.nan
    if np.ptp(gap) > 0:  # where all units differ alike, nothing tells how others would
        half = t_quantile(0.95, gap.size - 1) * float(gap.std(ddof=1)) / math.sqrt(gap.size)
    return scores, scores.mean(1), half


def _pooled(units: list[list[Any]], mine: int) -> tuple[np.ndarray, np.ndarray, float]:
    """As `_equal`, of `Ratio`s."""
    totals, weights = (np.array([[unit[k] for unit in row] for row in units]) for k in (0, 1))
    strata = np.array([unit.stratum for unit in units[0]])
    names = list(dict.fromkeys(strata.tolist()))
    ratios, variances, sizes = [], [], []
    for name in names:
        total, weight = totals[:, strata == name], weights[:, strata == name]
        ratio = total.sum(1) / weight.sum(1)
        residuals = (total - ratio[:, None] * weight) / weight.mean(1, keepdims=True)
        gap = residuals[:mine].mean(0) - residuals[mine:].mean(0)
        ratios.append(ratio)
        sizes.append(gap.size)
        variances.append(float(gap.var(ddof=1)) if gap.size > 1 else math.nan)
    half, degrees = math.nan, sum(sizes) - len(names)
    known = [value for value in variances if not math.isnan(value)]
    if known and max(known) > 0:
        spread = [float(np.mean(known)) if math.isnan(value) else value for value in variances]
        error = math.sqrt(sum(value / size for value, size in zip(spread, sizes, strict=True))) / len(names)
        half = t_quantile(0.95, degrees) * error
    return totals / weights, np.mean(ratios, axis=0), half


def t_quantile(share: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = `share` for Student's T of `degrees` degrees of freedom, by bisection to 1e-12 of its angle."""
    low, high = 0.0, math.pi / 2  # of θ = atan(t / √ν)
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_share(middle, degrees) < share else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def _t_share(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν tan θ): the finite series in cos θ of Abramowitz & Stegun 26.7.3 (ν odd) and 26.7.4 (ν even)."""
    odd, cos2 = degrees % 2, math.cos(angle) ** 2
    k = np.arange(1, (degrees - odd) // 2)
    ratios = (2 * k - 1 + odd) / (2 * k + odd)  # of one term to that before it, without cos²
    terms = float(1 + np.cumprod(ratios * cos2).sum()) if degrees > 1 else 0.0
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * terms)
    return math.sin(angle) * terms
