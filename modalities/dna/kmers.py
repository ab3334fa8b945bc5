"""K-mers of known bases as numbers in base 4."""

from __future__ import annotations

import numpy as np

from modalities.dna.tokenizers import UNKNOWN


def contexts(windows: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every base of windows (B, T), both (B·T,) int64: the number whose last 2k bits are the k
    bases before it, k up to `order`, the nearest in the least significant digit; and how many known
    bases directly precede it."""
    unknown = windows >= UNKNOWN
    digits = np.where(unknown, 0, windows).astype(np.int64)
    codes = np.zeros_like(digits)
    for back in range(1, min(order, windows.shape[1] - 1) + 1):
        codes[:, back:] |= digits[:, :-back] << 2 * (back - 1)
    place = np.arange(windows.shape[1])
    since = np.maximum.accumulate(
        np.where(unknown, place + 1, 0), axis=1
    )  # start of the known bases up to here
    known = place - np.concatenate([np.zeros_like(since[:, :1]), since[:, :-1]], axis=1)
    return codes.reshape(-1), known.reshape(-1)


def kmers(codes: np.ndarray, size: int) -> np.ndarray:
    """Numbers, uint32, of the stretches of `size` ≤ 16 known bases in codes (N,), in order; first
    base most significant."""
    context, known = contexts(codes[None], size - 1)
    whole = (known >= size - 1) & (codes < UNKNOWN)
    return (context[whole] << 2 | codes[whole]).astype(np.uint32)
