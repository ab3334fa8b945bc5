"""The context mixer that DNA models are measured against: what it counts, and that it does not look ahead."""

from __future__ import annotations

import numpy as np
import pytest

from tools import context_mixing
from tools.context_mixing import Mixer, counted, inside, turned


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 4, shape).astype(np.uint8)


def found(sequence: np.ndarray, word: np.ndarray) -> int:
    """How often a word stands in a sequence (T,), on either strand."""
    strands = sequence.tobytes(), turned(sequence[None])[0].tobytes()
    places = range(len(sequence) - len(word) + 1)
    return sum(strand[at : at + len(word)] == word.tobytes() for strand in strands for at in places)


@pytest.mark.parametrize("order", [1, 4, 12, 24])
def test_counts_are_those_of_a_plain_search(order: int) -> None:
    windows, rows = draw(2, 120), draw(3, 100)
    windows[:, 60:90], windows[:, 90:120] = windows[:, :30], turned(windows[:, 10:40])
    rows[0, :50] = windows[0, 20:70]
    so_far, whole, trained = inside(windows, order), inside(windows, order, whole=True), counted(rows, windows, order)
    for n, window in enumerate(windows):
        for place in range(order, 120, 7):
            for base in range(4):
                word = np.append(window[place - order : place], np.uint8(base))
                at = n, place - order, base
                assert so_far[at] == found(window[:place], word)
                assert whole[at] == found(window, word)
                assert trained[at] == sum(found(row, word) for row in rows)


def test_noise_costs_two_bits_and_what_follows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_mixing, "TAUGHT", 40 * 256)
    mixer, windows = Mixer(draw(200, 256)), draw(8, 256)
    bits, others = mixer.bits(windows), windows.copy()
    others[:, 150:] = draw(8, 106)
    assert 1.98 < bits.mean() < 2.05
    np.testing.assert_array_equal(bits[:, :150], mixer.bits(others)[:, :150])
    repeated = np.concatenate([windows[:, :128], turned(windows[:, :128])], axis=1)
    assert mixer.bits(repeated)[:, 160:].mean() < 0.7  # the other strand of what was read
