"""Pairwise tables of test cases: every value of an axis meets every value of every other axis once or more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def pairs(*axes: Sequence[T]) -> list[tuple[T, ...]]:
    """Cases with a value of each axis that together hold each pair of values of two axes; greedy and deterministic.

    Three axes of 8, 4 and 2 values take 32 cases where their product has 64.
    """
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(axes)), 2)
        for a in range(len(axes[i]))
        for b in range(len(axes[j]))
    }
    candidates = list(product(*(range(len(axis)) for axis in axes)))
    cases = []
    while missing:
        case = max(
            candidates, key=lambda c: sum((i, c[i], j, c[j]) in missing for i, j in combinations(range(len(c)), 2))
        )
        missing -= {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}
        cases.append(tuple(axis[k] for axis, k in zip(axes, case, strict=True)))
    return cases
