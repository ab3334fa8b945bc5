"""Standard errors of means, and quantiles of Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of N values, from their sample deviation; NaN for N < 2."""
    if len(values) < 2:
        return math.nan
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def clustered_error(values: np.ndarray, groups: Sequence[str]) -> float:
    """Standard error of the mean of N values in G groups, whose values may be correlated.

    It is √(G/(G − 1) Σ_g (Σ_{n∈g} (x_n − x̄))²) / N; NaN for a single group.
    groups: the name of each value's group.
    """
    names, group_numbers = np.unique(groups, return_inverse=True)
    count = len(names)
    if count < 2:
        return math.nan
    sums = np.bincount(group_numbers, weights=values - values.mean())
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values)


def t_quantile(share: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = `share` for Student's T with ν = `degrees` degrees of freedom.

    Found by bisection over the angle θ = atan(t / √ν), to 1e-12.
    """
    low = 0.0
    high = math.pi / 2
    while high - low > 1e-12:
        middle = (low + high) / 2
        if _t_share(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _t_share(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν tan θ) for ν = `degrees`.

    A finite series in cos θ: Abramowitz & Stegun 26.7.3 (ν odd) and 26.7.4 (ν even).
    """
    odd = degrees % 2
    cos2 = math.cos(angle) ** 2
    k = np.arange(1, (degrees - odd) // 2)
    # Ratio of each term to the one before it, without its factor cos² θ.
    ratios = (2 * k - 1 + odd) / (2 * k + odd)
    # One degree of freedom has no series: P is 2θ/π.
    series = 0.0
    if degrees > 1:
        series = float(1 + np.cumprod(ratios * cos2).sum())
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)
    return math.sin(angle) * series
