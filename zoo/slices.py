"""A range in parts, for what is computed a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["slices"]


def slices(count: int, size: int) -> Iterator[slice]:
    """[0, count) in slices of `size`, the last one shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
