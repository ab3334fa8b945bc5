"""Held-out data: the part of a source excluded from training, with the name and hash that stored results refer to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Heldout", "fingerprint_of"]

T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Heldout(Generic[T]):
    """The held-out part of a source.

    Attributes:
        name: in tables and files, such as "genomes" or "all of folder:photos".
        fingerprint: 16 hex digits; equal ones mean equal content. Stored cells are keyed by it.
        items: the data itself: documents, images, or a genome with its held-out regions.
    """

    name: str
    fingerprint: str
    items: T


def fingerprint_of(parts: Iterable[bytes]) -> str:
    """16 hex digits of SHA-256 over all parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
