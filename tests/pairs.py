"""Pairwise tables of test cases: every value of an axis meets every value of every other axis once
or more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def pairs(*axes: Sequence[T]) -> list[tuple[T, ...]]:
    """Cases with a value of each axis that together hold each pair of values of two axes; greedy
    and deterministic.

    Three axes of 8, 4 and 2 values take 32 cases where their product has 64.
    """
    candidates = list(product(*(range(len(axis)) for axis in axes)))
    covered = {
        case: {(i, case[i], j, case[j]) for i, j in combinations(range(len(axes)), 2)}
        for case in candidates
    }
    missing = set().union(*covered.values())
    cases = []
    while missing:
        case = max(candidates, key=lambda candidate: len(covered[candidate] & missing))
        missing -= covered[case]
        cases.append(tuple(axis[k] for axis, k in zip(axes, case, strict=True)))
    return cases
