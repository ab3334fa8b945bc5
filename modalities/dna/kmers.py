"""K-mers of known bases as numbers in base 4, the first base the most significant digit.

The copy expert has words of its own (`modalities.dna.copying.words_at`): in base 5, so that a word
that ends early is a number too.
"""

from __future__ import annotations

import numpy as np

from modalities.dna.tokenizers import UNKNOWN


def contexts(windows: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every base of windows (B, T), both (B·T,) int64: the number whose last 2k bits are the k
    bases before it, k up to `order`, the nearest in the least significant digit; and how many known
    bases directly precede it."""
    unknown = windows >= UNKNOWN
    digits = np.where(unknown, 0, windows).astype(np.int64)
    numbers = np.zeros_like(digits)
    for back in range(1, min(order, windows.shape[1] - 1) + 1):
        numbers[:, back:] |= digits[:, :-back] << 2 * (back - 1)
    place = np.arange(windows.shape[1])
    # Where the run of known bases begins that goes on behind each place.
    start = np.maximum.accumulate(np.where(unknown, place + 1, 0), axis=1)
    start_before = np.concatenate([np.zeros_like(start[:, :1]), start[:, :-1]], axis=1)
    known = place - start_before
    return numbers.reshape(-1), known.reshape(-1)


def kmers(codes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The stretches of `size` ≤ 16 known bases in codes (N,): their numbers, uint32, in order, and
    (N,) bool, at which bases one ends."""
    context, known = contexts(codes[None], size - 1)
    ends = (known >= size - 1) & (codes < UNKNOWN)
    numbers = context[ends] << 2 | codes[ends]
    return numbers.astype(np.uint32), ends
