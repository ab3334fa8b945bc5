"""A context mixer for DNA, the classical kind of model that a learned one is measured against: counters and a few weights.

    p(x) ∝ exp Σ_i w_i log p_i(x),    p_i(x) = (n_i(c_i x) + a_i) / (n_i(c_i) + 4 a_i),    c_i the last k_i bases

n_i counts c_i x on both strands. Nothing is fitted but the weights w, and those go on learning as a window is read.
"""

from __future__ import annotations

import numpy as np

ORDERS = (1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 14, 16, 18, 20, 22, 24)
RECENT = (2, 4, 8, 11, 12, 16, 24)  # orders that also count inside the window alone
LONGEST = 8192  # bases of a window; with a word of 25 bases its place then fits into 64 bits
TAUGHT = 786_432  # bases of the training rows that teach the weights, too
LEARNING, RATE = 2e-4, 2e-3  # of the weights: while training windows teach them together, and in a window read alone


def words(codes: np.ndarray, size: int) -> np.ndarray:
    """Numbers (N, T − size + 1) uint64 of the stretches of `size` bases in codes (N, T), the first base most significant."""
    found = np.zeros((len(codes), codes.shape[1] - size + 1), np.uint64)
    for k in range(size):
        found = found << np.uint64(2) | codes[:, k : k + found.shape[1]].astype(np.uint64)
    return found


def turned(codes: np.ndarray) -> np.ndarray:
    """Reverse complements of codes (N, T)."""
    return 3 - codes[:, ::-1]


def followers(codes: np.ndarray, order: int) -> np.ndarray:
    """(N, T − order, 4): the word of each place's context and each base that may follow it."""
    return (words(codes[:, :-1], order) << np.uint64(2))[..., None] | np.arange(4, dtype=np.uint64)


def inside(codes: np.ndarray, order: int, *, whole: bool = False) -> np.ndarray:
    """(N, T − order, 4): how often each follower's word was read in the window so far, on either strand; whole: in all."""
    asked_for, place = followers(codes, order), np.arange(codes.shape[1] - order, dtype=np.uint64)
    bits, found = np.uint64(13), np.zeros(asked_for.shape, np.int32)
    upto = np.full_like(place, LONGEST - 1) if whole else place
    for n, (forth, back) in enumerate(zip(words(codes, order + 1), words(turned(codes), order + 1), strict=True)):
        seen = np.sort(np.concatenate([forth << bits | place, back[::-1] << bits | place]))
        first = asked_for[n] << bits
        found[n] = np.searchsorted(seen, first | upto[:, None]) - np.searchsorted(seen, first)
    return found


def counted(rows: np.ndarray, windows: np.ndarray, order: int) -> np.ndarray:
    """(N, T − order, 4): how often each follower's word of windows is in rows, on either strand."""
    table = np.sort(np.concatenate([words(rows, order + 1).ravel(), words(turned(rows), order + 1).ravel()]))
    wanted, back = np.unique(followers(windows, order), return_inverse=True)
    counts = np.searchsorted(table, wanted, side="right") - np.searchsorted(table, wanted)
    return counts.astype(np.int32)[back].reshape(*windows.shape[:1], -1, 4)


class Mixer:
    """Counters of ORDERS, of the training rows and of what the window has said so far, and of RECENT, of the latter alone.

    Each set of weights serves one longest context that was seen before. Counts and weights go back to what training left
    after every window, so that nothing crosses windows.
    """

    def __init__(self, rows: np.ndarray) -> None:
        """rows (N, T) codes of known bases: what is counted. TAUGHT of these bases teach the weights, without their own
        row's counts."""
        self.rows, experts, learn = rows, len(ORDERS) + len(RECENT), TAUGHT // rows.shape[1]
        self.weights = np.full((len(ORDERS) + 1, experts), 2 / experts, np.float32)
        taught = self._opinions(rows[:learn], own=True)
        for _ in range(2):
            self._mix(rows[:learn], *taught, learning=True)

    def bits(self, windows: np.ndarray) -> np.ndarray:
        """(N, T) bits of every base of windows of codes."""
        return self._mix(windows, *self._opinions(windows), learning=False)

    def _mix(self, windows: np.ndarray, logs: np.ndarray, longest: np.ndarray, *, learning: bool) -> np.ndarray:
        """(N, T) bits; learning: all windows share one set of weights, which stays."""
        each, cost = np.arange(len(windows)), np.zeros(windows.shape)
        weights = self.weights if learning else np.repeat(self.weights[None], len(windows), 0)
        for t, (log_p, chosen) in enumerate(zip(logs, longest, strict=True)):
            true, at = windows[:, t], (chosen,) if learning else (each, chosen)
            score = (weights[at][:, None] @ log_p)[:, 0]
            p = np.exp(score - score.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            cost[:, t] = -np.log2(p[each, true])
            gain = log_p[each, :, true] - (log_p @ p[..., None])[..., 0]
            np.add.at(weights, at, (LEARNING if learning else RATE) * gain)
        return cost

    def _opinions(self, windows: np.ndarray, *, own: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Centred log p (T, N, experts, 4) float32, and the number of the longest context seen (T, N)."""
        many, length = windows.shape
        logs = np.zeros((length, many, self.weights.shape[1], 4), np.float32)
        longest = np.zeros((length, many), np.int64)
        for i, order in enumerate(ORDERS):
            recent = inside(windows, order)
            counts = counted(self.rows, windows, order) + recent - (inside(windows, order, whole=True) if own else 0)
            pairs = [(i, counts, 1.0 if order < 12 else 1 / 16)]
            if order in RECENT:
                pairs.append((len(ORDERS) + RECENT.index(order), recent, 1.0 if order < 8 else 1 / 16))
            for place, n, a in pairs:
                log = np.log(n + a)
                logs[order:, :, place] = np.swapaxes(log - log.mean(-1, keepdims=True), 0, 1)
            longest[order:][counts.sum(-1).T > 0] = i + 1
        return logs, longest
